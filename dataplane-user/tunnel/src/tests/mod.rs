//! Tests over the loopback interface: both sides of this crate against each other, and each against a raw peer.

mod faults;
pub mod fixture;
mod floods;
mod pooling;
mod raw;
mod streams;
