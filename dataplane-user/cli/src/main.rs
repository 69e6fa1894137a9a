//! The binary `dataplane`.

use std::{io, process::ExitCode};

use clap::error::ErrorKind;
use dataplane_cli::{self as cli, Refusal, exit};

fn main() -> ExitCode {
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(Refusal::Config(errors)) => {
            eprintln!("dataplane: the configuration has errors, and nothing was done:\n{errors}");
            return ExitCode::FAILURE;
        }
        Err(Refusal::Usage(error)) => {
            // If this fails, there is no way to report it.
            let _ = error.print();
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
                _ => ExitCode::from(exit::USAGE),
            };
        }
    };
    match cli.run() {
        Ok(code) => code,
        // The reader closed the pipe, as in `dataplane services | head`.
        Err(error) if is(&error, io::ErrorKind::BrokenPipe) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dataplane: {}", chain(&error));
            if is(&error, io::ErrorKind::PermissionDenied) && !nix::unistd::geteuid().is_root() {
                eprintln!("What to do: run it as root (sudo).");
            }
            ExitCode::FAILURE
        }
    }
}

/// Returns the text of an error with its causes, without causes that an error's own text repeats.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Returns whether an I/O error of this kind is the cause.
fn is(error: &anyhow::Error, kind: io::ErrorKind) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let json = cause
            .downcast_ref::<serde_json::Error>()
            .and_then(serde_json::Error::io_error_kind);
        io.or(json) == Some(kind)
    })
}
