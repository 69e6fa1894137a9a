//! The rules of other programs in a network namespace: found, printed, understood, removed, brought back, and made those that
//! are expected.

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
