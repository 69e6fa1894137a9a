//! Threads of the agent's that die: each ends the agent with an error that names it, and the programs go on serving. A
//! thread that hangs fails the liveness probe.

use std::{
    fs,
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Agent, Lab};
use nix::{
    sys::{
        ptrace,
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use serde_json::json;

use crate::{
    cluster::{Cluster, TCP, eventually, reaches},
    dns_world,
    manifest::Service,
    outcome::http,
};

scenarios! {
    Dataplane:
    each_thread_that_dies_ends_the_agent_with_an_error,
    a_dns_thread_that_hangs_fails_the_liveness_probe,
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
                // An endpoint is removed, and the thread looks for flows to it.
                "manifests" | "flows" => manifests.write(&web(lab, &["far"]))?,
                "attacher" => agent.node().ip("addr add 198.18.0.1/32 dev lo")?,
                "handover" => _ = UnixStream::connect(agent.socket().with_extension("handover"))?,
                _ => kill(Pid::from_raw(agent.id().cast_signed()), Signal::SIGHUP)?,
            }
            Ok(())
        })?;
        // The programs serve from the last tables.
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

/// The thread of a process with this name.
fn thread_of(process: u32, name: &str) -> Result<Pid> {
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim_end() == name {
            let id: i32 = task.file_name().to_string_lossy().parse()?;
            return Ok(Pid::from_raw(id));
        }
    }
    anyhow::bail!("process {process} has no thread {name}")
}

/// A thread that a debugger stops, until this is dropped.
struct Hanging(Pid);

impl Hanging {
    fn new(thread: Pid) -> Result<Self> {
        ptrace::seize(thread, ptrace::Options::empty())?;
        let hanging = Self(thread);
        ptrace::interrupt(thread)?;
        waitpid(thread, Some(WaitPidFlag::__WALL))?;
        Ok(hanging)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // It may have ended.
        let _ = ptrace::detach(self.0, None);
    }
}

/// The other threads go on, and answer the probe.
fn a_dns_thread_that_hangs_fails_the_liveness_probe() -> Result<()> {
    const PROBE: &str = "http://127.0.0.1:15021/healthz/live";
    let world = dns_world::World::start(&json!({}), |text| text)?;
    let node = world.lab.node("node1");
    let (status, said) = http(node, PROBE)?;
    ensure!(status == 200, "{status} {said}");
    let hanging = Hanging::new(thread_of(world.agent.id(), "dns-0")?)?;
    let since = Instant::now();
    loop {
        let (status, said) = http(node, PROBE)?;
        let silent = since.elapsed();
        if status == 503 {
            ensure!(said.contains("dns-0"), "{said}");
            // Not because it was busy for a moment.
            ensure!(silent > Duration::from_secs(25), "after {silent:?}");
            break;
        }
        ensure!(
            status == 200 && silent < Duration::from_mins(1),
            "after {silent:?}: {status} {said}"
        );
        thread::sleep(Duration::from_millis(500));
    }
    drop(hanging);
    eventually(|| {
        let (status, said) = http(node, PROBE)?;
        ensure!(status == 200, "{status} {said}");
        Ok(())
    })
}
