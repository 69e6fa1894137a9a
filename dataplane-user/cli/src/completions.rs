//! `dataplane completions`.

use std::{io::Write, process::ExitCode};

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
        // Generates into memory, because the generator panics on a write error.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "dataplane", &mut script);
        std::io::stdout().write_all(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}
