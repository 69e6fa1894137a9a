//! Whether the threads that change the kernel go on, or hang in one piece of work.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use super::lock::lock;

/// No piece of work takes so long: with 100 000 services the longest take some seconds.
const STUCK: Duration = Duration::from_mins(2);

/// The threads that change the kernel.
#[derive(Debug, Default)]
pub struct Beats {
    /// The one that writes the tables of services.
    pub tables: Beat,
    /// The one that attaches programs.
    pub attacher: Beat,
    /// The one that ends flows, and collects those that are over.
    pub flows: Beat,
}

impl Beats {
    /// The thread that hangs, as seen at `now`, and for how long.
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

/// Since when a thread has been at one piece of work.
#[derive(Debug, Default)]
pub struct Beat(Mutex<Option<Instant>>);

impl Beat {
    /// A piece of work begins; it ends when what this returns is dropped.
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
