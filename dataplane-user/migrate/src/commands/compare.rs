//! `dataplane-migrate compare`.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use dataplane_common::{
    Protocol,
    tables::{Frontend, FrontendKey, Kind},
};
use kernel::tables::Tables;
use model::Snapshot;
use plan::{Answer, Contents, Empty, Planner};
use serde::Serialize;
use terminal::{
    PathArgs, exit,
    output::{self, BAD, GOOD, Table, WARN},
};

use super::rules;

/// Maximum number of endpoints printed for an address.
const SHOWN: usize = 4;
/// Maximum number of addresses printed that only the tables have.
const OTHERS: usize = 20;

/// Compare what kube-proxy's rules serve with what the dataplane's tables serve, address by address.
///
/// Reads kube-proxy's rules in the kernel, or those in a file, and the dataplane's tables. Prints each address and port that
/// the tables do not lead to the same endpoints, with the same session affinity or refusal, as the rules. Changes nothing.
///
/// Exits with 0 if nothing differs. Exits with 2 if something differs, if a line of the rules is not understood, or if the rules
/// have no address of a family that the tables have. Exits with 1 after an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dataplane-migrate compare                 before kube-proxy's rules are removed
  dataplane-migrate compare --file rules    after they were saved and removed")]
pub struct CompareArgs {
    /// A file that `iptables-save` and `ip6tables-save`, or `nft list ruleset`, wrote [default: the rules in the kernel]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: output::Format,

    #[command(flatten)]
    pub paths: PathArgs,
}

/// The result of comparing the rules with the tables.
#[derive(Serialize)]
pub struct Comparison {
    /// Number of addresses and ports that rules serve or refuse.
    pub compared: usize,
    differences: Vec<Difference>,
    /// Addresses and ports that only the tables have.
    only_in_tables: Vec<String>,
    /// Families that have addresses in the tables but not in the rules.
    not_in_rules: Vec<&'static str>,
    /// Lines that were not understood. Their services were not compared.
    not_understood: Vec<String>,
    /// Whether the rules serve clients outside the cluster: node ports, external IPs, load balancers.
    #[serde(skip)]
    pub is_for_outside: bool,
    /// The TCP ports of cluster IPs that both the rules and the tables serve, each with its endpoints.
    #[serde(skip)]
    pub cluster_ips: Vec<(SocketAddr, Vec<SocketAddr>)>,
}

#[derive(Serialize)]
struct Difference {
    address: String,
    service: Option<String>,
    rules: Answer,
    /// `None` if the tables do not have the address.
    tables: Option<Answer>,
}

impl CompareArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let snapshot = rules::snapshot(self.file.as_deref())?;
        let found = compare(&snapshot, &self.paths.bpffs())?;
        self.output.print(&found, text)?;
        Ok(if found.is_same() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(exit::CHANGES)
        })
    }
}

/// Compares the rules with the tables. `snapshot` has the services of the rules.
pub fn compare(snapshot: &Snapshot, bpffs: &Path) -> anyhow::Result<Comparison> {
    ensure!(
        Tables::exist(bpffs)?,
        "no tables in {}: start `dataplane run`, or name its directory by --bpffs (in a container, mount /sys/fs/bpf)",
        bpffs.display()
    );
    let mut contents = Tables::open(bpffs)?.contents()?;
    contents.forget_reachable();
    let mut planner = Planner::adopt(contents.clone())
        .with_context(|| format!("the tables in {}", bpffs.display()))?;
    planner.plan(snapshot);
    let mut found = Comparison {
        compared: planner.frontends().len(),
        differences: Vec::new(),
        only_in_tables: Vec::new(),
        not_in_rules: not_in_rules(&planner.frontends(), &contents.frontends),
        not_understood: snapshot
            .problems
            .iter()
            .map(|problem| format!("{}: {}", problem.place, problem.text))
            .collect(),
        is_for_outside: (planner.frontends().iter()).any(|(_, frontend)| {
            matches!(
                frontend.kind(),
                Kind::NODE_PORT | Kind::EXTERNAL_IP | Kind::LOAD_BALANCER
            )
        }),
        cluster_ips: cluster_ips(&planner, &contents),
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
    Ok(found)
}

fn cluster_ips(rules: &Planner, tables: &Contents) -> Vec<(SocketAddr, Vec<SocketAddr>)> {
    let of_rules: BTreeSet<FrontendKey> =
        rules.frontends().into_iter().map(|(key, _)| key).collect();
    let mut all = Vec::new();
    for (key, frontend) in &tables.frontends {
        let Some(pool) = tables.pools.get(frontend.pool() as usize) else {
            continue;
        };
        let from = pool.block.base() as usize;
        let to = from + usize::from(pool.block.len());
        let endpoints = tables.endpoints.get(from..to).unwrap_or_default();
        let endpoints: BTreeSet<SocketAddr> = (endpoints.iter())
            .filter(|endpoint| !endpoint.is_none())
            .map(|endpoint| SocketAddr::new(endpoint.addr.ip(), endpoint.port.host()))
            .collect();
        let is_asked = frontend.kind() == Kind::CLUSTER_IP && key.protocol == Protocol::TCP;
        if is_asked && !endpoints.is_empty() && of_rules.contains(key) {
            let addr = SocketAddr::new(key.addr.ip(), key.port.host());
            all.push((addr, endpoints.into_iter().collect()));
        }
    }
    all
}

impl Comparison {
    /// Returns true if nothing differs and everything was compared.
    pub fn is_same(&self) -> bool {
        self.differences.is_empty()
            && self.not_understood.is_empty()
            && self.not_in_rules.is_empty()
    }
}

/// Returns the families that have services in the tables but not in the rules. A file may lack the rules of a family,
/// or the rules may be removed.
fn not_in_rules(
    rules: &[(FrontendKey, Frontend)],
    tables: &[(FrontendKey, Frontend)],
) -> Vec<&'static str> {
    let has = |all: &[(FrontendKey, Frontend)], v4: bool| {
        let mut of_services = (all.iter()).filter(|(_, of)| of.kind() != Kind::NODE_ADDRESS);
        of_services.any(|(key, _)| key.addr.ip().is_ipv4() == v4)
    };
    let families = [("IPv4", true), ("IPv6", false)].into_iter();
    let missing = families.filter(|(_, v4)| has(tables, *v4) && !has(rules, *v4));
    missing.map(|(family, _)| family).collect()
}

/// Returns true if clients see no difference. Rules do not always show whether an address is an external IP or a load
/// balancer's, or whether a service without an endpoint on the node has one elsewhere.
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

/// Describes the destination of an address.
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

/// Prints the comparison as text.
pub fn text(out: &mut dyn Write, found: &Comparison) -> io::Result<()> {
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
    for address in found.only_in_tables.iter().take(OTHERS) {
        writeln!(out, "only in the tables: {address}")?;
    }
    if found.only_in_tables.len() > OTHERS {
        let more = found.only_in_tables.len() - OTHERS;
        writeln!(out, "only in the tables: {more} more (-o json has all)")?;
    }
    for family in &found.not_in_rules {
        writeln!(
            out,
            "{}: the tables serve {family}, and kube-proxy's rules have no address of {family}",
            output::styled(BAD, "missing")
        )?;
    }
    let (count, all) = (found.differences.len(), found.compared);
    let (style, said) = match count {
        0 if found.not_in_rules.is_empty() => (GOOD, "none differs".to_owned()),
        0 => (BAD, "none of these differs".to_owned()),
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use dataplane_common::{Addr, Port, Protocol};

    use super::*;

    fn frontends(texts: &[(&str, Kind)]) -> Vec<(FrontendKey, Frontend)> {
        let frontend = |(text, kind): &(&str, Kind)| {
            let to: SocketAddr = text.parse().unwrap();
            let key = FrontendKey::new(Addr::from(to.ip()), Port::new(to.port()), Protocol::TCP);
            (key, Frontend::new(0, *kind))
        };
        texts.iter().map(frontend).collect()
    }

    #[test]
    fn a_family_without_rules_is_a_difference() {
        let node = ("[fd00::1]:0", Kind::NODE_ADDRESS);
        let v4 = ("10.96.0.1:80", Kind::CLUSTER_IP);
        let v6 = ("[fd00:96::1]:80", Kind::CLUSTER_IP);
        for (rules, tables, wanted) in [
            (&[v4, v6][..], &[v4, v6][..], &[][..]),
            (&[v4], &[v4, v6], &["IPv6"]),
            (&[v4, node], &[v4, v6, node], &["IPv6"]),
            (&[], &[v4, v6], &["IPv4", "IPv6"]),
            (&[v4], &[v4, node], &[]),
            (&[v4, v6], &[v4], &[]),
            (&[], &[], &[]),
        ] {
            let found = not_in_rules(&frontends(rules), &frontends(tables));
            assert_eq!(found, wanted, "{rules:?}, {tables:?}");
        }
    }

    #[test]
    fn what_is_missing_in_the_rules_is_listed() {
        let count = OTHERS + 3;
        let found = Comparison {
            compared: 1,
            differences: Vec::new(),
            only_in_tables: (0..count)
                .map(|n| format!("[fd00:96::{n}]:80/tcp"))
                .collect(),
            not_in_rules: vec!["IPv6"],
            not_understood: Vec::new(),
            is_for_outside: false,
            cluster_ips: Vec::new(),
        };
        assert!(!found.is_same());
        let mut out = Vec::new();
        text(&mut out, &found).unwrap();
        let out = String::from_utf8(out).unwrap();
        for said in [
            "only in the tables: [fd00:96::0]:80/tcp\n",
            "only in the tables: 3 more",
            "the tables serve IPv6",
        ] {
            assert!(out.contains(said), "{said:?} in {out}");
        }
        assert!(!out.contains("none differs"), "{out}");
    }
}
