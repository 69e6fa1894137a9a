//! The destinations that the operator has stated to be reachable.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

/// The port of DNS.
const DNS: u16 = 53;

/// The destinations that workloads with `egress: deny` may reach, besides Services whose endpoints are Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reachable {
    /// Ranges, at all ports.
    pub ranges: Vec<IpNet>,
    /// DNS servers.
    pub resolvers: Vec<IpAddr>,
}

impl Reachable {
    /// Whether an address is in one of the ranges.
    pub fn has_address(&self, addr: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(&addr))
    }

    /// Whether it contains a destination.
    pub fn has(&self, to: SocketAddr) -> bool {
        self.has_address(to.ip()) || to.port() == DNS && self.resolvers.contains(&to.ip())
    }

    /// The DNS servers, with their port.
    pub fn servers(&self) -> impl Iterator<Item = SocketAddr> {
        let resolvers = self.resolvers.iter();
        resolvers.map(|addr| SocketAddr::new(*addr, DNS))
    }
}
