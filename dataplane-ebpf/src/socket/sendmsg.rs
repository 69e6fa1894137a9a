//! `sendto()` and `sendmsg()` with an address, on a UDP socket: each datagram is decided on its
//! own, but a socket that sends to the same VIP again keeps its endpoint while that is in the pool,
//! as a conntrack entry would.

use dataplane_common::{Hook, Reason, decide, tables::Endpoint};

use super::{Family, GO_ON, REFUSED, SockAddr, config, events, flows, siblings};
use crate::{
    capture::{datagrams, outbound},
    select::{self, Live, Verdict, count},
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
    if siblings::are_possible(call) && is_answer(call) {
        count(Reason::NotService);
        return GO_ON;
    }
    let answer = serve(call);
    if answer & NEW != 0 {
        siblings::note_asking(call);
    }
    answer & !NEW
}

/// [`serve`]: the socket has a flow that it did not have before.
const NEW: i32 = 2;

/// Whether what is at the destination has asked. The socket then has it as its own endpoint, so that its packets are not
/// translated later.
#[inline(never)]
fn is_answer<F: Family>(call: &SockAddr<F>) -> bool {
    let Some(request) = call.request() else {
        return false;
    };
    if !siblings::was_asked(call, &request) {
        return false;
    }
    let itself = Endpoint::new(request.addr, request.port);
    flows::remember(call, &request.peer(&itself));
    true
}

/// Not inlined, as [`judge`] is not: the variables of both do not fit on the stack.
#[inline(never)]
fn serve<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    let used = flows::endpoint_for(call, request.addr, request.port);
    let mut verdict = select::decide(&request, &used, false);
    let mesh = config().map_or(0, |config| config.mesh);
    if mesh != 0 && verdict.reason != Reason::NotService && outbound::stays(&request) {
        verdict = Verdict::without_endpoint(Reason::NotService, 0);
    }
    events::report(call, Hook::Sendmsg, &request, &verdict);
    let mut is_new = false;
    if !verdict.endpoint.is_none() {
        is_new = flows::remember(call, &request.peer(&verdict.endpoint));
    }
    let answer = call.carry_out(&verdict);
    if is_new { answer | NEW } else { answer }
}

/// See [`serve`].
#[inline(never)]
fn judge<F: Family>(call: &SockAddr<F>, mesh: u64) -> i32 {
    call.request().map_or(GO_ON, |request| {
        datagrams::judge(call, &request, mesh, Hook::Sendmsg)
    })
}
