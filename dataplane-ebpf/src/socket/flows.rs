//! The VIPs that an unconnected UDP socket talks to.
//!
//! Most sockets talk to one VIP. Its flow is in a place of [`PeerSets`] under the socket's [`flow_owner`], as it is
//! faster than storage ([`super::peers`]). A socket that talks to a second VIP, or whose set is full, has its flows in its
//! own storage: the flow in the place is copied there, and is no longer valid in the place. So a valid flow in a place is
//! the flow that was sent to last, and replies belong to it first.
//!
//! Two threads may send on one socket at once. A flow in storage is therefore published by its
//! `endpoint_port`: cleared first, stored last, with a fence between; a reader sees a whole flow or
//! none. A flow in a place never changes, except that its `endpoint_port` is cleared. The place stays the socket's until
//! the socket is closed: a thread that still holds it writes into no other socket's place. If two threads send a socket's
//! first datagrams at once, each may take a place; a thread that finds another's place, for another VIP, then uses storage.

use core::ptr::{null, read_volatile, write_volatile};

use aya_ebpf::{EbpfContext as _, helpers::generated::bpf_get_socket_cookie};
use dataplane_common::{
    Addr, Port, Reason,
    tables::{Endpoint, Peer, PeerSets, UDP_FLOWS, UdpFlows, flow_owner},
};

use super::{Family, SockAddr, ports};
use crate::{
    atomic,
    select::count,
    sets,
    tables::{FLOWS, PEER_PORTS},
};

/// The endpoint that this socket used for a VIP last, or [`Endpoint::NONE`].
#[inline(always)]
pub fn endpoint_for<F: Family>(call: &SockAddr<F>, vip: Addr, port: Port) -> Endpoint {
    let kept = sets::find::<PeerSets>(owner(call), |flow| {
        // SAFETY: the socket's place.
        unsafe { (*flow).vip_port == port && (*flow).vip == vip && is_published(flow) }
    });
    if !kept.is_null() {
        // SAFETY: as above; the place is not null, and its endpoint stays.
        return unsafe { Endpoint::new((*kept).endpoint, (*kept).endpoint_port) };
    }
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
    if ports::has(&PEER_PORTS, port) {
        // SAFETY: the socket's place.
        let kept = sets::find::<PeerSets>(owner(call), |flow| unsafe {
            (*flow).endpoint_port == port && (*flow).endpoint == addr
        });
        if !kept.is_null() {
            // SAFETY: as above, not null.
            give(call, &unsafe {
                Endpoint::new((*kept).vip, (*kept).vip_port)
            });
            return true;
        }
    }
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
    // SAFETY: the socket's place.
    let kept = sets::find::<PeerSets>(owner(call), |flow| unsafe { is_published(flow) });
    if !kept.is_null() {
        return kept;
    }
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

/// Remembers a flow. Returns whether it is new.
#[inline(always)]
pub fn remember<F: Family>(call: &SockAddr<F>, new: &Peer) -> bool {
    // A socket may answer many clients that have asked it. These flows are not in places, whose ports are in PEER_PORTS.
    let is_itself = new.vip_port == new.endpoint_port && new.vip == new.endpoint;
    let owner = owner(call);
    if !is_itself {
        let kept = sets::find::<PeerSets>(owner, |_| true);
        if kept.is_null() {
            if keep(call, owner, new) {
                return true;
            }
        } else if is_same(kept, new) {
            return false;
        }
    }
    // SAFETY: `sk` of a sendmsg hook is a full socket.
    let flows = unsafe { FLOWS.get_or_insert_ptr_mut(&call.ctx, None) };
    if flows.is_null() {
        count(Reason::PeerNotKept);
        return false;
    }
    sets::find::<PeerSets>(owner, |flow| {
        flows_note(flows, flow);
        withdraw(flow);
        false
    });
    flows_note(flows, new) != 0
}

/// Remembers the flow of a socket that has no place, in a place. Returns whether the socket has flows to this VIP only: another
/// thread may have one to another endpoint, whose answers are translated, too.
#[inline(always)]
fn keep<F: Family>(call: &SockAddr<F>, owner: u64, new: &Peer) -> bool {
    // The place of a socket that is connected elsewhere would not be freed (`peers::release`).
    if call.is_connected() {
        return false;
    }
    // SAFETY: `sk` of a sendmsg hook is a full socket.
    if !unsafe { FLOWS.get_ptr_mut(&call.ctx) }.is_null() {
        return false;
    }
    // First, because programs that read the flow look at the bit first.
    ports::mark(&PEER_PORTS, new.endpoint_port);
    if !sets::put::<PeerSets>(owner, new) {
        return false;
    }
    let other = sets::find::<PeerSets>(owner, |flow| {
        // SAFETY: the socket's place.
        unsafe { (*flow).vip_port != new.vip_port || (*flow).vip != new.vip }
    });
    other.is_null()
}

/// Makes the flow in a socket's place invalid.
#[inline(always)]
fn withdraw(flow: *mut Peer) {
    // SAFETY: the socket's place.
    unsafe { write_volatile(&raw mut (*flow).endpoint_port, Port::ANY) };
}

/// Whether the flow in the socket's place is this one.
#[inline(always)]
fn is_same(flow: *const Peer, new: &Peer) -> bool {
    // SAFETY: the socket's place.
    unsafe {
        (*flow).endpoint_port == new.endpoint_port
            && (*flow).vip_port == new.vip_port
            && (*flow).vip == new.vip
            && (*flow).endpoint == new.endpoint
    }
}

/// Notes a flow in the socket's storage, instead of an earlier one to the same VIP, else of the oldest. Returns 1 if it
/// is new. The flow may be in the socket's place, and another thread may withdraw it, having noted it. With external
/// linkage: the verifier looks at it once, which saves it half of its work on `sendmsg`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flows_note(flows: *mut UdpFlows, new: *const Peer) -> u32 {
    if flows.is_null() || new.is_null() {
        return 0;
    }
    // SAFETY: the socket's place, or the caller's.
    let (new, port) = unsafe { (&*new, read_volatile(&raw const (*new).endpoint_port)) };
    if port == Port::ANY {
        return 0;
    }
    for index in 0..UDP_FLOWS as u32 {
        let flow = place(flows, index);
        // SAFETY: within the socket's element.
        unsafe {
            if (*flow).vip_port != new.vip_port || (*flow).vip != new.vip || !is_published(flow) {
                continue;
            }
            let other = (*flow).endpoint_port != port || (*flow).endpoint != new.endpoint;
            if other {
                publish(flows, flow, new, port);
            }
            write_volatile(&raw mut (*flows).recent, index);
            return u32::from(other);
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
        publish(flows, flow, new, port);
        write_volatile(&raw mut (*flows).recent, written);
    }
    1
}

/// Forgets all flows: if a socket is connected to a destination that does not belong to a service, it gets datagrams
/// from this peer alone, which may be an endpoint that it used for a VIP before.
#[inline(always)]
pub fn forget<F: Family>(call: &SockAddr<F>) {
    let mut has_place = false;
    sets::find::<PeerSets>(owner(call), |flow| {
        has_place = true;
        withdraw(flow);
        false
    });
    if has_place {
        // So that the place is freed when the connected socket is closed.
        ports::mark(&PEER_PORTS, call.port());
    }
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

/// The owner of the socket's flow in a place.
#[inline(always)]
fn owner<F: Family>(call: &SockAddr<F>) -> u64 {
    // SAFETY: the program's context.
    flow_owner(unsafe { bpf_get_socket_cookie(call.ctx.as_ptr()) })
}

/// # Safety
/// `flow` must be a place in `flows`, a socket's element.
#[inline(always)]
unsafe fn publish(flows: *mut UdpFlows, flow: *mut Peer, new: &Peer, port: Port) {
    let any = flows.cast::<u64>();
    // SAFETY: the caller's promise; the element is aligned to eight bytes.
    unsafe {
        write_volatile(&raw mut (*flow).endpoint_port, Port::ANY);
        atomic::fence(any);
        (*flow).vip = new.vip;
        (*flow).vip_port = new.vip_port;
        (*flow).endpoint = new.endpoint;
        atomic::fence(any);
        write_volatile(&raw mut (*flow).endpoint_port, port);
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
