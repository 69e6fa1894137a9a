//! Detects an agent that falls behind its source.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use super::lock::lock;

/// A change that waits longer than this to be written makes the node unhealthy: kube-proxy's
/// default, twice its longest interval between syncs.
const LATE: Duration = Duration::from_mins(1);

/// Since when a change has been waiting to be written, because the kernel refuses it or the agent hangs.
#[derive(Debug, Default)]
pub struct Pulse(Mutex<Option<Instant>>);

impl Pulse {
    /// Records that there is work, from now on or already.
    pub fn busy(&self) {
        lock(&self.0).get_or_insert_with(Instant::now);
    }

    /// Records that all work is done.
    pub fn idle(&self) {
        *lock(&self.0) = None;
    }

    /// Returns how long a change has been waiting at `now`, if that is too long.
    pub fn late(&self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since((*lock(&self.0))?);
        (waited >= LATE).then_some(waited)
    }
}

#[cfg(test)]
impl Pulse {
    /// Sets the state after a change has been waiting for far too long.
    pub fn make_late(&self) {
        *lock(&self.0) = Instant::now().checked_sub(2 * LATE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_too_long_is_late() {
        let pulse = Pulse::default();
        let start = Instant::now();
        assert_eq!(pulse.late(start + 10 * LATE), None, "nothing to do");
        pulse.busy();
        assert_eq!(pulse.late(start + LATE / 2), None);
        // A second change does not reset the time of the first.
        pulse.busy();
        assert!(pulse.late(Instant::now() + LATE).is_some());
        pulse.idle();
        assert_eq!(pulse.late(start + 10 * LATE), None);
    }
}
