//! What `cleanup` finds, for those who look.

use std::path::PathBuf;

/// What `cleanup` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CleanupItem {
    /// The pin, or the directory; `tc:INTERFACE` for filters and qdiscs, `netns:PATH` for rules and
    /// routes of a workload's network namespace, `nft:TABLE` for a table of nf_tables.
    pub path: PathBuf,
    /// What it is.
    pub what: String,
    /// Whether it is ours, and so is (or would be) removed.
    pub ours: bool,
}
