//! What our programs take of what is measured, as the kernel counts it.

use std::{collections::BTreeSet, os::fd::OwnedFd, time::Duration};

use anyhow::Context as _;
use aya::{
    programs::loaded_programs,
    sys::{Stats, enable_stats},
};

/// What programs have taken so far.
#[derive(Clone, Copy)]
pub struct Taken {
    time: Duration,
    calls: u64,
}

/// While what is returned is there, the kernel counts: two readings of the clock a call, some 40 ns, which
/// are in the figures. So nothing else is measured meanwhile.
///
/// # Errors
/// If the kernel does not let us.
pub fn counting() -> anyhow::Result<OwnedFd> {
    enable_stats(Stats::RunTime).context("cannot have the kernel count what programs take")
}

impl Taken {
    /// By the programs of these numbers: those of one node, since the lab's bridge floods copies of packets
    /// to the others now and then.
    ///
    /// # Errors
    /// If they cannot be looked at.
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

    /// Nanoseconds and calls since then, for each of so many.
    #[expect(clippy::cast_precision_loss, reason = "below 2^52")]
    pub fn since(self, then: Self, count: u32) -> (f64, f64) {
        let nanoseconds = self.time.saturating_sub(then.time).as_nanos() as f64;
        let calls = (self.calls - then.calls) as f64;
        let count = f64::from(count);
        (nanoseconds / count, calls / count)
    }
}
