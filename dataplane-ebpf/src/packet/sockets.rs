//! Looks up sockets of the node, which use ports, too.

use core::ptr::read_volatile;

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_tuple},
    helpers::generated::{bpf_sk_fullsock, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use dataplane_common::{Addr, Protocol, packet::FlowKey};

use super::{conntrack::Flow, rewrite::ports_word, skb::Skb};
use crate::packet::conntrack::node_addr;

/// The network namespace of the interface (`BPF_F_CURRENT_NETNS`).
const CURRENT_NETNS: u64 = u64::MAX;
/// TCP's number, as a socket has it.
const TCP: u32 = 6;

/// The addresses and ports of a packet to a socket of the node.
#[repr(C)]
struct Tuple {
    /// As `struct bpf_sock_tuple`: source, destination, ports.
    words: [u32; 9],
    size: u32,
}

impl Tuple {
    #[inline(always)]
    fn new(src: &Addr, dst: &Addr, ports: u32) -> Self {
        let is_v4 = src.is_v4();
        let (src, dst) = (src.words(), dst.words());
        if is_v4 {
            return Self {
                words: [src[3], dst[3], ports, 0, 0, 0, 0, 0, 0],
                size: 12,
            };
        }
        Self {
            words: [
                src[0], src[1], src[2], src[3], dst[0], dst[1], dst[2], dst[3], ports,
            ],
            size: 36,
        }
    }
}

/// Returns the socket that sends the packet, or null. A packet from another machine has no socket here, and one from a
/// virtual machine has that of its interface.
#[inline(always)]
pub fn sender(skb: Skb) -> *mut bpf_sock {
    // SAFETY: a field of the context, checked for null before its use.
    unsafe {
        let sk = read_volatile(&raw const (*skb.0).__bindgen_anon_2.sk);
        if sk.is_null() {
            sk
        } else {
            bpf_sk_fullsock(sk)
        }
    }
}

/// Whether a TCP socket of a pod sends the packet.
#[inline(always)]
pub fn is_sent_by_tcp(skb: Skb) -> bool {
    let sk = sender(skb);
    // SAFETY: a field of the socket.
    !sk.is_null() && unsafe { read_volatile(&raw const (*sk).protocol) } == TCP
}

/// Whether a socket of the node would receive the endpoint's packets to the flow's port: a socket that is connected to
/// the endpoint from there, or that is bound to the port.
#[inline(never)]
pub fn has_one(skb: Skb, flow: &Flow) -> bool {
    let ports = ports_word(flow.endpoint_port, flow.node_port);
    let mut tuple = Tuple::new(&flow.endpoint, &node_addr(flow.node_addr), ports);
    // SAFETY: the program's context, as much of the stack as we say, and a socket that is released.
    unsafe {
        let words = (&raw mut tuple.words).cast::<bpf_sock_tuple>();
        if flow.forward.protocol == Protocol::TCP {
            // Also finds a socket that is not a full one yet, or no longer.
            let sk = bpf_skc_lookup_tcp(skb.0.cast(), words, tuple.size, CURRENT_NETNS, 0);
            if sk.is_null() {
                return false;
            }
            bpf_sk_release(sk.cast());
        } else {
            let sk = bpf_sk_lookup_udp(skb.0.cast(), words, tuple.size, CURRENT_NETNS, 0);
            if sk.is_null() {
                return false;
            }
            bpf_sk_release(sk.cast());
        }
    }
    true
}

/// Whether a UDP socket of the node is connected to the sender of a datagram, from the datagram's destination.
#[inline(never)]
pub fn is_connected(skb: Skb, key: &FlowKey) -> bool {
    let mut tuple = Tuple::new(&key.src, &key.dst, ports_word(key.src_port, key.dst_port));
    // SAFETY: as above; a field of the socket.
    unsafe {
        let words = (&raw mut tuple.words).cast::<bpf_sock_tuple>();
        let sk = bpf_sk_lookup_udp(skb.0.cast(), words, tuple.size, CURRENT_NETNS, 0);
        if sk.is_null() {
            return false;
        }
        // The lookup does not find a socket that is connected to another peer.
        let port = read_volatile(&raw const (*sk).dst_port);
        bpf_sk_release(sk.cast());
        port != 0
    }
}
