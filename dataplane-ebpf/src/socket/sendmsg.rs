//! `sendto()` and `sendmsg()` with an address, on a UDP socket: the program decides about each datagram on its own, but
//! a socket that sends to the same VIP again keeps its endpoint while the endpoint is in the pool, as with a conntrack
//! entry.

use dataplane_common::{Hook, Reason, decide, tables::Endpoint};

use super::{Family, GO_ON, REFUSED, SockAddr, config, events, flows, peers, siblings};
use crate::{
    capture::{datagrams, outbound},
    select::{self, Live, Request, Verdict, count},
};

/// The steps do not call each other: the frames of all would not fit the stack at once.
#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let mesh = config().map_or(0, |config| config.mesh);
    let Some(request) = call.request() else {
        return GO_ON;
    };
    if peers::is_endpoint(call) {
        count(Reason::NotService);
        return GO_ON;
    }
    let mut goes = GO_ON;
    if datagrams::are_judged(mesh) {
        goes = datagrams::judge::<F, true>(call, &request, mesh);
        if goes == REFUSED {
            return REFUSED;
        }
        if goes == datagrams::CAPTURED {
            return GO_ON;
        }
    }
    let is_judged = goes == datagrams::JUDGED;
    // A shortcut for nearly all answers of a server.
    if !is_judged && !decide::may_be_served(&Live, call.addr()) && !crate::events::wanted() {
        count(Reason::NotService);
        return GO_ON;
    }
    let answers = goes == datagrams::ANSWERS;
    if answers && goes_itself(call) || siblings::are_possible(call) && is_answer(call) {
        count(Reason::NotService);
        return GO_ON;
    }
    let mut verdict = Verdict::without_endpoint(Reason::NotService, 0);
    find_used(call, &request, &mut verdict);
    select::decide(&request, false, &mut verdict);
    if mesh != 0 && verdict.reason != Reason::NotService && outbound::stays(&request) {
        verdict = Verdict::without_endpoint(Reason::NotService, 0);
    }
    if is_judged && !outbound::admits(&request, &verdict) {
        verdict = Verdict::DENIED;
    }
    let answer = carry_out(call, &request, &verdict);
    if answer & NEW != 0 {
        siblings::note_asking(call);
    }
    answer & !NEW
}

/// [`carry_out`]: the socket has a new flow.
const NEW: i32 = 2;

/// Whether the destination has asked the socket. If so, records the destination as the socket's own endpoint, so that
/// its packets are not translated later.
#[inline(never)]
fn is_answer<F: Family>(call: &SockAddr<F>) -> bool {
    let Some(request) = call.request() else {
        return false;
    };
    if !siblings::was_asked(call, &request) {
        return false;
    }
    remember_itself(call, &request);
    true
}

/// Records the destination as the socket's own endpoint: no service translates packets that the socket sends there.
#[inline(never)]
fn goes_itself<F: Family>(call: &SockAddr<F>) -> bool {
    if let Some(request) = call.request() {
        remember_itself(call, &request);
    }
    true
}

#[inline(always)]
fn remember_itself<F: Family>(call: &SockAddr<F>, request: &Request) {
    let itself = Endpoint::new(request.addr, request.port);
    flows::remember(call, &request.peer(&itself));
}

/// Not inlined, as the other steps are not: the variables of all do not fit on the stack.
#[inline(never)]
fn find_used<F: Family>(call: &SockAddr<F>, request: &Request, verdict: &mut Verdict) {
    verdict.endpoint = flows::endpoint_for(call, request.addr, request.port);
}

/// See [`find_used`].
#[inline(never)]
fn carry_out<F: Family>(call: &SockAddr<F>, request: &Request, verdict: &Verdict) -> i32 {
    events::report(call, Hook::Sendmsg, request, verdict);
    let mut is_new = false;
    if !verdict.endpoint.is_none() {
        is_new = flows::remember(call, &request.peer(&verdict.endpoint));
    }
    let answer = call.carry_out(verdict);
    if is_new { answer | NEW } else { answer }
}
