//! The binary `dataplane-migrate`.

use std::process::ExitCode;

use dataplane_migrate::{Cli, parse};

fn main() -> ExitCode {
    terminal::end("dataplane-migrate", parse(std::env::args_os()), Cli::run)
}
