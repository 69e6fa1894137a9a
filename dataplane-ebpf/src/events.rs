//! The ring buffer of decisions, while somebody listens.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, helpers::generated::bpf_ktime_get_ns};
use dataplane_common::Event;

use crate::tables::{CONFIG, EVENTS};

/// Until when somebody listens; 0 if nobody does.
#[inline(always)]
fn until() -> u64 {
    let Some(config) = CONFIG.get(0) else {
        return 0;
    };
    // SAFETY: an aligned word that user space stores to.
    unsafe { core::ptr::read_volatile(&raw const config.listen_until) }
}

/// Whether somebody may be listening.
#[inline(always)]
pub fn wanted() -> bool {
    until() != 0
}

/// Now, in nanoseconds since boot, if somebody listens; 0 if nobody does, which is one load and one
/// branch to find out.
#[inline(always)]
pub fn listened_to() -> u64 {
    let until = until();
    if until == 0 {
        return 0;
    }
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    if now >= until { 0 } else { now }
}

/// Reports; a listener that is too slow misses it. Nobody is woken for it: a wake-up costs a `connect()` more than all
/// that the programs do, so the listener looks by itself, many times a second.
#[inline(always)]
pub fn submit(event: Event) {
    if let Some(mut entry) = EVENTS.reserve(0) {
        entry.write(event);
        entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    }
}
