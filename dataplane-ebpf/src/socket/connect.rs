//! `connect()`: the VIP is replaced by an endpoint before the kernel routes or sends anything.

use dataplane_common::{Hook, Protocol, Reason, capture::is_proxy, tables::Endpoint};

use super::{Family, GO_ON, SockAddr, config, events, flows, peers};
use crate::{capture::meters, select::decide};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    // In the node's own namespace, where the agent is.
    let only_cluster_ips = request.own_loopback && call.is_to_api_server();
    let verdict = decide(&request, &Endpoint::NONE, only_cluster_ips);
    events::report(call, Hook::Connect, &request, &verdict);
    // What is counted before something is kept need not wait for that to be in the caches: an atomic operation
    // waits for every store before it.
    let answer = call.carry_out(&verdict);
    let mesh = config().map_or(0, |config| config.mesh);
    if verdict.reason == Reason::NotService {
        // Of a captured connection, what the capturing program before this one has kept is true.
        if mesh == 0 || !is_proxy(mesh, request.addr, request.port) {
            peers::forget(call);
        }
        if request.protocol == Protocol::UDP {
            flows::forget(call);
        }
    } else if !verdict.endpoint.is_none() {
        peers::remember(call, &request.peer(&verdict.endpoint));
    }
    if mesh != 0 && verdict.pool != 0 && request.protocol == Protocol::TCP {
        if verdict.endpoint.is_none() {
            meters::forget(call.ctx.sock_addr);
        } else {
            meters::ask_for(call.ctx.sock_addr, verdict.pool);
        }
    }
    answer
}
