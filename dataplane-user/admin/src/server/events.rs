//! Pages of recent events, which readers ask for one after the other.

use serde::Deserialize;

/// The maximum number of events of a page.
pub const MOST: usize = 2000;

/// The number of the first event of the page; none: the events from now on.
#[derive(Debug, Deserialize)]
pub struct Since {
    pub from: Option<u64>,
}
