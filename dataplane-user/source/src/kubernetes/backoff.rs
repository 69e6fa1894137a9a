//! The delay between attempts to read a kind.

use std::time::Duration;

use super::Patience;

/// The delay between attempts. It grows with each attempt and has a random part, so that nodes do not retry together.
pub struct Backoff {
    patience: Patience,
    delay: Duration,
    least: Duration,
}

impl Backoff {
    pub fn new(patience: Patience) -> Self {
        Self {
            patience,
            delay: patience.retry,
            least: Duration::ZERO,
        }
    }

    pub fn reset(&mut self) {
        self.delay = self.patience.retry;
    }

    /// Makes the next delay at least this long.
    pub fn at_least(&mut self, least: Option<Duration>) {
        self.least = least.unwrap_or_default();
    }

    pub fn next(&mut self) -> Duration {
        let delay = self.delay.max(std::mem::take(&mut self.least));
        self.delay = (self.delay * 2).min(self.patience.retry_max);
        delay.mul_f64(rand::random_range(1.0..2.0))
    }
}
