//! kube-proxy's rules and the dataplane, one after the other in the same cluster: whom each client
//! reaches, whom the endpoint takes it for, and how it fails must be the same.
//!
//! The rules are those that kube-proxy writes for the same manifests ([`dataplane_peers`]); that they
//! do what the real ones do is the first scenario. Where the dataplane is meant to differ is listed
//! in [`differences`], and a difference that is not listed, or one that is listed and not seen, fails
//! the scenario.

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
