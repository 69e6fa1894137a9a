//! Captured workloads when the agent cannot read, find or attach something.

use std::{
    collections::BTreeSet, fs, os::unix::fs::MetadataExt as _, path::Path, thread, time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::Agent;
use serde_json::{Value, json};

use super::{World, mesh, pod};
use crate::{
    cluster::{ask, eventually, lived, reaches, refused},
    deaths,
    metrics::Metrics,
    outcome::{http, run},
};

scenarios! {
    Dataplane:
    a_thread_of_the_proxy_that_dies_ends_the_agent_with_an_error,
    what_cannot_be_read_stays_captured,
    one_that_cannot_be_attached_holds_up_no_other,
    what_cannot_be_set_is_an_error,
    a_proxy_that_the_programs_do_not_see_is_an_error,
    no_thread_is_in_the_namespace_of_a_pod,
}

/// Longer than the agent's pause before it looks again, when there is a problem.
pub(super) const LOOKS: Duration = Duration::from_secs(4);

/// Gives a process so many more open files than it has; `None`: as many as it may have.
pub(super) fn free_files(agent: &Agent, free: Option<usize>) -> Result<()> {
    let soft = match free {
        None => hard_limit(agent)?,
        Some(free) => {
            let mut open = BTreeSet::new();
            for entry in fs::read_dir(format!("/proc/{}/fd", agent.id()))? {
                open.insert(entry?.file_name().to_string_lossy().parse::<usize>()?);
            }
            let mut unused = (0..).filter(|number| !open.contains(number));
            let first_refused = unused.nth(free).context("a number")?;
            first_refused.to_string()
        }
    };
    agent
        .node()
        .command("prlimit")
        .args(["--pid", &agent.id().to_string()])
        .arg(format!("--nofile={soft}:"))
        .run()?;
    Ok(())
}

fn hard_limit(agent: &Agent) -> Result<String> {
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.id()))?;
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let hard = line.and_then(|line| line.split_whitespace().nth(4));
    Ok(hard.context("a limit")?.to_owned())
}

/// Has the agent look at the network again.
pub(super) fn disturb(world: &World, number: u32) -> Result<()> {
    let node = world.lab.node("node1");
    Ok(node.ip(&format!(
        "link add disturb{number} type veth peer name disturbed{number}"
    ))?)
}

pub(super) fn status(world: &World) -> Result<Value> {
    let output = world
        .agent()?
        .dataplane(["status", "-o", "json"])
        .output()?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Everything that `status` complains of.
fn complaints(world: &World) -> Result<String> {
    Ok(status(world)?["findings"].to_string())
}

fn what_cannot_be_read_stays_captured() -> Result<()> {
    // An unknown host.
    const STRANGER: &str = "192.0.2.1:80";
    for captured_by in ["sockets", "packets"] {
        let mut world = World::new()?;
        let names = ["app", "one", "two"];
        let workloads: Vec<Value> = names
            .iter()
            .map(|name| {
                let addresses = world.lab.pod(name).addresses();
                json!({ "name": format!("default/{name}"), "addresses": addresses })
            })
            .collect();
        let rules = json!({ "mode": "proxy", "egress": "deny", "capturedBy": captured_by });
        let config = json!({ "rules": rules, "workloads": workloads });
        world.agent_with(&config, &[])?;
        let denied = |world: &World| {
            names
                .iter()
                .try_for_each(|name| refused(world.lab.pod(name), STRANGER, "connect"))
        };
        denied(&world)?;
        let app = world.app().clone();
        let held = app.hold("10.244.2.5:7")?;
        // Two files: enough to list processes and to look at the first of the pods. None: not even that.
        for (number, free) in [(1, 2), (2, 1), (3, 0)] {
            free_files(world.agent()?, Some(free))?;
            disturb(&world, number)?;
            thread::sleep(LOOKS);
            denied(&world).with_context(|| format!("{captured_by}, with {free} files"))?;
        }
        free_files(world.agent()?, None)?;
        disturb(&world, 4)?;
        eventually(|| {
            let said = complaints(&world)?;
            ensure!(!said.contains("Too many open files"), "{said}");
            Ok(())
        })?;
        let log = world.agent()?.log();
        ensure!(!log.contains("released"), "{captured_by}: {log}");
        ensure!(
            log.contains("ERROR mesh: ") && log.contains("Too many open files"),
            "{captured_by}: {log}"
        );
        lived(held).context(captured_by)?;
        reaches(&app, "10.244.2.5:7", "connect --count 3", &["far"])?;
        denied(&world)?;
    }
    Ok(())
}

/// `one` cannot be attached, `app` can, and `gone` is nowhere.
fn one_that_cannot_be_attached_holds_up_no_other() -> Result<()> {
    let mut world = World::new()?;
    let workload = |name: &str, address: &str| {
        json!({
            "name": format!("default/{name}"),
            "addresses": [address],
            "rules": { "mode": "proxy", "egress": "deny" },
        })
    };
    let all = [
        ("one", "10.244.1.5"),
        ("app", "10.244.1.8"),
        ("gone", "192.0.2.7"),
    ];
    let all: Vec<Value> = all.map(|(name, addr)| workload(name, addr)).to_vec();
    let mut config = json!({ "workloads": all });
    config["workloads"]
        .as_array_mut()
        .context("a list")?
        .push(json!({ "name": "node/none", "cgroup": "/there/is/none" }));
    world.agent_with(&config, &[])?;
    let found = status(&world)?;
    let place = found["mesh"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|row| row["name"] == "default/one")
        .and_then(|row| row["place"].as_str()?.strip_prefix("netns "))
        .with_context(|| format!("{found:#}"))?
        .to_owned();
    // Another object is in the place of its program's pin.
    let agent = world.agent.as_mut().context("an agent")?;
    agent.kill();
    let links = agent.bpffs().join(format!("v{LAYOUT}/links"));
    let pin = pinned(&links, &place)?;
    fs::remove_file(&pin)?;
    fs::create_dir(&pin)?;
    // Not healthy, and so never what `start` waits for.
    agent.launch()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    eventually(|| {
        let said = complaints(&world)?;
        for word in [
            "default/one",
            "cannot pin",
            "default/gone",
            "192.0.2.7",
            "egress: deny",
            "node/none",
        ] {
            ensure!(said.contains(word), "no {word} in {said}");
        }
        Ok(())
    })?;
    // Its own connections are still decided on, and the other has all that it should.
    refused(&one, "10.244.1.6:7", "connect")?;
    refused(&app, "10.244.1.6:7", "connect")?;
    let (_, counted) = world.counted(Reason::Captured, || {
        reaches(&app, "10.96.0.10:80", "connect --count 3", &["far"])
    })?;
    ensure!(counted == 3, "{counted} of 3");
    let (_, counted) = world.counted(Reason::CapturedInbound, || {
        reaches(world.lab.pod("two"), "10.244.1.8:7", "connect", &["app"])
    })?;
    ensure!(counted == 1, "{counted} of 1");
    let metrics = Metrics::scrape(world.lab.node("node1"))?;
    for (name, wanted) in [("one", 1.0), ("app", 0.0), ("gone", 1.0)] {
        let labels = [("namespace", "default"), ("workload", name)];
        let failed = metrics.sum("dataplane_mesh_workload_problem", &labels);
        ensure!((failed - wanted).abs() < 0.5, "{name}: {failed}");
    }
    // The kernel's refusal is an error of the node; an address that no host has is not.
    let found = status(&world)?;
    for (name, wanted) in [("default/one", "error"), ("default/gone", "warning")] {
        let all = found["findings"].as_array().into_iter().flatten();
        let mut of = all.filter(|f| f["text"].as_str().is_some_and(|text| text.contains(name)));
        ensure!(
            of.next()
                .is_some_and(|finding| finding["severity"] == wanted),
            "{found:#}"
        );
    }
    ensure!(found["healthy"] == false, "{found:#}");
    fs::remove_dir(&pin)?;
    eventually(|| {
        let said = complaints(&world)?;
        ensure!(!said.contains("default/one"), "{said}");
        Ok(())
    })
}

/// In a container that is not privileged, without the mount that the component `mesh` adds: captured connections are
/// refused, and the agent is unhealthy and not ready.
fn what_cannot_be_set_is_an_error() -> Result<()> {
    let world = World::new()?;
    let (app, one) = (world.app().clone(), world.lab.pod("one").clone());
    let agent = |keep_source: bool| {
        let mesh = mesh(
            json!({ "keepSource": keep_source }),
            json!({ "mode": "proxy" }),
        );
        let agent = world.lab.agent("node1").in_the_nodes_cgroup();
        let agent = agent.manifests(world.manifests.path());
        let agent = agent.args(["--mesh", &mesh.to_string()]);
        agent.read_only_settings().prepare()
    };
    let mut without = agent(true)?;
    without.launch()?;
    let words = [
        "error: mesh: default/app: ",
        "/proc/sys/net/ipv4/tcp_fwmark_accept: Read-only",
        "component `mesh`",
        "mesh.proxy.keepSource to false",
    ];
    eventually(|| run(&without, "status")?.exits(1)?.says(&words).map(drop))?;
    let report = run(&without, "status -o json")?.exits(1)?.json()?;
    let mut findings = report["findings"].as_array().into_iter().flatten();
    let is_error = |finding: &Value| {
        let text = finding["text"].as_str().unwrap_or_default();
        finding["severity"] == "error" && words[1..].iter().all(|word| text.contains(word))
    };
    ensure!(
        report["healthy"] == false && findings.any(is_error),
        "{report:#}"
    );
    refused(&app, "10.244.1.5:7", "connect")?;
    let node = world.lab.node("node1");
    let ready = || http(&one, &format!("http://{}:15021/healthz/ready", node.ipv4()));
    let (status, body) = ready()?;
    ensure!(
        status == 503 && body.contains("tcp_fwmark_accept"),
        "{status} {body}"
    );
    let metrics = Metrics::scrape(node)?;
    let of_app = [("workload", "app"), ("cause", "node")];
    ensure!(
        metrics.sum("dataplane_mesh_workload_problem", &of_app) > 0.5
            && metrics.sum("dataplane_problems", &[]) > 0.5
            && metrics.sum("dataplane_ready", &[]) < 0.5,
        "{:?}",
        metrics.samples()
    );
    drop(without);
    // The way out that it names.
    let mut with = agent(false)?;
    with.start()?;
    reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])?;
    reaches(&one, "10.244.1.8:7", "connect --count 3", &["app"])?;
    let (status, body) = ready()?;
    ensure!(status == 200, "{status} {body}");
    Ok(())
}

/// An agent outside of the cgroup that it serves: its proxy gets no original destination from the kernel, so all
/// connections of workloads are reset.
fn a_proxy_that_the_programs_do_not_see_is_an_error() -> Result<()> {
    let world = World::new()?;
    let app = world.app().clone();
    let agent = |inside: bool| {
        let mesh = mesh(json!({}), json!({ "mode": "proxy" }));
        let mut agent = world.lab.agent("node1");
        if inside {
            agent = agent.in_the_nodes_cgroup();
        }
        let agent = agent.manifests(world.manifests.path());
        agent.args(["--mesh", &mesh.to_string()]).prepare()
    };
    let mut outside = agent(false)?;
    outside.launch()?;
    let served = world.lab.node_cgroup("node1");
    let words = [
        "error: mesh: the agent's sockets are in the cgroup /",
        &format!("outside of kernel.cgroup, {}: ", served.display()),
        "LOOP in the access log",
        "DATAPLANE_CGROUP",
    ];
    eventually(|| run(&outside, "status")?.exits(1)?.says(&words).map(drop))?;
    let report = ask(&app, "10.244.1.5:7", "connect --count 3")?;
    ensure!(
        report.answered == 0 && report.errors.get("ECONNRESET") == Some(&3),
        "{report:?}"
    );
    let doctor = run(&outside, "doctor")?;
    doctor.says(&[
        "agent in the cgroup",
        "which is outside of",
        "DATAPLANE_CGROUP",
    ])?;
    drop(outside);
    let mut inside = agent(true)?;
    inside.start()?;
    reaches(&app, "10.244.1.5:7", "connect --count 3", &["one"])?;
    Ok(())
}

/// A thread keeps its namespace alive, and with it the pod's interfaces.
fn no_thread_is_in_the_namespace_of_a_pod() -> Result<()> {
    let mut world = World::new()?;
    let pods = world.state.path().join("pods.yaml");
    let write = |text: String| -> Result<()> {
        let new = pods.with_extension("new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, &pods)?)
    };
    write(pod("ambient", json!({})).to_string())?;
    let config = json!({ "rules": { "mode": "proxy" } });
    world.agent_with(&config, std::slice::from_ref(&pods))?;
    let namespace = fs::metadata(Path::new("/run/netns").join(world.app().netns()))?.ino();
    let inside = || -> Result<usize> {
        let tasks = fs::read_dir(format!("/proc/{}/task", world.agent()?.id()))?.flatten();
        let found = tasks.filter_map(|task| fs::metadata(task.path().join("ns/net")).ok());
        Ok(found.filter(|found| found.ino() == namespace).count())
    };
    reaches(world.app(), "10.244.1.5:7", "connect --count 20", &["one"])?;
    // It would keep the namespace, and with it the interfaces of a pod that has gone.
    ensure!(inside()? == 0, "a thread of the agent is there");
    Ok(())
}

/// The pin that ends with the namespace's cookie.
fn pinned(links: &Path, cookie: &str) -> Result<std::path::PathBuf> {
    let mut entries = fs::read_dir(links)?.flatten();
    let found = entries.find(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().ends_with(&format!("-{cookie}"))
    });
    Ok(found.context("a pin")?.path())
}

fn a_thread_of_the_proxy_that_dies_ends_the_agent_with_an_error() -> Result<()> {
    for thread in ["relay", "access-log"] {
        let mut world = World::new()?;
        world.capture(json!({}), json!({ "mode": "proxy" }))?;
        let app = world.app().clone();
        reaches(&app, "10.244.1.5:7", "connect --count 2", &["one"])?;
        let agent = world.agent.as_mut().context("an agent")?;
        deaths::ends(agent, thread, |_| {
            // The outcome of this connection is not known.
            app.probe("connect")
                .args(["--to", "10.244.1.5:7", "--timeout-ms", "500"])
                .output()?;
            Ok(())
        })?;
    }
    Ok(())
}
