//! `dataplane dns query`.

use std::{io::Write, process::ExitCode, str::FromStr};

use anyhow::Context as _;
use clap::Args;
use dns::{Client, Step};
use hickory_proto::rr::RecordType;
use model::WorkloadName;
use serde::Serialize;
use terminal::output::{self, BAD, BOLD, DIM, Format, GOOD, WARN};

use super::CommonArgs;

/// Show how a query would be answered, by which rule, and from which object.
///
/// Reads the source, and sends no query. The command completes a name without a dot at its end as
/// the client's own resolver does: by its search list, and `ndots`. For a name that is not the
/// cluster's, the command prints the resolvers that would be asked, and for which names.
///
/// Exits with 0 if the name exists, or if resolvers would be asked; with 1 if it does not exist.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
    dataplane dns query web.shop.svc.cluster.local. -f services/
    dataplane dns query web --from shop/cart-7d9 -f cluster/      a short name, as the pod would ask
    dataplane dns query _http._tcp.web.shop.svc.cluster.local. --type SRV -f services/
    dataplane dns query 10.0.96.10.in-addr.arpa. --type PTR -f services/")]
pub struct QueryArgs {
    /// The name to look up
    #[arg(value_name = "NAME")]
    name: String,

    /// Type of the records
    #[arg(short = 't', long = "type", value_name = "TYPE", default_value = "A", value_parser = of_type)]
    of_type: RecordType,

    /// The pod that asks: its namespace, dnsPolicy and dnsConfig decide the search list and the
    /// resolvers [default: a process of the node]
    #[arg(long, value_name = "NAMESPACE/POD", value_parser = workload)]
    from: Option<WorkloadName>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,

    #[command(flatten)]
    pub(super) common: CommonArgs,
}

fn of_type(text: &str) -> Result<RecordType, String> {
    let text = text.to_ascii_uppercase();
    RecordType::from_str(&text)
        .map_err(|_| format!("`{text}` is not a type of records; expected one like A or SRV"))
}

fn workload(text: &str) -> Result<WorkloadName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
            Ok(WorkloadName::new(namespace, name))
        }
        _ => Err("expected NAMESPACE/POD".to_owned()),
    }
}

/// The result of a query.
#[derive(Debug, Serialize)]
struct Answer {
    /// The queries of the client's resolver, one step for each name.
    steps: Vec<Step>,
    /// The problems of the source's objects, because an object that is left out has no names.
    problems: Vec<String>,
}

impl QueryArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let snapshot = self.common.source.names(&self.common.node)?;
        let basis = self.common.basis()?;
        let zone = basis.zone(&snapshot);
        let workload = match &self.from {
            None => None,
            Some(name) => Some(zone.names.workload(name).with_context(|| {
                format!("the source has no pod {name}; give a pod of the source with --from")
            })?),
        };
        let client = match workload {
            Some(workload) => {
                let cluster = basis.cluster_dns(&snapshot);
                Client::of_workload(workload, &zone.domain, &cluster, &basis.node)
            }
            None => Client {
                search: basis.node.search.clone(),
                ndots: basis.node.ndots,
                resolvers: basis.node.resolvers.clone(),
                ..Client::unknown(Vec::new())
            },
        };
        let steps = dns::steps(&zone, &client, &self.name, self.of_type, |_, _| None)?;
        let exists = steps.last().is_some_and(|step| !step.is_missing());
        let problems = snapshot.problems.iter();
        let problems = problems.map(|problem| format!("{}: {}", problem.place, problem.text));
        let answer = Answer {
            steps,
            problems: problems.collect(),
        };
        self.output.print(&answer, text)?;
        Ok(if exists {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

fn text(out: &mut dyn Write, answer: &Answer) -> std::io::Result<()> {
    for step in &answer.steps {
        let object = step.object.as_ref().map(|of| format!(", from {of}"));
        let by = format!("rule {}{}", step.rule, object.unwrap_or_default());
        writeln!(out, "{BOLD}{}{BOLD:#} {DIM}({by}){DIM:#}", step.name)?;
        for record in &step.records {
            writeln!(out, "  {record}")?;
        }
        if let Some(code) = &step.code {
            let style = if step.is_missing() { BAD } else { GOOD };
            writeln!(out, "  {}", output::styled(style, code))?;
        }
        if let Some(ask) = &step.ask {
            let names = ask.names.join(", ");
            if ask.resolvers.is_empty() {
                writeln!(out, "  refused: there is no resolver to ask for {names}")?;
            } else {
                let resolvers: Vec<_> = ask.resolvers.iter().map(ToString::to_string).collect();
                writeln!(out, "  asks {} for {names}", resolvers.join(", "))?;
            }
        }
    }
    for problem in &answer.problems {
        writeln!(out, "{}: {problem}", output::styled(WARN, "problem"))?;
    }
    Ok(())
}
