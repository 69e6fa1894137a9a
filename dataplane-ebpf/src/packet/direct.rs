//! Connections to an endpoint itself whose client already has a flow to this endpoint from the same port; and datagrams,
//! while the agent says that this may be ([`DATAGRAMS`]).
//!
//! The endpoint's answers to both would be the same. So such a connection is a flow of its own, which goes where it
//! goes anyway, and the endpoint sees another port of the client's: what netfilter does where it finds an answer's
//! addresses and ports taken (`nf_nat_alloc_null_binding` in `net/netfilter/nf_nat_core.c`). Clients make such
//! connections when their sockets are served from now on, by the programs of a cgroup, and their packets were before.
//!
//! A packet to no service is not looked for as a request: it has no bit in `VIPS`. While there are such flows, it is.
//! The agent says when there are none any more (`agent/flows.rs` in `dataplane-user`).

use core::ptr::read_volatile;

use dataplane_common::packet::direct::DATAGRAMS;

use crate::{atomic, tables::DIRECT};

#[inline(always)]
fn word() -> u64 {
    match DIRECT.get_ptr_mut(0) {
        // SAFETY: an aligned word of an array, whose elements stay; other CPUs change it meanwhile.
        Some(word) => unsafe { read_volatile(word) },
        None => 0,
    }
}

/// Whether there may be such flows.
#[inline(always)]
pub fn is_any() -> bool {
    word() != 0
}

/// Whether datagrams may begin one.
#[inline(always)]
pub fn has_datagrams() -> bool {
    word() & DATAGRAMS != 0
}

/// Says that there will be one: before any packet can find it.
#[inline(always)]
pub fn announce() {
    if let Some(made) = DIRECT.get_ptr_mut(0) {
        // SAFETY: as above. A full barrier, so that what follows is behind it.
        unsafe { atomic::fetch_add(made, 1) };
    }
}
