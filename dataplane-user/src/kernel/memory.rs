//! The agent's own memory, and giving it back.

use std::ffi::c_int;

/// `mi_option_purge_delay` in `mimalloc.h`, the same number in its versions 2 and 3; the crate does
/// not name it.
const PURGE_DELAY: c_int = 15;

/// Makes the allocator give freed memory back to the kernel at once.
///
/// By default it does so after a delay, at its next allocation: but an agent that has started, or
/// has read a large change, allocates nothing for a long time, and would keep for good what
/// reading its programs and manifests took for a moment.
pub fn give_back_freed_memory() {
    // SAFETY: sets an integer; may be called at any time.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, 0) };
}
