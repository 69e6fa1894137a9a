//! `connect()`: the VIP is replaced by an endpoint before the kernel routes or sends anything.

use dataplane_common::{Hook, Protocol, Reason, tables::Endpoint};

use super::{Family, GO_ON, SockAddr, events, flows, peers};
use crate::select::decide;

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let Some(request) = call.request() else {
        return GO_ON;
    };
    let verdict = decide(&request, &Endpoint::NONE);
    events::report(call, Hook::Connect, &request, &verdict);
    if verdict.reason == Reason::NotService {
        peers::forget(call);
        if request.protocol == Protocol::UDP {
            flows::forget(call);
        }
    } else if !verdict.endpoint.is_none() {
        peers::remember(call, &request.peer(&verdict.endpoint));
    }
    call.carry_out(&verdict)
}
