//! `close()`, of the last who had the socket: what was kept for it goes.

use core::ptr::read_volatile;

use aya_ebpf::programs::SockContext;
use dataplane_common::Protocol;

use super::{GO_ON, config, peers};
use crate::capture::meters;

#[inline(always)]
pub fn run(ctx: &SockContext) -> i32 {
    peers::release(ctx);
    if config().is_some_and(|config| config.mesh != 0) && is_not_connected(ctx) {
        meters::release(ctx);
    }
    GO_ON
}

/// Whether it is a TCP socket without a connection, or with one that is not established and now never will be. One
/// that is outlives its socket, and what is measured of it goes when it is closed (`capture::origin`).
#[inline(always)]
fn is_not_connected(ctx: &SockContext) -> bool {
    // SAFETY: fields of the context.
    let (protocol, state) = unsafe {
        (
            read_volatile(&raw const (*ctx.sock).protocol),
            read_volatile(&raw const (*ctx.sock).state),
        )
    };
    let tcp = Protocol::from_number(protocol as u8) == Protocol::TCP;
    tcp && (state == meters::CLOSE || state == meters::SYN_SENT)
}
