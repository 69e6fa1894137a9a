//! Whether the threads go on: their sockets take queries as long as they exist, whether anybody reads them or not.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How often a thread says that it goes on.
pub const EVERY: Duration = Duration::from_secs(1);
/// A thread that has not said so for so long hangs. A busy machine lets none wait so long.
const STUCK: Duration = Duration::from_secs(30);

/// When each thread last said that it goes on; none before and after its life.
#[derive(Debug)]
pub struct Beats(Box<[Mutex<Option<Instant>>]>);

impl Beats {
    /// Of so many threads, none of which has begun.
    pub fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| Mutex::default()).collect())
    }

    /// A thread goes on, or ends: there is no `time` then.
    pub fn say(&self, thread: usize, time: Option<Instant>) {
        if let Some(beat) = self.0.get(thread) {
            *beat.lock().unwrap_or_else(PoisonError::into_inner) = time;
        }
    }

    /// The thread that hangs, as seen at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(String, Duration)> {
        self.0.iter().enumerate().find_map(|(number, beat)| {
            let last = *beat.lock().unwrap_or_else(PoisonError::into_inner);
            let since = now.saturating_duration_since(last?);
            (since >= STUCK).then(|| (name(number), since))
        })
    }
}

/// What a thread is called.
pub fn name(number: usize) -> String {
    format!("dns-{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_is_named() {
        let (beats, now) = (Beats::new(2), Instant::now());
        assert_eq!(beats.stuck(now + STUCK), None, "none has begun");
        beats.say(0, Some(now + EVERY));
        beats.say(1, Some(now));
        let (name, since) = beats.stuck(now + STUCK).unwrap();
        assert_eq!((&*name, since), ("dns-1", STUCK));
        beats.say(1, None);
        assert_eq!(beats.stuck(now + STUCK), None, "it has ended");
    }
}
