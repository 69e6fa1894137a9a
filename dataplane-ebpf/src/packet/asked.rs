//! Datagrams that this host sends from a port that a service has, too: a socket that is bound to a node port, or a pod
//! whose packets a rule of the kernel's masquerades to such a port. The answers would look like requests to the
//! service.
//!
//! So the program on the way out remembers such a flow, and the program on the way in leaves its answers alone. It is a
//! flow to the destination itself ([`Flow::is_asked`]), of which nothing is translated. It has the lifetime of any
//! other flow, and is evicted like any other: the kernel's own conntrack knows such a flow for as long.
//!
//! If a socket is connected, the program looks at the socket itself, however long ago it asked.

use core::ptr::read_volatile;

use dataplane_common::{
    ClaimedPort, Port, Protocol,
    cells::{BUSY, MADE, NOWHERE},
    decide,
    packet::{FlowKey, Tick},
};

use super::{
    conntrack::{self, FOREIGN, NEW},
    plain,
    scratch::Scratch,
    skb::Skb,
    sockets, table,
};
use crate::{select::Live, tables::VIPS};

/// Whether a service may have this UDP port, at an address that may be this host's.
#[inline(always)]
pub fn is_claimed(port: Port) -> bool {
    let place = ClaimedPort::of(port);
    match VIPS.get_ptr(place.index()) {
        // SAFETY: an array's element stays; user space may store to the word meanwhile.
        Some(element) => place.is_set(unsafe { read_volatile(&raw const (*element).ports) }),
        None => false,
    }
}

/// Whether a packet that the stack forwards is a datagram from such a port. This runs for every forwarded packet, so it
/// reads the header only at the place where almost all datagrams have it. (The stack has read it there.)
#[inline(always)]
pub fn may_ask(skb: Skb, l3: u32) -> bool {
    let port = plain::datagram_source(skb, l3);
    port != Port::ANY && is_claimed(port)
}

/// Whether a datagram to a service is the answer to a datagram of this host. The datagram has no flow of ours.
#[inline(never)]
pub fn is_answer(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    let (key, segment) = (&s.packet.key, &s.packet.segment);
    is_claimed(key.dst_port)
        && (conntrack::answer(key, segment, &mut s.flow, now) == FOREIGN
            || sockets::is_connected(skb, key))
}

/// Remembers the flow of a datagram that leaves, if it comes from a service's address and port. (Not inlined: a
/// function with its own frame gives its stack back.)
#[inline(never)]
pub fn remember(s: &mut Scratch, now: Tick) {
    let key = &s.packet.key;
    if !is_of_service(key) {
        return;
    }
    if conntrack::request(key, &s.packet.segment, &mut s.flow, now) != NEW {
        return;
    }
    let flow = &mut s.flow;
    flow.forward = *key;
    flow.endpoint = key.dst;
    flow.endpoint_port = key.dst_port;
    flow.node_port = Port::ANY;
    flow.node_addr = 0;
    flow.came_by = 0;
    if flow.replies_taken(now) {
        return;
    }
    let index = table::hold_or_find(&flow.forward, now);
    if index == NOWHERE || index == BUSY || index & MADE != 0 {
        return;
    }
    if flow.lead(index, now) {
        flow.publish(index, now, &s.packet.segment);
    } else {
        table::give_back(index, &flow.forward, now);
    }
}

/// Whether a datagram's source is a service's address and port.
#[inline(always)]
pub fn is_of_service(key: &FlowKey) -> bool {
    packet_is_of_service(key) != 0
}

/// [`is_of_service`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_is_of_service(key: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    unsafe { key.as_ref() }.map_or(0, |key| u32::from(has_service(key)))
}

#[inline(always)]
fn has_service(key: &FlowKey) -> bool {
    if key.protocol != Protocol::UDP || !is_claimed(key.src_port) {
        return false;
    }
    !decide::find_frontend(&Live, key.src, key.src_port, key.protocol, false).is_none()
}
