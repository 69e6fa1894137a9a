//! Reads kube-proxy's rules from a file or from the kernel, and the services in them.

use std::{fs, path::Path};

use anyhow::Context as _;
use kernel::netfilter::{self, Kind, Table};
use model::{Gravity, Problem, Snapshot};
use settings::{Node, Packets, Range};
use source::View;

use crate::{
    kube_proxy::{self, Facts, Imported, Leftover, Masquerade, Text},
    rules::{
        binaries,
        collect::{self, Printed},
        ruleset::Form,
        saved,
    },
};

/// Maximum number of readings of the kernel's rules. Two consecutive readings must be equal.
const READS: usize = 5;

/// Reads the services from kube-proxy's rules: from a file, or from the kernel in the network namespace of this thread.
pub fn read(file: Option<&Path>) -> anyhow::Result<Imported> {
    let texts = match file {
        Some(path) => {
            let origin = path.display().to_string();
            let text = fs::read_to_string(path).with_context(|| origin.clone())?;
            vec![Text { origin, text }]
        }
        None => steady(in_the_kernel).context("cannot read kube-proxy's rules in the kernel")?,
    };
    Ok(kube_proxy::import(&texts)?)
}

/// Returns the snapshot that an agent on this node would serve for kube-proxy's rules.
pub fn snapshot(file: Option<&Path>) -> anyhow::Result<Snapshot> {
    let imported = read(file)?;
    let mut own = Node::default();
    node(&mut own, &imported.facts);
    let view = View {
        services: imported.services,
        problems: problems(&imported.leftovers, imported.more).into(),
        ..View::default()
    };
    Ok(agent::snapshot_of(view, &own)?)
}

/// Converts lines that the import did not understand to problems.
pub fn problems(leftovers: &[Leftover], more: usize) -> Vec<Problem> {
    let problem = |place: String, text: String| Problem {
        gravity: Gravity::Warning,
        place,
        text,
    };
    let listed = leftovers
        .iter()
        .map(|leftover| problem(leftover.place(), leftover.what()));
    let more = (more > 0).then(|| {
        let place = "kube-proxy's rules".to_owned();
        problem(
            place,
            format!("and {more} more lines that are not understood"),
        )
    });
    listed.chain(more).collect()
}

/// Reads the kernel's rules until two consecutive readings are equal. `iptables-save` reads one table after another,
/// and kube-proxy may write between two tables: a service that loses its last endpoint is then in neither table. A
/// table of nf_tables is read at once.
fn steady(read: impl Fn() -> anyhow::Result<Vec<Text>>) -> anyhow::Result<Vec<Text>> {
    let of_saved = |texts: &[Text]| -> Vec<String> {
        let texts = (texts.iter()).filter(|text| Form::of(&text.text) == Form::Saved);
        texts.map(|text| saved::rules(&text.text)).collect()
    };
    let mut texts = read()?;
    let mut last = of_saved(&texts);
    for _ in 1..READS {
        if last.is_empty() {
            return Ok(texts);
        }
        texts = read()?;
        let next = of_saved(&texts);
        if next == last {
            return Ok(texts);
        }
        last = next;
    }
    anyhow::bail!("kube-proxy changed them during each of {READS} readings")
}

/// Prints kube-proxy's rules in the kernel, in the network namespace of this thread.
fn in_the_kernel() -> anyhow::Result<Vec<Text>> {
    let tables = netfilter::tables()?.into_iter();
    let tables: Vec<Table> = tables.filter(is_kube_proxys).collect();
    let found = binaries::find(None)?;
    let collected = collect::collect(None, &found, &tables, collect::Native::Print)?;
    if !collected.missing.is_empty() {
        anyhow::bail!(collected.missing.join("\n"));
    }
    Ok(texts(collected.texts))
}

/// Returns true if a table has rules of kube-proxy for services. kube-proxy creates chain `KUBE-SERVICES` in each table
/// of iptables that has such rules.
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

/// Returns the texts that programs printed, each with the command as its origin.
fn texts(printed: Vec<Printed>) -> Vec<Text> {
    let texts = collect::joined(printed).into_iter().map(|printed| {
        let of = match printed.form {
            Form::Saved => "-save",
            Form::Nft => " list table",
        };
        let origin = format!("{}{of}", printed.origin);
        let text = printed.text;
        Text { origin, text }
    });
    texts.collect()
}

/// Sets the addresses that answer node ports from the imported facts.
pub fn node(node: &mut Node, facts: &Facts) {
    // No range means the primary addresses. The agent always answers node ports at loopback.
    let loopback = ["127.0.0.0/8", "::1/128"].map(|net| Range(net.parse().expect("written here")));
    let said: Vec<Range> = facts.node_ports.iter().copied().map(Range).collect();
    node.node_port_addresses = if said.is_empty() {
        loopback.to_vec()
    } else {
        said
    };
}

/// Sets the clients that are masqueraded on the way to a cluster IP from the imported facts.
pub fn packets(packets: &mut Packets, facts: &Facts) {
    let known: Vec<&Masquerade> = facts.masquerade.iter().flatten().collect();
    for masquerade in &known {
        let prefix = match masquerade {
            Masquerade::NotFromPrefix(prefix) => Some(prefix),
            Masquerade::NotFromInterface(_) => None,
            _ => continue,
        };
        packets.pods_by_interface = true;
        let pattern = prefix.and_then(|prefix| format!("{prefix}*").parse().ok());
        packets.pod_interfaces.extend(pattern);
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
    // Clients outside these networks are masqueraded. So clients of one family may be masqueraded and clients of the
    // other not.
    let networks = [true, false].into_iter().zip(&facts.masquerade);
    let networks = networks.filter_map(|(v4, masquerade)| match masquerade {
        Some(Masquerade::OutsideOf(net)) => Some(*net),
        Some(Masquerade::Nobody) => Some(kube_proxy::all_of(v4)),
        _ => None,
    });
    packets.pod_cidrs = networks.map(Range).collect();
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use kernel::netfilter::Listed;

    use super::*;

    const SAVED: &str = include_str!("../../../../tests/data/kube-proxy-1.36/iptables-save.txt");

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

    /// If a program prints nothing for all tables at once, each table is printed separately.
    #[test]
    fn what_is_printed_table_by_table_is_one_text() {
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
        let services = |texts: &[Text]| kube_proxy::import(texts).unwrap().services;
        let whole = Text {
            origin: "rules".into(),
            text: SAVED.into(),
        };
        assert_eq!(services(&all[..1]), services(&[whole]));
    }

    /// The program for tables of other owners may be missing.
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

    /// A service loses its last endpoint while kube-proxy writes, and is in neither table.
    #[test]
    fn rules_that_change_while_they_are_read_are_read_again() {
        let line = SAVED
            .lines()
            .find(|line| line.contains("bench/noeps:p has no endpoints"));
        let torn = SAVED.replacen(line.unwrap(), "", 1);
        let later = SAVED
            .replace("20:29:32", "21:00:00")
            .replace("ACCEPT [0:0]", "ACCEPT [12:345]");
        let get = |given: &[&str]| {
            let given = RefCell::new(given.iter());
            let read = || {
                let text = given.borrow_mut().next().context("no more is read")?;
                let (origin, text) = ("rules".into(), (*text).into());
                Ok(vec![Text { origin, text }])
            };
            let found = steady(read).map(|texts| texts[0].text.clone());
            let left = given.borrow().len();
            (found.map_err(|error| error.to_string()), left)
        };
        assert_eq!(get(&[&torn, SAVED, SAVED]), (Ok(SAVED.into()), 0));
        assert_eq!(get(&[SAVED, &later]), (Ok(later.clone()), 0));
        let (never, left) = get(&[SAVED, &torn, SAVED, &torn, SAVED, &torn]);
        assert!(never.unwrap_err().contains("during each of 5"));
        assert_eq!(left, 1);
        // A table of nf_tables is read at once.
        let listed = "table ip kube-proxy {\n}\n";
        assert_eq!(get(&[listed]), (Ok(listed.into()), 0));
    }
}
