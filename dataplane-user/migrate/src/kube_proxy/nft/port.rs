//! A service's port, before its chains are read.

use std::{collections::HashSet, net::IpAddr};

use model::{Protocol, TrafficPolicy};

use super::super::leftover::At;

/// The chains of a service's port. All are named by the port, with another prefix each.
#[derive(Debug)]
pub struct Chains<'t> {
    /// The common part of its chains' names.
    pub name: &'t str,
    /// The policy of its cluster IPs, if a chain serves them.
    pub internal: Option<TrafficPolicy>,
    /// Its cluster IP of the table's family and its port there, if a chain serves them.
    pub vip: Option<(IpAddr, u16)>,
    /// Whether a chain serves its other addresses.
    pub external: bool,
    /// The first element that leads to one of its chains.
    pub at: At,
}

/// Endpoints on this node.
pub type Hairpins = HashSet<(IpAddr, Protocol, u16)>;
