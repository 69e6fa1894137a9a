//! Known flows: `dataplane_common::packet` describes their entries.

use dataplane_common::{
    Addr, Port, Protocol,
    cells::{self, Line as _, STATE, Snapshot},
    packet::{FlowKey, PortKey, Tick, Translation},
    seen,
    states::State,
    tcp::{
        ANEW, GOES_ON, OPENING, Opening, POSITIONS, Positions, Segment,
        flags::{ACK, FIN, RST, SYN},
    },
};

use super::{
    came_by,
    rewrite::Ends,
    table::{self, Place},
};
use crate::tables::NODE_ADDRS;

#[inline(always)]
pub fn now() -> Tick {
    Tick::from_ns(table::coarse_ns())
}

/// An address of the node's, by its index; unspecified if there is none.
#[inline(always)]
pub fn node_addr(index: u8) -> Addr {
    match NODE_ADDRS.get(u32::from(index)) {
        Some(addr) if index != 0 => *addr,
        _ => Addr::UNSPECIFIED,
    }
}

/// A flow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Flow {
    /// Its key: the client and the VIP.
    pub forward: FlowKey,
    pub endpoint: Addr,
    pub endpoint_port: Port,
    /// [`Translation::node_port`].
    pub node_port: Port,
    pub node_addr: u8,
    /// The packets of both directions that it had before this one.
    pub seen: u8,
    /// The interface by which the client's packets come, for a reply if it matters ([`came_by::relevant`]); else 0. For a new
    /// flow, [`came_by::THROUGH`], too.
    pub came_by: u32,
    /// Its cell, if a reply has led to it; else [`NOWHERE`](cells::NOWHERE).
    pub cell: u32,
    /// Its cell, if a request has led to it or begun it.
    pub request_cell: u32,
}

impl Flow {
    /// Takes its key and its translation from its cell.
    #[inline(always)]
    pub fn fill(&mut self, found: &Snapshot) {
        let value = found.value();
        self.forward = found.key();
        self.endpoint = value.endpoint;
        self.endpoint_port = value.endpoint_port;
        self.node_port = value.node_port;
        self.node_addr = value.node_addr;
    }

    /// Whether it is masqueraded.
    #[inline(always)]
    pub fn is_masqueraded(&self) -> bool {
        self.node_addr != 0
    }

    /// Whether the flow belongs to no service: the client talks to the endpoint itself ([`super::direct`]).
    #[inline(always)]
    pub fn is_direct(&self) -> bool {
        self.endpoint == self.forward.dst && self.endpoint_port == self.forward.dst_port
    }

    /// Whether it is this host's question ([`super::asked`]), of which nothing is translated.
    #[inline(always)]
    pub fn is_asked(&self) -> bool {
        self.is_direct() && self.node_port == Port::ANY
    }

    /// Sets the ends of a packet to the endpoint.
    #[inline(always)]
    pub fn toward_endpoint(&self, ends: &mut Ends) {
        ends.dst = self.endpoint;
        ends.dst_port = self.endpoint_port;
        ends.src = if self.is_masqueraded() {
            node_addr(self.node_addr)
        } else {
            self.forward.src
        };
        ends.src_port = self
            .translation(Tick::default(), 0)
            .seen_port(&self.forward);
    }

    /// Sets the ends of a reply to the client.
    #[inline(always)]
    pub fn toward_client(&self, ends: &mut Ends) {
        ends.src = self.forward.dst;
        ends.src_port = self.forward.dst_port;
        ends.dst = self.forward.src;
        ends.dst_port = self.forward.src_port;
    }

    /// The key of its replies.
    #[inline(always)]
    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.endpoint,
            self.endpoint_port,
            self.forward.src,
            self.translation(Tick::default(), 0)
                .seen_port(&self.forward),
            self.forward.protocol,
        )
    }

    #[inline(always)]
    fn translation(&self, now: Tick, packet: u8) -> Translation {
        Translation {
            endpoint: self.endpoint,
            endpoint_port: self.endpoint_port,
            node_port: self.node_port,
            used: now,
            seen: packet,
            node_addr: self.node_addr,
        }
    }

    /// The key of its replies, if it is masqueraded.
    #[inline(always)]
    pub fn port_key(&self) -> PortKey {
        PortKey::new(
            self.endpoint,
            self.endpoint_port,
            self.node_port,
            self.forward.protocol,
        )
    }

    /// Makes the replies of this flow lead to a held cell, by the port of the node's if the flow is masqueraded:
    /// `false` if another flow has the port.
    #[inline(never)]
    pub fn lead(&self, index: u32, now: Tick) -> bool {
        let to = self.translation(now, 0);
        let place = cells::place_of_replies(&self.forward, &to, table::secret());
        table::lead(place, index, self.is_masqueraded(), now)
    }

    /// Writes this flow to a held cell, after its first packet.
    #[inline(never)]
    pub fn publish(&mut self, index: u32, now: Tick, first: &Segment) {
        self.request_cell = index;
        let value = self.translation(now, seen::PACKET);
        // Packets that find the flow must find this, too, if they look at it. Otherwise the write is the last one: no exchange
        // then waits for its cache line.
        let matters = came_by::matters();
        if matters {
            came_by::set(index, self.came_by);
        }
        table::publish(index, &self.forward, &value, first, now);
        if !matters {
            came_by::set(index, self.came_by);
        }
    }

    /// Removes it.
    #[inline(always)]
    pub fn remove(&self, now: Tick) {
        table::remove(&self.forward, now);
    }

    /// Whether another live flow has the replies of this one, which is not masqueraded. A flow that is over is removed,
    /// because the endpoint's answers now belong to this flow.
    #[inline(always)]
    pub fn replies_taken(&self, now: Tick) -> bool {
        conntrack_replies_taken(&self.reply_key(), u32::from(now.number())) != 0
    }
}

/// Forgets the flow that a packet would answer, if it is over: an endpoint begins a connection from the port at which
/// it answered, and later packets belong to this connection.
#[inline(always)]
pub fn forget_answered(key: &FlowKey, now: Tick) {
    conntrack_replies_taken(key, u32::from(now.number()));
}

/// Whether a live flow has the answers with this key.
#[inline(always)]
pub fn is_answer_taken(key: &FlowKey, now: Tick) -> bool {
    conntrack_replies_taken(key, u32::from(now.number())) != 0
}

/// [`Flow::replies_taken`]. (The verifier looks at it once, and not at each of the tries to find a port.)
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_replies_taken(reply: *const FlowKey, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let Some(reply) = (unsafe { reply.as_ref() }) else {
        return 0;
    };
    let Some((entry, found)) = table::find_by_client(reply) else {
        return u32::from(came_by::may_be_through() && is_taken_in_stack(reply));
    };
    let now = Tick::from_number(now as u16);
    if is_over(reply.protocol, &found.value(), now) {
        table::remove_found(entry, &found, now);
        return 0;
    }
    1
}

/// Whether the same client has a masqueraded flow to the endpoint whose packets, in the stack, come from this port of the
/// client's.
#[inline(never)]
fn is_taken_in_stack(reply: &FlowKey) -> bool {
    let port_key = PortKey::new(reply.src, reply.src_port, reply.dst_port, reply.protocol);
    table::find_by_node(&port_key).is_some_and(|(entry, found)| {
        found.key().src == reply.dst && !is_foreign(&found) && came_by::is_through(entry.index)
    })
}

/// How a packet relates to a known flow.
pub type Known = u32;
/// The flow is not known.
pub const NEW: Known = 0;
/// The packet goes from the client to the VIP.
pub const REQUEST: Known = 1;
/// The packet goes from the endpoint to the client.
pub const ANSWER: Known = 2;
/// The kernel's own conntrack translates the packet, or it needs no translation ([`Flow::is_asked`]).
pub const FOREIGN: Known = 3;

/// Returns the flags that a packet of a known flow adds to `seen`; 0 if it does not count. A datagram needs no further
/// look, and almost all segments need one word beside the flow's cell.
#[inline(always)]
fn seen_in(entry: Place, replies: bool, segment: &Segment) -> u8 {
    if segment.flags == 0 {
        return seen::PACKET;
    }
    if !segment.has(FIN | SYN | RST)
        && let Some(sequences) = table::sequences(entry.index)
        && Positions(sequences.load(POSITIONS)).is_near(replies, segment.end)
        && !(replies && Opening(sequences.load(OPENING)).is_asked())
    {
        return seen::PACKET | GOES_ON;
    }
    table::judge(entry.index, replies, segment)
}

/// A FIN of either side.
const CLOSED: u8 = seen::FIN | seen::in_replies(seen::FIN);
const ANSWERED: u8 = seen::in_replies(seen::PACKET);
const ANSWERED_AND_ASSURED: u8 = ANSWERED | seen::ASSURED;

/// Marks an entry as used by a packet. Writes only if something changed.
#[inline(always)]
fn mark(entry: Place, found: &Snapshot, replies: bool, segment: &Segment, now: Tick) {
    let value = found.value();
    let (mut flags, mut forgotten) = (0, 0);
    if !segment.is_quoted() {
        flags = seen_in(entry, replies, segment);
        if flags == 0 {
            return;
        }
        let judged = flags;
        flags = seen::of_packet(judged & !(ANEW | GOES_ON), replies);
        if judged & ANEW != 0 {
            forgotten = seen::EARLIER;
        } else if judged & GOES_ON != 0 {
            forgotten = value.seen & seen::RST;
            if segment.has(FIN) {
                // A FIN that is new, not repeated.
                if flags & CLOSED & !value.seen != 0 {
                    forgotten |= value.seen & seen::FOLLOWED;
                }
            } else if seen::is_closing(value.seen) && segment.has(ACK) && !segment.has(SYN) {
                flags |= seen::FOLLOWED;
            }
        }
        let is_tcp = found.head().protocol() == Protocol::TCP;
        if value.seen & ANSWERED_AND_ASSURED == ANSWERED
            && !(is_tcp && replies)
            && table::assures(entry.index, segment, is_tcp)
        {
            flags |= seen::ASSURED;
        }
    }
    if value.seen | flags != value.seen || value.used != now || forgotten != 0 {
        table::mark(entry, found, flags, forgotten, now);
    }
}

/// Whether the kernel's own conntrack translates the flow.
#[inline(always)]
pub fn is_foreign(found: &Snapshot) -> bool {
    found.value().seen & seen::FOREIGN != 0
}

/// Calls a function with the arguments that the verifier lets a function with external linkage have.
#[inline(always)]
pub fn with(
    key: *const FlowKey,
    segment: *const Segment,
    flow: *mut Flow,
    now: u32,
    find: impl Fn(&FlowKey, &Segment, &mut Flow, Tick) -> Known,
) -> Known {
    // SAFETY: a key, a segment and a flow, or null: the verifier sees to it where it is called.
    match unsafe { (key.as_ref(), segment.as_ref(), flow.as_mut()) } {
        (Some(key), Some(segment), Some(flow)) => {
            find(key, segment, flow, Tick::from_number(now as u16))
        }
        _ => NEW,
    }
}

/// Looks for the flow of a request, by (client, VIP).
#[inline(always)]
pub fn request(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    conntrack_request(key, segment, flow, u32::from(now.number()))
}

/// [`request`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_request(
    key: *const FlowKey,
    segment: *const Segment,
    flow: *mut Flow,
    now: u32,
) -> Known {
    with(key, segment, flow, now, find_request)
}

#[inline(always)]
fn find_request(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    let Some((entry, found)) = table::find(key) else {
        return NEW;
    };
    let value = found.value();
    if is_foreign(&found) {
        if value.node_addr != 0 {
            // The entry only reserves a port.
            return NEW;
        }
        if value.used != now {
            table::mark(entry, &found, 0, 0, now);
        }
        return FOREIGN;
    }
    flow.fill(&found);
    flow.seen = value.seen;
    flow.came_by = 0;
    flow.cell = cells::NOWHERE;
    flow.request_cell = entry.index;
    if value.used != now && key.protocol != Protocol::TCP && is_idle(key.protocol, &value, now) {
        // Timed out, but not yet collected.
        table::remove_found(entry, &found, now);
        return NEW;
    }
    mark(entry, &found, false, segment, now);
    if flow.is_asked() { FOREIGN } else { REQUEST }
}

/// Makes the known flow of a SYN begin anew, to the same endpoint, on the path of new flows.
#[inline(never)]
pub fn begin_anew(key: &FlowKey, syn: &Segment, came_by: u32, now: Tick) {
    if let Some((entry, found)) = table::find(key) {
        came_by::set(entry.index, came_by);
        let before = found.state();
        // On failure another packet has come meanwhile: the answer to the SYN begins the flow anew (`tcp::ANEW`).
        if entry.exchange(STATE, before.0, before.anew(now).0) {
            table::write_sequences(entry.index, syn);
        }
    }
}

/// Looks for the flow of a reply to a masqueraded client, by (endpoint, the node's port).
#[inline(always)]
pub fn masqueraded_answer(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    conntrack_masqueraded_answer(key, segment, flow, u32::from(now.number()))
}

/// [`masqueraded_answer`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_masqueraded_answer(
    key: *const FlowKey,
    segment: *const Segment,
    flow: *mut Flow,
    now: u32,
) -> Known {
    with(key, segment, flow, now, find_masqueraded_answer)
}

#[inline(always)]
fn find_masqueraded_answer(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    let port_key = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
    let Some((entry, found)) = table::find_by_node(&port_key) else {
        return NEW;
    };
    if is_foreign(&found) || node_addr(found.value().node_addr) != key.dst {
        return NEW;
    }
    answered(entry, &found, segment, flow, now)
}

/// Whether a live, assured and masqueraded flow has the ends of a packet that a socket of the node sends: the
/// endpoint's answers would look like that flow's. Any other flow is removed, because the endpoint's answers belong to
/// the socket. So a flood of half-open connections takes no port from the node itself.
#[inline(never)]
pub fn is_port_taken(key: &FlowKey, now: Tick) -> bool {
    let port_key = PortKey::new(key.dst, key.dst_port, key.src_port, key.protocol);
    let Some((entry, found)) = table::find_by_node(&port_key) else {
        return false;
    };
    let value = found.value();
    // The kernel translates a socket's packets to another port if its own conntrack has this one.
    if is_foreign(&found) || node_addr(value.node_addr) != key.src {
        return false;
    }
    if value.seen & seen::ASSURED == 0 || is_over(key.protocol, &value, now) {
        table::remove_found(entry, &found, now);
        return false;
    }
    true
}

/// Whether a flow has ended, or was idle for longer than its timeout.
#[inline(always)]
fn is_over(protocol: Protocol, value: &Translation, now: Tick) -> bool {
    seen::is_ended(value.seen) || is_idle(protocol, value, now)
}

/// Whether a flow was idle for longer than its timeout.
#[inline(always)]
fn is_idle(protocol: Protocol, value: &Translation, now: Tick) -> bool {
    value.used.age_seconds(now) > table::keep(State::of(protocol, value.seen))
}

/// Looks for the flow of a reply to a client that is not masqueraded, by (endpoint, client).
#[inline(always)]
pub fn answer(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    conntrack_answer(key, segment, flow, u32::from(now.number()))
}

/// [`answer`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_answer(
    key: *const FlowKey,
    segment: *const Segment,
    flow: *mut Flow,
    now: u32,
) -> Known {
    with(key, segment, flow, now, find_answer)
}

#[inline(always)]
fn find_answer(key: &FlowKey, segment: &Segment, flow: &mut Flow, now: Tick) -> Known {
    let Some((entry, found)) = table::find_by_client(key) else {
        return NEW;
    };
    // For a datagram of this host itself, only the time of the datagram matters.
    let is_asked = found.key().dst == key.src && found.value().node_port == Port::ANY;
    if is_asked && found.key().dst_port == key.src_port {
        if is_over(key.protocol, &found.value(), now) {
            table::remove_found(entry, &found, now);
            return NEW;
        }
        mark(entry, &found, true, segment, now);
        return FOREIGN;
    }
    answered(entry, &found, segment, flow, now)
}

#[inline(always)]
pub fn answered(
    entry: Place,
    found: &Snapshot,
    segment: &Segment,
    flow: &mut Flow,
    now: Tick,
) -> Known {
    flow.fill(found);
    flow.came_by = came_by::relevant(entry.index);
    flow.cell = entry.index;
    mark(entry, found, true, segment, now);
    ANSWER
}
