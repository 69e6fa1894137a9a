//! How long to wait.

use std::time::Duration;

/// How long to wait for something that takes no longer than `limit` on a machine at work: four times
/// that on one that is emulated. Nobody waits so long for what comes.
pub fn patience(limit: Duration) -> Duration {
    if std::env::var_os("DATAPLANE_EMULATED").is_some_and(|value| value == "1") {
        limit * 4
    } else {
        limit
    }
}
