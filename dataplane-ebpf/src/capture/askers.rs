//! Senders of datagrams to a UDP socket of a workload whose egress is denied. The socket may answer them.
//!
//! Two threads may write one place at once. At worst the place then has the address of one asker and the port of
//! another. Both have asked.

use dataplane_common::{
    Addr, Port,
    capture::{ASKERS as PLACES, Asker, Askers},
};

use crate::{
    socket::{Family, SockAddr},
    tables::ASKERS,
};

/// Remembers a sender, in the place of an earlier one. If there is no memory for it, the socket may not answer it.
#[inline(always)]
pub fn note<F: Family>(call: &SockAddr<F>, addr: Addr, port: Port) {
    // SAFETY: `sk` of a recvmsg hook is a full socket.
    let askers = unsafe { ASKERS.get_or_insert_ptr_mut(&call.ctx, None) };
    if askers.is_null() {
        return;
    }
    // SAFETY: a place of the socket's element.
    unsafe {
        *place(askers, addr, port) = Asker {
            addr,
            port,
            reserved: 0,
        };
    }
}

/// Whether a sender has asked, as far as the socket remembers.
#[inline(always)]
pub fn has<F: Family>(call: &SockAddr<F>, addr: Addr, port: Port) -> bool {
    // SAFETY: `sk` of a sendmsg hook is a full socket.
    let askers = unsafe { ASKERS.get_ptr_mut(&call.ctx) };
    if askers.is_null() {
        return false;
    }
    // SAFETY: a place of the socket's element.
    let asker = unsafe { *place(askers, addr, port) };
    asker.port == port && asker.addr == addr
}

#[inline(always)]
fn place(askers: *mut Askers, addr: Addr, port: Port) -> *mut Asker {
    let place = Asker::place(addr, port) & (PLACES - 1);
    // SAFETY: in bounds, by the mask.
    unsafe { (&raw mut (*askers).places).cast::<Asker>().add(place) }
}
