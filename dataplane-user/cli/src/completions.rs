//! `dataplane completions`.

use std::process::ExitCode;

use clap::{Args, CommandFactory};

use super::Cli;

/// Print a completion script for a shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane completions bash > /etc/bash_completion.d/dataplane
  dataplane completions zsh > \"${fpath[1]}/_dataplane\"
  dataplane completions fish > ~/.config/fish/completions/dataplane.fish")]
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
