//! The agent as the DaemonSet in `deploy/` runs it: with the capabilities that are written there,
//! and no others.

use std::{fs, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_tests::Agent;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, TCP, UDP, ask, eventually, reaches, serve},
    manifest::{Manifests, Service},
    metrics::Metrics,
    outcome::{cannot_run, run},
};

scenarios! {
    Dataplane:
    its_capabilities_are_enough,
    only_the_opener_has_sys_admin,
    without_bpf_and_perfmon_the_agent_keeps_sys_admin,
    an_opener_that_ends_ends_the_agent_with_an_error,
    bpf_and_perfmon_are_not_enough,
    it_can_set_what_a_mesh_needs,
    a_clean_up_job_leaves_its_mount,
}

const DAEMON_SET: &str = include_str!("../../../deploy/kustomize/base/daemonset.yaml");

const FOREIGN_PROXY: &str =
    include_str!("../../../deploy/kustomize/foreign-proxy/kustomization.yaml");

/// The capabilities that the DaemonSet adds after dropping all.
pub fn capabilities() -> Result<Vec<String>> {
    let object: Value = serde_saphyr::from_str(DAEMON_SET)?;
    let capabilities =
        &object["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"];
    ensure!(capabilities["drop"][0] == "ALL", "{capabilities:#}");
    let names = capabilities["add"].as_array().context("add")?;
    names
        .iter()
        .map(|name| Ok(name.as_str().context("a name")?.to_owned()))
        .collect()
}

/// The capabilities that kustomize's component `foreign-proxy` adds to these.
pub fn for_foreign_proxies() -> Result<Vec<String>> {
    let component: Value = serde_saphyr::from_str(FOREIGN_PROXY)?;
    let patch = component["patches"][0]["patch"]
        .as_str()
        .context("a patch")?;
    let changes: Vec<Value> = serde_saphyr::from_str(patch)?;
    let added = changes.iter().filter(|change| {
        let place = change["path"].as_str();
        place.is_some_and(|place| place.ends_with("/capabilities/add/-"))
    });
    added
        .map(|change| Ok(change["value"].as_str().context("a name")?.to_owned()))
        .collect()
}

fn web(lab: &dataplane_tests::Lab) -> Service {
    Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .port("udp", 53, UDP)
        .endpoints(&[lab.pod("far"), lab.pod("near")])
}

fn its_capabilities_are_enough() -> Result<()> {
    let lab = Cluster::lab()?;
    let _servers = [serve(lab.pod("far"))?, serve(lab.pod("near"))?];
    let manifests = Manifests::new(&[web(&lab)])?;
    let mut agent = lab
        .agent("node2")
        .manifests(manifests.path())
        .capabilities(&capabilities()?)
        .start()?;
    let client = lab.pod("sleep");
    let works = |agent: &Agent| -> Result<()> {
        reaches(
            client,
            "10.96.0.10:80",
            "connect --count 20",
            &["far", "near"],
        )?;
        ask(client, "10.96.0.10:53", "udp --count 5")?;
        for command in ["status", "services", "explain node 10.96.0.10:80"] {
            run(agent, command)?.exits(0)?;
        }
        Ok(())
    };
    works(&agent)?;
    // A socket in another network namespace, connected to an endpoint that is removed.
    let near = |pods: &[&str]| {
        let service = Service::new("near", &["10.96.0.11"]).port("udp", 53, UDP);
        let pods: Vec<_> = pods.iter().map(|pod| lab.pod(pod)).collect();
        service.endpoints(&pods)
    };
    manifests.write(&[web(&lab), near(&["near"])])?;
    eventually(|| reaches(client, "10.96.0.11:53", "udp", &["near"]).map(drop))?;
    let resolver = client.probe("udp").args([
        "--one-socket",
        "--until-stdin-closes",
        "--to",
        "10.96.0.11:53",
    ]);
    let mut resolver = resolver.stdin_piped().stdout_piped().spawn()?;
    resolver.wait_for_line()?;
    manifests.write(&[web(&lab), near(&["far"])])?;
    eventually(|| {
        let metrics = Metrics::scrape(lab.node("node2"))?;
        let destroyed = metrics.sum("dataplane_sockets_destroyed_total", &[("protocol", "udp")]);
        ensure!(destroyed > 0.5, "no socket was destroyed");
        Ok(())
    })?;
    drop(resolver);
    // More than the tables have room for: they grow.
    let mut many: Vec<Service> = (0..1500)
        .map(|n| {
            Service::new(
                &format!("s{n}"),
                &[&format!("10.97.{}.{}", n / 250, n % 250 + 1)],
            )
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("near")])
        })
        .collect();
    many.push(web(&lab));
    manifests.write(&many)?;
    eventually(|| reaches(client, "10.97.5.250:80", "connect --count 2", &["near"]).map(drop))?;
    // The next agent adopts this one's pins.
    agent.stop()?;
    reaches(
        client,
        "10.96.0.10:80",
        "connect --count 20",
        &["far", "near"],
    )?;
    agent.start()?;
    works(&agent)
}

/// The number of CAP_SYS_ADMIN in `include/uapi/linux/capability.h`.
const SYS_ADMIN: u64 = 1 << 21;

/// Sets of capabilities of a thread, and the value of another line of its status.
fn set(status: &str, line: &str) -> Result<u64> {
    let value = status.lines().find_map(|text| text.strip_prefix(line));
    let value = value.with_context(|| format!("no {line} in {status}"))?;
    Ok(u64::from_str_radix(value.trim(), 16)?)
}

/// The process that an agent has started.
fn opener(agent: &Agent) -> Result<u32> {
    let parent = format!("PPid:\t{}", agent.id());
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
        if status.lines().any(|line| line == parent) {
            return Ok(process.file_name().to_string_lossy().parse()?);
        }
    }
    bail!("the agent has no opener")
}

/// Whether a thread of a process has CAP_SYS_ADMIN, or may get it by a program that it becomes.
fn has_sys_admin(process: u32) -> Result<bool> {
    let mut has = false;
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        // A thread that has ended has none.
        let Ok(status) = fs::read_to_string(thread?.path().join("status")) else {
            continue;
        };
        for sets in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            has |= set(&status, sets)? & SYS_ADMIN != 0;
        }
        ensure!(set(&status, "NoNewPrivs:")? == 1, "{status}");
    }
    Ok(has)
}

/// With a mesh, whose proxy makes connections in other namespaces; as in the DaemonSet, and as root.
fn only_the_opener_has_sys_admin() -> Result<()> {
    for given in [Some(capabilities()?), None] {
        let lab = Cluster::lab()?;
        let servers = ["far", "near"].map(|name| serve(lab.pod(name)));
        let _servers: Vec<_> = servers.into_iter().collect::<Result<_>>()?;
        let manifests = Manifests::new(&[web(&lab)])?;
        let client = lab.pod("sleep");
        let mesh = json!({ "workloads": [{
            "name": "default/sleep",
            "addresses": [client.ipv4()],
            "rules": { "mode": "proxy" },
        }]});
        let mesh = mesh.to_string();
        let agent = lab.agent("node2").in_the_nodes_cgroup();
        let mut agent = agent.manifests(manifests.path()).args(["--mesh", &mesh]);
        if let Some(given) = &given {
            agent = agent.capabilities(given);
        }
        let mut agent = agent.start()?;
        let is_served = || {
            reaches(
                client,
                "10.96.0.10:80",
                "connect --count 20",
                &["far", "near"],
            )
        };
        is_served()?;
        let opener = opener(&agent)?;
        ensure!(!has_sys_admin(agent.id())?, "a thread of the agent");
        ensure!(has_sys_admin(opener)?, "the opener cannot open");
        let status = |of: u32| fs::read_to_string(format!("/proc/{of}/status"));
        if given.is_none() {
            // Root may take it from its bounding set, too.
            ensure!(set(&status(agent.id())?, "CapBnd:")? & SYS_ADMIN == 0);
        }
        // CAP_NET_ADMIN is number 12.
        ensure!(set(&status(opener)?, "CapPrm:")? == SYS_ADMIN | 1 << 12);
        // The next agent adopts the pins with the same capabilities.
        agent.stop()?;
        agent.start()?;
        is_served()?;
        ensure!(!has_sys_admin(agent.id())?, "a thread of the next agent");
        run(&agent, "status")?.exits(0)?;
    }
    Ok(())
}

/// As an earlier version's DaemonSet has it.
fn without_bpf_and_perfmon_the_agent_keeps_sys_admin() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("far"))?;
    let _other = serve(lab.pod("near"))?;
    let manifests = Manifests::new(&[web(&lab)])?;
    let earlier = ["NET_ADMIN", "SYS_ADMIN"].map(str::to_owned);
    let agent = lab.agent("node2").manifests(manifests.path());
    let agent = agent.capabilities(&earlier).start()?;
    let client = lab.pod("sleep");
    reaches(
        client,
        "10.96.0.10:80",
        "connect --count 20",
        &["far", "near"],
    )?;
    ensure!(has_sys_admin(agent.id())?);
    ensure!(
        agent.log().contains("keeping CAP_SYS_ADMIN"),
        "{}",
        agent.log()
    );
    Ok(())
}

fn an_opener_that_ends_ends_the_agent_with_an_error() -> Result<()> {
    let lab = Cluster::lab()?;
    let _servers = [serve(lab.pod("far"))?, serve(lab.pod("near"))?];
    let manifests = Manifests::new(&[web(&lab)])?;
    let mut agent = lab.agent("node2").manifests(manifests.path()).start()?;
    let opener = i32::try_from(opener(&agent)?)?;
    // It outlives what ends the agent.
    kill(Pid::from_raw(opener), Signal::SIGTERM)?;
    thread::sleep(Duration::from_millis(200));
    kill(Pid::from_raw(opener), Signal::SIGKILL)?;
    let status = agent.wait_until_ended()?;
    ensure!(status.code() == Some(1), "{status}");
    ensure!(
        agent.log().contains("thread `opener` has died"),
        "{}",
        agent.log()
    );
    let client = lab.pod("sleep");
    reaches(
        client,
        "10.96.0.10:80",
        "connect --count 20",
        &["far", "near"],
    )?;
    Ok(())
}

/// If this fails, the DaemonSet can do with less.
fn bpf_and_perfmon_are_not_enough() -> Result<()> {
    let lab = Cluster::lab()?;
    let manifests = Manifests::new(&[web(&lab)])?;
    let less = ["BPF", "NET_ADMIN", "PERFMON"].map(str::to_owned);
    let agent = lab.agent("node2").capabilities(&less).prepare()?;
    let path = manifests.path();
    let path = path.to_str().context("a path in UTF-8")?;
    cannot_run(&agent, ["--manifests", path])?
        .exits(1)?
        .says(&["missing CAP_SYS_ADMIN", "What to do: run as root"])?;
    Ok(())
}

/// In a container that is not privileged, /proc/sys is read-only; kustomize's component `mesh` mounts
/// the node's /proc/sys/net elsewhere.
fn it_can_set_what_a_mesh_needs() -> Result<()> {
    let lab = Cluster::lab()?;
    let directory = tempfile::tempdir()?;
    let found = |mount: &str| -> Result<Value> {
        let script = format!(
            "mount --make-rprivate / && {mount} && mount --bind /proc/sys /proc/sys && \
             mount -o remount,bind,ro /proc/sys && exec \"$0\" doctor -o json"
        );
        let program = lab.programs().dataplane()?;
        let doctor = lab.node("node2").command("unshare");
        let doctor = doctor.args(["--mount", "sh", "-c", &script]).arg(program);
        let output = doctor.capabilities(&capabilities()?).output()?;
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let row = rows
            .into_iter()
            .find(|row| row["feature"] == "tcp_fwmark_accept");
        row.context("tcp_fwmark_accept")
    };
    let without = found("true")?;
    let detail = without["detail"].as_str().unwrap_or_default();
    ensure!(
        without["present"] == false
            && detail.contains("cannot set /proc/sys/net/ipv4/tcp_fwmark_accept: Read-only")
            && detail.contains("component `mesh`"),
        "{without:#}"
    );
    let place = directory.path().display();
    let with = found(&format!("mount --bind /proc/sys/net {place}"))?;
    ensure!(with["present"] == true, "{with:#}");
    Ok(())
}

/// The Job has the pins' directory as a mount, on a root file system that is read-only.
fn a_clean_up_job_leaves_its_mount() -> Result<()> {
    let lab = Cluster::lab()?;
    let manifests = Manifests::new(&[web(&lab)])?;
    let mut agent = lab.agent("node2").manifests(manifests.path()).start()?;
    agent.stop()?;
    let directory = tempfile::tempdir()?;
    let (root, bpffs) = (directory.path().display(), agent.bpffs().display());
    let script = format!(
        "mount --make-rprivate / && mount -t tmpfs root {root} && mkdir {root}/pins && \
         mount --bind {bpffs} {root}/pins && mount -o remount,bind,ro {root} && \
         DATAPLANE_BPFFS={root}/pins exec \"$0\" cleanup"
    );
    let mut job = lab.node("node2").command("unshare");
    for (name, value) in agent.environment() {
        job = job.env(name, value);
    }
    let job = job.args(["--mount", "sh", "-c", &script]);
    let output = job.arg(lab.programs().dataplane()?).output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let left = fs::read_dir(agent.bpffs())?.count();
    ensure!(left == 0, "{left} pins are left");
    Ok(())
}
