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

/// Has each piece of memory from 128 KiB on returned to the kernel when it is freed, as long as the process lives.
///
/// That is the C library's default until the first such piece is freed: from then on it takes pieces of this size from the
/// heap, where small pieces that live longer keep the kernel from getting them back (`mallopt(3)`).
pub fn give_back_large_pieces() {
    // SAFETY: changes a setting of the C library's.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}
