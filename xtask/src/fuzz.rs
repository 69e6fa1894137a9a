//! `cargo xtask fuzz`: packets against the model.

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

/// Throw packets at the kernel programs: packet [--packets N] [--seed S]
///
/// The programs are loaded as the agent loads them, on no interface, and run packet by packet in a
/// network namespace of their own; what they do is compared with a model of what they ought to do.
/// Needs root. `cargo xtask fuzz packet -- --help` tells the options.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask fuzz packet
    cargo xtask fuzz packet --packets 10000000 --seed 3")]
pub struct Arguments {
    /// What to throw packets at
    target: Target,
    /// How many, and from which seed on
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
