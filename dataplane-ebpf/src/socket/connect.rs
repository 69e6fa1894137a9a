//! `connect()`: the VIP is replaced by an endpoint before the kernel routes or sends anything.

use dataplane_common::{Hook, Protocol, Reason, capture::is_proxy, tables::Endpoint};

use super::{Family, GO_ON, SockAddr, config, events, flows, peers};
use crate::select::decide;

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    let verdict = decide(&request, &Endpoint::NONE);
    events::report(call, Hook::Connect, &request, &verdict);
    if verdict.reason == Reason::NotService {
        // Of a captured connection, what the capturing program before this one has kept is true.
        let mesh = config().map_or(0, |config| config.mesh);
        if mesh == 0 || !is_proxy(mesh, request.addr, request.port) {
            peers::forget(call);
        }
        if request.protocol == Protocol::UDP {
            flows::forget(call);
        }
    } else if !verdict.endpoint.is_none() {
        peers::remember(call, &request.peer(&verdict.endpoint));
    }
    call.carry_out(&verdict)
}
