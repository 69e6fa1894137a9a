//! `dataplane iptables compare`.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde::Serialize;

use crate::{
    cli::{
        PathArgs, exit,
        output::{self, BAD, GOOD, Table, WARN},
        source,
    },
    kernel::Tables,
    plan::{self, Answer, Empty, Planner},
};

/// As many endpoints of an address are shown.
const SHOWN: usize = 4;

/// Compare what kube-proxy's rules serve with what the dataplane's tables serve, address by address.
///
/// Reads kube-proxy's rules in the kernel, or those in a file, and the dataplane's tables. Prints each address and port that
/// the tables do not lead to the same endpoints, with the same session affinity or refusal, as the rules. Changes nothing.
///
/// Exits with 0 if nothing differs, with 2 if something differs or a line of the rules is not understood, and with 1 after an
/// error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane iptables compare                 before kube-proxy's rules are removed
  dataplane iptables compare --file rules    after they were saved and removed")]
pub struct CompareArgs {
    /// A file that `iptables-save` and `ip6tables-save`, or `nft list ruleset`, wrote [default: the rules in the kernel]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,

    #[command(flatten)]
    pub(super) paths: PathArgs,
}

#[derive(Serialize)]
struct Comparison {
    /// Addresses and ports that rules serve or refuse.
    compared: usize,
    differences: Vec<Difference>,
    /// Addresses and ports that the tables alone have.
    only_in_tables: Vec<String>,
    /// Lines that were not understood, whose services were not compared.
    not_understood: Vec<String>,
}

#[derive(Serialize)]
struct Difference {
    address: String,
    service: Option<String>,
    rules: Answer,
    /// None: the tables do not have the address.
    tables: Option<Answer>,
}

impl CompareArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let snapshot = source::of_rules(self.file.clone())?;
        let bpffs = self.paths.bpffs();
        ensure!(
            Tables::exist(&bpffs)?,
            "no tables in {}: no agent has run; start `dataplane run` first",
            bpffs.display()
        );
        let mut contents = Tables::open(&bpffs)?.contents()?;
        contents.forget_reachable();
        let mut planner = Planner::adopt(contents.clone())
            .with_context(|| format!("the tables in {}", bpffs.display()))?;
        planner.plan(&snapshot);
        let mut found = Comparison {
            compared: planner.frontends().len(),
            differences: Vec::new(),
            only_in_tables: Vec::new(),
            not_understood: snapshot
                .problems
                .iter()
                .map(|problem| format!("{}: {}", problem.place, problem.text))
                .collect(),
        };
        for change in plan::changes(&contents, &planner) {
            match (change.before, change.after) {
                (_, None) => found.only_in_tables.push(change.key),
                (Some(tables), Some(rules)) if is_same(&tables, &rules) => {}
                (tables, Some(rules)) => found.differences.push(Difference {
                    address: change.key,
                    service: change.service,
                    rules,
                    tables,
                }),
            }
        }
        self.output.print(&found, text)?;
        let is_same = found.differences.is_empty() && found.not_understood.is_empty();
        Ok(if is_same {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(exit::CHANGES)
        })
    }
}

/// Whether clients see the same. Rules do not always tell an external IP from a load balancer's address, or whether a service
/// without an endpoint has one elsewhere.
fn is_same(tables: &Answer, rules: &Answer) -> bool {
    let kind = |answer: &Answer| match answer.kind {
        "LoadBalancer" => "ExternalIP",
        other => other,
    };
    let nobody = |answer: &Answer| {
        matches!(
            answer.refuses,
            Some(Empty::NoEndpoints | Empty::NoLocalEndpoint)
        )
    };
    kind(tables) == kind(rules)
        && tables.endpoints == rules.endpoints
        && tables.parts == rules.parts
        && (tables.refuses == rules.refuses || nobody(tables) && nobody(rules))
        && (tables.affinity_seconds == rules.affinity_seconds || nobody(rules))
}

/// Where an address leads.
fn leads_to(answer: Option<&Answer>) -> String {
    let Some(answer) = answer else {
        return "not served".to_owned();
    };
    if let Some(refuses) = answer.refuses {
        let why = match refuses {
            Empty::NoEndpoints => "no endpoints",
            Empty::NoLocalEndpoint => "no endpoint on this node",
            Empty::PortNotServed => "port not served",
        };
        return format!("refused: {why}");
    }
    let endpoints = answer.endpoints.iter().take(SHOWN);
    let mut words: Vec<String> = endpoints.map(ToString::to_string).collect();
    if answer.endpoints.len() > SHOWN {
        words.push(format!("and {} more", answer.endpoints.len() - SHOWN));
    }
    if words.is_empty() {
        words.push(answer.kind.to_owned());
    }
    if answer.parts.is_some() {
        words.push("by weight".to_owned());
    }
    if let Some(seconds) = answer.affinity_seconds {
        words.push(format!("affinity {}", output::duration(seconds.into())));
    }
    words.join(" ")
}

fn text(out: &mut dyn Write, found: &Comparison) -> io::Result<()> {
    let mut table = Table::new(&["ADDRESS", "SERVICE", "RULES LEAD TO", "TABLES LEAD TO"]);
    for difference in &found.differences {
        table.row([
            difference.address.clone().into(),
            difference.service.clone().unwrap_or("-".into()).into(),
            leads_to(Some(&difference.rules)).into(),
            leads_to(difference.tables.as_ref()).into(),
        ]);
    }
    if !table.is_empty() {
        table.write(out)?;
        writeln!(out)?;
    }
    for line in &found.not_understood {
        writeln!(out, "{}: {line}", output::styled(WARN, "not compared"))?;
    }
    let (count, all) = (found.differences.len(), found.compared);
    let (style, said) = match count {
        0 => (GOOD, "none differs".to_owned()),
        1 => (BAD, "1 differs".to_owned()),
        count => (BAD, format!("{count} differ")),
    };
    writeln!(
        out,
        "Compared {all} addresses and ports of kube-proxy's rules with the tables: {}. The tables have {} others.",
        output::styled(style, said),
        found.only_in_tables.len()
    )
}
