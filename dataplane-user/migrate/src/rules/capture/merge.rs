//! Merges the tables of both families.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{
    chains::OWN_PORTS,
    family::{Family, Wrong},
    mangle::Mangle,
    said::{Capture, Dns},
};

/// A fault: the place, the description, and the rule.
type Placed = (String, String, String);

/// The tables that were read, each with the origin of its text.
#[derive(Debug, Default)]
pub struct Tables<'a> {
    pub families: Vec<(&'a str, Family)>,
    pub mangles: Vec<(&'a str, Mangle)>,
    /// For each other table of iptables, the first rule that may keep connections from the mesh's rules.
    pub others: Vec<(&'a str, Wrong)>,
}

/// Merges both families into one capture.
pub fn merge<'a>(
    families: Vec<(&'a str, Family)>,
    mangles: Vec<(&'a str, Mangle)>,
) -> Result<Capture, Placed> {
    let origin = families
        .first()
        .map_or("", |(origin, _)| *origin)
        .to_owned();
    let whole = |what: &str| (origin.clone(), what.to_owned(), String::new());
    let [mut v4, mut v6]: [Option<(&str, Family)>; 2] = [None, None];
    for (origin, family) in families {
        let is_v4 = family
            .v4
            .ok_or_else(|| whole("no rule about loopback says of which family the rules are"))?;
        let place = if is_v4 { &mut v4 } else { &mut v6 };
        if place.replace((origin, family)).is_some() {
            return Err(whole("the rules of a family are there twice"));
        }
    }
    let drops_invalid = mangles.iter().any(|(_, mangle)| mangle.drops_invalid);
    for (_, mangle) in mangles {
        if !mangle.inbound.is_captured() {
            continue;
        }
        let family = if mangle.v4 == Some(true) {
            &mut v4
        } else {
            &mut v6
        };
        let Some((_, family)) = family else {
            return Err(whole(
                "a family has rules in table mangle and none in table nat",
            ));
        };
        if family.inbound.is_captured() {
            return Err(whole(
                "inbound connections are captured by REDIRECT and by TPROXY",
            ));
        }
        family.capture.by_tproxy = true;
        let own_ports = std::mem::take(&mut family.inbound.own_ports);
        family.inbound = mangle.inbound;
        family.inbound.own_ports.extend(own_ports);
    }
    let missing = match (&v4, &v6) {
        (None, None) => {
            return Err((
                "no rules".to_owned(),
                "no rule of Istio or of Open Service Mesh that captures connections is there"
                    .to_owned(),
                String::new(),
            ));
        }
        (None, _) => Some("IPv4"),
        (_, None) => Some("IPv6"),
        _ => None,
    };
    let alls: [IpNet; 2] = [Ipv4Net::default().into(), Ipv6Net::default().into()];
    let lists = [&v4, &v6]
        .into_iter()
        .flatten()
        .any(|(_, family)| !family.outbound.included.is_empty());
    let mut merged: Option<(Capture, BTreeSet<u16>)> = None;
    let (mut include, mut exclude, mut dns) = (BTreeSet::new(), BTreeSet::new(), None);
    let (mut resolvers, mut probes) = (BTreeSet::new(), BTreeSet::new());
    let mut at_interfaces = BTreeMap::new();
    let mut virtuals: Option<BTreeSet<String>> = None;
    for (family, all) in [v4, v6].into_iter().zip(alls) {
        let Some((origin, mut family)) = family else {
            if !lists {
                exclude.insert(all);
            }
            continue;
        };
        let outbound = family.outbound;
        let wrong = |(line, text): &(usize, String), what: &str| {
            (format!("{origin}:{line}"), what.to_owned(), text.clone())
        };
        let any = outbound.all || !outbound.included.is_empty() || !outbound.ports.is_empty();
        if any || !family.dns.is_empty() {
            for (name, (line, text)) in &outbound.at_interfaces {
                let at = (format!("{origin}:{line}"), text.clone());
                at_interfaces.insert((name.clone(), matches!(all, IpNet::V4(_))), at);
            }
        }
        let own: BTreeSet<IpNet> = if outbound.all {
            [all].into()
        } else {
            outbound.included.keys().copied().collect()
        };
        for (ranges, at) in outbound.virtuals.values() {
            let ranges: BTreeSet<IpNet> = ranges.iter().map(|net| net.unwrap_or(all)).collect();
            if ranges != own {
                let what = "at this interface, connections to other ranges are captured than those of the pod's own connections";
                return Err(wrong(at, what));
            }
        }
        if !own.is_empty() {
            let names: BTreeSet<String> = outbound.virtuals.keys().cloned().collect();
            if *virtuals.get_or_insert_with(|| names.clone()) != names {
                return Err(whole("IPv4 and IPv6 differ in virtual interfaces"));
            }
        }
        let mut included = Vec::new();
        for (net, at) in &outbound.included {
            let mut before = outbound.excluded.iter();
            if !before.any(|excluded| excluded.contains(net)) {
                included.push(*net);
            } else if !outbound.virtuals.is_empty() {
                // An earlier rule excludes the range, but not for virtual interfaces: excluded ranges do not apply
                // there.
                let mut halves = net
                    .subnets(net.prefix_len() + 1)
                    .into_iter()
                    .flatten()
                    .peekable();
                if halves.peek().is_none() {
                    return Err(wrong(at, "a rule before leaves the address alone"));
                }
                included.push(*net);
                exclude.extend(halves);
            }
        }
        for (port, at) in &outbound.ports {
            if !outbound.excluded.is_empty() {
                let what = "in ranges that a rule before leaves alone, the port is not captured; mesh.rules.includeOutboundPorts \
                            captures it at every address";
                return Err(wrong(at, what));
            }
            if outbound.excluded_ports.contains(port) || OWN_PORTS.contains(port) {
                return Err(wrong(
                    at,
                    "a rule before leaves the port alone, or it is the mesh's",
                ));
            }
        }
        match (outbound.all, lists) {
            (true, true) => {
                include.insert(all);
            }
            (true, false) => {}
            (false, _) if outbound.included.is_empty() && !lists => {
                exclude.insert(all);
            }
            (false, _) => include.extend(included),
        }
        let in_halves =
            |net: &&IpNet| !outbound.virtuals.is_empty() && outbound.included.contains_key(net);
        exclude.extend(outbound.excluded.iter().filter(|net| !in_halves(net)));
        let of_family = of_queries(&family.dns).map_err(|what| whole(&what))?;
        match (dns, of_family) {
            (Some(known), Some(other)) if known != other => {
                return Err(whole("IPv4 and IPv6 differ in the capture of DNS queries"));
            }
            (known, other) => dns = known.or(other),
        }
        family.capture.include_ports = outbound.ports.keys().copied().collect();
        family.capture.exclude_ports = outbound.excluded_ports;
        let own = std::mem::take(&mut family.inbound.own_ports);
        resolvers.extend(family.resolvers);
        if family.inbound.is_captured() {
            let inbound = family.inbound;
            family.capture.takes_inbound = true;
            family.capture.inbound = inbound.to;
            if !inbound.all {
                family.capture.include_inbound = inbound.included;
            }
            family.capture.exclude_inbound = inbound.excluded;
            family.capture.exclude_interfaces = inbound.interfaces;
        }
        probes.append(&mut family.capture.probes);
        match &mut merged {
            None => merged = Some((family.capture, own)),
            Some((known, known_own)) => {
                if *known != family.capture {
                    return Err(whole(
                        "IPv4 and IPv6 differ in users, groups, interfaces or ports",
                    ));
                }
                known_own.extend(own);
            }
        }
    }
    if lists && include.is_empty() {
        // Earlier rules exclude every included range, so no range is captured.
        exclude.extend(alls);
    }
    let (capture, own_ports) = merged.unwrap_or_default();
    Ok(Capture {
        include_ranges: include,
        exclude_ranges: exclude,
        dns,
        resolvers,
        own_ports,
        probes,
        at_interfaces,
        virtual_interfaces: virtuals.unwrap_or_default(),
        drops_invalid,
        missing,
        ..capture
    })
}

/// Determines the capture of DNS queries from the rules that redirect them.
fn of_queries(rules: &[(String, bool, u16)]) -> Result<Option<Dns>, String> {
    let Some((_, any, port)) = rules.first() else {
        return Ok(None);
    };
    let same = rules.iter().all(|(_, all, to)| (all, to) == (any, port));
    let both = ["tcp", "udp"]
        .iter()
        .all(|word| rules.iter().any(|(of, ..)| of == word));
    if same && both {
        return Ok(Some(Dns {
            port: *port,
            any: *any,
        }));
    }
    Err("DNS queries are captured by one protocol only, or in two ways".to_owned())
}
