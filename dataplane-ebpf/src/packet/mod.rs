//! Decisions at TC, about packets that no socket program saw.
//!
//! The program looks up an arriving packet by its addresses and ports: it is a request or a reply of a known flow, an
//! ICMP error about a flow, or the first packet of a flow to a service. The program translates it once, both addresses
//! at a time, and sends it on by the kernel's routes from here. So the stack never sees half a translation: it would
//! reject an arriving packet whose source is one of its own addresses or a VIP. Packets for a socket of this host go up
//! the stack.
//!
//! For a packet that leaves, the program only looks for replies of endpoints that are sockets of this host.

mod arrive;
mod asked;
mod begin;
mod bypass;
mod came_by;
mod chosen;
mod client_port;
mod conntrack;
mod deliver;
mod direct;
mod enter;
pub mod error;
pub mod events;
mod exchanges;
mod explain;
mod fragments;
mod icmp;
mod ipsec;
mod leave;
mod limits;
mod masquerade;
pub mod neighbours;
mod node;
mod options;
mod own;
pub mod parse;
mod plain;
mod pool;
mod refuse;
mod reset;
pub mod reverse;
mod rewrite;
pub mod route;
pub mod scratch;
pub mod skb;
mod sockets;
pub mod source_routes;
mod sources;
mod table;
mod through;
mod ways;

use aya_ebpf::bindings::TC_ACT_SHOT;
use dataplane_common::packet::Iface;

pub use arrive::ingress;
pub use explain::way;
pub use leave::egress;
use skb::Skb;

/// The next program of the interface decides, or the stack (`TCX_NEXT` in
/// `include/uapi/linux/bpf.h`; for a clsact filter `TC_ACT_UNSPEC`, the same number).
pub const LEAVE_ALONE: i32 = -1;
/// The packet is dropped.
pub const DROP: i32 = TC_ACT_SHOT;

/// Whether the packet's interface is a pod's.
///
/// Not inlined, as other steps of the programs are not: Linux 6.1 counts the stack of the whole chain of calls in steps of 32
/// bytes, and a function with its own frame gives its stack back.
#[inline(never)]
fn is_pods(skb: Skb) -> bool {
    route::interface(skb.ifindex()).flags & Iface::LOCAL != 0
}
