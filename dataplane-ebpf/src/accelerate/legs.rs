//! `sockops`: recognises the two sockets of a connection between an application and its proxy.

use core::ptr::{from_ref, read_volatile};

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB,
        BPF_SOCK_OPS_STATE_CB, bpf_sock_ops,
    },
    helpers::generated::{bpf_map_delete_elem, bpf_sk_storage_get, bpf_sock_hash_update},
};
use dataplane_common::{
    accelerate::{ProxyKey, Sender, WINDOW},
    capture::{Tuple, has_mark},
};

use crate::{
    capture::{
        origin::{storage, tuple, watch},
        tcp::{CLOSE, CREATE, FIN_WAIT1},
    },
    tables::{GRANTS, PROXIES, RECEIVERS, SENDERS, SENDING},
};

#[inline(always)]
pub fn run(ctx: *mut bpf_sock_ops) -> u32 {
    // SAFETY: a field of the context.
    match unsafe { read_volatile(&raw const (*ctx).op) } {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => connected(ctx),
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => accepted(ctx),
        BPF_SOCK_OPS_STATE_CB => changed(ctx),
        _ => {}
    }
    1
}

/// The side that connects: an application to its proxy, or the proxy to an application.
#[inline(always)]
fn connected(ctx: *mut bpf_sock_ops) {
    let tuple = tuple(ctx, true);
    if listens(tuple.netns, u32::from(tuple.proxy_port.host())) != 0 {
        send(ctx, tuple);
        return;
    }
    let mark = listens(tuple.netns, 0);
    if mark == 0 {
        return;
    }
    // SAFETY: a field of the context, which is checked, and one of the socket.
    let own = unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_2.sk);
        !sk.is_null() && has_mark(read_volatile(&raw const (*sk).mark), mark)
    };
    if own {
        receive(ctx, tuple);
    }
}

/// The side that accepts. The kernel reports the connecting side first, so an application recognises the proxy as its
/// peer by the entry in GRANTS that the proxy's side left.
#[inline(always)]
fn accepted(ctx: *mut bpf_sock_ops) {
    let tuple = tuple(ctx, false);
    if listens(tuple.netns, u32::from(tuple.proxy_port.host())) != 0 {
        receive(ctx, tuple);
    } else if GRANTS.get_ptr(tuple).is_some() {
        send(ctx, tuple);
    }
}

/// An application's socket.
#[inline(always)]
fn send(ctx: *mut bpf_sock_ops, mut tuple: Tuple) {
    let sender = Sender {
        tuple,
        sent: 0,
        granted: WINDOW,
        by_tcp: 0,
    };
    // SAFETY: the program's context, its socket, which is checked, a storage as large as the value,
    // and a sockhash with a key of it.
    unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_2.sk);
        if sk.is_null() {
            return;
        }
        let value = (&raw const sender).cast_mut().cast();
        let table = from_ref(&SENDING).cast_mut().cast();
        if bpf_sk_storage_get(table, sk.cast(), value, CREATE).is_null() {
            return;
        }
        let table = from_ref(&SENDERS).cast_mut().cast();
        if bpf_sock_hash_update(ctx, table, (&raw mut tuple).cast(), 0) == 0 {
            watch(ctx);
        }
    }
}

/// The proxy's socket.
#[inline(always)]
fn receive(ctx: *mut bpf_sock_ops, mut tuple: Tuple) {
    if GRANTS.insert(tuple, WINDOW, 0).is_err() {
        return;
    }
    // SAFETY: the program's context, and a sockhash with a key of it.
    unsafe {
        let table = from_ref(&RECEIVERS).cast_mut().cast();
        bpf_sock_hash_update(ctx, table, (&raw mut tuple).cast(), 0);
    }
    watch(ctx);
}

/// An application that has sent its FIN is no sender any more: while it waits for the answer, it reads as any socket
/// does. For a closed socket, its entry in GRANTS is removed.
#[inline(always)]
fn changed(ctx: *mut bpf_sock_ops) {
    // SAFETY: a field of the context.
    let now = unsafe { read_volatile(&raw const (*ctx).__bindgen_anon_1.args[1]) };
    if now != FIN_WAIT1 && now != CLOSE {
        return;
    }
    let sender = storage(ctx, from_ref(&SENDING).cast(), 0).cast::<Sender>();
    if !sender.is_null() {
        // SAFETY: a sockhash, and a key of it in the socket's storage.
        unsafe {
            let table = from_ref(&SENDERS).cast_mut().cast();
            bpf_map_delete_elem(table, (&raw mut (*sender).tuple).cast());
        }
    } else if now == CLOSE {
        // The closed socket no longer shows which side it was.
        let _ = GRANTS.remove(tuple(ctx, true));
        let _ = GRANTS.remove(tuple(ctx, false));
    }
}

/// The value for a port of a network namespace; 0: there is none.
#[inline(always)]
fn listens(netns: u64, port: u32) -> u32 {
    let key = ProxyKey {
        netns,
        port,
        reserved: 0,
    };
    PROXIES.get_ptr(key).map_or(0, |said| {
        // SAFETY: one aligned word.
        unsafe { read_volatile(said) }
    })
}
