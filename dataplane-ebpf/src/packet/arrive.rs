//! A packet that arrives: looks up its flow, or the service that it begins a flow to.

use aya_ebpf::{EbpfContext, programs::TcContext};
use dataplane_common::{
    Reason, VipPlace, decide,
    first::Action,
    packet::{PacketConfig, Tick},
    seen as flags,
    tables::Frontend,
    tcp::{
        Segment,
        flags::{FIN, RST},
    },
};

use super::{
    DROP, LEAVE_ALONE, asked, begin, bypass, chosen,
    conntrack::{self, ANSWER, FOREIGN, NEW, REQUEST},
    deliver, direct, error, fragments, icmp, is_pods,
    parse::{FIRST, FLOW, ICMP, MALFORMED, OTHER, Outcome, Packet},
    refuse, reverse, route,
    scratch::{self, Scratch, scratch},
    skb::{NESTED_PRIORITY, OTHER_VLAN, PACKET_HOST, PACKET_OTHERHOST, Skb},
    sockets, source_routes, through,
};
use crate::{
    capture,
    select::{Live, count},
};

/// A packet that arrives.
#[inline(always)]
pub fn ingress(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx.as_ptr().cast());
    // A mark from the way out of another node or pod means nothing here.
    skb.forget_marks();
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
/// [`is_pods`].)
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
    let now = conntrack::now();
    if bypass::is_known(skb, s, now) {
        return bypass::send(skb, s);
    }
    s.may_bypass = 0;
    let action = arrived(skb, s, now);
    match deliver::conclude(skb, s, action, false) {
        Action::LeaveAlone if s.may_bypass != 0 && bypass::begins(skb, s, now) => {
            bypass::send(skb, s)
        }
        Action::LeaveAlone => LEAVE_ALONE,
        Action::Complain => error::send(skb, &s.packet, &s.complaint, false),
        Action::Send => deliver::send(skb, s),
        Action::Rewrite => deliver::to_stack(skb, s),
        // The program has no more decisions to make about the packet here, and turns only packets that leave.
        Action::Drop | Action::Refuse | Action::Forward | Action::Turn => DROP,
    }
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
/// (Not inlined: see [`is_pods`].)
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
/// because a lookup that finds nothing costs a cache miss. `cluster`: see [`answers_node`]. (Not inlined: see [`is_pods`].)
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
/// [`is_pods`].)
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
fn arrived(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
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
        return Action::LeaveAlone;
    }
    if s.packet.is_syn() && s.frontend.is_none() && begin::is_refused(s) {
        return Action::Refuse;
    }
    // Whether the node has sent a datagram the same way makes no forged one right.
    let may_be_forged = begins || (known == FOREIGN && !s.packet.is_tcp());
    if may_be_forged && s.frontend.is_none() && is_pods(skb) && begin::is_forged(skb, s) {
        return Action::Refuse;
    }
    // A SYN answers nothing, and neither does a datagram to a service.
    if has_ports && known == NEW && !s.packet.is_syn() && s.frontend.is_none() {
        known = conntrack::answer(&s.packet.key, &s.packet.segment, &mut s.flow, now);
    }
    s.is_answer = u32::from(known == ANSWER);
    if known == ANSWER {
        if through::is_kernels(&s.flow) {
            return Action::LeaveAlone;
        }
        s.flow.toward_client(&mut s.ends);
        return Action::Forward;
    }
    s.keep = 0;
    if known == REQUEST {
        if !s.packet.is_syn() {
            s.flow.toward_endpoint(&mut s.ends);
            return Action::Forward;
        }
        // A connection that one side has closed may live for as long as the other side sends.
        s.keep = if flags::is_ended(s.flow.seen) {
            scratch::KEEP_ENDED
        } else {
            scratch::KEEP
        };
    }
    if s.frontend.is_none() {
        s.may_bypass = u32::from(begins && known == NEW);
        let begins = s.packet.is_syn() || (!s.packet.is_tcp() && direct::has_datagrams());
        let is_own = known == REQUEST && s.flow.is_direct();
        if begins && has_ports && (known == NEW || is_own) {
            return begin::pass(skb, s, now);
        }
        if known == REQUEST {
            return begin::without_frontend(skb, s, now);
        }
        if has_ports && known == NEW && through::is_injected(skb, s, now) {
            s.index = 0;
            return refuse::because(s, Reason::SourceForged);
        }
        return Action::LeaveAlone;
    }
    begin::begin(skb, s, now)
}

/// Marks a packet in the middle of an unknown connection, if it may be to a service ([`reset`]). The stack answers
/// packets to the node's own addresses. The connection of a pod's socket is older than the service or the agent, unless it
/// goes to a cluster IP, which only services have. (Not inlined: see [`is_pods`].)
#[inline(never)]
fn note_unknown(skb: Skb, s: &Scratch) {
    let place = VipPlace::of(s.packet.key.dst);
    let words = decide::Tables::vips(&Live, place.index());
    if place.may_have_ports(words)
        && (place.may_be_cluster(words) || !is_pods(skb) || !sockets::is_sent_by_tcp(skb))
    {
        skb.set_unknown();
    }
}
