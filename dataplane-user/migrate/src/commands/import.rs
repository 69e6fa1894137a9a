//! `dataplane-migrate import`.

use std::{
    io::{BufWriter, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use settings::{Settings, config};
use terminal::{exit, output};

use super::rules;
use crate::kube_proxy;

/// Print the services in kube-proxy's rules as manifests.
///
/// Reads kube-proxy's rules in the kernel, or those in a file, and prints Services and EndpointSlices for `dataplane run
/// --manifests`. The comment at the beginning has the keys of the agent's configuration that the rules show: which addresses
/// answer node ports, and which clients are masqueraded. Changes nothing.
///
/// A line that is not understood goes to standard error, and the service that it concerns is left out.
///
/// Exits with 0 if everything was understood, with 2 if not, and with 1 after an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane-migrate import > services.yaml               kube-proxy's rules in the kernel
  dataplane-migrate import --file rules > services.yaml  rules that were saved on a node")]
pub struct ImportArgs {
    /// A file that `iptables-save` and `ip6tables-save`, or `nft list ruleset`, wrote [default: the rules in the kernel]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Name of the node whose rules these are, for its own endpoints; as the agent has it [default: the host name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
}

impl ImportArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let node = match self.node_name {
            Some(name) if !name.is_empty() => name,
            _ => {
                let name = nix::unistd::gethostname().context("cannot ask for the host name")?;
                name.to_string_lossy().to_lowercase()
            }
        };
        let imported = rules::read(self.file.as_deref())?;
        let mut settings = Settings::default();
        rules::node(&mut settings.node, &imported.facts);
        rules::packets(&mut settings.packets, &imported.facts);
        let mut out = BufWriter::new(output::stdout());
        let from = match &self.file {
            Some(file) => file.display().to_string(),
            None => "the kernel".to_owned(),
        };
        writeln!(
            out,
            "# By kube-proxy's rules in {from}, on node {node}. Keys for the agent's configuration:"
        )?;
        for line in config::to_yaml(&settings).lines() {
            writeln!(out, "# {line}")?;
        }
        for (family, masquerade) in ["IPv4", "IPv6"].into_iter().zip(&imported.facts.masquerade) {
            if let Some(masquerade) = masquerade {
                writeln!(
                    out,
                    "# On the way to a cluster IP, the rules masquerade {masquerade} of {family}."
                )?;
            }
        }
        kube_proxy::write(&imported, &node, &mut out)?;
        out.flush()?;
        let problems = rules::problems(&imported.leftovers, imported.more);
        for problem in &problems {
            eprintln!("problem: {}: {}", problem.place, problem.text);
        }
        if imported.stale > 0 {
            eprintln!(
                "note: {} chains of services and endpoints have rules, and no rule leads to them: they serve nothing",
                imported.stale
            );
        }
        Ok(if problems.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(exit::CHANGES)
        })
    }
}
