//! Threads of the agent's that die: each ends the agent with an error that names it, and what it served goes on.

use std::os::unix::net::UnixStream;

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Lab};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    cluster::{Cluster, TCP, reaches},
    manifest::Service,
};

scenarios! {
    Dataplane:
    each_thread_that_dies_ends_the_agent_with_an_error,
}

const TO: &str = "10.96.0.10:80";

fn web(lab: &Lab, pods: &[&str]) -> Vec<Service> {
    let pods: Vec<_> = pods.iter().map(|pod| lab.pod(pod)).collect();
    let service = Service::new("web", &["10.96.0.10"]).port("tcp", 80, TCP);
    vec![service.endpoints(&pods)]
}

/// Has a thread panic once `provoke` gives it something to do: the agent ends with an error that names it.
pub fn ends(
    agent: &mut Agent,
    thread: &str,
    provoke: impl FnOnce(&Agent) -> Result<()>,
) -> Result<()> {
    agent.have_panic(thread)?;
    provoke(agent)?;
    let status = agent
        .wait_until_ended()
        .with_context(|| format!("after {thread} has died"))?;
    let log = agent.log();
    let last = log.lines().last().unwrap_or_default();
    ensure!(
        status.code() == Some(1) && last.contains("has died") && last.contains(thread),
        "{thread}: {status}: {log}"
    );
    Ok(())
}

fn each_thread_that_dies_ends_the_agent_with_an_error() -> Result<()> {
    let mut cluster = Cluster::start(|lab| web(lab, &["far", "near"]))?;
    for thread in ["manifests", "flows", "attacher", "waiter", "handover"] {
        let Cluster {
            agent,
            lab,
            manifests,
            ..
        } = &mut cluster;
        ends(agent, thread, |agent| {
            match thread {
                // An endpoint goes, and flows to it are looked for.
                "manifests" | "flows" => manifests.write(&web(lab, &["far"]))?,
                "attacher" => agent.node().ip("addr add 198.18.0.1/32 dev lo")?,
                "handover" => _ = UnixStream::connect(agent.socket().with_extension("handover"))?,
                _ => kill(Pid::from_raw(agent.id().cast_signed()), Signal::SIGHUP)?,
            }
            Ok(())
        })?;
        // The last that was written goes on.
        let all: &[&str] = if thread == "flows" {
            &["far"]
        } else {
            &["far", "near"]
        };
        reaches(cluster.client(), TO, "connect --count 30", all)
            .with_context(|| format!("without {thread}"))?;
        cluster
            .manifests
            .write(&web(&cluster.lab, &["far", "near"]))?;
        cluster.agent.start()?;
    }
    Ok(())
}
