//! Writes decisions to the ring buffer, while there is a listener.

use dataplane_common::{Event, Hook, Reason, tables::Endpoint};

use super::{parse::Packet, skb::Skb};
use crate::events;

/// Reports a verdict on a packet. Without a listener this is one load and one branch.
#[inline(never)]
pub fn report(skb: Skb, packet: &Packet, reason: Reason, pool: u32, endpoint: &Endpoint) {
    let now = events::listened_to();
    if now == 0 {
        return;
    }
    events::submit(Event {
        at: now,
        netns: 0,
        socket: 0,
        source: packet.key.src,
        destination: packet.key.dst,
        endpoint: endpoint.addr,
        destination_port: packet.key.dst_port,
        endpoint_port: endpoint.port,
        pool,
        pid: 0,
        ifindex: skb.ifindex(),
        source_port: packet.key.src_port,
        reserved: 0,
        reason: reason as u8,
        hook: Hook::Packet as u8,
        protocol: packet.key.protocol,
        padding: 0,
        comm: [0; 16],
    });
}
