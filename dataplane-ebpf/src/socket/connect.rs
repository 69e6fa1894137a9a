//! `connect()`: the VIP is replaced by an endpoint before the kernel routes or sends anything.

use dataplane_common::{
    Hook, Port, Protocol, Reason,
    tables::{Endpoint, Peer},
};

use super::{Family, GO_ON, SockAddr, events, flows};
use crate::{
    select::{count, decide},
    tables::PEERS,
};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    let verdict = decide(&request, &Endpoint::NONE);
    events::report(call, Hook::Connect, &request, &verdict);
    if verdict.reason == Reason::NotService {
        forget_peer(call);
        if request.protocol == Protocol::UDP {
            flows::forget(call);
        }
    } else if !verdict.endpoint.is_none() {
        remember_peer(call, &request.peer(&verdict.endpoint));
    }
    call.carry_out(&verdict)
}

/// Keeps the VIP for `getpeername` and `recvmsg`, in the socket's own storage.
#[inline(always)]
fn remember_peer<F: Family>(call: &SockAddr<F>, peer: &Peer) {
    // SAFETY: `sk` of a connect hook is a full socket.
    let kept = unsafe { PEERS.get_or_insert_ptr_mut(&call.ctx, None) };
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
fn forget_peer<F: Family>(call: &SockAddr<F>) {
    // SAFETY: `sk` of a connect hook is a full socket.
    let kept = unsafe { PEERS.get_ptr_mut(&call.ctx) };
    if !kept.is_null() {
        // SAFETY: the socket's own element, not null. No endpoint has port 0, so this matches none.
        unsafe { (*kept).endpoint_port = Port::ANY };
    }
}
