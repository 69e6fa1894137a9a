//! What an application says to its proxy goes past the TCP stack: `dataplane_common::accelerate`.
//!
//! Not the other way: an application cannot be held back, since nobody is told what it has read.

pub mod legs;
pub mod message;
