//! `dataplane takeover`.

mod back;
mod check;
mod place;
mod steps;
mod told;
mod waits;
mod watch;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, builder::TypedValueParser as _};

use self::{
    place::Place,
    told::{Outcome, Tell},
};
use super::{
    PathArgs, SocketArgs, exit,
    output::{self, Format},
};
use crate::takeover::journal::DIRECTORY;
pub(super) use waits::when_it_serves;

/// Take this node over from kube-proxy: check that the dataplane serves what kube-proxy's rules do, then remove the rules.
///
/// The agent must run, in this network namespace. The command saves the rules to a file, compares them with the dataplane's tables, connects
/// to the services, keeps NAT on for connections that the rules translate, removes the rules, and connects again. If
/// something differs, nothing is removed. If a step fails, the rules come back. If the command is killed, the
/// next one finishes or undoes what it has begun; the node's services are served all the time.
///
/// Stop kube-proxy first, or use --watch: it writes its rules again.
///
/// With --revert, the rules come back as they were, and the dataplane is removed as soon as no agent runs.
///
/// Exits with 0 when it is done, with 2 if something differs and nothing was changed, with 3 if --revert waits for the end of the agent,
/// and with 1 after an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane takeover --dry-run           what would be done, and the rules that would go
  dataplane takeover
  dataplane takeover --revert            give the node back: first the rules return; then, when no agent
                                         runs, the dataplane goes")]
pub struct TakeoverArgs {
    /// Print the steps and the rules that they would change, and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Stay, and take over again, with all checks, when kube-proxy writes its rules; until the node is given back
    #[arg(long, conflicts_with_all = ["dry_run", "revert", "output"])]
    watch: bool,

    /// Bring back the rules that the last take-over saved, or those in FILE, which a take-over saved
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        default_missing_value = "",
        value_parser = clap::builder::StringValueParser::new().map(PathBuf::from)
    )]
    revert: Option<PathBuf>,

    /// Directory for the files with saved rules, and for the journal of what is not finished
    #[arg(
        long,
        value_name = "DIR",
        default_value = DIRECTORY,
        env = "DATAPLANE_TAKEOVER_DIR",
        hide_env_values = true
    )]
    takeover_dir: PathBuf,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,

    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

impl TakeoverArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let place = Place {
            directory: self.takeover_dir,
            bpffs: self.paths.bpffs(),
            cgroup: self.paths.or_guess().cgroup,
            agent: self.socket.client(),
        };
        let mut out = output::stdout();
        let mut tell = Tell::new(self.output, &mut out);
        let mut outcome = match &self.revert {
            None => steps::take_over(&place, self.dry_run, &mut tell),
            Some(file) => {
                let file = Some(file.as_path()).filter(|file| !file.as_os_str().is_empty());
                back::revert(&place, file, self.dry_run, &mut tell)
            }
        };
        if self.watch && matches!(outcome, Ok(Outcome::TakenOver)) {
            outcome = watch::watch(&place, &mut tell).map(|()| Outcome::TakenOver);
        }
        tell.end(&outcome)?;
        let outcome = outcome?;
        Ok(match outcome {
            Outcome::Differs => ExitCode::from(exit::CHANGES),
            Outcome::AgentRuns => ExitCode::from(exit::BUSY),
            _ => ExitCode::SUCCESS,
        })
    }
}
