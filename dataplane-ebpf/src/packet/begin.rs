//! The first packet of a flow: finds the service, the endpoint that answers, and the client's address that the endpoint
//! sees.

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use dataplane_common::{
    Port, Reason, decide,
    first::Action,
    packet::{FlowKey, Tick},
    seen,
    tables::{Endpoint, Frontend, Kind},
};

use super::{
    asked, chosen, conntrack, direct, enter, pool, refuse, reverse, route,
    scratch::{self, Scratch},
    skb::Skb,
    table, through,
};
use crate::select::{Live, choose};

/// Returns the frontend that a packet is for.
#[inline(always)]
pub fn frontend(key: &FlowKey) -> Frontend {
    Frontend::from_word(packet_frontend(key))
}

/// [`frontend`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_frontend(key: *const FlowKey) -> u64 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let found = unsafe { key.as_ref() }.map_or(Frontend::NONE, |key| {
        decide::find_frontend(&Live, key.dst, key.dst_port, key.protocol, false)
    });
    found.word()
}

/// Chooses an endpoint, with its reason. [`Scratch::endpoint`] is the one in use, or [`Endpoint::NONE`] if there is
/// none, and becomes the chosen one. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_pick(s: *mut Scratch) -> u32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    unsafe { s.as_mut() }.map_or(0, |s| {
        let verdict = choose::<false>(&s.pool, s.index, s.packet.key.src, &s.endpoint);
        s.endpoint = verdict.endpoint;
        s.reason = verdict.reason();
        1
    })
}

/// Begins a flow to the service of [`Scratch::frontend`], for a packet without a known flow. If [`Scratch::keep`] is
/// set, the packet is a SYN on the flow in `s`, which keeps its endpoint if the service still lists it.
///
/// The function takes three steps one after the other, instead of one inside the other: the frames of all would not fit
/// the stack at once.
#[inline(always)]
pub fn begin(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
    if let Some(action) = pool::find(skb, s) {
        return action;
    }
    s.endpoint = if s.keep != 0 {
        Endpoint::new(s.flow.endpoint, s.flow.endpoint_port)
    } else {
        Endpoint::NONE
    };
    if packet_pick(s) == 0 {
        return Action::Drop;
    }
    if s.endpoint.is_none() {
        // A backend of a route without endpoints has slots, too.
        let reason = if s.reason == Reason::Dangling {
            Reason::Dangling
        } else {
            Reason::NoEndpoints
        };
        return refuse::because(s, reason);
    }
    keep_endpoint(s, now);
    s.exhausted = Endpoint::NONE;
    let mut action = enter::to_endpoint(skb, s, now);
    for nth in 0..OTHERS {
        let endpoints = u32::from(s.pool.block.len());
        if !may_go_elsewhere(s, action)
            || nth >= endpoints
            || endpoints == 1
            || packet_another(s) == 0
        {
            break;
        }
        action = enter::to_endpoint(skb, s, now);
    }
    if may_go_elsewhere(s, action) && !s.exhausted.is_none() {
        s.endpoint = s.exhausted;
        s.masquerade |= scratch::EVICT;
        action = enter::to_endpoint(skb, s, now);
    }
    // The endpoints of a load balancer are on the node itself, which the packet comes from. The packet is left alone, as the
    // program at the socket has left it: the load balancer may take it.
    if s.way.of_node != 0
        && s.frontend.kind() == Kind::LOAD_BALANCER
        && action == Action::Refuse
        && s.refusal == Reason::NoRoute
        && s.way.answer == route::LOCAL
    {
        return Action::LeaveAlone;
    }
    action
}

/// Whether another endpoint may take a flow that was refused: every port of the endpoint's that was tried is taken; or its
/// interface is not ready ([`route::UNREADY`]); or it is on the node itself, which the packet comes from. Takes note of an endpoint
/// of the first kind.
#[inline(never)]
fn may_go_elsewhere(s: &mut Scratch, action: Action) -> bool {
    if action != Action::Refuse || s.keep != 0 {
        return false;
    }
    if s.refusal == Reason::PortsExhausted {
        s.exhausted = s.endpoint;
        return true;
    }
    s.refusal == Reason::NoRoute && (s.way.answer == route::UNREADY || s.way.answer == route::LOCAL)
}

/// A forged SYN in a client's name moves no live connection, even if the endpoint takes no new ones.
#[inline(never)]
fn keep_endpoint(s: &mut Scratch, now: Tick) {
    let is_answered = seen::of_replies(s.flow.seen) & seen::PACKET != 0;
    if s.keep == scratch::KEEP
        && s.reason != Reason::Kept
        && is_answered
        && !table::ask(&s.packet.key, now)
    {
        s.endpoint = Endpoint::new(s.flow.endpoint, s.flow.endpoint_port);
        s.reason = Reason::Kept;
    }
}

/// How many other endpoints are tried if one has no port left, or is not ready.
const OTHERS: u32 = 24;

/// [`another`]. With external linkage, as in `table.rs`: the verifier looks at it once, not once for each endpoint.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_another(s: *mut Scratch) -> u32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    unsafe { s.as_mut() }.map_or(0, |s| u32::from(another(s)))
}

/// Takes the next endpoint of the pool, first after one at random.
#[inline(always)]
fn another(s: &mut Scratch) -> bool {
    let block = s.pool.block;
    if s.reason == Reason::PortsExhausted {
        s.slot = s.slot.wrapping_add(1);
    } else {
        s.reason = Reason::PortsExhausted;
        // SAFETY: the helper has no preconditions.
        s.slot = decide::draw(block, unsafe { bpf_get_prandom_u32() });
    }
    if s.slot.wrapping_sub(block.base()) >= u32::from(block.len()) {
        s.slot = block.base();
    }
    let Some(endpoint) = decide::Tables::endpoint(&Live, s.slot) else {
        return false;
    };
    if endpoint.is_none() {
        return false;
    }
    s.endpoint = endpoint;
    true
}

/// Whether the program has to refuse a SYN to a destination that does not belong to a service, or no longer.
#[inline(never)]
pub fn is_refused(s: &mut Scratch) -> bool {
    let is_refused = !enter::admits(s);
    if is_refused {
        s.index = 0;
        refuse::because(s, Reason::EgressDenied);
    }
    is_refused
}

/// Whether a pod's packet, whose destination is not a service's, has a source that the pod does not have, and so harms others. If
/// so, the program drops the packet. There are two such packets:
///
/// - A socket sends it to an endpoint that was chosen at the socket: the process, the pod's routes or its NAT rules have chosen
///   the source.
/// - It is a datagram from a service's address and port: its receiver would seem to have [asked](super::asked) for it, and the
///   receiver's requests to the service would be left alone as answers.
///
/// The program checks the source first, because the CPU remembers valid sources.
#[inline(never)]
pub fn is_forged(skb: Skb, s: &mut Scratch) -> bool {
    let is_forged = !reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS)
        && (asked::is_of_service(&s.packet.key) || chosen::is_destination(skb, &s.packet.key));
    if is_forged {
        s.index = 0;
        refuse::because(s, Reason::SourceForged);
    }
    is_forged
}

/// Leaves a connection alone that does not go to a service. But if it goes to an endpoint itself, from a port that
/// already has a live flow to this endpoint through a VIP, the endpoint sees it come from another port ([`direct`]):
/// otherwise the endpoint's answers would look like that flow's. [`Scratch::keep`]: the packet belongs to such a flow,
/// which is known.
#[inline(always)]
pub fn pass(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
    if !is_to_be_moved(s, now) {
        return Action::LeaveAlone;
    }
    if !reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS) {
        return refuse::because(s, Reason::SourceForged);
    }
    let action = enter::to_endpoint(skb, s, now);
    if action == Action::Refuse && s.refusal == Reason::PortsExhausted {
        s.refusal = Reason::PortTaken;
    }
    action
}

/// A SYN on the flow in `s` ([`Scratch::keep`]), to an address and port that no service has any longer. A live
/// connection keeps its endpoint. Any other flow is removed: the program leaves the SYN and the packets after it alone.
#[inline(never)]
pub fn without_frontend(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
    if !reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS) {
        return Action::LeaveAlone;
    }
    let is_answered = seen::of_replies(s.flow.seen) & seen::PACKET != 0;
    if s.keep == scratch::KEEP && is_answered && !table::ask(&s.packet.key, now) {
        s.flow.toward_endpoint(&mut s.ends);
        return Action::Forward;
    }
    s.flow.remove(now);
    Action::LeaveAlone
}

/// Whether the endpoint has to see a connection to itself come from another port; if so, sets the endpoint as chosen.
#[inline(never)]
fn is_to_be_moved(s: &mut Scratch, now: Tick) -> bool {
    let (addr, port) = (s.packet.key.dst, s.packet.key.dst_port);
    s.flow.came_by = through::path_of_new_flows();
    if s.keep == 0 {
        conntrack::forget_answered(&s.packet.key, now);
        s.flow.forward = s.packet.key;
        s.flow.endpoint = addr;
        s.flow.endpoint_port = port;
        s.flow.node_port = Port::ANY;
        if !s.flow.replies_taken(now) {
            return false;
        }
        direct::announce();
    }
    s.endpoint = Endpoint::new(addr, port);
    // The flow has no service, so it has no pool.
    s.index = 0;
    s.masquerade = 0;
    s.reason = Reason::Translated;
    true
}
