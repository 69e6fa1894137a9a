//! Bytes from an application to its proxy bypass the TCP stack: `dataplane_common::accelerate`.
//!
//! Bytes from the proxy do not: no program sees how much an application has read, so nothing could hold the proxy back.

pub mod legs;
pub mod message;
