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
    OF_AGENT, Reason, first,
    packet::{Iface, Tick},
    seen,
    tables::{Endpoint, Frontend, Kind},
};

use super::{
    DROP, FORWARD, LEAVE_ALONE, begin, chosen, complain,
    conntrack::{self, FOREIGN, NEW, REQUEST},
    error::Complaint,
    ipsec,
    rewrite::rewrite,
    route::{self, LOCAL},
    scratch::Scratch,
    skb::Skb,
    sources, table, ways,
};
use crate::{capture, select::count};

/// The packet is none of these.
pub const OTHER: i32 = 262;

/// Whether no packet that leaves like this one is translated: the agent's own sockets are out of reach of what tenants write,
/// and a packet at a pod's interface is for this pod. (Not inlined, as the other steps are not: their stack is given back.)
#[inline(never)]
fn is_excluded(skb: Skb) -> bool {
    skb.priority() == OF_AGENT
        || capture::is_taken(skb.mark())
        || route::interface(skb.ifindex()).flags & Iface::LOCAL != 0
}

/// Handles a packet of the node to a VIP: [`OTHER`] if it is left as it is.
#[inline(always)]
pub fn request(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    if is_excluded(skb) {
        return OTHER;
    }
    let known = conntrack::request(&s.packet.key, &s.packet.segment, &mut s.flow, now);
    if known == FOREIGN {
        return OTHER;
    }
    s.keep = 0;
    if known == REQUEST {
        // The routes to the VIP may have changed since the flow began.
        table::follow_came_by(s.flow.request_cell, skb.ifindex());
        if !s.packet.is_syn() {
            return go_on(skb, s);
        }
        s.keep = if seen::is_ended(s.flow.seen) {
            begin::KEEP_ENDED
        } else {
            begin::KEEP
        };
    } else if s.packet.is_tcp() && !s.packet.is_syn() {
        // The kernel's own conntrack translates it, or it is not known at all.
        return OTHER;
    }
    if !may_begin(skb, s) {
        if known == REQUEST && sources::is_host(&s.packet.key.src) {
            // A new connection to no service: its later packets do not belong to the flow either.
            s.flow.remove(now);
        }
        return OTHER;
    }
    s.of_node = 1;
    let mut action = begin::begin(skb, s, now);
    s.of_node = 0;
    if action == FORWARD {
        action = go_on(skb, s);
    } else if action == begin::DELIVER {
        action = send(skb, s);
    }
    action
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

/// Sends a packet of a known flow to its endpoint.
#[inline(never)]
fn go_on(skb: Skb, s: &mut Scratch) -> i32 {
    s.flow.toward_endpoint(&mut s.ends);
    ways::find(skb, &s.packet, &s.ends.dst, s.ends.dst_port, &mut s.way);
    send(skb, s)
}

/// Translates a packet and sends it on its way.
#[inline(never)]
fn send(skb: Skb, s: &mut Scratch) -> i32 {
    // The stack has already sent the packet: it takes no packet back, whatever its source is.
    let mut obstacle = first::obstacle(s.way.answer, s.way.mtu, true);
    if s.way.answer == LOCAL {
        obstacle = Reason::NoRoute;
    }
    if obstacle == Reason::NoRoute || obstacle == Reason::SourceForged {
        count(Reason::NoRoute);
        return DROP;
    }
    if ipsec::forbids(&s.packet.key, &s.ends) {
        return DROP;
    }
    if obstacle == Reason::TooBig {
        count(obstacle);
        return complain(s, Complaint::too_big(s.way.mtu));
    }
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

/// Masquerades a packet to an endpoint that was chosen at the socket: [`OTHER`] if it is left as it is. With external
/// linkage, as in `table.rs`: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_from_elsewhere(skb: *mut __sk_buff, s: *mut Scratch, now: u32) -> i32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    match unsafe { s.as_mut() } {
        Some(s) => to_chosen(Skb(skb), s, Tick::from_number(now as u16)),
        None => DROP,
    }
}

/// See [`packet_from_elsewhere`].
#[inline(always)]
pub fn chosen_at_socket(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    packet_from_elsewhere(skb.0, s, u32::from(now.number()))
}

#[inline(always)]
fn to_chosen(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    let (key, segment) = (&s.packet.key, &s.packet.segment);
    if !chosen::is_destination(skb, key) {
        return OTHER;
    }
    let known = conntrack::request(key, segment, &mut s.flow, now);
    if known == REQUEST {
        if !s.flow.is_masqueraded() {
            return OTHER;
        }
        if s.packet.is_syn() && seen::is_ended(s.flow.seen) {
            conntrack::begin_anew(key, segment, now);
        }
    } else {
        if known != NEW || (s.packet.is_tcp() && !s.packet.is_syn()) || !sources::is_host(&key.src)
        {
            return OTHER;
        }
        // A record may also say that the socket answers somebody at a service's address and port.
        if !begin::frontend(key).is_none() {
            return OTHER;
        }
        s.endpoint = Endpoint::new(key.dst, key.dst_port);
        if !begin::masquerade_itself(skb, s, now) {
            return OTHER;
        }
    }
    s.flow.toward_endpoint(&mut s.ends);
    if ipsec::forbids(&s.packet.key, &s.ends) || !rewrite(skb, &s.packet, &s.ends, s.packet.hops) {
        return DROP;
    }
    LEAVE_ALONE
}
