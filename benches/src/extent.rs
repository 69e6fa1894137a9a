//! How much to measure.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom as _;

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

/// In which order things are measured in a round: by chance. What always came after the same would always
/// take over what the kernel still has to clear away after that, as memory of thousands of sockets.
pub fn order(of: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..of).collect();
    order.shuffle(&mut rand::rng());
    order
}
