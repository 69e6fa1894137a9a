//! `close()` by the last owner of a socket: removes its records.

use aya_ebpf::programs::SockContext;

use super::{GO_ON, peers};

#[inline(always)]
pub fn run(ctx: &SockContext) -> i32 {
    peers::release(ctx);
    GO_ON
}
