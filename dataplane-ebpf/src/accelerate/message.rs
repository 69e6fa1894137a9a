//! `sk_msg`: handles the bytes that an application sends.

use core::ptr::{from_ref, null_mut, read_volatile};

use aya_ebpf::{
    bindings::sk_msg_md,
    helpers::generated::{bpf_msg_redirect_hash, bpf_sk_storage_get},
};
use dataplane_common::accelerate::Sender;

use crate::tables::{GRANTS, RECEIVERS, SENDING};

/// The bytes go on: to the socket that was named, or by TCP.
const PASS: u32 = 1;
/// Into the other socket's receive queue (`BPF_F_INGRESS`).
const INGRESS: u64 = 1;

#[inline(always)]
pub fn run(ctx: *mut sk_msg_md) -> u32 {
    // SAFETY: a field of the context, which is checked; a socket storage table.
    let sender = unsafe {
        let sk = read_volatile(&raw const (*ctx).__bindgen_anon_3.sk);
        if sk.is_null() {
            return PASS;
        }
        let table = from_ref(&SENDING).cast_mut().cast();
        bpf_sk_storage_get(table, sk.cast(), null_mut(), 0).cast::<Sender>()
    };
    if sender.is_null() {
        return PASS;
    }
    // SAFETY: the socket's storage, and the socket is locked.
    unsafe {
        if (*sender).by_tcp != 0 {
            return PASS;
        }
        let after = (*sender).sent + u64::from(read_volatile(&raw const (*ctx).size));
        if after > (*sender).granted {
            let connection = &(*sender).tuple;
            if let Some(granted) = GRANTS.get_ptr(connection) {
                (*sender).granted = read_volatile(granted);
            }
            if after > (*sender).granted {
                (*sender).by_tcp = 1;
                return PASS;
            }
        }
        let table = from_ref(&RECEIVERS).cast_mut().cast();
        let key = (&raw mut (*sender).tuple).cast();
        if bpf_msg_redirect_hash(ctx, table, key, INGRESS) == i64::from(PASS) {
            (*sender).sent = after;
        } else {
            // The proxy's end is not there yet, or no longer. Bytes that go by TCP now must not be overtaken by later
            // ones.
            (*sender).by_tcp = 1;
        }
    }
    PASS
}
