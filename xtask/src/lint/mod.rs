//! `cargo xtask lint`: checks that a change must pass besides the tests.

mod features;

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
};

use anyhow::Result;

use crate::{
    build,
    command::{cargo, check, output},
    links,
    progress::note,
    setup::{self, Purpose, Tools},
};

/// Check the formatting, clippy's warnings, the imports between files, features and the documentation's links
///
/// Clippy reads the kernel programs for their own instruction set; plain `cargo clippy` cannot. The programs are also
/// compiled.
#[derive(Debug, clap::Args)]
pub struct Arguments {}

/// Returns clippy's compiler, from the toolchain's directory.
fn clippy_driver() -> Option<PathBuf> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"])).ok()?;
    let driver = Path::new(sysroot.trim()).join("bin/clippy-driver");
    driver.is_file().then_some(driver)
}

/// Runs clippy over the kernel programs, compiles the programs, and runs clippy over all other crates meanwhile: rustc
/// takes one processor for the programs and their `core`.
///
/// This does not put the compiled programs where the binaries' build looks for them. Otherwise the documentation's build
/// would check all crates with the programs in them again.
fn crates(tools: &Tools) -> Result<()> {
    thread::scope(|scope| {
        let programs = scope.spawn(|| {
            build::lint_programs(tools)?;
            build::compile_programs(tools)
        });
        let others = check(cargo().args(["clippy", "--all-targets", "--", "--deny", "warnings"]));
        programs.join().expect("it returns its errors")?;
        others
    })
}

pub fn main(no_install: bool) -> Result<ExitCode> {
    note("lint: formatting");
    check(cargo().args(["fmt", "--all", "--check"]))?;
    note("lint: links of the pages");
    links::check()?;
    note("lint: imports between modules");
    // Without `--package`, so that cargo compiles dependencies with the features that the tests need.
    check(cargo().args(["test", "--quiet", "--test", "circles"]))?;
    note("lint: features of crates");
    features::check()?;
    note("lint: kernel programs, and all other crates");
    crates(&setup::ensure(Purpose::Build, no_install)?)?;
    note("lint: documentation");
    let mut documentation = cargo();
    documentation
        .args(["doc", "--no-deps"])
        .env("RUSTDOCFLAGS", "--deny warnings");
    if let Some(driver) = clippy_driver() {
        // As `cargo clippy` does. Otherwise cargo checks all crates of the workspace again, with rustc.
        documentation.env("RUSTC_WORKSPACE_WRAPPER", driver).env(
            "CLIPPY_ARGS",
            "--deny__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__",
        );
    }
    check(&mut documentation)?;
    Ok(ExitCode::SUCCESS)
}
