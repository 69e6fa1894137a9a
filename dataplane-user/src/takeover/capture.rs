//! Which connections the rules of a mesh's sidecar capture: Istio's (by REDIRECT) and Open Service Mesh's. Pure: from what
//! `iptables-save` prints in a pod to ranges, ports, users and groups. A rule that this does not understand is an error.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::ruleset::{Form, Text};
use crate::iptables::{self, Entry, Rule, Word};

/// What a sidecar's rules capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    /// Whose rules they are.
    pub owner: &'static str,
    /// The proxy's port for outbound connections.
    pub outbound: u16,
    /// The proxy's port for inbound connections.
    pub inbound: u16,
    /// The only ranges to which outbound connections are captured; none: all.
    pub include_ranges: BTreeSet<IpNet>,
    /// Ranges to which no outbound connection is captured.
    pub exclude_ranges: BTreeSet<IpNet>,
    /// Ports to which outbound connections are captured at every address.
    pub include_ports: BTreeSet<u16>,
    /// Ports to which no outbound connection is captured.
    pub exclude_ports: BTreeSet<u16>,
    /// The only ports to which inbound connections are captured; none: all.
    pub include_inbound: BTreeSet<u16>,
    /// Ports to which no inbound connection is captured.
    pub exclude_inbound: BTreeSet<u16>,
    /// Users whose connections are not captured.
    pub uids: BTreeSet<u32>,
    /// Groups whose connections are not captured.
    pub gids: BTreeSet<u32>,
    /// How DNS queries are captured, if they are.
    pub dns: Option<Dns>,
    /// The resolvers to which queries are captured, if not to any address.
    pub resolvers: BTreeSet<IpAddr>,
    /// Ports of the sidecar itself that the rules leave alone.
    pub own_ports: BTreeSet<u16>,
    /// The family that has no rules, if one has none.
    pub missing: Option<&'static str>,
}

/// How DNS queries are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dns {
    /// The port of the server that answers.
    pub port: u16,
    /// Whether queries to any address are captured, and not only those to the pod's resolvers.
    pub any: bool,
}

/// Why rules do not become a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The text's origin, with the line's number if the fault is that of a line.
    pub place: String,
    /// The fault.
    pub what: String,
    /// The line.
    pub text: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)?;
        match &*self.text {
            "" => Ok(()),
            text => write!(f, ": {text}"),
        }
    }
}

/// The chains of a mesh in table `nat`.
#[derive(Debug)]
struct Chains {
    owner: &'static str,
    prefix: &'static str,
    inbound: &'static str,
    to_inbound: &'static str,
    output: &'static str,
    to_outbound: &'static str,
    dns: &'static str,
}

const MESHES: [Chains; 2] = [
    Chains {
        owner: "Istio",
        prefix: "ISTIO_",
        inbound: "ISTIO_INBOUND",
        to_inbound: "ISTIO_IN_REDIRECT",
        output: "ISTIO_OUTPUT",
        to_outbound: "ISTIO_REDIRECT",
        dns: "ISTIO_OUTPUT_DNS",
    },
    Chains {
        owner: "Open Service Mesh",
        prefix: "PROXY_",
        inbound: "PROXY_INBOUND",
        to_inbound: "PROXY_IN_REDIRECT",
        output: "PROXY_OUTPUT",
        to_outbound: "PROXY_REDIRECT",
        dns: "",
    },
];

/// The ports that sidecars have for themselves. A configuration cannot name most of them.
const OWN_PORTS: &[u16] = &[
    15000, 15001, 15003, 15006, 15008, 15010, 15020, 15021, 15053, 15090, 15901, 15902, 15903,
];

/// A rule of table `nat` by its options.
#[derive(Debug, Default)]
struct Options {
    /// The options that it has, sorted, without its target and its matches: `!uid o`.
    shape: String,
    source: Option<IpNet>,
    destination: Option<IpNet>,
    interface: String,
    protocol: String,
    ports: Vec<u16>,
    ids: Vec<u32>,
    target: String,
    to_port: Option<u16>,
}

fn options(rule: &Rule<'_>) -> Result<Options, String> {
    let mut found = Options::default();
    let mut shape = Vec::new();
    for option in rule.options() {
        let name = option.name.unwrap_or_default();
        let value = option.values.first().map(Word::text).unwrap_or_default();
        let net = || -> Result<Option<IpNet>, String> {
            let net = value.parse::<IpNet>();
            let net = net.or_else(|_| value.parse::<IpAddr>().map(IpNet::from));
            net.map(Some).map_err(|_| format!("{value:?} is no range"))
        };
        let port = |text: &str| text.parse().map_err(|_| format!("{text:?} is no port"));
        let word = match name {
            "-j" | "--jump" if !option.negated => {
                found.target = value.into_owned();
                continue;
            }
            "--to-ports" | "--to-port" if !option.negated => {
                found.to_port = Some(port(&value)?);
                continue;
            }
            "-m" | "--match" => {
                if !matches!(&*value, "tcp" | "udp" | "owner" | "multiport" | "comment") {
                    return Err(format!("match {value:?} is not understood"));
                }
                continue;
            }
            "--comment" => continue,
            "-s" | "--source" => {
                found.source = net()?;
                "s"
            }
            "-d" | "--destination" => {
                found.destination = net()?;
                "d"
            }
            "-i" | "--in-interface" => {
                found.interface = value.into_owned();
                "i"
            }
            "-o" | "--out-interface" => {
                found.interface = value.into_owned();
                "o"
            }
            "-p" | "--protocol" if !option.negated => {
                found.protocol = value.into_owned();
                "p"
            }
            "--dport" | "--dports" | "--destination-port" | "--destination-ports" => {
                let ports: Result<Vec<u16>, String> = value.split(',').map(port).collect();
                found.ports = ports?;
                "port"
            }
            "--uid-owner" | "--gid-owner" => {
                let id = value.parse();
                found
                    .ids
                    .push(id.map_err(|_| format!("{value:?} is no number of a user or group"))?);
                if name == "--uid-owner" { "uid" } else { "gid" }
            }
            _ => return Err(format!("option {name:?} is not understood")),
        };
        shape.push(format!("{}{word}", if option.negated { "!" } else { "" }));
    }
    shape.sort_unstable();
    found.shape = shape.join(" ");
    Ok(found)
}

/// Where outbound connections are captured.
#[derive(Debug, Default)]
struct Outbound {
    all: bool,
    /// With the places of the rules.
    included: BTreeMap<IpNet, (usize, String)>,
    excluded: BTreeSet<IpNet>,
    ports: BTreeMap<u16, (usize, String)>,
    excluded_ports: BTreeSet<u16>,
}

/// The rules of one family.
#[derive(Debug, Default)]
struct Family {
    v4: Option<bool>,
    outbound: Outbound,
    /// Users and groups of which a rule tells their loopback apart.
    at_loopback: (BTreeSet<u32>, BTreeSet<u32>),
    capture: Capture,
    all_inbound: bool,
    /// `OUTPUT` and `PREROUTING` lead to the mesh's chains.
    hooked: [bool; 2],
    dns: Vec<(String, bool, u16)>,
    resolvers: BTreeSet<IpAddr>,
}

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

/// A line's number, what is wrong with it, and its text.
type Wrong = (usize, String, String);

impl Chains {
    /// Whether a rule is in a chain of the mesh, or leads to one.
    fn has(&self, row: &Rule<'_>) -> bool {
        let is = |name: &str| name.starts_with(self.prefix) && !name.starts_with("PROXY_INIT_");
        let mut values = row.options().flat_map(|option| option.values);
        is(row.chain) || values.any(|word| is(word.raw))
    }
}

/// Zones of conntrack, which DNS capture needs with iptables and not with sockets.
fn raw(mesh: &Chains, rows: &[Rule<'_>]) -> Result<(), Wrong> {
    for row in rows.iter().filter(|row| mesh.has(row)) {
        let targets = row.options().filter(|option| option.name == Some("-j"));
        let mut targets = targets.filter_map(|option| option.values.first().map(|word| word.raw));
        if !targets.all(|to| to == "CT" || to.starts_with(mesh.prefix)) {
            let what = "only zones of conntrack are understood in table raw";
            return Err((row.line, what.to_owned(), row.text.to_owned()));
        }
    }
    Ok(())
}

/// Reads table `nat` of one family.
fn family(mesh: &Chains, rows: &[Rule<'_>]) -> Result<Family, Wrong> {
    let mut found = Family::default();
    found.capture.owner = mesh.owner;
    for row in rows {
        let wrong = |what: String| (row.line, what, row.to_string());
        // Only these two chains lead to the mesh's, and every rule of theirs may keep packets from them.
        if !matches!(row.chain, "PREROUTING" | "OUTPUT") && !mesh.has(row) {
            continue;
        }
        let options = options(row).map_err(wrong)?;
        found.row(mesh, row, &options).map_err(wrong)?;
    }
    for chain in [mesh.to_inbound, mesh.to_outbound] {
        let known = if chain == mesh.to_inbound {
            found.capture.inbound
        } else {
            found.capture.outbound
        };
        if known == 0 {
            let line = rows.first().map_or(1, |row| row.line);
            return Err((
                line,
                format!("chain {chain} does not redirect"),
                String::new(),
            ));
        }
    }
    let last = rows.last().map_or(1, |row| row.line);
    if !found.hooked[0] {
        return Err((
            last,
            format!("OUTPUT does not lead to chain {}", mesh.output),
            String::new(),
        ));
    }
    if !found.hooked[1] || !found.all_inbound && found.capture.include_inbound.is_empty() {
        let what = "no inbound connection is captured, and mesh.rules has no key that says so";
        return Err((last, what.to_owned(), String::new()));
    }
    let known = (&found.capture.uids, &found.capture.gids);
    if !found.at_loopback.0.is_subset(known.0) || !found.at_loopback.1.is_subset(known.1) {
        let what =
            "a rule tells the loopback of a user or group apart whose connections are captured";
        return Err((last, what.to_owned(), String::new()));
    }
    Ok(found)
}

/// Loopback, as meshes write it.
fn is_loopback(net: IpNet) -> bool {
    match net {
        IpNet::V4(net) => net.addr().is_loopback() && matches!(net.prefix_len(), 8 | 32),
        IpNet::V6(net) => net.addr().is_loopback() && net.prefix_len() == 128,
    }
}

impl Family {
    fn row(&mut self, mesh: &Chains, row: &Rule<'_>, options: &Options) -> Result<(), String> {
        let shape = &*options.shape;
        let (chain, target) = (row.chain, &*options.target);
        let tcp = options.protocol == "tcp";
        if chain == "OUTPUT" && target == mesh.output && (shape.is_empty() || shape == "p" && tcp) {
            self.hooked[0] = true;
            return Ok(());
        }
        if chain == "PREROUTING" && target == mesh.inbound && shape == "p" && tcp {
            self.hooked[1] = true;
            return Ok(());
        }
        if chain == "PREROUTING" && shape == "i" && target == "RETURN"
            || chain == "OUTPUT" && shape == "o"
        {
            return Err(
                "the rules leave all connections at an interface alone, and mesh.rules.excludeInterfaces is for inbound ones only"
                    .to_owned(),
            );
        }
        if chain == mesh.inbound {
            return self.inbound(mesh, options);
        }
        if chain == mesh.output {
            return self.output(mesh, row, options);
        }
        if chain == mesh.to_inbound || chain == mesh.to_outbound {
            let port = if chain == mesh.to_inbound {
                &mut self.capture.inbound
            } else {
                &mut self.capture.outbound
            };
            return match options.to_port {
                Some(to) if *port == 0 && target == "REDIRECT" && shape == "p" && tcp => {
                    *port = to;
                    Ok(())
                }
                // Open Service Mesh appends it behind the rule for all ports: no packet comes to it.
                None if *port != 0 && target == "ACCEPT" && shape == "p port" => Ok(()),
                _ => Err("a chain that redirects has one rule".to_owned()),
            };
        }
        if chain == mesh.dns {
            let udp = options.protocol == "udp";
            return match options.to_port {
                Some(to)
                    if target == "REDIRECT"
                        && options.ports == [53]
                        && (tcp || udp)
                        && matches!(shape, "p port" | "d p port") =>
                {
                    self.dns
                        .push((options.protocol.clone(), shape == "p port", to));
                    let resolver = options.destination.map(|net| net.addr());
                    self.resolvers.extend(resolver);
                    Ok(())
                }
                _ => Err(
                    "DNS queries are captured in another way than all, or those to the resolvers"
                        .to_owned(),
                ),
            };
        }
        Err("this rule has no counterpart in mesh.rules".to_owned())
    }

    fn inbound(&mut self, mesh: &Chains, options: &Options) -> Result<(), String> {
        let capture = &mut self.capture;
        if self.all_inbound {
            return Err("no packet comes to this rule".to_owned());
        }
        if options.protocol != "tcp" {
            return Err("only TCP is captured".to_owned());
        }
        match (&*options.shape, &*options.target) {
            ("p", target) if target == mesh.to_inbound => self.all_inbound = true,
            ("p port", "RETURN") => {
                for port in &options.ports {
                    if capture.include_inbound.contains(port) {
                        return Err(format!("port {port} is captured by a rule before"));
                    }
                    let ports = if OWN_PORTS.contains(port) {
                        &mut capture.own_ports
                    } else {
                        &mut capture.exclude_inbound
                    };
                    ports.insert(*port);
                }
            }
            ("p port", target) if target == mesh.to_inbound => {
                for port in &options.ports {
                    if capture.exclude_inbound.contains(port) || OWN_PORTS.contains(port) {
                        return Err(format!(
                            "port {port} is the sidecar's, or a rule before leaves it alone"
                        ));
                    }
                    capture.include_inbound.insert(*port);
                }
            }
            _ => return Err("inbound connections are captured by port only".to_owned()),
        }
        Ok(())
    }

    fn output(&mut self, mesh: &Chains, row: &Rule<'_>, options: &Options) -> Result<(), String> {
        let (shape, target) = (&*options.shape, &*options.target);
        let lo = options.interface == "lo";
        let outbound = &mut self.outbound;
        let redirects = outbound.all || !outbound.included.is_empty() || !outbound.ports.is_empty();
        if outbound.all || redirects && target != mesh.to_outbound {
            return Err(
                "a rule before captures connections, so this one is only for a part of them"
                    .to_owned(),
            );
        }
        let ids = options.ids.iter().copied();
        match (shape, target) {
            ("", to) if to == mesh.dns && !mesh.dns.is_empty() => {}
            ("", to) if to == mesh.to_outbound => outbound.all = true,
            ("d", to) if to == mesh.to_outbound => {
                let net = options.destination.ok_or("a rule without a range")?;
                if is_loopback(net) || matches!(net, IpNet::V4(net) if net.addr().is_loopback()) {
                    return Err("connections to loopback are never captured".to_owned());
                }
                outbound
                    .included
                    .insert(net.trunc(), (row.line, row.to_string()));
            }
            ("p port", to) if to == mesh.to_outbound && options.protocol == "tcp" => {
                for port in &options.ports {
                    outbound.ports.insert(*port, (row.line, row.to_string()));
                }
            }
            ("d", "RETURN") => {
                let net = options.destination.ok_or("a rule without a range")?;
                self.v4 = self.v4.or(is_loopback(net).then_some(net.addr().is_ipv4()));
                if !is_loopback(net) {
                    outbound.excluded.insert(net.trunc());
                }
            }
            ("p port", "RETURN") if options.protocol == "tcp" => {
                let mut ports = options.ports.iter();
                if let Some(port) = ports.find(|port| OWN_PORTS.contains(port)) {
                    return Err(format!("port {port} is one of the mesh's proxies"));
                }
                outbound.excluded_ports.extend(&options.ports);
            }
            // Only queries are captured by UDP.
            ("p port", "RETURN") if options.protocol == "udp" && !options.ports.contains(&53) => {}
            ("uid", "RETURN") => self.capture.uids.extend(ids),
            ("gid", "RETURN") => self.capture.gids.extend(ids),
            // From here on: the sidecar's connections to the pod itself, and the pod's own. Neither is captured.
            ("o s", "RETURN") if lo => {
                let from = options.source.map(|net| net.to_string());
                if !matches!(from.as_deref(), Some("127.0.0.6/32" | "::6/128")) {
                    return Err("the rule is for a source of its own".to_owned());
                }
            }
            ("!uid o", "RETURN") if lo => self.at_loopback.0.extend(ids),
            ("!gid o", "RETURN") if lo => self.at_loopback.1.extend(ids),
            ("!port !uid o p", "RETURN") if lo && options.ports == [53] => {
                self.at_loopback.0.extend(ids);
            }
            ("!gid !port o p", "RETURN") if lo && options.ports == [53] => {
                self.at_loopback.1.extend(ids);
            }
            ("!d !port o p uid" | "!d o p uid" | "!d o uid", to) if lo && to == mesh.to_inbound => {
                self.at_loopback.0.extend(ids);
            }
            ("!d !port gid o p" | "!d gid o p" | "!d gid o", to) if lo && to == mesh.to_inbound => {
                self.at_loopback.1.extend(ids);
            }
            ("!gid" | "!gid !gid" | "!uid", "RETURN") => {
                return Err(
                    "only some users or groups are captured, and mesh.rules can only exclude some"
                        .to_owned(),
                );
            }
            _ => return Err("this rule has no counterpart in mesh.rules".to_owned()),
        }
        Ok(())
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As `iptables-save` prints what Istio's injector asks for by default; the ranges, ports and DNS vary.
    const ISTIO: &str = "\
*raw
-A PREROUTING -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_INBOUND -s 10.96.0.10/32 -p udp -m udp --sport 53 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 15020 -j RETURN
-A ISTIO_INBOUND -p tcp -m tcp --dport 9090 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -p udp -m udp --dport 3306 -j RETURN
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m multiport ! --dports 53,15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp -m tcp ! --dport 53 -m owner ! --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 15008 -m owner --gid-owner 1338 -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -p tcp -m tcp ! --dport 53 -m owner ! --gid-owner 1338 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1338 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN
-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT
-A ISTIO_OUTPUT_DNS -d 10.96.0.10/32 -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT_DNS -d 10.96.0.10/32 -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";

    const OSM: &str = "\
*nat
-A PREROUTING -p tcp -j PROXY_INBOUND
-A OUTPUT -p tcp -j PROXY_OUTPUT
-A PROXY_INBOUND -p tcp -m multiport --dports 6379,7070 -j RETURN
-A PROXY_INBOUND -p tcp -m tcp --dport 15010 -j RETURN
-A PROXY_INBOUND -p tcp -m tcp --dport 15901 -j RETURN
-A PROXY_INBOUND -p tcp -j PROXY_IN_REDIRECT
-A PROXY_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15003
-A PROXY_OUTPUT -p tcp -m multiport --dports 25,26 -j RETURN
-A PROXY_OUTPUT -d 192.0.2.0/24 -j RETURN
-A PROXY_OUTPUT -m owner --uid-owner 1500 -j RETURN
-A PROXY_OUTPUT -d 127.0.0.1/32 -j RETURN
-A PROXY_OUTPUT -j PROXY_REDIRECT
-A PROXY_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A PROXY_REDIRECT -p tcp -m tcp --dport 15000 -j ACCEPT
COMMIT
";

    fn of(text: &str) -> Result<Capture, Fault> {
        read(&[Text {
            origin: "saved",
            form: Form::Saved,
            text,
        }])
    }

    fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// The same for the other family.
    fn v6(text: &str) -> String {
        let pairs = [
            ("127.0.0.1/32", "::1/128"),
            ("127.0.0.6/32", "::6/128"),
            ("10.1.0.0/16", "fd01::/32"),
            ("10.0.0.0/8", "fd00::/8"),
            ("10.96.0.10/32", "fd00::a/128"),
            ("192.0.2.0/24", "2001:db8::/32"),
        ];
        pairs
            .iter()
            .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    }

    #[test]
    fn istios_rules_become_ranges_ports_users_and_groups() {
        let wanted = Capture {
            owner: "Istio",
            outbound: 15001,
            inbound: 15006,
            include_ranges: nets(&["10.0.0.0/8"]),
            exclude_ranges: nets(&["10.1.0.0/16"]),
            exclude_ports: [3306].into(),
            exclude_inbound: [9090].into(),
            uids: [1337].into(),
            gids: [888, 1338].into(),
            dns: Some(Dns {
                port: 15053,
                any: false,
            }),
            resolvers: ["10.96.0.10".parse().unwrap()].into(),
            own_ports: [15008, 15020].into(),
            missing: Some("IPv6"),
            ..Capture::default()
        };
        assert_eq!(of(ISTIO), Ok(wanted.clone()));
        let both = Capture {
            include_ranges: nets(&["10.0.0.0/8", "fd00::/8"]),
            exclude_ranges: nets(&["10.1.0.0/16", "fd01::/32"]),
            resolvers: ["10.96.0.10".parse().unwrap(), "fd00::a".parse().unwrap()].into(),
            missing: None,
            ..wanted
        };
        assert_eq!(of(&format!("{ISTIO}{}", v6(ISTIO))), Ok(both));
    }

    #[test]
    fn the_rules_of_open_service_mesh_become_a_capture() {
        let wanted = Capture {
            owner: "Open Service Mesh",
            outbound: 15001,
            inbound: 15003,
            exclude_ranges: nets(&["192.0.2.0/24", "::/0"]),
            exclude_ports: [25, 26].into(),
            exclude_inbound: [6379, 7070].into(),
            uids: [1500].into(),
            own_ports: [15010, 15901].into(),
            missing: Some("IPv6"),
            ..Capture::default()
        };
        assert_eq!(of(OSM), Ok(wanted));
        // As the commands write it, each exclusion before the other rules.
        let inserted = OSM
            .replace("-A PROXY_OUTPUT -d 192.0.2.0/24 -j RETURN\n", "")
            .replace(
                "-A PROXY_REDIRECT -p tcp -j",
                "-I PROXY_OUTPUT -d 192.0.2.0/24 -j RETURN\n-A PROXY_REDIRECT -p tcp -j",
            );
        assert_eq!(of(&inserted), of(OSM));
    }

    #[test]
    fn what_is_captured_outbound_is_said_by_ranges_and_ports() {
        let with = |rules: &str| {
            let redirect = "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT\n";
            let text = ISTIO.replace("-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN\n", "");
            assert!(text.contains(redirect));
            text.replace(redirect, rules)
        };
        let ports = "-A ISTIO_OUTPUT -p tcp -m tcp --dport 80 -j ISTIO_REDIRECT\n";
        let all = "-A ISTIO_OUTPUT -j ISTIO_REDIRECT\n";
        let none = of(&with(ports)).unwrap();
        assert_eq!(none.exclude_ranges, nets(&["0.0.0.0/0", "::/0"]));
        assert_eq!(none.include_ports, [80].into());
        let one = of(&with(all)).unwrap();
        assert_eq!(one.exclude_ranges, nets(&["::/0"]));
        let both = of(&(with(all) + &v6(&with(all)))).unwrap();
        assert!(both.exclude_ranges.is_empty() && both.include_ranges.is_empty());
        let mixed =
            of(&(with(all) + &v6(&with("-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT\n"))))
                .unwrap();
        assert_eq!(mixed.include_ranges, nets(&["0.0.0.0/0", "fd00::/8"]));
    }

    /// What the configuration cannot express is an error with its line.
    #[test]
    fn a_rule_without_a_counterpart_is_an_error_with_its_line() {
        let line = |text: &str, of: &str| 1 + text.lines().position(|line| line == of).unwrap();
        let rules = [
            (
                "-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN",
                "-A ISTIO_OUTPUT -m owner ! --gid-owner 5 -j RETURN",
            ),
            (
                "-A ISTIO_OUTPUT -m owner --gid-owner 888 -j RETURN",
                "-A ISTIO_OUTPUT -m owner --gid-owner java -j RETURN",
            ),
            (":OUTPUT ACCEPT [0:0]", "-A PREROUTING -i eth1 -j RETURN"),
            (":OUTPUT ACCEPT [0:0]", "-A OUTPUT -o eth1 -j RETURN"),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A OUTPUT -d 192.0.2.1/32 -j ACCEPT",
            ),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A PREROUTING -i eth1 -d 10.0.0.0/8 -j ISTIO_REDIRECT",
            ),
            (":OUTPUT ACCEPT [0:0]", "-A ISTIO_WHAT -j RETURN"),
            (
                "-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT",
                "-A ISTIO_INBOUND -p tcp -m tcp --dport 1 -j RETURN",
            ),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A ISTIO_INBOUND -s 192.0.2.1/32 -p tcp -j RETURN",
            ),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A ISTIO_OUTPUT -p tcp -m tcp --dport 15012 -m mark --mark 0x1 -j RETURN",
            ),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A ISTIO_OUTPUT -p tcp -m tcp --dport 15001 -j RETURN",
            ),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A ISTIO_OUTPUT -p udp -m udp --dport 53 -j RETURN",
            ),
            (
                ":OUTPUT ACCEPT [0:0]",
                "-A ISTIO_OUTPUT -s 127.0.0.7/32 -o lo -j RETURN",
            ),
            (
                "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN",
                "-A ISTIO_OUTPUT -d 10.1.2.0/24 -j ISTIO_REDIRECT",
            ),
            (
                "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN",
                "-A ISTIO_OUTPUT -p tcp -m tcp --dport 80 -j ISTIO_REDIRECT",
            ),
            (
                "-A ISTIO_OUTPUT -d 10.1.0.0/16 -j RETURN",
                "-A ISTIO_OUTPUT -d 127.1.2.3/32 -j ISTIO_REDIRECT",
            ),
            (
                "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT",
                "-A ISTIO_OUTPUT -d 10.2.0.0/16 -j RETURN",
            ),
            (
                "-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006",
                "-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 7",
            ),
            (
                "-A OUTPUT -j ISTIO_OUTPUT_DNS",
                "-A ISTIO_OUTPUT_DNS -j DROP",
            ),
        ];
        let wrong: Vec<String> = rules
            .iter()
            .filter_map(|(after, rule)| {
                let text = ISTIO.replacen(after, &format!("{after}\n{rule}"), 1);
                let found = of(&text);
                let place = format!("saved:{}", line(&text, rule));
                let good = |fault: &Fault| {
                    fault.place == place && !fault.what.is_empty() && rule.ends_with(&fault.text)
                };
                let good = found.as_ref().is_err_and(good);
                (!good).then(|| format!("{rule}: {found:?}"))
            })
            .collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        let mangle = "*mangle\n-A PREROUTING -p tcp -j ISTIO_INBOUND\n-A ISTIO_INBOUND -p tcp -j ISTIO_TPROXY\nCOMMIT\n";
        assert_eq!(
            of(&format!("{mangle}{ISTIO}")).unwrap_err().place,
            "saved:2"
        );
        let gone = |rule: &str| {
            assert!(ISTIO.contains(rule), "{rule}");
            of(&ISTIO.replacen(rule, "", 1))
                .map(drop)
                .expect_err(rule)
                .what
        };
        assert!(gone("-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT\n").contains("inbound"));
        assert!(gone("-A PREROUTING -p tcp -j ISTIO_INBOUND\n").contains("inbound"));
        assert!(gone("-A OUTPUT -j ISTIO_OUTPUT\n").contains("OUTPUT"));
        assert!(gone("-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN\n").contains("loopback"));
        assert!(
            gone("-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\n").contains("redirect")
        );
        assert!(gone("-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN\n").contains("family"));
        assert!(gone("-A ISTIO_OUTPUT_DNS -d 10.96.0.10/32 -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053\n").contains("DNS"));
        let differ = v6(ISTIO).replace("--dport 9090", "--dport 9091");
        assert!(
            of(&format!("{ISTIO}{differ}"))
                .unwrap_err()
                .what
                .contains("differ")
        );
        assert!(
            of(&format!("{ISTIO}{ISTIO}"))
                .unwrap_err()
                .what
                .contains("twice")
        );
        for none in ["", "*nat\n-A OUTPUT -j PROXY_INIT_OUTPUT\nCOMMIT\n"] {
            assert!(
                of(none)
                    .unwrap_err()
                    .what
                    .contains("no rule of Istio's sidecar")
            );
        }
        let native = read(&[Text {
            origin: "nft",
            form: Form::Nft,
            text: "table inet istio-proxy-nat {\n}\n",
        }]);
        assert!(native.unwrap_err().what.contains("nf_tables"));
    }
}
