//! The kubelet's probes: `sockops` of the kubelet's cgroup notes the connections that the kubelet opens to workloads, and
//! the socket lookup in the workload's network namespace leaves these connections alone.

use core::ptr::read_volatile;

use aya_ebpf::{
    bindings::{BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_TCP_CONNECT_CB, bpf_sock_ops},
    helpers::generated::bpf_ktime_get_ns,
};
use dataplane_common::capture::{PROBE_BEGINS, Tuple};

use super::{local, origin, tcp::CLOSE};
use crate::tables::PROBES;

/// `BPF_ANY`: the entry of an earlier socket is replaced.
const ANY: u64 = 0;

/// Handles the events of `sockops`. The program is attached to the kubelet's cgroups only, so it sees no other socket.
#[inline(always)]
pub fn run(ctx: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a field of the context.
    match unsafe { read_volatile(&raw const (*ctx).op) } {
        BPF_SOCK_OPS_TCP_CONNECT_CB => connecting(ctx),
        BPF_SOCK_OPS_STATE_CB => changed(ctx),
        _ => {}
    }
    1
}

/// Handles a socket whose addresses and ports are chosen, and that has sent nothing yet.
#[inline(always)]
fn connecting(ctx: *mut bpf_sock_ops) {
    let probe = of_socket(ctx);
    if local(probe.proxy).is_none() {
        return;
    }
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    // If there is no room, the probe goes to the proxy.
    if PROBES.insert(probe, now, ANY).is_ok() {
        origin::watch(ctx);
    }
}

/// Handles a socket that is closed: the next user of its port is no probe.
#[inline(always)]
fn changed(ctx: *mut bpf_sock_ops) {
    // SAFETY: a field of the context.
    let now = unsafe { read_volatile(&raw const (*ctx).__bindgen_anon_1.args[1]) };
    if now == CLOSE {
        let _ = PROBES.remove(of_socket(ctx));
    }
}

#[inline(always)]
fn of_socket(ctx: *mut bpf_sock_ops) -> Tuple {
    // The other side is in another network namespace, which does not know this one.
    Tuple {
        netns: 0,
        ..origin::tuple(ctx, true)
    }
}

/// Whether a connection that begins is the kubelet's. `probe`: with `netns` 0, the kubelet's side as the client.
#[inline(always)]
pub fn is_one(probe: Tuple) -> bool {
    let Some(began) = PROBES.get_ptr(probe) else {
        return false;
    };
    // SAFETY: an aligned word of an element, whose memory stays the table's while this program runs; the helper has no
    // preconditions.
    let age = unsafe { bpf_ktime_get_ns().wrapping_sub(read_volatile(began)) };
    age < PROBE_BEGINS
}
