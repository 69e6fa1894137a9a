//! Decisions into the ring buffer, while somebody listens.

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_current_comm, bpf_get_current_pid_tgid,
        generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    },
};
use dataplane_common::{Addr, Event, Hook, Port};

use super::{Family, SockAddr, config};
use crate::{
    select::{Request, Verdict},
    tables::EVENTS,
};

/// Until when somebody listens; 0 if nobody does.
#[inline(always)]
fn until() -> u64 {
    let Some(config) = config() else { return 0 };
    // SAFETY: an aligned word that user space stores to.
    unsafe { core::ptr::read_volatile(&raw const config.listen_until) }
}

/// Whether somebody may be listening.
#[inline(always)]
pub fn wanted() -> bool {
    until() != 0
}

/// Reports a verdict. Without a listener this is one load and one branch.
#[inline(always)]
pub fn report<F: Family>(call: &SockAddr<F>, hook: Hook, request: &Request, verdict: &Verdict) {
    let until = until();
    if until == 0 {
        return;
    }
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    if now >= until {
        return;
    }
    let Some(mut entry) = EVENTS.reserve(0) else {
        return;
    };
    entry.write(Event {
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
        reason: verdict.reason as u8,
        hook: hook as u8,
        protocol: request.protocol,
        padding: 0,
        comm: bpf_get_current_comm().unwrap_or_default(),
    });
    entry.submit(0);
}
