//! The VIPs that connected sockets were connected to.
//!
//! In a table of [sets](crate::sets), whose places are freed when their sockets are closed
//! ([`release`]): nothing is pushed out, and nothing is left behind. If a socket's set is full, its
//! VIP is in the socket's own storage, which is never full but takes two allocations and as many RCU
//! callbacks: 0.6 µs of a `connect()` of 15 (`cargo xtask bench socket`).
//!
//! A socket that has a place is not looked for in its storage. All calls here but [`release`] hold
//! the socket's lock, and nobody else has the socket when it is released.

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
    select::count,
    sets::{free_place, place_of, take_place},
    tables::MORE_PEERS,
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
    // SAFETY: the socket's own place or element, not null.
    unsafe { *kept = *peer };
}

/// A socket that was connected to a VIP before, and now is to something else, has that as its peer.
#[inline(always)]
pub fn forget<F: Family>(call: &SockAddr<F>) {
    let kept = find(&call.ctx);
    if !kept.is_null() {
        // SAFETY: the socket's place, not null. No endpoint has port 0, so this matches none.
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

/// A socket is closed for good: its place is free.
#[inline(always)]
pub fn release(ctx: &SockContext) {
    free_place::<PeerSets>(cookie(ctx));
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
