//! kube-proxy's rules as the source: gets those in the kernel, and takes what rules say of the node for what the operator
//! did not say.

use imbl::OrdMap;
use tracing::info;

use crate::{
    kernel::netfilter::{self, Kind, Table},
    settings::{self, Node, Packets, Range, Settings},
    source::{
        OpenError,
        iptables::{self, Facts, Masquerade, Text},
    },
    takeover::{
        binaries,
        collect::{self, Printed},
        ruleset::Form,
    },
};

/// Prints kube-proxy's rules in the kernel, of the network namespace that this thread is in.
///
/// # Errors
///
/// The kernel or a program does not print them, or a program is missing.
pub fn live() -> Result<Vec<Text>, String> {
    let tables = netfilter::tables().map_err(|error| error.to_string())?;
    let is_wanted = |table: &Table| match table.kind {
        Kind::Legacy | Kind::Compat => matches!(&*table.name, "nat" | "filter"),
        Kind::Native => table.name == "kube-proxy",
    };
    let tables: Vec<Table> = tables.into_iter().filter(is_wanted).collect();
    let found = binaries::find(None).map_err(|error| error.to_string())?;
    let collected = collect::collect(None, &found, &tables, true);
    let collected = collected.map_err(|error| error.to_string())?;
    if !collected.missing.is_empty() {
        return Err(collected.missing.join("\n"));
    }
    Ok(texts(collected.texts))
}

/// The texts that programs printed. What a program printed table by table becomes one text, because kube-proxy's rules of a
/// family are in two tables.
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

/// The settings, with what kube-proxy's rules say of the node where the operator said nothing, if the rules are the source.
///
/// # Errors
///
/// The rules cannot be read.
pub fn with_rules(settings: &Settings) -> Result<Settings, OpenError> {
    let mut settings = settings.clone();
    if let Some(facts) = facts(&settings.source)? {
        node(&mut settings.node, &facts);
        packets(&mut settings.packets, &facts);
    }
    Ok(settings)
}

/// Does the same for a command that needs the node only.
///
/// # Errors
///
/// The rules cannot be read.
pub fn node_of_rules(source: &settings::Source, of: &Node) -> Result<Node, OpenError> {
    let mut of = of.clone();
    if let Some(facts) = facts(source)? {
        node(&mut of, &facts);
    }
    Ok(of)
}

/// The rules that are to be read, if they are the source.
pub fn source(settings: &settings::Source) -> Option<iptables::Settings> {
    let rules = settings.iptables.as_ref()?;
    Some(iptables::Settings {
        file: rules.file.clone(),
        live,
        strict: rules.strict,
    })
}

fn facts(from: &settings::Source) -> Result<Option<Facts>, OpenError> {
    let Some(rules) = source(from) else {
        return Ok(None);
    };
    let imported = iptables::read(&rules, &OrdMap::new())?;
    Ok(Some(imported.facts))
}

fn node(node: &mut Node, facts: &Facts) {
    if !node.node_port_addresses.is_empty() {
        return;
    }
    // No range means the primary addresses. The agent answers node ports at loopback in any case.
    let loopback = ["127.0.0.0/8", "::1/128"].map(|net| net.parse().expect("written here"));
    let said = match &facts.node_ports[..] {
        [] => &loopback[..],
        said => said,
    };
    node.node_port_addresses = said.iter().copied().map(Range).collect();
}

/// Takes over which clients are masqueraded on the way to a cluster IP.
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
    let known = facts.masquerade.iter().flatten();
    for masquerade in known.clone() {
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
    let mut all = known.clone();
    if all.all(|masquerade| *masquerade == Masquerade::Nobody) {
        return;
    }
    let mut all = known.clone();
    if all.all(|masquerade| *masquerade == Masquerade::All) {
        packets.masquerade_all = true;
        return;
    }
    // Clients outside of these networks are masqueraded, so one family may be masqueraded and the other not.
    let mut networks = Facts::default();
    for (v4, masquerade) in [true, false].into_iter().zip(&facts.masquerade) {
        match masquerade {
            Some(Masquerade::OutsideOf(net)) => networks.answers(*net),
            Some(Masquerade::Nobody) => networks.all_answer(v4),
            _ => {}
        }
    }
    packets.pod_cidrs = networks.node_ports.into_iter().map(Range).collect();
}

#[cfg(test)]
mod tests {
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

    /// A program that prints nothing of all tables at once is asked for each table.
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

    #[test]
    fn what_the_operator_says_counts() {
        let mut said = Packets {
            pod_cidrs: vec!["10.0.0.0/8".parse().unwrap()],
            ..Packets::default()
        };
        let before = said.clone();
        let facts = Facts {
            masquerade: [Some(Masquerade::All), None],
            node_ports: vec!["10.0.0.1/32".parse().unwrap()],
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
