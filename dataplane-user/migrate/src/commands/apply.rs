//! `dataplane-migrate apply`.

use std::{
    fs,
    io::{self, Write},
    process::ExitCode,
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use serde::Serialize;
use terminal::{
    exit,
    output::{self, Format, WARN},
};

use super::{WhereArgs, cleanup::step};
use crate::{
    rules::{
        binaries::Variant,
        reconcile::{
            expected::Expected,
            run::{self, Done, Options, Outcome},
        },
    },
    text::printable,
};

/// Maximum number of differences that are printed.
const SHOWN: usize = 10;

/// Make the iptables rules of a mesh's sidecar in a pod those that are expected.
///
/// Compares the expected rules with the rules in the network namespace, in both variants of iptables, both families, and nf_tables:
///
/// * No rule of the mesh is there: the expected rules are applied.
/// * The rules are the same: nothing is changed.
/// * Other rules of the mesh are there (in part, of an older version, changed): with --reconcile they are replaced, and no packet passes
///   in between. Without it, the expected rules are applied on top; the result is not guaranteed.
///
/// Rules of others stay as they are, also between the mesh's. The order of rules counts where it changes what a packet gets. Each
/// table changes in one transaction. If a step fails, the old rules come back. If the command is killed, the next one ends in the
/// same state.
///
/// The expected rules are first loaded into a network namespace that nobody uses, which needs CAP_SYS_ADMIN: a rule that iptables
/// does not take is an error, and nothing is changed.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 the rules are those that are expected, or were removed; 1 error; 2 the rules were applied on top of others, or, with
--dry-run, something would change.

Examples:
  dataplane-migrate apply --mesh istio --netns pid:4711 --dry-run      what is different
  dataplane-migrate apply --mesh istio --netns pid:4711 --reconcile
  dataplane-migrate apply --mesh rules.txt --netns pid:4711            any mesh's rules, for iptables-restore
  dataplane-migrate apply --mesh istio --netns pid:4711 --cleanup-only")]
pub struct ApplyArgs {
    /// The expected rules: `istio` or `osm` for what the wrapper of Istio's sidecar or of Open Service Mesh writes by default, or
    /// a file with text of iptables-save or for iptables-restore
    ///
    /// A file may have both families. A comment that names iptables or ip6tables begins tables of a family; otherwise the addresses
    /// tell. The mesh's chains are those that the file declares, and those of the same mesh by their names.
    #[arg(long, value_name = "istio|osm|FILE")]
    mesh: String,

    /// Replace rules of the mesh that are different. No packet but of loopback passes meanwhile
    #[arg(long, conflicts_with = "cleanup_only")]
    reconcile: bool,

    /// Only remove the rules of the mesh: those that are expected, and those in chains of the mesh
    #[arg(long)]
    cleanup_only: bool,

    /// Print the differences and the changes, and change nothing
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    place: WhereArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct Answer {
    namespace: String,
    /// `istio`, `osm`, or the file's name.
    mesh: String,
    /// Whether the changes were made.
    changed: bool,
    #[serde(flatten)]
    done: Done,
}

impl ApplyArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let expected = match self.mesh.as_str() {
            "istio" => Expected::istio(),
            "osm" => Expected::osm(),
            file => {
                let text = fs::read_to_string(file).with_context(|| {
                    format!("cannot read --mesh {file} (`istio`, `osm` or a file with rules)")
                })?;
                Expected::of_text(&text).map_err(|why| anyhow!("{file}: {why}"))?
            }
        };
        let namespace = self.place.namespace()?;
        let root = self.place.host_root.as_deref();
        let options = Options {
            reconcile: self.reconcile,
            cleanup_only: self.cleanup_only,
            dry_run: self.dry_run,
        };
        let done = namespace
            .inside(|| run::apply(root, &expected, options))
            .with_context(|| format!("cannot apply the rules of {} in {namespace}", self.mesh))?;
        let would_change = self.dry_run && !done.steps.is_empty();
        let unsure = done.outcome == Outcome::OnTop;
        let answer = Answer {
            namespace: namespace.to_string(),
            mesh: self.mesh,
            changed: !self.dry_run && !done.steps.is_empty(),
            done,
        };
        self.output.print(&answer, text)?;
        Ok(if would_change || unsure {
            ExitCode::from(exit::CHANGES)
        } else {
            ExitCode::SUCCESS
        })
    }
}

fn text(out: &mut dyn Write, answer: &Answer) -> io::Result<()> {
    let Answer {
        namespace,
        mesh,
        changed,
        done,
    } = answer;
    for decision in &done.decisions {
        let (family, variant) = (decision.family.word(), decision.variant);
        let variant = variant.map_or("none", Variant::word);
        writeln!(out, "{family}: {variant}: {}", decision.reason)?;
    }
    for difference in done.differences.iter().take(SHOWN) {
        writeln!(out, "{}", printable(difference))?;
    }
    let more = done.differences.len().saturating_sub(SHOWN);
    if more > 0 {
        writeln!(out, "and {more} more differences (-o json has all)")?;
    }
    let did = if *changed { "" } else { "would change " };
    for change in &done.steps {
        step(out, change, did, !changed)?;
    }
    let said = match (done.outcome, *changed) {
        (Outcome::Same, _) => {
            format!("The rules of {mesh} are as expected in {namespace}: nothing was changed.")
        }
        (Outcome::Nothing, _) => format!("No rules of {mesh} in {namespace}: nothing was changed."),
        (Outcome::Applied, true) => {
            format!("Applied the rules of {mesh} in {namespace}, and checked them.")
        }
        (Outcome::Applied, false) => {
            format!("No rules of {mesh} in {namespace}: the expected rules would be applied.")
        }
        (Outcome::Reconciled, true) => {
            format!("Replaced the rules of {mesh} in {namespace}, and checked them.")
        }
        (Outcome::Reconciled, false) => {
            format!("Other rules of {mesh} in {namespace} would be replaced.")
        }
        (Outcome::Removed, true) => format!("Removed the rules of {mesh} from {namespace}."),
        (Outcome::Removed, false) => {
            format!("The rules of {mesh} would be removed from {namespace}.")
        }
        (Outcome::OnTop, false) if done.steps.is_empty() => format!(
            "All rules of {mesh} that are expected are there in {namespace}, and other rules of this mesh: nothing was changed."
        ),
        (Outcome::OnTop, true) => format!(
            "Applied the rules of {mesh} on top of other rules of this mesh in {namespace}."
        ),
        (Outcome::OnTop, false) => format!(
            "The rules of {mesh} would be applied on top of other rules of this mesh in {namespace}."
        ),
    };
    writeln!(out, "{said}")?;
    for note in &done.notes {
        writeln!(out, "{}: {note}", output::styled(WARN, "notice"))?;
    }
    if done.outcome == Outcome::OnTop {
        let hint = "the result is not guaranteed; --reconcile replaces the other rules";
        writeln!(out, "{}: {hint}", output::styled(WARN, "warning"))?;
    }
    Ok(())
}
