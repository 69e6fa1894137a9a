//! `recvfrom()` on a UDP socket: a reply's source is the VIP that was asked, not the endpoint.

use dataplane_common::Reason;

use super::{Family, GO_ON, SockAddr, config, flows, peers};
use crate::{capture::datagrams, select::count};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let mesh = config().map_or(0, |config| config.mesh);
    if datagrams::arrive_judged(mesh) {
        datagrams::arrived(call, mesh);
    }
    let (addr, port) = (call.addr(), call.port());
    // A socket that is not connected, such as a server's, has no peer to look for.
    if (call.is_connected() && peers::translate(call, addr, port))
        || flows::translate_reply(call, addr, port)
    {
        count(Reason::ReplyTranslated);
    }
    GO_ON
}
