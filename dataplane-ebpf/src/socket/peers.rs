//! The VIPs that connected sockets were connected to.
//!
//! In a preallocated hash by socket cookie, whose elements go when their sockets do ([`release`]):
//! nothing is pushed out, and nothing is left behind. If it is full, a socket's VIP is in the
//! socket's own storage, which is never full but takes two allocations and as many RCU callbacks:
//! 0.6 µs of a `connect()` of 15 (`cargo xtask bench socket`).
//!
//! A socket that is in the hash is not looked for in its storage.

use aya_ebpf::{
    EbpfContext,
    helpers::generated::bpf_get_socket_cookie,
    programs::{SockAddrContext, SockContext},
};
use dataplane_common::{Addr, Port, Reason, tables::Peer};

use super::{Family, GO_ON, SockAddr};
use crate::{
    select::count,
    tables::{MORE_PEERS, PEERS},
};

#[inline(always)]
fn cookie(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the program's context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// Keeps the VIP of a socket that is being connected.
#[inline(always)]
pub fn remember<F: Family>(call: &SockAddr<F>, peer: &Peer) {
    if PEERS.insert(cookie(&call.ctx), peer, 0).is_ok() {
        return;
    }
    // SAFETY: `sk` of a connect hook is a full socket.
    let kept = unsafe { MORE_PEERS.get_or_insert_ptr_mut(&call.ctx, None) };
    if kept.is_null() {
        count(Reason::PeerNotKept);
        return;
    }
    // SAFETY: the socket's own element, not null. A `connect` that races with another on the same
    // socket is the caller's race, as it is without us.
    unsafe { *kept = *peer };
}

/// A socket that was connected to a VIP before, and now is to something else, has that as its peer.
#[inline(always)]
pub fn forget<F: Family>(call: &SockAddr<F>) {
    let kept = find(&call.ctx);
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
    let kept = find(&call.ctx);
    if kept.is_null() {
        return false;
    }
    // SAFETY: the socket's element, not null; it stays while the socket does, which is at least as
    // long as this call.
    let peer = unsafe { *kept };
    if peer.endpoint_port != port || peer.endpoint != addr {
        return false;
    }
    call.set(peer.vip, peer.vip_port);
    true
}

#[inline(always)]
fn find(ctx: &SockAddrContext) -> *mut Peer {
    match PEERS.get_ptr_mut(cookie(ctx)) {
        Some(kept) => kept,
        // SAFETY: `sk` of our hooks is a full socket.
        None => unsafe { MORE_PEERS.get_ptr_mut(ctx) },
    }
}

/// A socket is closed for good.
#[inline(always)]
pub fn release(ctx: &SockContext) -> i32 {
    // That most sockets are not there is no error.
    let _ = PEERS.remove(cookie(ctx));
    GO_ON
}
