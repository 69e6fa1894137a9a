//! Packets to an endpoint that the programs at sockets have chosen. Their destination may also be a VIP, for example
//! the external IP of another service. The packet path does not translate it again, as netfilter translates a flow
//! once: otherwise the other service would take the connections of the service whose endpoint has the address.

use core::ptr::{from_ref, null_mut, read_volatile};

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_get_socket_cookie, bpf_sk_storage_get},
};
use dataplane_common::{
    packet::FlowKey,
    tables::{Peer, PeerSets, UdpFlows, flow_owner},
};

use super::{skb::Skb, sockets};
use crate::{
    sets::{find, place_of},
    socket::flows,
    tables::{FLOWS, MORE_PEERS},
};

/// Whether the packet's own socket sends it, and got this destination instead of a VIP. A packet from another machine
/// or from a virtual machine has no socket here.
#[inline(always)]
pub fn is_destination(skb: Skb, key: &FlowKey) -> bool {
    packet_is_to_chosen(skb.0, key) != 0
}

/// [`is_destination`]. With external linkage, as in `table.rs`.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_is_to_chosen(skb: *mut __sk_buff, key: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    match unsafe { key.as_ref() } {
        Some(key) => u32::from(has_chosen(Skb(skb), key)),
        None => 0,
    }
}

#[inline(always)]
fn has_chosen(skb: Skb, key: &FlowKey) -> bool {
    // SAFETY: the program's context.
    let cookie = unsafe { bpf_get_socket_cookie(skb.0.cast()) };
    if cookie == 0 {
        return false;
    }
    if is_to(place_of::<PeerSets>(cookie), key) {
        return true;
    }
    let kept = find::<PeerSets>(flow_owner(cookie), |flow| is_to(flow, key));
    if !kept.is_null() {
        return true;
    }
    let sk = sockets::sender(skb);
    if sk.is_null() {
        return false;
    }
    // SAFETY: the tables' elements live as long as the socket, which lives as long as its packet.
    unsafe {
        let kept = bpf_sk_storage_get(
            from_ref(&MORE_PEERS).cast_mut().cast(),
            sk.cast(),
            null_mut(),
            0,
        );
        if is_to(kept.cast(), key) {
            return true;
        }
        let flows: *mut UdpFlows =
            bpf_sk_storage_get(from_ref(&FLOWS).cast_mut().cast(), sk.cast(), null_mut(), 0).cast();
        !flows.is_null() && flows::has_endpoint(flows, key.dst, key.dst_port)
    }
}

/// Whether a recorded endpoint is the packet's destination. `kept` may be null.
#[inline(always)]
fn is_to(kept: *const Peer, key: &FlowKey) -> bool {
    if kept.is_null() {
        return false;
    }
    // SAFETY: not null, and an element of ours.
    unsafe {
        let port = read_volatile(&raw const (*kept).endpoint_port);
        port == key.dst_port && read_volatile(&raw const (*kept).endpoint) == key.dst
    }
}
