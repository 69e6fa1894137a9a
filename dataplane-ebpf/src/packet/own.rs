//! Datagrams of the node's own sockets that leave by an interface which their process has named (`IP_UNICAST_IF`, `IP_PKTINFO`
//! and those of IPv6), to an endpoint that was chosen at the socket.
//!
//! The process has named the interface for the VIP. The kernel looks up its routes with this interface after our
//! program has replaced the destination, and no helper changes that. So the program sends the datagram along the route
//! without the interface, as netfilter routes a packet anew after it has translated it (`ip_route_me_harder` in
//! `net/ipv4/netfilter.c`). A socket that is bound to a device (`SO_BINDTODEVICE`) stays with it, with netfilter and
//! here.

use core::ptr::read_volatile;

use dataplane_common::packet::Iface;

use super::{
    chosen,
    route::{self, ONWARD},
    scratch::Scratch,
    skb::Skb,
    sockets,
};

/// Whether a datagram leaves by another interface than the one that leads to its destination: [`Scratch::way`] is the way there.
#[inline(never)]
pub fn is_turned(skb: Skb, s: &mut Scratch) -> bool {
    // A packet that leaves by a pod's interface is for this pod.
    if route::interface(skb.ifindex()).flags & Iface::LOCAL != 0 || !is_free(skb) {
        return false;
    }
    if !chosen::is_destination(skb, &s.packet.key) {
        return false;
    }
    let (dst, dst_port) = (s.packet.key.dst, s.packet.key.dst_port);
    s.way.longest = s.packet.longest(skb);
    s.way.of_node = 1;
    route::search(skb, &s.packet, &dst, dst_port, &mut s.way);
    s.way.of_node = 0;
    s.way.answer == ONWARD && s.way.ifindex != skb.ifindex()
}

/// Whether a socket of this host that is not bound to a device sends the packet.
#[inline(always)]
fn is_free(skb: Skb) -> bool {
    let sk = sockets::sender(skb);
    // SAFETY: a field of the socket.
    !sk.is_null() && unsafe { read_volatile(&raw const (*sk).bound_dev_if) } == 0
}
