//! Decisions at TC, about packets that no socket program saw.
//!
//! The program looks up an arriving packet by its addresses and ports: it is a request or a reply of a known flow, an
//! ICMP error about a flow, or the first packet of a flow to a service. The program translates it once, both addresses
//! at a time, and sends it on by the kernel's routes from here. So the stack never sees half a translation: it would
//! reject an arriving packet whose source is one of its own addresses or a VIP. Packets for a socket of this host go up
//! the stack.
//!
//! For a packet that leaves, the program only looks for replies of endpoints that are sockets of this host.

mod asked;
mod begin;
mod chosen;
mod client_port;
mod conntrack;
mod direct;
pub mod error;
pub mod events;
mod fragments;
mod icmp;
mod ipsec;
mod limits;
mod masquerade;
pub mod neighbours;
mod node;
mod options;
mod own;
pub mod parse;
mod plain;
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
mod ways;

use aya_ebpf::{EbpfContext, bindings::TC_ACT_SHOT, programs::TcContext};
use dataplane_common::{
    Reason, VipPlace, decide, first,
    packet::{Iface, PacketConfig, Tick},
    seen as flags,
    tables::{Endpoint, Frontend},
    tcp::{
        Segment,
        flags::{FIN, RST},
    },
};

use crate::{
    capture,
    select::{Live, count},
};
use conntrack::{ANSWER, FOREIGN, NEW, REQUEST};
use error::Complaint;
use parse::{FIRST, FLOW, ICMP, LATER, MALFORMED, OTHER, Outcome, Packet};
use rewrite::rewrite;
use scratch::{Scratch, scratch};
use skb::{NESTED_PRIORITY, OTHER_VLAN, PACKET_HOST, PACKET_OTHERHOST, Skb};

/// The next program of the interface decides, or the stack (`TCX_NEXT` in
/// `include/uapi/linux/bpf.h`; for a clsact filter `TC_ACT_UNSPEC`, the same number).
pub const LEAVE_ALONE: i32 = -1;
/// The packet is dropped.
pub const DROP: i32 = TC_ACT_SHOT;

/// The packet is sent back as the error in [`Scratch::complaint`].
const COMPLAIN: i32 = 256;
/// The packet is of a known flow, and goes to [`Scratch::ends`] ([`forward`]).
const FORWARD: i32 = 258;

#[inline(always)]
fn complain(s: &mut Scratch, complaint: Complaint) -> i32 {
    s.complaint = complaint;
    COMPLAIN
}

/// Whether the packet's interface is a pod's. (Not inlined: see [`has_ports`].)
#[inline(never)]
fn is_pods(skb: Skb) -> bool {
    route::interface(skb.ifindex()).flags & Iface::LOCAL != 0
}

/// A packet that arrives.
#[inline(always)]
pub fn ingress(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx.as_ptr().cast());
    let vlan = skb.vlan();
    if vlan == NESTED_PRIORITY {
        count(Reason::Malformed);
        return DROP;
    }
    if vlan == OTHER_VLAN || capture::is_taken(skb.mark()) {
        return LEAVE_ALONE;
    }
    if skb.is_own_answer() {
        // It may have the link-layer address of another interface.
        if skb.kind() == PACKET_OTHERHOST {
            skb.address_to_host();
        }
        return LEAVE_ALONE;
    }
    // Packets that a pod sends through a bridge are addressed to the bridge or to another port of it.
    if skb.kind() != PACKET_HOST && !is_pods(skb) {
        return LEAVE_ALONE;
    }
    let Some(s) = scratch() else {
        return DROP;
    };
    let action = read(skb, s);
    s.leave();
    action
}

/// Outcome of [`look`]: the program drops the packet.
const REFUSED: Outcome = 4;

/// Reads the packet's headers. Returns [`OTHER`] for a packet that is addressed to many hosts. (Not inlined: see
/// [`has_ports`].)
#[inline(never)]
fn look(skb: Skb, s: &mut Scratch) -> Outcome {
    let outcome = s.packet.read(skb, route::link_length(skb.ifindex()));
    if source_routes::is_refused(skb, &s.packet) {
        source_routes::refuse(skb, &s.packet);
        return REFUSED;
    }
    if skb.kind() != PACKET_HOST && skb.kind() != PACKET_OTHERHOST {
        return OTHER;
    }
    outcome
}

/// Handles an arriving packet, with working memory for it.
#[inline(always)]
fn read(skb: Skb, s: &mut Scratch) -> i32 {
    let outcome = look(skb, s);
    if outcome == REFUSED {
        return DROP;
    }
    if outcome == ICMP {
        return icmp::translate::<false>(skb, s, conntrack::now());
    }
    if outcome == MALFORMED {
        count(Reason::Malformed);
        return LEAVE_ALONE;
    }
    if outcome != FLOW {
        return LEAVE_ALONE;
    }
    let mut action = arrived(skb, s, conntrack::now());
    if action == FORWARD {
        action = forward(skb, s);
    }
    if action == COMPLAIN {
        return error::send(skb, &s.packet, s.complaint, false);
    }
    action
}

/// Whether a packet to one of the node's addresses, or a load balancer's, is more likely an answer to the node than a
/// client's request. Requests go to a port in Kubernetes' range of node ports, or to a well-known port. `cluster`: it
/// may be for a cluster IP.
#[inline(always)]
fn answers_node(packet: &Packet, cluster: bool) -> bool {
    let port = packet.key.dst_port.host();
    let of_node = port >= PacketConfig::FIRST_PORT && !PacketConfig::NODE_PORTS.contains(&port);
    packet.is_syn_ack() || (!cluster && of_node && !packet.is_syn())
}

/// Whether a packet's ports are known ([`fragments::follow`]). A forged packet only marks its flow as used: its other
/// flags do not count. (The packet is dropped in the end, if it belongs to a flow. A SYN is checked when it begins
/// one.)
///
/// Not inlined: Linux 6.1 counts the stack of the whole chain of calls in steps of 32 bytes.
#[inline(never)]
fn has_ports(skb: Skb, s: &mut Scratch) -> bool {
    let tells =
        s.packet.segment.has(FIN | RST) || s.packet.is_syn_ack() || s.packet.fragment == FIRST;
    let forged = tells && !reverse::is_right(skb, &s.packet, &mut s.way, reverse::TELLS);
    if forged {
        s.packet.segment.flags |= Segment::QUOTED.flags;
    }
    fragments::follow(&mut s.packet, forged)
}

/// Looks for the flow of a packet that is a request, or a reply to a masqueraded client. The likelier lookup comes first,
/// because a lookup that finds nothing costs a cache miss. `cluster`: see [`answers_node`]. (Not inlined: see [`has_ports`].)
#[inline(never)]
fn lookup(skb: Skb, s: &mut Scratch, cluster: bool, now: Tick) -> conntrack::Known {
    let (key, segment) = (&s.packet.key, &s.packet.segment);
    let mut known;
    if answers_node(&s.packet, cluster) {
        known = conntrack::masqueraded_answer(key, segment, &mut s.flow, now);
        if known == NEW {
            known = conntrack::request(key, segment, &mut s.flow, now);
        }
    } else {
        known = conntrack::request(key, segment, &mut s.flow, now);
        // A SYN on its own never answers anything.
        if known == NEW && !s.packet.is_syn() {
            known = conntrack::masqueraded_answer(key, segment, &mut s.flow, now);
        }
    }
    if known == NEW && s.packet.is_tcp() && !s.packet.is_syn() {
        note_unknown(skb, s);
    }
    known
}

/// Finds the frontend of a packet that begins a flow; `true`: the packet is an answer to this node. (Not inlined: see
/// [`has_ports`].)
#[inline(never)]
fn is_of_node(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    s.frontend = begin::frontend(&s.packet.key);
    if s.frontend.is_none() {
        return false;
    }
    if chosen::is_destination(skb, &s.packet.key) {
        s.frontend = Frontend::NONE;
        // The client's own socket shows that an earlier flow from its port is over.
        s.flow.seen |= flags::RST;
        return false;
    }
    !s.packet.is_tcp() && asked::is_answer(skb, s, now)
}

/// A packet of TCP or UDP that arrives.
#[inline(always)]
fn arrived(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    let has_ports = has_ports(skb, s);
    let mut known = NEW;
    let place = VipPlace::of(s.packet.key.dst);
    let words = decide::Tables::vips(&Live, place.index());
    let may_be_ours = place.is_set(words);
    if has_ports && (may_be_ours || direct::is_any()) {
        known = lookup(skb, s, place.may_be_cluster(words), now);
    }
    s.frontend = Frontend::NONE;
    // A TCP connection in its middle belongs to the kernel's own conntrack, from before the agent came, or is not known
    // at all.
    let begins = s.packet.is_syn() || (known == NEW && !s.packet.is_tcp());
    if may_be_ours && begins && known != FOREIGN && is_of_node(skb, s, now) {
        return LEAVE_ALONE;
    }
    if s.packet.is_syn() && s.frontend.is_none() && begin::is_refused(skb, s) {
        return COMPLAIN;
    }
    if begins && s.frontend.is_none() && is_pods(skb) && begin::is_forged(skb, s) {
        return DROP;
    }
    // A SYN answers nothing, and neither does a datagram to a service.
    if has_ports && known == NEW && !s.packet.is_syn() && s.frontend.is_none() {
        known = conntrack::answer(&s.packet.key, &s.packet.segment, &mut s.flow, now);
    }
    if known == ANSWER {
        s.flow.toward_client(&mut s.ends);
        return FORWARD;
    }
    s.keep = 0;
    if known == REQUEST {
        if !s.packet.is_syn() {
            s.flow.toward_endpoint(&mut s.ends);
            return FORWARD;
        }
        // A connection that one side has closed may live for as long as the other side sends.
        s.keep = if flags::is_ended(s.flow.seen) {
            begin::KEEP_ENDED
        } else {
            begin::KEEP
        };
    }
    if s.frontend.is_none() {
        let begins = s.packet.is_syn() || (!s.packet.is_tcp() && direct::has_datagrams());
        let is_own = known == REQUEST && s.flow.is_direct();
        if begins && has_ports && (known == NEW || is_own) {
            return begin::pass(skb, s, now);
        }
        if known == REQUEST {
            return begin::without_frontend(skb, s, now);
        }
        return LEAVE_ALONE;
    }
    begin::begin(skb, s, now)
}

/// Marks a packet in the middle of an unknown connection, if it may be to a service ([`reset`]). The stack answers
/// packets to the node's own addresses. A pod's connection may be older than the service, unless it goes to a cluster
/// IP, which only services have. (Not inlined: see [`has_ports`].)
#[inline(never)]
fn note_unknown(skb: Skb, s: &Scratch) {
    let place = VipPlace::of(s.packet.key.dst);
    let words = decide::Tables::vips(&Live, place.index());
    if place.may_have_ports(words) && (place.may_be_cluster(words) || !is_pods(skb)) {
        skb.set_unknown();
    }
}

/// A packet that leaves.
#[inline(always)]
pub fn egress(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx.as_ptr().cast());
    // The program on the way in has seen packets from other interfaces. The kernel may have changed their source since.
    let is_forwarded = skb.is_forwarded();
    if is_forwarded && skb.is_unknown() {
        return unknown(skb);
    }
    if skb.is_sent_by_us()
        || (is_forwarded && !asked::may_ask(skb, route::link_length(skb.ifindex())))
    {
        return LEAVE_ALONE;
    }
    let Some(s) = scratch() else {
        return DROP;
    };
    let mut action = leaves(skb, s, is_forwarded);
    if action == COMPLAIN {
        action = error::send(skb, &s.packet, s.complaint, true);
    }
    s.leave();
    action
}

/// Writes the way of a packet that no interface sends into the first bytes of its frame ([`first::Way`]): `dataplane explain`
/// runs this program, which is attached nowhere.
#[inline(always)]
pub fn way(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx.as_ptr().cast());
    let Some(s) = scratch() else {
        return DROP;
    };
    let mut action = DROP;
    // The kernel runs the program on an Ethernet frame, also for an interface without a link-layer header.
    if s.packet.read(skb, skb::LINK) == FLOW {
        let begins = reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS);
        let key = s.packet.key;
        ways::find(skb, &s.packet, &key.dst, key.dst_port, &mut s.way);
        let way = first::Way {
            answer: s.way.answer,
            mtu: s.way.mtu,
            begins: u32::from(begins),
        };
        if skb.store::<_, false>(0, &way) {
            action = LEAVE_ALONE;
        }
    }
    s.leave();
    action
}

/// Handles a packet that leaves unchanged, and that the program on the way in did not know.
#[inline(always)]
fn unknown(skb: Skb) -> i32 {
    let Some(s) = scratch() else {
        return DROP;
    };
    let mut action = LEAVE_ALONE;
    if s.packet.read(skb, route::link_length(skb.ifindex())) == FLOW {
        action = reset::unknown(skb, &s.packet);
    }
    s.leave();
    action
}

/// Handles a leaving packet, with working memory for it.
#[inline(always)]
fn leaves(skb: Skb, s: &mut Scratch, is_forwarded: bool) -> i32 {
    let outcome = s.packet.read(skb, route::link_length(skb.ifindex()));
    let now = conntrack::now();
    if is_forwarded {
        if outcome == FLOW && s.packet.fragment != LATER {
            asked::remember(s, now);
        }
        return LEAVE_ALONE;
    }
    if outcome == ICMP {
        return icmp::translate::<true>(skb, s, now);
    }
    if outcome != FLOW || !fragments::follow(&mut s.packet, false) {
        return LEAVE_ALONE;
    }
    // A SYN answers nothing: with it, the endpoint connects from its own port.
    if s.packet.is_syn() {
        conntrack::forget_answered(&s.packet.key, now);
    } else if conntrack::answer(&s.packet.key, &s.packet.segment, &mut s.flow, now) == ANSWER {
        s.flow.toward_client(&mut s.ends);
        if ipsec::forbids(&s.packet.key, &s.ends)
            || !rewrite(skb, &s.packet, &s.ends, s.packet.hops)
        {
            return DROP;
        }
        return LEAVE_ALONE;
    }
    // With a tag, the packet comes from a VLAN's interface: its own program has seen it, if it has one.
    if skb.has_tag() {
        asked::remember(s, now);
        return LEAVE_ALONE;
    }
    let mut action = node::OTHER;
    let place = VipPlace::of(s.packet.key.dst);
    if place.is_set(decide::Tables::vips(&Live, place.index())) {
        action = node::request(skb, s, now);
    }
    if action == node::OTHER && node::is_from_elsewhere(skb, s) {
        // A datagram whose interface is not that of its way comes by again.
        if !s.packet.is_tcp() {
            let turned = own::turn(skb, s);
            if turned != LEAVE_ALONE {
                return turned;
            }
        }
        action = node::chosen_at_socket(skb, s, now);
    }
    if action != node::OTHER {
        return action;
    }
    // A socket that has taken a flow's port since is refused. For a connection, its first packet decides.
    let begins = s.packet.is_syn() || !s.packet.is_tcp();
    if begins
        && s.packet.key.src_port.host() >= PacketConfig::FIRST_PORT
        && conntrack::is_port_taken(&s.packet.key, now)
    {
        count(Reason::PortTaken);
        events::report(skb, &s.packet, Reason::PortTaken, 0, &Endpoint::NONE);
        return complain(s, Complaint::PORT_UNREACHABLE);
    }
    asked::remember(s, now);
    if s.packet.is_tcp() {
        LEAVE_ALONE
    } else {
        own::turn(skb, s)
    }
}

/// Sends a packet of a known flow to its new ends, along the routes.
#[inline(always)]
fn forward(skb: Skb, s: &mut Scratch) -> i32 {
    ways::find(skb, &s.packet, &s.ends.dst, s.ends.dst_port, &mut s.way);
    go_back(skb, s);
    deliver(skb, s)
}

/// Makes a reply whose way is known leave by the uplink that the client's packets come by, if a route leads to the
/// client by this uplink. The routes for packets from the endpoint may lead elsewhere, where no host expects packets
/// from the service.
#[inline(never)]
pub fn go_back(skb: Skb, s: &mut Scratch) {
    let by = s.flow.came_by;
    let goes_on = s.way.answer == route::ONWARD || s.way.answer == route::TOO_BIG;
    if by != 0 && goes_on && s.way.ifindex != by {
        route::search_by(skb, &s.packet, &s.ends, by, &mut s.way);
    }
}

/// Hands a translated packet to the stack. A reply to the node itself ([`node`]) comes from a VIP now, so it arrives at the
/// interface to which the routes to the VIP lead: otherwise `rp_filter` would reject it. (Not inlined: see [`has_ports`].)
#[inline(never)]
fn to_host(skb: Skb, s: &Scratch) -> i32 {
    if s.ends.src != s.packet.key.src {
        let by = table::came_by_ever(s.flow.cell);
        let is_there = by != 0 && route::interface(by).flags & Iface::ATTACHED != 0;
        if is_there && by != skb.ifindex() {
            return if s.packet.l3 == 0 && !skb.add_link() {
                DROP
            } else {
                skb.arrive_at(by)
            };
        }
    }
    skb.is_for_host();
    LEAVE_ALONE
}

/// Translates a packet and sends it on its way, if there is one: up the stack or on.
#[inline(never)]
fn deliver(skb: Skb, s: &mut Scratch) -> i32 {
    let obstacle = first::obstacle(s.way.answer, s.way.mtu, s.ends.src != s.packet.key.src);
    if obstacle == Reason::NoRoute || obstacle == Reason::SourceForged {
        count(obstacle);
        return DROP;
    }
    if ipsec::forbids(&s.packet.key, &s.ends) {
        return DROP;
    }
    if obstacle == Reason::TooBig {
        count(obstacle);
        return complain(s, Complaint::too_big(s.way.mtu));
    }
    let hops = s.packet.hops;
    if s.way.answer == route::LOCAL || s.way.answer == route::STACK {
        return if rewrite(skb, &s.packet, &s.ends, hops) {
            if s.way.answer == route::LOCAL {
                return to_host(skb, s);
            }
            LEAVE_ALONE
        } else {
            DROP
        };
    }
    if hops <= 1 {
        count(Reason::TimeExceeded);
        return complain(s, Complaint::TIME_EXCEEDED);
    }
    if rewrite(skb, &s.packet, &s.ends, hops - 1) {
        route::send(skb, &s.packet, &s.way)
    } else {
        DROP
    }
}
