//! The compiled kernel programs, as this binary carries them.

/// The ELF object with all programs and maps, aligned as its parser wants it.
///
/// Empty when the crate was built by plain `cargo build` before any `cargo xtask build`: check
/// with [`programs`].
pub static PROGRAMS: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/dataplane-ebpf"));

/// The binary was built where no kernel programs had been compiled.
#[derive(Debug, thiserror::Error)]
#[error("this binary was built without its kernel programs: build it with `cargo xtask build`")]
pub struct BuiltWithoutPrograms;

/// The kernel programs to load.
///
/// # Errors
/// If this binary was built without them.
pub fn programs() -> Result<&'static [u8], BuiltWithoutPrograms> {
    if PROGRAMS.is_empty() {
        Err(BuiltWithoutPrograms)
    } else {
        Ok(PROGRAMS)
    }
}
