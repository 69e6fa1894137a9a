//! The rules of kube-proxy's table that are the same for all services: how packets come to the maps, who is masqueraded, and
//! which addresses answer node ports.

use super::{
    super::{Masquerade, draft::Draft},
    Broken, elements,
    tables::{Rule, Table},
};
use crate::text::tree::{self, number};

/// Chains whose rules lead packets to other chains, each with such a rule; `IP` stands for `ip` or `ip6`.
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

/// The chain that marks packets to masquerade, in the rules of versions before 1.36.
pub const MARKS: &str = "mark-for-masquerade";

/// A chain's prefix, of those that belong to a service's port or endpoint.
const OF_PORTS: &[&str] = &["service-", "local-", "external-", "firewall-", "endpoint-"];

/// Reads the rules that are the same for all services.
///
/// # Errors
///
/// The set of the addresses that answer node ports has a fault.
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
                // Since 1.37, if its feature gate is on: node ports on loopback.
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

/// Whether packets come to the services' addresses.
pub fn leads_to_services(table: &Table<'_>) -> bool {
    let has = |chain: &str, line: &str| table.rules(chain).any(|rule| is(table, &rule, line));
    let hooked = ["nat-prerouting", "nat-output"].map(|chain| has(chain, "jump services"));
    hooked.contains(&true) && has("services", SERVICE_IPS)
}

/// The rule that asks the map of services' addresses.
const SERVICE_IPS: &str = "IP daddr . meta l4proto . th dport vmap @service-ips";

/// Whether a rule is that line.
fn is(table: &Table<'_>, rule: &Rule<'_>, line: &str) -> bool {
    let wanted = line.split(' ').map(|word| match word {
        "IP" => table.ip(),
        word => word,
    });
    wanted.eq(rule.words.iter().copied())
}

/// The bit that a rule adds to the mark: `meta mark set meta mark | 0x4000`.
pub fn added_mark(words: &[&str]) -> Option<u32> {
    match words {
        ["meta", "mark", "set", "meta", "mark", "|" | "or", bit] => number(bit),
        _ => None,
    }
}

/// The rules that ask the maps, and the one before them that masquerades.
///
/// # Errors
///
/// The set of the addresses that answer node ports has a fault.
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
    // The check for endpoints has the same condition as the rule for node ports, or none for IPv4.
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

/// Whether words exclude loopback, or nothing.
fn but_loopback(ip: &str, words: &[&str]) -> bool {
    match words {
        [] => true,
        [of, "daddr", "!=", "127.0.0.0/8" | "::1"] => *of == ip,
        _ => false,
    }
}

/// Reads the rule that says which clients are masqueraded on the way to a cluster IP.
fn masquerade(table: &Table<'_>, words: &[&str], draft: &mut Draft) -> bool {
    let Some((found, mark)) = clients(table, words) else {
        return false;
    };
    let Some(bit) = added_mark(mark) else {
        return false;
    };
    draft.facts.masquerades(table.v4, found) && draft.facts.marks(bit)
}

/// The clients that words name, and the words after them, which mark the clients' packets. None: the words name a wrong network.
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

/// Reads the rules that masquerade marked packets, and endpoints that reach themselves.
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
        // Before 1.36, in three rules.
        ["meta", "mark", "&" | "and", bit, "==", zero, "return"]
        // As JSON becomes words.
        | ["meta", "mark", "&" | "and", bit, zero, "return"] => {
            number(zero) == Some(0) && number(bit).is_some_and(|bit| draft.facts.marks(bit))
        }
        ["meta", "mark", "set", "meta", "mark", "^" | "xor", bit] => {
            number(bit).is_some_and(|bit| draft.facts.marks(bit))
        }
        ["masquerade", "fully-random"] => true,
        _ => is(table, rule, own),
    }
}

/// Whether a refusal is that of a port where nobody listens.
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

/// Refusals of unused ports and addresses. The dataplane refuses unused ports of cluster IPs, too.
fn unused(table: &Table<'_>, rule: &Rule<'_>) -> bool {
    match rule.words[..] {
        [ip, "daddr", "@cluster-ips", ref reject @ ..] if reject.first() == Some(&"reject") => {
            ip == table.ip() && is_reject(reject)
        }
        [ip, "daddr", net, "drop"] => ip == table.ip() && tree::net(net).is_some(),
        // Several ranges.
        [ip, "daddr", "{", ref nets @ .., "}", "drop"] => {
            ip == table.ip() && nets.iter().all(|net| tree::net(net).is_some())
        }
        _ => false,
    }
}
