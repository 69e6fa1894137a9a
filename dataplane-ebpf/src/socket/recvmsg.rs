//! `recvfrom()` on a UDP socket: a reply's source is the VIP that was asked, not the endpoint.

use dataplane_common::Reason;

use super::{Family, GO_ON, SockAddr, flows};
use crate::{select::count, tables::PEERS};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let (addr, port) = (call.addr(), call.port());
    // SAFETY: `sk` of a recvmsg hook is a full socket.
    let peer = unsafe { PEERS.get_ptr_mut(&call.ctx) };
    if !peer.is_null() {
        // SAFETY: the socket's own element, not null.
        let peer = unsafe { *peer };
        if peer.endpoint_port == port && peer.endpoint == addr {
            call.set(peer.vip, peer.vip_port);
            count(Reason::ReplyTranslated);
            return GO_ON;
        }
    }
    if flows::translate_reply(call, addr, port) {
        count(Reason::ReplyTranslated);
    }
    GO_ON
}
