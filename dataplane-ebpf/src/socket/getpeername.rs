//! `getpeername()`: the peer of a socket that was connected to a VIP is the VIP.

use super::{Family, GO_ON, SockAddr, peers};

#[inline(always)]
pub fn run<F: Family>(call: &SockAddr<F>) -> i32 {
    peers::translate(call, call.addr(), call.port());
    GO_ON
}
