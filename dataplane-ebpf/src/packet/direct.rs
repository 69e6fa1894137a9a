//! Connections to an endpoint itself whose client already has a flow to this endpoint from the same port; and
//! datagrams, while the agent announces that they may occur ([`DATAGRAMS`]).
//!
//! The endpoint's answers to both would look alike. So such a connection becomes a flow of its own with an unchanged
//! destination, and the endpoint sees another port of the client's. netfilter does the same if an answer's addresses
//! and ports are taken (`nf_nat_alloc_null_binding` in `net/netfilter/nf_nat_core.c`). Clients make such connections
//! after the programs of a cgroup began to serve their sockets, while the packet path served them before.
//!
//! A packet that does not go to a service has no bit in `VIPS`, so the program does not look it up as a request. It
//! does while such flows exist. The agent finds out when none is left (`agent/flows/walk.rs` in `dataplane-user`).

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

/// Announces such a flow, before any packet can find it.
#[inline(always)]
pub fn announce() {
    if let Some(made) = DIRECT.get_ptr_mut(0) {
        // SAFETY: as above. A full barrier, so that what follows is behind it.
        unsafe { atomic::fetch_add(made, 1) };
    }
}
