//! The agent's own memory, and giving it back.

/// Returns freed memory to the kernel.
///
/// Reading manifests and programs takes a lot of memory for a moment, in small pieces all over the heap, and the C
/// library by itself returns only memory that is free at the heap's end.
pub fn give_back_freed_memory() {
    // SAFETY: may be called at any time (`malloc_trim(3)`).
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
