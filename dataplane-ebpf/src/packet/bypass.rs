//! Flows that belong to no service, such as connections between pods: from interface to interface, past the node's stack and so
//! past the kernel's conntrack.
//!
//! The agent allows this where it has found nothing in the stack that must see packets ([`PacketConfig::BYPASS_NEW`]). Rules of
//! NAT may be there all the same: a network plug-in masquerades what leaves the cluster. So the stack itself shows whether they
//! apply: the program on the way in marks the first packet to an address and port, and the program on the way out notes if the
//! packet leaves with the same addresses and ports. Then the rest of its flow bypasses the stack, and for the next 4 to 8 seconds
//! so do other flows from this source to this address and port, between the same two interfaces. Then the next flow shows it again.
//!
//! A TCP connection stays on its path until its ends begin another one from the same ports. Datagrams are decided about anew
//! when the tick after the next begins. A packet that arrives at another interface, or whose route leads to another one than
//! before, or that needs an error or fragments, goes through the stack. ICMP errors of other hosts bypass the stack as the flow does.
//!
//! If the table forgets a connection, the kernel's conntrack takes it up in its middle, and asks the rules of NAT about the
//! direction of the packet that comes first. So a connection from another host bypasses the stack only if the host is a pod by the
//! node's configuration: rules that masquerade what pods send to others would apply to its answers.

#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "a key that is passed by value takes 40 bytes of the stack"
)]

use aya_ebpf::bindings::BPF_FIB_LKUP_RET_SUCCESS;
use dataplane_common::{
    Addr, Port, Protocol, VipPlace, decide,
    packet::{Bypass, FlowKey, PacketConfig, SourceKey, Tick},
};

use super::{
    DROP, conntrack, exchanges, is_pods,
    parse::WHOLE,
    reverse, route,
    scratch::Scratch,
    skb::{PACKET_HOST, Skb, difference, fold16},
    sources, table, ways,
};
use crate::{
    select::Live,
    tables::{BYPASS, PACKET_CONFIG},
};

#[inline(always)]
fn flags() -> u32 {
    PACKET_CONFIG.get(0).map_or(0, |config| config.flags)
}

/// The time in the units of [`Bypass::since`].
#[inline(always)]
fn now() -> u32 {
    (table::coarse_ns() >> 32) as u32
}

/// Whether the ends of a packet are in the order of its flow's key, which is the same for both directions.
#[inline(always)]
fn is_ordered(packet: &FlowKey) -> bool {
    let ((a, b), (c, d)) = (packet.src.halves(), packet.dst.halves());
    (a, b, packet.src_port.host()) <= (c, d, packet.dst_port.host())
}

/// Writes the key of a flow, the same for both directions. Returns which of the two ends sends the packet.
#[inline(always)]
fn write_key(s: &mut Scratch, packet: &FlowKey) -> usize {
    if is_ordered(packet) {
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

/// Writes the key of all flows from the packet's source, at an interface, to its destination. So no pod changes the
/// entries for the flows of another pod.
#[inline(always)]
fn write_key_of_port(s: &mut Scratch, interface: u32) {
    s.bypass = s.packet.key;
    s.bypass.src_port = Port::ANY;
    s.bypass.reserved = interface as u16;
}

/// Returns the flow with the key in `s`.
#[inline(always)]
fn flow(s: &Scratch) -> Option<Bypass> {
    if s.bypass.protocol == Protocol::TCP {
        return look(s);
    }
    exchanges::find(&s.bypass).map(|(interfaces, since)| Bypass {
        interfaces,
        since,
        shown_by: Port::ANY,
        reserved: 0,
    })
}

/// Returns the entry with the key in `s`. An LRU's element may be reused while it is read: then one packet more, or one less,
/// goes through the stack.
#[inline(always)]
fn look(s: &Scratch) -> Option<Bypass> {
    // SAFETY: an element of a preallocated table, copied.
    BYPASS.get_ptr(&s.bypass).map(|found| unsafe { *found })
}

/// Whether a flow with this key, to which the packet belongs, may bypass the stack.
#[inline(always)]
fn may_be_known(skb: Skb, s: &Scratch, key: &FlowKey) -> bool {
    flags() & PacketConfig::BYPASS != 0
        && s.packet.fragment == WHOLE
        && skb.kind() == PACKET_HOST
        && !may_be_of_service(key)
}

/// The interfaces by which a flow's packets arrive and leave. `from`: the end that sends them ([`write_key`]).
#[inline(always)]
fn sides(found: &Bypass, from: usize) -> (u32, u32) {
    let [first, second] = found.interfaces;
    if from == 0 {
        (first, second)
    } else {
        (second, first)
    }
}

/// Whether the packet belongs to a flow that bypasses the stack. If so, its way is known.
#[inline(never)]
pub fn is_known(skb: Skb, s: &mut Scratch, tick: Tick) -> bool {
    if s.packet.is_syn() || !may_be_known(skb, s, &s.packet.key) {
        return false;
    }
    let key = s.packet.key;
    let from = write_key(s, &key);
    if !s.packet.is_tcp() {
        let known = flow(s).filter(|known| known.is_recent(now()));
        let Some((arrives, leaves)) = known.map(|known| sides(&known, from)) else {
            return false;
        };
        return arrives == skb.ifindex() && leads(skb, s, leaves);
    }
    let Some(place) = BYPASS.get_ptr_mut(&s.bypass) else {
        return false;
    };
    // SAFETY: as in `look`.
    let found = unsafe { &mut *place };
    let (arrives, leaves) = sides(found, from);
    if arrives != skb.ifindex() {
        return false;
    }
    if found.since as u16 != tick.number() {
        found.since = now();
    }
    leads(skb, s, leaves)
}

/// Returns the interface by which an ICMP error about a packet of such a flow leaves; 0: the stack forwards the error. In the stack,
/// the kernel's conntrack does not know what the error is about, and rules that came after the flow drop such packets. `back`: the key
/// of a packet in the error's direction.
#[inline(never)]
pub fn way_of_error(skb: Skb, s: &mut Scratch, back: &FlowKey) -> u32 {
    // The stack forwards no packet with such a source.
    if !s.packet.is_v4() && s.packet.key.src.is_link_local() {
        return 0;
    }
    if !may_be_known(skb, s, back) {
        return 0;
    }
    let from = write_key(s, back);
    let Some(found) = flow(s) else {
        return 0;
    };
    let (arrives, leaves) = sides(&found, from);
    let is_there = back.protocol == Protocol::TCP || found.is_recent(now());
    if is_there && arrives == skb.ifindex() {
        leaves
    } else {
        0
    }
}

/// Whether an end of a flow may be a service's address, or one of the node's with node ports. Packets of such flows need no lookup in
/// the table: almost all of them belong to services, or to this host.
#[inline(always)]
fn may_be_of_service(key: &FlowKey) -> bool {
    may_be_vip(key.dst) || may_be_vip(key.src)
}

#[inline(always)]
fn may_be_vip(addr: Addr) -> bool {
    let place = VipPlace::of(addr);
    place.is_set(decide::Tables::vips(&Live, place.index()))
}

/// Whether a connection with the ends of this key, or of its reverse, has bypassed the stack lately: then a flow to a service must not
/// have these answers. Forgets an older connection, because the answers now belong to the flow.
#[inline(always)]
pub fn has_answers(key: &FlowKey) -> bool {
    flags() & PacketConfig::BYPASS != 0 && packet_has_bypass(key) != 0
}

/// [`has_answers`]. With external linkage, as in `table.rs`. The key is on the stack: Linux 6.1 takes no key from the memory that such
/// a function gets.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_has_bypass(key: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return 0;
    };
    // One copy: the stack has no room for two.
    let (mut src, mut dst) = (&key.src, &key.dst);
    let (mut src_port, mut dst_port) = (key.src_port, key.dst_port);
    if !is_ordered(key) {
        (src, dst) = (dst, src);
        (src_port, dst_port) = (dst_port, src_port);
    }
    let ordered = FlowKey::new(*src, src_port, *dst, dst_port, key.protocol);
    let is_tcp = ordered.protocol == Protocol::TCP;
    let since = if is_tcp {
        // SAFETY: as in `look`.
        BYPASS
            .get_ptr(&ordered)
            .map(|found| unsafe { (*found).since })
    } else {
        exchanges::find(&ordered).map(|(_, since)| since)
    };
    let Some(since) = since else {
        return 0;
    };
    if Bypass::is_live(since, now()) {
        return 1;
    }
    forget(&ordered);
    0
}

/// Forgets a flow.
#[inline(always)]
fn forget(key: &FlowKey) {
    if key.protocol == Protocol::TCP {
        let _ = BYPASS.remove(key);
    } else {
        exchanges::forget(key);
    }
}

/// Finds the packet's way, and whether it can go by this interface.
#[inline(always)]
pub fn leads(skb: Skb, s: &mut Scratch, by: u32) -> bool {
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
/// of the flow bypasses the stack, too. Otherwise an earlier connection with its ends is forgotten.
#[inline(never)]
pub fn begins(skb: Skb, s: &mut Scratch, tick: Tick) -> bool {
    let flags = flags();
    if flags & PacketConfig::BYPASS == 0 {
        return false;
    }
    if flags & PacketConfig::BYPASS_NEW != 0
        && s.packet.fragment == WHOLE
        && skb.kind() == PACKET_HOST
        && may_begin(skb, s, tick)
        && is_shown(skb, s)
    {
        return true;
    }
    if s.packet.is_tcp() {
        let key = s.packet.key;
        write_key(s, &key);
        let _ = BYPASS.remove(&s.bypass);
        // The program on the way out forgets a connection with the ends that the packet then has.
        skb.watch();
    }
    false
}

/// Whether an earlier packet has shown that flows like this one leave the stack unchanged. If none has, this one is to show it.
#[inline(always)]
fn is_shown(skb: Skb, s: &mut Scratch) -> bool {
    let arrives = skb.ifindex();
    let now = now();
    write_key_of_port(s, arrives);
    let known = look(s).filter(|known| known.interfaces[0] == arrives && known.is_recent(now));
    let Some(known) = known else {
        let asked = Bypass {
            interfaces: [arrives, 0],
            since: now,
            shown_by: s.packet.key.src_port,
            reserved: 0,
        };
        let _ = BYPASS.insert(&s.bypass, &asked, 0);
        skb.watch();
        return false;
    };
    let leaves = known.interfaces[1];
    if leaves == 0 || !leads(skb, s, leaves) {
        return false;
    }
    add(s, [arrives, leaves], now)
}

/// Whether a flow that begins with this packet may bypass the stack: a pod's, whose source is its own; or a pod's of another node,
/// by TCP. (Not inlined: see [`is_pods`].)
#[inline(never)]
fn may_begin(skb: Skb, s: &mut Scratch, tick: Tick) -> bool {
    let key = &s.packet.key;
    if key.src_port.host() == 0 || may_be_of_service(key) {
        return false;
    }
    if !is_pods(skb) {
        return s.packet.is_tcp()
            && sources::contains(SourceKey::PODS, key.src)
            && !sources::is_host(&key.dst);
    }
    if !s.packet.is_tcp() {
        // A server's answers go to the ports of clients, and another flow may have the answers to this one.
        let of_clients = PACKET_CONFIG
            .get(0)
            .map_or(0, |config| config.ephemeral_first);
        if key.dst_port.host() >= of_clients {
            return false;
        }
        s.bypass = FlowKey::new(key.dst, key.dst_port, key.src, key.src_port, key.protocol);
        if conntrack::is_answer_taken(&s.bypass, tick) {
            return false;
        }
    }
    reverse::is_right(skb, &s.packet, &mut s.way, reverse::BEGINS)
}

/// Handles a watched packet as it leaves the stack: forgets an earlier flow with its ends. If it has the addresses and ports with
/// which it arrived, and its source leads back to where it came from, the rest of its flow bypasses the stack.
#[inline(never)]
pub fn note(skb: Skb, s: &mut Scratch) {
    let key = s.packet.key;
    write_key(s, &key);
    forget(&s.bypass);
    let (from, by) = (skb.ingress(), skb.ifindex());
    write_key_of_port(s, from);
    let Some(asked) = BYPASS.get_ptr_mut(&s.bypass) else {
        return;
    };
    let now = now();
    // SAFETY: as in `look`.
    let asked = unsafe { &mut *asked };
    if asked.interfaces != [from, 0]
        || asked.shown_by != s.packet.key.src_port
        || !asked.is_recent(now)
    {
        return;
    }
    let (code, back) = route::back(skb, &s.packet, &mut s.way, from);
    if code == BPF_FIB_LKUP_RET_SUCCESS && back == from {
        asked.interfaces[1] = by;
        asked.since = now;
        add(s, [from, by], now);
    }
}

/// Adds the packet's flow, between the interfaces at which its packets arrive and by which they leave.
#[inline(always)]
fn add(s: &mut Scratch, [arrives, leaves]: [u32; 2], now: u32) -> bool {
    let key = s.packet.key;
    let interfaces = if write_key(s, &key) == 0 {
        [arrives, leaves]
    } else {
        [leaves, arrives]
    };
    if !s.packet.is_tcp() {
        return exchanges::add(&s.bypass, interfaces, now);
    }
    let flow = Bypass {
        interfaces,
        since: now,
        shown_by: Port::ANY,
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
