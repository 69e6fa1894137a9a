//! Table `filter`: services without endpoints, ports of health checks, and who may not use a load balancer's address.

use model::TrafficPolicy;

use super::{
    super::{
        draft::{Draft, agree},
        facts,
    },
    nat::{Fault, named},
    rule::{Rule, has},
    tables::{Line, Table},
};

/// Options of a rule for a port of an address.
const VIP: u32 = has::DESTINATION | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
/// Options of a rule for a port of the node.
const NODE: u32 = has::TO_LOCAL | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;

/// Reads the table, after table `nat`.
pub fn read(filter: &Table<'_>, draft: &mut Draft) {
    for chain in [
        "KUBE-SERVICES",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-PROXY-FIREWALL",
    ] {
        for line in filter.rules(chain) {
            let read = Rule::read(line.text).map_err(Fault::Unread);
            let read = read.and_then(|rule| match chain {
                "KUBE-NODEPORTS" => health_check(&rule, line, draft),
                "KUBE-PROXY-FIREWALL" => firewall(&rule, line, draft),
                _ => refused(&rule, line, chain == "KUBE-SERVICES", draft),
            });
            if let Err(fault) = read {
                fault.list(line, draft);
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

/// An address or a node port that refuses connections. `is_cluster_ip`: the address is one of the cluster.
fn refused<'a>(
    rule: &Rule<'_>,
    line: Line<'a>,
    is_cluster_ip: bool,
    draft: &mut Draft,
) -> Result<(), Fault<'a>> {
    let of_node = !is_cluster_ip && rule.is(NODE);
    let ip = rule.destination.and_then(facts::host);
    let good = of_node || rule.is(VIP) && ip.is_some();
    let Some((name, policy)) = refusal(rule).filter(|_| good) else {
        return Fault::unread("it is no rule for a service without endpoints");
    };
    let name = named(name, rule)?;
    if draft.refuse(&name, ip, is_cluster_ip, rule.port, policy) {
        Ok(())
    } else {
        Fault::of(&name, line, CONTRADICTS)
    }
}

/// Why a rule of a service does not count.
const CONTRADICTS: &str = "it contradicts another rule";

/// A port by which load balancers ask for endpoints on this node.
fn health_check<'a>(rule: &Rule<'_>, line: Line<'a>, draft: &mut Draft) -> Result<(), Fault<'a>> {
    const PORT: u32 = has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let name = rule.comment.strip_suffix(" health check node port");
    let good = rule.is(PORT) && rule.target == "ACCEPT" && rule.protocol == "tcp";
    let Some(name) = name.filter(|_| good) else {
        return Fault::unread("it is no rule for a health check's port");
    };
    // The rule has the protocol of the check, not that of the service's port.
    let name = named(name, rule)?;
    let service = draft.service(&name.service());
    if agree(&mut service.health_check_node_port, rule.port) {
        Ok(())
    } else {
        Fault::of(&name, line, CONTRADICTS)
    }
}

/// Drops what source ranges do not admit.
fn firewall<'a>(rule: &Rule<'_>, line: Line<'a>, draft: &mut Draft) -> Result<(), Fault<'a>> {
    let ip = rule.destination.and_then(facts::host);
    let name = rule.comment.split_once(" traffic not accepted by ");
    let good = rule.is(VIP) && rule.target == "DROP";
    let (Some(ip), Some((name, _)), true) = (ip, name, good) else {
        return Fault::unread("it is no rule for a load balancer's address");
    };
    let name = named(name, rule)?;
    let service = draft.service(&name.service());
    let restricted = service.has_source_ranges(ip.is_ipv4());
    if restricted && service.is_load_balancers(ip) {
        Ok(())
    } else {
        let why = "no rule of table nat says which clients may use this address";
        Fault::of(&name, line, why)
    }
}
