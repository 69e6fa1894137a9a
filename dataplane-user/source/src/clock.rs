//! The time in the unit that sources use.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the seconds since the epoch.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}
