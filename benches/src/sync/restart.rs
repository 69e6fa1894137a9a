//! Measures a restart: an agent is killed, and a new agent starts. Times are from the new agent's exec until
//! connections of captured workloads are served.

use std::{thread, time::Duration};

use anyhow::Context as _;
use dataplane_tests::{Process, report::LoadReport};
use nix::time::{ClockId, clock_gettime};

use super::{
    pods::{SERVER, WORKLOADS},
    site::Site,
};
use crate::say;

const PORT: u16 = 7;
/// Workloads whose clients connect all the time. Their names are chosen so that they are spread over the order in which
/// the agent processes workloads.
const CLIENTS: [&str; 3] = ["pod1", "pod2", "pod9"];
/// How long a client waits between two attempts, in microseconds. This is the precision of the measurement.
const PAUSE_US: &str = "2000";

/// The figures of a round, in milliseconds from exec.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The first served connection of any workload.
    pub first: f64,
    /// The first served connection of the workload that waited longest.
    pub last: f64,
}

/// Kills the agent and starts a new agent, `rounds` times.
///
/// # Errors
///
/// Fails if the agent does not run, or if a client is never served.
pub fn run(services: u32, rounds: usize) -> anyhow::Result<Vec<Times>> {
    let mut site = Site::with_captured(services)?;
    let to = format!("{}:{PORT}", SERVER.1);
    let server = site.lab().pod(SERVER.0).serve(&["--tcp", &to])?;
    site.start_from_nothing()?;
    let mut times = Vec::new();
    for round in 1..=rounds {
        say!("restart {round} of {rounds}, with {WORKLOADS} captured workloads");
        times.push(restart(&mut site, &to)?);
    }
    drop(server);
    Ok(times)
}

fn restart(site: &mut Site, to: &str) -> anyhow::Result<Times> {
    site.kill();
    let arguments = ["--to", to, "--pause-us", PAUSE_US, "--each"];
    let clients = CLIENTS.map(|name| site.lab().pod(name).load(&arguments));
    let clients: Vec<Process> = clients.into_iter().collect::<Result<_, _>>()?;
    thread::sleep(Duration::from_millis(200));
    let start = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    site.start()?;
    thread::sleep(Duration::from_millis(500));
    let mut served = Vec::new();
    for client in clients {
        let report: LoadReport = client.wait_json()?;
        let first = report
            .each
            .first()
            .context("a client that was not served")?;
        let at = Duration::from_nanos(first.started_at_ns);
        served.push(at.saturating_sub(start).as_secs_f64() * 1e3);
    }
    Ok(Times {
        first: served.iter().copied().fold(f64::INFINITY, f64::min),
        last: served.iter().copied().fold(0.0, f64::max),
    })
}
