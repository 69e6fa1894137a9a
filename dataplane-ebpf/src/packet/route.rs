//! Looks up the kernel's routes, and sends packets along them.

use core::{mem::size_of, ptr::from_mut};

use aya_ebpf::{
    bindings::{
        BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NO_NEIGH,
        BPF_FIB_LKUP_RET_NOT_FWDED, BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_UNSUPP_LWT,
        bpf_fib_lookup as Lookup, bpf_redir_neigh,
    },
    helpers::generated::{
        bpf_fib_lookup, bpf_jiffies64, bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer,
    },
};
use dataplane_common::{
    Addr, Port,
    packet::{Iface, PacketConfig},
    tables::Endpoint,
};

use super::{
    DROP,
    parse::Packet,
    rewrite::Ends,
    skb::{LINK, Link, PACKET_HOST, Skb, send_bare},
    sources,
};
use crate::tables::{IFACES, PACKET_CONFIG};

/// `AF_INET` and `AF_INET6` (`include/linux/socket.h`).
pub const INET: u8 = 2;
const INET6: u8 = 10;

#[expect(clippy::cast_possible_wrap, reason = "small")]
const LOOKUP_SIZE: i32 = size_of::<Lookup>() as i32;
#[expect(clippy::cast_possible_wrap, reason = "small")]
const NEIGHBOUR_SIZE: i32 = size_of::<bpf_redir_neigh>() as i32;

pub use dataplane_common::first::{
    Answer, FORGED, LOCAL, NOWHERE, ONWARD, STACK, TOO_BIG, UNREADY,
};

/// A way to a destination.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Route {
    pub answer: Answer,
    pub ifindex: u32,
    /// The longest packet that may go, if [`Route::answer`] is [`TOO_BIG`], or [`STACK`] because of fragments.
    pub mtu: u32,
    /// [`Packet::longest`] of the packet.
    pub longest: u32,
    /// The interface's flags.
    pub iface: Iface,
    /// Whether `source` and `destination` are known: 1 or 0.
    pub neighbour: u32,
    /// Whether the node itself sends the packet ([`super::node`]): 1 or 0. It is 0 whenever a program begins. Here instead of in a
    /// register: see [`Scratch::keep`](super::scratch::Scratch::keep).
    pub of_node: u32,
    /// The next hop's family, and itself; IPv4's in the first word.
    pub family: u32,
    pub next_hop: [u32; 4],
    pub link: Link,
    /// The argument of the kernel's lookup: it is here so that its 64 bytes need not be cleared first.
    lookup: Lookup,
}

impl Route {
    /// The source that [`find_source`] has found.
    #[inline(always)]
    pub fn source(&self, is_v4: bool) -> Addr {
        // SAFETY: plain data, written by the question or by the helper.
        unsafe {
            if is_v4 {
                Addr::from_v4_word(self.lookup.__bindgen_anon_3.ipv4_src)
            } else {
                Addr::from_words(self.lookup.__bindgen_anon_3.ipv6_src)
            }
        }
    }
}

/// The time in units of 16 jiffies, that is 16 to 160 ms, and the part of `tos` that routes may match. It repeats after
/// 2^30 jiffies, 12 days at the least: an entry from exactly that moment would count again.
#[inline(always)]
pub fn moment(tos: u8) -> u32 {
    // SAFETY: the helper has no preconditions.
    let jiffies = unsafe { bpf_jiffies64() };
    ((jiffies >> 4) as u32) << 6 | u32::from(tos >> 2)
}

/// Returns the interface's flags, if the agent knows the interface.
#[inline(always)]
pub fn known_interface(ifindex: u32) -> Option<Iface> {
    // SAFETY: eight aligned bytes, copied; the element may be replaced but is whole.
    IFACES.get_ptr(ifindex).map(|iface| unsafe { *iface })
}

/// Returns the interface's flags; all zero if the agent does not know the interface.
#[inline(always)]
pub fn interface(ifindex: u32) -> Iface {
    known_interface(ifindex).unwrap_or(UNKNOWN)
}

/// An interface that the agent does not know.
const UNKNOWN: Iface = Iface {
    flags: 0,
    masquerade_v4: 0,
    masquerade_v6: 0,
    segment: 0,
};

/// The offset of the IP header in packets of this interface.
#[inline(always)]
pub fn link_length(ifindex: u32) -> u32 {
    let flags = match PACKET_CONFIG.get(0) {
        Some(config) => config.flags,
        None => 0,
    };
    if flags & PacketConfig::bare(ifindex) != 0 && interface(ifindex).flags & Iface::BARE != 0 {
        0
    } else {
        LINK
    }
}

/// `BPF_FIB_LOOKUP_MARK` (`include/uapi/linux/bpf.h`): routing rules match the packet's mark, too. Since Linux 6.10;
/// older kernels do not know the flag.
const BY_MARK: u32 = 32;

#[inline(always)]
fn ask(skb: Skb, lookup: &mut Lookup, flags: u32) -> i64 {
    // SAFETY: the structure has the size that is passed to the helper.
    unsafe { bpf_fib_lookup(skb.0.cast(), from_mut(lookup), LOOKUP_SIZE, flags) }
}

/// Whether a result for a pair of addresses stays valid for a moment, so that this CPU may remember it.
#[inline(always)]
pub fn by_address() -> bool {
    match PACKET_CONFIG.get(0) {
        Some(config) => config.flags & PacketConfig::WAYS_BY_ADDRESS != 0,
        None => false,
    }
}

/// Looks up the route to the packet's source, for packets that arrive at the interface `from`: returns the kernel's
/// result code, and the interface of the route.
#[inline(always)]
pub fn back(skb: Skb, packet: &Packet, route: &mut Route, from: u32) -> (u32, u32) {
    let lookup = &mut route.lookup;
    let (src, dst) = (&packet.key.dst, &packet.key.src);
    lookup.l4_protocol = packet.key.protocol.number();
    lookup.sport = packet.key.dst_port.be();
    lookup.dport = packet.key.src_port.be();
    // The lookup does not check the MTU.
    lookup.__bindgen_anon_1.tot_len = 0;
    lookup.ifindex = from;
    lookup.__bindgen_anon_2.flowinfo = 0;
    if packet.is_v4() {
        lookup.family = INET;
        lookup.__bindgen_anon_2.tos = packet.tos;
        lookup.__bindgen_anon_3.ipv4_src = src.words()[3];
        lookup.__bindgen_anon_4.ipv4_dst = dst.words()[3];
    } else {
        lookup.family = INET6;
        lookup.__bindgen_anon_3.ipv6_src = src.words();
        lookup.__bindgen_anon_4.ipv6_dst = dst.words();
    }
    let code = u32::try_from(ask(skb, lookup, 0)).unwrap_or(u32::MAX);
    (code, lookup.ifindex)
}

/// `BPF_FIB_LOOKUP_OUTPUT`: for packets that leave by the interface in the argument.
const BY_OUTPUT: u32 = 2;
/// `BPF_FIB_LOOKUP_SKIP_NEIGH` (Linux 6.3) and `BPF_FIB_LOOKUP_SRC` (Linux 6.7): look up the source that the kernel
/// would choose, and no neighbour.
const FOR_SOURCE: u32 = 4 | 16;

/// Writes all fields that the helper reads without flags.
#[inline(always)]
fn write_question(
    ifindex: u32,
    packet: &Packet,
    dst: &Addr,
    dst_port: Port,
    longest: u32,
    lookup: &mut Lookup,
) {
    lookup.l4_protocol = packet.key.protocol.number();
    lookup.sport = packet.key.src_port.be();
    lookup.dport = dst_port.be();
    // The helper compares it to the route's MTU.
    lookup.__bindgen_anon_1.tot_len = if longest > 0xffff {
        0xffff
    } else {
        longest as u16
    };
    lookup.ifindex = ifindex;
    if packet.is_v4() {
        lookup.family = INET;
        lookup.__bindgen_anon_2.flowinfo = 0;
        lookup.__bindgen_anon_2.tos = packet.tos;
        lookup.__bindgen_anon_3.ipv4_src = packet.key.src.words()[3];
        lookup.__bindgen_anon_4.ipv4_dst = dst.words()[3];
    } else {
        lookup.family = INET6;
        lookup.__bindgen_anon_2.flowinfo = 0;
        lookup.__bindgen_anon_3.ipv6_src = packet.key.src.words();
        lookup.__bindgen_anon_4.ipv6_dst = dst.words();
    }
}

/// Looks up with the packet's mark, too, if it has one and the kernel allows it.
#[inline(always)]
fn ask_by_mark(skb: Skb, lookup: &mut Lookup, flags: u32) -> i64 {
    let mark = skb.mark();
    let mut code = -1;
    if mark != 0 {
        // The mark is in the place of the result's link-layer address.
        let [a, b, c, d] = mark.to_ne_bytes();
        lookup.smac = [a, b, c, d, 0, 0];
        code = ask(skb, lookup, flags | BY_MARK);
    }
    if code < 0 {
        code = ask(skb, lookup, flags);
    }
    code
}

/// Looks up the source that the kernel would choose for packets to `packet`'s new destination; `false` if the kernel
/// does not return one. Only the argument of the lookup changes in `route`: it holds the result ([`Route::source`]).
#[inline(never)]
pub fn find_source(skb: Skb, packet: &Packet, endpoint: &Endpoint, route: &mut Route) -> bool {
    let lookup = &mut route.lookup;
    write_question(
        skb.ifindex(),
        packet,
        &endpoint.addr,
        endpoint.port,
        0,
        lookup,
    );
    let code = u32::try_from(ask_by_mark(skb, lookup, FOR_SOURCE)).unwrap_or(u32::MAX);
    code == BPF_FIB_LKUP_RET_SUCCESS || code == BPF_FIB_LKUP_RET_NO_NEIGH
}

/// `LOOPBACK_IFINDEX` (`include/net/flow.h`).
pub const LOOPBACK: u32 = 1;

/// Looks up the way of `packet`, which arrived at this interface or is the node's own, to its new destination, by the rules
/// for packets from its source (`bpf_ipv4_fib_lookup` in `net/core/filter.c`: policy routing included), as the stack does after it has
/// translated a packet's destination.
#[inline(never)]
pub fn search(skb: Skb, packet: &Packet, dst: &Addr, dst_port: Port, route: &mut Route) {
    let longest = route.longest;
    let lookup = &mut route.lookup;
    write_question(skb.ifindex(), packet, dst, dst_port, longest, lookup);
    let mut code = ask_by_mark(skb, lookup, 0);
    if code == i64::from(BPF_FIB_LKUP_RET_FWD_DISABLED) && route.of_node != 0 {
        // The node's own packets leave by an uplink that does not forward, too.
        write_question(LOOPBACK, packet, dst, dst_port, longest, lookup);
        code = ask_by_mark(skb, lookup, 0);
    }
    // Errors of the call itself are negative: they match nothing below.
    take(
        skb,
        packet,
        dst,
        u32::try_from(code).unwrap_or(u32::MAX),
        route,
    );
}

/// Looks up the way by an interface, and takes it if there is one.
#[inline(never)]
pub fn search_by(skb: Skb, packet: &Packet, ends: &Ends, by: u32, route: &mut Route) {
    let longest = route.longest;
    let lookup = &mut route.lookup;
    write_question(by, packet, &ends.dst, ends.dst_port, longest, lookup);
    let code = u32::try_from(ask_by_mark(skb, lookup, BY_OUTPUT)).unwrap_or(u32::MAX);
    let is_there = code == BPF_FIB_LKUP_RET_SUCCESS
        || code == BPF_FIB_LKUP_RET_NO_NEIGH
        || code == BPF_FIB_LKUP_RET_FRAG_NEEDED;
    if is_there && route.lookup.ifindex == by {
        take(skb, packet, &ends.dst, code, route);
    }
}

/// Takes the kernel's result.
#[inline(always)]
fn take(skb: Skb, packet: &Packet, dst: &Addr, code: u32, route: &mut Route) {
    let lookup = &route.lookup;
    route.answer = NOWHERE;
    route.ifindex = lookup.ifindex;
    route.mtu = 0;
    let known = known_interface(lookup.ifindex);
    route.iface = known.unwrap_or(UNKNOWN);
    route.neighbour = 0;
    route.family = u32::from(lookup.family);
    // SAFETY: plain data, all of it written above or by the helper.
    route.next_hop = unsafe { lookup.__bindgen_anon_4.ipv6_dst };
    if (code == BPF_FIB_LKUP_RET_SUCCESS || code == BPF_FIB_LKUP_RET_NO_NEIGH)
        && !known.is_some_and(Iface::is_ready)
    {
        // The agent has not attached programs there yet.
        route.answer = UNREADY;
        return;
    }
    if code == BPF_FIB_LKUP_RET_SUCCESS {
        route.answer = ONWARD;
        route.neighbour = 1;
        route.link = Link {
            to: lookup.dmac,
            from: lookup.smac,
        };
        // SAFETY: plain data, written by the helper (`bpf_fib_set_fwd_params` in `net/core/filter.c`).
        route.mtu = u32::from(unsafe { lookup.__bindgen_anon_1.mtu_result });
    } else if code == BPF_FIB_LKUP_RET_NO_NEIGH {
        route.answer = ONWARD;
    } else if code == BPF_FIB_LKUP_RET_NOT_FWDED || code == BPF_FIB_LKUP_RET_FWD_DISABLED {
        // The kernel returns this for addresses of this host, and for addresses without a route.
        if sources::is_host(dst) {
            route.answer = LOCAL;
            route.ifindex = 0;
            route.mtu = u32::MAX;
        }
    } else if code == BPF_FIB_LKUP_RET_UNSUPP_LWT {
        route.answer = STACK;
    } else if code == BPF_FIB_LKUP_RET_FRAG_NEEDED {
        route.answer = if packet.may_be_fragmented(skb) {
            STACK
        } else {
            TOO_BIG
        };
        // SAFETY: plain data, written by the helper.
        route.mtu = u32::from(unsafe { lookup.__bindgen_anon_1.mtu_result });
    }
}

/// Sends the packet along the way: directly into the pod, past its interface's queues, if no other program or queue is
/// there; else by the interface, with the neighbour that the kernel knows or finds.
#[inline(always)]
pub fn send(skb: Skb, packet: &Packet, route: &Route) -> i32 {
    skb.remove_tag();
    if packet.l3 == 0 && !skb.add_link() {
        return DROP;
    }
    skb.send_on();
    if route.iface.flags & Iface::BARE != 0 {
        return send_bare(route.ifindex);
    }
    if route.neighbour != 0 {
        if !skb.store::<_, false>(0, &route.link) {
            return DROP;
        }
        if route.iface.flags & Iface::PEER == 0 {
            // SAFETY: no memory of ours is involved.
            return unsafe { bpf_redirect(route.ifindex, 0) as i32 };
        }
        if skb.kind() != PACKET_HOST {
            skb.address_to_host();
        }
        // SAFETY: no memory of ours is involved.
        return unsafe { bpf_redirect_peer(route.ifindex, 0) as i32 };
    }
    by_neighbour(route)
}

/// As [`send`], for a packet that leaves this host: always by the interface's queues, also into a pod.
#[inline(always)]
pub fn send_out(skb: Skb, packet: &Packet, route: &Route) -> i32 {
    if route.neighbour == 0 || route.iface.flags & Iface::BARE != 0 {
        return send_by_neighbour(skb, packet, route);
    }
    if (packet.l3 == 0 && !skb.add_link()) || !skb.store::<_, false>(0, &route.link) {
        return DROP;
    }
    // SAFETY: no memory of ours is involved.
    unsafe { bpf_redirect(route.ifindex, 0) as i32 }
}

/// As [`send_out`], with the neighbour that the kernel finds.
#[inline(always)]
pub fn send_by_neighbour(skb: Skb, packet: &Packet, route: &Route) -> i32 {
    if packet.l3 == 0 && !skb.add_link() {
        return DROP;
    }
    if route.iface.flags & Iface::BARE != 0 {
        return send_bare(route.ifindex);
    }
    by_neighbour(route)
}

#[inline(always)]
fn by_neighbour(route: &Route) -> i32 {
    // SAFETY: all zeros are a value of this plain data.
    let mut neighbour: bpf_redir_neigh = unsafe { core::mem::zeroed() };
    neighbour.nh_family = route.family;
    neighbour.__bindgen_anon_1.ipv6_nh = route.next_hop;
    // SAFETY: the structure has the size that is passed to the helper.
    unsafe { bpf_redirect_neigh(route.ifindex, &raw mut neighbour, NEIGHBOUR_SIZE, 0) as i32 }
}
