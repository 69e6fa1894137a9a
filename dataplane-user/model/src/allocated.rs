//! The addresses of ServiceEntries' hosts that a control plane, or this node, allocates.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The ranges from which a control plane, or this node, gives addresses to hosts of ServiceEntries, as Istio has them.
const ALLOCATED: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(240, 240, 0, 0), 16)),
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0),
        48,
    )),
];

/// Whether an address is in the ranges from which hosts of ServiceEntries get theirs.
pub fn is_allocated(address: IpAddr) -> bool {
    ALLOCATED.iter().any(|range| range.contains(&address))
}
