//! The ring buffer of decisions, while a listener reads it.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, helpers::generated::bpf_ktime_get_ns};
use dataplane_common::Event;

use crate::tables::{CONFIG, EVENTS};

/// Until when a listener wants events; 0 if there is none.
#[inline(always)]
fn until() -> u64 {
    let Some(config) = CONFIG.get(0) else {
        return 0;
    };
    // SAFETY: an aligned word that user space stores to.
    unsafe { core::ptr::read_volatile(&raw const config.listen_until) }
}

/// Whether there may be a listener.
#[inline(always)]
pub fn wanted() -> bool {
    until() != 0
}

/// Now, in nanoseconds since boot, if there is a listener; otherwise 0, at the cost of one load and one branch.
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

/// Reports an event; a listener that is too slow misses it. The program does not wake the listener: a wake-up costs a
/// `connect()` more than all programs together, so the listener polls, many times a second.
#[inline(always)]
pub fn submit(event: Event) {
    if let Some(mut entry) = EVENTS.reserve(0) {
        entry.write(event);
        entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    }
}
