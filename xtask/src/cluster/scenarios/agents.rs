//! Watches when the agents of the nodes start and end, and what happens to captured connections at this time.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use dataplane_tests::report::LoadReport;
use nix::time::ClockId;

use crate::cluster::place::{self, Node};

/// Interval between two looks at the processes.
const LOOK: Duration = Duration::from_millis(4);

/// The lifetime of an agent's process, in nanoseconds of the machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Lifetime {
    /// Time at which the process was first seen. `None` if it already ran when the watch began.
    pub exec_ns: Option<u64>,
    /// Time at which the process was gone. `None` if it still runs.
    pub end_ns: Option<u64>,
}

/// Watches the agents of all nodes while `work` runs.
///
/// # Errors
/// Returns the error of `work`, or fails if processes cannot be watched.
pub fn watch<T>(
    nodes: &[Node],
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, BTreeMap<String, Vec<Lifetime>>)> {
    let mut namespaces = BTreeMap::new();
    for node in nodes {
        let path = place::netns(&node.name());
        let found = fs::metadata(&path).with_context(|| format!("no {}", path.display()))?;
        namespaces.insert(found.ino(), node.name());
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| look(&namespaces, &over));
        let done = work();
        over.store(true, Ordering::Relaxed);
        let seen = watcher
            .join()
            .map_err(|_| anyhow!("the watcher panicked"))?;
        Ok((done?, seen?))
    })
}

/// Returns the process id of a node's agent on this machine. If there are several agents, returns one of them.
pub fn process(node: Node) -> Result<u32> {
    let path = place::netns(&node.name());
    let found = fs::metadata(&path).with_context(|| format!("no {}", path.display()))?;
    let namespaces = BTreeMap::from([(found.ino(), node.name())]);
    let processes = fs::read_dir("/proc").context("cannot list processes")?;
    let mut pids = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let agent = pids.find(|pid| matches!(node_of_agent(*pid, &namespaces), Kind::Agent(_)));
    agent.with_context(|| format!("node {} has no agent", node.name()))
}

fn look(
    namespaces: &BTreeMap<u64, String>,
    over: &AtomicBool,
) -> Result<BTreeMap<String, Vec<Lifetime>>> {
    let mut known: BTreeSet<u32> = BTreeSet::new();
    let mut agents: BTreeMap<u32, (String, Lifetime)> = BTreeMap::new();
    let mut first = true;
    while !over.load(Ordering::Relaxed) {
        let now = now_ns()?;
        let pids: BTreeSet<u32> = fs::read_dir("/proc")
            .context("cannot list processes")?
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        for (pid, (_, lifetime)) in &mut agents {
            if lifetime.end_ns.is_none() && !is_alive(*pid) {
                lifetime.end_ns = Some(now);
            }
        }
        for pid in &pids {
            if known.contains(pid) {
                continue;
            }
            match node_of_agent(*pid, namespaces) {
                Kind::Agent(node) => {
                    let exec_ns = (!first).then_some(now);
                    let lifetime = Lifetime {
                        exec_ns,
                        end_ns: None,
                    };
                    agents.insert(*pid, (node, lifetime));
                    known.insert(*pid);
                }
                // A process that has not executed its program yet may become an agent.
                Kind::Container => {}
                Kind::Other => {
                    known.insert(*pid);
                }
            }
        }
        // Process ids are reused.
        known.retain(|pid| pids.contains(pid));
        first = false;
        thread::sleep(LOOK);
    }
    let mut all: BTreeMap<String, Vec<Lifetime>> = BTreeMap::new();
    for (node, lifetime) in agents.into_values() {
        all.entry(node).or_default().push(lifetime);
    }
    Ok(all)
}

enum Kind {
    /// An agent of this node.
    Agent(String),
    /// A container that is about to start.
    Container,
    Other,
}

fn node_of_agent(pid: u32, namespaces: &BTreeMap<u64, String>) -> Kind {
    let process = Path::new("/proc").join(pid.to_string());
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0);
    let (program, command) = (words.next().unwrap_or_default(), words.next());
    let is_agent = program.ends_with(b"/dataplane") && command == Some(b"run");
    if !is_agent {
        let starts = program.ends_with(b"runc") || program.is_empty();
        return if starts { Kind::Container } else { Kind::Other };
    }
    let namespace = fs::metadata(process.join("ns/net")).map(|found| found.ino());
    match namespace.ok().and_then(|inode| namespaces.get(&inode)) {
        Some(node) => Kind::Agent(node.clone()),
        None => Kind::Other,
    }
}

/// Returns whether a process runs. A zombie does not.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .map(|(_, rest)| rest.starts_with(['Z', 'X']));
    state == Some(false)
}

/// Returns the machine's monotonic clock, in nanoseconds.
pub fn now_ns() -> Result<u64> {
    let now = Duration::from(ClockId::CLOCK_MONOTONIC.now().context("no clock")?);
    Ok(u64::try_from(now.as_nanos())?)
}

/// An agent's restart, as a client on the node saw it.
#[derive(Debug)]
pub struct Restart {
    /// Time from the end of the agent to the exec of the next agent, which the API server, the kubelet and the runtime
    /// need.
    pub without: Duration,
    /// From the exec of the next agent to the end of the first connection that was answered.
    pub until_first: Duration,
    /// Failures by error: before the agent ended, between its end and the next exec, and after this exec.
    pub failed: [BTreeMap<String, u64>; 3],
}

impl Restart {
    /// Returns the restart of the agent in `lifetimes`, as clients on that node saw it.
    ///
    /// # Errors
    /// Fails if the agent did not restart, or if no connection was answered afterwards.
    pub fn of(lifetimes: &[Lifetime], report: &LoadReport) -> Result<Self> {
        let end = lifetimes.iter().find(|l| l.exec_ns.is_none());
        let end = end.and_then(|l| l.end_ns).context("no agent ended")?;
        let exec = lifetimes
            .iter()
            .find_map(|l| l.exec_ns)
            .context("no agent began")?;
        let answered = report.each.iter().filter(|e| e.started_at_ns > end);
        let answered = answered.map(|e| e.answered_at_ns).filter(|at| *at > exec);
        let first = answered.min();
        let first = first.context("no connection was answered after it")?;
        let mut failed = [const { BTreeMap::new() }; 3];
        for failure in &report.failures {
            let part = usize::from(failure.at_ns >= end) + usize::from(failure.at_ns >= exec);
            *failed[part].entry(failure.error.clone()).or_default() += 1;
        }
        Ok(Self {
            without: Duration::from_nanos(exec.saturating_sub(end)),
            until_first: Duration::from_nanos(first - exec),
            failed,
        })
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, without, after] = &self.failed;
        write!(
            f,
            "no agent for {} ms, then {} ms from exec to the first answer; failed before the end {before:?}, without \
             an agent {without:?}, after exec {after:?}",
            self.without.as_millis(),
            self.until_first.as_millis()
        )
    }
}
