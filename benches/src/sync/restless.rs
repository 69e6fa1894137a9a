//! A node on which pods and interfaces change all the time, while a service's endpoint changes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use dataplane_tests::{Process, api::Cluster};

use super::{
    pods::{PODS, pod},
    site::Site,
};

/// Changes of pods per second, and changes of interfaces per second.
const RATE: u32 = 100;
/// Number of interfaces that go up and down.
const INTERFACES: u32 = 20;

/// Changes pods and interfaces until it is dropped.
pub struct Restless {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<anyhow::Result<()>>>,
}

impl Restless {
    /// Starts to change pods and interfaces, on the agent's node.
    ///
    /// # Errors
    ///
    /// Fails if the interfaces cannot be made.
    pub fn start(site: &Site) -> anyhow::Result<Self> {
        let node = site.lab().node("agent");
        let elsewhere = site.lab().external("api").netns();
        for number in 0..INTERFACES {
            let pair =
                format!("link add flap{number} type veth peer name flop{number} netns {elsewhere}");
            node.ip(&pair)?;
            node.ip(&format!("link set flap{number} up"))?;
        }
        let ip = node
            .command("ip")
            .args(["-batch", "-"])
            .stdin_piped()
            .spawn()?;
        let stop = Arc::<AtomicBool>::default();
        let (a, b) = (Arc::clone(&stop), Arc::clone(&stop));
        let cluster = site.cluster().clone();
        Ok(Self {
            stop,
            threads: vec![
                thread::spawn(move || interfaces_change(ip, &a)),
                thread::spawn(move || {
                    pods_change(&cluster, &b);
                    Ok(())
                }),
            ],
        })
    }

    /// Stops the changes.
    ///
    /// # Errors
    ///
    /// Fails if a change failed.
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread
                .join()
                .ok()
                .context("a thread that changes things")??;
        }
        Ok(())
    }
}

impl Drop for Restless {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn interfaces_change(mut ip: Process, stop: &AtomicBool) -> anyhow::Result<()> {
    paced(stop, |turn| {
        let number = turn % INTERFACES;
        let to = if (turn / INTERFACES).is_multiple_of(2) {
            "down"
        } else {
            "up"
        };
        Ok(ip.send_line(&format!("link set flap{number} {to}"))?)
    })?;
    ip.close_stdin();
    ip.wait()?;
    Ok(())
}

fn pods_change(cluster: &Cluster, stop: &AtomicBool) {
    let changed = paced(stop, |turn| {
        cluster.apply(pod(turn * 7 % PODS, turn + 1));
        Ok(())
    });
    // It cannot fail.
    drop(changed);
}

/// Calls `work` [`RATE`] times per second.
fn paced(stop: &AtomicBool, mut work: impl FnMut(u32) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let start = Instant::now();
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        work(turn)?;
        let next = start + Duration::from_secs(1) / RATE * (turn + 1);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}
