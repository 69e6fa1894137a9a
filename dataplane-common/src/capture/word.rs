//! The word `mesh` of [`crate::tables::Config`].

use crate::{Addr, Port};

/// Word `mesh` of [`crate::tables::Config`]: `NAMESPACES` is not empty.
pub const MESH_NAMESPACES: u64 = 1;
/// `CGROUPS` is not empty.
pub const MESH_CGROUPS: u64 = 1 << 1;
/// Connections from namespaces that are not in `NAMESPACES` are refused, except the node's own.
pub const MESH_GUARD: u64 = 1 << 2;

/// `LOCALS` has an entry with [`Enrolled::PACKETS`](super::Enrolled::PACKETS).
pub const MESH_PACKETS: u64 = 1 << 3;

/// A workload has, or may have, [`Enrolled::EGRESS_DENY`](super::Enrolled::EGRESS_DENY): the programs judge datagrams.
pub const MESH_DENIES: u64 = 1 << 4;

/// The first of the bits with the proxy's outbound port, in network order.
pub const MESH_PORT: u32 = 32;

/// The first of the bits with the port of the agent's DNS server, in network order; port 0: no queries are captured.
pub const MESH_DNS: u32 = 48;

/// Whether captured connections and queries go to this address and port; `mesh` is the word of
/// [`crate::tables::Config`].
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the field's sixteen bits")]
pub fn is_proxy(mesh: u64, addr: Addr, port: Port) -> bool {
    (port.be() == (mesh >> MESH_PORT) as u16 || port == dns_server(mesh)) && addr.is_loopback()
}

/// The port of the agent's DNS server, at loopback in a workload's network namespace.
#[inline(always)]
pub const fn dns_server(mesh: u64) -> Port {
    Port::from_be((mesh >> MESH_DNS) as u16)
}
