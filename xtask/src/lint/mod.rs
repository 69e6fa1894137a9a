//! `cargo xtask lint`: what a change must pass besides the tests.

mod arrows;
mod circles;
mod features;
mod modules;
mod tokens;

use std::process::ExitCode;

use anyhow::Result;

use crate::{
    build,
    command::{cargo, check},
    links,
    progress::note,
    setup::{self, Purpose},
};

/// Check the formatting, clippy's warnings, the imports between files, features and the documentation's links
///
/// Clippy reads the kernel programs for their own instruction set; plain `cargo clippy` cannot.
#[derive(Debug, clap::Args)]
pub struct Arguments {}

pub fn main(no_install: bool) -> Result<ExitCode> {
    note("lint: formatting");
    check(cargo().args(["fmt", "--all", "--check"]))?;
    note("lint: links of the pages");
    links::check()?;
    note("lint: imports between files");
    arrows::check()?;
    note("lint: features of crates");
    features::check()?;
    note("lint: kernel programs");
    build::lint_programs(&setup::ensure(Purpose::Build, no_install)?)?;
    note("lint: all other crates");
    check(cargo().args(["clippy", "--all-targets", "--", "--deny", "warnings"]))?;
    note("lint: documentation");
    check(
        cargo()
            .args(["doc", "--no-deps"])
            .env("RUSTDOCFLAGS", "--deny warnings"),
    )?;
    Ok(ExitCode::SUCCESS)
}
