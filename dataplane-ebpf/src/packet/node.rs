//! Packets of the node itself whose destination no program at a socket has replaced:
//!
//! - to a VIP, from a raw socket, from one of the kernel's tunnels, or from a socket that is left alone because only its
//!   packets have the source that a load balancer's ranges ask for. netfilter translates them at its output hook;
//! - to an endpoint that was chosen at the socket, from an address that the endpoint's machine may have no way back to: the
//!   process has bound its socket to a bridge's address, or to 127.0.0.1 on a node with `route_localnet`.
//!
//! The program masquerades both. The stack takes no packet with one of the node's own addresses as its source from an
//! interface, so a packet to an endpoint on the node itself goes to another endpoint, or nowhere.

use aya_ebpf::bindings::__sk_buff;
use dataplane_common::{
    OF_AGENT,
    first::Action,
    packet::{Iface, Tick},
    seen,
    tables::{Endpoint, Frontend, Kind},
};

use super::{
    DROP, begin, came_by, chosen,
    conntrack::{self, FOREIGN, NEW, REQUEST},
    enter,
    rewrite::rewrite,
    route,
    scratch::{self, Scratch},
    skb::Skb,
    sources, ways,
};
use crate::capture;

/// Whether no packet that leaves like this one is translated: the agent's own sockets are out of reach of what tenants write,
/// and a packet at a pod's interface is for this pod. (Not inlined, as the other steps are not: their stack is given back.)
#[inline(never)]
pub fn is_excluded(skb: Skb) -> bool {
    skb.priority() == OF_AGENT
        || capture::is_taken(skb.mark())
        || route::interface(skb.ifindex()).flags & Iface::LOCAL != 0
}

/// Handles a packet of the node to a VIP. `None`: it is not translated here.
#[inline(always)]
pub fn request(skb: Skb, s: &mut Scratch, now: Tick) -> Option<Action> {
    if is_excluded(skb) {
        return None;
    }
    let known = conntrack::request(&s.packet.key, &s.packet.segment, &mut s.flow, now);
    if known == FOREIGN {
        return None;
    }
    s.keep = 0;
    if known == REQUEST {
        // The routes to the VIP may have changed since the flow began.
        came_by::follow(s.flow.request_cell, skb.ifindex());
        if !s.packet.is_syn() {
            return Some(Action::Forward);
        }
        s.keep = if seen::is_ended(s.flow.seen) {
            scratch::KEEP_ENDED
        } else {
            scratch::KEEP
        };
    } else if s.packet.is_tcp() && !s.packet.is_syn() {
        // The kernel's own conntrack translates it, or it is not known at all.
        return None;
    }
    if !may_begin(skb, s) {
        if known == REQUEST && sources::is_host(&s.packet.key.src) {
            // A new connection to no service: its later packets do not belong to the flow either.
            s.flow.remove(now);
        }
        return None;
    }
    s.way.of_node = 1;
    let action = begin::begin(skb, s, now);
    s.way.of_node = 0;
    Some(action)
}

/// Finds the frontend of a packet that begins a flow; `false`: it does not, because no service has the destination, or only
/// as an external IP, a program at the socket has chosen it, or the source is not the node's. (Not inlined: its stack is given
/// back.)
#[inline(never)]
fn may_begin(skb: Skb, s: &mut Scratch) -> bool {
    s.frontend = begin::frontend(&s.packet.key);
    let src = &s.packet.key.src;
    // Tenants write external IPs, also that of a tunnel's peer, which may have begun the flow.
    let begins = !s.frontend.is_none()
        && s.frontend.kind() != Kind::EXTERNAL_IP
        && !src.is_nobody()
        && sources::is_host(src)
        && !chosen::is_destination(skb, &s.packet.key);
    if !begins {
        s.frontend = Frontend::NONE;
    }
    begins
}

/// Looks up the way of a packet of a known flow to its endpoint.
#[inline(never)]
pub fn find_way(skb: Skb, s: &mut Scratch) {
    s.flow.toward_endpoint(&mut s.ends);
    s.way.of_node = 1;
    ways::find(skb, &s.packet, &s.ends.dst, s.ends.dst_port, &mut s.way);
    s.way.of_node = 0;
}

/// Translates a packet and sends it on its way.
#[inline(never)]
pub fn send(skb: Skb, s: &Scratch) -> i32 {
    if !rewrite(skb, &s.packet, &s.ends, s.packet.hops) {
        return DROP;
    }
    skb.send_on();
    route::send_out(skb, &s.packet, &s.way)
}

/// Whether a packet leaves with a source to which the endpoint's machine has no way back, as a rule: loopback's or a
/// bridge's. The kernel, or an operator's route, chooses other addresses for this way.
#[inline(never)]
pub fn is_from_elsewhere(skb: Skb, s: &mut Scratch) -> bool {
    s.way.iface = route::interface(skb.ifindex());
    let iface = s.way.iface;
    let src = &s.packet.key.src;
    if iface.flags & Iface::LOCAL != 0 {
        // A pod has a way back to each of the node's addresses.
        return src.is_nobody();
    }
    let index = if s.packet.is_v4() {
        iface.masquerade_v4
    } else {
        iface.masquerade_v6
    };
    index != 0
        && conntrack::node_addr(index) != *src
        && (src.is_nobody() || sources::is_of_bridge(src))
}

/// [`is_masqueraded`]. With external linkage, as in `table.rs`: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_from_elsewhere(skb: *mut __sk_buff, s: *mut Scratch, now: u32) -> u32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    unsafe { s.as_mut() }.map_or(0, |s| {
        u32::from(to_chosen(Skb(skb), s, Tick::from_number(now as u16)))
    })
}

/// Whether the program masquerades a packet to an endpoint that was chosen at the socket. If so, its ends are set.
#[inline(always)]
pub fn is_masqueraded(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    packet_from_elsewhere(skb.0, s, u32::from(now.number())) != 0
}

#[inline(always)]
fn to_chosen(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    let (key, segment) = (&s.packet.key, &s.packet.segment);
    if !chosen::is_destination(skb, key) {
        return false;
    }
    let known = conntrack::request(key, segment, &mut s.flow, now);
    if known == REQUEST {
        if !s.flow.is_masqueraded() {
            return false;
        }
        if s.packet.is_syn() && seen::is_ended(s.flow.seen) {
            conntrack::begin_anew(key, segment, 0, now);
        }
    } else {
        if known != NEW || (s.packet.is_tcp() && !s.packet.is_syn()) || !sources::is_host(&key.src)
        {
            return false;
        }
        // A record may also say that the socket answers somebody at a service's address and port.
        if !begin::frontend(key).is_none() {
            return false;
        }
        s.endpoint = Endpoint::new(key.dst, key.dst_port);
        if !enter::masquerade_itself(skb, s, now) {
            return false;
        }
    }
    s.flow.toward_endpoint(&mut s.ends);
    true
}
