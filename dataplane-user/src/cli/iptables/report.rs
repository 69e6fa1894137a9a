//! `dataplane iptables report`.

use std::{
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;

use super::WhereArgs;
use crate::{
    cli::output::{self, BAD, BOLD, Cell, DIM, Format, GOOD, Table, WARN},
    kernel::netfilter,
    takeover::{
        binaries, collect,
        owners::Plan,
        report::{self, Own, Report},
        ruleset::{Form, Line, Text},
    },
};

/// The defaults of mesh.proxy.mark, outbound and inbound.
const OWN: Own = Own {
    mark: 15006,
    ports: [15001, 15006],
};

/// How many lines of a kind are printed, if not all are asked for.
const SHOWN: usize = 3;

/// Show whose rules are on a node, which of them the dataplane takes over, and which conflict with it.
///
/// Owners are told by the names of tables, chains and sets, by comments and by marks. Rules of the owner `foreign` have no such
/// sign. A conflict is a rule that stays and whose meaning changes, or that meets what the dataplane does. This command
/// changes nothing.
///
/// The rules are printed by iptables-save of the variant that holds them, and by nft. If a program is missing, the report
/// names the tables that it does not cover, and the package.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 all rules were read; 1 rules could not be read, or lines were not understood.

Examples:
  dataplane iptables report                          this node
  dataplane iptables report --netns pid:4711         a pod
  dataplane iptables report --file saved.txt         rules that iptables-save printed elsewhere
  dataplane iptables report -o json | jq '.owners[] | select(.owner == \"foreign\") | .rules'")]
pub struct ReportArgs {
    #[command(flatten)]
    place: WhereArgs,

    /// Read rules from this file in place of the kernel's: output of iptables-save or `nft list ruleset`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["netns", "host_root"])]
    file: Option<PathBuf>,

    /// Print all lines of each owner, not only the first three
    #[arg(long)]
    lines: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct Answer {
    /// The network namespace, or the file.
    namespace: String,
    owners: Vec<OwnerRow>,
    /// How many services IPVS has; null: IPVS is not loaded.
    ipvs_services: Option<usize>,
    /// Lines that were not understood.
    unread: Vec<UnreadRow>,
    /// Tables whose rules could not be read, and what to do.
    missing: Vec<String>,
}

#[derive(Serialize)]
struct OwnerRow {
    owner: &'static str,
    /// `take over`, `ours` or `leave`.
    plan: &'static str,
    note: &'static str,
    tables: Vec<String>,
    chains: usize,
    rules: Vec<LineRow>,
    conflicts: Vec<ConflictRow>,
}

#[derive(Serialize)]
struct ConflictRow {
    conflict: &'static str,
    means: &'static str,
    lines: Vec<LineRow>,
}

#[derive(Serialize)]
struct UnreadRow {
    #[serde(flatten)]
    line: LineRow,
    why: String,
}

#[derive(Serialize)]
struct LineRow {
    table: String,
    /// The line's number in what the program printed; 0: not a line of its own.
    line: usize,
    text: String,
}

impl From<&Line<'_>> for LineRow {
    fn from(line: &Line<'_>) -> Self {
        Self {
            table: line.table.clone(),
            line: line.number,
            // It may come from anybody, and goes to a terminal.
            text: line
                .text
                .chars()
                .map(|c| if c.is_control() { '\u{fffd}' } else { c })
                .collect(),
        }
    }
}

impl ReportArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let answer = match &self.file {
            Some(path) => {
                let text =
                    fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
                let text = String::from_utf8_lossy(&text);
                let origin = path.file_name().unwrap_or_default().to_string_lossy();
                let (form, origin) = (form_of(&text), &*origin);
                let report = report::report(
                    &[Text {
                        origin,
                        form,
                        text: &text,
                    }],
                    OWN,
                );
                answer(path.display().to_string(), &report, None, Vec::new())
            }
            None => self.live()?,
        };
        let mut out = output::stdout();
        match self.output {
            Format::Json => output::json(&mut out, &answer)?,
            Format::Text => self.text(&mut out, &answer)?,
        }
        Ok(if answer.unread.is_empty() && answer.missing.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn live(&self) -> anyhow::Result<Answer> {
        let namespace = self.place.namespace()?;
        let root = self.place.host_root.as_deref();
        let read = || {
            let tables = netfilter::tables().map_err(io::Error::other)?;
            let ipvs = netfilter::ipvs_services().map_err(io::Error::other)?;
            let found = binaries::find(root)?;
            Ok((collect::collect(root, &found, &tables)?, ipvs))
        };
        let (collected, ipvs) = namespace
            .inside(read)
            .with_context(|| format!("cannot look into {namespace}"))?;
        let texts: Vec<Text<'_>> = collected
            .texts
            .iter()
            .map(collect::Printed::as_text)
            .collect();
        let report = report::report(&texts, OWN);
        Ok(answer(
            namespace.to_string(),
            &report,
            ipvs,
            collected.missing,
        ))
    }

    fn text(&self, out: &mut dyn Write, answer: &Answer) -> io::Result<()> {
        writeln!(out, "Rules in: {}\n", answer.namespace)?;
        if answer.owners.is_empty() {
            writeln!(out, "No rules were found.")?;
        } else {
            let mut table = Table::new(&[
                "OWNER",
                "WHAT TO DO",
                "CHAINS",
                "RULES",
                "CONFLICTS",
                "WHAT THE RULES DO",
            ]);
            for row in &answer.owners {
                let plan = match row.plan {
                    plan if plan == Plan::TakeOver.word() => Cell::new(plan, GOOD),
                    plan => plan.into(),
                };
                let conflicts: usize = row
                    .conflicts
                    .iter()
                    .map(|conflict| conflict.lines.len())
                    .sum();
                let conflicts = match conflicts {
                    0 => Cell::from("0"),
                    many => Cell::new(many.to_string(), WARN),
                };
                table.row([
                    Cell::new(row.owner, BOLD),
                    plan,
                    row.chains.to_string().into(),
                    row.rules.len().to_string().into(),
                    conflicts,
                    row.note.into(),
                ]);
            }
            table.write(out)?;
        }
        if let Some(services) = answer.ipvs_services {
            writeln!(out, "IPVS has {services} services.")?;
        }
        for row in &answer.owners {
            let name = output::styled(BOLD, row.owner);
            writeln!(
                out,
                "\n{name} ({}), in {}:",
                row.plan,
                row.tables.join(", ")
            )?;
            self.lines(out, &row.rules)?;
            for ConflictRow {
                conflict,
                means,
                lines,
            } in &row.conflicts
            {
                writeln!(
                    out,
                    "  conflict {}: {means}:",
                    output::styled(WARN, conflict)
                )?;
                self.lines(out, lines)?;
            }
        }
        for unread in &answer.unread {
            let LineRow { table, line, text } = &unread.line;
            let what = output::styled(BAD, "Not understood");
            writeln!(
                out,
                "\n{what}: {table}, line {line}: {text}\n  {}",
                unread.why
            )?;
        }
        for missing in &answer.missing {
            writeln!(out, "\n{}: {missing}", output::styled(BAD, "Not read"))?;
        }
        Ok(())
    }

    fn lines(&self, out: &mut dyn Write, lines: &[LineRow]) -> io::Result<()> {
        let shown = if self.lines { lines.len() } else { SHOWN };
        for LineRow { table, line, text } in lines.iter().take(shown) {
            writeln!(
                out,
                "  {}  {text}",
                output::styled(DIM, format!("{table}:{line}"))
            )?;
        }
        match lines.len().saturating_sub(shown) {
            0 => Ok(()),
            more => writeln!(out, "  and {more} more (--lines)"),
        }
    }
}

/// The form of a text, by its first line that says something.
fn form_of(text: &str) -> Form {
    let first = text
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with('#'));
    match first {
        Some(line) if line.starts_with("table ") => Form::Nft,
        _ => Form::Saved,
    }
}

fn answer(
    namespace: String,
    report: &Report<'_>,
    ipvs: Option<usize>,
    missing: Vec<String>,
) -> Answer {
    let rows = |lines: &[Line<'_>]| lines.iter().map(LineRow::from).collect::<Vec<_>>();
    let owners = report.owners.iter().map(|found| OwnerRow {
        owner: found.owner.name,
        plan: found.owner.plan.word(),
        note: found.owner.note,
        tables: found.tables.iter().cloned().collect(),
        chains: found.chains,
        rules: rows(&found.rules),
        conflicts: (found.conflicts.iter())
            .map(|(conflict, lines)| ConflictRow {
                conflict: conflict.word(),
                means: conflict.means(),
                lines: rows(lines),
            })
            .collect(),
    });
    let unread = report.unread.iter().map(|unread| UnreadRow {
        line: LineRow::from(&unread.line),
        why: unread.why.clone(),
    });
    Answer {
        namespace,
        owners: owners.collect(),
        ipvs_services: ipvs,
        unread: unread.collect(),
        missing,
    }
}
