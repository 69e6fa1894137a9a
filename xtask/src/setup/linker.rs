//! bpf-linker: the place of the program for the active toolchain, and how it is built.
//!
//! rustc passes LLVM bitcode to bpf-linker, so both must use one LLVM. Most toolchains include
//! theirs as a shared library, which bpf-linker then uses. Otherwise bpf-linker uses the
//! distribution's.

use std::{
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::rustc::Toolchain;
use crate::{
    command::{cargo, on_path, quoted},
    progress,
};

/// The version that this project is built with.
pub const VERSION: &str = "0.13.0";

/// The major versions of LLVM that bpf-linker can be built for.
pub const LLVMS: std::ops::RangeInclusive<u32> = 21..=23;

/// The LLVM that a bpf-linker is built against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Llvm {
    /// The toolchain's own library.
    Toolchain(PathBuf),
    /// The distribution's library, of this major version.
    System(u32),
}

impl Llvm {
    /// Returns the LLVM to use with a toolchain.
    pub fn of(toolchain: &Toolchain) -> Self {
        toolchain
            .own_llvm()
            .map_or(Self::System(toolchain.version.llvm), Self::Toolchain)
    }

    /// Returns the directory in which Debian and Ubuntu install the libraries of an LLVM.
    pub fn system_directory(major: u32) -> PathBuf {
        PathBuf::from(format!("/usr/lib/llvm-{major}"))
    }

    /// Returns the LLVM's name in the cache.
    fn key(&self) -> String {
        match self {
            // `libLLVM.so.22.1-rust-1.95.0-stable`: the name that the dynamic linker looks for.
            Self::Toolchain(library) => library
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            Self::System(major) => format!("llvm{major}"),
        }
    }
}

/// Returns the directory of the tools that we build for this user.
pub fn cache() -> Result<PathBuf> {
    cache_in(
        env::var_os("XDG_CACHE_HOME").as_deref(),
        env::home_dir().as_deref(),
    )
    .context("there is no place for a cache: set HOME or XDG_CACHE_HOME")
}

fn cache_in(xdg: Option<&OsStr>, home: Option<&Path>) -> Option<PathBuf> {
    // The XDG base directory specification requires that relative paths are ignored.
    let xdg = xdg.map(PathBuf::from).filter(|path| path.is_absolute());
    Some(
        xdg.or_else(|| Some(home?.join(".cache")))?
            .join("dataplane"),
    )
}

/// A bpf-linker of ours, which may not be built yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linker {
    pub llvm: Llvm,
    pub llvm_major: u32,
    /// The root directory of `cargo install`. The program is in `bin` below it.
    pub directory: PathBuf,
}

impl Linker {
    /// Returns the bpf-linker for an LLVM in a cache.
    pub fn new(llvm: Llvm, llvm_major: u32, cache: &Path) -> Self {
        let directory = cache.join(format!("bpf-linker-{VERSION}-{}", llvm.key()));
        Self {
            llvm,
            llvm_major,
            directory,
        }
    }

    /// Returns the path of the program.
    pub fn program(&self) -> PathBuf {
        self.directory.join("bin/bpf-linker")
    }

    /// Returns whether the program exists and starts. It does not start if the toolchain with its
    /// LLVM was removed.
    pub fn works(&self) -> bool {
        let program = self.program();
        program.exists() && version(&program).as_deref() == Some(VERSION)
    }

    /// Builds bpf-linker. If another clone is building it, waits for this build.
    pub fn build(&self) -> Result<()> {
        let cache = self.directory.parent().expect("lies in the cache");
        fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let lock = cache.join("lock");
        let lock =
            fs::File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
        if lock.try_lock().is_err() {
            progress::note("another clone is building bpf-linker: waiting for it");
            lock.lock().context("cannot lock the cache")?;
            if self.works() {
                return Ok(());
            }
        }

        // Build in a directory aside, then move it into place as a whole. The next build continues
        // an interrupted one.
        let mut partial = self.directory.clone().into_os_string();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let installed = Self {
            directory: partial.clone(),
            ..self.clone()
        };
        installed.link_llvm()?;
        progress::run(
            &format!("building bpf-linker {VERSION} for LLVM {}", self.llvm_major),
            installed
                .cargo_install()
                .arg("--force")
                .arg("--target-dir")
                .arg(partial.join("target")),
        )?;
        if !installed.works() {
            bail!(
                "{} does not start, though it was just built; try it by hand",
                installed.program().display()
            );
        }
        fs::remove_dir_all(partial.join("target")).context("cannot clear up after the build")?;
        if self.directory.exists() {
            fs::remove_dir_all(&self.directory)
                .with_context(|| format!("cannot replace {}", self.directory.display()))?;
        }
        fs::rename(&partial, &self.directory)
            .with_context(|| format!("cannot create {}", self.directory.display()))
    }

    /// Links the toolchain's library as `lib/libLLVM.so`, the name that bpf-linker's build looks
    /// for.
    fn link_llvm(&self) -> Result<()> {
        let libraries = self.directory.join("lib");
        fs::create_dir_all(&libraries)
            .with_context(|| format!("cannot create {}", libraries.display()))?;
        if let Llvm::Toolchain(library) = &self.llvm {
            let link = libraries.join("libLLVM.so");
            let _ = fs::remove_file(&link);
            symlink(library, &link).with_context(|| format!("cannot create {}", link.display()))?;
        }
        Ok(())
    }

    fn cargo_install(&self) -> Command {
        let mut cargo = cargo();
        cargo
            // Build outside of the workspace, whose configuration is for its own packages.
            .current_dir(&self.directory)
            .args(["install", "bpf-linker", "--locked", "--version", VERSION])
            .args([
                "--no-default-features",
                "--features",
                &format!("llvm-{}", self.llvm_major),
            ])
            .arg("--root")
            .arg(&self.directory)
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        for (name, value) in self.environment() {
            cargo.env(name, value);
        }
        cargo
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        match &self.llvm {
            Llvm::Toolchain(library) => {
                let directory = library.parent().unwrap_or(Path::new("/"));
                vec![
                    ("LLVM_PREFIX", self.directory.display().to_string()),
                    (
                        "RUSTFLAGS",
                        format!("-C link-arg=-Wl,-rpath,{}", directory.display()),
                    ),
                ]
            }
            Llvm::System(major) => {
                vec![(
                    "LLVM_PREFIX",
                    Llvm::system_directory(*major).display().to_string(),
                )]
            }
        }
    }

    /// Returns the commands that do the work of [`Linker::build`].
    pub fn commands(&self) -> Vec<String> {
        let mut commands = Vec::new();
        let directory = quoted(&self.directory.to_string_lossy());
        if let Llvm::Toolchain(library) = &self.llvm {
            commands.push(format!("mkdir -p {directory}/lib"));
            let library = quoted(&library.to_string_lossy());
            commands.push(format!("ln -sf {library} {directory}/lib/libLLVM.so"));
        }
        let environment: Vec<String> = self
            .environment()
            .into_iter()
            .map(|(name, value)| format!("{name}={}", quoted(&value)))
            .collect();
        commands.push(format!(
            "{} cargo install bpf-linker --locked --version {VERSION} --no-default-features \
             --features llvm-{} --root {directory}",
            environment.join(" "),
            self.llvm_major,
        ));
        commands
    }
}

/// A bpf-linker that the user installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    pub program: PathBuf,
    /// The version that it prints; `None` if it does not start.
    pub version: Option<String>,
    /// The major version of the shared LLVM that it uses; `None` if LLVM is linked statically.
    pub llvm: Option<u32>,
}

impl Foreign {
    /// Returns the first bpf-linker on the search path.
    pub fn find() -> Option<Self> {
        let program = on_path("bpf-linker")?;
        // With this variable, the dynamic linker lists the libraries and does not start the
        // program.
        let listed = Command::new(&program)
            .env("LD_TRACE_LOADED_OBJECTS", "1")
            .output()
            .ok();
        let llvm = listed.and_then(|output| loaded_llvm(&String::from_utf8_lossy(&output.stdout)));
        Some(Self {
            version: version(&program),
            llvm,
            program,
        })
    }

    /// Returns whether it is as good as a bpf-linker that we would build.
    pub fn fits(&self, llvm: u32) -> bool {
        self.version.as_deref() == Some(VERSION) && self.llvm == Some(llvm)
    }

    /// Describes it for the user, with version and LLVM.
    pub fn described(&self) -> String {
        let version = self.version.as_deref().unwrap_or("that does not start");
        let llvm = match self.llvm {
            Some(major) => format!("for LLVM {major}"),
            None => "for an LLVM that it does not tell".to_owned(),
        };
        format!("{} is bpf-linker {version}, {llvm}", self.program.display())
    }
}

fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    Some(said.trim().strip_prefix("bpf-linker ")?.to_owned())
}

/// Returns the major version of the LLVM in a list of loaded libraries, as `ldd` prints it.
fn loaded_llvm(listed: &str) -> Option<u32> {
    listed.lines().find_map(|line| {
        let name = line.trim().strip_prefix("libLLVM")?;
        // libLLVM.so.22.1, or libLLVM-15.so.1 for older versions.
        let number = name
            .strip_prefix(".so.")
            .or_else(|| name.strip_prefix('-'))?;
        let end = number
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(number.len());
        number[..end].parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_follows_xdg() {
        let home = Some(Path::new("/home/ann"));
        let cache = |xdg: &str| cache_in(Some(OsStr::new(xdg)), home).unwrap();
        assert_eq!(
            cache("/var/cache/ann"),
            Path::new("/var/cache/ann/dataplane")
        );
        assert_eq!(cache(""), Path::new("/home/ann/.cache/dataplane"));
        assert_eq!(cache("relative"), Path::new("/home/ann/.cache/dataplane"));
        assert_eq!(cache_in(None, None), None);
    }

    #[test]
    fn a_linker_is_kept_by_its_llvm() {
        let library = PathBuf::from("/t/lib/libLLVM.so.22.1-rust-1.95.0-stable");
        let own = Linker::new(Llvm::Toolchain(library), 22, Path::new("/c"));
        let system = Linker::new(Llvm::System(22), 22, Path::new("/c"));
        let other = Linker::new(Llvm::System(21), 21, Path::new("/c"));
        assert_ne!(own.directory, system.directory);
        assert_ne!(system.directory, other.directory);
        assert!(!own.works());
    }

    #[test]
    fn the_commands_name_the_llvm_and_the_place() {
        let library = PathBuf::from("/my rust/lib/libLLVM.so.22.1-rust-1.95.0-stable");
        let commands = Linker::new(Llvm::Toolchain(library), 22, Path::new("/c")).commands();
        let place = "/c/bpf-linker-0.13.0-libLLVM.so.22.1-rust-1.95.0-stable";
        assert_eq!(
            commands,
            [
                format!("mkdir -p {place}/lib"),
                format!(
                    "ln -sf '/my rust/lib/libLLVM.so.22.1-rust-1.95.0-stable' {place}/lib/libLLVM.so"
                ),
                format!(
                    "LLVM_PREFIX={place} RUSTFLAGS='-C link-arg=-Wl,-rpath,/my rust/lib' \
                     cargo install bpf-linker --locked --version 0.13.0 --no-default-features \
                     --features llvm-22 --root {place}"
                ),
            ]
        );
    }

    #[test]
    fn knows_the_llvm_of_a_foreign_linker() {
        let shared = "\tlinux-vdso.so.1 (0x00007f)\n\
                      \tlibLLVM.so.22.1 => /usr/lib/llvm-22/lib/libLLVM.so.22.1 (0x7fe3)\n";
        assert_eq!(loaded_llvm(shared), Some(22));
        assert_eq!(
            loaded_llvm("\tlibLLVM-15.so.1 => /lib/libLLVM-15.so.1 (0x7f)\n"),
            Some(15)
        );
        assert_eq!(loaded_llvm("\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n"), None);
    }
}
