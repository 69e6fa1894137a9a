//! Paths in this clone.

use std::{
    env,
    path::{Path, PathBuf},
};

/// Returns the clone's top directory.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}

/// Returns cargo's target directory.
pub fn target() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()))
}

/// Returns the path of the compiled kernel programs. The build script of crate `kernel` looks for
/// them there.
pub fn object() -> PathBuf {
    target().join("bpf/dataplane-ebpf")
}
