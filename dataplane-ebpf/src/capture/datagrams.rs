//! Datagrams of workloads: `connect()` and `sendmsg()` on UDP sockets.
//!
//! Where `egress: deny` is in force, they may go to what is known, and to whoever has asked. What else may become of a
//! datagram of a workload's belongs here, too: both hooks ask [`judge`] before the services' program has changed the
//! destination.

use dataplane_common::{
    Hook, Protocol, Reason,
    capture::{self, Enrolled, MESH_DENIES, MESH_GUARD, has_mark},
};

use super::{
    askers, config,
    outbound::{self, Call, enrolled, is_agent, mark, user},
};
use crate::{
    select::{Request, Verdict, count},
    socket::{self, Family, GO_ON, SockAddr, events, refuse},
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
    mesh & MESH_DENIES != 0
}

/// Decides, and carries it out.
#[inline(always)]
pub fn judge<F: Family>(call: &SockAddr<F>, request: &Request, mesh: u64, hook: Hook) -> i32 {
    if !are_judged(mesh) {
        return GO_ON;
    }
    let reason = decide(call, request, mesh, hook);
    if !reason.is_refusal() {
        return GO_ON;
    }
    count(reason);
    let verdict = Verdict::without_endpoint(reason, 0);
    events::report(call, hook, request, &verdict);
    refuse()
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
    if enrolled.flags & Enrolled::CAPTURED == 0 {
        return Reason::NotService;
    }
    let ctx = call.ctx.sock_addr;
    if has_mark(mark(ctx), config.mark) && is_agent(config) {
        return Reason::ProxysOwn;
    }
    let asked = Call { ctx, request };
    let to = (request.addr, request.port);
    let reason = capture::decide_datagram(&asked, &enrolled, to, user(&enrolled));
    if reason == Reason::EgressDenied
        && hook as u8 == Hook::Sendmsg as u8
        && askers::has(call, request.addr, request.port)
    {
        return Reason::NotService;
    }
    reason
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
