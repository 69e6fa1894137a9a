//! Reads table `nat`: the addresses and node ports of services, with their chains.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
};

use ipnet::IpNet;
use model::{Protocol, ServiceName, TrafficPolicy};

use super::{
    super::{
        draft::{Draft, PortName, agree, protocol},
        facts,
        rows::Line,
    },
    chains,
    port::Chains,
    rule::{Rule, has},
    tables::Table,
};
use crate::text::tree::{self, Key};

/// Ports with their chains, by the name in the comments of rules and by protocol.
type Ports<'a> = HashMap<(String, Protocol), Chains<'a>>;

/// The reason why a rule is not used.
pub enum Fault<'a> {
    /// The rule does not have kube-proxy's form. The service in its comment is left out.
    Unread(String),
    /// The rule concerns no service that the dataplane serves.
    Alone(String),
    /// The rule contradicts another rule about a service, or jumps to this line, which does. The service is left out.
    Of(ServiceName, Line<'a>, String),
}

impl<'a> Fault<'a> {
    /// Returns the fault of a rule in another form.
    pub fn unread<T>(why: &str) -> Result<T, Self> {
        Err(Self::Unread(why.to_owned()))
    }

    /// Returns the fault of a rule that contradicts another rule of its service.
    pub fn of<T>(name: &PortName<'_>, line: Line<'a>, why: &str) -> Result<T, Self> {
        Err(Self::Of(name.service(), line, why.to_owned()))
    }

    /// Lists the rule, and leaves out the service that it concerns.
    pub fn list(self, line: Line<'_>, draft: &mut Draft) {
        match self {
            Self::Alone(why) => draft.leftovers.add(line.at, line.text, why),
            Self::Of(name, Line { at, text }, why) => {
                draft.leave_out(&name, at, text, &why);
            }
            Self::Unread(why) => {
                let mut parts = tree::saved(line.text);
                let comment = parts.find(|part| part.key == Key::Comment);
                let comment = comment.map(|part| part.value);
                let first = comment.as_deref().and_then(|text| text.split(' ').next());
                // Any protocol works here, because only the service's name is needed.
                match first.and_then(|name| PortName::of_comment(name, Protocol::Tcp)) {
                    Some(name) => {
                        draft.leave_out(&name.service(), line.at, line.text, &why);
                    }
                    None => draft.leftovers.add(line.at, line.text, why),
                }
            }
        }
    }
}

/// Reads the table.
pub fn read(nat: &Table<'_>, draft: &mut Draft) {
    mark(nat, draft);
    let mut ports = Ports::default();
    for chain in ["KUBE-SERVICES", "KUBE-NODEPORTS"] {
        for line in nat.rules(chain) {
            let read = Rule::read(line.text).map_err(Fault::Unread);
            let read = read.and_then(|rule| match chain {
                "KUBE-NODEPORTS" => node_port(&rule, line, draft, &mut ports),
                _ if rule.target == "KUBE-NODEPORTS" => node_addresses(&rule, draft),
                _ => vip(&rule, line, nat, draft, &mut ports),
            });
            if let Err(fault) = read {
                fault.list(line, draft);
            }
        }
    }
    let mut ports: Vec<_> = ports.into_iter().collect();
    ports.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    for ((name, protocol), of_port) in &ports {
        if let Some(name) = PortName::of_comment(name, *protocol) {
            chains::read(nat, &name, of_port, draft);
        }
    }
}

/// Reads the bit of the mark that requests masquerading, and the rules that masquerade.
fn mark(nat: &Table<'_>, draft: &mut Draft) {
    const MASQUERADE: u32 = has::COMMENT | has::JUMP;
    for chain in ["KUBE-MARK-MASQ", "KUBE-POSTROUTING"] {
        for Line { at, text } in nat.rules(chain) {
            let rule = match Rule::read(text) {
                Ok(rule) => rule,
                Err(why) => {
                    draft.leftovers.add(at, text, why);
                    continue;
                }
            };
            let bit = match (chain, rule.target, rule.set) {
                ("KUBE-MARK-MASQ", "MARK", Some((bit, mask))) if rule.is(has::JUMP) => {
                    Some(bit).filter(|bit| *bit == mask)
                }
                ("KUBE-POSTROUTING", "MARK", Some((bit, 0))) if rule.is(has::JUMP) => Some(bit),
                ("KUBE-POSTROUTING", "RETURN", None)
                    if rule.is(has::not(has::MARK) | has::JUMP) =>
                {
                    Some(rule.mark.0).filter(|bit| *bit == rule.mark.1)
                }
                ("KUBE-POSTROUTING", "MASQUERADE", None)
                    if rule.is(MASQUERADE) || rule.is(MASQUERADE | has::RANDOMLY) =>
                {
                    draft.facts.mark
                }
                _ => None,
            };
            let bit = bit.filter(|bit| bit.is_power_of_two());
            if !bit.is_some_and(|bit| draft.facts.marks(bit)) {
                draft.leftovers.add(
                    at,
                    text,
                    "kube-proxy masquerades by one bit of the mark, in other words",
                );
            }
        }
    }
}

/// Reads the last rules of `KUBE-SERVICES`: the addresses that answer node ports.
fn node_addresses<'a>(rule: &Rule<'_>, draft: &mut Draft) -> Result<(), Fault<'a>> {
    const ALL: u32 = has::COMMENT | has::TO_LOCAL | has::JUMP;
    let loopback = |net: IpNet| match net {
        IpNet::V4(net) => net.addr().is_loopback(),
        IpNet::V6(net) => net.addr().is_loopback(),
    };
    match rule.destination {
        None if rule.is(ALL) => draft.facts.all_answer(draft.v4),
        Some(net) if rule.is(ALL | has::not(has::DESTINATION)) && loopback(net) => {
            draft.facts.all_answer(draft.v4);
        }
        Some(net) if rule.is(has::COMMENT | has::DESTINATION | has::JUMP) => {
            draft.facts.node_ports.insert(net);
        }
        _ => {
            let why = "kube-proxy leads no packets to node ports so";
            return Err(Fault::Alone(why.to_owned()));
        }
    }
    Ok(())
}

/// Reads a rule for an address of a service.
fn vip<'a>(
    rule: &Rule<'a>,
    line: Line<'a>,
    nat: &Table<'a>,
    draft: &mut Draft,
    ports: &mut Ports<'a>,
) -> Result<(), Fault<'a>> {
    const VIP: u32 = has::DESTINATION | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let ip = rule.destination.and_then(facts::host);
    let Some(ip) = ip.filter(|_| rule.is(VIP)) else {
        return Fault::unread("it is no rule for a port of a service's address");
    };
    let Some((name, kind)) = kind(&rule.comment) else {
        return Err(Fault::Alone(NAMELESS.to_owned()));
    };
    let name = named(name, rule)?;
    let (service, port) = draft.port(&name);
    if !agree(&mut service.at(port).port, rule.port) {
        return Fault::of(&name, line, "another rule gives its port another number");
    }
    let of_port = of_port(ports, &name);
    let target = rule.target;
    let is = |prefix: &str| target.starts_with(prefix);
    match kind {
        Kind::Cluster if is("KUBE-SVC-") || is("KUBE-SVL-") => {
            let policy = if is("KUBE-SVC-") {
                TrafficPolicy::Cluster
            } else {
                TrafficPolicy::Local
            };
            service.at_cluster_ip(port, ip);
            let known = of_port.internal.get_or_insert((target, policy, line)).0;
            if known != target || !agree(&mut service.internal_policy, policy) {
                let why = "its rules for cluster IPs contradict each other";
                return Fault::of(&name, line, why);
            }
            Ok(())
        }
        Kind::External if is("KUBE-EXT-") => {
            service.outside().external_ips.insert(ip);
            external(target, line, of_port, &name)
        }
        Kind::LoadBalancer if is("KUBE-EXT-") => {
            service.outside().load_balancer_ips.insert(ip);
            external(target, line, of_port, &name)
        }
        Kind::LoadBalancer if is("KUBE-FW-") => {
            service.outside().load_balancer_ips.insert(ip);
            let target = chains::firewall(nat, target, line, &name, ip, draft)
                .map_err(|(line, why)| Fault::Of(name.service(), line, why))?;
            external(target, line, of_port, &name)
        }
        _ => {
            let why = format!("kube-proxy has no chain {target:?} for such an address");
            Fault::of(&name, line, &why)
        }
    }
}

/// Notes the chain for traffic from outside.
fn external<'a>(
    target: &'a str,
    line: Line<'a>,
    of_port: &mut Chains<'a>,
    name: &PortName<'_>,
) -> Result<(), Fault<'a>> {
    if of_port.external.get_or_insert((target, line)).0 != target {
        let why = "its rules for addresses outside of the cluster contradict each other";
        return Fault::of(name, line, why);
    }
    Ok(())
}

/// Reads a rule for a node port.
fn node_port<'a>(
    rule: &Rule<'a>,
    line: Line<'a>,
    draft: &mut Draft,
    ports: &mut Ports<'a>,
) -> Result<(), Fault<'a>> {
    const PORT: u32 = has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let loopback = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0));
    let is_loopback = |net: IpNet| (net.addr(), net.prefix_len()) == (loopback, 8);
    // This rule counts connections to loopback. The next rule is equal, but has no counter.
    let counts = rule.is(PORT | has::DESTINATION | has::COUNTED)
        && rule.destination.is_some_and(is_loopback);
    if !(counts || rule.is(PORT)) || !rule.target.starts_with("KUBE-EXT-") {
        return Fault::unread("it is no rule for a node port");
    }
    let name = named(&rule.comment, rule)?;
    let (service, port) = draft.port(&name);
    let port = service.at(port);
    let known = if counts {
        &mut port.at_loopback
    } else {
        &mut port.node_port
    };
    if !agree(known, rule.port) {
        return Fault::of(&name, line, "another rule gives its port another node port");
    }
    external(rule.target, line, of_port(ports, &name), &name)
}

fn of_port<'p, 'a>(ports: &'p mut Ports<'a>, name: &PortName<'_>) -> &'p mut Chains<'a> {
    let comment = match name.port {
        "" => format!("{}/{}", name.namespace, name.name),
        port => format!("{}/{}:{port}", name.namespace, name.name),
    };
    ports.entry((comment, name.protocol)).or_default()
}

/// The fault of a rule that concerns no service.
const NAMELESS: &str = "its comment names no service";

/// Returns the port that a comment names, if the dataplane serves the protocol.
pub fn named<'n, 'a>(comment: &'n str, rule: &Rule<'_>) -> Result<PortName<'n>, Fault<'a>> {
    let Some(protocol) = protocol(rule.protocol) else {
        let why = format!(
            "protocol {} is not served: keep kube-proxy on this node, or remove the port from the Service",
            rule.protocol
        );
        return Err(Fault::Alone(why));
    };
    let name = PortName::of_comment(comment, protocol);
    name.ok_or_else(|| Fault::Alone(NAMELESS.to_owned()))
}

/// The kind of an address.
#[derive(Clone, Copy)]
enum Kind {
    Cluster,
    External,
    LoadBalancer,
}

/// Returns the port's name from a comment, and the kind of the rule's address.
fn kind(comment: &str) -> Option<(&str, Kind)> {
    [
        (" cluster IP", Kind::Cluster),
        (" external IP", Kind::External),
        (" loadbalancer IP", Kind::LoadBalancer),
    ]
    .into_iter()
    .find_map(|(suffix, kind)| Some((comment.strip_suffix(suffix)?, kind)))
}
