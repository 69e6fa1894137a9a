//! A clock that all processes of a benchmark share.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the time of `CLOCK_MONOTONIC`, in milliseconds.
///
/// # Errors
///
/// Fails if the kernel does not have this clock.
pub fn monotonic_ms() -> anyhow::Result<f64> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?).as_secs_f64() * 1e3)
}
