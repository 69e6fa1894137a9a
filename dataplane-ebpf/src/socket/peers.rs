//! The VIPs that connected sockets were connected to.
//!
//! In a table of [sets](crate::sets), whose places are freed when their sockets are closed
//! ([`release`]): nothing is pushed out. The kernel does not tell of its own sockets that they are closed (`inet_release`
//! in `net/ipv4/af_inet.c`): those of NFS, and the subflows of MPTCP. Their places the agent frees, some minutes later
//! (`kernel/sockets/sweep.rs` in `dataplane-user`). If a socket's set is full, its
//! VIP is in the socket's own storage, which is never full but takes two allocations and as many RCU
//! callbacks: 0.6 µs of a `connect()` of 15 (`cargo xtask bench socket`).
//!
//! Most who ask have no VIP: whoever has accepted a connection asks for its peer, and closes its socket. So there
//! is a bit for each port that an endpoint of one of these sockets has ever had; a client's port is hardly
//! ever one. It must be asked for the port that the socket is connected to, and for none if it is not.
//!
//! A socket that has a place is not looked for in its storage. All calls here but [`release`] hold
//! the socket's lock, and nobody else has the socket when it is released.

use core::ptr::read_volatile;

use aya_ebpf::{
    EbpfContext,
    helpers::generated::bpf_get_socket_cookie,
    programs::{SockAddrContext, SockContext},
};
use dataplane_common::{
    Addr, Port, Reason,
    tables::{Peer, PeerSets},
};

use super::{Family, SockAddr};
use crate::{
    atomic,
    select::count,
    sets::{free_place, place_of, take_place},
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
    mark(peer.endpoint_port);
    // SAFETY: the socket's own place or element, not null.
    unsafe { *kept = *peer };
}

/// A socket that was connected to a VIP before, and now is to something else, has that as its peer.
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

/// If `addr` and `port` are those of the endpoint that the socket is connected to, replaces them by
/// the VIP that was asked for. Says whether it did.
///
/// The kernel's answer is compared, so that a socket which was connected elsewhere since, in a way
/// we did not see, is told the truth.
#[inline(always)]
pub fn translate<F: Family>(call: &SockAddr<F>, addr: Addr, port: Port) -> bool {
    if !is_marked(port) {
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

/// A socket is closed for good: its place is free. (One that was connected elsewhere since while none of our
/// programs was attached may keep it.)
#[inline(always)]
pub fn release(ctx: &SockContext) {
    // SAFETY: a field of the context, in network order.
    let port = unsafe { read_volatile(&raw const (*ctx.sock).dst_port) };
    let port = Port::from_be(port as u16);
    if port == Port::ANY || is_marked(port) {
        free_place::<PeerSets>(cookie(ctx));
    }
}

/// Where a port's bit is, and which it is.
#[inline(always)]
fn bit(port: Port) -> (Option<*mut u64>, u64) {
    let port = u32::from(port.host());
    (PEER_PORTS.get_ptr_mut(port / 64), 1 << (port % 64))
}

/// Says that an endpoint has a port.
#[inline(always)]
fn mark(port: Port) {
    let (word, bit) = bit(port);
    if let Some(word) = word {
        // SAFETY: an aligned word of an array, whose elements stay.
        unsafe {
            if read_volatile(word) & bit == 0 {
                atomic::set(word, bit);
            }
        }
    }
}

/// Whether an endpoint may have a port.
#[inline(always)]
fn is_marked(port: Port) -> bool {
    let (word, bit) = bit(port);
    // SAFETY: as in `mark`.
    word.is_none_or(|word| unsafe { read_volatile(word) } & bit != 0)
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
