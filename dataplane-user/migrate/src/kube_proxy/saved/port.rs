//! A service's port, before its chains are read.

use model::TrafficPolicy;

use super::super::rows::Line;

/// The chains of a service's port.
#[derive(Debug, Default)]
pub struct Chains<'a> {
    /// The chain of the cluster IPs, its traffic policy, and the rule that jumps to the chain.
    pub internal: Option<(&'a str, TrafficPolicy, Line<'a>)>,
    /// The chain of all other addresses, and the first rule that jumps to the chain.
    pub external: Option<(&'a str, Line<'a>)>,
}
