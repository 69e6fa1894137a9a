//! What others have on the node, and what the dataplane means for it.

pub mod forward;
pub mod owners;
