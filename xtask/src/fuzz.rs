//! `cargo xtask fuzz`: compares the kernel programs with a model on random packets.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
};

use anyhow::{Result, anyhow};
use clap::ValueEnum;

use crate::{
    build::{self, Profile},
    command::shown,
    setup::{self, Purpose},
};

/// Send random packets to the kernel programs: packet [--packets N] [--seed S]
///
/// Loads the programs as the agent does, but attaches them to no interface, and runs them packet by
/// packet in a network namespace of their own. Compares every result with a reference model. Needs
/// root. `cargo xtask fuzz packet -- --help` lists the options.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask fuzz packet
    cargo xtask fuzz packet --packets 10000000 --seed 3")]
pub struct Arguments {
    /// The programs to test
    target: Target,
    /// Number of packets, and seed
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTIONS"
    )]
    arguments: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Target {
    /// The programs of the packet path
    Packet,
}

pub fn main(arguments: &Arguments, no_install: bool) -> Result<ExitCode> {
    build::programs(&setup::ensure(Purpose::Lab, no_install)?)?;
    build::binaries(Profile::Debug, &["dataplane-tests", "dataplane-proof"])?;
    let Target::Packet = arguments.target;
    let mut fuzz = Command::new(Profile::Debug.binary("fuzz"));
    fuzz.args(&arguments.arguments)
        .env("DATAPLANE_PROBE_BIN", Profile::Debug.binary("probe"));
    Err(anyhow!("cannot start {}: {}", shown(&fuzz), fuzz.exec()))
}
