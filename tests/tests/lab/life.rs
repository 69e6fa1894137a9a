//! The agent's life: killed, restarted, started twice, with bad manifests, and removed.

use std::{
    collections::hash_map::RandomState,
    ffi::OsStr,
    fs::{self, File},
    hash::BuildHasher as _,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, MapData};
use dataplane_common::{LAYOUT, Reason};
use dataplane_tests::{
    Agent, Lab, is_long,
    report::{LoadReport, Report},
};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    cluster::{Cluster, TCP, eventually, fails, reaches, refused, serve},
    manifest::{Manifests, Service},
    outcome::{cannot_run, run, run_args},
};

scenarios! {
    Dataplane:
    killing_the_agent_fails_no_connection,
    a_restarted_agent_adopts_and_writes_nothing,
    a_new_agent_catches_up,
    only_what_changed_meanwhile_is_written,
    a_second_agent_says_who_runs_and_ends,
    an_agent_takes_its_place_back,
    a_replaced_agent_stays_if_it_is_to,
    cleanup_waits_for_the_agents_end,
    cleanup_removes_what_the_agent_left,
    a_foreign_pin_stops_the_start_and_stays,
    a_damaged_pin_stops_the_start_and_nothing_else,
    vips_of_one_prefix_come_and_go,
    a_missing_bpffs_is_mounted,
    on_exit_detach_removes_the_programs,
    changes_in_the_file_are_picked_up,
    bad_manifests_change_nothing,
}

const TO: &str = "10.96.0.10:80";

fn web(lab: &Lab) -> Service {
    let endpoints = [lab.pod("far"), lab.pod("near")];
    Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .endpoints(&endpoints)
}

/// The agent is killed at random moments, at rest and while it starts, and clients connect all
/// the time.
fn killing_the_agent_fails_no_connection() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    let load = cluster
        .client()
        .load(&["--to", TO, "--threads", "2", "--pause-us", "200"])?;
    let mut moments = Vec::new();
    for round in 0..if is_long() { 10 } else { 4 } {
        // The standard library's hasher is seeded by the system's randomness.
        let moment = RandomState::new().hash_one(round) % 1000;
        std::thread::sleep(Duration::from_millis(moment));
        cluster.agent.kill();
        moments.push(moment);
        reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])
            .with_context(|| format!("killed after {moments:?} ms"))?;
        cluster.agent.launch()?;
    }
    cluster.agent.wait_until_ready()?;
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty(),
        "killed after {moments:?} ms, connections failed: {:?}",
        report.failures
    );
    ensure!(
        report.answered > 1000,
        "too few connections to mean anything: {report:?}"
    );
    println!(
        "{} connections, none failed; killed after {moments:?} ms",
        report.answered
    );
    Ok(())
}

/// An agent that starts writes the changes of the time without one to the tables.
fn a_new_agent_catches_up() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    cluster.agent.kill();
    let other = Service::new("other", &["10.96.0.11"]).port("tcp", 80, TCP);
    cluster
        .manifests
        .write(&[other.endpoints(&[cluster.lab.pod("near")])])?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    cluster.agent.start()?;
    reaches(
        cluster.client(),
        "10.96.0.11:80",
        "connect --count 5",
        &["near"],
    )?;
    fails(cluster.client(), TO, "connect --timeout-ms 300", "TIMEOUT")
}

/// The links are still those of the first agent, with new programs in them, the tables are as they were, and the log
/// says so.
fn a_restarted_agent_adopts_and_writes_nothing() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    let file = cluster.manifests.path();
    let no_change = |agent: &Agent| {
        let arguments = ["plan", "--node-name", "node2", "--manifests"];
        let arguments = arguments.iter().map(OsStr::new).chain([file.as_os_str()]);
        run_args(agent, arguments)?
            .exits(0)?
            .says(&["No change"])
            .map(drop)
    };
    no_change(&cluster.agent)?;
    let programs = |agent: &Agent, field: &str| -> Result<Vec<Value>> {
        let status = run(agent, "status -o json")?.json()?;
        let programs = status["programs"].as_array().context("programs")?;
        Ok(programs.iter().map(|p| p[field].clone()).collect())
    };
    let (links, ids) = (
        programs(&cluster.agent, "link_id")?,
        programs(&cluster.agent, "program_id")?,
    );
    ensure!(
        links.len() == 9 && links.iter().all(Value::is_u64),
        "{links:?}"
    );
    ensure!(!cluster.agent.log().contains("adopted"), "adopted nothing");
    cluster.agent.kill();
    no_change(&cluster.agent)?;
    cluster.agent.start()?;
    no_change(&cluster.agent)?;
    ensure!(
        cluster.agent.log().contains("adopted"),
        "it does not say that it adopted: {}",
        cluster.agent.log()
    );
    let status = run(&cluster.agent, "status -o json")?.exits(0)?.json()?;
    ensure!(status["agent"]["last_sync"]["writes"] == 0, "{status:#}");
    ensure!(programs(&cluster.agent, "link_id")? == links, "other links");
    let swapped = programs(&cluster.agent, "program_id")?;
    ensure!(
        ids.iter()
            .zip(&swapped)
            .all(|(before, after)| before != after),
        "not swapped: {ids:?} {swapped:?}"
    );
    Ok(())
}

/// Of fifty services one changed and one went while no agent ran: the next agent writes nothing else.
fn only_what_changed_meanwhile_is_written() -> Result<()> {
    let name = |n: u8| format!("s{n}");
    let vip = |n: u8| format!("10.96.1.{n}");
    let service = |lab: &Lab, n: u8| {
        Service::new(&name(n), &[&vip(n)])
            .port("tcp", 80, TCP)
            .endpoints(&[lab.pod("near")])
    };
    let mut cluster = Cluster::start(|lab| (0..50).map(|n| service(lab, n)).collect())?;
    cluster.agent.kill();
    let lab = &cluster.lab;
    let mut services: Vec<Service> = (0..49).map(|n| service(lab, n)).collect();
    services[7] = Service::new(&name(7), &[&vip(7)])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("far")]);
    cluster.manifests.write(&services)?;
    reaches(cluster.client(), "10.96.1.7:80", "connect", &["near"])?;
    cluster.agent.start()?;
    reaches(
        cluster.client(),
        "10.96.1.7:80",
        "connect --count 5",
        &["far"],
    )?;
    reaches(
        cluster.client(),
        "10.96.1.8:80",
        "connect --count 5",
        &["near"],
    )?;
    fails(
        cluster.client(),
        "10.96.1.49:80",
        "connect --timeout-ms 300",
        "TIMEOUT",
    )?;
    let status = run(&cluster.agent, "status -o json")?.exits(0)?.json()?;
    let writes = &status["agent"]["last_sync"]["writes"];
    // A block of endpoints and the flip to it; the port and the address that go.
    ensure!(writes == 4, "{writes} writes for two services");
    Ok(())
}

fn a_second_agent_says_who_runs_and_ends() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let path = cluster.manifests.path();
    let path = path.to_string_lossy();
    let output = cluster
        .agent
        .dataplane(["run", "--manifests", &path])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(3), "{}: {said}", output.status);
    ensure!(
        said.contains(&cluster.agent.id().to_string()),
        "it does not say who runs: {said}"
    );
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"]).map(drop)
}

/// An agent that replaces the running one, and then cannot go on, because it wants one port twice.
fn an_agent_takes_its_place_back() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    let load = cluster
        .client()
        .load(&["--to", TO, "--threads", "2", "--pause-us", "200"])?;
    let process = cluster.agent.id();
    let next = cluster.agent.replace_in_vain()?;
    let said = String::from_utf8_lossy(&next.stderr);
    ensure!(!next.status.success() && said.contains("15021"), "{said}");
    cluster.agent.wait_until_ready()?;
    let log = cluster.agent.log();
    ensure!(
        cluster.agent.id() == process && log.contains("taking over again"),
        "{log}"
    );
    // The old agent follows its source, and hands over to an agent that can start.
    let other = Service::new("other", &["10.96.0.11"]).port("tcp", 80, TCP);
    cluster.manifests.write(&[
        web(&cluster.lab),
        other.endpoints(&[cluster.lab.pod("near")]),
    ])?;
    eventually(|| {
        reaches(
            cluster.client(),
            "10.96.0.11:80",
            "connect --count 5",
            &["near"],
        )
        .map(drop)
    })?;
    let before = cluster.agent.replace()?;
    before.wait().context("the agent that was replaced")?;
    ensure!(cluster.agent.id() != process);
    let report: LoadReport = load.wait_json()?;
    ensure!(
        report.errors.is_empty() && report.answered > 300,
        "{} answered, {:?}",
        report.answered,
        report.failures
    );
    Ok(())
}

/// With `--stay`, a replaced agent stays idle. The option is for supervisors that restart every process that ends, as
/// Kubernetes does.
fn a_replaced_agent_stays_if_it_is_to() -> Result<()> {
    let mut cluster = Cluster::start_with(|lab| vec![web(lab)], &["--stay"])?;
    let mut before = cluster.agent.replace()?;
    eventually(|| {
        let log = cluster.agent.log();
        ensure!(log.contains("idle until that agent ends"), "{log}");
        Ok(())
    })?;
    std::thread::sleep(Duration::from_millis(300));
    ensure!(before.try_wait()?.is_none(), "it ended");
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    before.signal(Signal::SIGTERM)?;
    before.wait().context("the agent that was replaced")?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"]).map(drop)
}

/// While an agent runs, `cleanup` refuses, also when it cannot find the agent's socket.
fn cleanup_waits_for_the_agents_end() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let pid = cluster.agent.id().to_string();
    for command in ["cleanup", "cleanup --socket /nowhere/agent.sock"] {
        run(&cluster.agent, command)?.exits(3)?.says(&[&pid])?;
    }
    // To look is allowed.
    run(&cluster.agent, "cleanup --dry-run")?
        .exits(0)?
        .says(&["links/connect4", "would be removed"])?;
    run(&cluster.agent, "status")?.exits(0)?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"]).map(drop)
}

/// SIGTERM with `keep` leaves services up, `cleanup` removes everything of ours.
fn cleanup_removes_what_the_agent_left() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    cluster.agent.stop()?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    let pins = || fs::read_dir(cluster.agent.bpffs()).map_or(0, Iterator::count);
    ensure!(
        pins() > 0,
        "nothing is pinned in {}",
        cluster.agent.bpffs().display()
    );
    let listed = cluster.agent.dataplane(["cleanup", "--dry-run"]).run()?;
    ensure!(!listed.trim().is_empty(), "a dry run lists nothing");
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    cluster.agent.dataplane(["cleanup"]).run()?;
    ensure!(
        pins() == 0,
        "pins are left in {}",
        cluster.agent.bpffs().display()
    );
    fails(cluster.client(), TO, "connect --timeout-ms 300", "TIMEOUT")
}

/// Another program's map under the name of one of ours is named; `run` and `cleanup` do not touch it.
fn a_foreign_pin_stops_the_start_and_stays() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    cluster.agent.stop()?;
    run(&cluster.agent, "cleanup")?.exits(0)?;
    let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/POOLS"));
    fs::create_dir_all(pin.parent().context("a directory")?)?;
    Array::<MapData, u64>::create(7, 0)?.pin(&pin)?;
    let path = pin.to_string_lossy();
    let file = cluster.manifests.path();
    let arguments = ["--manifests".as_ref(), file.as_os_str()];
    cannot_run(&cluster.agent, arguments)?.exits(1)?.says(&[
        &path,
        "not dataplane's",
        "Nothing was changed",
    ])?;
    fails(cluster.client(), TO, "connect --timeout-ms 300", "TIMEOUT")?;
    for command in ["cleanup --dry-run", "cleanup"] {
        run(&cluster.agent, command)?
            .exits(0)?
            .says(&[&path, "left alone"])?;
        ensure!(pin.exists(), "`{command}` removed what is not ours");
    }
    fs::remove_file(&pin)?;
    cluster.agent.start()?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"]).map(drop)
}

/// A table whose pin is gone while the programs run: nothing is guessed, clients go on, and
/// `cleanup` is the way out.
fn a_damaged_pin_stops_the_start_and_nothing_else() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    cluster.agent.kill();
    let pin = cluster.agent.bpffs().join(format!("v{LAYOUT}/maps/POOLS"));
    fs::remove_file(&pin)?;
    let path = pin.to_string_lossy();
    let file = cluster.manifests.path();
    let arguments = ["--manifests".as_ref(), file.as_os_str()];
    cannot_run(&cluster.agent, arguments)?
        .exits(1)?
        .says(&[&path, "dataplane cleanup"])?;
    run(&cluster.agent, "status")?.exits(1)?.says(&[&path])?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    run(&cluster.agent, "cleanup")?.exits(0)?;
    cluster.agent.start()?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"]).map(drop)
}

/// Three services in one /24 come and go, in both families, with the agent killed in between: each is
/// reached while it is there, and its address is left alone when it is not.
fn vips_of_one_prefix_come_and_go() -> Result<()> {
    const ALL: [u8; 3] = [1, 2, 200];
    let service = |lab: &Lab, n: u8| {
        Service::new(
            &format!("s{n}"),
            &[&format!("10.96.7.{n}"), &format!("fd00:96::7:{n}")],
        )
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("near")])
    };
    let mut cluster = Cluster::start(|lab| vec![service(lab, 1)])?;
    for (there, killed) in [
        (&[1][..], false),
        (&[1, 2, 200], false),
        (&[2], false),
        (&[], true),
        (&[1], true),
        (&[], false),
        (&[200, 1], false),
        (&[200], true),
    ] {
        if killed {
            cluster.agent.kill();
        }
        let services: Vec<Service> = there.iter().map(|n| service(&cluster.lab, *n)).collect();
        cluster.manifests.write(&services)?;
        if killed {
            cluster.agent.start()?;
        }
        for n in ALL {
            for to in [format!("10.96.7.{n}:80"), format!("[fd00:96::7:{n}]:80")] {
                eventually(|| {
                    if there.contains(&n) {
                        reaches(cluster.client(), &to, "connect --count 3", &["near"]).map(drop)
                    } else {
                        let before = cluster.verdicts(Reason::NotService)?;
                        let report: Report = cluster
                            .client()
                            .probe("connect")
                            .args(["--to", &to, "--timeout-ms", "50"])
                            .json()?;
                        ensure!(report.answered == 0, "{to} is answered");
                        ensure!(
                            cluster.verdicts(Reason::NotService)? == before + 1,
                            "{to} is not left alone"
                        );
                        Ok(())
                    }
                })
                .with_context(|| format!("services {there:?}"))?;
            }
        }
        run(&cluster.agent, "status")?.exits(0)?;
    }
    Ok(())
}

/// In a mount namespace of its own, in which /sys/fs/bpf is not mounted.
fn a_missing_bpffs_is_mounted() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("near"))?;
    let near = Service::new("web", &["10.96.0.10"]).port("tcp", 80, TCP);
    let manifests = Manifests::new(&[near.endpoints(&[lab.pod("near")])])?;
    let mut agent = lab.agent("node2").prepare()?;
    let here = fs::read_to_string("/proc/self/mountinfo")?;
    // Without the packet path: before TCX its filters are no pins, and would stay at the end.
    let script = "while mountpoint -q /sys/fs/bpf; do umount -l /sys/fs/bpf || exit 9; done
        exec \"$0\" run --packet-path off --bpffs /sys/fs/bpf/dataplane --manifests \"$1\"";
    let mut command = lab.node("node2").command("unshare").args([
        "--mount".as_ref(),
        "--propagation".as_ref(),
        "private".as_ref(),
        "sh".as_ref(),
        "-c".as_ref(),
        script.as_ref(),
        lab.programs().dataplane()?.as_os_str(),
        manifests.path().as_os_str(),
    ]);
    for (name, value) in agent.environment() {
        if name != "DATAPLANE_BPFFS" {
            command = command.env(name, value);
        }
    }
    let log = File::create(agent.log_file())?;
    let mut process = command.stderr(log).spawn()?;
    eventually(|| reaches(lab.pod("sleep"), TO, "connect --timeout-ms 300", &["near"]).map(drop))
        .with_context(|| agent.log())?;
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", process.id()))?;
    ensure!(
        mounts
            .lines()
            .any(|line| line.contains(" /sys/fs/bpf ") && line.contains(" - bpf ")),
        "not mounted: {mounts}"
    );
    let now = fs::read_to_string("/proc/self/mountinfo")?;
    let bpf = |mounts: &str| {
        mounts
            .lines()
            .filter(|l| l.contains(" /sys/fs/bpf "))
            .count()
    };
    ensure!(bpf(&here) == bpf(&now), "the machine's own mounts changed");
    // With its last process the namespace goes, and with that the pins.
    process.kill();
    agent.kill();
    eventually(|| fails(lab.pod("sleep"), TO, "connect --timeout-ms 300", "TIMEOUT"))
}

fn on_exit_detach_removes_the_programs() -> Result<()> {
    let mut cluster = Cluster::start_with(|lab| vec![web(lab)], &["--on-exit", "detach"])?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    cluster.agent.stop()?;
    ensure!(!cluster.agent.bpffs().exists(), "pins are left");
    fails(cluster.client(), TO, "connect --timeout-ms 300", "TIMEOUT")
}

fn changes_in_the_file_are_picked_up() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let lab = &cluster.lab;
    let service = || Service::new("web", &["10.96.0.10"]).port("tcp", 80, TCP);
    cluster
        .manifests
        .write(&[service().endpoints(&[lab.pod("near2")])])?;
    eventually(|| reaches(cluster.client(), TO, "connect --count 10", &["near2"]).map(drop))?;
    cluster.manifests.write(&[service()])?;
    eventually(|| refused(cluster.client(), TO, "connect --count 3"))
}

/// Bad manifests change nothing but `status`, which names the error until it is fixed.
fn bad_manifests_change_nothing() -> Result<()> {
    let cluster = Cluster::start(|lab| vec![web(lab)])?;
    let status_says = |healthy: bool, what: &str| {
        eventually(|| {
            let output = cluster.agent.status()?;
            let said = String::from_utf8_lossy(&output.stdout);
            ensure!(
                output.status.success() == healthy,
                "{}: {said}",
                output.status
            );
            ensure!(
                said.contains(what),
                "`status` does not say {what:?}: {said}"
            );
            Ok(())
        })
    };
    for (nonsense, complaint) in [
        ("kind: [", "services.json:1"),
        ("", "services.json: empty"),
        (
            r#"{"kind": "List", "items": [{"kind": "Service"}]}"#,
            "items[0].apiVersion",
        ),
    ] {
        cluster.manifests.write_text(nonsense)?;
        status_says(false, complaint)?;
        reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
        cluster.manifests.write(&[web(&cluster.lab)])?;
        status_says(true, "healthy")?;
    }
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"]).map(drop)
}
