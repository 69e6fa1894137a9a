//! Connections to a proxy, as `sockops` sees them: the programs hand the original destination from the client's socket
//! over to the proxy's socket, and notice a proxy that begins to listen. Attached only if there is a proxy.

use core::ptr::{from_ref, null_mut, read_volatile};

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
        BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_SOCK_OPS_TCP_LISTEN_CB, bpf_sock_ops,
    },
    helpers::generated::{
        bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_setsockopt, bpf_sk_storage_get,
        bpf_sock_hash_update, bpf_sock_ops_cb_flags_set,
    },
};
use dataplane_common::{
    Addr, Port, Reason,
    capture::{CaptureConfig, Enrolled, FROM_CLIENT, ListenerKey, Origin, Tuple, has_mark},
    origins::{self, OF_ALL, counter_of},
    reread::Copied,
    tables::{Peer, PeerSets},
};

use super::{
    config, copy,
    tcp::{CLOSE, CREATE},
};
use crate::{
    atomic,
    select::count,
    sets::place_of,
    socket::read_words,
    tables::{ACCEPTED, LISTENERS, MORE_PEERS, NAMESPACES, ORIGIN_COUNTS, ORIGINS},
};

const AF_INET6: u32 = 10;
const SOL_SOCKET: i32 = 1;
const SO_BINDTOIFINDEX: i32 = 62;
/// Loopback's number in every network namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
/// `BPF_NOEXIST`.
const NEW: u64 = 1;
/// Added to a counter to count one less.
const MINUS_ONE: u64 = u64::MAX;

/// Handles the events of `sockops`.
#[inline(always)]
pub fn run(ctx: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a field of the context.
    match unsafe { read_volatile(&raw const (*ctx).op) } {
        BPF_SOCK_OPS_TCP_CONNECT_CB => connecting(ctx),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => accepted(ctx),
        BPF_SOCK_OPS_STATE_CB => changed(ctx),
        BPF_SOCK_OPS_TCP_LISTEN_CB => listening(ctx),
        _ => {}
    }
    1
}

/// Handles the client's side: its addresses and ports are chosen, and nothing is sent yet.
#[inline(always)]
fn connecting(ctx: *mut bpf_sock_ops) {
    let Some(config) = config() else { return };
    if is_to_proxy(ctx, config) {
        let tuple = tuple(ctx, true);
        // SAFETY: the program's context.
        let cookie = unsafe { bpf_get_socket_cookie(ctx.cast()) };
        let mut kept = place_of::<PeerSets>(cookie);
        if kept.is_null() {
            kept = storage(ctx, from_ref(&MORE_PEERS).cast(), 0).cast::<Peer>();
        }
        if kept.is_null() {
            return;
        }
        // SAFETY: the socket's own place, or its storage.
        let peer = unsafe { *kept };
        // Not captured: the process connected to the proxy's port on purpose.
        if peer.endpoint != tuple.proxy || peer.endpoint_port != tuple.proxy_port {
            return;
        }
        let origin = Origin {
            addr: peer.vip,
            port: peer.vip_port,
            counter: counter_in(tuple.netns),
        };
        pass_on(ctx, tuple, origin);
    }
}

/// Makes an entry, which is removed with the socket at the latest.
#[inline(always)]
fn pass_on(ctx: *mut bpf_sock_ops, tuple: Tuple, origin: Origin) {
    if ORIGINS.insert(tuple, origin, NEW).is_err() {
        // The entry of an earlier socket whose end the kernel did not report.
        forget(tuple);
        if ORIGINS.insert(tuple, origin, NEW).is_err() {
            count(Reason::OriginLost);
            return;
        }
    }
    change(origin.counter, 1);
    watch(ctx);
}

/// Removes an entry, if there is one.
#[inline(always)]
fn forget(tuple: Tuple) {
    let Copied::Found(origin) = copy(|| ORIGINS.get_ptr(tuple)) else {
        return;
    };
    // If two programs remove it, one succeeds.
    if ORIGINS.remove(tuple).is_ok() {
        change(origin.counter, MINUS_ONE);
    }
}

/// The element of `ORIGIN_COUNTS` that counts the connections from a network namespace to the proxy.
#[inline(always)]
fn counter_in(netns: u64) -> u16 {
    match copy(|| NAMESPACES.get_ptr(netns)) {
        Copied::Found(enrolled) => counter_of(enrolled.workload),
        _ => counter_of(0),
    }
}

#[inline(always)]
fn counted(counter: u16) -> u64 {
    ORIGIN_COUNTS
        .get_ptr(u32::from(counter))
        .map_or(0, |found| {
            // SAFETY: an aligned word of an array, whose elements stay.
            unsafe { read_volatile(found) }
        })
}

#[inline(always)]
fn change(counter: u16, by: u64) {
    if counter == 0 {
        return;
    }
    for counter in [counter, OF_ALL] {
        if let Some(found) = ORIGIN_COUNTS.get_ptr_mut(u32::from(counter)) {
            // SAFETY: an aligned word of an array, whose elements stay.
            unsafe { atomic::add(found, by) };
        }
    }
}

/// Whether a connection from a network namespace to the proxy may have an entry.
#[inline(always)]
pub fn has_room(netns: u64) -> bool {
    origins::has_room(counted(counter_in(netns)), counted(OF_ALL))
}

/// Enables the events for changes of the socket's state.
#[inline(always)]
pub fn watch(ctx: *mut bpf_sock_ops) {
    // SAFETY: the program's context and a field of it.
    unsafe {
        let flags = read_volatile(&raw const (*ctx).bpf_sock_ops_cb_flags);
        bpf_sock_ops_cb_flags_set(ctx, (flags | BPF_SOCK_OPS_STATE_CB_FLAG).cast_signed());
    }
}

/// Handles the proxy's side: the entry moves to the socket, so the next user of the client's port does not find it.
#[inline(always)]
fn accepted(ctx: *mut bpf_sock_ops) {
    let Some(config) = config() else { return };
    // SAFETY: a field of the context; in host order.
    let port = unsafe { read_volatile(&raw const (*ctx).local_port) };
    if port != u32::from(config.outbound.host()) {
        if has_proxys_mark(ctx, config) {
            bind_to_loopback(ctx);
        }
        return;
    }
    let tuple = tuple(ctx, false);
    let Copied::Found(mut origin) = copy(|| ORIGINS.get_ptr(tuple)) else {
        return;
    };
    let place = storage_with(ctx, from_ref(&ACCEPTED).cast(), &raw mut origin);
    if place.is_null() {
        count(Reason::OriginLost);
    }
    forget(tuple);
}

/// Whether the connection comes from the agent's proxy, from a client's address: an accepted socket has the mark of the
/// packet that made it (`net.ipv4.tcp_fwmark_accept`).
#[inline(always)]
fn has_proxys_mark(ctx: *mut bpf_sock_ops, config: &CaptureConfig) -> bool {
    // SAFETY: fields of the context and of its socket, which is checked.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_2.sk);
        !sk.is_null()
            && config.mark != 0
            && has_mark(
                read_volatile(&raw const (*sk).mark),
                config.mark | FROM_CLIENT,
            )
    }
}

/// Makes an application's socket accept packets from the loopback interface only, as the connected socket of the proxy
/// does. So the two may have the addresses and ports of the client's own connection to the proxy, whose packets come
/// from elsewhere (`inet_match` in `include/net/inet_hashtables.h`).
#[inline(always)]
fn bind_to_loopback(ctx: *mut bpf_sock_ops) {
    let mut interface = LOOPBACK;
    // SAFETY: the program's context, and a value of the option's size.
    unsafe {
        bpf_setsockopt(
            ctx.cast(),
            SOL_SOCKET,
            SO_BINDTOIFINDEX,
            (&raw mut interface).cast(),
            4,
        );
    }
}

/// Handles a client's socket that is closed.
#[inline(always)]
fn changed(ctx: *mut bpf_sock_ops) {
    // SAFETY: a field of the context.
    let now = unsafe { read_volatile(&raw const (*ctx).__bindgen_anon_1.args[1]) };
    if now != CLOSE {
        return;
    }
    let Some(config) = config() else { return };
    if is_to_proxy(ctx, config) {
        forget(tuple(ctx, true));
    }
}

/// A proxy that is not the agent's begins to listen in a workload's namespace: inbound connections go to it.
#[inline(always)]
fn listening(ctx: *mut bpf_sock_ops) {
    let Some(config) = config() else { return };
    if config.flags & CaptureConfig::FOREIGN == 0 {
        return;
    }
    // SAFETY: fields of the context.
    let (port, family) = unsafe {
        (
            read_volatile(&raw const (*ctx).local_port),
            read_volatile(&raw const (*ctx).family),
        )
    };
    if port != u32::from(config.inbound.host()) {
        return;
    }
    // SAFETY: the program's context.
    let netns = unsafe { bpf_get_netns_cookie(ctx.cast()) };
    match copy(|| NAMESPACES.get_ptr(netns)) {
        Copied::Found(enrolled) if enrolled.flags & Enrolled::INBOUND != 0 => {}
        _ => return,
    }
    let mut key = ListenerKey::of_namespace(netns, family != AF_INET6);
    // SAFETY: the program's context, a sockhash and a key of it.
    unsafe {
        let table = from_ref(&LISTENERS).cast_mut().cast();
        bpf_sock_hash_update(ctx, table, (&raw mut key).cast(), 0);
    }
}

/// The storage of the program's socket in a table, or null.
#[inline(always)]
fn storage(
    ctx: *mut bpf_sock_ops,
    table: *const core::ffi::c_void,
    flags: u64,
) -> *mut core::ffi::c_void {
    // SAFETY: a field of the context, which is checked; a socket storage table.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_2.sk);
        if sk.is_null() {
            return null_mut();
        }
        bpf_sk_storage_get(table.cast_mut(), sk.cast(), null_mut(), flags)
    }
}

/// As [`storage`], made from `value` if it is not there; the value is of the table's type.
#[inline(always)]
fn storage_with<V>(
    ctx: *mut bpf_sock_ops,
    table: *const core::ffi::c_void,
    value: *mut V,
) -> *mut core::ffi::c_void {
    // SAFETY: as above; the value is as large as the table's.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_2.sk);
        if sk.is_null() {
            return null_mut();
        }
        bpf_sk_storage_get(table.cast_mut(), sk.cast(), value.cast(), CREATE)
    }
}

/// Whether the socket is or was connected to the proxy's outbound port.
#[inline(always)]
fn is_to_proxy(ctx: *mut bpf_sock_ops, config: &CaptureConfig) -> bool {
    remote_port(ctx) == config.outbound && remote(ctx).is_loopback()
}

/// The connection, as the client sees it (`client`) or the proxy.
#[inline(always)]
pub fn tuple(ctx: *mut bpf_sock_ops, client: bool) -> Tuple {
    // SAFETY: the program's context and a field of it, in host order.
    let (netns, local_port) = unsafe {
        (
            bpf_get_netns_cookie(ctx.cast()),
            read_volatile(&raw const (*ctx).local_port),
        )
    };
    let (local, remote) = (local(ctx), remote(ctx));
    let (local_port, remote_port) = (Port::new(local_port as u16), remote_port(ctx));
    Tuple {
        netns,
        client: if client { local } else { remote },
        proxy: if client { remote } else { local },
        client_port: if client { local_port } else { remote_port },
        proxy_port: if client { remote_port } else { local_port },
        reserved: 0,
    }
}

#[inline(always)]
fn remote_port(ctx: *mut bpf_sock_ops) -> Port {
    // SAFETY: a field of the context: in network order, in the last two bytes.
    let word = unsafe { read_volatile(&raw const (*ctx).remote_port) };
    let [_, _, a, b] = word.to_ne_bytes();
    Port::from_be(u16::from_ne_bytes([a, b]))
}

#[inline(always)]
fn remote(ctx: *mut bpf_sock_ops) -> Addr {
    // SAFETY: fields of the context.
    unsafe {
        let ip = (&raw const (*ctx).remote_ip6).cast::<u32>();
        let v4 = read_volatile(&raw const (*ctx).remote_ip4);
        choose(ctx, v4, read_words(ip))
    }
}

#[inline(always)]
fn local(ctx: *mut bpf_sock_ops) -> Addr {
    // SAFETY: fields of the context.
    unsafe {
        let ip = (&raw const (*ctx).local_ip6).cast::<u32>();
        let v4 = read_volatile(&raw const (*ctx).local_ip4);
        choose(ctx, v4, read_words(ip))
    }
}

#[inline(always)]
fn choose(ctx: *mut bpf_sock_ops, v4: u32, v6: [u32; 4]) -> Addr {
    // SAFETY: a field of the context.
    if unsafe { read_volatile(&raw const (*ctx).family) } == AF_INET6 {
        Addr::from_words(v6)
    } else {
        Addr::from_v4_word(v4)
    }
}
