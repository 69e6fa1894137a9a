//! kube-proxy's maps: the addresses and node ports of services, with their chains.

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
};

use super::{
    super::{
        Masquerade,
        draft::{Draft, PortName, add, agree, protocol},
        leftover::{At, Leftovers},
    },
    chains,
    elements::{self, Element, Key},
    port::{Chains, Hairpins},
    tables::Table,
};
use crate::model::TrafficPolicy;

/// Reads the maps.
pub fn read(table: &Table<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    let cluster_ips: HashSet<IpAddr> = elements::addresses(table, "cluster-ips", leftovers)
        .into_iter()
        .collect();
    if !cluster_ips.is_empty() {
        // Without a rule, which was read before.
        draft.facts.masquerades(table.v4, Masquerade::Nobody);
    }
    for element in elements::by_address(table, "firewall-ips", leftovers) {
        firewall(table, &element, draft, leftovers);
    }
    let mut ports: BTreeMap<&str, Chains<'_>> = BTreeMap::new();
    for element in elements::by_address(table, "service-ips", leftovers) {
        vip(&element, &mut ports, draft, leftovers);
    }
    for element in elements::by_port(table, "service-nodeports", leftovers) {
        node_port(&element, &mut ports, draft, leftovers);
    }
    for element in elements::by_address(table, "no-endpoint-services", leftovers) {
        let (ip, word, number) = element.key;
        let is_internal = cluster_ips.contains(&ip);
        let text = format!("no-endpoint-services: {ip} . {word} . {number}");
        let Some((name, policy)) = refused(word, element.comment, element.verdict) else {
            leftovers.add(element.at, &text, "it names no service that is served");
            continue;
        };
        let (service, port) = draft.port(&name);
        let known = if is_internal {
            add(&mut service.cluster_ips, ip);
            &mut service.internal_policy
        } else {
            if !service.load_balancer_ips.contains(&ip) {
                add(&mut service.external_ips, ip);
            }
            &mut service.external_policy
        };
        let agrees = policy.is_none_or(|policy| agree(known, policy))
            && agree(&mut service.at(port).port, number);
        if !agrees {
            let why = "it contradicts another element";
            draft.leave_out(&name.service(), element.at, &text, why, leftovers);
        }
    }
    for element in elements::by_port(table, "no-endpoint-nodeports", leftovers) {
        let (word, number) = element.key;
        let text = format!("no-endpoint-nodeports: {word} . {number}");
        let Some((name, policy)) = refused(word, element.comment, element.verdict) else {
            leftovers.add(element.at, &text, "it names no service that is served");
            continue;
        };
        let (service, port) = draft.port(&name);
        let agrees = policy.is_none_or(|policy| agree(&mut service.external_policy, policy))
            && agree(&mut service.at(port).node_port, number);
        if !agrees {
            let why = "it contradicts another element";
            draft.leave_out(&name.service(), element.at, &text, why, leftovers);
        }
    }
    let hairpins: Hairpins = elements::hairpins(table, leftovers)
        .into_iter()
        .filter_map(|(ip, word, port)| Some((ip, protocol(&word)?, port)))
        .collect();
    for of_port in ports.values() {
        let name = of_port.name.split_once('-').map_or("", |(_, name)| name);
        if let Some(name) = PortName::of_chain(name) {
            chains::read(table, &name, of_port, &hairpins, draft, leftovers);
        }
    }
}

/// The port that an element for a service without endpoints names, and the policy that it tells, if it tells one.
fn refused<'t>(
    word: &str,
    comment: &'t str,
    verdict: (&str, &str),
) -> Option<(PortName<'t>, Option<TrafficPolicy>)> {
    let policy = match verdict {
        ("goto", "reject-chain") => None,
        ("drop", _) => Some(TrafficPolicy::Local),
        _ => return None,
    };
    Some((PortName::of_comment(comment, protocol(word)?)?, policy))
}

/// The prefix of a port's chain, what the names of all chains of the port have in common, and the port's name, which starts
/// after a hash.
fn of_chain(chain: &str) -> Option<(&str, &str, PortName<'_>)> {
    let (prefix, common) = chain.split_once('-')?;
    let (_, name) = common.split_once('-')?;
    Some((prefix, common, PortName::of_chain(name)?))
}

fn of_port<'p, 't>(
    ports: &'p mut BTreeMap<&'t str, Chains<'t>>,
    name: &'t str,
    at: At,
) -> &'p mut Chains<'t> {
    ports.entry(name).or_insert(Chains {
        name,
        internal: None,
        external: false,
        at,
    })
}

/// An element for an address of a service.
fn vip<'t>(
    element: &Element<'t, Key<'t>>,
    ports: &mut BTreeMap<&'t str, Chains<'t>>,
    draft: &mut Draft,
    leftovers: &mut Leftovers,
) {
    let (ip, word, number) = element.key;
    let (at, (_, chain)) = (element.at, element.verdict);
    let text = format!("service-ips: {ip} . {word} . {number} : {chain}");
    let Some((prefix, common, name)) = of_chain(chain) else {
        return leftovers.add(at, &text, "it leads to no service that is served");
    };
    if name.protocol.word() != word {
        return leftovers.add(at, &text, "its protocol is not that of its chain");
    }
    let (service, port) = draft.port(&name);
    let mut agrees = agree(&mut service.at(port).port, number);
    let of_port = of_port(ports, common, at);
    match prefix {
        "service" | "local" => {
            let policy = if prefix == "service" {
                TrafficPolicy::Cluster
            } else {
                TrafficPolicy::Local
            };
            add(&mut service.cluster_ips, ip);
            agrees &= agree(&mut service.internal_policy, policy);
            agrees &= agree(&mut of_port.internal, policy);
        }
        "external" => {
            of_port.external = true;
            // Only for a load balancer's address with source ranges do the rules tell its kind.
            if !service.load_balancer_ips.contains(&ip) {
                add(&mut service.external_ips, ip);
            }
        }
        _ => return leftovers.add(at, &text, "it leads to no service"),
    }
    if !agrees {
        let why = "it contradicts another element";
        draft.leave_out(&name.service(), at, &text, why, leftovers);
    }
}

/// An element for a load balancer's address that only some clients may use.
fn firewall(
    table: &Table<'_>,
    element: &Element<'_, Key<'_>>,
    draft: &mut Draft,
    leftovers: &mut Leftovers,
) {
    let (ip, word, number) = element.key;
    let (at, (_, chain)) = (element.at, element.verdict);
    let text = format!("firewall-ips: {ip} . {word} . {number} : {chain}");
    let Some(("firewall", _, name)) = of_chain(chain) else {
        return leftovers.add(
            at,
            &text,
            "it leads to no rules about clients of a service that is served",
        );
    };
    let (service, port) = draft.port(&name);
    let ranges = match chains::ranges(table, chain) {
        Ok(ranges) => ranges,
        Err(rule) => {
            let why = "its rules about clients are not kube-proxy's";
            let (at, text) = rule.unwrap_or((at, text));
            return draft.leave_out(&name.service(), at, &text, why, leftovers);
        }
    };
    add(&mut service.load_balancer_ips, ip);
    if name.protocol.word() != word
        || !agree(&mut service.at(port).port, number)
        || !agree(&mut service.source_ranges[usize::from(!table.v4)], ranges)
    {
        let why = "it contradicts another element";
        draft.leave_out(&name.service(), at, &text, why, leftovers);
    }
}

/// An element for a node port.
fn node_port<'t>(
    element: &Element<'t, (&'t str, u16)>,
    ports: &mut BTreeMap<&'t str, Chains<'t>>,
    draft: &mut Draft,
    leftovers: &mut Leftovers,
) {
    let ((word, number), chain) = (element.key, element.verdict.1);
    let text = format!("service-nodeports: {word} . {number} : {chain}");
    let Some(("external", common, name)) = of_chain(chain) else {
        return leftovers.add(element.at, &text, "it leads to no service that is served");
    };
    let (service, port) = draft.port(&name);
    of_port(ports, common, element.at).external = true;
    if name.protocol.word() != word || !agree(&mut service.at(port).node_port, number) {
        let why = "it contradicts another element";
        draft.leave_out(&name.service(), element.at, &text, why, leftovers);
    }
}
