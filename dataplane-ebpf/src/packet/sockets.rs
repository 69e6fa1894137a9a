//! Sockets of the node, which have ports, too.

use aya_ebpf::{
    bindings::bpf_sock_tuple,
    helpers::generated::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use dataplane_common::Protocol;

use super::{conntrack::Flow, rewrite::ports_word, skb::Skb};
use crate::packet::conntrack::node_addr;

/// The network namespace of the interface (`BPF_F_CURRENT_NETNS`).
const CURRENT_NETNS: u64 = u64::MAX;

/// Whether a socket of the node would be given what the flow's endpoint sends to the flow's port: one that is connected
/// to the endpoint from there, or one that is bound to the port.
#[inline(never)]
pub fn has_one(skb: Skb, flow: &Flow) -> bool {
    // As `struct bpf_sock_tuple`: source, destination, ports.
    let mut tuple = [0_u32; 9];
    let (src, dst) = (flow.endpoint.words(), node_addr(flow.node_addr).words());
    let ports = ports_word(flow.endpoint_port, flow.node_port);
    let size = if flow.forward.src.is_v4() {
        tuple[0] = src[3];
        tuple[1] = dst[3];
        tuple[2] = ports;
        12
    } else {
        tuple = [
            src[0], src[1], src[2], src[3], dst[0], dst[1], dst[2], dst[3], ports,
        ];
        36
    };
    // SAFETY: the program's context, as much of the stack as we say, and a socket that is released.
    unsafe {
        let tuple = (&raw mut tuple).cast::<bpf_sock_tuple>();
        if flow.forward.protocol == Protocol::TCP {
            // Also what is not a full socket yet, or any more.
            let sk = bpf_skc_lookup_tcp(skb.0.cast(), tuple, size, CURRENT_NETNS, 0);
            if sk.is_null() {
                return false;
            }
            bpf_sk_release(sk.cast());
        } else {
            let sk = bpf_sk_lookup_udp(skb.0.cast(), tuple, size, CURRENT_NETNS, 0);
            if sk.is_null() {
                return false;
            }
            bpf_sk_release(sk.cast());
        }
    }
    true
}
