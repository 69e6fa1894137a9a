//! The findings of `cleanup`.

use std::path::PathBuf;

/// An object that `cleanup` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CleanupItem {
    /// The pin, or the directory; `tc:INTERFACE` for filters and qdiscs, `netns:PATH` for rules and
    /// routes of a workload's network namespace, `nft:TABLE` for a table of nf_tables.
    pub path: PathBuf,
    /// A description of the object.
    pub what: String,
    /// Whether it is ours, and so is (or would be) removed.
    pub ours: bool,
}
