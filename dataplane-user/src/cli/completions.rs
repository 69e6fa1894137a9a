//! `dataplane completions`.

use std::{io::Write, process::ExitCode};

use clap::{Args, CommandFactory};

use super::Cli;

/// Print a script that completes this command line in a shell.
///
/// bash: dataplane completions bash > /etc/bash_completion.d/dataplane
/// zsh:  dataplane completions zsh > "${fpath[1]}/_dataplane"
/// fish: dataplane completions fish > ~/.config/fish/completions/dataplane.fish
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct CompletionsArgs {
    /// Which shell
    shell: clap_complete::Shell,
}

impl CompletionsArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        // Into memory first: the generator panics where it cannot write.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "dataplane", &mut script);
        std::io::stdout().write_all(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}
