//! How a program ends.

use std::{io, process::ExitCode};

use clap::error::ErrorKind;
use source::manifests;

use super::exit;

/// The reason why the command does not run.
#[derive(Debug)]
pub enum Refusal {
    /// The command line is invalid, or asks for help.
    Usage(clap::Error),
    /// The configuration file has faults.
    Config(manifests::Errors),
}

/// Runs a command whose command line was read, and prints the refusal or the error for the operator. `program`: its name.
pub fn end<C>(
    program: &str,
    command: Result<C, Refusal>,
    run: impl FnOnce(C) -> anyhow::Result<ExitCode>,
) -> ExitCode {
    let command = match command {
        Ok(command) => command,
        Err(Refusal::Config(errors)) => {
            eprintln!("{program}: the configuration has errors, and nothing was done:\n{errors}");
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
    match run(command) {
        Ok(code) => code,
        // The reader closed the pipe, as in `dataplane services | head`.
        Err(error) if is(&error, io::ErrorKind::BrokenPipe) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {}", chain(&error));
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
