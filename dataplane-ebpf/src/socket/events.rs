//! Writes decisions to the ring buffer, while there is a listener.

use aya_ebpf::{
    EbpfContext,
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid, generated::bpf_get_socket_cookie},
};
use dataplane_common::{Addr, Event, Hook, Port};

use super::{Family, SockAddr};
use crate::{
    events::{listened_to, submit},
    select::{Request, Verdict},
};

/// Reports a verdict. Without a listener this is one load and one branch.
#[inline(always)]
pub fn report<F: Family>(call: &SockAddr<F>, hook: Hook, request: &Request, verdict: &Verdict) {
    let now = listened_to();
    if now == 0 {
        return;
    }
    submit(Event {
        at: now,
        netns: request.netns,
        // SAFETY: the program's context.
        socket: unsafe { bpf_get_socket_cookie(call.ctx.as_ptr()) },
        source: Addr::UNSPECIFIED,
        destination: request.addr,
        endpoint: verdict.endpoint.addr,
        destination_port: request.port,
        endpoint_port: verdict.endpoint.port,
        pool: verdict.pool,
        pid: (bpf_get_current_pid_tgid() >> 32) as u32,
        ifindex: 0,
        source_port: Port::ANY,
        reserved: 0,
        reason: verdict.reason() as u8,
        hook: hook as u8,
        protocol: request.protocol,
        padding: 0,
        comm: bpf_get_current_comm().unwrap_or_default(),
    });
}
