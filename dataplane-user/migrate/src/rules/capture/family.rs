//! Reads the rules of one family.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use super::Row;
use super::{
    chains::{Chains, OWN_PORTS},
    inbound::Inbound,
    options::{Options, options},
    said::Capture,
};
use crate::text::tree::Key;

/// A fault: the line's number, the description, and the line's text.
pub type Wrong = (usize, String, String);

/// The capture of outbound connections.
#[derive(Debug, Default)]
pub struct Outbound {
    pub all: bool,
    /// The included ranges, each with the number and text of its rule.
    pub included: BTreeMap<IpNet, (usize, String)>,
    pub excluded: BTreeSet<IpNet>,
    pub ports: BTreeMap<u16, (usize, String)>,
    /// The interfaces at which no outbound connection is captured, each with the number and text of its rule.
    pub at_interfaces: BTreeMap<String, (usize, String)>,
    /// The interfaces whose incoming connections are captured as outbound ones.
    pub virtuals: BTreeMap<String, Virtual>,
    /// The port to which these connections are redirected, if separate rules name the port.
    pub virtuals_to: Option<u16>,
    /// The loopback range that a rule before the capturing rules excludes.
    pub loopback: Option<IpNet>,
    pub excluded_ports: BTreeSet<u16>,
}

/// The ranges to which an interface's incoming connections are captured (`None`: all), and the number and text of a
/// rule.
pub type Virtual = (BTreeSet<Option<IpNet>>, (usize, String));

/// The rules of one family.
#[derive(Debug, Default)]
pub struct Family {
    pub v4: Option<bool>,
    pub outbound: Outbound,
    /// Users and groups whose connections over loopback have rules of their own.
    pub at_loopback: (BTreeSet<u32>, BTreeSet<u32>),
    /// Whether such a rule excludes the connections over loopback of all other users or groups.
    loopback_is_left: bool,
    pub capture: Capture,
    pub inbound: Inbound,
    /// Whether `OUTPUT` jumps to the mesh's chain.
    pub hooked: bool,
    /// Whether `ISTIO_OUTPUT` jumps to the chain that captures DNS queries.
    queries_lead_on: bool,
    pub dns: Vec<(String, bool, u16)>,
    pub resolvers: BTreeSet<IpAddr>,
}

/// Checks table `raw`. It may only set conntrack zones, which iptables needs to capture DNS queries and sockets do not.
/// `are_all`: every rule of the table belongs to the mesh, because the table is its own.
pub fn raw(mesh: &Chains, rows: &[Row<'_>], are_all: bool) -> Result<(), Wrong> {
    for row in rows.iter().filter(|row| are_all || mesh.has(row)) {
        let mut targets = row.parts.iter().filter(|part| part.key == Key::Target);
        let is_known = |to: &str| matches!(to, "" | "CT") || to.starts_with(mesh.prefix);
        if !targets.all(|part| is_known(&part.value)) {
            return Err(row.wrong("only zones of conntrack are understood in table raw"));
        }
    }
    Ok(())
}

/// Reads table `nat` of one family.
pub fn family(mesh: &Chains, rows: &[Row<'_>]) -> Result<Family, Wrong> {
    let mut found = Family::default();
    found.capture.owner = mesh.owner;
    for row in rows {
        let wrong = |what: String| row.wrong(&what);
        // Only these two chains jump to the mesh's chains, and each of their rules may keep packets from the mesh.
        if !matches!(&*row.chain, "PREROUTING" | "OUTPUT") && !mesh.has(row) {
            continue;
        }
        let options = options(row).map_err(wrong)?;
        found.row(mesh, row, &options).map_err(wrong)?;
    }
    for chain in [mesh.to_inbound, mesh.to_outbound] {
        let known = if chain == mesh.to_inbound {
            found.inbound.to
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
    if !found.hooked {
        return Err((
            last,
            format!("OUTPUT does not lead to chain {}", mesh.output),
            String::new(),
        ));
    }
    let known = (&found.capture.uids, &found.capture.gids);
    if !found.at_loopback.0.is_subset(known.0) || !found.at_loopback.1.is_subset(known.1) {
        let what =
            "a rule tells the loopback of a user or group apart whose connections are captured";
        return Err((last, what.to_owned(), String::new()));
    }
    Ok(found)
}

/// Returns true for a loopback range in the form that meshes write.
pub fn is_loopback(net: IpNet) -> bool {
    match net {
        IpNet::V4(net) => net.addr().is_loopback() && matches!(net.prefix_len(), 8 | 32),
        IpNet::V6(net) => net.addr().is_loopback() && net.prefix_len() == 128,
    }
}

impl Family {
    /// Reads a rule that captures an interface's incoming connections as outbound ones.
    pub fn virtual_interface(&mut self, options: &Options) -> Result<(), String> {
        let interface = &options.interface;
        if matches!(&**interface, "" | "lo") || interface.ends_with('+') {
            return Err(
                "mesh.rules.virtualInterfaces takes whole names of interfaces other than lo"
                    .to_owned(),
            );
        }
        if self.inbound.interfaces.contains(interface) {
            return Err("a rule before leaves connections at this interface alone".to_owned());
        }
        if self.inbound.hooked {
            return Err("a rule before captures connections at this interface".to_owned());
        }
        let (ranges, _) = self.outbound.virtuals.entry(interface.clone()).or_default();
        ranges.insert(options.destination.map(|net| net.trunc()));
        Ok(())
    }

    fn row(&mut self, mesh: &Chains, row: &Row<'_>, options: &Options) -> Result<(), String> {
        let shape = &*options.shape;
        let (chain, target) = (&*row.chain, &*options.target);
        let tcp = options.protocol == "tcp";
        match (chain, shape) {
            ("OUTPUT", "" | "p") if target == mesh.output && (shape.is_empty() || tcp) => {
                self.hooked = true;
                return Ok(());
            }
            ("PREROUTING", "p") if target == mesh.inbound && tcp => {
                self.inbound.hooked = true;
                return Ok(());
            }
            ("PREROUTING", "i") if target == "RETURN" => {
                return self.inbound.leave_alone(&options.interface);
            }
            ("PREROUTING", "i" | "d i") if target == mesh.to_outbound => {
                self.virtual_interface(options)?;
                let (_, at) = self
                    .outbound
                    .virtuals
                    .entry(options.interface.clone())
                    .or_default();
                *at = (row.line, row.text.clone());
                return Ok(());
            }
            ("OUTPUT", "o") if target == "RETURN" => {
                if self.hooked {
                    return Err("a rule before captures connections at this interface".to_owned());
                }
                if options.interface.ends_with('+') {
                    return Err("the rule is for several interfaces".to_owned());
                }
                let interface = options.interface.clone();
                let at = (row.line, row.text.clone());
                self.outbound.at_interfaces.insert(interface, at);
                return Ok(());
            }
            _ => {}
        }
        if chain == mesh.inbound {
            return self.inbound.row(mesh.to_inbound, options);
        }
        if chain == mesh.output {
            return self.output(mesh, row, options);
        }
        if chain == mesh.to_inbound || chain == mesh.to_outbound {
            let port = if chain == mesh.to_inbound {
                &mut self.inbound.to
            } else {
                &mut self.capture.outbound
            };
            return match options.to_port {
                Some(to) if *port == 0 && target == "REDIRECT" && shape == "p" && tcp => {
                    *port = to;
                    Ok(())
                }
                // Open Service Mesh appends this rule after the rule for all ports, so no packet reaches it.
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

    fn output(&mut self, mesh: &Chains, row: &Row<'_>, options: &Options) -> Result<(), String> {
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
            ("", to) if to == mesh.dns && !mesh.dns.is_empty() => self.queries_lead_on = true,
            ("", to) if to == mesh.to_outbound => outbound.all = true,
            ("d", to) if to == mesh.to_outbound => self.include(row, options)?,
            ("p port", to) if to == mesh.to_outbound && options.protocol == "tcp" => {
                for port in &options.ports {
                    outbound.ports.insert(*port, (row.line, row.text.clone()));
                }
            }
            ("d", "RETURN") => {
                let net = options.destination.ok_or("a rule without a range")?;
                self.v4 = self.v4.or(is_loopback(net).then_some(net.addr().is_ipv4()));
                if is_loopback(net) {
                    outbound.loopback = Some(net.trunc());
                } else {
                    outbound.excluded.insert(net.trunc());
                }
            }
            ("p port", "RETURN") if options.protocol == "tcp" => {
                // Istio's CNI plug-in also writes the sidecar's own ports.
                let ports = options.ports.iter();
                let (own, excluded) =
                    ports.partition::<Vec<u16>, _>(|port| OWN_PORTS.contains(port));
                self.inbound.own_ports.extend(own);
                outbound.excluded_ports.extend(excluded);
            }
            // Of UDP packets, only DNS queries are captured.
            ("p port", "RETURN") if options.protocol == "udp" && !options.ports.contains(&53) => {}
            ("uid", "RETURN") => self.capture.uids.extend(ids),
            ("gid", "RETURN") => self.capture.gids.extend(ids),
            // The following rules concern the sidecar's connections to its own pod, and the pod's connections to
            // itself. Both stay uncaptured.
            ("o s", "RETURN") if lo => {
                let from = options.source.map(|net| net.to_string());
                if !matches!(from.as_deref(), Some("127.0.0.6/32" | "::6/128")) {
                    return Err("the rule is for a source of its own".to_owned());
                }
            }
            ("!uid o", "RETURN") if lo => {
                self.loopback_is_left = true;
                self.at_loopback.0.extend(ids);
            }
            ("!gid o", "RETURN") if lo => {
                self.loopback_is_left = true;
                self.at_loopback.1.extend(ids);
            }
            ("!port !uid o p", "RETURN") if lo && options.ports == [53] => {
                self.loopback_is_left = true;
                self.at_loopback.0.extend(ids);
            }
            ("!gid !port o p", "RETURN") if lo && options.ports == [53] => {
                self.loopback_is_left = true;
                self.at_loopback.1.extend(ids);
            }
            ("!d !port o p uid" | "!d o p uid" | "!d o uid", to) if lo && to == mesh.to_inbound => {
                self.at_loopback.0.extend(ids);
            }
            ("!d !port gid o p" | "!d gid o p" | "!d gid o", to) if lo && to == mesh.to_inbound => {
                self.at_loopback.1.extend(ids);
            }
            (shape, "RETURN") if shape.split(' ').all(|word| matches!(word, "!uid" | "!gid")) => {
                let capture = &mut self.capture;
                if !capture.include_uids.is_empty() || !capture.include_gids.is_empty() {
                    return Err("a rule before captures some users or groups only, too".to_owned());
                }
                if self.queries_lead_on {
                    return Err("DNS queries of all users are captured before".to_owned());
                }
                capture.include_uids.extend(&options.not_uids);
                capture.include_gids.extend(&options.not_gids);
            }
            _ => return Err("this rule has no counterpart in mesh.rules".to_owned()),
        }
        Ok(())
    }

    /// Reads a rule that captures the connections to a range.
    fn include(&mut self, row: &Row<'_>, options: &Options) -> Result<(), String> {
        let net = options.destination.ok_or("a rule without a range")?;
        let mut loopback = self.outbound.loopback.iter();
        if loopback.any(|left| left.contains(&net.trunc()))
            || self.loopback_is_left && net.addr().is_loopback()
        {
            return Err("a rule before leaves connections to this range alone".to_owned());
        }
        if net.prefix_len() == net.max_prefix_len()
            && [
                IpAddr::from(Ipv4Addr::LOCALHOST),
                Ipv6Addr::LOCALHOST.into(),
            ]
            .contains(&net.addr())
        {
            return Err("connections to 127.0.0.1 and ::1 are never captured".to_owned());
        }
        let at = (row.line, row.text.clone());
        self.outbound.included.insert(net.trunc(), at);
        Ok(())
    }
}
