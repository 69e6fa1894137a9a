//! `cargo xtask build`: the kernel programs, then the binaries.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};

use crate::{
    command::{cargo, check},
    progress::note,
    setup::{self, Purpose, Tools},
    workspace,
};

/// Compile the kernel programs, and the binaries
///
/// The kernel programs go to target/bpf/dataplane-ebpf. The build of the binary `dataplane` embeds
/// them, so a node needs only the binary. `dataplane-migrate` is a binary of its own.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Build the binaries in the dev profile (target/debug), which compiles faster, not in the release
    /// profile (target/release)
    #[arg(long)]
    debug: bool,
    /// Stop after the kernel programs
    #[arg(long)]
    programs_only: bool,
}

/// Profile of the binaries. The kernel programs are always optimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    Debug,
    Release,
}

impl Profile {
    /// Returns the path of the built binary `name`.
    pub fn binary(self, name: &str) -> PathBuf {
        let directory = match self {
            Self::Debug => "debug",
            Self::Release => "release",
        };
        workspace::target().join(directory).join(name)
    }

    /// Returns cargo's arguments for the profile.
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Debug => &[],
            Self::Release => &["--release"],
        }
    }
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    let tools = setup::ensure(Purpose::Build, no_install)?;
    programs(&tools)?;
    if !arguments.programs_only {
        binaries(
            if arguments.debug {
                Profile::Debug
            } else {
                Profile::Release
            },
            &ALL,
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reports how long the first build of a clone takes. Later builds take seconds.
pub fn announce(profile: Profile) {
    let minutes = match profile {
        Profile::Debug => 3,
        Profile::Release => 6,
    };
    if !profile.binary("dataplane").exists() {
        note(&format!(
            "compiling the kernel programs, then `dataplane` and the crates that it uses: about {minutes} minutes on \
             two cores, once in a clone"
        ));
    }
}

/// Compiles the kernel programs, and puts them where the binaries' build looks for them.
pub fn programs(tools: &Tools) -> Result<()> {
    copy_if_different(&compile_programs(tools)?, &workspace::object())
}

/// Compiles the kernel programs. Returns the path of the object file.
pub fn compile_programs(tools: &Tools) -> Result<PathBuf> {
    let built = workspace::target().join("bpf-build");
    check(
        ebpf_cargo("build", tools)
            .args(["--profile", "bpf", "--target-dir"])
            .arg(&built),
    )?;
    Ok(built.join(TARGET).join("bpf/dataplane-ebpf"))
}

/// The target is little-endian. The programs are not tested on big-endian machines.
const TARGET: &str = "bpfel-unknown-none";

/// Returns a cargo command for dataplane-ebpf, for the kernel's instruction set.
fn ebpf_cargo(subcommand: &str, tools: &Tools) -> std::process::Command {
    // The programs read the registers of probed functions by the machine's own calling convention.
    let architecture = format!("bpf_target_arch=\"{}\"", env::consts::ARCH);
    let flags = [
        "--cfg",
        &architecture,
        "-C",
        &format!("linker={}", tools.bpf_linker.display()),
        // BTF: the types of the maps and programs, which the kernel needs and its tools show.
        "-C",
        "link-arg=--btf",
        // Without this option, LLVM for BPF calls a loop over bytes to clear or copy a few words. (The option exists
        // for programs compiled from C, and preserves the order of their accesses to packets.)
        "-C",
        "link-arg=--disable-expand-memcpy-in-order",
        // 32-bit registers, and atomic operations that order memory: Linux 5.12.
        "-C",
        "target-cpu=v3",
    ];
    let mut cargo = cargo();
    cargo
        .args([
            subcommand,
            "--package",
            "dataplane-ebpf",
            "-Z",
            "build-std=core",
            "--target",
        ])
        .arg(TARGET)
        // This replaces RUSTFLAGS and the user's configuration of this machine's linker.
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        // With CARGO_INCREMENTAL=1, rustc divides the code into other units and inlines other functions. The verifier
        // then refuses `packet_ingress`: its calls may use 512 bytes of stack together.
        .env("CARGO_INCREMENTAL", "0")
        // The target has no precompiled `core`. A stable rustc compiles it only with this variable, which permits `-Z`.
        .env("RUSTC_BOOTSTRAP", "1");
    cargo
}

/// Copies the file if the destination has other bytes. Otherwise it leaves the destination's age as it is, because
/// cargo recompiles by age.
fn copy_if_different(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if fs::read(to).is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    let directory = to.parent().expect("a file lies in a directory");
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    fs::write(to, bytes).with_context(|| format!("cannot write {}", to.display()))
}

/// Runs clippy over the kernel programs.
pub fn lint_programs(tools: &Tools) -> Result<()> {
    let built = workspace::target().join("bpf-build");
    check(
        ebpf_cargo("clippy", tools)
            .args(["--profile", "bpf", "--target-dir"])
            .arg(&built)
            .args(["--", "--deny", "warnings"]),
    )
}

/// The feature of the tests. Debug builds of the binaries have it too, so that tests and binaries share one build.
pub const TESTING: &str = "dataplane-cli/testing";

/// The packages of the binaries that a node or a lab runs.
pub const BINARIES: [&str; 2] = ["dataplane-cli", "dataplane-tests"];

/// [`BINARIES`], and the package of the program that migrates nodes with the rules of other programs.
pub const ALL: [&str; 3] = [BINARIES[0], "dataplane-migrate", BINARIES[1]];

/// Compiles the binaries of these packages, with the kernel programs in them.
pub fn binaries(profile: Profile, packages: &[&str]) -> Result<()> {
    let selected = packages.iter().flat_map(|package| ["--package", *package]);
    let mut build = cargo();
    build
        .args(["build", "--bins"])
        .args(selected)
        .args(profile.arguments());
    if profile == Profile::Debug && packages.contains(&"dataplane-cli") {
        build.args(["--features", TESTING]);
    }
    check(&mut build)
}
