//! Which port of the node's an endpoint sees a masqueraded flow come from.

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use dataplane_common::{
    Port, Protocol, VipPlace, decide,
    packet::{PacketConfig, Tick},
    tables::FrontendKey,
};

use super::conntrack::{Flow, node_addr};
use crate::{select::Live, tables::PACKET_CONFIG};

/// How many ports are tried. With nine ports in ten taken, one flow in 30 finds none.
const TRIES: u32 = 32;

/// Whether a service has the port, which is none of [`PacketConfig::NODE_PORTS`].
#[inline(always)]
fn is_served(key: &FrontendKey) -> bool {
    let place = VipPlace::of(key.addr);
    let words = decide::Tables::vips(&Live, place.index());
    place.may_have_ports(words) && !decide::Tables::frontend(&Live, key).is_none()
}

/// Has the port that the flow has lead to its cell, which is held, if no other flow to its endpoint has that port.
///
/// And if no service has it, or may have it some day, unless the protocol is TCP: what an endpoint's socket
/// answers by a call of its own (`sendto`) goes to that service, since the call is seen before its packet is
/// (`sendmsg`). (Node ports are looked at whether the address has them or not: it is one lookup less.)
#[inline(never)]
fn claim(flow: &Flow, index: u32, now: Tick) -> bool {
    let protocol = flow.forward.protocol;
    if protocol != Protocol::TCP {
        // What comes to one is not looked for among answers (`arrived`).
        if PacketConfig::NODE_PORTS.contains(&flow.node_port.host()) {
            return false;
        }
        let (addr, port) = (node_addr(flow.node_addr), flow.node_port);
        if is_served(&FrontendKey::node_port(addr.is_v4(), port, protocol))
            || is_served(&FrontendKey::new(addr, port, protocol))
        {
            return false;
        }
    }
    flow.lead(index, now)
}

/// Gives the flow a port that no other flow to its endpoint has ([`claim`]): the client's own port if it is free and cannot be one that the host gives to a connection of its
/// own, else one that cannot. `false` if none was found.
#[inline(never)]
pub fn take_port(flow: &mut Flow, index: u32, now: Tick) -> bool {
    let Some(config) = PACKET_CONFIG.get(0) else {
        return false;
    };
    let first = u32::from(config.ephemeral_first);
    let last = u32::from(config.ephemeral_last);
    let lowest = u32::from(PacketConfig::FIRST_PORT);
    let own = u32::from(flow.forward.src_port.host());
    if own >= lowest && !(first <= own && own <= last) {
        flow.node_port = flow.forward.src_port;
        if claim(flow, index, now) {
            return true;
        }
    }
    // The ports from `lowest` on without the host's own range.
    let below = first.max(lowest) - lowest;
    let above = 0xffff - last.min(0xffff);
    let count = below + above;
    // First the one that the client's own port leads to: its next flow has the next, and the cell beside
    // (`dataplane_common::cells`). Who does not know the client's port does not know this one.
    let (high, low) = flow.forward.src.halves();
    let spread = ((high ^ low).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32;
    let Some(mut nth) = (own + spread).checked_rem(count) else {
        return false;
    };
    for _ in 0..TRIES {
        let mut port = lowest + nth;
        if port >= lowest + below {
            port = port - (lowest + below) + last + 1;
        }
        flow.node_port = Port::new(port as u16);
        if claim(flow, index, now) {
            return true;
        }
        // SAFETY: the helper has no preconditions.
        let random = u64::from(unsafe { bpf_get_prandom_u32() });
        nth = ((random * u64::from(count)) >> 32) as u32;
    }
    false
}
