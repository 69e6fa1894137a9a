//! `cargo xtask setup`, and what each chore asks of it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// The tools that cargo does not find by itself.
#[derive(Debug)]
pub struct Tools {
    /// The linker for the kernel's instruction set.
    pub bpf_linker: PathBuf,
}

/// The version of bpf-linker that this project is built with.
const BPF_LINKER: &str = "0.13.0";

/// Finds what `cargo xtask build` needs.
pub fn for_build() -> Result<Tools> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set")?
        .join("dataplane");
    let bpf_linker = cache.join(format!("bpf-linker-{BPF_LINKER}-llvm22/bin/bpf-linker"));
    if !bpf_linker.exists() {
        bail!("{} is missing", bpf_linker.display());
    }
    Ok(Tools { bpf_linker })
}
