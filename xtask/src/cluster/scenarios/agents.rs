//! When the agents of the nodes end and begin, and what captured connections come to meanwhile.

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

/// How often processes are looked at.
const LOOK: Duration = Duration::from_millis(4);

/// An agent's process, by the machine's monotonic clock in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Lifetime {
    /// When it was seen first; none: it was there before.
    pub exec_ns: Option<u64>,
    /// When it was seen no more; none: it is there still.
    pub end_ns: Option<u64>,
}

/// Watches the agents of all nodes while something is done.
///
/// # Errors
/// What that fails with, or if processes cannot be watched.
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

/// The process of a node's agent, by its number on this machine. With several agents, one of them.
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
                // What has not become another program yet may become an agent.
                Kind::Container => {}
                Kind::Other => {
                    known.insert(*pid);
                }
            }
        }
        // Numbers come again.
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

/// Whether a process has not ended: one that nobody has waited for has.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .map(|(_, rest)| rest.starts_with(['Z', 'X']));
    state == Some(false)
}

/// The machine's monotonic clock, in nanoseconds.
pub fn now_ns() -> Result<u64> {
    let now = Duration::from(ClockId::CLOCK_MONOTONIC.now().context("no clock")?);
    Ok(u64::try_from(now.as_nanos())?)
}

/// What a client on a node saw of a restart of its agent.
#[derive(Debug)]
pub struct Restart {
    /// From the end of the agent to the exec of the next: the API server's, the kubelet's and the runtime's share.
    pub without: Duration,
    /// From the exec of the next agent to the end of the first connection that was answered.
    pub until_first: Duration,
    /// Failures before the agent ended, between that and the exec, and after the exec; each with its errors.
    pub failed: [BTreeMap<String, u64>; 3],
}

impl Restart {
    /// The restart of the agent in `lifetimes`, as clients on that node saw it.
    ///
    /// # Errors
    /// If there was not one restart, or nothing was answered after it.
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
