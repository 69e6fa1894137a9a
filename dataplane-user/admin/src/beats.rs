//! Detects threads that change the kernel and hang in one piece of work.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use super::lock::lock;

/// Longer than any piece of work: with 100 000 services the longest take some seconds.
const STUCK: Duration = Duration::from_mins(2);

/// The threads that change the kernel.
#[derive(Debug, Default)]
pub struct Beats {
    /// The thread that writes the tables of services.
    pub tables: Beat,
    /// The thread that attaches programs.
    pub attacher: Beat,
    /// The thread that ends stale flows, and collects those that are over.
    pub flows: Beat,
}

impl Beats {
    /// Returns the thread that hangs at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(&'static str, Duration)> {
        let all = [
            ("tables", &self.tables),
            ("attacher", &self.attacher),
            ("flows", &self.flows),
        ];
        all.into_iter().find_map(|(name, beat)| {
            let busy = now.saturating_duration_since((*lock(&beat.0))?);
            (busy >= STUCK).then_some((name, busy))
        })
    }
}

/// The time since which a thread has been at one piece of work.
#[derive(Debug, Default)]
pub struct Beat(Mutex<Option<Instant>>);

impl Beat {
    /// Begins a piece of work; it ends when the result is dropped.
    pub fn begin(&self) -> Busy<'_> {
        *lock(&self.0) = Some(Instant::now());
        Busy(self)
    }
}

/// A piece of work.
#[derive(Debug)]
pub struct Busy<'a>(&'a Beat);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_is_named_and_one_that_waits_is_not() {
        let beats = Beats::default();
        let later = || Instant::now() + STUCK;
        assert_eq!(beats.stuck(later()), None, "nothing to do");
        for (name, beat) in [
            ("tables", &beats.tables),
            ("attacher", &beats.attacher),
            ("flows", &beats.flows),
        ] {
            let busy = beat.begin();
            assert_eq!(beats.stuck(Instant::now()), None);
            assert_eq!(beats.stuck(later()).map(|(name, _)| name), Some(name));
            drop(busy);
            assert_eq!(beats.stuck(later()), None);
        }
    }
}
