//! Reads the rules of kube-proxy's table that do not depend on services: the jumps to the maps, the masqueraded
//! clients, and the addresses that answer node ports.

use super::{
    super::{Masquerade, draft::Draft},
    Broken, elements,
    tables::{Rule, Table},
};
use crate::text::tree::{self, number};

/// Chains with rules that jump to other chains, each with such a rule. `IP` stands for `ip` or `ip6`.
const LEADING: &[(&str, &str)] = &[
    (
        "filter-prerouting-pre-dnat",
        "ct state new jump firewall-check",
    ),
    ("filter-output-pre-dnat", "ct state new jump firewall-check"),
    ("filter-input", "ct state new jump nodeport-endpoints-check"),
    ("filter-input", "ct state new jump service-endpoints-check"),
    (
        "filter-forward",
        "ct state new jump service-endpoints-check",
    ),
    ("filter-forward", "ct state new jump cluster-ips-check"),
    ("filter-output", "ct state new jump service-endpoints-check"),
    ("filter-output", "ct state new jump cluster-ips-check"),
    ("nat-prerouting", "jump services"),
    ("nat-output", "jump services"),
    ("nat-postrouting", "jump masquerading"),
    (
        "service-endpoints-check",
        "IP daddr . meta l4proto . th dport vmap @no-endpoint-services",
    ),
    (
        "firewall-check",
        "IP daddr . meta l4proto . th dport vmap @firewall-ips",
    ),
];

/// The chain that marks packets for masquerading in versions before 1.36.
pub const MARKS: &str = "mark-for-masquerade";

/// Prefixes of the chains that belong to a service's port or endpoint.
const OF_PORTS: &[&str] = &["service-", "local-", "external-", "firewall-", "endpoint-"];

/// Reads the rules that do not depend on services.
///
/// # Errors
///
/// If the set of the addresses that answer node ports has a fault.
pub fn read(table: &Table<'_>, draft: &mut Draft) -> Result<(), Broken> {
    let mut chains: Vec<&str> = table.rows.names().map(|(name, _)| name).collect();
    chains.sort_unstable();
    for chain in chains {
        let mut leading = LEADING.iter().filter(|(name, _)| *name == chain).peekable();
        let leads = leading.peek().is_some();
        if OF_PORTS.iter().any(|prefix| chain.starts_with(prefix)) && !leads {
            continue;
        }
        for rule in table.rules(chain) {
            let good = match chain {
                _ if leads => leading.clone().any(|(_, line)| is(table, &rule, line)),
                "services" | "nodeport-endpoints-check" => services(table, &rule, draft)?,
                "masquerading" => masquerading(table, &rule, draft),
                "cluster-ips-check" => unused(table, &rule),
                MARKS => added_mark(&rule.words).is_some_and(|bit| draft.facts.marks(bit)),
                "reject-chain" => is_reject(&rule.words),
                // 1.37 and later write these chains for node ports on loopback, if the feature gate is on.
                chain if chain.starts_with("localhost-nodeport-reject-") => {
                    matches!(rule.words[..], ["counter", "name", _, ref reject @ ..] if is_reject(reject))
                }
                _ => false,
            };
            if !good {
                let why = format!("kube-proxy writes no such rule in chain {chain}");
                draft.leftovers.add(rule.at, rule.text, why);
            }
        }
    }
    Ok(())
}

/// Returns true if packets reach the map of the services' addresses.
pub fn leads_to_services(table: &Table<'_>) -> bool {
    let has = |chain: &str, line: &str| table.rules(chain).any(|rule| is(table, &rule, line));
    let hooked = ["nat-prerouting", "nat-output"].map(|chain| has(chain, "jump services"));
    hooked.contains(&true) && has("services", SERVICE_IPS)
}

/// The rule that looks up a packet in the map of the services' addresses.
const SERVICE_IPS: &str = "IP daddr . meta l4proto . th dport vmap @service-ips";

/// Returns true if a rule is equal to a line.
fn is(table: &Table<'_>, rule: &Rule<'_>, line: &str) -> bool {
    let wanted = line.split(' ').map(|word| match word {
        "IP" => table.ip(),
        word => word,
    });
    wanted.eq(rule.words.iter().copied())
}

/// Returns the bit that a rule adds to the mark: `meta mark set meta mark | 0x4000`.
pub fn added_mark(words: &[&str]) -> Option<u32> {
    match words {
        ["meta", "mark", "set", "meta", "mark", "|" | "or", bit] => number(bit),
        _ => None,
    }
}

/// Reads the rules that look up packets in the maps, and the preceding rule for masquerading.
///
/// # Errors
///
/// If the set of the addresses that answer node ports has a fault.
fn services(table: &Table<'_>, rule: &Rule<'_>, draft: &mut Draft) -> Result<bool, Broken> {
    let ip = table.ip();
    let v4 = table.v4;
    if is(table, rule, SERVICE_IPS) {
        return Ok(true);
    }
    let (asks, map) = match rule.words[..] {
        [
            ref asks @ ..,
            "meta",
            "l4proto",
            ".",
            "th",
            "dport",
            "vmap",
            map,
        ] => (asks, map),
        [of, "daddr", "@cluster-ips", ref rest @ ..] if of == ip => {
            return Ok(masquerade(table, rest, draft));
        }
        _ => return Ok(false),
    };
    // The rule that checks for endpoints has the condition of the rule for node ports, or in IPv4 no condition.
    let serves = match map {
        "@service-nodeports" => true,
        "@no-endpoint-nodeports" => false,
        "@localhost-nodeport-reject-ports" => {
            let asked = matches!(asks, [of, "daddr", "127.0.0.0/8" | "::1"] if *of == ip);
            return Ok(asked);
        }
        _ => return Ok(false),
    };
    match asks {
        [of, "daddr", "@nodeport-ips"] if *of == ip => {
            if serves {
                for ip in elements::addresses(table, "nodeport-ips")? {
                    draft.facts.node_ports.insert(ip.into());
                }
            }
        }
        ["fib", "daddr", "type", "local", rest @ ..] if serves && but_loopback(ip, rest) => {
            draft.facts.all_answer(v4);
        }
        rest if !serves
            && (but_loopback(ip, rest) || but_loopback(ip, rest.get(4..).unwrap_or_default())) => {}
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns true if the words exclude loopback, or are empty.
fn but_loopback(ip: &str, words: &[&str]) -> bool {
    match words {
        [] => true,
        [of, "daddr", "!=", "127.0.0.0/8" | "::1"] => *of == ip,
        _ => false,
    }
}

/// Reads the rule for masquerading the clients of cluster IPs.
fn masquerade(table: &Table<'_>, words: &[&str], draft: &mut Draft) -> bool {
    let Some((found, mark)) = clients(table, words) else {
        return false;
    };
    let Some(bit) = added_mark(mark) else {
        return false;
    };
    draft.facts.masquerades(table.v4, found) && draft.facts.marks(bit)
}

/// Returns the clients that the words name, and the remaining words, which mark the clients' packets. Returns `None` if
/// the words contain an invalid network.
pub fn clients<'w, 't>(
    table: &Table<'_>,
    words: &'w [&'t str],
) -> Option<(Masquerade, &'w [&'t str])> {
    let found = match words {
        [of, "saddr", "!=", net, mark @ ..] if *of == table.ip() => {
            (Masquerade::OutsideOf(tree::net(net)?), mark)
        }
        ["iifname", "!=", name, mark @ ..] => {
            let name = name.trim_matches('"');
            let found = match name.strip_suffix('*') {
                Some(prefix) => Masquerade::NotFromPrefix(prefix.to_owned()),
                None => Masquerade::NotFromInterface(name.to_owned()),
            };
            (found, mark)
        }
        mark => (Masquerade::All, mark),
    };
    Some(found)
}

/// Reads the rules that masquerade marked packets and an endpoint's connections to itself.
fn masquerading(table: &Table<'_>, rule: &Rule<'_>, draft: &mut Draft) -> bool {
    let own = "ct status dnat IP saddr . IP daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random";
    match rule.words[..] {
        [
            "meta",
            "mark",
            "&" | "and",
            bit,
            "!=",
            zero,
            "meta",
            "mark",
            "set",
            "meta",
            "mark",
            "^" | "xor",
            same,
            "masquerade",
            "fully-random",
        ] => {
            let bit = number(bit);
            bit == number(same)
                && number(zero) == Some(0)
                && bit.is_some_and(|bit| draft.facts.marks(bit))
        }
        // Before 1.36, there are three rules for this.
        ["meta", "mark", "&" | "and", bit, "==", zero, "return"] => {
            number(zero) == Some(0) && number(bit).is_some_and(|bit| draft.facts.marks(bit))
        }
        ["meta", "mark", "set", "meta", "mark", "^" | "xor", bit] => {
            number(bit).is_some_and(|bit| draft.facts.marks(bit))
        }
        ["masquerade", "fully-random"] => true,
        _ => is(table, rule, own),
    }
}

/// Returns true if the words refuse a packet as a port without a listener does.
fn is_reject(words: &[&str]) -> bool {
    matches!(
        words,
        ["reject"]
            | [
                "reject",
                "with",
                "icmp" | "icmpv6" | "icmpx",
                "port-unreachable"
            ]
            | [
                "reject",
                "with",
                "icmp" | "icmpv6" | "icmpx",
                "type",
                "port-unreachable"
            ]
    )
}

/// Reads the rules that refuse unused ports and addresses. The dataplane also refuses unused ports of cluster IPs.
fn unused(table: &Table<'_>, rule: &Rule<'_>) -> bool {
    match rule.words[..] {
        [ip, "daddr", "@cluster-ips", ref reject @ ..] if reject.first() == Some(&"reject") => {
            ip == table.ip() && is_reject(reject)
        }
        [ip, "daddr", net, "drop"] => ip == table.ip() && tree::net(net).is_some(),
        // A rule for several ranges.
        [ip, "daddr", "{", ref nets @ .., "}", "drop"] => {
            ip == table.ip() && nets.iter().all(|net| tree::net(net).is_some())
        }
        _ => false,
    }
}
