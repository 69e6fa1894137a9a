//! Works with the rules of other programs on a node: shows them, compares them with the dataplane's tables, takes over
//! a node or a pod and gives it back, converts rules and removes them. One file or folder per subcommand.

#![forbid(unsafe_code)]

mod commands;
mod completions;
pub mod kube_proxy;
mod rules;
mod takeover;
mod text;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use commands::{
    apply::ApplyArgs, cleanup::CleanupArgs, compare::CompareArgs, detect::DetectArgs,
    import::ImportArgs, import_mesh::ImportMeshArgs, report::ReportArgs,
};
use completions::CompletionsArgs;
use settings::{Settings, config};
use takeover::TakeoverArgs;
use terminal::Refusal;

/// Move a node or a pod from the rules of iptables, nftables and IPVS to the dataplane, and back.
///
/// Shows the rules on a node and whose they are; compares kube-proxy's with the dataplane's tables; takes a node or a pod
/// over, and gives it back; converts kube-proxy's rules to manifests, and a sidecar's to the agent's configuration; makes a
/// sidecar's rules those that are expected; removes the rules of one owner. Asks a running agent over its socket, as
/// `dataplane status` does. The programs of iptables and nft read and write the rules.
#[derive(Debug, Parser)]
#[command(name = "dataplane-migrate", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// The agent's configuration file (YAML). Flags and environment variables override its values. See
    /// docs/configuration.md
    #[arg(long, value_name = "FILE", env = "DATAPLANE_CONFIG", global = true)]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 error; 2 `compare`, `takeover`: something differs, `import`: some rules were not understood, `apply`: the result is \
not guaranteed, or with --dry-run something would change; 3 `takeover --revert`: an agent still runs, or captures the pod; 4 `takeover`: nothing \
to take over; 64 wrong command line.

Start with `dataplane-migrate report`, which says what a take-over means for the rules of others.";

#[derive(Debug, Subcommand)]
enum Command {
    Detect(DetectArgs),
    Report(ReportArgs),
    Compare(CompareArgs),
    Takeover(TakeoverArgs),
    Import(ImportArgs),
    ImportMesh(ImportMeshArgs),
    Apply(ApplyArgs),
    Cleanup(CleanupArgs),
    Completions(CompletionsArgs),
}

/// Reads the command line and the configuration file.
///
/// # Errors
///
/// If the command line or the file is invalid.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, Refusal> {
    let mut cli = terminal::without_values(Cli::command())
        .try_get_matches_from(arguments)
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map_err(Refusal::Usage)?;
    if let Some(path) = &cli.config {
        let file = config::read(path).map_err(Refusal::Config)?;
        cli.command.fill_from(&file);
    }
    Ok(cli)
}

impl Command {
    /// Fills the command's unset options from the file. Ignores keys of the file that the command has no option for.
    fn fill_from(&mut self, file: &Settings) {
        match self {
            Self::Report(args) => args.fill_from(file),
            Self::Compare(args) => args.paths.fill_from(file),
            Self::Takeover(args) => {
                args.paths.fill_from(file);
                args.socket.fill_from(file);
            }
            Self::Detect(_)
            | Self::Import(_)
            | Self::ImportMesh(_)
            | Self::Apply(_)
            | Self::Cleanup(_)
            | Self::Completions(_) => {}
        }
    }
}

impl Cli {
    /// Executes the command.
    ///
    /// # Errors
    ///
    /// If the command fails. The message is for the operator.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Detect(args) => args.run(),
            Command::Report(args) => args.run(),
            Command::Compare(args) => args.run(),
            Command::Takeover(args) => args.run(),
            Command::Import(args) => args.run(),
            Command::ImportMesh(args) => args.run(),
            Command::Apply(args) => args.run(),
            Command::Cleanup(args) => args.run(),
            Command::Completions(args) => args.run(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
