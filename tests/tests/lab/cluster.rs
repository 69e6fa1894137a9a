//! The setting of most scenarios: two nodes, endpoints that serve, a client, and an agent on the client's node.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use dataplane_common::Reason;
use dataplane_tests::{Agent, Host, Lab, Process, patience, report::Report, without_packets};
use kernel::tables::Tables;

use crate::manifest::{Manifests, Service};

/// The ports of endpoints.
pub const TCP: u16 = 7;
pub const UDP: u16 = 53;
pub const HTTP: u16 = 80;

/// The arguments by which the agent knows the lab's pods by their addresses.
pub const POD_CIDRS: [&str; 2] = ["--pod-cidr", "10.244.0.0/16,fd00:10:244::/48"];

/// A lab whose node2 runs the dataplane. The fields are dropped in this order.
pub struct Cluster {
    pub agent: Agent,
    pub manifests: Manifests,
    _servers: Vec<Process>,
    pub lab: Lab,
}

impl Cluster {
    /// The lab: endpoints `far` on node1 and `near` and `near2` on node2, the client `sleep` on
    /// node2, and `ext` outside.
    pub fn lab() -> Result<Lab> {
        Ok(Lab::builder()
            .node("node1")
            .node("node2")
            .pod("node1", "far", "10.244.1.5")
            .pod("node2", "near", "10.244.2.10")
            .pod("node2", "near2", "10.244.2.11")
            .pod("node2", "sleep", "10.244.2.8")
            .external("ext")
            .build()?)
    }

    /// A lab whose client's sockets the programs do not see: `far` on node1, `near` and the virtual machine `sleep` on
    /// node2, and `ext` outside.
    pub fn lab_of_packets() -> Result<Lab> {
        Ok(Lab::builder()
            .node("node1")
            .node("node2")
            .pod("node1", "far", "10.244.1.5")
            .pod("node2", "near", "10.244.2.10")
            .vm("node2", "sleep", "10.244.2.8")
            .external("ext")
            .build()?)
    }

    /// Builds the lab and starts endpoints and agent with the services that `services` makes for
    /// it.
    pub fn start(services: impl FnOnce(&Lab) -> Vec<Service>) -> Result<Self> {
        Self::start_with(services, &[])
    }

    /// As [`Cluster::start`], without the packet path.
    pub fn of_sockets(services: impl FnOnce(&Lab) -> Vec<Service>) -> Result<Self> {
        Self::start_with(services, without_packets())
    }

    /// As [`Cluster::start`], with arguments for the agent.
    pub fn start_with(
        services: impl FnOnce(&Lab) -> Vec<Service>,
        arguments: &[&str],
    ) -> Result<Self> {
        Self::start_in(Self::lab()?, &["far", "near", "near2"], services, arguments)
    }

    /// As [`Cluster::start_with`], in a lab with a node2, whose pods `endpoints` serve.
    pub fn start_in(
        lab: Lab,
        endpoints: &[&str],
        services: impl FnOnce(&Lab) -> Vec<Service>,
        arguments: &[&str],
    ) -> Result<Self> {
        Self::start_as(lab, endpoints, services, arguments, |_| {})
    }

    /// As [`Cluster::start_in`], with an agent that serves another cgroup than the node's.
    pub fn start_in_cgroup(
        lab: Lab,
        endpoints: &[&str],
        services: impl FnOnce(&Lab) -> Vec<Service>,
        cgroup: PathBuf,
    ) -> Result<Self> {
        let tell = |agent: &mut Agent| agent.serve_cgroup(cgroup);
        Self::start_as(lab, endpoints, services, &[], tell)
    }

    fn start_as(
        lab: Lab,
        endpoints: &[&str],
        services: impl FnOnce(&Lab) -> Vec<Service>,
        arguments: &[&str],
        prepare: impl FnOnce(&mut Agent),
    ) -> Result<Self> {
        let servers = endpoints
            .iter()
            .map(|name| serve(lab.pod(name)))
            .collect::<Result<_>>()?;
        let manifests = Manifests::new(&services(&lab))?;
        let agent = lab.agent("node2").manifests(manifests.path());
        let mut agent = agent.args(arguments).prepare()?;
        prepare(&mut agent);
        agent.start()?;
        Ok(Self {
            agent,
            manifests,
            _servers: servers,
            lab,
        })
    }

    /// The client pod.
    pub fn client(&self) -> &Host {
        self.lab.pod("sleep")
    }

    /// How many verdicts the kernel gave so far for this reason.
    pub fn verdicts(&self, reason: Reason) -> Result<u64> {
        verdicts(&self.agent, reason)
    }

    /// Returns the output of `dataplane status`.
    pub fn status(&self) -> Result<serde_json::Value> {
        Ok(self.agent.dataplane(["status", "-o", "json"]).json()?)
    }

    /// Does something that has to be refused `count` times, and checks that the kernel counts this reason.
    pub fn for_reason<T>(
        &self,
        reason: Reason,
        count: u64,
        refused: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (result, counted) = counted(&self.agent, reason, refused)?;
        ensure!(
            counted == count,
            "counted as {} {counted} times, not {count}",
            reason.word()
        );
        Ok(result)
    }
}

/// How many verdicts the kernel gave so far for a reason, from an agent's tables. `dataplane status` has them, too, and
/// asks for all else each time: most of what scenarios cost was that.
pub fn verdicts(agent: &Agent, reason: Reason) -> Result<u64> {
    Ok(Tables::open(agent.bpffs())?.reasons()?[reason as usize])
}

/// Does something, and returns how many verdicts the kernel gave for a reason meanwhile.
pub fn counted<T>(
    agent: &Agent,
    reason: Reason,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, u64)> {
    /// How long packets may be in a queue of the kernel's after the sender has stopped waiting.
    const QUEUED: Duration = Duration::from_millis(50);
    let before = verdicts(agent, reason)?;
    let result = work()?;
    thread::sleep(patience(QUEUED));
    Ok((result, verdicts(agent, reason)? - before))
}

/// Serves HTTP, TCP and UDP on all addresses of a host.
pub fn serve(host: &Host) -> Result<Process> {
    let mut arguments = Vec::new();
    for (protocol, port) in [("--http", HTTP), ("--tcp", TCP), ("--udp", UDP)] {
        for address in host.addresses() {
            arguments.extend([
                protocol.to_owned(),
                SocketAddr::new(address, port).to_string(),
            ]);
        }
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    Ok(host.serve(&arguments)?)
}

/// Ends a connection that [`Host::hold`] made, which has to be alive.
pub fn lived(mut held: Process) -> Result<()> {
    held.close_stdin();
    let report: Report = held.wait_json()?;
    let lives = report.errors.is_empty() && report.answered > 0;
    ensure!(lives, "a connection that was there before: {report:?}");
    Ok(())
}

/// Runs `probe` on a host: `ask(sleep, "10.96.0.1:80", "udp --unconnected --count 3")`.
pub fn ask(from: &Host, to: &str, how: &str) -> Result<Report> {
    let mut words = how.split_whitespace();
    let subcommand = words.next().context("a subcommand")?;
    Ok(from
        .probe(subcommand)
        .args(["--to", to])
        .args(words)
        .json()?)
}

/// Asks, and wants every attempt answered, by exactly these endpoints.
pub fn reaches(from: &Host, to: &str, how: &str, endpoints: &[&str]) -> Result<Report> {
    let report = ask(from, to, how)?;
    let what = || format!("`{how}` from {} to {to}: {report:?}", from.name());
    ensure!(
        report.answered == report.attempts,
        "not all were answered: {}",
        what()
    );
    ensure!(
        report.endpoints.keys().eq(endpoints),
        "not answered by {endpoints:?} exactly: {}",
        what()
    );
    Ok(report)
}

/// Wants exactly these peers seen by getpeername(2).
pub fn peer_is(report: &Report, peer: &str) -> Result<()> {
    ensure!(
        report.peers == [peer.parse()?],
        "the peer is not {peer}: {report:?}"
    );
    Ok(())
}

/// Wants every answered attempt to have come from these addresses, as the endpoints saw it.
pub fn sources_are(report: &Report, sources: &[IpAddr]) -> Result<()> {
    for (name, endpoint) in &report.endpoints {
        for source in endpoint.sources.keys() {
            ensure!(
                sources.contains(source),
                "{name} saw {source}, not {sources:?}"
            );
        }
    }
    Ok(())
}

/// Asks, and wants every attempt refused at once (ECONNREFUSED).
pub fn refused(from: &Host, to: &str, how: &str) -> Result<()> {
    fails(from, to, how, "ECONNREFUSED")
}

/// Asks, and wants every attempt to fail with this error.
///
/// A pod whose node has no route also sees `TIMEOUT`: the node's ICMP message arrives while connect(2) holds the
/// socket, which treats it as a passing trouble. On a busy machine the message sometimes arrives later, and ends the
/// attempt.
pub fn fails(from: &Host, to: &str, how: &str, error: &str) -> Result<()> {
    let report = ask(from, to, how)?;
    let count = |error: &str| report.errors.get(error).copied().unwrap_or_default();
    let late = if error == "TIMEOUT" && from.node().is_some() {
        count("ENETUNREACH")
    } else {
        0
    };
    let count = count(error) + late;
    ensure!(
        count == report.attempts && count > 0,
        "`{how}` from {} to {to} should fail with {error}: {report:?}",
        from.name()
    );
    Ok(())
}

/// Runs functions at the same time, for clients whose requests time out. Returns their results.
pub fn at_once<T: Send>(
    works: impl IntoIterator<Item = impl FnOnce() -> Result<T> + Send>,
) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let works: Vec<_> = works.into_iter().map(|work| scope.spawn(work)).collect();
        works
            .into_iter()
            .map(|work| work.join().ok().context("a thread panicked")?)
            .collect()
    })
}

/// Tries until it works, for changes that an agent makes some time after a file changed. The pauses grow with the time
/// that has passed, so that long waits do not slow down the work that they wait for.
pub fn eventually(mut check: impl FnMut() -> Result<()>) -> Result<()> {
    const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
    let patience = patience(Duration::from_secs(30));
    let start = Instant::now();
    loop {
        let result = check();
        let passed = start.elapsed();
        match result {
            Ok(()) => return Ok(()),
            Err(error) if passed > patience => {
                bail!("still, after {} s: {error:#}", patience.as_secs())
            }
            Err(_) => thread::sleep((passed / 8).clamp(PAUSES[0], PAUSES[1])),
        }
    }
}
