//! A log of recent events, which threads fill while a reader asks for them.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

/// How long the log keeps events after the last read. So a reader that was killed costs nothing.
const LEASE: Duration = Duration::from_secs(5);
/// Maximum number of events in the log.
const ROOM: usize = 8192;

/// A page of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page<T> {
    /// The events, in their order.
    pub events: Vec<T>,
    /// The number of the first event of the next page.
    pub next: u64,
    /// How many were gone before they were read.
    pub lost: u64,
}

/// The most recent events, recorded while a reader is present.
#[derive(Debug)]
pub struct Recent<T> {
    start: Instant,
    /// The time until which a reader counts as present, in milliseconds from the start.
    until: AtomicU64,
    events: Mutex<Events<T>>,
}

#[derive(Debug)]
struct Events<T> {
    all: VecDeque<T>,
    /// The number of the first of them.
    first: u64,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        let (all, first) = (VecDeque::new(), 0);
        Self {
            start: Instant::now(),
            until: AtomicU64::new(0),
            events: Mutex::new(Events { all, first }),
        }
    }
}

impl<T> Recent<T> {
    fn since_start(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.start);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns the time of an event's beginning; none if there is no reader. Without a reader, it costs one load.
    pub fn begin(&self) -> Option<Instant> {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 {
            return None;
        }
        let now = Instant::now();
        (self.since_start(now) < until).then_some(now)
    }

    /// Adds an event to the log.
    pub fn put(&self, event: T) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.all.push_back(event);
        if events.all.len() > ROOM {
            events.all.pop_front();
            events.first += 1;
        }
    }
}

impl<T: Clone> Recent<T> {
    /// Returns the events from a number on, `most` at most; without a number, those from now on. The log keeps events for five
    /// seconds after each read.
    pub fn read(&self, from: Option<u64>, most: usize) -> Page<T> {
        let now = Instant::now();
        let was_read = self.since_start(now) < self.until.load(Ordering::Relaxed);
        let until = self.since_start(now + LEASE).max(1);
        self.until.fetch_max(until, Ordering::Relaxed);
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if !was_read {
            // The earlier reader of these events no longer exists.
            events.first += events.all.len() as u64;
            events.all = VecDeque::new();
        }
        let end = events.first + events.all.len() as u64;
        let from = from.map_or(end, |from| from.min(end));
        let lost = events.first.saturating_sub(from);
        let skip = usize::try_from(from.saturating_sub(events.first)).unwrap_or(usize::MAX);
        let page: Vec<T> = events.all.iter().skip(skip).take(most).cloned().collect();
        Page {
            next: from.max(events.first) + page.len() as u64,
            events: page,
            lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(log: &Recent<usize>, number: usize) {
        if log.begin().is_some() {
            log.put(number);
        }
    }

    #[test]
    fn events_are_kept_while_somebody_reads() {
        let log = Recent::default();
        put(&log, 0);
        let first = log.read(None, 10);
        assert_eq!((first.events.len(), first.lost), (0, 0));
        put(&log, 1);
        put(&log, 2);
        let second = log.read(Some(first.next), 1);
        assert_eq!(second.events, [1]);
        let third = log.read(Some(second.next), 10);
        assert_eq!(third.events, [2]);
        // A number that is not there yet, from before a restart.
        assert!(log.read(Some(99), 10).events.is_empty());
        for number in 0..ROOM + 5 {
            put(&log, number);
        }
        let late = log.read(Some(third.next), usize::MAX);
        assert_eq!((late.events.len(), late.lost), (ROOM, 5));
        assert_eq!(log.read(Some(late.next), 10).events.len(), 0);
        // No reader has come for long: the log records nothing, and the next reader gets none of its old entries.
        log.until.store(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        put(&log, 3);
        let next = log.read(Some(late.next), 10);
        assert_eq!((next.events.len(), next.lost), (0, 0));
    }
}
