//! `cargo xtask bench`: builds the benchmarks in the profile for measurements, and runs them.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

use anyhow::{Result, anyhow};

use crate::{
    build::{self, Profile},
    command::shown,
    setup::{self, Purpose},
};

/// Measure: NAME [--quick] [--json FILE]
///
/// Compares the dataplane with direct connections, kube-proxy's rules and other proxies. Measures in
/// network namespaces of its own, in alternating rounds, and prints a table. `cargo xtask bench --
/// --help` lists the benchmarks and options.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask bench socket
    cargo xtask bench socket --quick --json socket.json")]
pub struct Arguments {
    /// Name and options of the benchmark
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "NAME [OPTIONS]"
    )]
    arguments: Vec<OsString>,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    build::programs(&setup::ensure(Purpose::Bench, no_install)?)?;
    build::binaries(
        Profile::Release,
        &["dataplane-cli", "dataplane-tests", "dataplane-benches"],
    )?;

    let mut benches = Command::new(Profile::Release.binary("dataplane-benches"));
    benches
        .args(&arguments.arguments)
        .env("DATAPLANE_BIN", Profile::Release.binary("dataplane"))
        .env("DATAPLANE_PROBE_BIN", Profile::Release.binary("probe"));
    Err(anyhow!(
        "cannot start {}: {}",
        shown(&benches),
        benches.exec()
    ))
}
