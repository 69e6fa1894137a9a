//! Recent ways: a cache of the results of route lookups.

use core::mem::size_of;

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use dataplane_common::{Addr, Port, packet::Iface};

use super::{
    neighbours,
    parse::Packet,
    reverse,
    route::{self, Route},
    skb::{Link, Skb},
};

/// A way that was found a moment ago, with its key. The kernel's route lookup is half of the cost of a packet of a
/// known flow.
///
/// The kernel does not report to programs when routes, neighbours or MTUs change. So a way is kept for a moment only,
/// too short to be noticed. The key has everything that the kernel's lookup uses, except ports: the agent sets whether
/// ports matter ([`WAYS_BY_ADDRESS`](dataplane_common::packet::PacketConfig::WAYS_BY_ADDRESS)).
#[repr(C)]
pub struct Way {
    src: Addr,
    dst: Addr,
    /// The interface at which packets arrive that go this way.
    from: u32,
    /// [`route::moment`] and DSCP.
    when: u32,
    /// The interface by which they leave, with these link-layer addresses; 0: up the stack of this host.
    ifindex: u32,
    /// The flags of this interface; its segment is not needed.
    flags: u16,
    masquerade_v4: u8,
    masquerade_v6: u8,
    /// The longest packet, from the IP header on, that may go.
    mtu: u32,
    link: Link,
}

const _: () = assert!(size_of::<Way>() == 64);

/// How many ways are remembered, by a hash of the key: a power of two.
const WAYS_KEPT: usize = 512;

#[btf_map]
static WAYS: PerCpuArray<Way, WAYS_KEPT> = PerCpuArray::new();

/// The place of a key.
#[inline(always)]
fn place(src: &Addr, dst: &Addr, from: u32) -> u32 {
    let ((a, b), (c, d)) = (src.halves(), dst.halves());
    // As `VipPlace::of`; an odd factor for one of them, so that both directions do not meet.
    let mixed = (a ^ b).wrapping_mul(3) ^ c ^ d ^ u64::from(from) << 32;
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % WAYS_KEPT as u32
}

/// Finds the way of `packet` to its new destination: calls [`route::search`] if there is no recent result.
#[inline(never)]
pub fn find(skb: Skb, packet: &Packet, dst: &Addr, dst_port: Port, found: &mut Route) {
    let from = skb.ifindex();
    let src = &packet.key.src;
    let way = if route::by_address() && skb.mark() == 0 {
        WAYS.get_ptr_mut(place(src, dst, from))
    } else {
        None
    };
    let when = route::moment(packet.tos);
    found.longest = packet.longest(skb);
    if let Some(way) = way {
        // SAFETY: this CPU's own element, which no other program of ours uses meanwhile (`scratch`).
        let way = unsafe { &*way };
        let fits = found.longest <= way.mtu;
        if way.when == when && way.from == from && way.dst == *dst && way.src == *src && fits {
            found.answer = if way.ifindex == 0 {
                route::LOCAL
            } else {
                route::ONWARD
            };
            found.ifindex = way.ifindex;
            found.iface = Iface {
                flags: way.flags,
                masquerade_v4: way.masquerade_v4,
                masquerade_v6: way.masquerade_v6,
                segment: 0,
            };
            found.neighbour = 1;
            found.link = way.link;
            return;
        }
    }
    if !reverse::is_right(skb, packet, found, reverse::GOES_ON) {
        found.answer = route::FORGED;
        return;
    }
    route::search(skb, packet, dst, dst_port, found);
    if let Some(way) = way
        && (found.neighbour != 0 || found.answer == route::LOCAL)
    {
        // SAFETY: as above.
        let way = unsafe { &mut *way };
        way.src = *src;
        way.dst = *dst;
        way.from = from;
        way.when = when;
        way.ifindex = found.ifindex;
        way.flags = found.iface.flags;
        way.masquerade_v4 = found.iface.masquerade_v4;
        way.masquerade_v6 = found.iface.masquerade_v6;
        way.link = found.link;
        way.mtu = found.mtu;
    }
    // Packets into a pod need no neighbour entry (`bpf_redirect_peer`).
    if found.neighbour != 0 && found.iface.flags & Iface::PEER == 0 {
        let is_v4 = found.family == u32::from(route::INET);
        if neighbours::is_due(&found.next_hop, is_v4, found.ifindex) {
            found.neighbour = 0;
        }
    }
}
