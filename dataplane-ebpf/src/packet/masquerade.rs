//! Which port of the node's an endpoint sees a masqueraded flow come from.

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_get_prandom_u32};
use dataplane_common::{
    Port, Protocol, VipPlace, decide,
    packet::{PacketConfig, Tick, need},
    tables::FrontendKey,
};

use super::{
    conntrack::{Flow, node_addr},
    skb::Skb,
    sockets, table,
};
use crate::{select::Live, tables::PACKET_CONFIG};

/// At how many places a free port is looked for; at each, sixteen ports. The first ones are for [`need::LITTLE`], as
/// many others for [`need::MORE`], the rest for [`need::ALL`]: with 98 ports in 100 taken here and there, one flow in
/// 30 000 finds none.
const PLACES: u32 = 64;
const FOR_EACH: u32 = 16;

/// Whether a service has the port. Node ports as Kubernetes gives them have no bit in the filter.
#[inline(always)]
fn is_served(key: &FrontendKey) -> bool {
    let place = VipPlace::of(key.addr);
    let words = decide::Tables::vips(&Live, place.index());
    (!VipPlace::has_one(key) || place.may_have_ports(words))
        && !decide::Tables::frontend(&Live, key).is_none()
}

/// Has the port that the flow has lead to its cell, which is held, if no other flow to its endpoint has that port, no
/// service and no socket of the node.
///
/// Services' ports may be TCP's. By UDP, what an endpoint's socket answers by a call of its own (`sendto`) goes to that
/// service, since the call is seen before its packet is (`sendmsg`). (Node ports are looked at whether the address has
/// them or not: it is one lookup less.)
#[inline(always)]
fn claim_port(skb: Skb, flow: &Flow, index: u32, now: Tick) -> bool {
    let protocol = flow.forward.protocol;
    if protocol != Protocol::TCP {
        let (addr, port) = (node_addr(flow.node_addr), flow.node_port);
        if is_served(&FrontendKey::node_port(addr.is_v4(), port, protocol))
            || is_served(&FrontendKey::new(addr, port, protocol))
        {
            return false;
        }
    }
    !sockets::has_one(skb, flow) && flow.lead(index, now)
}

/// [`claim_port`]. With external linkage, as in `table.rs`: the verifier looks at it once, not once for each port.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn masquerade_claim_port(
    skb: *mut __sk_buff,
    flow: *const Flow,
    index: u32,
    now: u32,
) -> u32 {
    // SAFETY: a flow, or null: the verifier sees to it where it is called.
    match unsafe { flow.as_ref() } {
        Some(flow) => u32::from(claim_port(
            Skb(skb),
            flow,
            index,
            Tick::from_number(now as u16),
        )),
        None => 0,
    }
}

#[inline(always)]
fn claim(skb: Skb, flow: &Flow, index: u32, now: Tick) -> bool {
    masquerade_claim_port(skb.0, flow, index, u32::from(now.number())) != 0
}

/// Gives the flow a port that no other flow to its endpoint has, no service and no socket of the node ([`claim_port`]).
/// `false` if none was found.
///
/// First those that nobody else wants ([`PacketConfig::avoids`]): the client's own, or one that it leads to, so that its
/// next flow has the next, and the cell beside (`dataplane_common::cells`). Who does not know the client's port does not
/// know this one. Then those at random places.
#[inline(never)]
pub fn take_port(skb: Skb, flow: &mut Flow, index: u32, now: Tick) -> bool {
    let Some(config) = PACKET_CONFIG.get(0) else {
        return false;
    };
    let own = flow.forward.src_port;
    if !config.avoids(own.host(), flow.forward.protocol, need::LITTLE) {
        flow.node_port = own;
        if claim(skb, flow, index, now) {
            return true;
        }
    }
    // The ports from the lowest on without the host's own range.
    let lowest = u32::from(PacketConfig::FIRST_PORT);
    let last = u32::from(config.ephemeral_last);
    let below = u32::from(config.ephemeral_first).max(lowest) - lowest;
    let above = 0xffff - last;
    let (high, low) = flow.forward.src.halves();
    let spread = ((high ^ low).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32;
    for place in 0..PLACES {
        let need = (place / FOR_EACH).min(need::ALL);
        let count = if need == need::LITTLE {
            below + above
        } else {
            PacketConfig::PORTS
        };
        if count == 0 {
            continue;
        }
        // SAFETY: the helper has no preconditions.
        let random = u64::from(unsafe { bpf_get_prandom_u32() });
        let mut nth = ((random * u64::from(count)) >> 32) as u32;
        if place.is_multiple_of(FOR_EACH) {
            let Some(led) = (u32::from(own.host()) + spread).checked_rem(count) else {
                continue;
            };
            nth = led;
        }
        let mut port = lowest + nth;
        if need == need::LITTLE && nth >= below {
            port = last + 1 + (nth - below);
        }
        flow.node_port = Port::new(port as u16);
        flow.node_port = table::free_port(&flow.port_key(), need, now);
        if flow.node_port != Port::ANY && claim(skb, flow, index, now) {
            return true;
        }
    }
    false
}
