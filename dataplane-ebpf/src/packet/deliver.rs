//! The way of a translated packet: up the stack, or along the kernel's routes.

use dataplane_common::{
    Reason,
    first::{self, Action},
    packet::Iface,
};

use super::{
    DROP, LEAVE_ALONE, came_by,
    error::Complaint,
    ipsec, node, refuse,
    rewrite::rewrite,
    route,
    scratch::Scratch,
    skb::Skb,
    through::{self, Goes},
    ways,
};
use crate::select::count;

/// Takes the last decisions about a packet: a refusal becomes a complaint or a drop, and a packet that is sent on needs a way.
/// `leaves`: the node itself sends the packet.
#[inline(always)]
pub fn conclude(skb: Skb, s: &mut Scratch, decided: Action, leaves: bool) -> Action {
    let mut action = decided;
    if action == Action::Refuse {
        action = refuse::refuse(skb, s);
    }
    if !leaves && (action == Action::Forward || action == Action::Send) {
        let key = s.packet.key;
        match through::goes(skb, s, &key) {
            Goes::Otherwise => {}
            Goes::Unchanged => return Action::LeaveAlone,
            Goes::Through => {
                // Not this host itself.
                s.way.answer = route::STACK;
                return Action::Rewrite;
            }
            Goes::Nowhere => return Action::Drop,
        }
    }
    if action == Action::Forward {
        if leaves {
            node::find_way(skb, s);
        } else {
            ways::find(skb, &s.packet, &s.ends.dst, s.ends.dst_port, &mut s.way);
            go_back(skb, s);
        }
        action = Action::Send;
    }
    if action == Action::Send {
        action = judge(s, leaves);
    }
    action
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

/// Hands a translated packet to the stack. A reply to the node itself ([`super::node`]) comes from a VIP now, so it arrives at the
/// interface to which the routes to the VIP lead: otherwise `rp_filter` would reject it. (Not inlined: see [`is_pods`](super::is_pods).)
#[inline(never)]
pub fn to_host(skb: Skb, s: &Scratch) -> i32 {
    if s.ends.src != s.packet.key.src {
        let by = came_by::interface(s.flow.cell);
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

/// Returns [`Action::Send`] for a packet that can go its way, [`Action::Rewrite`] if the stack has to carry it, and otherwise
/// [`Action::Drop`] or [`Action::Complain`]. `leaves`: the stack has already sent the packet, and does not take it back,
/// whatever its source is.
#[inline(never)]
fn judge(s: &mut Scratch, leaves: bool) -> Action {
    let new_source = leaves || s.ends.src != s.packet.key.src;
    let mut obstacle = first::obstacle(s.way.answer, s.way.mtu, new_source);
    if leaves && s.way.answer == route::LOCAL {
        obstacle = Reason::NoRoute;
    }
    if obstacle == Reason::NoRoute || obstacle == Reason::SourceForged {
        count(obstacle);
        return Action::Drop;
    }
    if ipsec::forbids(&s.packet.key, &s.ends) {
        return Action::Drop;
    }
    if obstacle == Reason::TooBig {
        count(obstacle);
        s.complaint = Complaint::too_big(s.way.mtu);
        return Action::Complain;
    }
    if leaves {
        return Action::Send;
    }
    if s.way.answer == route::LOCAL || s.way.answer == route::STACK {
        return Action::Rewrite;
    }
    if s.packet.hops <= 1 {
        count(Reason::TimeExceeded);
        s.complaint = Complaint::TIME_EXCEEDED;
        return Action::Complain;
    }
    Action::Send
}

/// Translates a packet and hands it to the stack.
#[inline(never)]
pub fn to_stack(skb: Skb, s: &Scratch) -> i32 {
    if !rewrite(skb, &s.packet, &s.ends, s.packet.hops) {
        DROP
    } else if s.way.answer == route::LOCAL {
        to_host(skb, s)
    } else {
        LEAVE_ALONE
    }
}

/// Translates a packet and sends it on. [`judge`] has seen that its time to live allows this.
#[inline(never)]
pub fn send(skb: Skb, s: &Scratch) -> i32 {
    if rewrite(skb, &s.packet, &s.ends, s.packet.hops.wrapping_sub(1)) {
        route::send(skb, &s.packet, &s.way)
    } else {
        DROP
    }
}
