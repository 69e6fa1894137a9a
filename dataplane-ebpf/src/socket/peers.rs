//! The VIPs that connected sockets were connected to.
//!
//! In a table of sets by socket cookie, whose places are freed when their sockets are closed
//! ([`release`]): nothing is pushed out, and nothing is left behind. If a socket's set is full, its
//! VIP is in the socket's own storage, which is never full but takes two allocations and as many RCU
//! callbacks: 0.6 µs of a `connect()` of 15 (`cargo xtask bench socket`).
//!
//! A socket that has a place is not looked for in its storage. All calls here but [`release`] hold
//! the socket's lock, and nobody else has the socket when it is released: so only the taking of
//! a free place is a race, with other sockets.

use core::ptr::{self, read_volatile, write_volatile};

use aya_ebpf::{
    EbpfContext,
    helpers::generated::bpf_get_socket_cookie,
    programs::{SockAddrContext, SockContext},
};
use dataplane_common::{
    Addr, Port, Reason,
    tables::{PEER_WAYS, Peer, PeerSet},
};

use super::{Family, GO_ON, SockAddr};
use crate::{
    atomic,
    select::count,
    tables::{MORE_PEERS, PEERS},
};

/// Keeps the VIP of a socket that is being connected.
#[inline(always)]
pub fn remember<F: Family>(call: &SockAddr<F>, peer: &Peer) {
    let cookie = cookie(&call.ctx);
    let mut kept = place_of(cookie);
    if kept.is_null() {
        kept = take_place(cookie);
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
pub fn release(ctx: &SockContext) -> i32 {
    let cookie = cookie(ctx);
    let set = set_of(cookie);
    if set.is_null() {
        return GO_ON;
    }
    for way in 0..PEER_WAYS {
        let owner = owner(set, way);
        // SAFETY: within the set.
        unsafe {
            if read_volatile(owner) == cookie {
                write_volatile(owner, 0);
            }
        }
    }
    GO_ON
}

#[inline(always)]
fn cookie(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the program's context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn find(ctx: &SockAddrContext) -> *mut Peer {
    let kept = place_of(cookie(ctx));
    if !kept.is_null() {
        return kept;
    }
    // SAFETY: `sk` of our hooks is a full socket.
    unsafe { MORE_PEERS.get_ptr_mut(ctx) }
}

/// The place of a socket, or null.
#[inline(always)]
pub fn place_of(cookie: u64) -> *mut Peer {
    let set = set_of(cookie);
    if set.is_null() {
        return ptr::null_mut();
    }
    for way in 0..PEER_WAYS {
        // SAFETY: within the set.
        if unsafe { read_volatile(owner(set, way)) } == cookie {
            return place(set, way);
        }
    }
    ptr::null_mut()
}

/// A free place for a socket that has none, or null.
#[inline(always)]
fn take_place(cookie: u64) -> *mut Peer {
    let set = set_of(cookie);
    if set.is_null() {
        return ptr::null_mut();
    }
    for way in 0..PEER_WAYS {
        let owner = owner(set, way);
        // SAFETY: within the set, aligned to eight bytes.
        unsafe {
            if read_volatile(owner) == 0 && atomic::compare_exchange(owner, 0, cookie) == 0 {
                return place(set, way);
            }
        }
    }
    ptr::null_mut()
}

#[inline(always)]
fn set_of(cookie: u64) -> *mut PeerSet {
    PEERS
        .get_ptr_mut(PeerSet::of(cookie))
        .unwrap_or(ptr::null_mut())
}

/// Whose a place is. `way` is below [`PEER_WAYS`].
#[inline(always)]
fn owner(set: *mut PeerSet, way: usize) -> *mut u64 {
    // SAFETY: within the set; only an address is computed.
    unsafe { (&raw mut (*set).sockets).cast::<u64>().add(way) }
}

/// What is kept there. `way` is below [`PEER_WAYS`].
#[inline(always)]
fn place(set: *mut PeerSet, way: usize) -> *mut Peer {
    // SAFETY: within the set; only an address is computed.
    unsafe { (&raw mut (*set).peers).cast::<Peer>().add(way) }
}
