//! `dataplane iptables`.

mod apply;
mod cleanup;
pub(super) mod compare;
mod detect;
mod import;
pub(super) mod import_mesh;
mod report;
pub(super) mod rules;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand};
use settings::Settings;

use super::netns::{self, Namespace};

/// Show the rules of iptables, nftables and IPVS on a node and whose they are; compare kube-proxy's with the dataplane's
/// tables; convert them to manifests; remove those of one owner; convert those of a sidecar; make a sidecar's rules those that are expected.
#[derive(Debug, Args)]
pub struct IptablesArgs {
    #[command(subcommand)]
    command: IptablesCommand,
}

#[derive(Debug, Subcommand)]
enum IptablesCommand {
    Apply(apply::ApplyArgs),
    Cleanup(cleanup::CleanupArgs),
    Compare(compare::CompareArgs),
    Detect(detect::DetectArgs),
    Import(import::ImportArgs),
    ImportMesh(import_mesh::ImportMeshArgs),
    Report(report::ReportArgs),
}

impl IptablesArgs {
    /// Adds what the file says.
    pub(super) fn settle(&mut self, file: &Settings) {
        match &mut self.command {
            IptablesCommand::Report(args) => args.settle(file),
            IptablesCommand::Compare(args) => args.paths.settle(file),
            IptablesCommand::Apply(_)
            | IptablesCommand::Cleanup(_)
            | IptablesCommand::Detect(_)
            | IptablesCommand::Import(_)
            | IptablesCommand::ImportMesh(_) => {}
        }
    }

    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            IptablesCommand::Apply(args) => args.run(),
            IptablesCommand::Cleanup(args) => args.run(),
            IptablesCommand::Compare(args) => args.run(),
            IptablesCommand::Detect(args) => args.run(),
            IptablesCommand::Import(args) => args.run(),
            IptablesCommand::ImportMesh(args) => args.run(),
            IptablesCommand::Report(args) => args.run(),
        }
    }
}

/// The network namespace with the rules, and the programs of iptables and nft.
#[derive(Debug, Args)]
struct WhereArgs {
    /// Network namespace that has the rules: a NAME of `ip netns`, a /PATH such as
    /// /proc/4711/ns/net, or pid:NUMBER [default: this command's own]
    #[arg(long, value_name = "N")]
    netns: Option<String>,

    /// Root directory that has the programs to run, such as /host or /proc/4711/root. The programs run there
    /// by chroot, in the network namespace of --netns [default: the programs on PATH]
    ///
    /// The programs run as this user with CAP_NET_ADMIN and CAP_NET_RAW only. A process that can write to the directory
    /// can replace the programs: name only directories that you trust.
    #[arg(long, value_name = "DIR")]
    host_root: Option<PathBuf>,
}

impl WhereArgs {
    fn namespace(&self) -> anyhow::Result<Namespace> {
        netns::of_option(self.netns.as_deref())
    }

    /// Returns where the programs are, for people.
    fn programs(&self) -> String {
        match &self.host_root {
            None => "on PATH".to_owned(),
            Some(root) => format!("below {}", root.display()),
        }
    }
}
