//! How much to measure.

use std::time::{Duration, Instant};

/// Sizes, rounds, samples.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Sizes of our tables.
    pub ours: &'static [u32],
    /// Sizes of the peers' rules.
    pub theirs: &'static [u32],
    /// At least so many rounds,
    pub at_least: usize,
    /// at most so many,
    pub at_most: usize,
    /// and, between the two, none that begins after this time.
    pub budget: Duration,
    /// Samples per measurement, as a divisor.
    pub fraction: u32,
}

impl Extent {
    /// Whether there is time for another round after so many since `start`.
    pub fn has_another(&self, rounds: usize, start: Instant) -> bool {
        rounds < self.at_least || rounds < self.at_most && start.elapsed() < self.budget
    }
}
