//! Reads kube-proxy's maps: the addresses and node ports of services, with their chains.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
};

use model::{ServiceName, TrafficPolicy};

use super::{
    super::{
        Masquerade,
        draft::{Draft, PortName, agree, protocol},
    },
    Broken, chains,
    elements::{self, Element, Key},
    port::{Chains, Hairpins},
    tables::Table,
};

/// Restricted addresses, with protocol and port, and the service that the rules about the allowed clients name. `None`:
/// these rules were not understood.
type Restricted<'t> = HashMap<Key<'t>, Option<ServiceName>>;

/// Reads the maps.
///
/// # Errors
///
/// If a map has a fault, or an element that names no service.
pub fn read(table: &Table<'_>, draft: &mut Draft) -> Result<(), Broken> {
    let cluster_ips: HashSet<IpAddr> = elements::addresses(table, "cluster-ips")?
        .into_iter()
        .collect();
    let mut restricted = Restricted::new();
    for element in elements::by_address(table, "firewall-ips") {
        let element = element?;
        let name = firewall(table, &element, draft)?;
        restricted.insert(element.key, name);
    }
    let mut ports: BTreeMap<&str, Chains<'_>> = BTreeMap::new();
    for element in elements::by_address(table, "service-ips") {
        let element = element?;
        vip(&element, &restricted, &mut ports, draft)?;
    }
    for element in elements::by_port(table, "service-nodeports") {
        let element = element?;
        node_port(&element, &mut ports, draft)?;
    }
    for element in elements::by_address(table, "no-endpoint-services") {
        let element = element?;
        let (ip, word, number) = element.key;
        let text = format!("no-endpoint-services: {ip} . {word} . {number}");
        if let Some((name, policy)) = refused(&element, word, &text, draft)? {
            let is_cluster_ip = cluster_ips.contains(&ip);
            let agrees = draft.refuse(&name, Some(ip), is_cluster_ip, number, policy);
            contradicts(!agrees, &name, element.at, &text, draft);
        }
    }
    for element in elements::by_port(table, "no-endpoint-nodeports") {
        let element = element?;
        let (word, number) = element.key;
        let text = format!("no-endpoint-nodeports: {word} . {number}");
        if let Some((name, policy)) = refused(&element, word, &text, draft)? {
            let agrees = draft.refuse(&name, None, false, number, policy);
            contradicts(!agrees, &name, element.at, &text, draft);
        }
    }
    let hairpins: Hairpins = elements::hairpins(table)?
        .into_iter()
        .filter_map(|(ip, word, port)| Some((ip, protocol(word)?, port)))
        .collect();
    for of_port in ports.values() {
        let name = of_port.name.split_once('-').map_or("", |(_, name)| name);
        if let Some(name) = PortName::of_chain(name) {
            chains::read(table, &name, of_port, &hairpins, draft);
        }
    }
    if !cluster_ips.is_empty() {
        // Takes effect only if no rule for masquerading was read before.
        draft.facts.masquerades(table.v4, Masquerade::Nobody);
    }
    Ok(())
}

/// Lists the first rule of each chain that no rule and no map jumps to. Skips the chains of left-out services: they may
/// be reachable by a rule that was not understood.
pub fn list_unread(table: &Table<'_>, draft: &mut Draft) {
    let unread = table.rows.names().filter(|(_, is_read)| !is_read);
    let mut chains: Vec<&str> = unread.map(|(name, _)| name).collect();
    chains.sort_unstable();
    for chain in chains {
        // In an endpoint's chain, the endpoint follows the name of the port.
        let of_port = chain.split_once("__").map_or(chain, |(of_port, _)| of_port);
        let name = of_chain(of_port).map(|(.., name)| name.service());
        // Of a protocol that is not served, the map's element is listed.
        let is_sctp = of_port.split('/').nth(2) == Some("sctp");
        if is_sctp || name.is_some_and(|name| draft.is_left_out(&name)) {
            continue;
        }
        if let Some(rule) = table.rules(chain).next() {
            let why = format!("no packet comes to chain {chain}");
            draft.leftovers.add(rule.at, rule.text, why);
        }
    }
}

/// Reads an element for a service without endpoints. Returns the port, and the traffic policy if the element depends on
/// one. Returns `None` if the element was listed as a leftover.
fn refused<'t, K>(
    element: &Element<'t, K>,
    word: &str,
    text: &str,
    draft: &mut Draft,
) -> Result<Option<(PortName<'t>, Option<TrafficPolicy>)>, Broken> {
    let at = element.at;
    let Some(protocol) = protocol(word) else {
        unserved(at, word, text, draft)?;
        return Ok(None);
    };
    let Some(name) = PortName::of_comment(element.comment, protocol) else {
        return Err(nameless(at, text));
    };
    let policy = match element.verdict {
        ("goto", "reject-chain") => None,
        ("drop", _) => Some(TrafficPolicy::Local),
        _ => {
            let why = "it does not refuse connections as kube-proxy does";
            draft.leave_out(&name.service(), at, text, why);
            return Ok(None);
        }
    };
    Ok(Some((name, policy)))
}

/// If an element contradicts another, lists it and leaves out its service.
fn contradicts(does: bool, name: &PortName<'_>, at: usize, text: &str, draft: &mut Draft) {
    if does {
        let why = "it contradicts another element";
        draft.leave_out(&name.service(), at, text, why);
    }
}

/// Lists an element of a protocol that the dataplane does not serve.
fn unserved(at: usize, word: &str, text: &str, draft: &mut Draft) -> Result<(), Broken> {
    if word != "sctp" {
        return Err(nameless(at, text));
    }
    draft.leftovers.add(at, text, format!("protocol {word} is not served: keep kube-proxy on this node, or remove the port from the Service"));
    Ok(())
}

/// Returns the fault of an element that may concern any service.
fn nameless(at: usize, text: &str) -> Broken {
    let what = format!("the element names no service: {text}");
    Broken { at, what }
}

/// Returns the prefix of an element's chain, the common part of the names of the port's chains, and the port. Returns
/// `None` if the element was listed; the service of the chain is then left out.
fn leads_to<'t, K>(
    element: &Element<'t, K>,
    word: &str,
    prefixes: &[&str],
    text: &str,
    draft: &mut Draft,
) -> Result<Option<(&'t str, &'t str, PortName<'t>)>, Broken> {
    let (at, (verdict, chain)) = (element.at, element.verdict);
    let Some((prefix, common, name)) = of_chain(chain) else {
        unserved(at, word, text, draft)?;
        return Ok(None);
    };
    let why = if name.protocol.word() != word {
        "its protocol is not that of its chain"
    } else if verdict != "goto" || !prefixes.contains(&prefix) {
        "kube-proxy leads no packets of this map to such a chain"
    } else {
        return Ok(Some((prefix, common, name)));
    };
    draft.leave_out(&name.service(), at, text, why);
    Ok(None)
}

/// Splits a chain's name into the prefix, the common part of the names of the port's chains, and the port. The port
/// follows a hash.
fn of_chain(chain: &str) -> Option<(&str, &str, PortName<'_>)> {
    let (prefix, common) = chain.split_once('-')?;
    let (_, name) = common.split_once('-')?;
    Some((prefix, common, PortName::of_chain(name)?))
}

fn of_port<'p, 't>(
    ports: &'p mut BTreeMap<&'t str, Chains<'t>>,
    name: &'t str,
    at: usize,
) -> &'p mut Chains<'t> {
    ports.entry(name).or_insert(Chains {
        name,
        internal: None,
        vip: None,
        external: false,
        at,
    })
}

/// Reads an element for an address of a service.
fn vip<'t>(
    element: &Element<'t, Key<'t>>,
    restricted: &Restricted<'_>,
    ports: &mut BTreeMap<&'t str, Chains<'t>>,
    draft: &mut Draft,
) -> Result<(), Broken> {
    let (ip, word, number) = element.key;
    let (at, (verdict, chain)) = (element.at, element.verdict);
    let text = format!("service-ips: {ip} . {word} . {number} : {verdict} {chain}");
    let prefixes = ["service", "local", "external"];
    let Some((prefix, common, name)) = leads_to(element, word, &prefixes, &text, draft)? else {
        return Ok(());
    };
    let service_name = name.service();
    let (service, port) = draft.port(&name);
    let mut agrees = agree(&mut service.at(port).port, number);
    let of_port = of_port(ports, common, at);
    match restricted.get(&element.key) {
        Some(of) if prefix != "external" || of.as_ref() != Some(&service_name) => {
            let why = "no rule that is understood says which clients may use this address";
            draft.leave_out(&service_name, at, &text, why);
            return Ok(());
        }
        _ => {}
    }
    if prefix == "external" {
        of_port.external = true;
        // The rules reveal a load balancer's address only if it has source ranges.
        if !service.is_load_balancers(ip) {
            service.outside().external_ips.insert(ip);
        }
    } else {
        let policy = if prefix == "service" {
            TrafficPolicy::Cluster
        } else {
            TrafficPolicy::Local
        };
        service.at_cluster_ip(port, ip);
        of_port.vip = Some((ip, number));
        agrees &= agree(&mut service.internal_policy, policy);
        agrees &= agree(&mut of_port.internal, policy);
    }
    contradicts(!agrees, &name, at, &text, draft);
    Ok(())
}

/// Reads an element for a load balancer's address with restricted clients. Returns the service, if the rules about the
/// clients are understood.
fn firewall(
    table: &Table<'_>,
    element: &Element<'_, Key<'_>>,
    draft: &mut Draft,
) -> Result<Option<ServiceName>, Broken> {
    let (ip, word, number) = element.key;
    let (at, (verdict, chain)) = (element.at, element.verdict);
    let text = format!("firewall-ips: {ip} . {word} . {number} : {verdict} {chain}");
    let Some((.., name)) = leads_to(element, word, &["firewall"], &text, draft)? else {
        return Ok(None);
    };
    let service_name = name.service();
    let ranges = match chains::ranges(table, chain) {
        Ok(ranges) => ranges,
        Err(rule) => {
            let why = "its rules about clients are not kube-proxy's";
            let (at, text) = rule.unwrap_or((at, text));
            draft.leave_out(&service_name, at, &text, why);
            return Ok(None);
        }
    };
    let (service, port) = draft.port(&name);
    service.outside().load_balancer_ips.insert(ip);
    let known = &mut service.outside().source_ranges[usize::from(!table.v4)];
    let agrees = agree(known, ranges) && agree(&mut service.at(port).port, number);
    contradicts(!agrees, &name, at, &text, draft);
    Ok(agrees.then_some(service_name))
}

/// Reads an element for a node port.
fn node_port<'t>(
    element: &Element<'t, (&'t str, u16)>,
    ports: &mut BTreeMap<&'t str, Chains<'t>>,
    draft: &mut Draft,
) -> Result<(), Broken> {
    let ((word, number), (verdict, chain)) = (element.key, element.verdict);
    let text = format!("service-nodeports: {word} . {number} : {verdict} {chain}");
    let Some((_, common, name)) = leads_to(element, word, &["external"], &text, draft)? else {
        return Ok(());
    };
    let (service, port) = draft.port(&name);
    of_port(ports, common, element.at).external = true;
    let agrees = agree(&mut service.at(port).node_port, number);
    contradicts(!agrees, &name, element.at, &text, draft);
    Ok(())
}
