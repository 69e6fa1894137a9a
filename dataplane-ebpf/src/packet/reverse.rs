//! Checks a packet's source; `rp_filter` does this for packets that pass the stack.
//!
//! At a pod's interface, the node's routes must lead to the packet's source by one of these interfaces:
//!
//! - this interface, or another interface of the same pod;
//! - the bridge of which this interface is a port, or an interface that stands on that bridge;
//! - an interface that the agent knows, that has none of our programs and that is no bridge.
//!
//! So a pod can use only its own addresses, in flows that it begins and in answers. If the interface is a port of a
//! switch in which the node has no address, the routes must not lead to another pod's interface. The agent chooses
//! which of both checks an interface gets ([`Iface::STRICT`], [`Iface::LOOSE`]), if any.
//!
//! At other interfaces a flow may begin with any source that the kernel would accept (`fib_validate_source` in
//! `net/ipv4/fib_frontend.c`), except the node's own addresses. Packets of known flows are not checked there. A cluster
//! IP begins no flow anywhere, because no host has it.
//!
//! A CPU remembers valid sources for a moment, as it remembers [ways](super::route).

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_FWD_DISABLED,
        BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_UNSUPP_LWT,
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

/// A source that has passed the check.
#[repr(C)]
struct Found {
    src: Addr,
    /// The interface at which it arrived.
    from: u32,
    /// [`route::moment`], and the check that it has passed.
    when: u32,
}

/// How many sources are remembered, by a hash: a power of two.
const FOUND_KEPT: usize = 512;

#[btf_map]
static FOUND: PerCpuArray<Found, FOUND_KEPT> = PerCpuArray::new();

/// The packet belongs to a known flow. Each of these checks is stricter than the one before.
pub const GOES_ON: u32 = 0;
/// The packet changes more of its flow than its last use: it ends the flow, or gives the ports of its fragments.
pub const TELLS: u32 = 1;
/// The packet begins a flow.
pub const BEGINS: u32 = 2;

#[inline(always)]
fn place(src: &Addr, from: u32) -> u32 {
    let (a, b) = src.halves();
    // As `VipPlace::of`.
    let mixed = a ^ b ^ u64::from(from) << 32;
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32 % FOUND_KEPT as u32
}

/// Whether the packet may have this source. `route`: room for the lookup.
#[inline(always)]
pub fn is_right(skb: Skb, packet: &Packet, route: &mut Route, does: u32) -> bool {
    packet_is_right(skb.0, packet, route, does) != 0
}

/// [`is_right`]. With external linkage, as in `table.rs`: the verifier looks at it once.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_is_right(
    skb: *mut __sk_buff,
    packet: *const Packet,
    route: *mut Route,
    does: u32,
) -> u32 {
    // SAFETY: a packet and a route, or null: the verifier sees to it where it is called.
    match (unsafe { packet.as_ref() }, unsafe { route.as_mut() }) {
        (Some(packet), Some(route)) => u32::from(look(Skb(skb), packet, route, does)),
        _ => 0,
    }
}

#[inline(always)]
fn look(skb: Skb, packet: &Packet, route: &mut Route, does: u32) -> bool {
    let from = skb.ifindex();
    let src = &packet.key.src;
    let kept = if is_undisturbed() {
        FOUND.get_ptr_mut(place(src, from))
    } else {
        None
    };
    // The class of service does not count here: its bits of a moment hold `does` instead.
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

/// Whether no other program of ours uses this CPU's elements while this one runs. (It does not matter here whether
/// routes depend on ports: the source is the pod's by any of them.)
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
    // For uplinks, IPv6 has no such sysctl.
    if !is_pods && (!packet.is_v4() || asked == 0) {
        return !sources::is_host(&packet.key.src);
    }
    let (mut code, mut back) = route::back(skb, packet, route, from);
    if code == BPF_FIB_LKUP_RET_FWD_DISABLED && is_pods {
        // The interface forwards nothing, so the packet is for this host; the loopback forwards if the host does.
        (code, back) = route::back(skb, packet, route, route::LOOPBACK);
        if code == BPF_FIB_LKUP_RET_FWD_DISABLED {
            return false;
        }
    }
    if code == BPF_FIB_LKUP_RET_FWD_DISABLED {
        // Packets that arrive here go no further than this host.
        return !sources::is_host(&packet.key.src);
    }
    if code == BPF_FIB_LKUP_RET_UNSUPP_LWT {
        // A tunnel; the kernel does not report its interface.
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
