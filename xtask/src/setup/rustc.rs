//! The active Rust toolchain. It decides which other tools are needed.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::command::output;

/// The output of `rustc -vV`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// `1.95.0`, `1.97.0-nightly`.
    pub release: String,
    /// The major version of the LLVM that rustc was built with.
    pub llvm: u32,
}

impl Version {
    /// Reads the output of `rustc -vV`. Returns `None` if it lacks a line that we need.
    pub fn parse(output: &str) -> Option<Self> {
        let field = |name: &str| {
            output
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        Some(Self {
            release: field("release")?.to_owned(),
            llvm: field("LLVM version")?.split('.').next()?.parse().ok()?,
        })
    }
}

/// The toolchain that compiles this project.
#[derive(Debug, Clone)]
pub struct Toolchain {
    pub version: Version,
    /// The toolchain's directory.
    pub sysroot: PathBuf,
    /// rustup's name of the toolchain; `None` if rustup did not install it.
    pub name: Option<String>,
}

impl Toolchain {
    /// Asks the active rustc.
    pub fn find() -> Result<Self> {
        let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
        let sysroot = PathBuf::from(sysroot.trim());
        let version = output(Command::new(sysroot.join("bin/rustc")).arg("-vV"))?;
        let version = Version::parse(&version)
            .with_context(|| format!("`rustc -vV` names no release or no LLVM:\n{version}"))?;
        // rustup's `cargo` sets this variable for all programs that it starts.
        let name = env::var("RUSTUP_TOOLCHAIN").ok();
        Ok(Self {
            version,
            sysroot,
            name,
        })
    }

    /// Returns whether the toolchain has the source of `core`.
    pub fn has_source(&self) -> bool {
        self.sysroot
            .join("lib/rustlib/src/rust/library/core/Cargo.toml")
            .exists()
    }

    /// Returns the toolchain's own shared LLVM library. Most of rustup's toolchains have one.
    pub fn own_llvm(&self) -> Option<PathBuf> {
        std::fs::read_dir(self.sysroot.join("lib"))
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| own_llvm_name(path, self.version.llvm))
    }
}

/// Returns whether a file is such a library: `libLLVM.so.22.1-rust-1.95.0-stable`, not the linker
/// script `libLLVM-22-rust-1.95.0-stable.so` beside it.
fn own_llvm_name(path: &Path, llvm: u32) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.strip_prefix("libLLVM.so."))
        .is_some_and(|rest| rest.starts_with(&format!("{llvm}.")) && rest.contains("-rust-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_rustc_says_of_itself() {
        let said = "rustc 1.97.0-nightly (f5eca4fcf 2026-05-19)\nbinary: rustc\n\
                    host: x86_64-unknown-linux-gnu\nrelease: 1.97.0-nightly\n\
                    LLVM version: 22.1.4\n";
        let version = Version {
            release: "1.97.0-nightly".into(),
            llvm: 22,
        };
        assert_eq!(Version::parse(said), Some(version));
    }

    #[test]
    fn a_rustc_without_llvm_is_not_guessed_at() {
        let cranelift = "rustc 1.95.0\nrelease: 1.95.0\n";
        assert_eq!(Version::parse(cranelift), None);
        assert_eq!(
            Version::parse("release: 1.95.0\nLLVM version: unknown\n"),
            None
        );
    }

    #[test]
    fn tells_the_library_from_the_linker_script_and_from_another_major() {
        let named = |name: &str| own_llvm_name(Path::new(name), 22);
        assert!(named("lib/libLLVM.so.22.1-rust-1.95.0-stable"));
        assert!(!named("lib/libLLVM-22-rust-1.95.0-stable.so"));
        assert!(!named("lib/libLLVM.so.22.1"));
        assert!(!named("lib/libLLVM.so.21.1-rust-1.91.0-stable"));
        assert!(!named("lib/libLLVM.so.221.0-rust-9.0.0-stable"));
    }
}
