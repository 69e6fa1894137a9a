//! Routing rules with a condition on a packet's mark, by any owner.

use std::{collections::BTreeSet, fmt, io};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage, RouteType},
    rule::{RuleAttribute, RuleMessage},
};

use crate::{
    error::{Doing, Error},
    rtnetlink::Netlink,
};

/// The number of interface `lo` in each network namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

/// A routing rule that asks for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkRule {
    /// Whether it is for IPv4.
    pub v4: bool,
    /// Its place among the rules: the smallest is asked first.
    pub priority: u32,
    /// The mark.
    pub mark: u32,
    /// The bits of the mark that are compared.
    pub bits: u32,
    /// The table that it leads to.
    pub table: u32,
}

/// Prints the rule in the format of `ip rule`.
impl fmt::Display for MarkRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fwmark {:#x}", self.mark)?;
        if self.bits != u32::MAX {
            write!(f, "/{:#x}", self.bits)?;
        }
        write!(f, " lookup {}", self.table)
    }
}

/// The rules of the network namespace that this thread is in, in their order.
///
/// # Errors
/// If the query to the kernel fails.
pub fn mark_rules() -> Result<Vec<MarkRule>, Error> {
    let read = || -> io::Result<Vec<MarkRule>> {
        let all = list(&mut Netlink::open()?)?;
        Ok(all.iter().filter_map(mark_rule).collect())
    };
    read().doing(|| "cannot list the routing rules".to_owned())
}

/// Removes rules, and the routes in their tables that deliver every packet to this host (`ip route add local default
/// dev lo`), except routes whose table another rule uses. Returns the equivalent commands of `ip`. `dry_run`: only
/// returns the commands.
///
/// # Errors
/// If the kernel cannot list the rules, or refuses a change.
pub fn remove_mark_rules(
    is_meant: impl Fn(&MarkRule) -> bool,
    dry_run: bool,
) -> Result<Vec<String>, Error> {
    let work = || -> io::Result<Vec<String>> {
        let mut netlink = Netlink::open()?;
        let of = |rule: &RuleMessage| mark_rule(rule).filter(&is_meant);
        let (gone, left): (Vec<_>, Vec<_>) =
            (list(&mut netlink)?.into_iter()).partition(|rule| of(rule).is_some());
        let mut commands = Vec::new();
        for message in &gone {
            let Some(rule) = of(message) else { continue };
            let ip = if rule.v4 { "ip" } else { "ip -6" };
            commands.push(format!("{ip} rule del {rule} priority {}", rule.priority));
            if !dry_run {
                netlink.remove_if_there(&RouteNetlinkMessage::DelRule(message.clone()))?;
            }
        }
        let left: Vec<_> = left.iter().map(leads_to).collect();
        let tables: BTreeSet<_> = gone.iter().map(leads_to).collect();
        let tables = tables.into_iter().filter(|table| !left.contains(table));
        for (v4, table) in tables {
            for route in to_this_host(&mut netlink, v4, table)? {
                let ip = if v4 { "ip" } else { "ip -6" };
                commands.push(format!("{ip} route del local default dev lo table {table}"));
                if !dry_run {
                    netlink.remove_if_there(&RouteNetlinkMessage::DelRoute(route))?;
                }
            }
        }
        Ok(commands)
    };
    work().doing(|| "cannot remove the routing rules".to_owned())
}

/// The routes of a table that deliver every packet to this host.
fn to_this_host(netlink: &mut Netlink, v4: bool, table: u32) -> io::Result<Vec<RouteMessage>> {
    let family = if v4 {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let is_meant = |route: &RouteMessage| {
        let has = |wanted: RouteAttribute| route.attributes.contains(&wanted);
        route.header.kind == RouteType::Local
            && route.header.destination_prefix_length == 0
            && has(RouteAttribute::Table(table))
            && has(RouteAttribute::Oif(LOOPBACK))
    };
    let mut routes = netlink.routes(family)?;
    routes.retain(is_meant);
    Ok(routes)
}

/// All rules.
fn list(netlink: &mut Netlink) -> io::Result<Vec<RuleMessage>> {
    let mut all = netlink.rules(AddressFamily::Inet)?;
    all.extend(netlink.rules(AddressFamily::Inet6)?);
    Ok(all)
}

/// Whether a rule is for IPv4, and the table that it leads to.
fn leads_to(rule: &RuleMessage) -> (bool, u32) {
    let table = rule
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RuleAttribute::Table(table) => Some(*table),
            _ => None,
        });
    let v4 = rule.header.family == AddressFamily::Inet;
    (v4, table.unwrap_or(rule.header.table.into()))
}

fn mark_rule(rule: &RuleMessage) -> Option<MarkRule> {
    let (v4, table) = leads_to(rule);
    let mut found = MarkRule {
        v4,
        priority: 0,
        mark: 0,
        bits: 0,
        table,
    };
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => found.priority = *priority,
            RuleAttribute::FwMark(mark) => found.mark = *mark,
            RuleAttribute::FwMask(bits) => found.bits = *bits,
            _ => {}
        }
    }
    (found.bits != 0).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_without_a_mark_are_none() {
        let mut rule = RuleMessage::default();
        rule.header.family = AddressFamily::Inet6;
        rule.header.table = 252;
        rule.attributes = vec![RuleAttribute::Priority(7)];
        assert_eq!(mark_rule(&rule), None);
        rule.attributes.extend([
            RuleAttribute::FwMark(0x111),
            RuleAttribute::FwMask(0xfff),
            RuleAttribute::Table(15_000),
        ]);
        let wanted = MarkRule {
            v4: false,
            priority: 7,
            mark: 0x111,
            bits: 0xfff,
            table: 15_000,
        };
        assert_eq!(mark_rule(&rule), Some(wanted));
    }
}
