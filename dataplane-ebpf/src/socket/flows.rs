//! The VIPs that an unconnected UDP socket talks to, in the socket's own storage.
//!
//! Two threads may send on one socket at once. A flow is therefore published by its
//! `endpoint_port`: cleared first, stored last, with a fence between; a reader sees a whole flow or
//! none.

use core::ptr::{null, read_volatile, write_volatile};

use dataplane_common::{
    Addr, Port, Reason,
    tables::{Endpoint, Peer, UDP_FLOWS, UdpFlows},
};

use super::{Family, SockAddr};
use crate::{atomic, select::count, tables::FLOWS};

/// The endpoint that this socket used for a VIP last, or [`Endpoint::NONE`].
#[inline(always)]
pub fn endpoint_for<F: Family>(call: &SockAddr<F>, vip: Addr, port: Port) -> Endpoint {
    // SAFETY: `sk` of a sendmsg hook is a full socket.
    let flows = unsafe { FLOWS.get_ptr_mut(&call.ctx) };
    let mut endpoint = Endpoint::NONE;
    if flows.is_null() {
        return endpoint;
    }
    for index in 0..UDP_FLOWS as u32 {
        let flow = place(flows, index);
        // SAFETY: within the socket's element.
        unsafe {
            if (*flow).vip_port == port && (*flow).vip == vip && is_published(flow) {
                endpoint = Endpoint::new((*flow).endpoint, (*flow).endpoint_port);
                break;
            }
        }
    }
    endpoint
}

/// Replaces a reply's source by the VIP that it belongs to: the VIP that was asked last, if it has this endpoint, else
/// any. Returns whether the other end is known: it may also have asked this socket itself.
#[inline(always)]
pub fn translate_reply<F: Family>(call: &SockAddr<F>, addr: Addr, port: Port) -> bool {
    // SAFETY: `sk` of a recvmsg hook is a full socket.
    let flows = unsafe { FLOWS.get_ptr_mut(&call.ctx) };
    if flows.is_null() {
        return false;
    }
    // SAFETY: within the socket's element.
    let recent = unsafe { read_volatile(&raw const (*flows).recent) };
    for index in 0..UDP_FLOWS as u32 {
        let flow = place(flows, recent.wrapping_add(index));
        // SAFETY: within the socket's element.
        unsafe {
            if (*flow).endpoint_port == port && (*flow).endpoint == addr && is_published(flow) {
                give(call, &Endpoint::new((*flow).vip, (*flow).vip_port));
                return true;
            }
        }
    }
    false
}

/// Replaces a reply's source by the VIP that it belongs to, if the source differs.
#[inline(always)]
pub fn give<F: Family>(call: &SockAddr<F>, vip: &Endpoint) {
    if vip.port != call.port() || vip.addr != call.addr() {
        call.set(vip.addr, vip.port);
        count(Reason::ReplyTranslated);
    }
}

/// The flow that was sent to last; an endpoint's port of 0 means that there is none.
#[inline(always)]
pub fn recent<F: Family>(call: &SockAddr<F>) -> *const Peer {
    // SAFETY: `sk` of a sendmsg hook is a full socket.
    let flows = unsafe { FLOWS.get_ptr_mut(&call.ctx) };
    if flows.is_null() {
        return null();
    }
    // SAFETY: within the socket's element.
    place(flows, unsafe { read_volatile(&raw const (*flows).recent) })
}

/// Whether the socket used this endpoint for a VIP. `flows` must be a socket's element.
#[inline(always)]
pub fn has_endpoint(flows: *mut UdpFlows, addr: Addr, port: Port) -> bool {
    for index in 0..UDP_FLOWS as u32 {
        let flow = place(flows, index);
        // SAFETY: within the socket's element.
        unsafe {
            if (*flow).endpoint_port == port && (*flow).endpoint == addr && is_published(flow) {
                return true;
            }
        }
    }
    false
}

/// Remembers a flow, in the place of an earlier one to the same VIP, else of the oldest. Returns whether it is new.
#[inline(always)]
pub fn remember<F: Family>(call: &SockAddr<F>, new: &Peer) -> bool {
    // SAFETY: `sk` of a sendmsg hook is a full socket.
    let flows = unsafe { FLOWS.get_or_insert_ptr_mut(&call.ctx, None) };
    if flows.is_null() {
        count(Reason::PeerNotKept);
        return false;
    }
    for index in 0..UDP_FLOWS as u32 {
        let flow = place(flows, index);
        // SAFETY: within the socket's element.
        unsafe {
            if (*flow).vip_port != new.vip_port || (*flow).vip != new.vip || !is_published(flow) {
                continue;
            }
            let other =
                (*flow).endpoint_port != new.endpoint_port || (*flow).endpoint != new.endpoint;
            if other {
                publish(flows, flow, new);
            }
            write_volatile(&raw mut (*flows).recent, index);
            return other;
        }
    }
    // SAFETY: within the socket's element.
    unsafe {
        let written = read_volatile(&raw const (*flows).written);
        write_volatile(&raw mut (*flows).written, written.wrapping_add(1));
        let flow = place(flows, written);
        if is_published(flow) {
            count(Reason::FlowForgotten);
        }
        publish(flows, flow, new);
        write_volatile(&raw mut (*flows).recent, written);
    }
    true
}

/// Forgets all flows: if a socket is connected to a destination that does not belong to a service, it gets datagrams
/// from this peer alone, which may be an endpoint that it used for a VIP before.
#[inline(always)]
pub fn forget<F: Family>(call: &SockAddr<F>) {
    // SAFETY: `sk` of a connect hook is a full socket.
    let flows = unsafe { FLOWS.get_ptr_mut(&call.ctx) };
    if flows.is_null() {
        return;
    }
    for index in 0..UDP_FLOWS as u32 {
        // SAFETY: within the socket's element.
        unsafe { write_volatile(&raw mut (*place(flows, index)).endpoint_port, Port::ANY) };
    }
}

/// # Safety
/// `flow` must be a place in `flows`, a socket's element.
#[inline(always)]
unsafe fn publish(flows: *mut UdpFlows, flow: *mut Peer, new: &Peer) {
    let any = flows.cast::<u64>();
    // SAFETY: the caller's promise; the element is aligned to eight bytes.
    unsafe {
        write_volatile(&raw mut (*flow).endpoint_port, Port::ANY);
        atomic::fence(any);
        (*flow).vip = new.vip;
        (*flow).vip_port = new.vip_port;
        (*flow).endpoint = new.endpoint;
        atomic::fence(any);
        write_volatile(&raw mut (*flow).endpoint_port, new.endpoint_port);
    }
}

/// A flow's place, the index taken modulo [`UDP_FLOWS`].
#[inline(always)]
fn place(flows: *mut UdpFlows, index: u32) -> *mut Peer {
    let index = (index as usize) & (UDP_FLOWS - 1);
    // SAFETY: in bounds by the mask above.
    unsafe { (&raw mut (*flows).flows).cast::<Peer>().add(index) }
}

/// # Safety
/// `flow` must be a place in a socket's element.
#[inline(always)]
unsafe fn is_published(flow: *const Peer) -> bool {
    // SAFETY: the caller's promise.
    unsafe { read_volatile(&raw const (*flow).endpoint_port) != Port::ANY }
}
