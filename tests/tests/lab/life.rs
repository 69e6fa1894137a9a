//! The agent's life: killed, restarted, started twice, given nonsense, and removed.

use std::{collections::hash_map::RandomState, fs, hash::BuildHasher as _, time::Duration};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Lab, report::LoadReport};

use crate::{
    cluster::{Cluster, TCP, eventually, fails, reaches, refused},
    manifest::Service,
};

scenarios! {
    Dataplane:
    killing_the_agent_fails_no_connection,
    a_new_agent_catches_up,
    a_second_agent_says_who_runs_and_ends,
    cleanup_removes_what_the_agent_left,
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

/// The agent is killed at ten random moments, at rest and while it starts, and clients connect all
/// the time.
fn killing_the_agent_fails_no_connection() -> Result<()> {
    let mut cluster = Cluster::start(|lab| vec![web(lab)])?;
    let load = cluster
        .client()
        .load(&["--to", TO, "--threads", "2", "--pause-us", "200"])?;
    let mut moments = Vec::new();
    for round in 0..10 {
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

/// What changed while no agent ran is in the tables once one runs again.
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

fn on_exit_detach_removes_the_programs() -> Result<()> {
    let mut cluster = Cluster::start_with(|lab| vec![web(lab)], &["--on-exit", "detach"])?;
    reaches(cluster.client(), TO, "connect --count 20", &["far", "near"])?;
    cluster.agent.stop()?;
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

/// Nonsense changes nothing but `status`, which says what is wrong with it until it is right.
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
