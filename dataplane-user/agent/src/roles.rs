//! The roles of the node's interfaces: uplink, pod's side, or neither.
//!
//! Packets of services arrive at two kinds of interface. *Uplinks* lead to other machines: hardware, bonds, VLANs,
//! and tunnels to other nodes. *Pods' sides* are the node's ends of the pairs whose other ends are in pods. Bridges of
//! pods are neither, because each packet on a bridge also passes one of the bridge's ports.

use ipnet::IpNet;
use kernel::interfaces::Interface;

/// The role of an interface in the packet path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An interface that leads to other machines. It has a default route, or it has an address and is not a pod's side,
    /// a bridge, a dummy, a VRF, an IFB or a pair within the node that has no network of its own.
    Uplink,
    /// A pod's side: one end of a pair (veth, netkit) whose other end is in another network namespace, without a
    /// default route and without a network of its own. All usual network plug-ins make such pairs, by any name
    /// (`veth…`, `cali…`, `lxc…`, `eni…`).
    Pod,
    /// Any other interface. The agent leaves it alone.
    Other,
}

impl Role {
    /// Returns an interface's role without patterns.
    pub fn of(interface: &Interface) -> Self {
        if interface.default_route {
            return Self::Uplink;
        }
        // A gateway's address on a pod's side is for that pod alone: /32 or /128.
        let of_a_network = |net: &IpNet| net.prefix_len() < net.max_prefix_len();
        if is_pair(interface) && !interface.addresses.iter().any(of_a_network) {
            return Self::Pod;
        }
        match interface.kind.as_str() {
            "bridge" | "dummy" | "vrf" | "ifb" => Self::Other,
            // Both ends are here. Cilium's routes to pods lead to such a pair, `cilium_host`.
            "veth" | "netkit" if !interface.addresses.iter().any(of_a_network) => Self::Other,
            _ if interface.addresses.is_empty() => Self::Other,
            _ => Self::Uplink,
        }
    }
}

/// Whether an interface is one end of a pair whose other end is in another network namespace.
pub(super) fn is_pair(interface: &Interface) -> bool {
    matches!(interface.kind.as_str(), "veth" | "netkit") && interface.peer.is_some()
}
