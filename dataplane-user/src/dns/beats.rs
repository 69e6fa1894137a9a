//! Whether the threads go on: their sockets take queries as long as they exist, whether anybody reads them or not.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How often a thread says that it goes on.
pub const EVERY: Duration = Duration::from_millis(500);
/// A thread that has not said so for so long hangs. A busy machine lets none wait so long.
const STUCK: Duration = Duration::from_secs(30);

/// Is told, whenever a thread goes on, how long ago all of them did.
pub type Renew = Box<dyn Fn(Duration) + Send + Sync>;

/// When each thread last said that it goes on; none before and after its life.
pub struct Beats {
    last: Box<[Mutex<Option<Instant>>]>,
    renew: Renew,
}

impl fmt::Debug for Beats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Beats").field(&self.last).finish()
    }
}

impl Beats {
    /// Of so many threads, none of which has begun.
    pub fn new(threads: usize, renew: Renew) -> Self {
        let last = (0..threads).map(|_| Mutex::default()).collect();
        Self { last, renew }
    }

    /// A thread goes on.
    pub fn say(&self, thread: usize, now: Instant) {
        self.set(thread, Some(now));
        if let Some((_, ago)) = self.most_silent(now) {
            (self.renew)(ago);
        }
    }

    /// A thread ends.
    pub fn end(&self, thread: usize) {
        self.set(thread, None);
    }

    fn set(&self, thread: usize, beat: Option<Instant>) {
        if let Some(last) = self.last.get(thread) {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = beat;
        }
    }

    /// The thread that has been silent for longest, as seen at `now`, and for how long.
    pub fn most_silent(&self, now: Instant) -> Option<(String, Duration)> {
        let since = |(number, last): (usize, &Mutex<Option<Instant>>)| {
            let last = *last.lock().unwrap_or_else(PoisonError::into_inner);
            Some((number, now.saturating_duration_since(last?)))
        };
        let all = self.last.iter().enumerate().filter_map(since);
        let (number, ago) = all.max_by_key(|(_, ago)| *ago)?;
        Some((name(number), ago))
    }

    /// The thread that hangs, as seen at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(String, Duration)> {
        self.most_silent(now).filter(|(_, ago)| *ago >= STUCK)
    }
}

/// What a thread is called.
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

    /// Its workloads' queries wait, however well the other threads do.
    #[test]
    fn a_thread_that_hangs_renews_no_lease_by_others() {
        let said = Arc::<Mutex<Vec<Duration>>>::default();
        let own = Arc::clone(&said);
        let beats = Beats::new(2, Box::new(move |ago| own.lock().unwrap().push(ago)));
        let now = Instant::now();
        beats.say(0, now);
        beats.say(1, now);
        for number in 1..=4 {
            beats.say(0, now + EVERY * number);
        }
        beats.end(1);
        beats.say(0, now + EVERY * 5);
        let whole = [0, 0, 1, 2, 3, 4, 0].map(|times| EVERY * times);
        assert_eq!(*said.lock().unwrap(), whole);
    }
}
