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
    output::{self, DIM, Format, WARN},
};

use super::WhereArgs;
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
    /// `same`, `applied`, `on-top`, `reconciled`, `removed` or `nothing`.
    outcome: &'static str,
    /// Whether the changes were made.
    changed: bool,
    families: Vec<FamilyRow>,
    differences: Vec<String>,
    steps: Vec<StepRow>,
    /// Notices for the operator.
    notes: Vec<String>,
}

#[derive(Serialize)]
struct FamilyRow {
    family: &'static str,
    variant: Option<&'static str>,
    reason: String,
}

#[derive(Serialize)]
struct StepRow {
    command: String,
    input: String,
    chains: usize,
    rules: usize,
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
        let answer = answer(namespace.to_string(), self.mesh, !self.dry_run, done);
        self.output.print(&answer, text)?;
        Ok(if would_change || unsure {
            ExitCode::from(exit::CHANGES)
        } else {
            ExitCode::SUCCESS
        })
    }
}

fn answer(namespace: String, mesh: String, changes: bool, done: Done) -> Answer {
    let outcome = match done.outcome {
        Outcome::Same => "same",
        Outcome::Applied => "applied",
        Outcome::OnTop => "on-top",
        Outcome::Reconciled => "reconciled",
        Outcome::Removed => "removed",
        Outcome::Nothing => "nothing",
    };
    let families = done.decisions.into_iter().map(|decision| FamilyRow {
        family: decision.family.word(),
        variant: decision.variant.map(Variant::word),
        reason: decision.reason,
    });
    let steps = done.steps.into_iter().map(|step| StepRow {
        command: step.command,
        input: step.input,
        chains: step.chains,
        rules: step.jumps,
    });
    let steps: Vec<_> = steps.collect();
    Answer {
        namespace,
        mesh,
        outcome,
        changed: changes && !steps.is_empty(),
        families: families.collect(),
        differences: done.differences,
        steps,
        notes: done.notes,
    }
}

fn text(out: &mut dyn Write, answer: &Answer) -> io::Result<()> {
    for row in &answer.families {
        let variant = row.variant.unwrap_or("none");
        writeln!(out, "{}: {variant}: {}", row.family, row.reason)?;
    }
    for difference in answer.differences.iter().take(SHOWN) {
        writeln!(out, "{}", printable(difference))?;
    }
    let more = answer.differences.len().saturating_sub(SHOWN);
    if more > 0 {
        writeln!(out, "and {more} more differences (-o json has all)")?;
    }
    for step in &answer.steps {
        let StepRow {
            command,
            chains,
            rules,
            ..
        } = step;
        let would = if answer.changed { "" } else { "would change " };
        writeln!(
            out,
            "{command}: {would}{chains} chains, and {rules} rules in chains of others"
        )?;
        for line in step.input.lines().filter(|_| !answer.changed) {
            writeln!(out, "  {}", output::styled(DIM, printable(line)))?;
        }
    }
    let Answer {
        mesh,
        namespace,
        changed,
        ..
    } = answer;
    let said = match (answer.outcome, *changed) {
        ("same", _) => {
            format!("The rules of {mesh} are as expected in {namespace}: nothing was changed.")
        }
        ("nothing", _) => format!("No rules of {mesh} in {namespace}: nothing was changed."),
        ("applied", true) => {
            format!("Applied the rules of {mesh} in {namespace}, and checked them.")
        }
        ("applied", false) => {
            format!("No rules of {mesh} in {namespace}: the expected rules would be applied.")
        }
        ("reconciled", true) => {
            format!("Replaced the rules of {mesh} in {namespace}, and checked them.")
        }
        ("reconciled", false) => format!("Other rules of {mesh} in {namespace} would be replaced."),
        ("removed", true) => format!("Removed the rules of {mesh} from {namespace}."),
        ("removed", false) => format!("The rules of {mesh} would be removed from {namespace}."),
        (_, false) if answer.steps.is_empty() => format!(
            "All rules of {mesh} that are expected are there in {namespace}, and other rules of this mesh: nothing was changed."
        ),
        (_, true) => format!(
            "Applied the rules of {mesh} on top of other rules of this mesh in {namespace}."
        ),
        (_, false) => format!(
            "The rules of {mesh} would be applied on top of other rules of this mesh in {namespace}."
        ),
    };
    writeln!(out, "{said}")?;
    for note in &answer.notes {
        writeln!(out, "{}: {note}", output::styled(WARN, "notice"))?;
    }
    if answer.outcome == "on-top" {
        let hint = "the result is not guaranteed; --reconcile replaces the other rules";
        writeln!(out, "{}: {hint}", output::styled(WARN, "warning"))?;
    }
    Ok(())
}
