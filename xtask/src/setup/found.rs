//! Finds the tools on this machine.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::Result;

use crate::command::on_path;

use super::{
    linker::{self, Foreign, Linker, Llvm},
    program::PROGRAMS,
    rustc::Toolchain,
};

/// The tools that the chores need, as found on this machine.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts, each looked up by its name"
)]
pub struct Found {
    pub rustc: super::rustc::Version,
    /// rustup's name of the active toolchain. `None` if rustup is not there to add components to
    /// it.
    pub toolchain: Option<String>,
    /// The source of `core`.
    pub rust_src: bool,
    /// The bpf-linker in our cache for this toolchain.
    pub linker: Linker,
    pub linker_works: bool,
    /// A bpf-linker on the search path.
    pub foreign: Option<Foreign>,
    /// Major versions of the distribution's LLVM that a bpf-linker can be built against.
    pub llvms: BTreeSet<u32>,
    /// The programs of [`PROGRAMS`] that are installed.
    pub programs: BTreeSet<&'static str>,
    /// Whether this machine installs packages with apt.
    pub apt: bool,
    pub root: bool,
}

impl Found {
    /// Looks for the tools. Changes nothing.
    pub fn look() -> Result<Self> {
        let toolchain = Toolchain::find()?;
        let linker = Linker::new(
            Llvm::of(&toolchain),
            toolchain.version.llvm,
            &linker::cache()?,
        );
        let linker_works = linker.works();
        Ok(Self {
            rust_src: toolchain.has_source(),
            linker_works,
            // This matters only if our own does not work.
            foreign: if linker_works { None } else { Foreign::find() },
            linker,
            llvms: system_llvms(Path::new("/usr/lib")),
            programs: PROGRAMS
                .iter()
                .map(|program| program.name)
                .filter(|name| on_path(name).is_some())
                .collect(),
            apt: on_path("apt-get").is_some(),
            root: nix::unistd::geteuid().is_root(),
            toolchain: toolchain.name.filter(|_| on_path("rustup").is_some()),
            rustc: toolchain.version,
        })
    }
}

fn system_llvms(libraries: &Path) -> BTreeSet<u32> {
    fs::read_dir(libraries)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let major = entry
                .file_name()
                .to_str()?
                .strip_prefix("llvm-")?
                .parse()
                .ok()?;
            entry
                .path()
                .join("lib/libLLVM.so")
                .exists()
                .then_some(major)
        })
        .collect()
}
