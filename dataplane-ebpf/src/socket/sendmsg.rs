//! `sendto()` and `sendmsg()` with an address, on a UDP socket: each datagram is decided on its
//! own, but a socket that sends to the same VIP again keeps its endpoint while that is in the pool,
//! as a conntrack entry would.

use dataplane_common::{Hook, Reason, decide};

use super::{Family, GO_ON, REFUSED, SockAddr, config, events, flows};
use crate::{
    capture::datagrams,
    select::{self, Live, count},
};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let mesh = config().map_or(0, |config| config.mesh);
    if datagrams::are_judged(mesh) && judge(call, mesh) != GO_ON {
        return REFUSED;
    }
    // Nearly all that a server answers, and so worth a way of its own.
    if !decide::may_be_served(&Live, call.addr()) && !crate::events::wanted() {
        count(Reason::NotService);
        return GO_ON;
    }
    serve(call)
}

/// Not inlined, as [`judge`] is not: the variables of both do not fit on the stack.
#[inline(never)]
fn serve<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    let used = flows::endpoint_for(call, request.addr, request.port);
    let verdict = select::decide(&request, &used, false);
    events::report(call, Hook::Sendmsg, &request, &verdict);
    if !verdict.endpoint.is_none() {
        flows::remember(call, &request.peer(&verdict.endpoint));
    }
    call.carry_out(&verdict)
}

/// See [`serve`].
#[inline(never)]
fn judge<F: Family>(call: &SockAddr<F>, mesh: u64) -> i32 {
    call.request().map_or(GO_ON, |request| {
        datagrams::judge(call, &request, mesh, Hook::Sendmsg)
    })
}
