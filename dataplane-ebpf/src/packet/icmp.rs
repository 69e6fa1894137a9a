//! ICMP errors about translated packets: an error is about a packet that its receiver sent, so it must quote the
//! addresses that the receiver knows (RFC 5508). Path MTU discovery depends on them.

use dataplane_common::{
    Reason,
    packet::{FlowKey, Tick},
    tcp::Segment,
};

use super::{
    DROP, LEAVE_ALONE, bypass, came_by,
    conntrack::{self, ANSWER, Known, NEW, REQUEST},
    deliver, ipsec, node,
    parse::{FLOW, LATER, Packet},
    reverse,
    rewrite::{Ends, addresses_difference, ports_word, write_addresses},
    route,
    scratch::Scratch,
    skb::{Skb, difference, fold32},
    through::{self, Goes},
    ways,
};
use crate::select::count;

/// Whether it is an error about another packet, and not an echo or a message of neighbour discovery.
#[inline(always)]
fn is_error(packet: &Packet, kind: u8) -> bool {
    if packet.is_v4() {
        kind == 3 || kind == 11 || kind == 12
    } else {
        (1..=4).contains(&kind)
    }
}

/// Translates and forwards an error that arrives, or one that this host itself sends.
#[inline(never)]
pub fn translate<const LEAVING: bool>(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    let mut kind = 0_u8;
    if !skb.load(s.packet.l4, &mut kind) || !is_error(&s.packet, kind) {
        return LEAVE_ALONE;
    }
    if !LEAVING && s.packet.key.src.is_nobody() {
        return LEAVE_ALONE;
    }
    s.quoted.clear();
    s.quoted.l3 = s.packet.l4 + 8;
    // The packet that is quoted was longer than the quotation.
    let outcome = if s.packet.is_v4() {
        s.quoted.read_v4(skb, u32::MAX)
    } else {
        s.quoted.read_v6(skb, u32::MAX)
    };
    if outcome != FLOW || s.quoted.fragment == LATER {
        return LEAVE_ALONE;
    }
    // Bytes behind the packet's end are padding: no checksum covers them.
    if s.quoted.l4 + 4 > s.packet.l3 + s.packet.length {
        return LEAVE_ALONE;
    }
    // An error goes to the sender of the packet that it quotes (`nf_conntrack_inet_error` in
    // `net/netfilter/nf_conntrack_proto_icmp.c`).
    if s.packet.key.dst != s.quoted.key.src {
        return LEAVE_ALONE;
    }
    // The host that reports the error is on the packet's path: a packet in the reverse direction would belong to the
    // flow.
    let quoted = &s.quoted.key;
    let back = FlowKey::new(
        quoted.dst,
        quoted.dst_port,
        quoted.src,
        quoted.src_port,
        quoted.protocol,
    );
    // Not the constant itself: the verifier takes no pointer to memory that the function could not write to.
    s.packet.segment = Segment::QUOTED;
    if LEAVING {
        leaves(skb, s, &back, now)
    } else {
        arrives(skb, s, &back, now)
    }
}

/// Sets the ends of a packet the other way round, after translation.
#[inline(always)]
fn set_ends(s: &mut Scratch, known: Known) -> bool {
    if known == ANSWER {
        s.flow.toward_client(&mut s.ends);
    } else if known == REQUEST {
        s.flow.toward_endpoint(&mut s.ends);
    }
    s.outer = s.ends;
    known == ANSWER || known == REQUEST
}

/// Translates an error that arrives, and sends it on or leaves it to the stack.
#[inline(always)]
fn arrives(skb: Skb, s: &mut Scratch, back: &FlowKey, now: Tick) -> i32 {
    let segment = &s.packet.segment;
    let mut known = conntrack::request(back, segment, &mut s.flow, now);
    if known == NEW {
        known = conntrack::masqueraded_answer(back, segment, &mut s.flow, now);
    }
    if known == NEW {
        known = conntrack::answer(back, segment, &mut s.flow, now);
    }
    if known == NEW {
        let leaves = bypass::way_of_error(skb, s, back);
        let mut is_right = || reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS);
        // Not in a function of its own: the stack has no room for its frame.
        return if leaves != 0 && is_right() && bypass::leads(skb, s, leaves) {
            bypass::send(skb, s)
        } else {
            LEAVE_ALONE
        };
    }
    if !set_ends(s, known) || (known == ANSWER && through::is_kernels(&s.flow)) {
        return LEAVE_ALONE;
    }
    s.is_answer = u32::from(known == ANSWER);
    match through::goes(skb, s, back) {
        Goes::Otherwise => {}
        Goes::Unchanged => return LEAVE_ALONE,
        Goes::Through => return pass(skb, s),
        Goes::Nowhere => return DROP,
    }
    if ipsec::forbids(&s.packet.key, &s.ends) {
        return DROP;
    }
    ways::find(skb, &s.packet, &s.ends.dst, s.ends.dst_port, &mut s.way);
    deliver::go_back(skb, s);
    if s.way.answer == route::FORGED {
        count(Reason::SourceForged);
        return DROP;
    }
    count(Reason::ErrorTranslated);
    if s.way.answer == route::LOCAL {
        return if write(skb, s, s.packet.hops) {
            deliver::to_host(skb, s)
        } else {
            DROP
        };
    }
    if s.way.answer != route::ONWARD || s.packet.hops <= 1 {
        // No error about an error (RFC 1122 section 3.2.2).
        count(Reason::NoRoute);
        return DROP;
    }
    if write(skb, s, s.packet.hops - 1) {
        route::send(skb, &s.packet, &s.way)
    } else {
        DROP
    }
}

/// Translates an error that leaves: one of this host itself, or one that came through the stack.
#[inline(always)]
fn leaves(skb: Skb, s: &mut Scratch, back: &FlowKey, now: Tick) -> i32 {
    let segment = &s.packet.segment;
    let mut known = conntrack::answer(back, segment, &mut s.flow, now);
    if known == ANSWER && skb.is_forwarded() && !came_by::is_through(s.flow.cell) {
        return LEAVE_ALONE;
    }
    if known == NEW && came_by::may_be_through() {
        known = through::lookup(back, segment, &mut s.flow, now);
    }
    // An answer to the node's own packet ([`node`]) has met no socket. Its error leaves to the VIP.
    let mut is_of_node = false;
    if known == NEW && !skb.is_forwarded() && !node::is_excluded(skb) {
        known = conntrack::request(back, segment, &mut s.flow, now);
        is_of_node = known == REQUEST;
    }
    if !set_ends(s, known) {
        return LEAVE_ALONE;
    }
    // As for the packets of the flow that the error is about: the stack asks its policies for what it forwards, the program for the rest.
    let is_forbidden = if skb.is_forwarded() {
        ipsec::forbids_leaving(&s.ends)
    } else {
        ipsec::forbids(&s.packet.key, &s.ends)
    };
    if is_forbidden {
        return DROP;
    }
    if is_of_node {
        node::find_way(skb, s);
        if s.way.answer == route::FORGED {
            count(Reason::SourceForged);
            return DROP;
        }
    }
    count(Reason::ErrorTranslated);
    if is_of_node && s.way.answer != route::ONWARD {
        // No error about an error, as above.
        count(Reason::NoRoute);
        return DROP;
    }
    if !write(skb, s, s.packet.hops) {
        DROP
    } else if is_of_node {
        skb.send_on();
        route::send_out(skb, &s.packet, &s.way)
    } else {
        LEAVE_ALONE
    }
}

/// Leaves an error to the stack: in the stack, it comes from the host that reported it.
#[inline(never)]
fn pass(skb: Skb, s: &mut Scratch) -> i32 {
    s.outer.src = s.packet.key.src;
    if write(skb, s, s.packet.hops) {
        LEAVE_ALONE
    } else {
        DROP
    }
}

/// Writes both headers: [`Scratch::ends`] are those of a packet in the reverse direction. The error then comes from the
/// flow's other end, as with a NAT, whichever host on the path reported it.
///
/// The quotation's transport checksum stays as it was: no host checks it, and it may be missing.
#[inline(never)]
fn write(skb: Skb, s: &Scratch, hops: u8) -> bool {
    let (packet, inner, ends, outer) = (&s.packet, &s.quoted, &s.ends, &s.outer);
    let checksum = packet.l4 + 2;
    let quoted = Ends {
        src: ends.dst,
        dst: ends.src,
        src_port: ends.dst_port,
        dst_port: ends.src_port,
    };
    if inner.is_v4() {
        // The quoted header's own checksum makes up for its addresses.
        if !write_addresses(skb, inner, &quoted, inner.hops) {
            return false;
        }
    } else {
        let addresses = fold32(addresses_difference(inner, &quoted));
        if !skb.store::<_, false>(inner.l3 + 8, &quoted.addresses())
            || !skb.sum::<false>(checksum, addresses, false)
            || !skb.sum::<true>(checksum, fold32(addresses_difference(packet, outer)), false)
        {
            return false;
        }
    }
    let old = ports_word(inner.key.src_port, inner.key.dst_port);
    let new = ports_word(quoted.src_port, quoted.dst_port);
    if old != new
        && !(skb.sum::<false>(checksum, fold32(difference(old, new)), false)
            && skb.store::<_, false>(inner.l4, &new))
    {
        return false;
    }
    write_addresses(skb, packet, outer, hops)
}
