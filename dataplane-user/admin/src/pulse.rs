//! Whether the agent keeps up with what it is told.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use super::lock::lock;

/// A change that waits longer than this to be written makes the node unhealthy: kube-proxy's
/// default, twice its longest interval between syncs.
const LATE: Duration = Duration::from_mins(1);

/// Since when something has been waiting to be written, be it that the kernel refuses it or that
/// the agent hangs.
#[derive(Debug, Default)]
pub struct Pulse(Mutex<Option<Instant>>);

impl Pulse {
    /// There is something to do, from now on or already.
    pub fn busy(&self) {
        lock(&self.0).get_or_insert_with(Instant::now);
    }

    /// All is done.
    pub fn idle(&self) {
        *lock(&self.0) = None;
    }

    /// How long something has been waiting, as seen at `now`, if that is too long.
    pub fn late(&self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since((*lock(&self.0))?);
        (waited >= LATE).then_some(waited)
    }
}

#[cfg(test)]
impl Pulse {
    /// As it is when something has been waiting for far too long.
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
        // A second change does not make the first one younger.
        pulse.busy();
        assert!(pulse.late(Instant::now() + LATE).is_some());
        pulse.idle();
        assert_eq!(pulse.late(start + 10 * LATE), None);
    }
}
