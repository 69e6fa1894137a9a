//! The benchmark harness, and the peers that it compares with.

pub mod fleet;
pub mod peers;
