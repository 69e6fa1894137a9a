//! Whether a socket listens for captured connections.

use aya_ebpf::{
    bindings::{bpf_sock_addr, bpf_sock_tuple},
    helpers::generated::{bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release},
};
use dataplane_common::{Addr, Port, Protocol, tables::Endpoint};

/// The network namespace of the socket (`BPF_F_CURRENT_NETNS`).
const CURRENT_NETNS: u64 = u64::MAX;

/// Whether a socket listens at an address of loopback in the socket's network namespace now: a lookup cannot be stale,
/// unlike a flag, and works for any proxy.
#[inline(always)]
pub fn listens(ctx: *mut bpf_sock_addr, protocol: Protocol, addr: Addr, port: Port) -> bool {
    let at = Endpoint::new(addr, port);
    capture_listens(ctx, u32::from(protocol == Protocol::TCP), &raw const at) != 0
}

/// [`listens`]. With external linkage, as [`capture_leads_back`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn capture_listens(ctx: *mut bpf_sock_addr, tcp: u32, at: *const Endpoint) -> u32 {
    // SAFETY: as above.
    match unsafe { at.as_ref() } {
        Some(at) => u32::from(has_socket(ctx, tcp != 0, at.addr, at.port)),
        None => 0,
    }
}

#[inline(always)]
fn has_socket(ctx: *mut bpf_sock_addr, tcp: bool, addr: Addr, port: Port) -> bool {
    // As `struct bpf_sock_tuple`: source, destination, ports.
    let mut tuple = [0u32; 9];
    let size = if addr.is_v4() {
        tuple[1] = addr.words()[3];
        tuple[2] = port_word(port);
        12
    } else {
        tuple[7] = addr.words()[3];
        tuple[8] = port_word(port);
        36
    };
    // SAFETY: the program's context, and as much of the stack as we say.
    unsafe {
        let tuple = (&raw mut tuple).cast::<bpf_sock_tuple>();
        let sk = if tcp {
            bpf_sk_lookup_tcp(ctx.cast(), tuple, size, CURRENT_NETNS, 0)
        } else {
            bpf_sk_lookup_udp(ctx.cast(), tuple, size, CURRENT_NETNS, 0)
        };
        if sk.is_null() {
            return false;
        }
        bpf_sk_release(sk.cast());
    }
    true
}

/// The ports of a `struct bpf_sock_tuple`, without a source port.
#[inline(always)]
fn port_word(port: Port) -> u32 {
    let [a, b] = port.be().to_ne_bytes();
    u32::from_ne_bytes([0, 0, a, b])
}
