//! Direct connections, measured as a proxy would measure them: a meter begins at `connect()` or when a connection
//! arrives, and the program counts when the connection is established and when it is closed.
//!
//! A meter is in a table of [sets](crate::sets), or, if the socket's set is full, in the socket's own storage, as the
//! VIPs of connected sockets are. A place becomes free when the connection is closed or its socket is gone, which
//! [`states`](super::states) reports, or when the socket is connected again: a connection that was not established has
//! failed. With all meters in their sockets' storage a node made 4 % fewer connections a second
//! (`cargo xtask bench relay`).

use core::{
    ffi::c_void,
    ptr::{from_ref, null_mut, read_volatile},
};

use aya_ebpf::{
    bindings::bpf_sock_addr,
    helpers::generated::{
        bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_sk_storage_delete, bpf_sk_storage_get,
    },
};
use dataplane_common::{
    Addr,
    capture::{Meter, MeterSets, Traffic, TrafficKey},
    tables::FrontendKey,
};

use super::tcp::{CREATE, Socket};
use crate::{
    atomic,
    sets::{free_place, place_of, take_place},
    tables::{KNOWN, MORE_METERS, TRAFFIC},
};

/// `BPF_NOEXIST`.
const NEW: u64 = 1;

/// Starts to measure a connection that is being made. The program that looks for a service next adds the service
/// ([`ask_for`]). The side that it reaches is known when the connection is established.
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

/// Returns the meter of a full socket, or null.
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

/// Records the service of a connection that is being made. If the connection is measured, it counts for this pool.
#[inline(always)]
pub fn ask_for(ctx: *mut bpf_sock_addr, pool: u32) {
    // SAFETY: the program's context.
    let place = kept(unsafe { bpf_get_socket_cookie(ctx.cast()) }, socket(ctx));
    if !place.is_null() {
        // SAFETY: the socket's own place or storage.
        unsafe { (*place).key.pool = pool };
    }
}

/// Stops measuring a socket that goes elsewhere now.
#[inline(always)]
pub fn forget(ctx: *mut bpf_sock_addr) {
    // SAFETY: the program's context, a table of meters, and a full socket.
    unsafe {
        if !free_place::<MeterSets>(bpf_get_socket_cookie(ctx.cast())) {
            bpf_sk_storage_delete(from_ref(&MORE_METERS).cast_mut().cast(), socket(ctx));
        }
    }
}

/// Counts a measured connection that ended before it was established. An established connection is counted when it is
/// over.
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

/// Returns the meter of the socket with this cookie, or null.
#[inline(always)]
pub fn kept_of(socket: Socket, cookie: u64) -> *mut Meter {
    if cookie == 0 {
        null_mut()
    } else {
        kept(cookie, socket.as_ptr())
    }
}

/// Counts a connection as established: once, even if two agents' programs report it.
#[inline(always)]
pub fn established(meter: *mut Meter, reached: Addr) {
    // SAFETY: the socket's place or storage.
    let Meter { key, opened_at } = unsafe { *meter };
    if opened_at != 0 {
        return;
    }
    // A client that asked for a service has reached one of its endpoints.
    let of_service = key.pool != 0 && key.pool != TrafficKey::INBOUND;
    let known = of_service || KNOWN.get_ptr(FrontendKey::address(reached)).is_some();
    // SAFETY: as above; the helper has no preconditions.
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

/// Counts a connection that arrives from a client.
#[inline(always)]
pub fn arrived(socket: Socket, workload: u32, client: Addr) {
    let mut meter = Meter {
        key: TrafficKey {
            workload,
            pool: TrafficKey::INBOUND,
            addr: Addr::UNSPECIFIED,
        },
        opened_at: 0,
    };
    // SAFETY: a full socket.
    let cookie = unsafe { bpf_get_socket_cookie(socket.as_ptr()) };
    let mut place = take_place::<MeterSets>(cookie);
    if place.is_null() {
        let table = from_ref(&MORE_METERS).cast_mut().cast();
        // SAFETY: a full socket; the storage is as large as a meter.
        unsafe {
            place =
                bpf_sk_storage_get(table, socket.as_ptr(), (&raw mut meter).cast(), CREATE).cast();
        }
    }
    if place.is_null() {
        return;
    }
    // SAFETY: the socket's own place or storage.
    unsafe { *place = meter };
    established(place, client);
}

/// Counts a connection to a workload that a policy refused. `by`: the policy's number.
#[inline(always)]
pub fn refused(workload: u32, by: u32, client: Addr) {
    let known = KNOWN.get_ptr(FrontendKey::address(client)).is_some();
    let mut meter = Meter {
        key: TrafficKey {
            workload,
            pool: TrafficKey::REFUSED | by,
            addr: if known { client } else { Addr::UNSPECIFIED },
        },
        opened_at: 0,
    };
    failed(&raw mut meter);
}

/// Counts a closed connection, and removes its meter. `ended`: our FIN was acknowledged; `other_ended`: the other side
/// sent a FIN.
#[inline(always)]
pub fn closed(socket: Socket, cookie: u64, meter: *mut Meter, ended: bool, other_ended: bool) {
    let (acked, received) = socket.bytes();
    // SAFETY: the socket's place or storage.
    if unsafe { (*meter).opened_at } == 0 && acked != 0 {
        // No tracepoint has reported that it was established: see `states`.
        established(meter, socket.remote());
    }
    // SAFETY: as above.
    if unsafe { (*meter).opened_at } == 0 {
        failed(meter);
    } else {
        let received = received.saturating_sub(u64::from(other_ended));
        add_up(meter, acked.saturating_sub(u64::from(ended)), received);
    }
    if free_place::<MeterSets>(cookie) {
        return;
    }
    // SAFETY: a table of meters, and a full socket.
    unsafe { bpf_sk_storage_delete(from_ref(&MORE_METERS).cast_mut().cast(), socket.as_ptr()) };
}

/// Adds a connection's bytes and time to its counters. `acked`: includes the SYN of the side that connects.
#[inline(always)]
fn add_up(meter: *mut Meter, acked: u64, received: u64) {
    let traffic = traffic(meter);
    if traffic.is_null() {
        return;
    }
    // SAFETY: the socket's place or storage, and an element of the hash.
    unsafe {
        let syn = u64::from((*meter).key.pool != TrafficKey::INBOUND);
        atomic::add(&raw mut (*traffic).sent, acked.saturating_sub(syn));
        atomic::add(&raw mut (*traffic).received, received);
        let lasted = bpf_ktime_get_ns().wrapping_sub((*meter).opened_at);
        atomic::add(&raw mut (*traffic).nanoseconds, lasted);
        atomic::add(&raw mut (*traffic).closed, 1);
    }
}

/// Returns the counters of a meter's key, or null.
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
