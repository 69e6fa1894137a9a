//! Reports the effect of a take-over on a node's rules: the owner of each rule, the rules that the dataplane replaces,
//! and the rules that conflict with the dataplane. Pure: from texts to a report.

use std::collections::{BTreeMap, BTreeSet};

use takeover::owners::{self, FOREIGN, ISTIO_AMBIENT, ISTIO_SIDECAR, Owner, Plan};

use super::ruleset::{self, Line, Rule, Table, Text, Unread};

/// The mark and ports that the agent itself uses.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// The mark of its proxy's sockets.
    pub mark: u32,
    /// The ports of its proxy.
    pub ports: [u16; 2],
}

/// A conflict between rules that stay and the dataplane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Conflict {
    /// A base chain at the forward hook with policy drop.
    ForwardPolicy,
    /// Rules that refuse forwarded packets.
    RefusesForwarded,
    /// Rules that refuse packets that arrive.
    RefusesArriving,
    /// Rules that refuse packets sent by processes of the node or the pod.
    RefusesOwn,
    /// Rules that change a packet's destination.
    Translates,
    /// Rules that exempt packets to one address from conntrack, for a server on the node.
    Untracks,
    /// Rules that match the mark of the agent's proxy.
    Mark,
    /// Rules that redirect connections to a port of the agent's proxy.
    Port,
}

impl Conflict {
    /// Returns the conflict's name for reports.
    pub fn word(self) -> &'static str {
        match self {
            Self::ForwardPolicy => "forward-policy",
            Self::RefusesForwarded => "refuses-forwarded",
            Self::RefusesArriving => "refuses-arriving",
            Self::RefusesOwn => "refuses-own",
            Self::Translates => "translates",
            Self::Untracks => "untracks",
            Self::Mark => "mark",
            Self::Port => "port",
        }
    }

    /// Describes the conflict and its consequence.
    pub fn means(self) -> &'static str {
        match self {
            Self::ForwardPolicy => {
                "drops forwarded packets that no rule accepts; packets of services pass it only through the stack (--packet-path)"
            }
            Self::RefusesForwarded => {
                "refuses forwarded packets; packets of services pass it only through the stack (--packet-path): past the stack, \
                 it no longer restricts clients outside of the node that use services"
            }
            Self::RefusesArriving => {
                "refuses packets that arrive; packets to node ports, external IPs and load balancers are translated \
                 before, so it no longer restricts their clients"
            }
            Self::RefusesOwn => {
                "refuses packets of processes here; connections to services are translated at the socket, so it sees \
                 the endpoint's address and port in place of the service's"
            }
            Self::Translates => {
                "gives packets another destination; connections to services that the dataplane serves do not come to it, \
                 all others do"
            }
            Self::Untracks => {
                "keeps packets to an address from conntrack, as for a DNS cache on the node; if the address is a service's, \
                 connections to it are translated at the socket and do not come to the cache: give clients its link-local \
                 address"
            }
            Self::Mark => {
                "asks for the mark of the agent's proxy: set mesh.proxy.mark to another number"
            }
            Self::Port => {
                "hands connections to a port of the agent's proxy: set mesh.proxy.outbound and inbound to others"
            }
        }
    }
}

/// Rules of one owner.
#[derive(Debug)]
pub struct Found<'a> {
    /// The owner.
    pub owner: &'static Owner,
    /// The tables that have its rules.
    pub tables: BTreeSet<String>,
    /// Number of its chains.
    pub chains: usize,
    /// Its rules.
    pub rules: Vec<Line<'a>>,
    /// The conflicts, each with its rules. Rules that the dataplane takes over have no conflicts.
    pub conflicts: BTreeMap<Conflict, Vec<Line<'a>>>,
}

/// The report.
#[derive(Debug)]
pub struct Report<'a> {
    /// The owners; those whose rules the dataplane takes over come first.
    pub owners: Vec<Found<'a>>,
    /// Lines that were not understood.
    pub unread: Vec<Unread<'a>>,
}

/// Reads texts and reports their owners and conflicts.
pub fn report<'a>(texts: &[Text<'a>], own: Own) -> Report<'a> {
    let (tables, unread) = ruleset::read(texts);
    let mut found: BTreeMap<&'static Owner, Found<'a>> = BTreeMap::new();
    for table in &tables {
        let of_chains = of_chains(table, &tables);
        for (name, chain) in &table.chains {
            let owner = of_chains.get(name).copied().unwrap_or(FOREIGN);
            if chain.hook.is_none() {
                entry(&mut found, owner, table).chains += 1;
            }
        }
        let hooks = table.hooks();
        for rule in &table.rules {
            let owner = of_chains.get(rule.chain).copied();
            let owner = owner
                .or_else(|| of_rule(rule, &of_chains))
                .unwrap_or(FOREIGN);
            let of = entry(&mut found, owner, table);
            let line = table.line(rule.line, rule.text.clone());
            if owner.plan == Plan::Leave {
                let none = Vec::new();
                let hooks = hooks.get(rule.chain).unwrap_or(&none);
                for conflict in conflicts(rule, hooks, own) {
                    of.conflicts.entry(conflict).or_default().push(line.clone());
                }
            }
            of.rules.push(line);
        }
        policies(table, &of_chains, &mut found);
    }
    let mut owners: Vec<Found<'a>> = found.into_values().collect();
    owners.sort_by_key(|found| found.owner.plan);
    Report { owners, unread }
}

fn entry<'f, 'a>(
    found: &'f mut BTreeMap<&'static Owner, Found<'a>>,
    owner: &'static Owner,
    table: &Table<'a>,
) -> &'f mut Found<'a> {
    let new = || Found {
        owner,
        tables: BTreeSet::new(),
        chains: 0,
        rules: Vec::new(),
        conflicts: BTreeMap::new(),
    };
    let found = found.entry(owner).or_insert_with(new);
    found.tables.insert(table.title());
    found
}

/// Returns the owners of a table's chains. A base chain has an owner only if the table's name or its own identifies
/// one.
pub(super) fn of_chains<'a>(
    table: &Table<'a>,
    all: &[Table<'a>],
) -> BTreeMap<&'a str, &'static Owner> {
    let of_table = table.native.and_then(owners::of_table);
    // Both modes of Istio have a chain ISTIO_OUTPUT. Only ambient mode has ISTIO_PRERT and ISTIO_POSTRT.
    let of_origin = all.iter().filter(|other| other.origin == table.origin);
    let mut names = of_origin.flat_map(|table| table.chains.keys());
    let is_ambient = names.any(|name| owners::of_chain(name) == Some(ISTIO_AMBIENT));
    let of = |name: &str, at_hook: bool| match owners::of_chain(name) {
        Some(owner) if owner == ISTIO_SIDECAR && is_ambient => Some(ISTIO_AMBIENT),
        owner => owner.filter(|_| !at_hook),
    };
    let chains = table.chains.iter();
    let owned =
        chains.map(|(name, chain)| (*name, of_table.or_else(|| of(name, chain.hook.is_some()))));
    owned
        .filter_map(|(name, owner)| Some((name, owner?)))
        .collect()
}

/// Finds the owner of a rule in a chain without an owner, by the rule's jumps, comment, sets, marks and interfaces, in
/// this order.
pub(super) fn of_rule(
    rule: &Rule<'_>,
    of_chains: &BTreeMap<&str, &'static Owner>,
) -> Option<&'static Owner> {
    let by_jump = || rule.jumps.iter().find_map(|to| of_chains.get(to).copied());
    let by_comment = || {
        let mut comments = rule.comments.iter();
        comments.find_map(|comment| owners::of_comment(comment))
    };
    let by_set = || rule.sets.iter().find_map(|set| owners::of_set(set));
    let by_mark = || rule.marks.iter().find_map(|mark| owners::of_mark(*mark));
    let by_interface = || {
        rule.interfaces
            .iter()
            .find_map(|name| owners::of_interface(name))
    };
    by_jump()
        .or_else(by_comment)
        .or_else(by_set)
        .or_else(by_mark)
        .or_else(by_interface)
}

/// Returns the conflicts of a rule that packets reach from these hooks.
fn conflicts(rule: &Rule<'_>, hooks: &[String], own: Own) -> Vec<Conflict> {
    let at = |names: &[&str]| hooks.iter().any(|hook| names.contains(&&**hook));
    let asks_for = |(value, mask): &(u32, u32)| *value != 0 && own.mark & mask == *value;
    let effects = rule.effects;
    let refuses = |hooks| effects.refuses && !rule.to_loopback && at(hooks);
    [
        (Conflict::RefusesForwarded, refuses(&["forward"])),
        (
            Conflict::RefusesArriving,
            refuses(&["ingress", "prerouting", "input"]),
        ),
        (Conflict::RefusesOwn, refuses(&["output", "postrouting"])),
        (
            Conflict::Translates,
            effects.translates && at(&["prerouting", "output"]),
        ),
        (
            Conflict::Untracks,
            effects.untracks && rule.to_one && at(&["prerouting", "output"]),
        ),
        (Conflict::Mark, rule.asks.iter().any(asks_for)),
        (
            Conflict::Port,
            effects.translates && rule.to_ports.iter().any(|port| own.ports.contains(port)),
        ),
    ]
    .into_iter()
    .filter_map(|(conflict, is)| is.then_some(conflict))
    .collect()
}

/// Adds the base chains that drop by policy. iptables does not record which program set a policy. The report attributes
/// it to the base chain's owner, or to the first owner that stays and whose chain the base chain jumps to.
fn policies<'a>(
    table: &Table<'a>,
    of_chains: &BTreeMap<&'a str, &'static Owner>,
    found: &mut BTreeMap<&'static Owner, Found<'a>>,
) {
    for (name, chain) in &table.chains {
        let (Some(hook), Some(line)) = (chain.hook.as_deref(), chain.drops) else {
            continue;
        };
        let conflict = match hook {
            "forward" => Conflict::ForwardPolicy,
            "output" | "postrouting" => Conflict::RefusesOwn,
            _ => Conflict::RefusesArriving,
        };
        let jumps = table
            .rules
            .iter()
            .filter(|rule| rule.chain == *name)
            .flat_map(|rule| &rule.jumps);
        let mut owners = jumps.filter_map(|to| of_chains.get(to).copied());
        let owner = of_chains
            .get(name)
            .copied()
            .or_else(|| owners.find(|owner| owner.plan == Plan::Leave));
        let owner = owner.unwrap_or(FOREIGN);
        if owner.plan == Plan::Leave {
            let line = table.line(line, format!("policy of {name}: drop").into());
            let conflicts = &mut entry(found, owner, table).conflicts;
            conflicts.entry(conflict).or_default().push(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        fmt::Write as _,
        fs,
        path::{Path, PathBuf},
    };

    use super::{super::ruleset::Form, *};

    const OWN: Own = Own {
        mark: 15006,
        ports: [15001, 15006],
    };

    fn of(name: &Path) -> (Form, &'static str) {
        let name = name.file_name().unwrap_or_default().to_string_lossy();
        if name.contains("nft-ruleset") || name.ends_with(".nft") {
            (Form::Nft, "nft")
        } else {
            (Form::Saved, "iptables-nft")
        }
    }

    /// Prints the report as text: a line for each owner, its conflicts, and the lines that were not understood.
    fn text(report: &Report<'_>) -> String {
        let mut out = String::new();
        for found in &report.owners {
            let tables: Vec<&str> = found.tables.iter().map(String::as_str).collect();
            writeln!(
                out,
                "{}: {}, {} chains, {} rules in {}",
                found.owner.name,
                found.owner.plan.word(),
                found.chains,
                found.rules.len(),
                tables.join(", ")
            )
            .unwrap();
            for (conflict, lines) in &found.conflicts {
                for line in lines {
                    writeln!(
                        out,
                        "  {} {} {}: {}",
                        conflict.word(),
                        line.table,
                        line.number,
                        line.text
                    )
                    .unwrap();
                }
            }
        }
        for unread in &report.unread {
            let Line {
                table,
                number,
                text,
            } = &unread.line;
            writeln!(out, "? {table} {number}: {text}: {}", unread.why).unwrap();
        }
        out
    }

    fn data() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
    }

    /// Each file of rules in tests/data/rules has its expected report in a file beside it.
    #[test]
    fn rules_are_reported_as_written_beside_them() {
        let mut files: Vec<PathBuf> = fs::read_dir(data().join("rules"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| {
                path.extension()
                    .is_some_and(|ending| ending == "save" || ending == "nft")
            })
            .collect();
        files.sort();
        assert!(files.len() > 5);
        let mut wrong = String::new();
        for path in files {
            let rules = fs::read_to_string(&path).unwrap();
            let (form, origin) = of(&path);
            let found = text(&report(
                &[Text {
                    origin,
                    form,
                    text: &rules,
                }],
                OWN,
            ));
            let mut wanted = path.clone().into_os_string();
            wanted.push(".report");
            let wanted = fs::read_to_string(wanted).unwrap_or_default();
            if found != wanted {
                write!(
                    wrong,
                    "{}: found\n{found}\nin place of\n{wanted}\n",
                    path.display()
                )
                .unwrap();
            }
        }
        assert!(wrong.is_empty(), "{wrong}");
    }

    #[test]
    fn kube_proxys_rules_are_all_its_own() {
        for name in ["iptables-save.txt", "nft-ruleset.txt"] {
            let path = data().join("kube-proxy-1.36").join(name);
            let rules = fs::read_to_string(&path).unwrap();
            let (form, origin) = of(&path);
            let report = report(
                &[Text {
                    origin,
                    form,
                    text: &rules,
                }],
                OWN,
            );
            assert!(report.unread.is_empty(), "{:?}", report.unread);
            let owners: Vec<&str> = report.owners.iter().map(|found| found.owner.name).collect();
            match form {
                // The chain KUBE-FIREWALL belongs to the kubelet. Older versions of kube-proxy wrote it too.
                Form::Saved => assert_eq!(owners, ["kube-proxy", "kubelet"]),
                Form::Nft => assert_eq!(owners, ["kube-proxy"]),
            }
            assert!(report.owners[0].rules.len() > 50, "{name}");
        }
    }

    /// Reads Istio's own examples. `DATAPLANE_ISTIO_RULES` names a directory with Istio's source or its test data:
    /// files `*.golden` with the rules that Istio's programs write for many configurations.
    #[test]
    fn istios_own_examples_are_understood() {
        let Some(root) = env::var_os("DATAPLANE_ISTIO_RULES") else {
            println!(
                "skipped istios_own_examples_are_understood: DATAPLANE_ISTIO_RULES names no directory"
            );
            return;
        };
        let (mut files, mut open) = (Vec::new(), vec![PathBuf::from(root)]);
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path);
                } else if path.extension().is_some_and(|ending| ending == "golden") {
                    files.push(path);
                }
            }
        }
        files.sort();
        assert!(!files.is_empty());
        let (mut whole, mut rules, mut others) = (0, 0, BTreeMap::<String, usize>::new());
        let mut wrong = String::new();
        for path in &files {
            let text = fs::read_to_string(path).unwrap();
            // The files also contain the names of the programs, some right after a COMMIT without a line break.
            let text = text.replace("COMMIT", "COMMIT\n");
            let lines = text
                .lines()
                .filter(|line| !matches!(*line, "iptables-save" | "ip6tables-save"));
            let text: String = lines.flat_map(|line| [line, "\n"]).collect();
            if text.contains("add table") || text.trim().is_empty() || !text.contains("COMMIT") {
                continue;
            }
            let text = Text {
                origin: "iptables-nft",
                form: Form::Saved,
                text: &text,
            };
            let report = report(&[text], OWN);
            whole += usize::from(report.unread.is_empty());
            for unread in &report.unread {
                writeln!(
                    wrong,
                    "{}: {}: {}",
                    path.display(),
                    unread.line.text,
                    unread.why
                )
                .unwrap();
            }
            for found in &report.owners {
                rules += found.rules.len();
                if found.owner != ISTIO_SIDECAR && found.owner != ISTIO_AMBIENT {
                    for line in &found.rules {
                        assert!(
                            !line.text.contains("ISTIO"),
                            "{}: {}",
                            path.display(),
                            line.text
                        );
                        *others
                            .entry(format!("{}: {}", found.owner.name, line.text))
                            .or_default() += 1;
                    }
                }
            }
        }
        println!(
            "{} files, {whole} of rules for iptables without a line that is not understood, {rules} rules",
            files.len()
        );
        for (line, times) in &others {
            println!("{times} times not Istio's by any sign: {line}");
        }
        assert!(wrong.is_empty(), "{wrong}");
    }
}
