//! Run time of the agent's programs, as counted by the kernel.

use std::{collections::BTreeSet, os::fd::OwnedFd, time::Duration};

use anyhow::Context as _;
use aya::{
    programs::loaded_programs,
    sys::{Stats, enable_stats},
};

/// Run time and calls of programs so far.
#[derive(Clone, Copy)]
pub struct Taken {
    time: Duration,
    calls: u64,
}

/// Has the kernel count run times until the returned value is dropped. The kernel then reads the clock twice per call.
/// This takes about 40 ns and is part of the figures, so no other measurement runs at this time.
///
/// # Errors
/// Fails if the kernel refuses.
pub fn counting() -> anyhow::Result<OwnedFd> {
    enable_stats(Stats::RunTime).context("cannot have the kernel count what programs take")
}

impl Taken {
    /// Reads the counters of the programs with these numbers. They are the programs of one node only, because the lab's
    /// bridge now and then floods copies of packets to the other nodes.
    ///
    /// # Errors
    /// Fails if the kernel does not list its programs.
    pub fn now(numbers: &BTreeSet<u32>) -> anyhow::Result<Self> {
        let mut taken = Self {
            time: Duration::ZERO,
            calls: 0,
        };
        for program in loaded_programs() {
            let program = program.context("cannot look at the programs")?;
            if numbers.contains(&program.id()) {
                taken.time += program.run_time();
                taken.calls += program.run_count();
            }
        }
        Ok(taken)
    }

    /// Returns nanoseconds and calls since `then`, divided by `count`.
    #[expect(clippy::cast_precision_loss, reason = "below 2^52")]
    pub fn since(self, then: Self, count: u32) -> (f64, f64) {
        let nanoseconds = self.time.saturating_sub(then.time).as_nanos() as f64;
        let calls = (self.calls - then.calls) as f64;
        let count = f64::from(count);
        (nanoseconds / count, calls / count)
    }
}
