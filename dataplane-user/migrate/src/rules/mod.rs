//! The rules of other programs in a network namespace: finds, prints, reads, removes and restores them, and changes
//! them to the expected rules.

pub mod binaries;
pub mod capture;
pub mod cleanup;
pub mod collect;
pub mod detect;
pub mod rails;
pub mod reconcile;
pub mod report;
pub mod restore;
pub mod ruleset;
pub mod saved;
#[cfg(test)]
mod simulated;
