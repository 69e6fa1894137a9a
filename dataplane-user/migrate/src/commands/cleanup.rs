//! `dataplane-migrate cleanup`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use kernel::{netfilter::keep_nat, nf_conntrack, routing::MarkRule};
use serde::Serialize;
use takeover::owners::{self, Owner};
use terminal::output::{self, DIM, Format, WARN};

use super::{OwnerWord, WhereArgs};
use crate::{
    rules::cleanup::{self, Done, Step},
    text::printable,
};

/// Remove the rules of one owner, in both variants of iptables, both families, and nf_tables.
///
/// Removes every chain of the owner, and every rule that leads to such a chain, in one transaction for each table. Removes the
/// owner's tables of nf_tables. Then removes the owner's routing rules (`ip rule`) that ask for marks, with the local routes that
/// only they lead to. Rules of others stay as they are, with their order and counters. A chain that
/// another known owner's rules lead to stays. A rule of the owner in a chain of others that leads to no chain stays; the
/// command prints it.
///
/// Refuses while the kernel's own conntrack translates connections, because they break when the last NAT chain is removed:
/// run `dataplane keep-nat` first. Stop the owner first, because it would write its rules again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane-migrate cleanup --owner kube-proxy --dry-run      what would be removed
  dataplane-migrate cleanup --owner kube-proxy
  dataplane-migrate cleanup --owner istio --netns pid:4711    in a pod")]
pub struct CleanupArgs {
    /// The owner whose rules go; can be given several times
    #[arg(long, value_enum, required = true)]
    owner: Vec<OwnerWord>,

    /// Print the changes, and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Remove the rules although connections that they translate may break
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    place: WhereArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct Answer {
    namespace: String,
    /// Whether the changes were made.
    changed: bool,
    #[serde(flatten)]
    done: Done,
    /// The routing rules and routes of the owner, as the `ip` commands that remove them.
    routing: Vec<String>,
}

impl CleanupArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let namespace = self.place.namespace()?;
        let owners: Vec<&Owner> = self
            .owner
            .iter()
            .flat_map(|word| word.owners())
            .copied()
            .collect();
        let root = self.place.host_root.as_deref();
        let work = || {
            if !self.dry_run && !self.force {
                let translated = nf_conntrack::translated()?;
                if translated != 0 && !keep_nat::is_there()? {
                    return Err(io::Error::other(format!(
                        "{translated} connections are translated by rules, and break when the last NAT chain goes; nothing was \
                         changed: run `dataplane keep-nat` in this network namespace first, or use --force"
                    )));
                }
            }
            let done = cleanup::clean_up(root, &owners, self.dry_run)?;
            // Routing rules are removed last, because rules that set marks need them.
            let is_meant = |rule: &MarkRule| owners.contains(&owners::of_routing_rule(rule));
            let routing = kernel::routing::remove_mark_rules(is_meant, self.dry_run);
            Ok((done, routing.map_err(io::Error::other)?))
        };
        let (done, routing) = namespace
            .inside(work)
            .with_context(|| format!("cannot clean up in {namespace}"))?;
        let answer = Answer {
            namespace: namespace.to_string(),
            changed: !self.dry_run,
            done,
            routing,
        };
        self.output.print(&answer, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints a change of rules, with its input if it was not made.
pub fn step(out: &mut dyn Write, step: &Step, did: &str, has_input: bool) -> io::Result<()> {
    let Step {
        command,
        input,
        jumps,
        chains,
    } = step;
    writeln!(
        out,
        "{command}: {did}{chains} chains, and {jumps} rules in chains of others"
    )?;
    for line in input.lines().filter(|_| has_input) {
        writeln!(out, "  {}", output::styled(DIM, printable(line)))?;
    }
    Ok(())
}

fn text(out: &mut dyn Write, answer: &Answer) -> io::Result<()> {
    if answer.done.steps.is_empty() && answer.routing.is_empty() {
        writeln!(out, "No rules of this owner in {}.", answer.namespace)?;
    }
    let did = if answer.changed {
        "removed "
    } else {
        "would remove "
    };
    for change in &answer.done.steps {
        step(out, change, did, !answer.changed)?;
    }
    for command in &answer.routing {
        let done = if answer.changed {
            "done"
        } else {
            "would be done"
        };
        writeln!(out, "{command}: {done}")?;
    }
    for stays in &answer.done.stays {
        writeln!(
            out,
            "{}: {}",
            output::styled(WARN, "stays"),
            printable(stays)
        )?;
    }
    Ok(())
}
