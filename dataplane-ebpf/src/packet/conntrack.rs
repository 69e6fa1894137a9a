//! Flows that are known: `dataplane_common::packet` says what their entries mean.

use core::ptr::write_volatile;

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, Forward, Masqueraded, PortKey, Reply, Tick, keep_seconds, seen},
};

use super::{
    parse::{FIN, Packet, RST},
    rewrite::Ends,
    table::{FORWARD, MASQUERADE, REPLY},
};
use crate::tables::NODE_ADDRS;

#[inline(always)]
pub fn now() -> Tick {
    // SAFETY: the helper has no preconditions.
    Tick::from_ns(unsafe { bpf_ktime_get_coarse_ns() })
}

/// An address of the node's, by its index; unspecified if there is none.
#[inline(always)]
pub fn node_addr(index: u8) -> Addr {
    match NODE_ADDRS.get(u32::from(index)) {
        Some(addr) if index != 0 => *addr,
        _ => Addr::UNSPECIFIED,
    }
}

/// What a packet adds to `seen`.
#[inline(always)]
pub fn seen_in(packet: &Packet) -> u8 {
    let mut flags = seen::PACKET;
    if packet.tcp_flags & FIN != 0 {
        flags |= seen::FIN;
    }
    if packet.tcp_flags & RST != 0 {
        flags |= seen::RST;
    }
    flags
}

/// A flow as both its entries have it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Flow {
    /// The key of `FORWARD`: the client and the VIP.
    pub forward: FlowKey,
    pub endpoint: Addr,
    pub endpoint_port: Port,
    /// Set if the flow is masqueraded.
    pub node_port: Port,
    pub node_addr: u8,
    /// What was seen of requests.
    pub seen: u8,
}

impl Flow {
    /// Whether it is masqueraded.
    #[inline(always)]
    pub fn is_masqueraded(&self) -> bool {
        self.node_addr != 0
    }

    /// Where the endpoint sees it come from, and where it goes.
    #[inline(always)]
    pub fn toward_endpoint(&self, ends: &mut Ends) {
        ends.dst = self.endpoint;
        ends.dst_port = self.endpoint_port;
        if self.is_masqueraded() {
            ends.src = node_addr(self.node_addr);
            ends.src_port = self.node_port;
        } else {
            ends.src = self.forward.src;
            ends.src_port = self.forward.src_port;
        }
    }

    /// What the client sees of its replies.
    #[inline(always)]
    pub fn toward_client(&self, ends: &mut Ends) {
        ends.src = self.forward.dst;
        ends.src_port = self.forward.dst_port;
        ends.dst = self.forward.src;
        ends.dst_port = self.forward.src_port;
    }

    #[inline(always)]
    fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.endpoint,
            self.endpoint_port,
            self.forward.src,
            self.forward.src_port,
            self.forward.protocol,
        )
    }

    #[inline(always)]
    fn port_key(&self) -> PortKey {
        PortKey::new(
            self.endpoint,
            self.endpoint_port,
            self.node_port,
            self.forward.protocol,
        )
    }

    /// What was seen of replies, whose entry is marked as used; [`MISSING`] if it is not there or is
    /// another flow's.
    #[inline(never)]
    pub fn seen_of_replies(&self, now: Tick) -> u32 {
        if self.is_masqueraded() {
            let Some(entry) = MASQUERADE.get_ptr_mut(&self.port_key()) else {
                return MISSING;
            };
            // SAFETY: an entry may become another's while it is read: what is read is compared.
            let (client, port, vip, vip_port, seen) = unsafe {
                (
                    (*entry).client,
                    (*entry).client_port,
                    (*entry).vip,
                    (*entry).vip_port,
                    (*entry).seen,
                )
            };
            if client != self.forward.src
                || port != self.forward.src_port
                || vip != self.forward.dst
                || vip_port != self.forward.dst_port
            {
                return MISSING;
            }
            // SAFETY: an aligned field of the element.
            unsafe { write_volatile(&raw mut (*entry).used, now) };
            u32::from(seen)
        } else {
            let Some(entry) = REPLY.get_ptr_mut(&self.reply_key()) else {
                return MISSING;
            };
            // SAFETY: as above.
            let (vip, vip_port, seen) = unsafe { ((*entry).vip, (*entry).vip_port, (*entry).seen) };
            if vip != self.forward.dst || vip_port != self.forward.dst_port {
                return MISSING;
            }
            // SAFETY: an aligned field of the element.
            unsafe { write_volatile(&raw mut (*entry).used, now) };
            u32::from(seen)
        }
    }

    /// Makes the entry for replies; `false` if another flow has the key, or there is no memory.
    #[inline(always)]
    pub fn add_replies(&self, now: Tick) -> bool {
        if self.is_masqueraded() {
            self.add_masqueraded(now)
        } else {
            self.add_reply(now)
        }
    }

    /// Makes the entry for replies to a masqueraded client.
    #[inline(never)]
    pub fn add_masqueraded(&self, now: Tick) -> bool {
        let value = Masqueraded {
            vip: self.forward.dst,
            client: self.forward.src,
            vip_port: self.forward.dst_port,
            client_port: self.forward.src_port,
            used: now,
            seen: 0,
            node_addr: self.node_addr,
        };
        MASQUERADE.insert(&self.port_key(), &value)
    }

    /// Makes the entry for replies to a client that is not masqueraded.
    #[inline(never)]
    pub fn add_reply(&self, now: Tick) -> bool {
        let value = Reply {
            vip: self.forward.dst,
            vip_port: self.forward.dst_port,
            used: now,
            seen: 0,
            padding: 0,
            reserved: 0,
        };
        REPLY.insert(&self.reply_key(), &value)
    }

    /// Makes the entry for requests.
    #[inline(never)]
    pub fn add_requests(&self, now: Tick, packet: u8) -> bool {
        let value = Forward {
            endpoint: self.endpoint,
            endpoint_port: self.endpoint_port,
            node_port: self.node_port,
            used: now,
            seen: packet,
            node_addr: self.node_addr,
        };
        FORWARD.insert(&self.forward, &value)
    }

    /// Removes both entries.
    #[inline(never)]
    pub fn remove(&self) {
        self.remove_replies();
        FORWARD.remove(&self.forward);
    }

    /// Removes the entry for replies.
    #[inline(never)]
    pub fn remove_replies(&self) {
        if self.is_masqueraded() {
            MASQUERADE.remove(&self.port_key());
        } else {
            REPLY.remove(&self.reply_key());
        }
    }

    /// Whether another live flow has the reply key of this one, which is not masqueraded. What is left of one that
    /// is over is removed: the endpoint's answers are this one's.
    #[inline(never)]
    pub fn replies_taken(&self, now: Tick) -> bool {
        let key = self.reply_key();
        let Some(entry) = REPLY.get_ptr_mut(&key) else {
            return false;
        };
        // SAFETY: an entry may become another's while it is read: at worst a free key counts as
        // taken, or a flow that begins at this moment loses it.
        let (vip, vip_port, used, replies) = unsafe {
            (
                (*entry).vip,
                (*entry).vip_port,
                (*entry).used,
                (*entry).seen,
            )
        };
        let other = FlowKey::new(
            self.forward.src,
            self.forward.src_port,
            vip,
            vip_port,
            self.forward.protocol,
        );
        // One that was pushed out is made again by what the endpoint says.
        let mut requests = seen::PACKET;
        let mut nobodys = vip == self.forward.dst && vip_port == self.forward.dst_port;
        if let Some(entry) = FORWARD.get_ptr_mut(&other) {
            // SAFETY: as above.
            let (endpoint, port, node_addr) = unsafe {
                (
                    (*entry).endpoint,
                    (*entry).endpoint_port,
                    (*entry).node_addr,
                )
            };
            // SAFETY: as above.
            requests = unsafe { (*entry).seen };
            nobodys |= endpoint != self.endpoint || port != self.endpoint_port || node_addr != 0;
        }
        if nobodys {
            REPLY.remove(&key);
            return false;
        }
        let ended = (requests | replies) & seen::RST != 0 || requests & replies & seen::FIN != 0;
        let keep = keep_seconds(self.forward.protocol, requests, replies);
        if ended || used.age_seconds(now) > keep {
            REPLY.remove(&key);
            FORWARD.remove(&other);
            return false;
        }
        true
    }
}

/// [`Flow::seen_of_replies`]: there is no such entry.
pub const MISSING: u32 = 0x100;

/// What is known of a packet's flow.
pub type Known = u32;
/// Nothing.
pub const NEW: Known = 0;
/// It goes from the client to the VIP.
pub const REQUEST: Known = 1;
/// It goes from the endpoint to the client.
pub const ANSWER: Known = 2;
/// It is translated by the kernel's own conntrack.
pub const FOREIGN: Known = 3;

/// Looks for the flow of a request, by (client, VIP).
///
/// Writes to the entry only what changed. Once in a tick it looks after the other entry, too.
#[inline(never)]
pub fn request(key: &FlowKey, seen_now: u8, flow: &mut Flow, now: Tick) -> Known {
    let Some(entry) = FORWARD.get_ptr_mut(key) else {
        return NEW;
    };
    // SAFETY: an entry may become another's while it is read; a packet that is translated for
    // another flow by that has a wrong checksum or finds no socket.
    let value = unsafe { *entry };
    if value.seen & seen::FOREIGN != 0 {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).used, now) };
        return FOREIGN;
    }
    flow.forward = *key;
    flow.endpoint = value.endpoint;
    flow.endpoint_port = value.endpoint_port;
    flow.node_port = value.node_port;
    flow.node_addr = value.node_addr;
    flow.seen = value.seen;
    let seen = value.seen | seen_now;
    if seen != value.seen {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).seen, seen) };
    }
    if value.used != now {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).used, now) };
        let replies = flow.seen_of_replies(now);
        if replies == MISSING {
            // Pushed out of its table. If somebody else has the port by now, the flow is lost: it
            // begins anew, or is told by a reset.
            if !flow.add_replies(now) {
                FORWARD.remove(key);
                return NEW;
            }
        } else if key.protocol != Protocol::TCP {
            let keep = keep_seconds(key.protocol, value.seen, replies as u8);
            if value.used.age_seconds(now) > keep {
                // Timed out, but not yet collected.
                flow.remove_replies();
                FORWARD.remove(key);
                return NEW;
            }
        }
    }
    REQUEST
}

/// Looks for the flow of a reply to a masqueraded client, by (endpoint, the node's port).
#[inline(never)]
pub fn masqueraded_answer(key: &FlowKey, seen_now: u8, flow: &mut Flow, now: Tick) -> Known {
    let port_key = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
    let Some(entry) = MASQUERADE.get_ptr_mut(&port_key) else {
        return NEW;
    };
    // SAFETY: see `request`. Read field by field: a copy of the whole would take its stack.
    let value = unsafe { &*entry };
    if node_addr(value.node_addr) != key.dst {
        return NEW;
    }
    flow.forward.src = value.client;
    flow.forward.src_port = value.client_port;
    flow.forward.dst = value.vip;
    flow.forward.dst_port = value.vip_port;
    flow.forward.protocol = key.protocol;
    flow.forward.padding = 0;
    flow.forward.reserved = 0;
    flow.endpoint = key.src;
    flow.endpoint_port = key.src_port;
    flow.node_port = key.dst_port;
    flow.node_addr = value.node_addr;
    let (used, before) = (value.used, value.seen);
    let seen = before | seen_now;
    if seen != before {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).seen, seen) };
    }
    if used != now {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).used, now) };
        keep_requests(flow, now);
    }
    ANSWER
}

/// Looks for the flow of a reply to a client that is not masqueraded, by (endpoint, client).
#[inline(never)]
pub fn answer(key: &FlowKey, seen_now: u8, flow: &mut Flow, now: Tick) -> Known {
    let Some(entry) = REPLY.get_ptr_mut(key) else {
        return NEW;
    };
    // SAFETY: see `request`.
    let value = unsafe { *entry };
    flow.forward = FlowKey::new(
        key.dst,
        key.dst_port,
        value.vip,
        value.vip_port,
        key.protocol,
    );
    flow.endpoint = key.src;
    flow.endpoint_port = key.src_port;
    flow.node_port = Port::ANY;
    flow.node_addr = 0;
    let seen = value.seen | seen_now;
    if seen != value.seen {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).seen, seen) };
    }
    if value.used != now {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).used, now) };
        keep_requests(flow, now);
    }
    ANSWER
}

/// Looks after the entry for requests, which is in use as long as the flow's replies are (a client may
/// listen for long and say nothing). One that was pushed out is made again.
#[inline(always)]
fn keep_requests(flow: &Flow, now: Tick) {
    if let Some(entry) = FORWARD.get_ptr_mut(&flow.forward) {
        // SAFETY: an aligned field of the element.
        unsafe { write_volatile(&raw mut (*entry).used, now) };
    } else {
        let _ = flow.add_requests(now, seen::PACKET);
    }
}
