//! Decisions at TC: packets that no socket program saw.

use aya_ebpf::programs::TcContext;

/// The next program of the interface decides, or the stack (`TCX_NEXT` in
/// `include/uapi/linux/bpf.h`; for a clsact filter `TC_ACT_UNSPEC`, the same number).
const LEAVE_ALONE: i32 = -1;

pub fn ingress(_: &TcContext) -> i32 {
    LEAVE_ALONE
}

pub fn egress(_: &TcContext) -> i32 {
    LEAVE_ALONE
}
