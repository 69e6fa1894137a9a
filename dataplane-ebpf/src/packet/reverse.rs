//! Whether a packet may come from where it says; `rp_filter` does this for packets that pass the stack.
//!
//! At a pod's interface, the node's routes must lead to the packet's source by one of these interfaces:
//!
//! - this interface, or another interface of the same pod;
//! - the bridge of which this interface is a port, or an interface that stands on that bridge;
//! - an interface that the agent knows, that has none of our programs and that is no bridge.
//!
//! So a pod speaks only for itself, in flows that it begins and in answers. If the interface is a port of a switch in which the
//! node has no address, the routes must not lead to another pod's interface. The agent says which of both checks an interface
//! gets ([`Iface::STRICT`], [`Iface::LOOSE`]), if any.
//!
//! By other interfaces a flow begins from where the kernel would take it (`fib_validate_source` in
//! `net/ipv4/fib_frontend.c`), but never from the node's own addresses. The packets of known flows are not asked there. A
//! cluster IP begins no flow anywhere: it is nobody's.
//!
//! A CPU remembers for a moment which sources it has found right, as it does [ways](super::route).

use aya_ebpf::{
    bindings::{
        BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NO_NEIGH,
        BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_UNSUPP_LWT,
    },
    btf_maps::PerCpuArray,
    macros::btf_map,
};
use dataplane_common::{
    Addr, VipPlace, decide,
    packet::{Iface, PacketConfig},
    tables::{FrontendKey, Kind},
};

use super::{
    parse::Packet,
    route::{self, Route},
    skb::Skb,
    sources,
};
use crate::{select::Live, tables::PACKET_CONFIG};

/// A source that was found right.
#[repr(C)]
struct Found {
    src: Addr,
    /// Where it arrived.
    from: u32,
    /// [`route::moment`], and what it may do.
    when: u32,
}

/// `LOOPBACK_IFINDEX` (`include/net/flow.h`).
const LOOPBACK: u32 = 1;
/// How many are remembered, by a hash: a power of two.
const FOUND_KEPT: usize = 512;

#[btf_map]
static FOUND: PerCpuArray<Found, FOUND_KEPT> = PerCpuArray::new();

/// What a packet does: the flow is known. Each of these asks for more than the one before.
pub const GOES_ON: u32 = 0;
/// It says more of its flow than that it is used: that it is over, or which ports its fragments have.
pub const TELLS: u32 = 1;
/// It begins a flow.
pub const BEGINS: u32 = 2;

#[inline(always)]
fn place(src: &Addr, from: u32) -> u32 {
    let (a, b) = src.halves();
    // As `VipPlace::of`.
    let mixed = a ^ b ^ u64::from(from) << 32;
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % FOUND_KEPT as u32
}

/// Whether the packet may come from its source. `route`: room for the question, nothing else.
#[inline(never)]
pub fn is_right(skb: Skb, packet: &Packet, route: &mut Route, does: u32) -> bool {
    let from = skb.ifindex();
    let src = &packet.key.src;
    let kept = if is_undisturbed() {
        FOUND.get_ptr_mut(place(src, from))
    } else {
        None
    };
    // Classes of service are no part of it: the two lowest bits of a moment are.
    let when = route::moment((does as u8) << 2);
    if let Some(kept) = kept {
        // SAFETY: this CPU's own element, which no other program of ours uses meanwhile (`scratch`).
        let kept = unsafe { &*kept };
        let does_as_much = kept.when.wrapping_sub(when) <= BEGINS;
        if does_as_much && kept.from == from && kept.src == *src {
            return true;
        }
    }
    if !is_right_by_routes(skb, packet, route, does) {
        return false;
    }
    if let Some(kept) = kept {
        // SAFETY: as above.
        let kept = unsafe { &mut *kept };
        kept.src = *src;
        kept.from = from;
        kept.when = when;
    }
    true
}

/// Whether no other program of ours uses this CPU's elements while this one runs. (Whether routes ask for ports does not matter
/// here: the source is the pod's, by whichever.)
#[inline(always)]
fn is_undisturbed() -> bool {
    match PACKET_CONFIG.get(0) {
        Some(config) => config.flags & PacketConfig::PREEMPTIBLE == 0,
        None => false,
    }
}

/// Whether an address is a cluster IP.
#[inline(always)]
fn is_cluster_ip(addr: Addr) -> bool {
    let place = VipPlace::of(addr);
    let words = decide::Tables::vips(&Live, place.index());
    place.may_be_cluster(words)
        && decide::Tables::frontend(&Live, &FrontendKey::address(addr)).kind()
            == Kind::CLUSTER_ADDRESS
}

#[inline(always)]
fn is_right_by_routes(skb: Skb, packet: &Packet, route: &mut Route, does: u32) -> bool {
    let from = skb.ifindex();
    let arrived = route::interface(from);
    let flags = arrived.flags;
    let asked = flags & (Iface::STRICT | Iface::LOOSE);
    let is_pods = arrived.checks_a_pod();
    if !is_pods {
        if does == GOES_ON {
            return true;
        }
        if does == TELLS {
            return !sources::is_host(&packet.key.src);
        }
    }
    if does == BEGINS && is_cluster_ip(packet.key.src) {
        return false;
    }
    // Of an uplink, IPv6 has no such sysctl.
    if !is_pods && (!packet.is_v4() || asked == 0) {
        return !sources::is_host(&packet.key.src);
    }
    let (mut code, mut back) = route::back(skb, packet, route, from);
    if code == BPF_FIB_LKUP_RET_FWD_DISABLED && is_pods {
        // The interface forwards nothing, so the packet is for this host; the loopback forwards if the host does.
        (code, back) = route::back(skb, packet, route, LOOPBACK);
        if code == BPF_FIB_LKUP_RET_FWD_DISABLED {
            return false;
        }
    }
    if code == BPF_FIB_LKUP_RET_FWD_DISABLED {
        // What comes here goes no further than this host.
        return !sources::is_host(&packet.key.src);
    }
    if code == BPF_FIB_LKUP_RET_UNSUPP_LWT {
        // A tunnel, by which interface is not told.
        return !is_pods;
    }
    if code != BPF_FIB_LKUP_RET_SUCCESS
        && code != BPF_FIB_LKUP_RET_NO_NEIGH
        && code != BPF_FIB_LKUP_RET_FRAG_NEEDED
    {
        return false;
    }
    if back == from {
        return true;
    }
    if !is_pods {
        return flags & Iface::STRICT == 0;
    }
    let Some(back) = route::known_interface(back) else {
        // It may be a new pod's.
        return false;
    };
    if arrived.is_same_segment(back) || arrived.is_same_pod(back) {
        return true;
    }
    if flags & Iface::STRICT == 0 {
        return back.flags & Iface::LOCAL == 0;
    }
    back.flags & (Iface::ATTACHED | Iface::LOCAL) == 0 && back.segment == 0
}
