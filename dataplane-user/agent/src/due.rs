//! When the thread that attaches programs does each kind of work again, and how long it rests in between.

use std::time::{Duration, Instant};

/// After a piece of work the thread rests for this many times the work's duration.
const REST_FOR: u32 = 4;

/// Longer than any agent runs. (Clocks can still represent it.)
pub const NEVER: Duration = Duration::from_hours(365 * 24);

/// When a kind of work is due.
pub struct Due {
    pub at: Instant,
    /// The end of the thread's rest: not before this time.
    rested: Instant,
    /// The end of the shorter rest of [`Due::sooner`].
    rested_once: Instant,
}

impl Due {
    pub fn at(at: Instant) -> Self {
        Self {
            at,
            rested: at,
            rested_once: at,
        }
    }

    /// Not due before an event.
    pub fn never(now: Instant) -> Self {
        Self {
            at: now + NEVER,
            rested: now,
            rested_once: now,
        }
    }

    /// As soon as the thread has rested.
    pub fn soon(&mut self) {
        self.at = self.at.min(self.rested);
    }

    /// As soon as the thread has rested as long as the work took, or computed ([`Due::rest_once`]): something waits for it.
    pub fn sooner(&mut self) {
        self.at = self.at.min(self.rested_once);
    }

    /// The work was done and took so much of a processor's time. It is due again after `patience` at the latest.
    pub fn done_in(&mut self, took: Duration, patience: Duration) {
        self.rest(REST_FOR, took, patience);
    }

    /// The work has run since `start`. It is due again after `patience` at the latest.
    pub fn done(&mut self, start: Instant, patience: Duration) {
        self.done_resting(REST_FOR, start, patience);
    }

    /// As [`Due::done`], with a rest of so many times the work's duration.
    pub fn done_resting(&mut self, times: u32, start: Instant, patience: Duration) {
        self.rest(times, start.elapsed(), patience);
    }

    /// The work that was done has computed for so long, which is the shorter rest. The rest of its time it has waited for the
    /// kernel's locks, which needs no rest.
    pub fn rest_once(&mut self, computed: Duration) {
        self.rested_once = Instant::now() + computed;
    }

    fn rest(&mut self, times: u32, took: Duration, patience: Duration) {
        let end = Instant::now();
        self.rested_once = end + took;
        self.rested = end + took * times;
        self.at = self.rested.max(end + patience);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LOOK;

    #[test]
    fn the_thread_rests_whatever_happens() {
        let start = Instant::now();
        let mut due = Due::at(start);
        std::thread::sleep(Duration::from_millis(2));
        due.done(start, LOOK);
        let took = start.elapsed();
        assert!(due.at >= start + LOOK, "nothing happens: later");
        due.soon();
        assert_eq!(due.at, due.rested);
        assert!(
            due.rested >= start + 4 * Duration::from_millis(2) && due.rested <= start + 6 * took
        );
        // A second change does not make it due sooner.
        due.soon();
        assert_eq!(due.at, due.rested);
        due.sooner();
        assert_eq!(due.at, due.rested_once);
        assert!(due.at >= start + 2 * Duration::from_millis(2) && due.at < due.rested);
        due.soon();
        assert_eq!(due.at, due.rested_once);
        due.done(start, LOOK);
        due.rest_once(Duration::ZERO);
        due.sooner();
        assert!(due.at <= Instant::now(), "it only waited");
    }
}
