//! Chooses the port of the node's that an endpoint sees a masqueraded flow come from.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::{
    bindings::__sk_buff, btf_maps::Array, helpers::generated::bpf_get_prandom_u32, macros::btf_map,
};
use dataplane_common::{
    Addr, Port, Protocol, VipPlace,
    cells::CellKey as _,
    decide,
    packet::{NODE_ADDRS, PacketConfig, PortKey, Tick, need},
    tables::FrontendKey,
};

use super::{
    came_by,
    conntrack::{Flow, node_addr},
    route,
    scratch::Scratch,
    skb::Skb,
    sockets, table,
};
use crate::{select::Live, tables::PACKET_CONFIG};

/// Chooses the address of the node's that the endpoint sees the flow come from, once its way is known: the interface's
/// address, or, if it has several, the one that the kernel chooses. Index 0: there is none.
#[inline(never)]
pub fn take_address(skb: Skb, s: &mut Scratch) {
    let usual = if s.packet.is_v4() {
        s.way.iface.masquerade_v4
    } else {
        s.way.iface.masquerade_v6
    };
    s.flow.node_addr = usual;
    let flags = PACKET_CONFIG.get(0).map_or(0, |config| config.flags);
    if flags & PacketConfig::SEVERAL_NETWORKS == 0
        || usual == 0
        || !route::find_source(skb, &s.packet, &s.endpoint, &mut s.way)
    {
        return;
    }
    let chosen = s.way.source(s.packet.is_v4());
    for group in 0..NODE_ADDRS / GROUP {
        let index = masquerade_index_of(&raw const chosen, group * GROUP);
        if index == ELSEWHERE {
            continue;
        }
        if index != 0 {
            s.flow.node_addr = index as u8;
        }
        return;
    }
}

/// Number of indices that one call compares. The verifier walks each round of a loop, so one loop over all indices is
/// expensive.
const GROUP: u32 = 16;
/// [`masquerade_index_of`]: the address is not in this group, but a later group may have it.
const ELSEWHERE: u32 = NODE_ADDRS;

/// Looks for an address in the group of `NODE_ADDRS` that begins with `first`. Returns its index, [`ELSEWHERE`], or 0 if the
/// address is not in `NODE_ADDRS`. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn masquerade_index_of(addr: *const Addr, first: u32) -> u32 {
    // SAFETY: an address, or null: the verifier sees to it where it is called.
    let Some(addr) = (unsafe { addr.as_ref() }) else {
        return 0;
    };
    for nth in 0..GROUP {
        let index = first + nth;
        let known = node_addr(index as u8);
        if index != 0 && known == *addr {
            return index;
        }
        // The agent gives the lowest first. There is no index 0.
        if index != 0 && known.is_unspecified() {
            return 0;
        }
    }
    ELSEWHERE
}

/// At how many places to search for a free port; at each, sixteen ports. The first places are for [`need::LITTLE`], as
/// many more for [`need::MORE`], the rest for [`need::ALL`]: with 98 ports in 100 taken here and there, one flow in 30
/// 000 finds none.
const PLACES: u32 = 64;
const FOR_EACH: u32 = 16;

/// How to search for a port: at all places.
pub const THOROUGHLY: u32 = 0;
/// At a few places of each kind: another endpoint may do as well.
pub const BRIEFLY: u32 = 1;
/// No endpoint has a free port: a flow that may be evicted gives up its port (`room.rs` of the cells).
pub const EVICTING: u32 = 2;

/// How many flows are evicted at most for a new one.
const EVICTIONS: u32 = 3;

/// How many endpoints without ports are remembered.
const REMEMBERED: u32 = 1024;
/// For how long, in units of 2^28 ns (0.27 s): until the end of the next one.
const UNIT: u32 = 28;

/// Endpoints at which a thorough search found no port, by a hash: the hash's other half, and the time. So the next
/// packets cost no thorough search.
#[btf_map]
static EXHAUSTED: Array<u64, { REMEMBERED as usize }> = Array::new();

/// The place that remembers that an endpoint has no ports, and its value now.
#[inline(always)]
fn memory_of(key: &PortKey) -> (Option<*mut u64>, u64) {
    let endpoint = PortKey {
        node_port: Port::ANY,
        ..*key
    };
    let place = endpoint.place(table::secret());
    let when = table::coarse_ns() >> UNIT & 0xffff;
    let place_of = EXHAUSTED.get_ptr_mut(place & (REMEMBERED - 1));
    (place_of, u64::from(place) << 16 | when)
}

/// Whether a thorough search has failed recently.
#[inline(always)]
fn is_exhausted(key: &PortKey) -> bool {
    let (Some(place), now) = memory_of(key) else {
        return false;
    };
    // SAFETY: an aligned word of the array's element, which stays.
    let then = unsafe { read_volatile(place) };
    // 0 stands for no endpoint. An endpoint whose word is 0, one in 2^32, is searched every time.
    then != 0 && then >> 16 == now >> 16 && now.wrapping_sub(then) & 0xffff <= 1
}

#[inline(always)]
fn remember(key: &PortKey) {
    if let (Some(place), now) = memory_of(key) {
        // SAFETY: as above.
        unsafe { write_volatile(place, now) };
    }
}

/// Whether a service has the port. Node ports in Kubernetes' default range have no bit in the filter.
#[inline(always)]
fn is_served(key: &FrontendKey) -> bool {
    let place = VipPlace::of(key.addr);
    let words = decide::Tables::vips(&Live, place.index());
    (!VipPlace::has_one(key) || place.may_have_ports(words))
        && !decide::Tables::frontend(&Live, key).is_none()
}

/// Whether a service has the flow's port, at the node's address. A TCP service may have it. For UDP, if an endpoint's
/// socket answers by a call of its own (`sendto`), the answer goes to that service, because the program at `sendmsg`
/// runs before there is a packet. (The function looks at node ports even if the address has none: this saves a lookup.)
///
/// Not inlined: its stack is free again when the sockets are looked at ([`sockets::has_one`]).
#[inline(never)]
fn is_services(flow: &Flow) -> bool {
    let protocol = flow.forward.protocol;
    if protocol == Protocol::TCP {
        return false;
    }
    let (addr, port) = (node_addr(flow.node_addr), flow.node_port);
    is_served(&FrontendKey::node_port(addr.is_v4(), port, protocol))
        || is_served(&FrontendKey::new(addr, port, protocol))
}

/// Whether no service and no socket of the node has the flow's port. With external linkage, as in `table.rs`: the
/// verifier looks at it once, not once for each port.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn masquerade_is_nobodys(skb: *mut __sk_buff, flow: *const Flow) -> u32 {
    // SAFETY: a flow, or null: the verifier sees to it where it is called.
    match unsafe { flow.as_ref() } {
        Some(flow) => u32::from(!is_services(flow) && !sockets::has_one(Skb(skb), flow)),
        None => 0,
    }
}

/// Searches for a port at one of the places. With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn masquerade_try_place(
    skb: *mut __sk_buff,
    flow: *mut Flow,
    place: u32,
    now: u32,
) -> u32 {
    // SAFETY: a flow, or null: the verifier sees to it where it is called.
    let (Some(flow), Some(config)) = (unsafe { flow.as_mut() }, PACKET_CONFIG.get(0)) else {
        return 0;
    };
    let now = Tick::from_number(now as u16);
    flow.node_port = port_at(flow, config, place);
    if flow.node_port == Port::ANY {
        // The host's own range covers all ports.
        return 0;
    }
    flow.node_port = table::free_port(&flow.port_key(), need_at(place), now);
    u32::from(flow.node_port != Port::ANY && masquerade_is_nobodys(skb, flow) != 0)
}

/// How urgently a port is needed when the search reaches a place.
#[inline(always)]
fn need_at(place: u32) -> u32 {
    (place / FOR_EACH).min(need::ALL)
}

/// The port at which the search begins at a place. At the first place, the client's own port leads to it, so that the
/// client's next flow has the next port, and the cell beside (`dataplane_common::cells`): only a host that knows the
/// client's port knows this one. Then at random.
#[inline(always)]
fn port_at(flow: &Flow, config: &PacketConfig, place: u32) -> Port {
    // The ports from the lowest on, at first without the host's own range.
    let lowest = u32::from(PacketConfig::FIRST_PORT);
    let last = u32::from(config.ephemeral_last);
    let below = u32::from(config.ephemeral_first).max(lowest) - lowest;
    let without = need_at(place) == need::LITTLE;
    let count = if without {
        below + (0xffff - last)
    } else {
        PacketConfig::PORTS
    };
    // SAFETY: the helper has no preconditions.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    let mut nth = ((random * u64::from(count)) >> 32) as u32;
    if place & (FOR_EACH - 1) == 0 {
        let (high, low) = flow.forward.src.halves();
        let spread = ((high ^ low).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32;
        let own = u32::from(flow.forward.src_port.host());
        nth = (own + spread).checked_rem(count).unwrap_or(0);
    }
    if without && nth >= below {
        nth += last + 1 - lowest - below;
    }
    Port::new((lowest + nth) as u16)
}

/// Gives the flow a port that no other flow to its endpoint, no service and no socket of the node has: the client's own
/// port, if no other use needs it ([`PacketConfig::avoids`]), or one at one of the places. `false` if none was found.
/// `how`: [`THOROUGHLY`] and so on.
///
/// The function holds nothing meanwhile: the flow owns the port when its slot leads to its cell ([`Flow::lead`]).
#[inline(always)]
pub fn find_port(skb: Skb, flow: &mut Flow, how: u32, now: Tick) -> bool {
    masquerade_find_port(skb.0, flow, how, u32::from(now.number())) != 0
}

/// [`find_port`]. With external linkage, too.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn masquerade_find_port(
    skb: *mut __sk_buff,
    flow: *mut Flow,
    how: u32,
    now: u32,
) -> u32 {
    // SAFETY: a flow, or null: the verifier sees to it where it is called.
    match unsafe { flow.as_mut() } {
        Some(flow) => u32::from(search(Skb(skb), flow, how, Tick::from_number(now as u16))),
        None => 0,
    }
}

#[inline(always)]
fn search(skb: Skb, flow: &mut Flow, how: u32, now: Tick) -> bool {
    let Some(config) = PACKET_CONFIG.get(0) else {
        return false;
    };
    let own = flow.forward.src_port;
    flow.node_port = own;
    let protocol = flow.forward.protocol;
    // In the stack, the flow's packets come from this port of the client's. From its own port, the client may have another flow
    // to the endpoint, which is not masqueraded.
    if flow.came_by & came_by::THROUGH == 0
        && !config.avoids(own.host(), protocol, need::LITTLE)
        && table::is_port_free(&flow.port_key(), now)
        && masquerade_is_nobodys(skb.0, flow) != 0
    {
        return true;
    }
    let exhausted = is_exhausted(&flow.port_key());
    if exhausted && how == BRIEFLY {
        return false;
    }
    // For an endpoint that had no port, one place of the last kind.
    let (mut place, step) = if exhausted {
        (PLACES - 1, 1)
    } else if how == THOROUGHLY {
        (0, 1)
    } else {
        (0, FOR_EACH - 1)
    };
    for _ in 0..PLACES {
        if place >= PLACES {
            break;
        }
        if masquerade_try_place(skb.0, flow, place, u32::from(now.number())) != 0 {
            return true;
        }
        place += step;
    }
    if how == THOROUGHLY && !exhausted {
        remember(&flow.port_key());
    }
    if how != EVICTING {
        return false;
    }
    for _ in 0..EVICTIONS {
        // SAFETY: the helper has no preconditions.
        let random = unsafe { bpf_get_prandom_u32() };
        flow.node_port = table::evict_port(&flow.port_key(), random, now);
        let port = flow.node_port.host();
        // A socket of the node may have taken it since.
        if !config.avoids(port, protocol, need::ALL) && masquerade_is_nobodys(skb.0, flow) != 0 {
            return true;
        }
    }
    false
}

const _: () = assert!(FOR_EACH.is_power_of_two() && REMEMBERED.is_power_of_two());
