//! kube-proxy's rules and the dataplane, one after the other in one cluster: the endpoint that each client reaches, the
//! client's address that the endpoint sees, and the failures must be equal.
//!
//! The rules are those that kube-proxy writes for the same manifests ([`dataplane_peers`]); the first scenario proves
//! that they work like the real ones. The intended differences of the dataplane are listed in [`differences`]. A
//! difference that is not listed, or one that is listed and does not occur, fails the scenario.

pub mod case;
mod compare;
mod conversations;
mod differences;
mod policies;
mod recorded;
mod sharing;
pub mod world;

pub use conversations::SCENARIOS as CONVERSATIONS;
pub use policies::SCENARIOS as POLICIES;
pub use recorded::SCENARIOS as RECORDED;
pub use sharing::SCENARIOS as SHARING;
