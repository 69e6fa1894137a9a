//! The VIPs that connected sockets were connected to. (Unconnected UDP sockets: [`super::flows`].)
//!
//! In a table of [sets](crate::sets), whose places are freed when their sockets are closed ([`release`]): nothing is
//! evicted. The kernel does not report the end of its own sockets (`inet_release` in `net/ipv4/af_inet.c`): those of
//! NFS, and the subflows of MPTCP. The agent frees their places some minutes later (`kernel/sockets/sweep.rs` in
//! `dataplane-user`). If a socket's set is full, its VIP is in the socket's own storage, which is never full but takes
//! two allocations and as many RCU callbacks: 0.6 µs of a `connect()` of 15 (`cargo xtask bench socket`).
//!
//! Most callers have no VIP: a server that has accepted a connection asks for its peer, and closes its socket. So there
//! is a bit for each port that an endpoint of one of these sockets has ever had; a client's port hardly ever has the
//! bit. The bit to look at is that of the port to which the socket is connected; a socket that is not connected has
//! none.
//!
//! A socket that has a place is not looked for in its storage. All calls here except [`release`] hold the socket's
//! lock, and a released socket has no other user.

use core::ptr::{from_ref, null_mut, read_volatile};

use aya_ebpf::{
    EbpfContext,
    helpers::generated::{bpf_get_socket_cookie, bpf_sk_storage_get, bpf_skc_to_mptcp_sock},
    programs::{SockAddrContext, SockContext},
};
use dataplane_common::{
    Addr, Port, Protocol, Reason,
    tables::{Peer, PeerSets},
};

use super::{Family, SockAddr, ports};
use crate::{
    capture::tcp::CREATE,
    select::count,
    sets::{free_all, free_place, place_of, take_place},
    tables::{MORE_PEERS, PEER_PORTS},
};

/// Keeps the VIP of a socket that is being connected.
#[inline(always)]
pub fn remember<F: Family>(call: &SockAddr<F>, peer: &Peer) {
    let cookie = cookie(&call.ctx);
    let mut kept = place_of::<PeerSets>(cookie);
    if kept.is_null() {
        kept = take_place::<PeerSets>(cookie);
    }
    if kept.is_null() {
        // SAFETY: `sk` of a connect hook is a full socket.
        kept = unsafe { MORE_PEERS.get_or_insert_ptr_mut(&call.ctx, None) };
    }
    if kept.is_null() {
        count(Reason::PeerNotKept);
        return;
    }
    ports::mark(&PEER_PORTS, peer.endpoint_port);
    // SAFETY: the socket's own place or element, not null.
    unsafe { *kept = *peer };
}

/// Whether the kernel has MPTCP: the agent writes it before it loads the programs. The verifier of a kernel without
/// MPTCP does not know the helper's type, but removes the call as dead code.
#[unsafe(no_mangle)]
static MPTCP: u32 = 0;

/// Keeps the VIP for the MPTCP socket whose subflow is being connected: a process asks this socket for its peer. (Later
/// subflows go to addresses that the endpoint has named.)
#[inline(always)]
pub fn remember_for_mptcp<F: Family>(call: &SockAddr<F>, peer: &Peer) {
    // SAFETY: a constant.
    if unsafe { read_volatile(&raw const MPTCP) } == 0 {
        return;
    }
    // SAFETY: a field of the context, which is never null in our hooks. The kernel's answer is checked before its use, and is
    // the socket that the subflow belongs to, which lives at least as long.
    unsafe {
        let sk = read_volatile(&raw const (*call.ctx.sock_addr).__bindgen_anon_1.sk);
        let whole = bpf_skc_to_mptcp_sock(sk.cast());
        if whole.is_null() {
            return;
        }
        let storage = from_ref(&MORE_PEERS).cast_mut().cast();
        let kept: *mut Peer = bpf_sk_storage_get(storage, whole.cast(), null_mut(), CREATE).cast();
        if kept.is_null() {
            count(Reason::PeerNotKept);
        } else {
            *kept = *peer;
        }
    }
}

/// Forgets the VIP of a socket that is now connected to another destination, which becomes its peer.
#[inline(always)]
pub fn forget<F: Family>(call: &SockAddr<F>) {
    if free_place::<PeerSets>(cookie(&call.ctx)) {
        return;
    }
    // SAFETY: `sk` of our hooks is a full socket.
    let kept = unsafe { MORE_PEERS.get_ptr_mut(&call.ctx) };
    if !kept.is_null() {
        // SAFETY: the socket's element, not null. No endpoint has port 0, so this matches none.
        unsafe { (*kept).endpoint_port = Port::ANY };
    }
}

/// If `addr` and `port` are those of the endpoint that the socket is connected to, replaces them by the VIP that was
/// asked for. Returns whether it did.
///
/// The kernel's answer is compared. So a socket that was connected elsewhere since, without our programs, gets its real
/// peer.
#[inline(always)]
pub fn translate<F: Family>(call: &SockAddr<F>, addr: Addr, port: Port) -> bool {
    if !ports::has(&PEER_PORTS, port) {
        return false;
    }
    let kept = find(&call.ctx);
    if kept.is_null() {
        return false;
    }
    // SAFETY: the socket's place, not null; it stays while the socket does, which is at least as
    // long as this call.
    let peer = unsafe { *kept };
    if peer.endpoint_port != port || peer.endpoint != addr {
        return false;
    }
    call.set(peer.vip, peer.vip_port);
    true
}

/// Whether the socket is connected to a VIP, and sends to the endpoint that was chosen for the VIP then. The kernel calls the
/// hook for each `send()` of a connected IPv6 socket whose peer is an IPv4 address (`udpv6_sendmsg` in `net/ipv6/udp.c`).
#[inline(always)]
pub fn is_endpoint<F: Family>(call: &SockAddr<F>) -> bool {
    let port = call.port();
    if !call.is_connected() || !ports::has(&PEER_PORTS, port) {
        return false;
    }
    let kept = find(&call.ctx);
    // SAFETY: checked for null; the socket's place stays while the socket does.
    !kept.is_null() && unsafe { (*kept).endpoint_port == port && (*kept).endpoint == call.addr() }
}

/// Frees the places of a socket that is closed for good. (A socket that was connected elsewhere while none of our
/// programs was attached may keep its place, and so may one that was connected while another thread sent its first
/// datagram.)
#[inline(always)]
pub fn release(ctx: &SockContext) {
    // SAFETY: fields of the context; the port is in network order.
    let (port, protocol) = unsafe {
        (
            read_volatile(&raw const (*ctx.sock).dst_port),
            read_volatile(&raw const (*ctx.sock).protocol),
        )
    };
    let port = Port::from_be(port);
    if port != Port::ANY && !ports::has(&PEER_PORTS, port) {
        return;
    }
    if protocol == u32::from(Protocol::UDP.number()) {
        free_all::<PeerSets>(cookie(ctx));
    } else {
        free_place::<PeerSets>(cookie(ctx));
    }
}

#[inline(always)]
fn cookie(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the program's context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn find(ctx: &SockAddrContext) -> *mut Peer {
    let kept = place_of::<PeerSets>(cookie(ctx));
    if !kept.is_null() {
        return kept;
    }
    // SAFETY: `sk` of our hooks is a full socket.
    unsafe { MORE_PEERS.get_ptr_mut(ctx) }
}
