//! The first packet of a flow: finds the service, the endpoint that answers, and the client's address that the endpoint
//! sees.

use dataplane_common::{
    Port, Reason,
    cells::{BUSY, MADE, NOWHERE},
    decide, first,
    packet::{FlowKey, Iface, Tick},
    seen,
    tables::{Endpoint, Frontend, Kind, Pool},
};

use super::{
    DROP, LEAVE_ALONE, asked, chosen, client_port,
    conntrack::{self, REQUEST},
    direct,
    error::Complaint,
    events, ipsec, masquerade,
    parse::LATER,
    reverse, route,
    scratch::Scratch,
    skb::Skb,
    sources, table, ways,
};
use crate::{
    capture::packets,
    select::{Live, choose, count, count_pool, remember},
    tables::PACKET_CONFIG,
};
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_get_prandom_u32};

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

/// Chooses an endpoint, and returns the reason. [`Scratch::endpoint`] is the one in use, or [`Endpoint::NONE`] if there is
/// none, and becomes the chosen one. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_pick(s: *mut Scratch) -> u32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    unsafe { s.as_mut() }.map_or(Reason::Dangling as u32, |s| {
        let verdict = choose::<false>(&s.pool, s.index, s.packet.key.src, &s.endpoint);
        s.endpoint = verdict.endpoint;
        verdict.reason() as u32
    })
}

/// [`Scratch::keep`]: a repeated SYN on a live flow.
pub const KEEP: u32 = 1;
/// [`Scratch::keep`]: a SYN on a flow that was reset, or closed by both sides. The flow keeps its endpoint. So a sender that
/// forges a RST or FINs, and then a SYN, moves no live connection.
pub const KEEP_ENDED: u32 = 2;

/// Begins a flow to the service of [`Scratch::frontend`], for a packet without a known flow. If [`Scratch::keep`] is
/// set, the packet is a SYN on the flow in `s`, which keeps its endpoint if the service still lists it.
///
/// The function takes three steps one after the other, instead of one inside the other: the frames of all would not fit
/// the stack at once.
#[inline(always)]
pub fn begin(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    let action = find_pool(skb, s);
    if action != CHOOSE {
        return action;
    }
    s.endpoint = if s.keep != 0 {
        Endpoint::new(s.flow.endpoint, s.flow.endpoint_port)
    } else {
        Endpoint::NONE
    };
    s.reason = packet_pick(s);
    if s.endpoint.is_none() {
        // A backend of a route without endpoints has slots, too.
        let reason = if s.reason == Reason::Dangling as u32 {
            Reason::Dangling
        } else {
            Reason::NoEndpoints
        };
        return refuse(skb, s, s.index, reason);
    }
    keep_endpoint(s, now);
    let mut action = go(skb, s, now);
    for nth in 0..OTHERS {
        let endpoints = u32::from(s.pool.block.len());
        if action != ANOTHER || nth >= endpoints || endpoints == 1 || packet_another(s) == 0 {
            break;
        }
        action = go(skb, s, now);
    }
    if action == ANOTHER {
        s.masquerade |= EVICT;
        action = go(skb, s, now);
    }
    match action {
        ANOTHER if s.way.answer == route::LOCAL => barred(skb, s),
        ANOTHER if s.way.answer == route::UNREADY => refuse(skb, s, s.index, Reason::NoRoute),
        ANOTHER => refuse(skb, s, s.index, Reason::PortsExhausted),
        DENIED => refuse(skb, s, s.index, Reason::EgressDenied),
        DELIVER if s.of_node == 0 => super::deliver(skb, s),
        action => action,
    }
}

/// A forged SYN in a client's name moves no live connection, even if the endpoint takes no new ones.
#[inline(never)]
fn keep_endpoint(s: &mut Scratch, now: Tick) {
    let is_answered = seen::of_replies(s.flow.seen) & seen::PACKET != 0;
    if s.keep == KEEP
        && s.reason != Reason::Kept as u32
        && is_answered
        && !table::ask(&s.packet.key, now)
    {
        s.endpoint = Endpoint::new(s.flow.endpoint, s.flow.endpoint_port);
        s.reason = Reason::Kept as u32;
    }
}

/// [`enter_flow`]: every port of the endpoint's that was tried is taken; or the endpoint's interface is not ready
/// ([`route::UNREADY`]); or the endpoint is on the node itself, which the packet comes from.
const ANOTHER: i32 = 260;
/// [`go`]: the packet's workload may not go to the endpoint.
const DENIED: i32 = 261;
/// [`enter_flow`]: the packet is to be sent on.
pub const DELIVER: i32 = 259;

/// [`Scratch::masquerade`]: the endpoint sees an address of the node's.
const MASQUERADE: u32 = 1;
/// [`Scratch::masquerade`]: in addition, a flow that may be evicted gives its port up, because no endpoint has a free one.
const EVICT: u32 = 2;

/// How often to search for a port again if other CPUs took the port meanwhile.
const TRIES: u32 = 3;

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
    if s.reason == Reason::PortsExhausted as u32 {
        s.slot = s.slot.wrapping_add(1);
    } else {
        s.reason = Reason::PortsExhausted as u32;
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

/// [`find_pool`]: a pool was found, and it has endpoints.
const CHOOSE: i32 = 257;

/// Finds the pool that answers the packet, if any, and decides whether to masquerade the flow.
#[inline(never)]
fn find_pool(skb: Skb, s: &mut Scratch) -> i32 {
    let key = &s.packet.key;
    if key.src.is_nobody() {
        return LEAVE_ALONE;
    }
    if s.packet.fragment == LATER && key.dst_port == Port::ANY {
        // At a node's address the fragment may belong to any other flow; at a cluster IP it cannot.
        if s.frontend.kind() != Kind::CLUSTER_ADDRESS {
            return LEAVE_ALONE;
        }
        count(Reason::UnknownFragment);
        return DROP;
    }
    let frontend = s.frontend;
    let decision = first::decide(&mut Arrived { skb, s }, frontend);
    if decision.reason != Reason::Translated {
        return refuse(skb, s, decision.pool, decision.reason);
    }
    s.flow.came_by = if s.of_node != 0 {
        skb.ifindex()
    } else {
        uplink(skb)
    };
    s.index = decision.pool;
    s.masquerade = u32::from(decision.masquerade) * MASQUERADE;
    CHOOSE
}

/// A packet that begins a flow, as the shared decision sees it.
struct Arrived<'a> {
    skb: Skb,
    s: &'a mut Scratch,
}

impl first::Packet for Arrived<'_> {
    #[inline(always)]
    fn config(&self) -> u32 {
        match PACKET_CONFIG.get(0) {
            Some(config) => config.flags,
            None => 0,
        }
    }

    #[inline(always)]
    fn is_of_node(&self) -> bool {
        self.s.of_node != 0
    }

    #[inline(always)]
    fn has_right_source(&mut self) -> bool {
        reverse::is_right(self.skb, &self.s.packet, &mut self.s.way, reverse::BEGINS)
    }

    #[inline(always)]
    fn is_by_pods_interface(&self) -> bool {
        route::interface(self.skb.ifindex()).flags & Iface::LOCAL != 0
    }

    #[inline(always)]
    fn is_source_in(&self, set: u32) -> bool {
        sources::contains(set, self.s.packet.key.src)
    }

    #[inline(always)]
    fn read_pool(&mut self, index: u32) -> bool {
        let Some(pool) = decide::Tables::pool(&Live, index) else {
            return false;
        };
        self.s.pool = pool;
        true
    }

    #[inline(always)]
    fn pool(&self) -> &Pool {
        &self.s.pool
    }
}

/// Whether the packet's workload may send to the drawn endpoint. If no service has the packet's destination, the
/// destination itself counts. With external linkage, as in `table.rs`: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_admits(s: *const Scratch) -> u32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    unsafe { s.as_ref() }.map_or(0, |s| {
        let key = &s.packet.key;
        u32::from(if s.frontend.is_none() {
            packets::admits_itself(key)
        } else {
            packets::admits_service(key, s.pool.block, &s.endpoint)
        })
    })
}

/// Whether the program has to refuse a SYN to a destination that does not belong to a service, or no longer.
#[inline(never)]
pub fn is_refused(skb: Skb, s: &mut Scratch) -> bool {
    let is_refused = packet_admits(s) == 0;
    if is_refused {
        refuse(skb, s, 0, Reason::EgressDenied);
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
        refuse(skb, s, 0, Reason::SourceForged);
    }
    is_forged
}

/// [`enter_flow`]. With external linkage, as in `table.rs`: the verifier looks at it once, not once for each endpoint.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_enter_flow(skb: *mut __sk_buff, s: *mut Scratch, now: u32) -> i32 {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    match unsafe { s.as_mut() } {
        Some(s) => enter_flow(Skb(skb), s, Tick::from_number(now as u16)),
        None => DROP,
    }
}

#[inline(always)]
fn go(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    if s.index != 0 && packet_admits(s) == 0 {
        return DENIED;
    }
    packet_enter_flow(skb.0, s, u32::from(now.number()))
}

/// Enters the flow to the endpoint that was chosen.
#[inline(always)]
fn enter_flow(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    let index = s.index;
    let mut masquerade = s.masquerade & MASQUERADE != 0;
    if ipsec::forbids_flow(&s.packet.key, &s.endpoint.addr) {
        return refuse(skb, s, index, Reason::IpsecPolicy);
    }
    ways::find(
        skb,
        &s.packet,
        &s.endpoint.addr,
        s.endpoint.port,
        &mut s.way,
    );
    // The stack takes no packet of the node itself from an interface.
    let is_barred = s.way.answer == route::LOCAL && s.of_node != 0;
    if is_barred && s.keep != 0 {
        // Its endpoint is listed no longer.
        s.flow.remove(now);
        s.keep = 0;
    }
    if (s.way.answer == route::UNREADY || is_barred) && s.keep == 0 && index != 0 {
        return ANOTHER;
    }
    if is_barred {
        return barred(skb, s);
    }
    let obstacle = first::obstacle(s.way.answer, s.way.mtu, false);
    if obstacle != Reason::Translated {
        return refuse(skb, s, index, obstacle);
    }
    if s.keep != 0 {
        if s.endpoint.addr == s.flow.endpoint && s.endpoint.port == s.flow.endpoint_port {
            if s.keep == KEEP_ENDED {
                conntrack::begin_anew(&s.packet.key, &s.packet.segment, now);
            }
            s.flow.toward_endpoint(&mut s.ends);
            return DELIVER;
        }
        s.flow.remove(now);
        s.keep = 0;
    }
    s.flow.forward = s.packet.key;
    s.flow.endpoint = s.endpoint.addr;
    s.flow.endpoint_port = s.endpoint.port;
    s.flow.node_port = Port::ANY;
    s.flow.node_addr = 0;
    masquerade |= s.packet.key.src == s.endpoint.addr;
    if s.way.answer == route::LOCAL {
        // An endpoint on the host itself answers through us, for any client. And the stack would reject a packet with
        // one of the host's own addresses as its source (`fib_validate_source`).
        masquerade = false;
    }
    let obstacle = first::obstacle(s.way.answer, s.way.mtu, masquerade);
    if obstacle != Reason::Translated {
        return refuse(skb, s, index, obstacle);
    }
    let reason = enter(skb, s, masquerade, now);
    if reason == Reason::Kept {
        // Another CPU has the same flow's first packet, too, and was faster: its endpoint answers.
        let known = conntrack::request(&s.packet.key, &s.packet.segment, &mut s.flow, now);
        if known != REQUEST {
            return refuse(skb, s, index, Reason::FlowBusy);
        }
        s.flow.toward_endpoint(&mut s.ends);
        return super::FORWARD;
    }
    if reason == Reason::PortsExhausted {
        return ANOTHER;
    }
    if reason.is_refusal() {
        return refuse(skb, s, index, reason);
    }
    let reason = if reason == Reason::Translated && s.reason == Reason::Kept as u32 {
        Reason::Kept
    } else {
        reason
    };
    count(reason);
    if index != 0 {
        count_pool(index, reason);
        if s.reason != Reason::Kept as u32 && s.pool.affinity_seconds != 0 {
            remember(s.packet.key.src, s.pool.affinity_group, s.endpoint);
        }
    }
    events::report(skb, &s.packet, reason, index, &s.endpoint);
    s.flow.toward_endpoint(&mut s.ends);
    DELIVER
}

/// Enters the flow into conntrack. The reason is a refusal if that failed, [`Reason::Masqueraded`] if the flow got an
/// address and a port of the node's, and [`Reason::Kept`] if another CPU has entered it.
#[inline(always)]
fn enter(skb: Skb, s: &mut Scratch, masquerade: bool, now: Tick) -> Reason {
    let how = if s.masquerade & EVICT != 0 {
        masquerade::EVICTING
    } else if s.reason == Reason::PortsExhausted as u32 {
        masquerade::BRIEFLY
    } else {
        masquerade::THOROUGHLY
    };
    let mut reason = Reason::Translated;
    if masquerade {
        masquerade::take_address(skb, s);
        if conntrack::node_addr(s.flow.node_addr).is_unspecified() {
            return Reason::NoNodeAddress;
        }
        reason = Reason::Masqueraded;
    }
    let flow = &mut s.flow;
    for _ in 0..TRIES {
        let found = if masquerade {
            masquerade::find_port(skb, flow, how, now)
        } else {
            client_port::choose(flow, now)
        };
        if !found {
            return Reason::PortsExhausted;
        }
        // The port first, then the cell: no other CPU has to wait for the search.
        let index = table::hold_or_find(&flow.forward, now);
        if index == NOWHERE {
            return Reason::ConntrackFull;
        }
        if index == BUSY {
            return Reason::FlowBusy;
        }
        if index & MADE != 0 {
            return Reason::Kept;
        }
        if flow.lead(index, now) {
            flow.publish(index, now, &s.packet.segment);
            return reason;
        }
        table::give_back(index, &flow.forward, now);
        if !masquerade {
            return Reason::ConntrackFull;
        }
        // Another flow has got the port meanwhile.
    }
    Reason::FlowBusy
}

/// The uplink by which a packet came; 0 for a pod's interface.
#[inline(always)]
fn uplink(skb: Skb) -> u32 {
    let came_by = skb.ifindex();
    if route::interface(came_by).flags & Iface::LOCAL != 0 {
        0
    } else {
        came_by
    }
}

/// Leaves a connection alone that does not go to a service. But if it goes to an endpoint itself, from a port that
/// already has a live flow to this endpoint through a VIP, the endpoint sees it come from another port ([`direct`]):
/// otherwise the endpoint's answers would look like that flow's. [`Scratch::keep`]: the packet belongs to such a flow,
/// which is known.
#[inline(always)]
pub fn pass(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    if !is_to_be_moved(s, now) {
        return LEAVE_ALONE;
    }
    if !reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS) {
        return refuse(skb, s, 0, Reason::SourceForged);
    }
    match go(skb, s, now) {
        ANOTHER => refuse(skb, s, 0, Reason::PortTaken),
        DELIVER => super::deliver(skb, s),
        action => action,
    }
}

/// A packet of the node itself whose service has endpoints on the node only. A load balancer's is left alone, as the program
/// at the socket has left it: the load balancer may take it.
#[inline(never)]
fn barred(skb: Skb, s: &mut Scratch) -> i32 {
    if s.frontend.kind() == Kind::LOAD_BALANCER {
        return LEAVE_ALONE;
    }
    refuse(skb, s, s.index, Reason::NoRoute)
}

/// Enters a flow of the node itself to the endpoint that a program at the socket has chosen: masqueraded, by the interface
/// in [`Route::iface`](route::Route::iface). `false`: it is not entered, for one because the endpoint has no port left. The
/// packet then goes as it is, since it may find its way back.
#[inline(always)]
pub fn masquerade_itself(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    s.flow.forward = s.packet.key;
    s.flow.endpoint = s.endpoint.addr;
    s.flow.endpoint_port = s.endpoint.port;
    s.flow.came_by = 0;
    s.masquerade = MASQUERADE;
    s.reason = Reason::Translated as u32;
    let reason = enter(skb, s, true, now);
    if reason == Reason::Kept || reason.is_refusal() {
        return false;
    }
    count(reason);
    events::report(skb, &s.packet, reason, 0, &s.endpoint);
    true
}

/// A SYN on the flow in `s` ([`Scratch::keep`]), to an address and port that no service has any longer. A live
/// connection keeps its endpoint. Any other flow is removed: the program leaves the SYN and the packets after it alone.
#[inline(never)]
pub fn without_frontend(skb: Skb, s: &mut Scratch, now: Tick) -> i32 {
    if !reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS) {
        return LEAVE_ALONE;
    }
    let is_answered = seen::of_replies(s.flow.seen) & seen::PACKET != 0;
    if s.keep == KEEP && is_answered && !table::ask(&s.packet.key, now) {
        s.flow.toward_endpoint(&mut s.ends);
        return super::FORWARD;
    }
    s.flow.remove(now);
    LEAVE_ALONE
}

/// Whether the endpoint has to see a connection to itself come from another port; if so, sets the endpoint as chosen.
#[inline(never)]
fn is_to_be_moved(s: &mut Scratch, now: Tick) -> bool {
    let (addr, port) = (s.packet.key.dst, s.packet.key.dst_port);
    if s.keep == 0 {
        conntrack::forget_answered(&s.packet.key, now);
        s.flow.forward = s.packet.key;
        s.flow.endpoint = addr;
        s.flow.endpoint_port = port;
        s.flow.node_port = Port::ANY;
        s.flow.came_by = 0;
        if !s.flow.replies_taken(now) {
            return false;
        }
        direct::announce();
    }
    s.endpoint = Endpoint::new(addr, port);
    // The flow has no service, so it has no pool.
    s.index = 0;
    s.masquerade = 0;
    s.reason = Reason::Translated as u32;
    true
}

/// Refuses a packet: sends an error to its sender if iptables' `REJECT` would, else drops it.
#[inline(always)]
fn refuse(skb: Skb, s: &mut Scratch, pool: u32, reason: Reason) -> i32 {
    count(reason);
    // The other reasons are not about missing endpoints: a pool's counter would show them as connections.
    if reason == Reason::NoEndpoints
        || reason == Reason::NoLocalEndpoint
        || reason == Reason::PortNotServed
    {
        count_pool(pool, reason);
    }
    events::report(skb, &s.packet, reason, pool, &Endpoint::NONE);
    if reason == Reason::NoEndpoints
        || reason == Reason::PortNotServed
        || reason == Reason::PortTaken
        || reason == Reason::EgressDenied
    {
        super::complain(s, Complaint::PORT_UNREACHABLE)
    } else if reason == Reason::TooBig {
        super::complain(s, Complaint::too_big(s.way.mtu))
    } else {
        DROP
    }
}
