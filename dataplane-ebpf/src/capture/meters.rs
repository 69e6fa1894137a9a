//! Connections that go direct, and are measured as a proxy would measure them: begun at `connect()` or
//! when they arrive, counted when they are established and when they are closed.

use core::ptr::{from_ref, null_mut, read_volatile};

use aya_ebpf::{
    bindings::{bpf_sock_addr, bpf_sock_ops},
    helpers::generated::{bpf_ktime_get_ns, bpf_sk_storage_delete, bpf_sk_storage_get},
};
use dataplane_common::{
    Addr,
    capture::{Meter, Traffic, TrafficKey},
};

use super::origin::{CREATE, storage, storage_with};
use crate::{
    atomic,
    tables::{KNOWN, METERS, TRAFFIC},
};

/// `BPF_NOEXIST`.
const NEW: u64 = 1;

// States of a TCP socket (`include/net/tcp_states.h`).
const FIN_WAIT2: u32 = 5;
const CLOSE_WAIT: u32 = 8;
const LAST_ACK: u32 = 9;
const CLOSING: u32 = 11;

/// Has a connection measured that is being made. Whom it reaches is known when it is established.
#[inline(always)]
pub fn begin(ctx: *mut bpf_sock_addr, workload: u32, pool: u32) {
    let meter = Meter {
        key: TrafficKey {
            workload,
            pool,
            addr: Addr::UNSPECIFIED,
        },
        opened_at: 0,
    };
    // SAFETY: `sk` of a connect hook is a full socket; the storage is as large as a meter.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_1.sk);
        let place = bpf_sk_storage_get(
            from_ref(&METERS).cast_mut().cast(),
            sk.cast(),
            (&raw const meter).cast_mut().cast(),
            CREATE,
        );
        if !place.is_null() {
            *place.cast::<Meter>() = meter;
        }
    }
}

/// A socket that was measured, and now goes elsewhere, is measured no more.
#[inline(always)]
pub fn forget(ctx: *mut bpf_sock_addr) {
    // SAFETY: as in `begin`.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_1.sk);
        bpf_sk_storage_delete(from_ref(&METERS).cast_mut().cast(), sk.cast());
    }
}

/// What is kept of the program's socket, or null.
#[inline(always)]
pub fn of(ctx: *mut bpf_sock_ops) -> *mut Meter {
    storage(ctx, from_ref(&METERS).cast(), 0).cast()
}

/// A connection that was begun is established.
#[inline(always)]
pub fn established(meter: *mut Meter, reached: Addr) {
    let known = KNOWN.get_ptr(reached).is_some();
    // SAFETY: the socket's storage; the helper has no preconditions.
    unsafe {
        (*meter).opened_at = bpf_ktime_get_ns();
        if known {
            (*meter).key.addr = reached;
        }
    }
    let traffic = traffic(meter);
    if !traffic.is_null() {
        // SAFETY: an element of the hash.
        unsafe { atomic::add(&raw mut (*traffic).opened, 1) };
    }
}

/// A connection has arrived from a client. Answers whether it is measured.
#[inline(always)]
pub fn arrived(ctx: *mut bpf_sock_ops, workload: u32, client: Addr) -> bool {
    let mut meter = Meter {
        key: TrafficKey {
            workload,
            pool: TrafficKey::INBOUND,
            addr: Addr::UNSPECIFIED,
        },
        opened_at: 0,
    };
    let place = storage_with(ctx, from_ref(&METERS).cast(), &raw mut meter).cast::<Meter>();
    if place.is_null() {
        return false;
    }
    established(place, client);
    true
}

/// A connection is closed, or was never established.
#[inline(always)]
pub fn closed(ctx: *mut bpf_sock_ops, meter: *mut Meter, before: u32) {
    let traffic = traffic(meter);
    if traffic.is_null() {
        return;
    }
    // SAFETY: the socket's storage, an element of the hash, and fields of the context.
    unsafe {
        let opened_at = (*meter).opened_at;
        if opened_at == 0 {
            atomic::add(&raw mut (*traffic).failed, 1);
            return;
        }
        (*meter).opened_at = 0;
        // A FIN counts as a byte each, and so does the SYN of who connects.
        let syn = u64::from((*meter).key.pool != TrafficKey::INBOUND);
        let acked = read_volatile(&raw const (*ctx).bytes_acked);
        let ended = before == FIN_WAIT2 || before == LAST_ACK || before == CLOSING;
        let received = read_volatile(&raw const (*ctx).bytes_received);
        let other_ended = ended || before == CLOSE_WAIT;
        let sent = acked.saturating_sub(syn + u64::from(ended));
        atomic::add(&raw mut (*traffic).sent, sent);
        let received = received.saturating_sub(u64::from(other_ended));
        atomic::add(&raw mut (*traffic).received, received);
        let lasted = bpf_ktime_get_ns().wrapping_sub(opened_at);
        atomic::add(&raw mut (*traffic).nanoseconds, lasted);
        atomic::add(&raw mut (*traffic).closed, 1);
    }
}

/// What the connections that a meter is for have come to so far, or null.
#[inline(always)]
fn traffic(meter: *const Meter) -> *mut Traffic {
    // SAFETY: the socket's storage.
    let key = unsafe { (*meter).key };
    if let Some(found) = TRAFFIC.get_ptr_mut(key) {
        return found;
    }
    let _ = TRAFFIC.insert(key, Traffic::default(), NEW);
    TRAFFIC.get_ptr_mut(key).unwrap_or(null_mut())
}
