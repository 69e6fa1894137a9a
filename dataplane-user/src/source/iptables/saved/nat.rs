//! Table `nat`: the addresses and node ports of services, with their chains.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
};

use ipnet::IpNet;

use super::{
    super::{
        draft::{Draft, PortName, add, agree, protocol},
        facts,
        leftover::{At, Leftovers},
    },
    chains,
    port::Chains,
    rule::{Rule, has},
    tables::{Line, Table},
};
use crate::{
    iptables::Words,
    model::{Protocol, TrafficPolicy},
};

/// Ports with their chains, by the names in comments. The comment is one that a rule has.
type Ports<'a> = HashMap<(String, Protocol), Chains<'a>>;

/// Reads the table.
pub fn read(nat: &Table<'_>, v4: bool, draft: &mut Draft, leftovers: &mut Leftovers) {
    mark(nat, draft, leftovers);
    let mut ports = Ports::default();
    for line in nat.rules("KUBE-SERVICES") {
        match Rule::read(line.text) {
            Err(why) => unread(line, &why, draft, leftovers),
            Ok(rule) if rule.target == "KUBE-NODEPORTS" => {
                node_addresses(&rule, line, v4, draft, leftovers);
            }
            Ok(rule) => vip(&rule, line, nat, draft, &mut ports, leftovers),
        }
    }
    for line in nat.rules("KUBE-NODEPORTS") {
        match Rule::read(line.text) {
            Err(why) => unread(line, &why, draft, leftovers),
            Ok(rule) => node_port(&rule, line, draft, &mut ports, leftovers),
        }
    }
    let mut ports: Vec<_> = ports.into_iter().collect();
    ports.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    for ((name, protocol), of_port) in &ports {
        if let Some(name) = PortName::of_comment(name, *protocol) {
            chains::read(nat, v4, &name, of_port, draft, leftovers);
        }
    }
}

/// The bit of the mark that asks for masquerading, and what is done by it.
fn mark(nat: &Table<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    for chain in ["KUBE-MARK-MASQ", "KUBE-POSTROUTING"] {
        for Line { at, text } in nat.rules(chain) {
            let rule = match Rule::read(text) {
                Ok(rule) => rule,
                Err(why) => {
                    leftovers.add(at, text, why);
                    continue;
                }
            };
            let bit = match (rule.target, rule.set) {
                ("MARK", Some((bit, _))) if rule.is(has::JUMP) => Some(bit),
                ("RETURN", None) if rule.is(has::NOT_MARK | has::JUMP) => Some(rule.mark.0),
                ("MASQUERADE", None) if rule.is(has::COMMENT | has::JUMP) => draft.facts.mark,
                _ => None,
            };
            if !bit.is_some_and(|bit| draft.facts.marks(bit)) {
                leftovers.add(
                    at,
                    text,
                    "kube-proxy masquerades by one bit of the mark, in other words",
                );
            }
        }
    }
}

/// The last rules of `KUBE-SERVICES`: which addresses answer node ports.
fn node_addresses(
    rule: &Rule<'_>,
    Line { at, text }: Line<'_>,
    v4: bool,
    draft: &mut Draft,
    leftovers: &mut Leftovers,
) {
    const ALL: u32 = has::COMMENT | has::TO_LOCAL | has::JUMP;
    let loopback = |net: IpNet| match net {
        IpNet::V4(net) => net.addr().is_loopback(),
        IpNet::V6(net) => net.addr().is_loopback(),
    };
    match rule.destination {
        None if rule.is(ALL) => draft.facts.all_answer(v4),
        Some(net) if rule.is(ALL | has::NOT_DESTINATION) && loopback(net) => {
            draft.facts.all_answer(v4);
        }
        Some(net) if rule.is(has::COMMENT | has::DESTINATION | has::JUMP) => {
            draft.facts.answers(net);
        }
        _ => leftovers.add(at, text, "kube-proxy leads no packets to node ports so"),
    }
}

/// A rule for an address of a service.
fn vip<'a>(
    rule: &Rule<'a>,
    line: Line<'a>,
    nat: &Table<'a>,
    draft: &mut Draft,
    ports: &mut Ports<'a>,
    leftovers: &mut Leftovers,
) {
    const VIP: u32 = has::DESTINATION | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let Line { at, text } = line;
    let ip = rule.destination.and_then(facts::host);
    let (Some(ip), true) = (ip, rule.is(VIP)) else {
        return unread(
            line,
            "it is no rule for a port of a service's address",
            draft,
            leftovers,
        );
    };
    let Some((name, kind)) = kind(&rule.comment) else {
        return leftovers.add(at, text, "its comment names no service");
    };
    let Some(name) = named(name, rule, at, text, leftovers) else {
        return;
    };
    let (service, port) = draft.port(&name);
    if !agree(&mut service.at(port).port, rule.port) {
        let why = "another rule gives its port another number";
        return draft.leave_out(&name.service(), at, text, why, leftovers);
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
            add(&mut service.cluster_ips, ip);
            let known = of_port.internal.get_or_insert((target, policy, line)).0;
            if known != target || !agree(&mut service.internal_policy, policy) {
                let why = "its rules for cluster IPs contradict each other";
                draft.leave_out(&name.service(), at, text, why, leftovers);
            }
        }
        Kind::External if is("KUBE-EXT-") => {
            add(&mut service.external_ips, ip);
            external(target, line, of_port, &name, draft, leftovers);
        }
        Kind::LoadBalancer if is("KUBE-EXT-") => {
            add(&mut service.load_balancer_ips, ip);
            external(target, line, of_port, &name, draft, leftovers);
        }
        Kind::LoadBalancer if is("KUBE-FW-") => {
            add(&mut service.load_balancer_ips, ip);
            if let Some(target) = chains::firewall(nat, target, line, &name, ip, draft, leftovers) {
                external(target, line, of_port, &name, draft, leftovers);
            }
        }
        _ => {
            let why = format!("kube-proxy has no chain {target:?} for such an address");
            draft.leave_out(&name.service(), at, text, &why, leftovers);
        }
    }
}

/// Notes the chain for traffic from outside.
fn external<'a>(
    target: &'a str,
    line: Line<'a>,
    of_port: &mut Chains<'a>,
    name: &PortName<'_>,
    draft: &mut Draft,
    leftovers: &mut Leftovers,
) {
    if of_port.external.get_or_insert((target, line)).0 != target {
        let why = "its rules for addresses outside of the cluster contradict each other";
        draft.leave_out(&name.service(), line.at, line.text, why, leftovers);
    }
}

/// A rule for a node port.
fn node_port<'a>(
    rule: &Rule<'a>,
    line: Line<'a>,
    draft: &mut Draft,
    ports: &mut Ports<'a>,
    leftovers: &mut Leftovers,
) {
    const PORT: u32 = has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let Line { at, text } = line;
    // The rule counts connections to loopback. The next rule is the same without a counter.
    if rule.is(PORT | has::DESTINATION | has::COUNTED) {
        let net = rule.destination.map(|net| net.addr());
        if net == Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0))) {
            return;
        }
    }
    if !rule.is(PORT) || !rule.target.starts_with("KUBE-EXT-") {
        return unread(line, "it is no rule for a node port", draft, leftovers);
    }
    let Some(name) = named(&rule.comment, rule, at, text, leftovers) else {
        return;
    };
    let (service, port) = draft.port(&name);
    if !agree(&mut service.at(port).node_port, rule.port) {
        let why = "another rule gives its port another node port";
        return draft.leave_out(&name.service(), at, text, why, leftovers);
    }
    let of_port = of_port(ports, &name);
    external(rule.target, line, of_port, &name, draft, leftovers);
}

fn of_port<'p, 'a>(ports: &'p mut Ports<'a>, name: &PortName<'_>) -> &'p mut Chains<'a> {
    let comment = match name.port {
        "" => format!("{}/{}", name.namespace, name.name),
        port => format!("{}/{}:{port}", name.namespace, name.name),
    };
    ports.entry((comment, name.protocol)).or_default()
}

/// Lists a rule that was not understood, and leaves out the service that its comment names.
pub fn unread(line: Line<'_>, why: &str, draft: &mut Draft, leftovers: &mut Leftovers) {
    let Line { at, text } = line;
    let mut words = Words::new(text).filter_map(Result::ok);
    let comment = words
        .by_ref()
        .find(|word| word.raw == "--comment")
        .and_then(|_| words.next());
    let comment = comment.map(|word| word.text().into_owned());
    let first = comment.as_deref().and_then(|text| text.split(' ').next());
    // The protocol does not matter here: only the service's name does.
    match first.and_then(|name| PortName::of_comment(name, Protocol::Tcp)) {
        Some(name) => draft.leave_out(&name.service(), at, text, why, leftovers),
        None => leftovers.add(at, text, why),
    }
}

/// The port that a comment names, if its protocol is served.
pub fn named<'n>(
    comment: &'n str,
    rule: &Rule<'_>,
    at: At,
    text: &str,
    leftovers: &mut Leftovers,
) -> Option<PortName<'n>> {
    let Some(protocol) = protocol(rule.protocol) else {
        let why = format!("protocol {} is not served", rule.protocol);
        leftovers.add(at, text, why);
        return None;
    };
    let name = PortName::of_comment(comment, protocol);
    if name.is_none() {
        leftovers.add(at, text, "its comment names no service");
    }
    name
}

/// The kind of an address.
#[derive(Clone, Copy)]
enum Kind {
    Cluster,
    External,
    LoadBalancer,
}

/// The port's name in a comment, and which kind of address the rule is for.
fn kind(comment: &str) -> Option<(&str, Kind)> {
    [
        (" cluster IP", Kind::Cluster),
        (" external IP", Kind::External),
        (" loadbalancer IP", Kind::LoadBalancer),
    ]
    .into_iter()
    .find_map(|(suffix, kind)| Some((comment.strip_suffix(suffix)?, kind)))
}
