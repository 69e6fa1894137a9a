//! `dataplane-migrate completions`.

use std::process::ExitCode;

use clap::{Args, CommandFactory};

use super::Cli;

/// Print a completion script for a shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  dataplane-migrate completions bash > /etc/bash_completion.d/dataplane-migrate")]
pub struct CompletionsArgs {
    /// The shell for which to print the script
    shell: clap_complete::Shell,
}

impl CompletionsArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        terminal::completions(self.shell, Cli::command())?;
        Ok(ExitCode::SUCCESS)
    }
}
