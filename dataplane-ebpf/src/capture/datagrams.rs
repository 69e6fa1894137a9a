//! Datagrams of workloads: `connect()` and `sendmsg()` on UDP sockets.
//!
//! If `egress: deny` is in force, datagrams may go to known destinations, and to senders that have asked. Queries to a
//! workload's resolvers go to the agent's DNS server, if it listens. Both hooks call [`judge`] before the services'
//! program changes the destination.

use dataplane_common::{
    Hook, Protocol, Reason,
    capture::{self, Enrolled, MESH_DENIES, MESH_DNS, MESH_GUARD, has_mark},
    reread::Copied,
    tables::Endpoint,
};

use super::{
    askers,
    caller::{enrolled, excludes_user, is_agent, mark},
    config,
    outbound::{self, Call},
};
use crate::{
    select::{Live, Request, Verdict, count},
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
        judge::<F, false>(call, &request, mesh)
    }
}

/// Whether the programs judge datagrams at all.
#[inline(always)]
pub const fn are_judged(mesh: u64) -> bool {
    mesh & MESH_DENIES != 0 || mesh >> MESH_DNS != 0
}

/// Whether the programs judge datagrams that arrive.
#[inline(always)]
pub const fn arrive_judged(mesh: u64) -> bool {
    mesh & MESH_DENIES != 0
}

/// [`judge`]: as [`GO_ON`], if the datagram may go to its final destination ([`outbound::admits`]).
pub const JUDGED: i32 = 2;
/// [`judge`]: as [`GO_ON`], to the destination itself, which has sent the socket a datagram.
pub const ANSWERS: i32 = 3;
/// [`judge`] of a datagram that is sent: it goes to the agent's DNS server, before any other rule for its destination.
pub const CAPTURED: i32 = 4;

/// Decides, and applies the decision. `SENT`: the call is `sendmsg()`, not `connect()`. (Not inlined: a function with its own
/// frame gives its stack back.)
#[inline(never)]
pub fn judge<F: Family, const SENT: bool>(call: &SockAddr<F>, request: &Request, mesh: u64) -> i32 {
    if !are_judged(mesh) {
        return GO_ON;
    }
    let (reason, goes) = decide(call, request, mesh, SENT);
    let is_captured = reason == Reason::CapturedDns;
    if reason == Reason::DnsBypassed {
        count(reason);
    }
    if !is_captured && !reason.is_refusal() {
        if SENT {
            return goes;
        }
        if goes == JUDGED {
            outbound::leave_to_judge(outbound::EGRESS);
        }
        return GO_ON;
    }
    count(reason);
    let mut verdict = Verdict::without_endpoint(reason, 0);
    if is_captured {
        let (addr, port) = outbound::dns_server(mesh, request.addr.is_v4());
        verdict.endpoint = Endpoint::new(addr, port);
    }
    let hook = if SENT { Hook::Sendmsg } else { Hook::Connect };
    events::report(call, hook, request, &verdict);
    if !is_captured {
        return refuse();
    }
    let peer = request.peer(&verdict.endpoint);
    if SENT {
        flows::remember(call, &peer);
    } else {
        peers::remember(call, &peer);
    }
    call.set(peer.endpoint, peer.endpoint_port);
    if SENT { CAPTURED } else { GO_ON }
}

/// Returns the reason, and how the datagram goes on if it does.
#[inline(always)]
fn decide<F: Family>(
    call: &SockAddr<F>,
    request: &Request,
    mesh: u64,
    is_sent: bool,
) -> (Reason, i32) {
    let Some(config) = config() else {
        return (Reason::NotService, GO_ON);
    };
    let enrolled = match enrolled(request, mesh) {
        Copied::Found(enrolled) => enrolled,
        Copied::Changing => return (Reason::Guarded, GO_ON),
        Copied::Absent if mesh & MESH_GUARD != 0 && !request.own_loopback => {
            return (Reason::Guarded, GO_ON);
        }
        Copied::Absent => return (Reason::NotService, GO_ON),
    };
    if !enrolled.is_judged() {
        return (Reason::NotService, GO_ON);
    }
    let ctx = call.ctx.sock_addr;
    if has_mark(mark(ctx), config.mark) && is_agent(config) {
        return (Reason::ProxysOwn, GO_ON);
    }
    if enrolled.flags & Enrolled::EGRESS_DENY != 0 && feigns(call, request, is_sent) {
        return (Reason::SourceForged, GO_ON);
    }
    let asked = Call { ctx, request };
    let to = (request.addr, request.port);
    let excludes_user = excludes_user(&enrolled);
    let (reason, is_judged) = capture::decide_datagram(&asked, &enrolled, to, excludes_user);
    if reason == Reason::EgressDenied {
        let is_answer = is_sent && askers::has(call, request.addr, request.port);
        return if is_answer {
            (Reason::NotService, ANSWERS)
        } else {
            (reason, GO_ON)
        };
    }
    let goes = if is_judged { JUDGED } else { GO_ON };
    let reason = outbound::of_query(&asked, &enrolled, mesh, excludes_user);
    (reason, goes)
}

/// Whether a socket sends to its own workload, which is allowed, but from an address that the workload does not have:
/// the receiver would count this address as a sender that has asked. If a socket is not bound to an address and names
/// none, the kernel gives it one of its network namespace. (A call without a destination is one on a connected socket
/// that names a source.)
#[inline(always)]
fn feigns<F: Family>(call: &SockAddr<F>, request: &Request, is_sent: bool) -> bool {
    let source = call.source(is_sent);
    if source.is_unspecified() || source.is_loopback() || outbound::is_own(request, source) {
        return false;
    }
    let to = request.addr;
    outbound::is_own(request, to) || dataplane_common::decide::may_be_served(&Live, to)
}

/// A datagram has arrived at a socket that is not connected: the socket may answer its sender.
#[inline(always)]
pub fn arrived<F: Family>(call: &SockAddr<F>, mesh: u64) {
    let Some(request) = call.request() else {
        return;
    };
    if let Copied::Found(enrolled) = enrolled(&request, mesh)
        && enrolled.flags & Enrolled::EGRESS_DENY != 0
    {
        askers::note(call, request.addr, request.port);
    }
}
