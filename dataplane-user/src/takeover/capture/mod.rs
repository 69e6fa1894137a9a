//! Which connections the rules of a mesh's sidecar capture: Istio's (by REDIRECT) and Open Service Mesh's. Pure: from what
//! `iptables-save` prints in a pod to ranges, ports, users and groups. A rule that this does not understand is an error.

mod chains;
mod family;
mod options;
mod said;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub use said::{Capture, Dns, Fault};

use self::{
    chains::{MESHES, OWN_PORTS},
    family::{Family, family, raw},
};
use super::ruleset::{Form, Text};
use crate::iptables::{self, Entry, Rule};

/// Reads what the rules of a sidecar capture.
///
/// # Errors
///
/// There are no such rules, or a rule captures connections in another way than a configuration can say.
pub fn read(texts: &[Text<'_>]) -> Result<Capture, Fault> {
    let mut families: Vec<(&str, Family)> = Vec::new();
    for text in texts {
        let fault = |line: usize, what: String, rule: String| Fault {
            place: format!("{}:{line}", text.origin),
            what,
            text: rule,
        };
        if text.form == Form::Nft {
            let mut lines = text.text.lines().zip(1..);
            let of_mesh = |line: &str| {
                line.trim_start().starts_with("table ") && line.contains("istio")
                    || MESHES.iter().any(|mesh| line.contains(mesh.prefix))
            };
            if let Some((line, number)) = lines.find(|(line, _)| of_mesh(line)) {
                let what = "rules of nf_tables are not understood; only those of iptables are";
                return Err(fault(number, what.to_owned(), line.trim().to_owned()));
            }
            continue;
        }
        let mut table = "";
        let mut rows: Vec<Rule<'_>> = Vec::new();
        for entry in iptables::entries(text.text) {
            match entry.map_err(|error| fault(error.line, error.what.to_owned(), String::new()))? {
                Entry::Table(name) => (table, rows) = (name, Vec::new()),
                Entry::Rule(rule) => match rule.before {
                    // `-I` puts it at a place before others.
                    Some(before) => {
                        let of_chain = rows.iter().enumerate();
                        let of_chain = of_chain.filter(|(_, row)| row.chain == rule.chain);
                        let at = of_chain.map(|(at, _)| at).nth(before as usize - 1);
                        rows.insert(at.unwrap_or(rows.len()), rule);
                    }
                    None => rows.push(rule),
                },
                Entry::Chain { .. } => {}
                Entry::Commit => {
                    let mesh = MESHES
                        .iter()
                        .find(|mesh| rows.iter().any(|row| mesh.has(row)));
                    let Some(mesh) = mesh else { continue };
                    let read = match table {
                        "nat" => family(mesh, &rows).map(Some),
                        "raw" => raw(mesh, &rows).map(|()| None),
                        _ => {
                            let row = rows.iter().find(|row| mesh.has(row));
                            let row = row.expect("has one");
                            let what =
                                format!("table {table} of {} has no counterpart", mesh.owner);
                            Err((row.line, what, row.text.to_owned()))
                        }
                    };
                    let read = read.map_err(|(line, what, rule)| fault(line, what, rule))?;
                    families.extend(read.map(|family| (text.origin, family)));
                }
            }
        }
    }
    merge(families).map_err(|(place, what, text)| Fault { place, what, text })
}

/// The place of a fault, what it is, and the rule.
type Placed = (String, String, String);

/// Both families in one.
fn merge(families: Vec<(&str, Family)>) -> Result<Capture, Placed> {
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
    let missing = match (&v4, &v6) {
        (None, None) => {
            return Err((
                "no rules".to_owned(),
                "no rule of Istio's sidecar or of Open Service Mesh is there".to_owned(),
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
    let mut resolvers = BTreeSet::new();
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
        for (net, at) in &outbound.included {
            if outbound
                .excluded
                .iter()
                .any(|excluded| excluded.contains(net))
            {
                return Err(wrong(at, "a rule before leaves the whole range alone"));
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
            (false, _) => include.extend(outbound.included.keys()),
        }
        exclude.extend(&outbound.excluded);
        let of_family = of_queries(&family.dns).map_err(|what| whole(&what))?;
        match (dns, of_family) {
            (Some(known), Some(other)) if known != other => {
                return Err(whole("IPv4 and IPv6 differ in the capture of DNS queries"));
            }
            (known, other) => dns = known.or(other),
        }
        family.capture.include_ports = outbound.ports.keys().copied().collect();
        family.capture.exclude_ports = outbound.excluded_ports;
        let own = std::mem::take(&mut family.capture.own_ports);
        resolvers.extend(family.resolvers);
        if family.all_inbound {
            // All ports are.
            family.capture.include_inbound.clear();
        }
        match &mut merged {
            None => merged = Some((family.capture, own)),
            Some((known, known_own)) => {
                if *known != family.capture {
                    return Err(whole("IPv4 and IPv6 differ in users, groups or ports"));
                }
                known_own.extend(own);
            }
        }
    }
    let (capture, own_ports) = merged.unwrap_or_default();
    Ok(Capture {
        include_ranges: include,
        exclude_ranges: exclude,
        dns,
        resolvers,
        own_ports,
        missing,
        ..capture
    })
}

/// How queries are captured, by the rules that redirect them.
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
