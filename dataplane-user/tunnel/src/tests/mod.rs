//! Tests over the loopback interface: the two sides of this crate against each other, and each side against a raw peer.

mod churn;
mod faults;
pub mod fixture;
mod floods;
mod fuzz;
mod pooling;
mod raw;
mod streams;
mod stuck;
