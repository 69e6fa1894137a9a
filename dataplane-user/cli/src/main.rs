//! The binary `dataplane`.

use std::process::ExitCode;

use dataplane_cli::{Cli, parse};

fn main() -> ExitCode {
    terminal::end("dataplane", parse(std::env::args_os()), Cli::run)
}
