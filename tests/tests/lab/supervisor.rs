//! Messages of an agent to a supervisor such as systemd (docs/systemd.md).

use std::{
    os::unix::net::UnixDatagram,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::patience;
use nix::sys::signal::Signal;

use crate::{
    cluster::{Cluster, TCP, reaches, serve},
    manifest::{Manifests, Service},
};

scenarios! {
    Dataplane:
    a_supervisor_hears_how_the_agent_is,
}

/// Reads the agent's messages until this one; returns those before it.
fn until(supervisor: &UnixDatagram, wanted: &str) -> Result<Vec<String>> {
    let mut before = Vec::new();
    let limit = Instant::now() + patience(Duration::from_secs(20));
    let mut buffer = [0; 256];
    while Instant::now() < limit {
        let Ok(length) = supervisor.recv(&mut buffer) else {
            continue;
        };
        let told = String::from_utf8_lossy(&buffer[..length]).into_owned();
        if told.starts_with(wanted) {
            return Ok(before);
        }
        before.push(told);
    }
    anyhow::bail!("it does not tell {wanted:?}: {before:?}")
}

fn a_supervisor_hears_how_the_agent_is() -> Result<()> {
    let lab = Cluster::lab()?;
    let _server = serve(lab.pod("far"))?;
    let web = Service::new("web", &["10.96.0.10"])
        .port("tcp", 80, TCP)
        .endpoints(&[lab.pod("far")]);
    let manifests = Manifests::new(&[web])?;
    let agent = lab.agent("node2").prepare()?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("notify");
    let supervisor = UnixDatagram::bind(&path)?;
    supervisor.set_read_timeout(Some(Duration::from_millis(100)))?;
    let from = manifests.path();
    let from = from.to_str().context("a path in UTF-8")?;
    let running = agent
        .dataplane(["run", "--node-name", "node2", "--manifests", from])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "90000000")
        .spawn()?;
    // It serves when it says so, and makes progress from then on.
    until(&supervisor, "READY=1")?;
    reaches(lab.pod("sleep"), "10.96.0.10:80", "connect", &["far"])?;
    until(&supervisor, "WATCHDOG=1")?;
    running.signal(Signal::SIGHUP)?;
    until(&supervisor, "RELOADING=1\nMONOTONIC_USEC=")?;
    let between = until(&supervisor, "READY=1")?;
    ensure!(
        between.iter().all(|told| told == "WATCHDOG=1"),
        "{between:?}"
    );
    running.signal(Signal::SIGTERM)?;
    until(&supervisor, "STOPPING=1")?;
    running.wait()?;
    Ok(())
}
