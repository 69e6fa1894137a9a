//! How long to wait, and how much to try.

use std::time::Duration;

/// Returns how long to wait for an event that takes at most `limit` on a busy machine: four times as long on an
/// emulated one. A wait for an event that happens ends with the event.
pub fn patience(limit: Duration) -> Duration {
    if emulated() { limit * 4 } else { limit }
}

/// Whether scenarios run at full length (`DATAPLANE_LONG`), and not in the form that CI has time for.
pub fn is_long() -> bool {
    std::env::var_os("DATAPLANE_LONG").is_some()
}

/// Whether this machine is emulated, and so some ten times slower.
pub fn emulated() -> bool {
    std::env::var_os("DATAPLANE_EMULATED").is_some_and(|value| value == "1")
}
