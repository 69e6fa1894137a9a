//! `dataplane-migrate takeover`.

mod back;
mod captured;
mod check;
mod mesh;
mod place;
mod steps;
mod told;
mod waits;
mod watch;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::ensure;
use clap::{Args, builder::TypedValueParser as _};
use takeover::journal::OF_NETNS;
use terminal::{
    KeptArgs, PathArgs, SocketArgs, exit, netns,
    output::{self, Format},
};

use self::{
    place::Place,
    told::{Outcome, Tell},
};
use crate::commands::OwnerWord;

/// Take this node over from kube-proxy: check that the dataplane serves what kube-proxy's rules do, then remove the rules. Or take
/// a pod over from a mesh's rules.
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
/// With --owner istio or osm, the command takes over the rules by which a mesh captures a pod's connections, in the network namespace of
/// --netns. The agent must capture the pod as the rules do (`dataplane-migrate import-mesh` prints the configuration). While the rules
/// change, no packet passes the network namespace. If this command dies, the kernel lets packets pass again after 15 seconds.
///
/// Exits with 0 when it is done, with 2 if something differs and nothing was changed, with 3 if --revert waits for the end of the agent (with
/// --owner, of its capture), with 4 if there are no rules to take over,
/// and with 1 after an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane-migrate takeover --dry-run           what would be done, and the rules that would go
  dataplane-migrate takeover
  dataplane-migrate takeover --owner istio --netns pid:4711
                                                 a pod, of which process 4711 is one
  dataplane-migrate takeover --revert            give the node back: first the rules return;
                                                 then, when no agent runs, the dataplane goes")]
pub struct TakeoverArgs {
    /// Whose rules are taken over
    #[arg(long, value_enum, default_value = "kube-proxy")]
    owner: OwnerWord,

    /// With --owner istio or osm: network namespace that has the rules: a NAME of `ip netns`, a /PATH such as /proc/4711/ns/net, or
    /// pid:NUMBER [default: this command's own]
    #[arg(long, value_name = "N")]
    netns: Option<String>,

    /// Print the steps and the rules that they would change, and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Wait until the agent serves, and try again for 20 s if something differs, for a unit or a container that starts with the
    /// agent
    #[arg(long, conflicts_with_all = ["dry_run", "revert"])]
    wait: bool,

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

    #[command(flatten)]
    kept: KeptArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub paths: PathArgs,

    #[command(flatten)]
    pub socket: SocketArgs,
}

impl TakeoverArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let outcome = match self.owner {
            OwnerWord::KubeProxy => self.of_node()?,
            OwnerWord::Istio => self.of_pod("istio")?,
            OwnerWord::Osm => self.of_pod("osm")?,
        };
        Ok(match outcome {
            Outcome::Differs => ExitCode::from(exit::CHANGES),
            Outcome::AgentRuns => ExitCode::from(exit::BUSY),
            Outcome::Nothing => ExitCode::from(exit::NOTHING),
            _ => ExitCode::SUCCESS,
        })
    }

    /// Returns the file that --revert names.
    fn file(&self) -> Option<&Path> {
        let file = self.revert.as_deref();
        file.filter(|file| !file.as_os_str().is_empty())
    }

    fn place(&self, directory: PathBuf) -> Place {
        Place {
            directory,
            bpffs: self.paths.bpffs(),
            cgroup: self.paths.or_guess().cgroup,
            agent: self.socket.client(),
            owners: self.owner.owners(),
        }
    }

    fn of_node(&self) -> anyhow::Result<Outcome> {
        ensure!(
            self.netns.is_none(),
            "--netns is for rules of a mesh: --owner istio or osm"
        );
        let place = self.place(self.kept.takeover_dir.clone());
        let mut out = output::stdout();
        let mut tell = Tell::new(self.output, &mut out);
        let mut outcome = match &self.revert {
            None if self.wait => waits::take_over(&place, &mut tell),
            None => steps::take_over(&place, self.dry_run, &mut tell),
            Some(_) => back::revert(&place, self.file(), self.dry_run, &mut tell),
        };
        if self.watch && matches!(outcome, Ok(Outcome::TakenOver)) {
            outcome = watch::watch(&place, &mut tell).map(|()| Outcome::TakenOver);
        }
        tell.end(&outcome)?;
        outcome
    }

    /// Takes over a pod, or gives it back. All steps run inside the pod's network namespace.
    fn of_pod(&self, name: &str) -> anyhow::Result<Outcome> {
        ensure!(
            !self.watch && !self.wait,
            "--watch and --wait are for kube-proxy's rules: a mesh writes a pod's rules once"
        );
        let namespace = netns::of_option(self.netns.as_deref())?;
        // Each network namespace has a separate journal for each owner.
        let directory = format!("{OF_NETNS}{}-{name}", namespace.cookie);
        let directory = self.kept.takeover_dir.join(directory);
        let place = self.place(directory);
        let work = || {
            // A process may have ended in the meantime, and another process may have its number.
            ensure!(
                kernel::namespaces::netns_cookie()? == namespace.cookie,
                "{} is another network namespace now; nothing was changed",
                namespace.place
            );
            let mut out = output::stdout();
            let mut tell = Tell::new(self.output, &mut out);
            let outcome = match &self.revert {
                None => mesh::take_over(&place, self.dry_run, &mut tell),
                Some(_) => mesh::revert(&place, self.file(), self.dry_run, &mut tell),
            };
            tell.end(&outcome).and(outcome)
        };
        namespace.inside(|| Ok(work()))?
    }
}
