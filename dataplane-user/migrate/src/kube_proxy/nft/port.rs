//! A service's port, before its chains are read.

use std::{collections::HashSet, net::IpAddr};

use model::{Protocol, TrafficPolicy};

/// The chains of a service's port. Their names consist of a prefix and a common part.
#[derive(Debug)]
pub struct Chains<'t> {
    /// The common part of the names.
    pub name: &'t str,
    /// The traffic policy of the cluster IPs, if a chain serves them.
    pub internal: Option<TrafficPolicy>,
    /// The cluster IP in the table's family with the port number, if a chain serves it.
    pub vip: Option<(IpAddr, u16)>,
    /// Whether a chain serves the service's other addresses.
    pub external: bool,
    /// The line of the first element that jumps to one of the chains.
    pub at: usize,
}

/// The endpoints on this node.
pub type Hairpins = HashSet<(IpAddr, Protocol, u16)>;
