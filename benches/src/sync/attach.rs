//! Measures pods that start together: from their last interface's creation until the agent's programs are on all of them.

use std::{
    fmt::Write as _,
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use dataplane_common::packet::Iface;
use kernel::packet::PacketTables;

use super::site::Site;

/// How many pods start together.
pub const PODS: u32 = 40;
/// The number of the first interface.
const FIRST: u32 = 10_000;
const PATIENCE: Duration = Duration::from_secs(30);

/// Measures so many rounds, in milliseconds.
///
/// # Errors
///
/// Fails if the agent does not run, or if an interface never has programs.
pub fn run(services: u32, rounds: u32) -> anyhow::Result<Vec<f64>> {
    let mut site = Site::new(services)?;
    site.start_from_nothing()?;
    let tables = PacketTables::open(&site.bpffs)?;
    let (node, pods) = (site.lab().node("agent"), site.lab().node("fresh").netns());
    let batch = |lines: &str| -> anyhow::Result<()> {
        let script = format!("ip -batch - <<'end'\n{lines}end");
        node.command("sh").args(["-c", &script]).run()?;
        Ok(())
    };
    let mut times = Vec::new();
    for round in 0..rounds {
        let first = FIRST + round * PODS;
        let numbers = first..first + PODS;
        let (mut add, mut remove) = (String::new(), String::new());
        for number in numbers.clone() {
            writeln!(
                add,
                "link add p{number} index {number} type veth peer name p{number} netns {pods}\nlink set p{number} up"
            )?;
            writeln!(remove, "link del p{number}")?;
        }
        batch(&add)?;
        let start = Instant::now();
        for number in numbers {
            let has_programs = || -> anyhow::Result<bool> {
                let iface = tables.iface(number)?;
                Ok(iface.is_some_and(|iface| iface.flags & Iface::ATTACHED != 0))
            };
            while !has_programs()? {
                ensure!(start.elapsed() < PATIENCE, "p{number} has no programs");
                thread::sleep(Duration::from_micros(200));
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
        batch(&remove)?;
        // The agent has time to rest.
        thread::sleep(Duration::from_secs(2));
    }
    Ok(times)
}
