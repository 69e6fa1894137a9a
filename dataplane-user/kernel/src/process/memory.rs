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

/// Makes the C library return each allocation of 128 KiB or more to the kernel when the agent frees it.
///
/// By default the C library does so only until the agent frees the first such allocation. Then it takes allocations of this size
/// from the heap, and small allocations after them prevent their return to the kernel (`M_MMAP_THRESHOLD` in `mallopt(3)`).
/// Fixing this size also fixes the free memory at a heap's end that the C library keeps, at 128 KiB: tunnels would return the
/// memory of each read to the kernel, and get new pages for the next one. So the C library keeps 16 MiB (`M_TRIM_THRESHOLD`).
pub fn return_large_allocations() {
    // SAFETY: changes settings of the C library's.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 16 << 20);
    }
}
