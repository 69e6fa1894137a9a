//! kube-proxy's rules as the source: gets the rules in the kernel, and takes settings of the node from them where the
//! operator has none.

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
};

use kernel::netfilter::{self, Kind, Table};
use settings::{Node, Packets, Range, Settings};
use source::{
    OpenError,
    iptables::{self, Facts, First, Masquerade, Text},
};
use takeover::{
    binaries::{self, Binaries},
    collect::{self, Printed},
    journal::{self, Journal},
    ruleset::Form,
};
use tracing::info;

/// The programs that print rules, as found on `PATH`: each was asked for its version.
static PROGRAMS: Mutex<Option<Binaries>> = Mutex::new(None);

/// Returns kube-proxy's rules in the kernel, of this thread's network namespace; or, by the journal in `takeover`, the
/// rules that a take-over saved, because it removed those in the kernel.
///
/// # Errors
///
/// The kernel or a program does not print them, or a program is missing; or the saved rules cannot be read.
pub fn live(takeover: Option<&Path>) -> Result<Vec<Text>, String> {
    if let Some(directory) = takeover {
        let journal = Journal::read(directory).map_err(|error| error.to_string())?;
        if let Some(journal) = journal.filter(Journal::has_the_rules) {
            let saved = journal.saved().map_err(|error| error.to_string())?;
            return Ok(texts(saved.into_printed()));
        }
    }
    let tables = netfilter::tables().map_err(|error| error.to_string())?;
    let tables: Vec<Table> = tables.into_iter().filter(is_kube_proxys).collect();
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = &*programs {
        let texts = print(found, &tables);
        // On failure another program may be there now.
        if texts.is_ok() {
            return texts;
        }
    }
    let found = binaries::find(None).map_err(|error| error.to_string())?;
    print(programs.insert(found), &tables)
}

/// Whether a table has rules of kube-proxy's for services. kube-proxy makes chain `KUBE-SERVICES` in each table of
/// iptables that has some.
fn is_kube_proxys(table: &Table) -> bool {
    match table.kind {
        Kind::Legacy | Kind::Compat => {
            let mut chains = table.chains.iter();
            matches!(&*table.name, "nat" | "filter")
                && chains.any(|chain| chain.name == "KUBE-SERVICES")
        }
        Kind::Native => table.name == "kube-proxy" && matches!(table.family, "ip" | "ip6"),
    }
}

fn print(found: &Binaries, tables: &[Table]) -> Result<Vec<Text>, String> {
    let collected = collect::collect(None, found, tables, collect::Native::Read);
    let collected = collected.map_err(|error| error.to_string())?;
    if !collected.missing.is_empty() {
        return Err(collected.missing.join("\n"));
    }
    Ok(texts(collected.texts))
}

/// Joins the tables that one program printed one by one into one text, because kube-proxy's rules of a family are in two tables.
fn texts(printed: Vec<Printed>) -> Vec<Text> {
    let mut texts: Vec<Text> = Vec::new();
    for Printed { origin, form, text } in printed {
        let origin = match form {
            Form::Saved => format!("{origin}-save"),
            Form::Nft => format!("{origin} list table"),
        };
        let mut known = texts.iter_mut();
        match known.find(|known| form == Form::Saved && known.origin == origin) {
            Some(known) => known.text.push_str(&text),
            None => texts.push(Text { origin, text }),
        }
    }
    texts
}

/// Returns the settings, with those from kube-proxy's rules where the operator has none, if the rules are the source;
/// and the rules that were read for it.
///
/// # Errors
///
/// The rules cannot be read.
pub fn with_rules(settings: &Settings) -> Result<(Settings, Option<First>), OpenError> {
    let mut settings = settings.clone();
    let first = first(&settings.source)?;
    if let Some(First { imported, .. }) = &first {
        node(&mut settings.node, &imported.facts);
        packets(&mut settings.packets, &imported.facts);
    }
    Ok((settings, first))
}

/// As [`with_rules`], for a command that needs the node only.
///
/// # Errors
///
/// The rules cannot be read.
pub fn node_of_rules(
    source: &settings::Source,
    of: &Node,
) -> Result<(Node, Option<First>), OpenError> {
    let mut of = of.clone();
    let first = first(source)?;
    if let Some(First { imported, .. }) = &first {
        node(&mut of, &imported.facts);
    }
    Ok((of, first))
}

/// Returns the rules to read, if they are the source.
pub fn source(settings: &settings::Source) -> Option<iptables::Settings> {
    let rules = settings.iptables.as_ref()?;
    Some(iptables::Settings {
        file: rules.file.clone(),
        live,
        takeover: (!rules.kernel_only).then(|| {
            let directory = rules.takeover_dir.clone();
            directory.unwrap_or_else(|| journal::DIRECTORY.into())
        }),
        strict: rules.strict,
        first: None,
    })
}

fn first(from: &settings::Source) -> Result<Option<First>, OpenError> {
    let rules = source(from);
    Ok(rules.as_ref().map(iptables::read).transpose()?)
}

fn node(node: &mut Node, facts: &Facts) {
    if !node.node_port_addresses.is_empty() {
        return;
    }
    // No range means the primary addresses. The agent answers node ports at loopback in any case.
    let loopback = ["127.0.0.0/8", "::1/128"].map(|net| Range(net.parse().expect("written here")));
    let said: Vec<Range> = facts.node_ports.iter().copied().map(Range).collect();
    node.node_port_addresses = if said.is_empty() {
        loopback.to_vec()
    } else {
        said
    };
}

/// Takes over from the rules which clients are masqueraded on the way to a cluster IP.
fn packets(packets: &mut Packets, facts: &Facts) {
    let is_said =
        packets.masquerade_all || packets.pods_by_interface || !packets.pod_cidrs.is_empty();
    for (family, masquerade) in ["IPv4", "IPv6"].into_iter().zip(&facts.masquerade) {
        if let Some(masquerade) = masquerade {
            let mark = facts.mark.unwrap_or_default();
            info!(
                "kube-proxy's rules masquerade {masquerade} of {family} on the way to a cluster IP, by mark {mark:#x}"
            );
        }
    }
    if is_said {
        return;
    }
    let known: Vec<&Masquerade> = facts.masquerade.iter().flatten().collect();
    for masquerade in &known {
        let prefix = match masquerade {
            Masquerade::NotFromPrefix(prefix) => Some(prefix),
            Masquerade::NotFromInterface(_) => None,
            _ => continue,
        };
        packets.pods_by_interface = true;
        let pattern = prefix.and_then(|prefix| format!("{prefix}*").parse().ok());
        if packets.pod_interfaces.is_empty() {
            packets.pod_interfaces.extend(pattern);
        }
        return;
    }
    let all = |of: Masquerade| known.iter().all(|masquerade| **masquerade == of);
    if all(Masquerade::Nobody) {
        return;
    }
    if all(Masquerade::All) {
        packets.masquerade_all = true;
        return;
    }
    // Clients outside of these networks are masqueraded, so one family may be masqueraded and the other not.
    let networks = [true, false].into_iter().zip(&facts.masquerade);
    let networks = networks.filter_map(|(v4, masquerade)| match masquerade {
        Some(Masquerade::OutsideOf(net)) => Some(*net),
        Some(Masquerade::Nobody) => Some(iptables::all_of(v4)),
        _ => None,
    });
    packets.pod_cidrs = networks.map(Range).collect();
}

#[cfg(test)]
mod tests {
    use imbl::OrdMap;
    use kernel::netfilter::Listed;

    use super::*;

    fn of(v4: Option<Masquerade>, v6: Option<Masquerade>) -> Packets {
        let mut found = Packets::default();
        let facts = Facts {
            masquerade: [v4, v6],
            ..Facts::default()
        };
        packets(&mut found, &facts);
        found
    }

    fn cidrs(packets: &Packets) -> Vec<String> {
        let ranges = packets.pod_cidrs.iter();
        ranges.map(|range| range.0.to_string()).collect()
    }

    #[test]
    fn who_is_masqueraded_is_taken_over() {
        use Masquerade::{All, Nobody, NotFromInterface, NotFromPrefix, OutsideOf};
        let net = |text: &str| Some(OutsideOf(text.parse().unwrap()));
        assert_eq!(of(None, None), Packets::default());
        assert_eq!(of(Some(Nobody), Some(Nobody)), Packets::default());
        assert!(of(Some(All), None).masquerade_all);
        assert!(of(Some(All), Some(All)).masquerade_all);
        let both = of(net("10.244.0.0/16"), net("fd00::/64"));
        assert_eq!(cidrs(&both), ["10.244.0.0/16", "fd00::/64"]);
        let one = of(net("10.244.0.0/16"), Some(Nobody));
        assert_eq!(cidrs(&one), ["10.244.0.0/16", "::/0"]);
        assert_eq!(cidrs(&of(Some(All), Some(Nobody))), ["::/0"]);
        let by_name = of(Some(NotFromPrefix("cali".into())), None);
        assert!(by_name.pods_by_interface);
        assert_eq!(by_name.pod_interfaces, ["cali*".parse().unwrap()]);
        let bridge = of(Some(NotFromInterface("cbr0".into())), None);
        assert!(bridge.pods_by_interface && bridge.pod_interfaces.is_empty());
    }

    #[test]
    fn without_an_address_for_node_ports_loopback_alone_answers() {
        let mut own = Node::default();
        node(&mut own, &Facts::default());
        let wanted = ["127.0.0.0/8", "::1/128"].map(|net| net.parse().unwrap());
        assert_eq!(own.node_port_addresses, wanted);
    }

    /// If a program prints nothing for all tables at once, each table is printed alone.
    #[test]
    fn what_is_printed_table_by_table_is_one_text() {
        const SAVED: &str = include_str!("../../../tests/data/kube-proxy-1.36/iptables-save.txt");
        let start = SAVED.find("*nat\n").unwrap();
        let print = |origin: &str, form, text: &str| Printed {
            origin: origin.into(),
            form,
            text: text.into(),
        };
        let [nat, filter] = [&SAVED[start..], &SAVED[..start]];
        let all = texts(vec![
            print("iptables-nft", Form::Saved, nat),
            print("iptables-nft", Form::Saved, filter),
            print("ip6tables-nft", Form::Saved, "*nat\nCOMMIT\n"),
            print("nft", Form::Nft, "table ip x {\n}\n"),
            print("nft", Form::Nft, "table ip6 x {\n}\n"),
        ]);
        let origins: Vec<&str> = all.iter().map(|text| &*text.origin).collect();
        let wanted = [
            "iptables-nft-save",
            "ip6tables-nft-save",
            "nft list table",
            "nft list table",
        ];
        assert_eq!(origins, wanted);
        let services = |texts: &[Text]| iptables::import(texts, &OrdMap::new()).unwrap().services;
        let whole = Text {
            origin: "rules".into(),
            text: SAVED.into(),
        };
        assert_eq!(services(&all[..1]), services(&[whole]));
    }

    /// A program for tables of other owners may be missing.
    #[test]
    fn tables_of_others_are_not_wanted() {
        let table = |kind, family, name: &str, chains: &[&str]| Table {
            kind,
            family,
            name: name.to_owned(),
            chains: (chains.iter())
                .map(|chain| Listed {
                    name: (*chain).to_owned(),
                    hook: None,
                    drops: false,
                    rules: 1,
                })
                .collect(),
            sets: Vec::new(),
        };
        for (wanted, table) in [
            (
                true,
                table(Kind::Legacy, "ip", "nat", &["OUTPUT", "KUBE-SERVICES"]),
            ),
            (
                true,
                table(Kind::Compat, "ip6", "filter", &["KUBE-SERVICES"]),
            ),
            (true, table(Kind::Native, "ip", "kube-proxy", &["services"])),
            (false, table(Kind::Compat, "ip", "filter", &["DOCKER"])),
            (false, table(Kind::Compat, "ip", "nat", &["KUBE-MARK-MASQ"])),
            (
                false,
                table(Kind::Legacy, "ip", "mangle", &["KUBE-SERVICES"]),
            ),
            (
                false,
                table(Kind::Native, "inet", "kube-proxy", &["services"]),
            ),
            (
                false,
                table(Kind::Native, "ip", "istio", &["KUBE-SERVICES"]),
            ),
        ] {
            assert_eq!(is_kube_proxys(&table), wanted, "{table:?}");
        }
    }

    #[test]
    fn what_the_operator_says_counts() {
        let mut said = Packets {
            pod_cidrs: vec!["10.0.0.0/8".parse().unwrap()],
            ..Packets::default()
        };
        let before = said.clone();
        let facts = Facts {
            masquerade: [Some(Masquerade::All), None],
            node_ports: ["10.0.0.1/32".parse().unwrap()].into(),
            ..Facts::default()
        };
        packets(&mut said, &facts);
        assert_eq!(said, before);
        let mut own = Node::default();
        node(&mut own, &facts);
        assert_eq!(own.node_port_addresses, ["10.0.0.1".parse().unwrap()]);
        own.node_port_addresses = vec!["192.0.2.0/24".parse().unwrap()];
        node(&mut own, &facts);
        assert_eq!(own.node_port_addresses, ["192.0.2.0/24".parse().unwrap()]);
    }
}
