//! Enters a flow to a chosen endpoint: its way, its ports, and its place in conntrack.

use aya_ebpf::bindings::__sk_buff;
use dataplane_common::{
    Port, Reason,
    cells::{BUSY, MADE, NOWHERE},
    first::{self, Action},
    packet::Tick,
};

use super::{
    client_port,
    conntrack::{self, REQUEST},
    events, ipsec, masquerade, refuse, route,
    scratch::{EVICT, KEEP_ENDED, MASQUERADE, Scratch},
    skb::Skb,
    table, through, ways,
};
use crate::{
    capture,
    select::{count, count_pool, remember},
};

/// How often to search for a port again if other CPUs took the port meanwhile.
const TRIES: u32 = 3;

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
            first::admits_itself(&capture::Live, key)
        } else {
            first::admits_service(&capture::Live, key, s.pool.block, &s.endpoint)
        })
    })
}

/// [`enter_flow`]. With external linkage, as in `table.rs`: the verifier looks at it once, not once for each endpoint.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_enter_flow(skb: *mut __sk_buff, s: *mut Scratch, now: u32) -> Action {
    // SAFETY: the place of this CPU, or null: the verifier sees to it where it is called.
    match unsafe { s.as_mut() } {
        Some(s) => enter_flow(Skb(skb), s, Tick::from_number(now as u16)),
        None => Action::Drop,
    }
}

/// See [`packet_admits`].
#[inline(always)]
pub fn admits(s: &Scratch) -> bool {
    packet_admits(s) != 0
}

/// Enters the flow to the chosen endpoint, if the packet's workload may send to it. [`Action::Refuse`]: it is not entered.
#[inline(always)]
pub fn to_endpoint(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
    if s.index != 0 && !admits(s) {
        return refuse::because(s, Reason::EgressDenied);
    }
    packet_enter_flow(skb.0, s, u32::from(now.number()))
}

/// Whether the stack carries the packet to its endpoint.
#[inline(always)]
fn goes_through(s: &Scratch) -> bool {
    s.way.of_node == 0 && through::is_on()
}

/// Why the packet cannot go its way. (Not inlined, as the next: its stack is given back.)
#[inline(never)]
fn obstacle_of(s: &Scratch, new_source: bool) -> Reason {
    if goes_through(s) {
        first::obstacle_in_stack(s.way.answer, s.way.mtu, new_source)
    } else {
        first::obstacle(s.way.answer, s.way.mtu, new_source)
    }
}

/// Whether an IPsec policy forbids the flow. The stack itself applies most policies to a packet that it carries.
#[inline(never)]
fn is_forbidden(s: &Scratch) -> bool {
    let (key, endpoint) = (&s.packet.key, &s.endpoint.addr);
    if goes_through(s) {
        ipsec::escapes(key, endpoint)
    } else {
        ipsec::forbids_flow(key, endpoint)
    }
}

/// Enters the flow to the endpoint that was chosen.
#[inline(always)]
fn enter_flow(skb: Skb, s: &mut Scratch, now: Tick) -> Action {
    if is_forbidden(s) {
        return refuse::because(s, Reason::IpsecPolicy);
    }
    ways::find(
        skb,
        &s.packet,
        &s.endpoint.addr,
        s.endpoint.port,
        &mut s.way,
    );
    // The stack takes no packet of the node itself from an interface.
    let is_barred = s.way.answer == route::LOCAL && s.way.of_node != 0;
    if is_barred && s.keep != 0 {
        // Its endpoint is listed no longer.
        s.flow.remove(now);
        s.keep = 0;
    }
    if is_barred {
        return refuse::because(s, Reason::NoRoute);
    }
    let obstacle = obstacle_of(s, false);
    if obstacle != Reason::Translated {
        return refuse::because(s, obstacle);
    }
    if s.keep != 0 {
        if s.endpoint.addr == s.flow.endpoint && s.endpoint.port == s.flow.endpoint_port {
            if s.keep == KEEP_ENDED {
                conntrack::begin_anew(&s.packet.key, &s.packet.segment, s.flow.came_by, now);
            }
            s.flow.toward_endpoint(&mut s.ends);
            return Action::Send;
        }
        s.flow.remove(now);
        s.keep = 0;
    }
    s.flow.forward = s.packet.key;
    s.flow.endpoint = s.endpoint.addr;
    s.flow.endpoint_port = s.endpoint.port;
    s.flow.node_port = Port::ANY;
    s.flow.node_addr = 0;
    // An endpoint on the host itself answers through us, for any client. And the stack would reject a packet with one of
    // the host's own addresses as its source (`fib_validate_source`).
    let masquerade = s.way.answer != route::LOCAL
        && (s.masquerade & MASQUERADE != 0 || s.packet.key.src == s.endpoint.addr);
    let obstacle = obstacle_of(s, masquerade);
    if obstacle != Reason::Translated {
        return refuse::because(s, obstacle);
    }
    let reason = enter(skb, s, masquerade, now);
    if reason == Reason::Kept {
        // Another CPU has the same flow's first packet, too, and was faster: its endpoint answers.
        let known = conntrack::request(&s.packet.key, &s.packet.segment, &mut s.flow, now);
        if known != REQUEST {
            return refuse::because(s, Reason::FlowBusy);
        }
        s.flow.toward_endpoint(&mut s.ends);
        return Action::Forward;
    }
    if reason.is_refusal() {
        return refuse::because(s, reason);
    }
    let reason = if reason == Reason::Translated && s.reason == Reason::Kept {
        Reason::Kept
    } else {
        reason
    };
    count(reason);
    // Read here, and not kept during the search: the stack has no room for it.
    let index = s.index;
    if index != 0 {
        count_pool(index, reason);
        if s.reason != Reason::Kept && s.pool.affinity_seconds != 0 {
            remember(s.packet.key.src, s.pool.affinity_group, s.endpoint);
        }
    }
    events::report(skb, &s.packet, reason, index, &s.endpoint);
    s.flow.toward_endpoint(&mut s.ends);
    Action::Send
}

/// Enters the flow into conntrack. The reason is a refusal if that failed, [`Reason::Masqueraded`] if the flow got an
/// address and a port of the node's, and [`Reason::Kept`] if another CPU has entered it.
#[inline(always)]
fn enter(skb: Skb, s: &mut Scratch, masquerade: bool, now: Tick) -> Reason {
    let how = if s.masquerade & EVICT != 0 {
        masquerade::EVICTING
    } else if s.reason == Reason::PortsExhausted {
        masquerade::BRIEFLY
    } else {
        masquerade::THOROUGHLY
    };
    let mut reason = Reason::Translated;
    if masquerade {
        if s.way.answer == route::NOWHERE {
            // Only the stack knows the way, by marks for example.
            s.way.iface = route::interface(skb.ifindex());
        }
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

/// Enters a flow of the node itself to the endpoint that a program at the socket has chosen: masqueraded, by the interface
/// at which the packet leaves. `false`: it is not entered, for one because the endpoint has no port left. The
/// packet then goes as it is, since it may find its way back.
#[inline(always)]
pub fn masquerade_itself(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    // Another lookup may have left another interface there.
    s.way.iface = route::interface(skb.ifindex());
    s.flow.forward = s.packet.key;
    s.flow.endpoint = s.endpoint.addr;
    s.flow.endpoint_port = s.endpoint.port;
    s.flow.came_by = 0;
    s.masquerade = MASQUERADE;
    s.reason = Reason::Translated;
    let reason = enter(skb, s, true, now);
    if reason == Reason::Kept {
        // Another CPU has the same flow's first packet, too, and was faster.
        let known = conntrack::request(&s.packet.key, &s.packet.segment, &mut s.flow, now);
        return known == REQUEST && s.flow.is_masqueraded();
    }
    if reason.is_refusal() {
        return false;
    }
    count(reason);
    events::report(skb, &s.packet, reason, 0, &s.endpoint);
    true
}
