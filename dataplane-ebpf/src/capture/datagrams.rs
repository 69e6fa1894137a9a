//! Datagrams of workloads: `connect()` and `sendmsg()` on UDP sockets.
//!
//! Where `egress: deny` is in force, they may go to what is known, and to whoever has asked. Queries to a workload's
//! resolvers go to the agent's DNS server, if that listens. Both hooks ask [`judge`] before the services' program has
//! changed the destination.

use dataplane_common::{
    Hook, Protocol, Reason,
    capture::{self, Enrolled, MESH_DENIES, MESH_DNS, MESH_GUARD, has_mark},
    tables::Endpoint,
};

use super::{
    askers, config,
    outbound::{self, Call, enrolled, excludes_user, is_agent, mark},
};
use crate::{
    select::{Request, Verdict, count},
    socket::{self, Family, GO_ON, SockAddr, events, flows, peers, refuse},
};

/// `connect()` of a workload: of a TCP socket, or of a UDP socket.
#[inline(always)]
pub fn connect<F: Family>(call: &SockAddr<F>) -> i32 {
    let mesh = socket::config().map_or(0, |config| config.mesh);
    if mesh == 0 {
        return GO_ON;
    }
    let Some(request) = call.request() else {
        return GO_ON;
    };
    if request.protocol == Protocol::TCP {
        outbound::run(call, &request, mesh)
    } else {
        judge(call, &request, mesh, Hook::Connect)
    }
}

/// Whether anything is asked of datagrams at all.
#[inline(always)]
pub const fn are_judged(mesh: u64) -> bool {
    mesh & MESH_DENIES != 0 || mesh >> MESH_DNS != 0
}

/// Whether anything is asked of those that arrive.
#[inline(always)]
pub const fn arrive_judged(mesh: u64) -> bool {
    mesh & MESH_DENIES != 0
}

/// Decides, and carries it out.
#[inline(always)]
pub fn judge<F: Family>(call: &SockAddr<F>, request: &Request, mesh: u64, hook: Hook) -> i32 {
    if !are_judged(mesh) {
        return GO_ON;
    }
    let reason = decide(call, request, mesh, hook);
    let is_captured = reason == Reason::CapturedDns;
    if reason == Reason::DnsBypassed {
        count(reason);
    }
    if !is_captured && !reason.is_refusal() {
        return GO_ON;
    }
    count(reason);
    let mut verdict = Verdict::without_endpoint(reason, 0);
    if is_captured {
        let (addr, port) = outbound::dns_server(mesh, request.addr.is_v4());
        verdict.endpoint = Endpoint::new(addr, port);
    }
    events::report(call, hook, request, &verdict);
    if !is_captured {
        return refuse();
    }
    let peer = request.peer(&verdict.endpoint);
    if hook as u8 == Hook::Sendmsg as u8 {
        flows::remember(call, &peer);
    } else {
        peers::remember(call, &peer);
    }
    call.set(peer.endpoint, peer.endpoint_port);
    GO_ON
}

#[inline(always)]
fn decide<F: Family>(call: &SockAddr<F>, request: &Request, mesh: u64, hook: Hook) -> Reason {
    let Some(config) = config() else {
        return Reason::NotService;
    };
    let enrolled = enrolled(request, config, mesh);
    if enrolled.is_null() {
        return if mesh & MESH_GUARD != 0 && !request.own_loopback {
            Reason::Guarded
        } else {
            Reason::NotService
        };
    }
    // SAFETY: a hash's element, freed after a grace period.
    let enrolled = unsafe { *enrolled };
    if !enrolled.is_judged() {
        return Reason::NotService;
    }
    let ctx = call.ctx.sock_addr;
    if has_mark(mark(ctx), config.mark) && is_agent(config) {
        return Reason::ProxysOwn;
    }
    let asked = Call { ctx, request };
    let to = (request.addr, request.port);
    let excludes_user = excludes_user(&enrolled);
    let reason = capture::decide_datagram(&asked, &enrolled, to, excludes_user);
    if reason == Reason::EgressDenied {
        let is_answer =
            hook as u8 == Hook::Sendmsg as u8 && askers::has(call, request.addr, request.port);
        return if is_answer {
            Reason::NotService
        } else {
            reason
        };
    }
    outbound::of_query(&asked, &enrolled, mesh, excludes_user)
}

/// A datagram has arrived at a socket that is not connected: whoever sent it may be answered.
#[inline(always)]
pub fn arrived<F: Family>(call: &SockAddr<F>, mesh: u64) {
    let (Some(config), Some(request)) = (config(), call.request()) else {
        return;
    };
    let enrolled = enrolled(&request, config, mesh);
    if enrolled.is_null() {
        return;
    }
    // SAFETY: a hash's element, freed after a grace period.
    if unsafe { (*enrolled).flags } & Enrolled::EGRESS_DENY != 0 {
        askers::note(call, request.addr, request.port);
    }
}
