//! The parts that the programs for operators, `dataplane` and `dataplane-migrate`, have in common: how they print, how they
//! end, where they look, and what `takeover` left for `cleanup` to know.

#![forbid(unsafe_code)]

mod end;
mod kept;
pub mod netns;
pub mod output;
mod place;

use std::io::{self, Write as _};

pub use end::{Refusal, end};
pub use kept::{GIVE_BACK, KeptArgs, pods_that_need_it};
pub use place::{PathArgs, SocketArgs, fill};

/// Exit codes of commands, besides 0 (success, healthy, no change) and 1 (failure, not healthy).
pub mod exit {
    /// `plan`: there are changes. `compare`, `takeover`: there are differences. `import`: some rules were not understood.
    /// `apply`: rules of others existed and stay beside the applied ones, or with `--dry-run` there are changes.
    pub const CHANGES: u8 = 2;
    /// `run`, `cleanup`, `takeover --revert`: another agent runs on this node.
    pub const BUSY: u8 = 3;
    /// `takeover`: there are no rules to take over.
    pub const NOTHING: u8 = 4;
    /// The command line is invalid (`EX_USAGE`). This is not clap's 2, which is an answer of `plan`.
    pub const USAGE: u8 = 64;
}

/// Hides the values of environment variables in a program's help: they may be long, or secret.
pub fn without_values(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|argument| argument.hide_env_values(true));
    command.mut_subcommands(without_values)
}

/// Prints a program's completion script for a shell.
///
/// # Errors
///
/// If standard output cannot be written.
pub fn completions(shell: clap_complete::Shell, mut program: clap::Command) -> io::Result<()> {
    // Generates into memory, because the generator panics on a write error.
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(shell, &mut program, name, &mut script);
    io::stdout().write_all(&script)
}
