//! Flows that belong to no service, such as connections between pods: from interface to interface, past the node's stack and so
//! past the kernel's conntrack.
//!
//! The agent allows this where it has found nothing in the stack that must see packets
//! ([`PacketConfig::BYPASS_NEW`](dataplane_common::packet::PacketConfig::BYPASS_NEW)). Rules of NAT may be there all the same: a
//! network plug-in masquerades what leaves the cluster. So the stack itself shows whether they apply: the program on the way in
//! marks the first packet to an address and port, and the program on the way out notes if the packet leaves with the same
//! addresses and ports. Then the rest of its flow bypasses the stack, and for the next 4 to 8 seconds so do other flows from this
//! source to this address and port, between the same two interfaces. Then the next flow shows it again.
//!
//! A TCP connection stays on its path until its ends begin another one from the same ports. Datagrams are decided about anew
//! when the tick after the next begins. A packet that arrives at another interface, or whose route leads to another one than
//! before, or that needs an error or fragments, goes through the stack.

use aya_ebpf::bindings::BPF_FIB_LKUP_RET_SUCCESS;
use dataplane_common::{
    Port,
    packet::{Bypass, FlowKey, PacketConfig, Tick},
};

use super::{
    DROP, is_pods,
    parse::WHOLE,
    route,
    scratch::Scratch,
    skb::{PACKET_HOST, Skb, difference, fold16},
    sources, ways,
};
use crate::tables::{BYPASS, PACKET_CONFIG};

#[inline(always)]
fn flags() -> u32 {
    PACKET_CONFIG.get(0).map_or(0, |config| config.flags)
}

/// Writes the key of a flow, the same for both directions. Returns which of the two ends sends the packet.
#[inline(always)]
fn write_key(s: &mut Scratch, packet: &FlowKey) -> usize {
    let ((a, b), (c, d)) = (packet.src.halves(), packet.dst.halves());
    let from = (a, b, packet.src_port.host());
    let to = (c, d, packet.dst_port.host());
    if from <= to {
        s.bypass = *packet;
        return 0;
    }
    s.bypass = FlowKey::new(
        packet.dst,
        packet.dst_port,
        packet.src,
        packet.src_port,
        packet.protocol,
    );
    1
}

/// Writes the key of all flows from the packet's source, at an interface, to its destination. So no pod changes what is known of
/// another's flows.
#[inline(always)]
fn write_key_of_port(s: &mut Scratch, interface: u32) {
    s.bypass = s.packet.key;
    s.bypass.src_port = Port::ANY;
    s.bypass.reserved = interface as u16;
}

/// Returns what is known by the key in `s`. An LRU's element may be reused while it is read: then one packet more, or one less,
/// goes through the stack.
#[inline(always)]
fn look(s: &Scratch) -> Option<Bypass> {
    // SAFETY: an element of a preallocated table, copied.
    BYPASS.get_ptr(&s.bypass).map(|found| unsafe { *found })
}

/// Whether the packet belongs to a flow that bypasses the stack. If so, its way is known.
#[inline(never)]
pub fn is_known(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    if flags() & PacketConfig::BYPASS == 0
        || s.packet.fragment != WHOLE
        || s.packet.is_syn()
        || skb.kind() != PACKET_HOST
    {
        return false;
    }
    let key = s.packet.key;
    let from = write_key(s, &key);
    let Some(found) = look(s) else {
        return false;
    };
    let [first, second] = found.interfaces;
    let (arrives, leaves) = if from == 0 {
        (first, second)
    } else {
        (second, first)
    };
    arrives == skb.ifindex() && (s.packet.is_tcp() || found.is_recent(now)) && leads(skb, s, leaves)
}

/// Finds the packet's way, and whether it can go by this interface.
#[inline(always)]
fn leads(skb: Skb, s: &mut Scratch, by: u32) -> bool {
    ways::find(
        skb,
        &s.packet,
        &s.packet.key.dst,
        s.packet.key.dst_port,
        &mut s.way,
    );
    s.way.answer == route::ONWARD && s.way.ifindex == by && s.packet.hops > 1
}

/// Whether the packet, which begins a flow that belongs to no service, bypasses the stack. If so, its way is known, and the rest
/// of the flow bypasses the stack, too.
#[inline(never)]
pub fn begins(skb: Skb, s: &mut Scratch, now: Tick) -> bool {
    let key = &s.packet.key;
    let flags = flags();
    if flags & PacketConfig::BYPASS == 0 {
        return false;
    }
    if flags & PacketConfig::BYPASS_NEW == 0 {
        return forget(s);
    }
    if s.packet.fragment != WHOLE
        || skb.kind() != PACKET_HOST
        || key.src_port.host() == 0
        || !(is_pods(skb) || s.packet.is_tcp() && !sources::is_host(&key.dst))
    {
        return false;
    }
    let arrives = skb.ifindex();
    write_key_of_port(s, arrives);
    let known = look(s).filter(|known| known.interfaces[0] == arrives && known.is_recent(now));
    let Some(known) = known else {
        let asked = Bypass {
            interfaces: [arrives, 0],
            since: now,
            reserved: 0,
        };
        let _ = BYPASS.insert(&s.bypass, &asked, 0);
        skb.watch();
        return forget(s);
    };
    let leaves = known.interfaces[1];
    if leaves == 0 || !leads(skb, s, leaves) {
        return forget(s);
    }
    add(s, [arrives, leaves], now)
}

/// Forgets an earlier flow with the packet's ends: this one goes through the stack. Returns `false`.
#[inline(always)]
fn forget(s: &mut Scratch) -> bool {
    if s.packet.is_tcp() {
        let key = s.packet.key;
        write_key(s, &key);
        let _ = BYPASS.remove(&s.bypass);
    }
    false
}

/// Forgets flows with the ends of a service's flow, which now has its packets and its answers.
#[inline(never)]
pub fn forget_for_service(s: &mut Scratch) {
    if flags() & PacketConfig::BYPASS != 0 {
        let key = s.packet.key;
        write_key(s, &key);
        let _ = BYPASS.remove(&s.bypass);
        let answers = s.flow.reply_key();
        write_key(s, &answers);
        let _ = BYPASS.remove(&s.bypass);
    }
}

/// Notes that a watched packet leaves the stack with its addresses and ports, if its source leads back to where it came from. The
/// rest of its flow bypasses the stack.
#[inline(never)]
pub fn note(skb: Skb, s: &mut Scratch, now: Tick) {
    let (from, by) = (skb.ingress(), skb.ifindex());
    write_key_of_port(s, from);
    let Some(asked) = BYPASS.get_ptr_mut(&s.bypass) else {
        return;
    };
    let (code, back) = route::back(skb, &s.packet, &mut s.way, from);
    // SAFETY: as in `look`.
    let asked = unsafe { &mut *asked };
    if code == BPF_FIB_LKUP_RET_SUCCESS && back == from && asked.interfaces[0] == from {
        asked.interfaces[1] = by;
        asked.since = now;
        add(s, [from, by], now);
    }
}

/// Adds the packet's flow, between the interfaces at which its packets arrive and by which they leave.
#[inline(always)]
fn add(s: &mut Scratch, [arrives, leaves]: [u32; 2], now: Tick) -> bool {
    let key = s.packet.key;
    let interfaces = if write_key(s, &key) == 0 {
        [arrives, leaves]
    } else {
        [leaves, arrives]
    };
    let flow = Bypass {
        interfaces,
        since: now,
        reserved: 0,
    };
    BYPASS.insert(&s.bypass, &flow, 0).is_ok()
}

/// Sends a packet on its way.
#[inline(never)]
pub fn send(skb: Skb, s: &Scratch) -> i32 {
    let packet = &s.packet;
    let hops = packet.hops.wrapping_sub(1);
    let written = if packet.is_v4() {
        let protocol = packet.key.protocol.number();
        let word = |hops| u32::from(u16::from_ne_bytes([hops, protocol]));
        let sum = u64::from(!packet.checksum) + difference(word(packet.hops), word(hops));
        let [sum0, sum1] = (!fold16(sum)).to_ne_bytes();
        skb.store::<_, false>(packet.l3 + 8, &[hops, protocol, sum0, sum1])
    } else {
        skb.store::<_, true>(packet.l3 + 7, &hops)
    };
    if written {
        route::send(skb, packet, &s.way)
    } else {
        DROP
    }
}
