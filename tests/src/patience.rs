//! How long to wait.

use std::time::Duration;

/// How long to wait for something that takes no longer than `limit` on a machine at work: four times
/// that on one that is emulated. Nobody waits so long for what comes.
pub fn patience(limit: Duration) -> Duration {
    if emulated() { limit * 4 } else { limit }
}

/// Whether this machine is emulated, and some ten times slower than one that is not.
pub fn emulated() -> bool {
    std::env::var_os("DATAPLANE_EMULATED").is_some_and(|value| value == "1")
}
