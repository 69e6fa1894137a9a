//! `getpeername()`: the peer of a socket that was connected to a VIP is the VIP.

use super::{Family, GO_ON, SockAddr};
use crate::tables::PEERS;

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    // SAFETY: `sk` of a getpeername hook is a full socket.
    let peer = unsafe { PEERS.get_ptr_mut(&call.ctx) };
    if peer.is_null() {
        return GO_ON;
    }
    // SAFETY: the socket's own element, not null.
    let peer = unsafe { *peer };
    // The kernel's answer is compared, so that a socket which was connected elsewhere since, in a
    // way we did not see, is told the truth.
    if peer.endpoint_port == call.port() && peer.endpoint == call.addr() {
        call.set(peer.vip, peer.vip_port);
    }
    GO_ON
}
