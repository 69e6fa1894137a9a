//! `close()`, of the last who had the socket: what was kept for it goes.

use aya_ebpf::programs::SockContext;

use super::{GO_ON, peers};

#[inline(always)]
pub fn run(ctx: &SockContext) -> i32 {
    peers::release(ctx);
    GO_ON
}
