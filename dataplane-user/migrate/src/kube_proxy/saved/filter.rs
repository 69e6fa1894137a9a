//! Reads table `filter`: services without endpoints, ports of health checks, and the restrictions of load balancers'
//! addresses.

use model::TrafficPolicy;

use super::{
    super::{
        draft::{Draft, agree},
        facts,
        rows::Line,
    },
    nat::{Fault, named},
    rule::{Rule, has},
    tables::Table,
};

/// The options of a rule for a port at an address.
const VIP: u32 = has::DESTINATION | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
/// The options of a rule for a port of the node.
const NODE: u32 = has::TO_LOCAL | has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;

/// Reads the table. Table `nat` must be read before.
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

/// Returns the port's name from a comment, and the traffic policy if the refusal depends on one.
fn refusal<'r>(rule: &'r Rule<'_>) -> Option<(&'r str, Option<TrafficPolicy>)> {
    let (suffix, policy) = match rule.target {
        "REJECT" => (" has no endpoints", None),
        "DROP" => (" has no local endpoints", Some(TrafficPolicy::Local)),
        _ => return None,
    };
    Some((rule.comment.strip_suffix(suffix)?, policy))
}

/// Reads a rule for an address or a node port that refuses connections. `is_cluster_ip`: the address is a cluster IP.
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

/// The fault of a rule that contradicts another rule of its service.
const CONTRADICTS: &str = "it contradicts another rule";

/// Reads a rule for the port at which load balancers check for endpoints on this node.
fn health_check<'a>(rule: &Rule<'_>, line: Line<'a>, draft: &mut Draft) -> Result<(), Fault<'a>> {
    const PORT: u32 = has::PROTOCOL | has::COMMENT | has::PORT | has::JUMP;
    let name = rule.comment.strip_suffix(" health check node port");
    let good = rule.is(PORT) && rule.target == "ACCEPT" && rule.protocol == "tcp";
    let Some(name) = name.filter(|_| good) else {
        return Fault::unread("it is no rule for a health check's port");
    };
    // The protocol in the rule belongs to the health check, not to the service's port.
    let name = named(name, rule)?;
    let service = draft.service(&name.service());
    if agree(&mut service.health_check_node_port, rule.port) {
        Ok(())
    } else {
        Fault::of(&name, line, CONTRADICTS)
    }
}

/// Reads a rule that drops packets of clients outside the source ranges.
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
