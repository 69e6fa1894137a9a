//! How much to measure.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom as _;

/// Sizes, rounds and samples of a benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Sizes of our tables.
    pub ours: &'static [u32],
    /// Sizes of the peers' rules.
    pub theirs: &'static [u32],
    /// Minimum number of rounds.
    pub at_least: usize,
    /// Maximum number of rounds.
    pub at_most: usize,
    /// Time after which no round starts, once the minimum number of rounds is done.
    pub budget: Duration,
    /// Divisor of the number of samples per measurement.
    pub fraction: u32,
}

impl Extent {
    /// Returns whether to start another round after `rounds` rounds since `start`.
    pub fn has_another(&self, rounds: usize, start: Instant) -> bool {
        rounds < self.at_least || rounds < self.at_most && start.elapsed() < self.budget
    }
}

/// Returns the order in which a round measures the lanes: a random one. In a fixed order, each lane would always pay
/// for the kernel's clean-up after the lane before it, such as freeing the memory of thousands of sockets.
pub fn order(of: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..of).collect();
    order.shuffle(&mut rand::rng());
    order
}
