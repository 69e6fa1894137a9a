//! Routing rules in a workload's network namespace that deliver connections which arrive on an interface to local
//! sockets, whatever their destination. `sk_lookup` then gives them to the proxy. [`machine_marks`] decides which
//! packets belong to such connections and which are answers.
//!
//! The kernel gives a rule without a priority the place behind the table of local addresses and before all other rules
//! (`fib_default_rule_pref`, `net/core/fib_rules.c`): packets to the workload itself do not meet these rules.

use std::{collections::BTreeSet, io};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use super::{
    listeners::is_v6_off,
    machine_marks::{self, Marks},
    routing::{self, TABLE},
};
use crate::{namespaces, rtnetlink::Netlink, sys};

/// Packets that come in by an interface and go to a range.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceRule {
    /// The interface's name. A rule may name an interface that is not there yet.
    pub interface: String,
    /// The range. A range of all addresses tells the family.
    pub to: IpNet,
    /// The bit that their mark has ([`Marks::bit`]). 0: all packets.
    pub bit: u32,
}

/// The packets of virtual interfaces that a network namespace delivers to its sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machines {
    /// The rules.
    pub rules: BTreeSet<InterfaceRule>,
    /// Their interfaces, and their bit.
    pub marks: Marks,
}

/// The error of [`route_interfaces`].
#[derive(Debug)]
pub struct Unrouted {
    /// The kernel's error.
    pub error: io::Error,
    /// Whether the kernel drops the connections. If false, they bypass the proxy.
    pub are_held: bool,
}

/// Delivers these packets to sockets of the calling thread's network namespace, and removes our other rules by interface.
/// `is_new`: `wanted` differs from what this agent wrote here last.
///
/// # Errors
/// The kernel's error. Then no connection is captured. With [`Marks::closed`], the kernel drops them if possible.
pub fn route_interfaces(wanted: &Machines, is_new: bool) -> Result<(), Unrouted> {
    let Machines { rules, marks } = wanted;
    // Rules for another bit stay until the table sets this bit.
    let mut routed = route(rules, Others::Stay);
    if routed.is_ok() {
        if let Err(error) = machine_marks::write(marks, is_new) {
            let all = rules.iter().filter(|_| marks.closed);
            let all = all.map(|rule| InterfaceRule {
                bit: 0,
                ..rule.clone()
            });
            let are_held = route(&all.collect(), Others::Go).is_ok() && marks.closed;
            return Err(Unrouted { error, are_held });
        }
        routed = route(rules, Others::Go);
    }
    let Err(error) = routed else { return Ok(()) };
    if !marks.closed {
        let _ = route(&BTreeSet::new(), Others::Go);
        return Err(Unrouted {
            error,
            are_held: false,
        });
    }
    let names = marks.interfaces.keys();
    let unknown = Marks {
        interfaces: names.map(|name| (name.clone(), None)).collect(),
        ..marks.clone()
    };
    let are_held = machine_marks::write(&unknown, true).is_ok();
    Err(Unrouted { error, are_held })
}

/// Removes the rules and the table of marks from the calling thread's network namespace.
///
/// # Errors
/// If the kernel refuses.
pub fn unroute_interfaces() -> io::Result<()> {
    route(&BTreeSet::new(), Others::Go)?;
    machine_marks::remove().map(drop)
}

/// Whether our rules that are not wanted stay.
#[derive(Clone, Copy, PartialEq)]
enum Others {
    Stay,
    Go,
}

fn route(wanted: &BTreeSet<InterfaceRule>, others: Others) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let v4 = family == AddressFamily::Inet;
        let its: BTreeSet<_> = wanted
            .iter()
            .filter(|rule| rule.to.addr().is_ipv4() == v4)
            .collect();
        match route_family(&mut netlink, family, &its, others) {
            Err(_) if !v4 && is_v6_off() => {}
            done => done?,
        }
    }
    Ok(())
}

/// Removes ours from the network namespaces with these cookies. Namespaces that cannot be entered are left out.
///
/// # Errors
/// If the kernel refuses.
pub fn unroute(cookies: &BTreeSet<u64>) -> io::Result<()> {
    if cookies.is_empty() {
        return Ok(());
    }
    let visited = namespaces::visit(|_| {
        Ok(cookies
            .contains(&sys::netns_cookie()?)
            .then(unroute_interfaces))
    });
    visited.found.into_iter().flatten().collect()
}

fn route_family(
    netlink: &mut Netlink,
    family: AddressFamily,
    wanted: &BTreeSet<&InterfaceRule>,
    others: Others,
) -> io::Result<()> {
    let there = interface_rules(netlink, family)?;
    // An existing route stays, because replacing it invalidates the routes that sockets have cached.
    if !wanted.is_empty() && !routing::has_our_route(netlink, family)? {
        let route = RouteNetlinkMessage::NewRoute(routing::answers_route(family));
        netlink.request(&route, NLM_F_CREATE | NLM_F_REPLACE)?;
    }
    let is_there = |rule: &InterfaceRule| there.iter().any(|(known, _)| known == rule);
    for rule in wanted.iter().filter(|rule| !is_there(rule)) {
        let message = RouteNetlinkMessage::NewRule(message(family, rule, None));
        netlink.request(&message, NLM_F_CREATE | NLM_F_EXCL)?;
    }
    if others == Others::Stay {
        return Ok(());
    }
    for (rule, place) in there.iter().filter(|(rule, _)| !wanted.contains(rule)) {
        let message = message(family, rule, Some(*place));
        netlink.remove_if_there(&RouteNetlinkMessage::DelRule(message))?;
    }
    if wanted.is_empty() && !there.is_empty() && routing::rules(netlink, family)?.is_empty() {
        let route = RouteNetlinkMessage::DelRoute(routing::answers_route(family));
        netlink.remove_if_there(&route)?;
    }
    Ok(())
}

/// Ours of a family, in the network namespace of this socket, each with its priority.
pub fn interface_rules(
    netlink: &mut Netlink,
    family: AddressFamily,
) -> io::Result<Vec<(InterfaceRule, u32)>> {
    Ok(netlink.rules(family)?.iter().filter_map(ours).collect())
}

/// Returns our rule in a message: only our rules have both this table and an interface.
fn ours(rule: &RuleMessage) -> Option<(InterfaceRule, u32)> {
    if !rule.attributes.contains(&RuleAttribute::Table(TABLE)) {
        return None;
    }
    let mut found = InterfaceRule {
        interface: String::new(),
        to: all(rule.header.family),
        bit: 0,
    };
    let mut place = 0;
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Iifname(name) => found.interface.clone_from(name),
            RuleAttribute::Destination(addr) => {
                found.to = IpNet::new(*addr, rule.header.dst_len).ok()?;
            }
            RuleAttribute::FwMark(mark) => found.bit = *mark,
            RuleAttribute::Priority(priority) => place = *priority,
            _ => {}
        }
    }
    (!found.interface.is_empty()).then_some((found, place))
}

fn all(family: AddressFamily) -> IpNet {
    if family == AddressFamily::Inet {
        IpNet::V4(ipnet::Ipv4Net::default())
    } else {
        IpNet::V6(ipnet::Ipv6Net::default())
    }
}

/// A rule as the kernel takes it. To remove one, the kernel wants its place: it removes the first rule with everything that the
/// request has, and a rule may have more (`rule_find`, `net/core/fib_rules.c`).
pub fn message(family: AddressFamily, rule: &InterfaceRule, place: Option<u32>) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Iifname(rule.interface.clone()),
        RuleAttribute::Table(TABLE),
    ];
    if rule.bit != 0 {
        let mark = [
            RuleAttribute::FwMark(rule.bit),
            RuleAttribute::FwMask(rule.bit),
        ];
        message.attributes.extend(mark);
    }
    if rule.to.prefix_len() != 0 {
        message.header.dst_len = rule.to.prefix_len();
        let to = RuleAttribute::Destination(rule.to.network());
        message.attributes.push(to);
    }
    let place = place.map(RuleAttribute::Priority);
    message.attributes.extend(place);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_read_as_it_was_written() {
        for (family, to, bit) in [
            (AddressFamily::Inet, "0.0.0.0/0", 0x2000),
            (AddressFamily::Inet, "10.0.0.0/8", 0),
            (AddressFamily::Inet6, "::/0", 0),
            (AddressFamily::Inet6, "fd00::/8", 0x2000),
        ] {
            let rule = InterfaceRule {
                interface: "eth1".to_owned(),
                to: to.parse().unwrap(),
                bit,
            };
            let message = message(family, &rule, Some(7));
            assert_eq!(ours(&message), Some((rule, 7)));
        }
    }

    #[test]
    fn other_rules_are_none_of_ours() {
        let rule = InterfaceRule {
            interface: "eth1".to_owned(),
            to: "10.0.0.0/8".parse().unwrap(),
            bit: 0x2000,
        };
        let of = |at: usize| {
            let mut message = message(AddressFamily::Inet, &rule, None);
            message.attributes.remove(at);
            ours(&message)
        };
        assert_eq!([of(0), of(1)], [None, None]);
    }
}
