//! Detects threads that no longer run: their sockets accept queries as long as they exist, even if no thread reads
//! them.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The interval at which a thread reports that it runs.
pub const EVERY: Duration = Duration::from_millis(500);
/// A thread that has not beaten for this long hangs. On a busy machine no thread waits this long.
const STUCK: Duration = Duration::from_secs(30);
/// A thread that was silent for so long may have come back to full sockets.
pub const AWAY: Duration = Duration::from_secs(2);

/// A callback for each beat: its argument says how long ago all threads had read their sockets.
pub type Renew = Box<dyn Fn(Duration) + Send + Sync>;

/// The last beat of a thread.
#[derive(Clone, Copy, Debug)]
struct Beat {
    at: Instant,
    /// The thread's sockets have had room since this time. A thread that was away beats before it has read its sockets,
    /// and a full socket loses queries. So the next beat counts.
    reads: Instant,
}

/// The last beat of each thread; `None` before and after its life.
pub struct Beats {
    last: Box<[Mutex<Option<Beat>>]>,
    renew: Renew,
}

impl fmt::Debug for Beats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Beats").field(&self.last).finish()
    }
}

impl Beats {
    /// Creates the record for this many threads, none of which has started.
    pub fn new(threads: usize, renew: Renew) -> Self {
        let last = (0..threads).map(|_| Mutex::default()).collect();
        Self { last, renew }
    }

    /// Records that a thread runs.
    pub fn say(&self, thread: usize, now: Instant) {
        self.set(thread, |before| {
            let reads = match before {
                Some(before) if now.saturating_duration_since(before.at) >= AWAY => before.reads,
                _ => now,
            };
            Some(Beat { at: now, reads })
        });
        let all = self.each().map(|(_, beat)| beat.reads);
        if let Some(reads) = all.min() {
            (self.renew)(now.saturating_duration_since(reads));
        }
    }

    /// A thread ends.
    pub fn end(&self, thread: usize) {
        self.set(thread, |_| None);
    }

    fn set(&self, thread: usize, change: impl FnOnce(Option<Beat>) -> Option<Beat>) {
        if let Some(last) = self.last.get(thread) {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            *last = change(*last);
        }
    }

    fn each(&self) -> impl Iterator<Item = (usize, Beat)> {
        let all = self.last.iter().enumerate();
        all.filter_map(|(number, last)| {
            Some((
                number,
                (*last.lock().unwrap_or_else(PoisonError::into_inner))?,
            ))
        })
    }

    /// The thread that has been silent for longest, as seen at `now`, and for how long.
    pub fn most_silent(&self, now: Instant) -> Option<(String, Duration)> {
        let ago = |beat: Beat| now.saturating_duration_since(beat.at);
        let all = self.each().map(|(number, beat)| (number, ago(beat)));
        let (number, ago) = all.max_by_key(|(_, ago)| *ago)?;
        Some((name(number), ago))
    }

    /// The thread that hangs, as seen at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(String, Duration)> {
        self.most_silent(now).filter(|(_, ago)| *ago >= STUCK)
    }
}

/// Returns a thread's name.
pub fn name(number: usize) -> String {
    format!("dns-{number}")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_thread_that_hangs_is_named() {
        let (beats, now) = (Beats::new(2, Box::new(drop)), Instant::now());
        assert_eq!(beats.stuck(now + STUCK), None, "none has begun");
        beats.say(0, now + EVERY);
        beats.say(1, now);
        let (name, since) = beats.stuck(now + STUCK).unwrap();
        assert_eq!((&*name, since), ("dns-1", STUCK));
        beats.end(1);
        assert_eq!(beats.stuck(now + STUCK), None, "it has ended");
    }

    /// Two threads that have begun now, and the renewals of the lease.
    fn two() -> (Beats, Arc<Mutex<Vec<Duration>>>, Instant) {
        let said = Arc::<Mutex<Vec<Duration>>>::default();
        let own = Arc::clone(&said);
        let beats = Beats::new(2, Box::new(move |ago| own.lock().unwrap().push(ago)));
        let now = Instant::now();
        beats.say(0, now);
        beats.say(1, now);
        (beats, said, now)
    }

    /// Its workloads' queries wait, however well the other threads do.
    #[test]
    fn a_thread_that_hangs_renews_no_lease_by_others() {
        let (beats, said, now) = two();
        for number in 1..=4 {
            beats.say(0, now + EVERY * number);
        }
        beats.end(1);
        beats.say(0, now + EVERY * 5);
        let whole = [0, 0, 1, 2, 3, 4, 0].map(|times| EVERY * times);
        assert_eq!(*said.lock().unwrap(), whole);
    }

    /// A full socket loses queries that resolvers would have answered.
    #[test]
    fn a_thread_that_comes_back_renews_the_lease_when_it_has_read() {
        let (beats, said, now) = two();
        let back = now + AWAY;
        beats.say(0, back);
        assert_eq!(
            beats.most_silent(back),
            Some((name(1), AWAY)),
            "it goes on, for `status`"
        );
        beats.say(1, back);
        beats.say(0, back + EVERY);
        beats.say(1, back + EVERY);
        let zero = Duration::ZERO;
        assert_eq!(
            *said.lock().unwrap(),
            [zero, zero, AWAY, AWAY, AWAY + EVERY, zero]
        );
    }
}
