//! A packet that leaves: an answer of an endpoint that is a socket of this host, or the node's own packet to a service.

use aya_ebpf::{EbpfContext, programs::TcContext};
use dataplane_common::{
    Reason, VipPlace, decide,
    first::Action,
    packet::{PacketConfig, Tick},
    tcp::{Segment, flags::RST},
};

use super::{
    DROP, LEAVE_ALONE, asked, bypass, came_by,
    conntrack::{self, ANSWER},
    deliver, error, fragments, icmp, ipsec, node, own,
    parse::{FLOW, ICMP, LATER},
    refuse, reset,
    rewrite::rewrite,
    route,
    scratch::{Scratch, scratch},
    skb::Skb,
    through,
};
use crate::select::Live;

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
        || (is_forwarded
            && !came_by::may_be_through()
            && !skb.is_watched()
            && !asked::may_ask(skb, route::link_length(skb.ifindex())))
    {
        return LEAVE_ALONE;
    }
    let Some(s) = scratch() else {
        return DROP;
    };
    let action = leaves(skb, s, is_forwarded);
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
    if outcome == ICMP && (!is_forwarded || came_by::may_be_through()) {
        return icmp::translate::<true>(skb, s, now);
    }
    if outcome != FLOW || !fragments::follow(&mut s.packet, false) {
        return LEAVE_ALONE;
    }
    if is_forwarded {
        return passes(skb, s, now);
    }
    let action = sent(skb, s, now);
    match deliver::conclude(skb, s, action, true) {
        Action::LeaveAlone => LEAVE_ALONE,
        Action::Complain => error::send(skb, &s.packet, &s.complaint, true),
        Action::Send => node::send(skb, s),
        Action::Rewrite => rewrite_only(skb, s),
        Action::Turn => route::send_by_neighbour(skb, &s.packet, &s.way),
        // The program has no more decisions to make about the packet here.
        Action::Drop | Action::Refuse | Action::Forward => DROP,
    }
}

/// Handles a packet of TCP or UDP that the stack forwards.
#[inline(always)]
fn passes(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    if skb.is_watched() {
        bypass::note(skb, s);
    }
    if came_by::may_be_through() {
        // The program on the way in has taken note of it.
        s.packet.segment.flags |= Segment::QUOTED.flags;
        if through::find(skb, s, now) {
            skb.send_on();
            return if ipsec::forbids_leaving(&s.ends) {
                DROP
            } else if through::goes_back(skb, s) {
                node::send(skb, s)
            } else if rewrite(skb, &s.packet, &s.ends, s.packet.hops) {
                LEAVE_ALONE
            } else {
                DROP
            };
        }
    }
    if s.packet.fragment != LATER {
        asked::remember(s, now);
    }
    LEAVE_ALONE
}

/// Translates a packet that goes on as it goes.
#[inline(always)]
fn rewrite_only(skb: Skb, s: &Scratch) -> i32 {
    if ipsec::forbids(&s.packet.key, &s.ends) || !rewrite(skb, &s.packet, &s.ends, s.packet.hops) {
        DROP
    } else {
        LEAVE_ALONE
    }
}

/// A packet of TCP or UDP that this host sends.
#[inline(always)]
fn sent(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
    // A SYN answers nothing: with it, the endpoint connects from its own port.
    if s.packet.is_syn() {
        conntrack::forget_answered(&s.packet.key, now);
    } else if conntrack::answer(&s.packet.key, &s.packet.segment, &mut s.flow, now) == ANSWER {
        s.flow.toward_client(&mut s.ends);
        return Action::Rewrite;
    }
    if s.packet.segment.has(RST) && came_by::may_be_through() && through::find(skb, s, now) {
        // A rule of the stack refuses a flow's packet.
        return Action::Rewrite;
    }
    // With a tag, the packet comes from a VLAN's interface: its own program has seen it, if it has one.
    if skb.has_tag() {
        asked::remember(s, now);
        return Action::LeaveAlone;
    }
    let place = VipPlace::of(s.packet.key.dst);
    if place.is_set(decide::Tables::vips(&Live, place.index()))
        && let Some(action) = node::request(skb, s, now)
    {
        return action;
    }
    if node::is_from_elsewhere(skb, s) {
        // A datagram whose interface is not that of its way comes by again.
        if !s.packet.is_tcp() && own::is_turned(skb, s) {
            return Action::Turn;
        }
        if node::is_masqueraded(skb, s, now) {
            return Action::Rewrite;
        }
    }
    // A socket that has taken a flow's port since is refused. For a connection, its first packet decides.
    let begins = s.packet.is_syn() || !s.packet.is_tcp();
    if begins
        && s.packet.key.src_port.host() >= PacketConfig::FIRST_PORT
        && conntrack::is_port_taken(&s.packet.key, now)
    {
        s.index = 0;
        return refuse::because(s, Reason::PortTaken);
    }
    asked::remember(s, now);
    if !s.packet.is_tcp() && own::is_turned(skb, s) {
        Action::Turn
    } else {
        Action::LeaveAlone
    }
}
