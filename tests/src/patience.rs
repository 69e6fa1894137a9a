//! How long to wait.

use std::time::Duration;

/// Returns how long to wait for an event that takes at most `limit` on a busy machine: four times as long on an
/// emulated one. A wait for an event that happens ends with the event.
pub fn patience(limit: Duration) -> Duration {
    if emulated() { limit * 4 } else { limit }
}

/// Whether this machine is emulated, and so some ten times slower.
pub fn emulated() -> bool {
    std::env::var_os("DATAPLANE_EMULATED").is_some_and(|value| value == "1")
}
