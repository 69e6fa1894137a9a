//! Where things lie in this clone.

use std::{
    env,
    path::{Path, PathBuf},
};

/// The clone's top directory.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}

/// Cargo's target directory.
pub fn target() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()))
}

/// The compiled kernel programs, where the build script of crate `kernel` looks for them.
pub fn object() -> PathBuf {
    target().join("bpf/dataplane-ebpf")
}
