//! `connect()`: replaces the VIP by an endpoint before the kernel routes or sends anything.

use dataplane_common::{Hook, Protocol, Reason, capture::is_proxy, tables::Endpoint};

use super::{Family, GO_ON, SockAddr, config, events, flows, peers, siblings};
use crate::{
    capture::{caller, meters, outbound},
    select::{self, Request, Verdict},
};

/// The steps do not call each other: the frames of all would not fit the stack at once.
#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    let may_have_siblings = siblings::are_possible(call);
    if may_have_siblings && request.protocol == Protocol::UDP && siblings::was_asked(call, &request)
    {
        let verdict = Verdict::without_endpoint(Reason::NotService, 0);
        if outbound::refusal(&request, &verdict).is_some() {
            return carry_out(call, &request, &Verdict::DENIED);
        }
        goes_itself(call, &request);
        return GO_ON;
    }
    let mesh = config().map_or(0, |config| config.mesh);
    if mesh != 0 && caller::is_proxys_own(call.ctx.sock_addr) {
        // The proxy has chosen the endpoint: no service that claims its address translates it again, here or by packets.
        goes_itself(call, &request);
        return GO_ON;
    }
    let mut verdict = Verdict::without_endpoint(Reason::NotService, 0);
    // In the node's own namespace, where the agent is.
    let only_cluster_ips = request.own_loopback && call.is_of_agent();
    select::decide(&request, only_cluster_ips, &mut verdict);
    if mesh != 0 && verdict.reason != Reason::NotService && outbound::stays(&request) {
        verdict = Verdict::without_endpoint(Reason::NotService, 0);
    }
    if siblings::is_bound(call) && !verdict.endpoint.is_none() {
        siblings::keep_apart(call, &request, &mut verdict);
    }
    if mesh != 0
        && let Some(reason) = outbound::refusal(&request, &verdict)
    {
        verdict = Verdict::without_endpoint(reason, 0);
    }
    carry_out(call, &request, &verdict)
}

/// Records the destination as the socket's own endpoint, so that its packets are not translated later.
#[inline(never)]
fn goes_itself<F: Family>(call: &SockAddr<F>, request: &Request) {
    let itself = Endpoint::new(request.addr, request.port);
    peers::remember(call, &request.peer(&itself));
}

#[inline(never)]
fn carry_out<F: Family>(call: &SockAddr<F>, request: &Request, verdict: &Verdict) -> i32 {
    events::report(call, Hook::Connect, request, verdict);
    // Counts before it keeps the record, so that counting does not wait until the record is in the caches: an atomic
    // operation waits for every store before it.
    let answer = call.carry_out(verdict);
    let mesh = config().map_or(0, |config| config.mesh);
    if verdict.reason == Reason::NotService {
        // For a captured connection, the record of the capturing program before this one is right.
        if mesh == 0 || !is_proxy(mesh, request.addr, request.port) {
            peers::forget(call);
        }
        if request.protocol == Protocol::UDP {
            flows::forget(call);
        }
    } else if !verdict.endpoint.is_none() {
        let peer = request.peer(&verdict.endpoint);
        peers::remember(call, &peer);
        if request.protocol == Protocol::TCP {
            peers::remember_for_mptcp(call, &peer);
        }
    }
    let is_denied = matches!(
        verdict.reason,
        Reason::EgressDenied | Reason::PlaintextRefused
    );
    let may_be_metered = verdict.pool != 0 || is_denied;
    if mesh != 0 && may_be_metered && request.protocol == Protocol::TCP {
        if verdict.endpoint.is_none() {
            meters::forget(call.ctx.sock_addr);
        } else {
            meters::ask_for(call.ctx.sock_addr, verdict.pool);
        }
    }
    answer
}
