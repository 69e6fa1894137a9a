//! Source routes: lists of hosts that a packet has to pass. The destination of such a packet is the next host of the
//! list. The programs at sockets have judged only the destination that the process asked for. A process may request a
//! source route (`IP_OPTIONS`, `IPV6_RTHDR`, or beside a message).

use dataplane_common::{Reason, tables::Endpoint};

use super::{events, parse::Packet, route, skb::Skb};
use crate::select::count;

/// Whether the packet has a source route and arrives at a pod's interface at which the agent asks for checks.
#[inline(always)]
pub fn is_refused(skb: Skb, packet: &Packet) -> bool {
    packet.routed != 0 && route::interface(skb.ifindex()).checks_a_pod()
}

/// Counts a refusal.
#[inline(never)]
pub fn refuse(skb: Skb, packet: &Packet) {
    count(Reason::SourceRouted);
    events::report(skb, packet, Reason::SourceRouted, 0, &Endpoint::NONE);
}
