//! `dataplane plan`.

use std::{io::Write, path::Path, process::ExitCode};

use anyhow::Context;
use clap::Args;
use kernel::{netfilter, tables::Tables};
use model::ServiceName;
use plan::{Change, Contents, Planner};
use serde::Serialize;
use settings::{Node, PacketPath};
use takeover::{bypassed, path};
use terminal::{
    PathArgs, exit,
    output::{self, BAD, Format, GOOD, WARN},
};

use super::source::SourceArgs;

/// Show what would change in the kernel's tables, without changing it.
///
/// Compares the manifests, or the objects of the Kubernetes API, with the kernel's tables. The
/// tables are empty if no agent has run. Each line is an address and port: `+` will be served, `-`
/// will no longer be served, `~` will have other endpoints; the line shows which endpoints come and
/// go.
///
/// Exits with 0 if nothing would change, with 2 if something would change, and with 1 after an
/// error.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub(super) source: SourceArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    /// The path of packets of services, from the configuration file.
    #[arg(skip)]
    pub(super) path: PacketPath,

    #[command(flatten)]
    pub(super) node: Node,

    #[command(flatten)]
    pub(super) paths: PathArgs,
}

#[derive(Serialize)]
struct Answer<'a> {
    changes: &'a [Change],
    writes: usize,
    conflicts: Vec<String>,
    problems: Vec<String>,
    /// The path that packets of services would take, with the reason.
    packet_path: String,
}

impl PlanArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let snapshot = self.source.snapshot(&self.node)?;
        let bpffs = self.paths.bpffs();
        let mut contents = if Tables::exist(&bpffs)? {
            Tables::open(&bpffs)?.contents()?
        } else {
            eprintln!(
                "note: no tables in {}: compared with empty tables",
                bpffs.display()
            );
            Contents::default()
        };
        // Without the configuration of a mesh, this command does not know the reachable endpoints.
        contents.forget_reachable();
        let mut planner = Planner::adopt(contents.clone())
            .with_context(|| format!("the tables in {}", bpffs.display()))?;
        let plan = planner.plan(&snapshot);
        let changes = plan::changes(&contents, &planner);
        let served = planner.served();
        let conflicts: Vec<_> = served.conflicts().collect();
        let conflicts = conflicts.iter().map(|c| {
            let losers: Vec<&str> = c.losers.iter().map(ServiceName::as_str).collect();
            format!(
                "{}: served by {}, not by {}",
                plan::key_text(&c.key),
                c.winner,
                losers.join(", ")
            )
        });
        let (packet_path, bypassed) = packet_path(self.path, &bpffs);
        let problems = snapshot.problems.iter();
        let problems = problems
            .chain(served.problems().map(|(_, problem)| problem))
            .map(|p| format!("{}: {}", p.place, p.text))
            .chain(bypassed);
        let answer = Answer {
            changes: &changes,
            writes: plan.writes.len(),
            conflicts: conflicts.collect(),
            problems: problems.collect(),
            packet_path,
        };
        self.output.print(&answer, text)?;
        Ok(if plan.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(exit::CHANGES)
        })
    }
}

/// Returns the path that packets of services would take, with the reason; and the problem with it.
fn packet_path(wanted: PacketPath, bpffs: &Path) -> (String, Option<String>) {
    let stack = |because: &str| format!("stack, because of {because}");
    match wanted {
        PacketPath::Off => ("off".to_owned(), None),
        PacketPath::Stack => (stack("packets.path: stack"), None),
        PacketPath::Fast => {
            let problem = match netfilter::bypassed_chains() {
                Ok(chains) => bypassed::warning(&chains),
                Err(error) => Some(error.to_string()),
            };
            ("fast".to_owned(), problem)
        }
        PacketPath::Auto => match path::look(bpffs) {
            Ok(None) => ("fast".to_owned(), None),
            Ok(Some(because)) => (stack(&because), None),
            Err(error) => (stack("rules that cannot be read"), Some(error.to_string())),
        },
    }
}

fn text(out: &mut dyn Write, answer: &Answer<'_>) -> std::io::Result<()> {
    let mut counts = [0; 3];
    for change in answer.changes {
        let (style, count) = match (&change.before, &change.after) {
            (None, _) => (GOOD, 0),
            (_, None) => (BAD, 1),
            _ => (WARN, 2),
        };
        counts[count] += 1;
        writeln!(out, "{}", output::styled(style, change))?;
    }
    for (what, lines) in [
        ("conflict", &answer.conflicts),
        ("problem", &answer.problems),
    ] {
        for line in lines {
            writeln!(out, "{}: {line}", output::styled(WARN, what))?;
        }
    }
    if answer.packet_path != "off" {
        writeln!(out, "packet path: {}", answer.packet_path)?;
    }
    let [added, removed, changed] = counts;
    if answer.writes == 0 {
        writeln!(
            out,
            "No change: the kernel's tables are in line with the source."
        )
    } else {
        writeln!(
            out,
            "{added} added, {removed} removed, {changed} answered differently, in {} writes.",
            answer.writes
        )
    }
}
