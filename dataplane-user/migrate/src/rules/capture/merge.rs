//! Merges the tables of both families.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{
    chains::OWN_PORTS,
    family::{Family, Outbound, Wrong},
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

/// The rules of IPv4 and of IPv6, each with the origin of its text.
type ByFamily<'a> = [Option<(&'a str, Family)>; 2];

/// Merges both families into one capture.
pub fn merge<'a>(
    families: Vec<(&'a str, Family)>,
    mangles: Vec<(&'a str, Mangle)>,
) -> Result<Capture, Placed> {
    let origin = families
        .first()
        .map_or("", |(origin, _)| *origin)
        .to_owned();
    let drops_invalid = mangles.iter().any(|(_, mangle)| mangle.drops_invalid);
    let families = by_family(families, mangles)
        .map_err(|what| (origin.clone(), what.to_owned(), String::new()))?;
    let missing = match &families {
        [None, None] => {
            return Err((
                "no rules".to_owned(),
                "no rule of Istio or of Open Service Mesh that captures connections is there"
                    .to_owned(),
                String::new(),
            ));
        }
        [None, _] => Some("IPv4"),
        [_, None] => Some("IPv6"),
        _ => None,
    };
    let alls: [IpNet; 2] = [Ipv4Net::default().into(), Ipv6Net::default().into()];
    let lists = families
        .iter()
        .flatten()
        .any(|(_, family)| !family.outbound.included.is_empty());
    let mut merged = Merged {
        origin,
        lists,
        ..Merged::default()
    };
    for (family, all) in families.into_iter().zip(alls) {
        if let Some((origin, family)) = family {
            merged.add(origin, family, all)?;
        } else if !lists {
            merged.exclude.insert(all);
        }
    }
    if lists && merged.include.is_empty() {
        // Earlier rules exclude every included range, so no range is captured.
        merged.exclude.extend(alls);
    }
    Ok(Capture {
        include_ranges: merged.include,
        exclude_ranges: merged.exclude,
        dns: merged.dns,
        resolvers: merged.resolvers,
        own_ports: merged.own_ports,
        probes: merged.probes,
        at_interfaces: merged.at_interfaces,
        virtual_interfaces: merged.virtuals.unwrap_or_default(),
        drops_invalid,
        missing,
        ..merged.common.unwrap_or_default()
    })
}

/// Sorts the rules by family, and replaces the inbound rules of table `nat` by those of table `mangle`.
fn by_family<'a>(
    families: Vec<(&'a str, Family)>,
    mangles: Vec<(&'a str, Mangle)>,
) -> Result<ByFamily<'a>, &'static str> {
    let [mut v4, mut v6]: ByFamily<'a> = [None, None];
    for (origin, family) in families {
        let is_v4 = family
            .v4
            .ok_or("no rule about loopback says of which family the rules are")?;
        let place = if is_v4 { &mut v4 } else { &mut v6 };
        if place.replace((origin, family)).is_some() {
            return Err("the rules of a family are there twice");
        }
    }
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
            return Err("a family has rules in table mangle and none in table nat");
        };
        if family.inbound.is_captured() {
            return Err("inbound connections are captured by REDIRECT and by TPROXY");
        }
        family.capture.by_tproxy = true;
        let own_ports = std::mem::take(&mut family.inbound.own_ports);
        family.inbound = mangle.inbound;
        family.inbound.own_ports.extend(own_ports);
    }
    Ok([v4, v6])
}

/// The families that are merged so far.
#[derive(Default)]
struct Merged {
    /// The origin of the first text, for faults that are not at one line.
    origin: String,
    /// Whether a family captures listed ranges. Then all captured ranges are listed.
    lists: bool,
    /// The part that must be equal in both families.
    common: Option<Capture>,
    include: BTreeSet<IpNet>,
    exclude: BTreeSet<IpNet>,
    dns: Option<Dns>,
    resolvers: BTreeSet<IpAddr>,
    own_ports: BTreeSet<u16>,
    probes: BTreeSet<IpAddr>,
    at_interfaces: BTreeMap<(String, bool), (String, String)>,
    virtuals: Option<BTreeSet<String>>,
}

impl Merged {
    /// Adds a family, whose rules come from `origin`. `all` is the range of all its addresses.
    fn add(&mut self, origin: &str, mut family: Family, all: IpNet) -> Result<(), Placed> {
        let outbound = family.outbound;
        let any = outbound.all || !outbound.included.is_empty() || !outbound.ports.is_empty();
        if any || !family.dns.is_empty() {
            for (name, (line, text)) in &outbound.at_interfaces {
                let at = (format!("{origin}:{line}"), text.clone());
                let key = (name.clone(), matches!(all, IpNet::V4(_)));
                self.at_interfaces.insert(key, at);
            }
        }
        self.add_virtuals(origin, &outbound, all)?;
        self.add_ranges(origin, &outbound, all)?;
        check_ports(origin, &outbound)?;
        let of_family = of_queries(&family.dns).map_err(|what| self.whole(&what))?;
        match (self.dns, of_family) {
            (Some(known), Some(other)) if known != other => {
                return Err(self.whole("IPv4 and IPv6 differ in the capture of DNS queries"));
            }
            (known, other) => self.dns = known.or(other),
        }
        family.capture.include_ports = outbound.ports.keys().copied().collect();
        family.capture.exclude_ports = outbound.excluded_ports;
        self.own_ports.append(&mut family.inbound.own_ports);
        self.resolvers.extend(family.resolvers);
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
        self.probes.append(&mut family.capture.probes);
        match &self.common {
            None => self.common = Some(family.capture),
            Some(known) if *known != family.capture => {
                return Err(
                    self.whole("IPv4 and IPv6 differ in users, groups, interfaces or ports")
                );
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Checks that a family's virtual interfaces have the ranges of the pod's own connections, and are those of the
    /// other family.
    fn add_virtuals(
        &mut self,
        origin: &str,
        outbound: &Outbound,
        all: IpNet,
    ) -> Result<(), Placed> {
        let own: BTreeSet<IpNet> = if outbound.all {
            [all].into()
        } else {
            outbound.included.keys().copied().collect()
        };
        for (ranges, at) in outbound.virtuals.values() {
            let ranges: BTreeSet<IpNet> = ranges.iter().map(|net| net.unwrap_or(all)).collect();
            if ranges != own {
                let what = "at this interface, connections to other ranges are captured than those of the pod's own connections";
                return Err(wrong(origin, at, what));
            }
        }
        if !own.is_empty() {
            let names: BTreeSet<String> = outbound.virtuals.keys().cloned().collect();
            if *self.virtuals.get_or_insert_with(|| names.clone()) != names {
                return Err(self.whole("IPv4 and IPv6 differ in virtual interfaces"));
            }
        }
        Ok(())
    }

    /// Adds a family's included and excluded ranges.
    fn add_ranges(&mut self, origin: &str, outbound: &Outbound, all: IpNet) -> Result<(), Placed> {
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
                    let what = "a rule before leaves the address alone";
                    return Err(wrong(origin, at, what));
                }
                included.push(*net);
                self.exclude.extend(halves);
            }
        }
        match (outbound.all, self.lists) {
            (true, true) => {
                self.include.insert(all);
            }
            (true, false) => {}
            (false, _) if outbound.included.is_empty() && !self.lists => {
                self.exclude.insert(all);
            }
            (false, _) => self.include.extend(included),
        }
        let in_halves =
            |net: &&IpNet| !outbound.virtuals.is_empty() && outbound.included.contains_key(net);
        let excluded = outbound.excluded.iter();
        self.exclude.extend(excluded.filter(|net| !in_halves(net)));
        Ok(())
    }

    /// Returns a fault that is not at one line.
    fn whole(&self, what: &str) -> Placed {
        (self.origin.clone(), what.to_owned(), String::new())
    }
}

/// Checks that no earlier rule excludes a part of the connections to the captured ports.
fn check_ports(origin: &str, outbound: &Outbound) -> Result<(), Placed> {
    for (port, at) in &outbound.ports {
        if !outbound.excluded.is_empty() {
            let what = "in ranges that a rule before leaves alone, the port is not captured; mesh.rules.includeOutboundPorts \
                        captures it at every address";
            return Err(wrong(origin, at, what));
        }
        if outbound.excluded_ports.contains(port) || OWN_PORTS.contains(port) {
            let what = "a rule before leaves the port alone, or it is the mesh's";
            return Err(wrong(origin, at, what));
        }
    }
    Ok(())
}

/// Returns a fault at one line.
fn wrong(origin: &str, (line, text): &(usize, String), what: &str) -> Placed {
    (format!("{origin}:{line}"), what.to_owned(), text.clone())
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
