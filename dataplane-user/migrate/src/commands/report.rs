//! `dataplane-migrate report`.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use kernel::{netfilter, routing::MarkRule};
use serde::Serialize;
use settings::{Mesh, Settings};
use takeover::owners::{self, Plan};
use terminal::output::{self, BAD, BOLD, Cell, DIM, Format, GOOD, Table, WARN};

use super::WhereArgs;
use crate::{
    rules::{
        collect,
        report::{self, Conflict, Own, Report},
        ruleset::{Form, Line, Text, Unread},
    },
    text::printable,
};

/// Maximum number of lines of a kind that are printed without --lines.
const SHOWN: usize = 3;

/// Show whose rules are on a node, which of them the dataplane takes over, and which conflict with it.
///
/// The report recognises owners by the names of tables, chains and sets, by comments, marks and interfaces. Rules of the owner
/// `foreign` have no such sign. A conflict is a rule that stays, and that loses its effect or interferes with the dataplane.
/// This command changes nothing.
///
/// The report reads the rules from the output of iptables-save, of the variant that holds them, and of nft. If a program is
/// missing, the report names the tables that it does not cover, and the package.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 all rules were read; 1 rules could not be read, or lines were not understood.

Examples:
  dataplane-migrate report                          this node
  dataplane-migrate report --netns pid:4711         a pod
  dataplane-migrate report --file saved.txt         rules that iptables-save printed elsewhere
  dataplane-migrate report -o json | jq '.owners[] | select(.owner == \"foreign\") | .rules'")]
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

    /// The marks and ports that the agent uses, by the configuration file.
    #[arg(skip = own(&Mesh::default()))]
    own: Own,
}

#[derive(Serialize)]
struct Answer<'a> {
    /// The network namespace, or the file.
    namespace: String,
    owners: Vec<OwnerRow<'a>>,
    /// Number of services in IPVS; null if IPVS is not loaded.
    ipvs_services: Option<usize>,
    /// Routing rules that match marks.
    routing_rules: Vec<RoutingRow>,
    /// Interfaces at which the kernel checks the source addresses of IPv4 packets.
    reverse_paths: Vec<ReversePathRow>,
    /// Lines that were not understood.
    unread: &'a [Unread<'a>],
    /// Tables whose rules could not be read, each with the remedy.
    missing: Vec<String>,
}

#[derive(Serialize)]
struct OwnerRow<'a> {
    owner: &'static str,
    /// `take over`, `ours` or `leave`.
    plan: &'static str,
    note: &'static str,
    tables: &'a BTreeSet<String>,
    chains: usize,
    rules: &'a [Line<'a>],
    conflicts: Vec<ConflictRow<'a>>,
}

#[derive(Serialize)]
struct ConflictRow<'a> {
    conflict: &'static str,
    means: &'static str,
    lines: &'a [Line<'a>],
}

#[derive(Serialize)]
struct RoutingRow {
    family: &'static str,
    priority: u32,
    /// The rule in the format of `ip rule`: `fwmark 0x111/0xfff lookup 100`.
    rule: String,
    owner: &'static str,
    plan: &'static str,
    /// `mark`: the rule matches the mark of the agent's proxy.
    conflict: Option<&'static str>,
}

#[derive(Serialize)]
struct ReversePathRow {
    interface: String,
    /// 1: strict; 2: loose.
    rp_filter: u8,
}

impl ReportArgs {
    pub fn fill_from(&mut self, file: &Settings) {
        if let Some(mesh) = &file.mesh {
            self.own = own(mesh);
        }
    }

    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Some(path) = &self.file else {
            return self.live();
        };
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8_lossy(&text);
        let origin = path.file_name().unwrap_or_default().to_string_lossy();
        let form = Form::of(&text);
        let text = Text {
            origin: &origin,
            form,
            text: &text,
        };
        let report = report::report(&[text], self.own);
        self.print(&answer(path.display().to_string(), &report))
    }

    fn print(&self, answer: &Answer<'_>) -> anyhow::Result<ExitCode> {
        self.output
            .print(answer, |out, answer| self.text(out, answer))?;
        Ok(if answer.unread.is_empty() && answer.missing.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn live(&self) -> anyhow::Result<ExitCode> {
        let namespace = self.place.namespace()?;
        let root = self.place.host_root.as_deref();
        let read = || {
            let collected = collect::all(root)?;
            let ipvs = netfilter::ipvs_services().map_err(io::Error::other)?;
            let rules = kernel::routing::mark_rules().map_err(io::Error::other)?;
            Ok((collected, ipvs, rules, kernel::routing::reverse_paths()?))
        };
        let (collected, ipvs_services, rules, reverse_paths) = namespace
            .inside(read)
            .with_context(|| format!("cannot look into {namespace}"))?;
        let texts: Vec<Text<'_>> = collected
            .texts
            .iter()
            .map(collect::Printed::as_text)
            .collect();
        let report = report::report(&texts, self.own);
        let reverse_paths =
            (reverse_paths.into_iter()).map(|(interface, rp_filter)| ReversePathRow {
                interface,
                rp_filter,
            });
        self.print(&Answer {
            ipvs_services,
            routing_rules: rules.iter().map(|rule| routing(rule, self.own)).collect(),
            reverse_paths: reverse_paths.collect(),
            missing: collected.missing,
            ..answer(namespace.to_string(), &report)
        })
    }

    fn text(&self, out: &mut dyn Write, answer: &Answer<'_>) -> io::Result<()> {
        writeln!(out, "Rules in: {}\n", answer.namespace)?;
        if answer.owners.is_empty() {
            writeln!(out, "No rules were found.")?;
        } else {
            table(&answer.owners).write(out)?;
        }
        if let Some(services) = answer.ipvs_services {
            writeln!(out, "IPVS has {services} services.")?;
        }
        for row in &answer.owners {
            self.owner(out, row)?;
        }
        if !answer.routing_rules.is_empty() {
            writeln!(out, "\nRouting rules that ask for marks:")?;
        }
        for row in &answer.routing_rules {
            let RoutingRow {
                family,
                priority,
                rule,
                owner,
                plan,
                conflict,
            } = row;
            write!(out, "  {family} {priority}: {rule} ({owner}, {plan})")?;
            match conflict {
                None => writeln!(out)?,
                Some(word) => {
                    let means = Conflict::Mark.means();
                    writeln!(out, ", conflict {}: {means}", output::styled(WARN, word))?;
                }
            }
        }
        if !answer.reverse_paths.is_empty() {
            let all = answer.reverse_paths.iter();
            let all: Vec<_> = all
                .map(|row| format!("{} {}", row.interface, row.rp_filter))
                .collect();
            writeln!(
                out,
                "\nrp_filter (1: the way back must lead to the interface; 2: there must be one): {}\n  The packet path asks the \
                 same of clients outside of the node.",
                all.join(", ")
            )?;
        }
        for Unread { line, why, .. } in answer.unread {
            let what = output::styled(BAD, "Not understood");
            let (table, number, text) = (&line.table, line.number, printable(&line.text));
            writeln!(out, "\n{what}: {table}, line {number}: {text}\n  {why}")?;
        }
        for missing in &answer.missing {
            writeln!(out, "\n{}: {missing}", output::styled(BAD, "Not read"))?;
        }
        Ok(())
    }

    fn owner(&self, out: &mut dyn Write, row: &OwnerRow<'_>) -> io::Result<()> {
        let name = output::styled(BOLD, row.owner);
        writeln!(
            out,
            "\n{name} ({}), in {}:",
            row.plan,
            row.tables
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        )?;
        self.lines(out, row.rules)?;
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
        Ok(())
    }

    fn lines(&self, out: &mut dyn Write, lines: &[Line<'_>]) -> io::Result<()> {
        let shown = if self.lines { lines.len() } else { SHOWN };
        for line in lines.iter().take(shown) {
            let place = output::styled(DIM, format!("{}:{}", line.table, line.number));
            writeln!(out, "  {place}  {}", printable(&line.text))?;
        }
        match lines.len().saturating_sub(shown) {
            0 => Ok(()),
            more => writeln!(out, "  and {more} more (--lines)"),
        }
    }
}

/// Returns the table with one row for each owner.
fn table(owners: &[OwnerRow<'_>]) -> Table {
    let mut table = Table::new(&[
        "OWNER",
        "WHAT TO DO",
        "CHAINS",
        "RULES",
        "CONFLICTS",
        "WHAT THE RULES DO",
    ]);
    for row in owners {
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
    table
}

fn own(mesh: &Mesh) -> Own {
    Own {
        mark: mesh.mark(),
        ports: [mesh.outbound(), mesh.inbound()],
    }
}

fn routing(rule: &MarkRule, own: Own) -> RoutingRow {
    let owner = owners::of_routing_rule(rule);
    let asks = rule.mark != 0 && own.mark & rule.bits == rule.mark && owner.plan == Plan::Leave;
    RoutingRow {
        family: if rule.v4 { "IPv4" } else { "IPv6" },
        priority: rule.priority,
        rule: rule.to_string(),
        owner: owner.name,
        plan: owner.plan.word(),
        conflict: asks.then(|| Conflict::Mark.word()),
    }
}

/// Returns the part of the answer that depends only on texts.
fn answer<'a>(namespace: String, report: &'a Report<'a>) -> Answer<'a> {
    let owners = report.owners.iter().map(|found| OwnerRow {
        owner: found.owner.name,
        plan: found.owner.plan.word(),
        note: found.owner.note,
        tables: &found.tables,
        chains: found.chains,
        rules: &found.rules,
        conflicts: (found.conflicts.iter())
            .map(|(conflict, lines)| ConflictRow {
                conflict: conflict.word(),
                means: conflict.means(),
                lines,
            })
            .collect(),
    });
    Answer {
        namespace,
        owners: owners.collect(),
        ipvs_services: None,
        routing_rules: Vec::new(),
        reverse_paths: Vec::new(),
        unread: &report.unread,
        missing: Vec::new(),
    }
}
