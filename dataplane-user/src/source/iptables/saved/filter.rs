//! Table `filter`: services without endpoints, ports of health checks, and who may not use a load balancer's address.

use super::{
    super::{
        draft::{Draft, add, agree},
        facts,
        leftover::Leftovers,
    },
    nat::{named, unread},
    rule::{Rule, has},
    tables::{Line, Table},
};
use crate::model::TrafficPolicy;

/// Options of a rule for a port of an address.
const VIP: u32 = has::DESTINATION | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
/// Options of a rule for a port of the node.
const NODE: u32 = has::TO_LOCAL | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;

/// Reads the table.
pub fn read(filter: &Table<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    type Read = fn(&Rule<'_>, Line<'_>, &mut Draft, &mut Leftovers);
    let chains: [(&str, Read); 4] = [
        ("KUBE-SERVICES", internal),
        ("KUBE-EXTERNAL-SERVICES", external),
        ("KUBE-NODEPORTS", health_check),
        ("KUBE-PROXY-FIREWALL", firewall),
    ];
    for (chain, read) in chains {
        for line in filter.rules(chain) {
            match Rule::read(line.text) {
                Ok(rule) => read(&rule, line, draft, leftovers),
                Err(why) => unread(line, &why, draft, leftovers),
            }
        }
    }
}

/// The port's name in a comment, and the policy that its refusal tells, if it tells one.
fn refusal<'r>(rule: &'r Rule<'_>) -> Option<(&'r str, Option<TrafficPolicy>)> {
    let (suffix, policy) = match rule.target {
        "REJECT" => (" has no endpoints", None),
        "DROP" => (" has no local endpoints", Some(TrafficPolicy::Local)),
        _ => return None,
    };
    Some((rule.comment.strip_suffix(suffix)?, policy))
}

/// A cluster IP that refuses connections.
fn internal(rule: &Rule<'_>, line: Line<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    let Line { at, text } = line;
    let ip = rule.destination.and_then(facts::host);
    let (Some(ip), Some((name, policy)), true) = (ip, refusal(rule), rule.is(VIP)) else {
        return unread(
            line,
            "it is no rule for a service without endpoints",
            draft,
            leftovers,
        );
    };
    let Some(name) = named(name, rule, at, text, leftovers) else {
        return;
    };
    let (service, port) = draft.port(&name);
    add(&mut service.cluster_ips, ip);
    let agrees = agree(&mut service.at(port).port, rule.port)
        && policy.is_none_or(|policy| agree(&mut service.internal_policy, policy));
    if !agrees {
        let why = "it contradicts another rule";
        draft.leave_out(&name.service(), at, text, why, leftovers);
    }
}

/// An address from outside, or a node port, that refuses connections.
fn external(rule: &Rule<'_>, line: Line<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    let Line { at, text } = line;
    let of_node = rule.is(NODE);
    let ip = rule.destination.and_then(facts::host);
    let Some((name, policy)) = refusal(rule).filter(|_| of_node || rule.is(VIP) && ip.is_some())
    else {
        return unread(
            line,
            "it is no rule for a service without endpoints",
            draft,
            leftovers,
        );
    };
    let Some(name) = named(name, rule, at, text, leftovers) else {
        return;
    };
    let (service, port) = draft.port(&name);
    // Table nat, which was read before, has the addresses of ports that have endpoints anywhere, and their kind. Without
    // endpoints, nothing depends on the kind.
    if let Some(ip) = ip
        && !service.load_balancer_ips.contains(&ip)
    {
        add(&mut service.external_ips, ip);
    }
    let port = service.at(port);
    let number = if of_node {
        &mut port.node_port
    } else {
        &mut port.port
    };
    let agrees = agree(number, rule.port)
        && policy.is_none_or(|policy| agree(&mut service.external_policy, policy));
    if !agrees {
        let why = "it contradicts another rule";
        draft.leave_out(&name.service(), at, text, why, leftovers);
    }
}

/// A port by which load balancers ask for endpoints on this node.
fn health_check(rule: &Rule<'_>, line: Line<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    const PORT: u32 = has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let Line { at, text } = line;
    let name = rule.comment.strip_suffix(" health check node port");
    let good = rule.is(PORT) && rule.target == "ACCEPT" && rule.protocol == "tcp";
    let Some(name) = name.filter(|_| good) else {
        return unread(
            line,
            "it is no rule for a health check's port",
            draft,
            leftovers,
        );
    };
    // The rule has the protocol of the check, not that of the service's port.
    let Some(name) = named(name, rule, at, text, leftovers) else {
        return;
    };
    let name = name.service();
    if !agree(&mut draft.service(&name).health_check_node_port, rule.port) {
        let why = "it contradicts another rule";
        draft.leave_out(&name, at, text, why, leftovers);
    }
}

/// Drops what source ranges do not admit.
fn firewall(rule: &Rule<'_>, line: Line<'_>, draft: &mut Draft, leftovers: &mut Leftovers) {
    let Line { at, text } = line;
    let ip = rule.destination.and_then(facts::host);
    let name = rule.comment.split_once(" traffic not accepted by ");
    let good = rule.is(VIP) && rule.target == "DROP";
    let (Some(ip), Some((name, _)), true) = (ip, name, good) else {
        return unread(
            line,
            "it is no rule for a load balancer's address",
            draft,
            leftovers,
        );
    };
    let Some(name) = named(name, rule, at, text, leftovers) else {
        return;
    };
    let service = draft.service(&name.service());
    let restricted = service.source_ranges[usize::from(!ip.is_ipv4())].is_some();
    if !restricted || !service.load_balancer_ips.contains(&ip) {
        let why = "no rule of table nat says which clients may use this address";
        draft.leave_out(&name.service(), at, text, why, leftovers);
    }
}
