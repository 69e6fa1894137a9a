//! `recvfrom()` on a UDP socket: replaces a reply's source, the endpoint, by the VIP that was asked.

use dataplane_common::{Reason, decide};

use super::{Family, GO_ON, SockAddr, config, flows, peers, siblings};
use crate::{
    capture::datagrams,
    select::{Live, count},
};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    let mesh = config().map_or(0, |config| config.mesh);
    if datagrams::arrive_judged(mesh) {
        datagrams::arrived(call, mesh);
    }
    let (addr, port) = (call.addr(), call.port());
    // A socket that is not connected, such as a server's, has no peer to look for.
    if call.is_connected() {
        if peers::translate(call, addr, port) {
            count(Reason::ReplyTranslated);
        } else {
            flows::translate_reply(call, addr, port);
        }
        return GO_ON;
    }
    if flows::translate_reply(call, addr, port) {
        return GO_ON;
    }
    let vip = siblings::vip_of(call, addr, port);
    if !vip.is_none() {
        flows::give(call, &vip);
    } else if decide::may_be_served(&Live, addr) {
        siblings::note_asked(call);
    }
    GO_ON
}
