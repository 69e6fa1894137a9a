//! `dataplane-migrate detect`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Args;
use kernel::netfilter::{self, Kind};
use serde::Serialize;
use terminal::output::{self, BAD, Cell, DIM, Format, GOOD, Table, WARN};

use super::WhereArgs;
use crate::rules::{
    binaries::{self, Binaries, Family},
    detect::{self, Decision, GET_IPTABLES, GET_NFT},
};

/// Show which variant of iptables a network namespace needs, and why.
///
/// iptables has two variants: `legacy` keeps its rules in x_tables, `nft` in compatibility tables of nf_tables. Neither
/// sees the rules of the other, and the name `iptables` may be either. This command asks each program which variant it
/// is, and asks the kernel which side holds rules. It loads no module of the legacy tables and changes nothing.
///
/// For each family: nft if nf_tables' compatibility tables hold rules; otherwise legacy, if the legacy tables hold rules
/// and a program can read them; otherwise the variant of the system's default, the program whose name has no variant.
///
/// If all programs are missing, the command still reads the kernel's tables, and names the missing package.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane-migrate detect                                 this node, with the programs on PATH
  dataplane-migrate detect --netns blue                    a pod's namespace, with the node's programs
  dataplane-migrate detect --netns pid:4711 --host-root /proc/4711/root
                                                           a pod's namespace, with its container's programs
  dataplane-migrate detect --host-root /host               from a container on the node's network:
                                                           the node's rules, with the node's programs")]
pub struct DetectArgs {
    #[command(flatten)]
    place: WhereArgs,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct Answer {
    /// The network namespace.
    namespace: String,
    /// The origin of the programs: `on PATH`, or `below DIR`.
    programs: String,
    binaries: Binaries,
    /// Tables in the kernel.
    tables: Vec<TableRow>,
    /// Number of services in IPVS; null if IPVS is not loaded.
    ipvs_services: Option<usize>,
    decisions: Vec<Decision>,
    /// Packages to install.
    missing: Vec<String>,
}

#[derive(Serialize)]
struct TableRow {
    /// `legacy`, `compat` or `native`.
    side: &'static str,
    family: &'static str,
    name: String,
    /// Chains that are not built in.
    chains: usize,
    rules: usize,
    /// Whether the table has an effect.
    holds_rules: bool,
    /// Base chains with policy drop.
    drops: Vec<String>,
    #[serde(skip)]
    summary: String,
}

impl From<&netfilter::Table> for TableRow {
    fn from(table: &netfilter::Table) -> Self {
        let side = match table.kind {
            Kind::Legacy => "legacy",
            Kind::Compat => "compat",
            Kind::Native => "native",
        };
        let drops = table.chains.iter().filter(|chain| chain.drops);
        Self {
            side,
            family: table.family,
            name: table.name.clone(),
            chains: table
                .chains
                .iter()
                .filter(|chain| chain.hook.is_none())
                .count(),
            rules: table.rules(),
            holds_rules: table.holds_rules(),
            drops: drops.map(|chain| chain.name.clone()).collect(),
            summary: detect::summary(table),
        }
    }
}

impl DetectArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let namespace = self.place.namespace()?;
        let root = self.place.host_root.as_deref();
        let read = || {
            let tables = netfilter::tables().map_err(io::Error::other)?;
            let ipvs = netfilter::ipvs_services().map_err(io::Error::other)?;
            Ok((tables, ipvs, binaries::find(root)?))
        };
        let (tables, ipvs_services, binaries) = namespace
            .inside(read)
            .with_context(|| format!("cannot look into {namespace}"))?;
        let decisions: Vec<_> = Family::BOTH
            .iter()
            .map(|family| detect::decide(*family, &binaries, &tables))
            .collect();
        let mut missing = Vec::new();
        if !binaries.missing.is_empty() {
            missing.push(format!("{}: {GET_IPTABLES}", binaries.missing.join(", ")));
        }
        if binaries.nft.is_none() {
            missing.push(format!("nft: {GET_NFT}"));
        }
        let answer = Answer {
            namespace: namespace.to_string(),
            programs: self.place.programs(),
            binaries,
            tables: tables.iter().map(TableRow::from).collect(),
            ipvs_services,
            decisions,
            missing,
        };
        self.output.print(&answer, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(out: &mut dyn Write, answer: &Answer) -> io::Result<()> {
    writeln!(out, "Network namespace: {}", answer.namespace)?;
    writeln!(out, "Programs: {}\n", answer.programs)?;
    let mut table = Table::new(&["PROGRAM", "VARIANT", "VERSION", "PATH", "REALLY"]);
    for binary in &answer.binaries.iptables {
        let variant = binary
            .variant
            .map_or(Cell::new("unknown", WARN), |v| v.word().into());
        let mut really = binary.really.display().to_string();
        if let Some(note) = &binary.note {
            really = format!("{really}: {note}");
        }
        table.row([
            binary.name.as_str().into(),
            variant,
            binary.version.as_deref().unwrap_or("-").into(),
            binary.path.display().to_string().into(),
            Cell::new(really, DIM),
        ]);
    }
    if let Some(nft) = &answer.binaries.nft {
        table.row([
            "nft".into(),
            "-".into(),
            nft.version.as_deref().unwrap_or("-").into(),
            nft.path.display().to_string().into(),
            "-".into(),
        ]);
    }
    if !table.is_empty() {
        table.write(out)?;
        writeln!(out)?;
    }
    for missing in &answer.missing {
        writeln!(out, "Not found: {missing}")?;
    }
    if !answer.missing.is_empty() {
        writeln!(out)?;
    }
    let mut table = Table::new(&["SIDE OF THE KERNEL", "FAMILY", "TABLES"]);
    for (side, word) in [
        ("legacy", "legacy tables"),
        ("compat", "nf_tables, of iptables"),
        ("native", "nf_tables, native"),
    ] {
        let of_side = |family: Option<&str>| {
            let rows = answer.tables.iter().filter(|row| row.side == side);
            let rows = rows.filter(|row| family.is_none_or(|family| row.family == family));
            rows.map(|row| match family {
                Some(_) => row.summary.clone(),
                None => format!("{} {}", row.family, row.summary),
            })
            .collect::<Vec<_>>()
            .join(", ")
        };
        let mut row = |family: &str, tables: String| {
            let tables = if tables.is_empty() {
                Cell::new("none", DIM)
            } else {
                tables.into()
            };
            table.row([Cell::from(word), family.into(), tables]);
        };
        if side == "native" {
            row("all", of_side(None));
        } else {
            for family in Family::BOTH {
                row(family.word(), of_side(Some(family.of_tables())));
            }
        }
    }
    let ipvs = match answer.ipvs_services {
        None => Cell::new("not loaded", DIM),
        Some(services) => format!("{services} services").into(),
    };
    table.row(["IPVS".into(), "all".into(), ipvs]);
    table.write(out)?;
    writeln!(out)?;
    for decision in &answer.decisions {
        let family = decision.family.word();
        let chosen = match decision.variant {
            Some(variant) if decision.save.is_some() => output::styled(GOOD, variant.word()),
            Some(variant) => output::styled(BAD, format!("{}, which is missing", variant.word())),
            None => output::styled(BAD, "none"),
        };
        writeln!(out, "{family}: {chosen}: {}", decision.reason)?;
        for problem in &decision.problems {
            writeln!(out, "  {}", output::styled(WARN, problem))?;
        }
    }
    Ok(())
}
