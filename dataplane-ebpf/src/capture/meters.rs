//! Connections that go direct, and are measured as a proxy would measure them: begun at `connect()` or
//! when they arrive, counted when they are established and when they are closed.
//!
//! In a table of [sets](crate::sets), and where a socket's set is full in its own storage, as the VIPs of
//! connected sockets are. A place is free when the connection is closed, which the kernel tells of every
//! one that [`watch`](super::origin::watch) was called for; or, if it was never established, when its socket
//! is ([`release`]) or is connected again: it has failed then. With all of them in their sockets' storage a
//! node made 4 % fewer connections a second (`cargo xtask bench relay`).

use core::{
    ffi::c_void,
    ptr::{from_ref, null_mut, read_volatile},
};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sock_addr, bpf_sock_ops},
    helpers::generated::{
        bpf_get_socket_cookie, bpf_ktime_get_coarse_ns, bpf_sk_storage_delete, bpf_sk_storage_get,
    },
    programs::SockContext,
};
use dataplane_common::{
    Addr,
    capture::{Meter, MeterSets, Traffic, TrafficKey},
};

use super::origin::{CREATE, storage, storage_with};
use crate::{
    atomic,
    sets::{free_place, place_of, take_place},
    tables::{KNOWN, MORE_METERS, TRAFFIC},
};

/// `BPF_NOEXIST`.
const NEW: u64 = 1;

// States of a TCP socket (`include/net/tcp_states.h`).
pub const SYN_SENT: u32 = 2;
const FIN_WAIT2: u32 = 5;
pub const CLOSE: u32 = 7;
const CLOSE_WAIT: u32 = 8;
const LAST_ACK: u32 = 9;
const CLOSING: u32 = 11;

/// Has a connection measured that is being made. Which service it asks for the program says that looks for
/// it next ([`ask_for`]); whom it reaches is known when it is established.
#[inline(always)]
pub fn begin(ctx: *mut bpf_sock_addr, workload: u32) {
    let meter = Meter {
        key: TrafficKey {
            workload,
            pool: 0,
            addr: Addr::UNSPECIFIED,
        },
        opened_at: 0,
    };
    // SAFETY: the program's context.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.cast()) };
    let mut place = kept(cookie, socket(ctx));
    if place.is_null() {
        place = take_place::<MeterSets>(cookie);
    } else {
        failed(place);
    }
    if place.is_null() {
        // SAFETY: a full socket; the storage is as large as a meter.
        unsafe {
            place = bpf_sk_storage_get(
                from_ref(&MORE_METERS).cast_mut().cast(),
                socket(ctx),
                (&raw const meter).cast_mut().cast(),
                CREATE,
            )
            .cast();
        }
    }
    if !place.is_null() {
        // SAFETY: the socket's own place or storage.
        unsafe { *place = meter };
    }
}

/// The socket of a connect hook, which is a full one.
#[inline(always)]
fn socket(ctx: *mut bpf_sock_addr) -> *mut c_void {
    // SAFETY: a field of the context.
    unsafe { read_volatile(&raw const (*ctx).__bindgen_anon_1.sk).cast() }
}

/// What is kept of a full socket, or null.
#[inline(always)]
fn kept(cookie: u64, sk: *mut c_void) -> *mut Meter {
    let place = place_of::<MeterSets>(cookie);
    if !place.is_null() {
        return place;
    }
    let table = from_ref(&MORE_METERS).cast_mut().cast();
    // SAFETY: a table of meters, and a full socket.
    unsafe { bpf_sk_storage_get(table, sk, null_mut(), 0).cast() }
}

/// A connection that is being made asks for a service. If it is measured, it is so as one to that pool.
#[inline(always)]
pub fn ask_for(ctx: *mut bpf_sock_addr, pool: u32) {
    // SAFETY: the program's context.
    let place = kept(unsafe { bpf_get_socket_cookie(ctx.cast()) }, socket(ctx));
    if !place.is_null() {
        // SAFETY: the socket's own place or storage.
        unsafe { (*place).key.pool = pool };
    }
}

/// A socket that was measured, and now goes elsewhere, is measured no more.
#[inline(always)]
pub fn forget(ctx: *mut bpf_sock_addr) {
    // SAFETY: the program's context, a table of meters, and a full socket.
    unsafe {
        if !free_place::<MeterSets>(bpf_get_socket_cookie(ctx.cast())) {
            bpf_sk_storage_delete(from_ref(&MORE_METERS).cast_mut().cast(), socket(ctx));
        }
    }
}

/// A socket is closed for good that has no connection: if one was to be measured, it has failed.
#[inline(always)]
pub fn release(ctx: &SockContext) {
    // SAFETY: the program's context.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    // The context of the program is the socket, which is a full one.
    let place = kept(cookie, ctx.as_ptr());
    if !place.is_null() {
        failed(place);
        free_place::<MeterSets>(cookie);
    }
}

/// A connection that was to be measured is given up. One that was established is not: that it is over has been
/// counted.
#[inline(always)]
fn failed(meter: *mut Meter) {
    // SAFETY: a socket's place or storage, an element of the hash.
    unsafe {
        if (*meter).opened_at != 0 {
            return;
        }
        let traffic = traffic(meter);
        if !traffic.is_null() {
            atomic::add(&raw mut (*traffic).failed, 1);
        }
    }
}

/// What is kept of the program's socket, or null.
#[inline(always)]
pub fn of(ctx: *mut bpf_sock_ops) -> *mut Meter {
    // SAFETY: the program's context.
    let place = place_of::<MeterSets>(unsafe { bpf_get_socket_cookie(ctx.cast()) });
    if place.is_null() {
        storage(ctx, from_ref(&MORE_METERS).cast(), 0).cast()
    } else {
        place
    }
}

/// A connection that was begun is established.
#[inline(always)]
pub fn established(meter: *mut Meter, reached: Addr) {
    // SAFETY: the socket's place or storage.
    let pool = unsafe { (*meter).key.pool };
    // Who asked for a service has reached one of its endpoints.
    let of_service = pool != 0 && pool != TrafficKey::INBOUND;
    let known = of_service || KNOWN.get_ptr(reached).is_some();
    // SAFETY: as above; the helper has no preconditions.
    unsafe {
        (*meter).opened_at = bpf_ktime_get_coarse_ns();
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
    // SAFETY: the program's context.
    let mut place = take_place::<MeterSets>(unsafe { bpf_get_socket_cookie(ctx.cast()) });
    if place.is_null() {
        place = storage_with(ctx, from_ref(&MORE_METERS).cast(), &raw mut meter).cast();
    }
    if place.is_null() {
        return false;
    }
    // SAFETY: the socket's own place or storage.
    unsafe { *place = meter };
    established(place, client);
    true
}

/// A connection is closed: what was kept of it goes.
#[inline(always)]
pub fn closed(ctx: *mut bpf_sock_ops, meter: *mut Meter, before: u32) {
    // SAFETY: the socket's place or storage.
    if unsafe { (*meter).opened_at } == 0 {
        // Somebody else had the kernel tell of all states.
        failed(meter);
    } else {
        add_up(ctx, meter, before);
    }
    // SAFETY: the program's context and a field of it, which is checked.
    unsafe {
        if free_place::<MeterSets>(bpf_get_socket_cookie(ctx.cast())) {
            return;
        }
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_2.sk);
        if !sk.is_null() {
            bpf_sk_storage_delete(from_ref(&MORE_METERS).cast_mut().cast(), sk.cast());
        }
    }
}

#[inline(always)]
fn add_up(ctx: *mut bpf_sock_ops, meter: *mut Meter, before: u32) {
    let traffic = traffic(meter);
    if traffic.is_null() {
        return;
    }
    // SAFETY: the socket's place or storage, an element of the hash, and fields of the context.
    unsafe {
        let opened_at = (*meter).opened_at;
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
        let lasted = bpf_ktime_get_coarse_ns().wrapping_sub(opened_at);
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
