//! The path through the stack, for nodes where other programs, rules and policies must see packets.
//!
//! The program on the way in gives a flow's packet its new destination only and leaves it to the stack. So the stack's routes,
//! chains and IPsec policies see a packet between the client and the endpoint, in both directions. The program on the way out
//! translates the rest:
//!
//! | packet | arrives | in the stack | leaves |
//! |---|---|---|---|
//! | request | client → VIP | client → endpoint | node → endpoint, if the flow is masqueraded |
//! | answer | endpoint → node, or → client | endpoint → client | VIP → client |
//!
//! In the stack, the client of a masqueraded flow has the node's port for this flow: the endpoint and this port lead to the flow
//! (`ANSWERS`), and the client's own port would not. Each step finds the flow by the packet alone, so other programs and rules
//! may do with a packet's marks what they like. A flow stays on the path on which it began.

use dataplane_common::{
    Reason,
    packet::{FlowKey, Iface, PacketConfig, PortKey, Tick},
    tcp::Segment,
};

use super::{
    came_by,
    conntrack::{self, ANSWER, Flow, Known, NEW, REQUEST},
    ipsec, reverse, route,
    scratch::Scratch,
    skb::Skb,
    sources, table,
};
use crate::{select::count, tables::PACKET_CONFIG};

/// Whether new flows go through the stack.
#[inline(always)]
pub fn is_on() -> bool {
    PACKET_CONFIG
        .get(0)
        .is_some_and(|config| config.flags & PacketConfig::STACK_IN != 0)
}

/// Returns [`came_by::THROUGH`] if new flows go through the stack; else 0.
#[inline(always)]
pub fn path_of_new_flows() -> u32 {
    if is_on() { came_by::THROUGH } else { 0 }
}

/// Whether the kernel translates a known flow's answers back, because a rule of its own masquerades the requests in the stack.
#[inline(always)]
pub fn is_kernels(flow: &Flow) -> bool {
    came_by::may_be_through() && flow.is_masqueraded() && came_by::is_kernels(flow.cell)
}

/// Where a packet goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Goes {
    /// Not through the stack: along the fast path, or to this host.
    Otherwise,
    /// Through the stack, as it is.
    Unchanged,
    /// Through the stack, with the ends in [`Scratch::ends`].
    Through,
    /// Nowhere: a pod does not have the source, or an IPsec policy forbids it.
    Nowhere,
}

/// Decides if a packet whose ends are known goes through the stack. If so, leaves it the ends that the program on the way out
/// gives it. `key`: its own, or, for an error, that of the packet in the reverse direction.
#[inline(never)]
pub fn goes(skb: Skb, s: &mut Scratch, key: &FlowKey) -> Goes {
    let cell = if s.is_answer != 0 {
        s.flow.cell
    } else {
        s.flow.request_cell
    };
    if !came_by::may_be_through() || !came_by::is_through(cell) || sources::is_host(&s.ends.dst) {
        return Goes::Otherwise;
    }
    if !reverse::is_right(skb, &s.packet, &mut s.way, reverse::GOES_ON) {
        count(Reason::SourceForged);
        return Goes::Nowhere;
    }
    if ipsec::escapes(&s.packet.key, &s.ends.dst) {
        count(Reason::IpsecPolicy);
        return Goes::Nowhere;
    }
    s.ends.src = key.src;
    if s.is_answer != 0 {
        s.ends.src_port = key.src_port;
        s.ends.dst_port = key.dst_port;
    }
    skb.leave_to_stack();
    let same =
        key.dst == s.ends.dst && key.src_port == s.ends.src_port && key.dst_port == s.ends.dst_port;
    if same { Goes::Unchanged } else { Goes::Through }
}

/// How a packet relates to a flow: it goes to the endpoint, from the node's address and port that the flow has. Only
/// [`Flow::request_cell`] is known then.
const MASQUERADED: Known = 4;

/// Looks for the masqueraded flow of a packet in the stack: an answer, from the endpoint to the client at the node's port, or a
/// request, from there to the endpoint.
#[inline(always)]
pub fn lookup(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    through_lookup(key, segment, flow, u32::from(now.number()))
}

/// [`lookup`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn through_lookup(
    key: *const FlowKey,
    segment: *const Segment,
    flow: *mut Flow,
    now: u32,
) -> Known {
    conntrack::with(key, segment, flow, now, look)
}

#[inline(always)]
fn look(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    let port_key = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
    if let Some((entry, found)) = table::find_by_node(&port_key)
        && found.key().src == key.dst
        && !conntrack::is_foreign(&found)
        && came_by::is_through(entry.index)
    {
        return conntrack::answered(entry, &found, segment, flow, now);
    }
    let port_key = PortKey::new(key.dst, key.dst_port, key.src_port, key.protocol);
    let Some((entry, found)) = table::find_by_node(&port_key) else {
        return NEW;
    };
    if conntrack::is_foreign(&found) || !came_by::is_through(entry.index) {
        return NEW;
    }
    flow.request_cell = entry.index;
    if found.key().src == key.src {
        flow.fill(&found);
        REQUEST
    } else if conntrack::node_addr(found.value().node_addr) == key.src {
        MASQUERADED
    } else {
        NEW
    }
}

/// Finds the way of an answer that leaves by another uplink than the one its flow came by, if there is a way there: the rules
/// that would mark the flow see the endpoint instead of one of the node's addresses.
#[inline(never)]
pub fn goes_back(skb: Skb, s: &mut Scratch) -> bool {
    let by = s.flow.came_by;
    if s.is_answer == 0
        || by == 0
        || by == skb.ifindex()
        || route::interface(skb.ifindex()).flags & Iface::LOCAL != 0
    {
        return false;
    }
    s.way.answer = route::NOWHERE;
    s.way.longest = s.packet.longest(skb);
    route::search_by(skb, &s.packet, &s.ends, by, &mut s.way);
    s.way.answer == route::ONWARD
}

/// Whether a packet that belongs to no flow here, and to no service, would belong to a flow once it leaves, although it may not
/// have its source.
#[inline(never)]
pub fn is_injected(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    if !came_by::may_be_through() {
        return false;
    }
    s.packet.segment.flags |= Segment::QUOTED.flags;
    lookup(&s.packet.key, &s.packet.segment, &mut s.flow, now) != NEW
        && !reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS)
}

/// Finds the flow of a packet of TCP or UDP that leaves, and the ends that it gets; `false`: it has none, or needs no
/// translation.
#[inline(never)]
pub fn find(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    let (key, segment) = (&s.packet.key, &s.packet.segment);
    let mut known = NEW;
    // A SYN answers nothing.
    if !s.packet.is_syn() {
        known = conntrack::answer(key, segment, &mut s.flow, now);
        if known == ANSWER && !came_by::is_through(s.flow.cell) {
            return false;
        }
    }
    if known == NEW {
        known = lookup(key, segment, &mut s.flow, now);
    }
    // Only packets that our program has left to the stack tell which of both masquerades: others may be forged.
    if skb.is_left_to_stack() && (known == REQUEST || known == MASQUERADED) {
        came_by::set_kernels(s.flow.request_cell, known == MASQUERADED);
    }
    s.is_answer = u32::from(known == ANSWER);
    if known == ANSWER {
        s.flow.toward_client(&mut s.ends);
    } else if known == REQUEST {
        s.flow.toward_endpoint(&mut s.ends);
    }
    known == ANSWER || known == REQUEST
}
