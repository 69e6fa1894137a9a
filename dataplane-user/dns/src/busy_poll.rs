//! Whether a thread asks the kernel for the next query over and over, before it sleeps until one arrives.
//!
//! A client often sends its next query as soon as it has an answer: the next name of its search list, or the other address
//! family. Waking a thread on an idle CPU takes longer than the answer does. So a thread that has answered polls for a moment,
//! as long as that pays: queries that come one at a time, or in pairs, do not make it poll for each of them. While queries wait
//! in its sockets, it has no need to.

use std::time::{Duration, Instant};

/// How long a thread polls after an answer: as long as a client on another CPU takes to wake up and ask again.
const MOMENT: Duration = Duration::from_micros(60);
/// The confidence that polling pays off: [`SURE`] if it did so the last times, and 0 if it did not.
type Trust = u32;
const SURE: Trust = 1 << 10;
/// The weight of the last time: a sixteenth.
const WEIGHT: Trust = 16;
/// It pays if more than five of eight times do: of a client's pair of queries for both families, one has an answer already
/// when the other arrives, and then nothing follows.
const ENOUGH: Trust = SURE / 8 * 5;
/// While it does not pay, a thread tries it after every such number of times.
const SELDOM: u32 = 16;

/// A thread's busy polling.
#[derive(Debug, Default)]
pub struct BusyPoll {
    /// Whether it polls at all: with one CPU it would keep the client from running.
    allowed: bool,
    /// Until when the thread polls.
    until: Option<Instant>,
    trust: Trust,
    skipped: u32,
}

impl BusyPoll {
    /// Creates the state of a thread on a machine with this many CPUs.
    pub fn new(cpus: usize) -> Self {
        Self {
            allowed: cpus > 1,
            trust: ENOUGH,
            ..Self::default()
        }
    }

    /// Queries have arrived: if the thread polls, it has paid.
    pub fn arrived(&mut self, now: Instant) {
        if let Some(until) = self.until.take() {
            self.learn(now < until);
        }
    }

    /// Queries were answered, and no others wait. Returns whether the thread should poll from now on, which
    /// [`Self::goes_on`] ends.
    pub fn answered(&mut self, now: Instant) -> bool {
        if !self.allowed {
            return false;
        }
        let pays = self.trust >= ENOUGH;
        if !pays {
            self.skipped += 1;
            if self.skipped < SELDOM {
                return false;
            }
        }
        self.skipped = 0;
        self.until = Some(now + MOMENT);
        true
    }

    /// Whether the thread polls once more.
    pub fn goes_on(&mut self, now: Instant) -> bool {
        match self.until {
            Some(until) if now < until => true,
            Some(_) => {
                self.until = None;
                self.learn(false);
                false
            }
            None => false,
        }
    }

    fn learn(&mut self, paid: bool) {
        self.trust -= self.trust / WEIGHT;
        if paid {
            self.trust += SURE / WEIGHT;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    const STEP: Duration = Duration::from_micros(1);

    /// Queries at these distances; returns for how long the thread polled.
    fn polled(poll: &mut BusyPoll, distances: impl IntoIterator<Item = Duration>) -> Duration {
        let mut now = Instant::now();
        let mut polled = Duration::ZERO;
        for distance in distances {
            let next = now + distance;
            poll.arrived(now);
            poll.answered(now);
            while now < next && poll.goes_on(now) {
                now += STEP;
                polled += STEP;
            }
            now = next;
        }
        polled
    }

    #[test]
    fn a_moment_has_an_end() {
        let mut poll = BusyPoll::new(2);
        let now = Instant::now();
        assert!(poll.answered(now) && poll.goes_on(now + MOMENT.saturating_sub(STEP)));
        assert!(!poll.goes_on(now + MOMENT));
        let less = ENOUGH - ENOUGH / WEIGHT;
        assert_eq!(poll.trust, less);
        poll.until = Some(now);
        poll.arrived(now);
        assert_eq!(poll.trust, less - less / WEIGHT, "too late");
        for _ in 1..SELDOM {
            assert!(!poll.answered(now));
        }
        assert!(poll.answered(now));
    }

    #[test]
    fn a_query_that_follows_an_answer_at_once_finds_the_thread_awake() {
        let mut poll = BusyPoll::new(2);
        let distance = Duration::from_micros(30);
        assert_eq!(
            polled(&mut poll, iter::repeat_n(distance, 1000)),
            distance * 1000
        );
    }

    #[test]
    fn queries_that_come_one_at_a_time_cost_little() {
        let mut poll = BusyPoll::new(2);
        let distance = Duration::from_millis(1);
        // At first it does not know.
        polled(&mut poll, [distance; 100]);
        let each = polled(&mut poll, iter::repeat_n(distance, 1600)) / 1600;
        assert!(each <= MOMENT / SELDOM + STEP, "{each:?}");
    }

    #[test]
    fn pairs_of_queries_cost_little() {
        let mut poll = BusyPoll::new(2);
        let pair = [Duration::from_micros(10), Duration::from_millis(1)];
        let all = |count| iter::repeat_n(pair, count).flatten();
        polled(&mut poll, all(100));
        let each = polled(&mut poll, all(800)) / 1600;
        assert!(each <= MOMENT / SELDOM + STEP, "{each:?}");
    }

    #[test]
    fn it_learns_anew_that_it_pays() {
        let mut poll = BusyPoll::new(2);
        polled(&mut poll, iter::repeat_n(Duration::from_millis(1), 1000));
        let soon = Duration::from_micros(30);
        polled(&mut poll, iter::repeat_n(soon, 1000));
        assert_eq!(polled(&mut poll, [soon; 100]), soon * 100);
    }

    #[test]
    fn with_one_cpu_it_lets_the_client_run() {
        let mut poll = BusyPoll::new(1);
        assert_eq!(
            polled(&mut poll, [Duration::from_micros(30); 100]),
            Duration::ZERO
        );
    }
}
