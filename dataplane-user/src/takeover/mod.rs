//! What others have on the node, and what the dataplane means for it.

pub mod binaries;
pub mod cleanup;
pub mod collect;
pub mod detect;
pub mod forward;
pub mod owners;
pub mod report;
pub mod restore;
pub mod ruleset;
#[cfg(test)]
mod simulated;
