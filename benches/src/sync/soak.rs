//! `bench sync --soak`: a large cluster that changes all the time, and an API server that ends
//! connections and restarts.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;

use super::{seen::served, site::Site};
use crate::{rows::thousands, say};

/// Size, rate and duration of a soak test.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// Number of services at the beginning. The number at the end is similar.
    pub services: u32,
    /// Changes per second.
    pub rate: u32,
    /// Duration.
    pub time: Duration,
    /// How often the watches are dropped.
    pub drop_every: Duration,
}

/// Changes the cluster and drops watches. Then compares the agent's tables with the tables of a
/// fresh start, and its memory with its memory after the first quarter of the run.
///
/// # Errors
///
/// Fails if the tables differ, or if memory has grown by more than a tenth.
pub fn run(soak: Soak) -> anyhow::Result<()> {
    say!("making {} services", thousands(soak.services));
    let mut site = Site::new(soak.services)?;
    let first = site.start_from_nothing()?;
    thread::sleep(Duration::from_secs(2));
    let at_rest = site.rss_mib()?;
    say!("all services are in the kernel after {first:.2?}; the agent has {at_rest:.1} MiB");

    let start = Instant::now();
    let (mut changes, mut drops) = (0u32, 0u32);
    let mut memory = Vec::new();
    while start.elapsed() < soak.time {
        // Make all changes that are due.
        let due = start.elapsed().as_secs_f64() * f64::from(soak.rate);
        while f64::from(changes) < due {
            site.churn.step();
            changes += 1;
        }
        if start.elapsed() >= soak.drop_every * (drops + 1) {
            drops += 1;
            match drops % 10 {
                // The server ends the watches, as it does when their time is over.
                1..=4 => site.server.faults().end_watches(),
                // Connections break.
                5..=8 => site.server.faults().break_watches(),
                // The server restarts.
                9 => {
                    site.server.go_away();
                    site.server.come_back()?;
                }
                // The server restarts, and has compacted the history of its objects.
                _ => {
                    site.server.go_away();
                    site.churn.step();
                    site.cluster().compact();
                    site.server.come_back()?;
                }
            }
        }
        let second = u32::try_from(start.elapsed().as_secs())?;
        if second / 15 >= u32::try_from(memory.len())? {
            memory.push(site.rss_mib()?);
            let now = memory.last().copied().unwrap_or_default();
            say!("{second} s: {changes} changes, {drops} dropped watches, {now:.1} MiB");
        }
        thread::sleep(Duration::from_millis(2));
    }

    say!("comparing the tables with those of a fresh start");
    let fresh = site.fresh()?;
    let limit = Instant::now() + Duration::from_secs(20);
    let wanted = served(fresh.bpffs())?;
    loop {
        let have = served(&site.bpffs)?;
        if have == wanted {
            break;
        }
        let differ = wanted
            .iter()
            .find(|(key, value)| have.get(*key) != Some(*value))
            .map(|(key, value)| format!("{key}: {:?}, not {value}", have.get(key)));
        ensure!(
            Instant::now() < limit,
            "{} frontends, {} after a fresh start; {differ:?}",
            have.len(),
            wanted.len()
        );
        thread::sleep(Duration::from_millis(100));
    }
    drop(fresh);
    thread::sleep(Duration::from_secs(2));
    let last = site.rss_mib()?;
    let most = memory.iter().copied().fold(0.0, f64::max);
    let agent = &site.status()?["agent"];
    anstream::println!(
        "soak: {} services, {changes} changes, {drops} times dropped in {:.0?}; {} frontends as after \
         a fresh start; {} syncs, {} errors; memory {at_rest:.1} MiB at first, {most:.1} at most, \
         {last:.1} at the end",
        thousands(soak.services),
        start.elapsed(),
        wanted.len(),
        agent["syncs"],
        agent["sync_errors"],
    );
    // In the first quarter, memory grows because changes need more memory than a start. Compare
    // with the value after it.
    let settled = memory.get(memory.len() / 4).copied().unwrap_or(at_rest);
    ensure!(
        last <= settled * 1.1,
        "memory has grown from {settled:.1} to {last:.1} MiB"
    );
    Ok(())
}
