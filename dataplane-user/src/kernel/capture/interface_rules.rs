//! Routing rules in a workload's network namespace by which connections that come in by an interface go to sockets there,
//! whatever their destination. `sk_lookup` then gives them to the proxy. Which packets are of such connections, and not answers,
//! [`machine_marks`] tells.
//!
//! The kernel gives a rule without a priority the place behind the table of local addresses and before all other rules
//! (`fib_default_rule_pref`, `net/core/fib_rules.c`): packets to the workload itself do not meet these rules.

use std::{collections::BTreeSet, io};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, IpProtocol, RouteNetlinkMessage,
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use super::{
    listeners::is_v6_off,
    machine_marks,
    routing::{self, TABLE},
};
use crate::kernel::{namespaces, rtnetlink::Netlink, sys};

/// Connections by TCP that come in by an interface and go to a range.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceRule {
    /// The interface's name. A rule may name an interface that is not there yet.
    pub interface: String,
    /// The range. A range of all addresses tells the family.
    pub to: IpNet,
    /// The bits that the packets' marks have, which they get here if they are no answers. 0: all packets, also answers.
    pub mark: u32,
}

/// In the network namespace that this thread is in: has these connections go to sockets here, and no others by interface.
/// `is_new`: other ones did until now.
///
/// # Errors
/// The kernel's refusal.
pub fn route_interfaces(wanted: &BTreeSet<InterfaceRule>, is_new: bool) -> io::Result<()> {
    let marked: BTreeSet<&str> = (wanted.iter().filter(|rule| rule.mark != 0))
        .map(|rule| &*rule.interface)
        .collect();
    let bits = wanted.iter().fold(0, |bits, rule| bits | rule.mark);
    // Before the rules that ask for the marks.
    if !marked.is_empty() && (is_new || !machine_marks::is_there()?) {
        machine_marks::mark(&marked, bits)?;
    }
    route(wanted)?;
    if marked.is_empty() {
        machine_marks::remove()?;
    }
    Ok(())
}

fn route(wanted: &BTreeSet<InterfaceRule>) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let v4 = family == AddressFamily::Inet;
        let its: BTreeSet<_> = wanted
            .iter()
            .filter(|rule| rule.to.addr().is_ipv4() == v4)
            .collect();
        match route_family(&mut netlink, family, &its) {
            Err(_) if !v4 && is_v6_off() => {}
            done => done?,
        }
    }
    Ok(())
}

/// Removes ours from the network namespaces with these cookies. Namespaces that cannot be entered are left out.
///
/// # Errors
/// The kernel's refusal.
pub fn unroute(cookies: &BTreeSet<u64>) -> io::Result<()> {
    if cookies.is_empty() {
        return Ok(());
    }
    let visited = namespaces::visit(|_| {
        Ok(cookies
            .contains(&sys::netns_cookie()?)
            .then(|| route_interfaces(&BTreeSet::new(), true)))
    });
    visited.found.into_iter().flatten().collect()
}

fn route_family(
    netlink: &mut Netlink,
    family: AddressFamily,
    wanted: &BTreeSet<&InterfaceRule>,
) -> io::Result<()> {
    let there = interface_rules(netlink, family)?;
    if !wanted.is_empty() {
        let route = RouteNetlinkMessage::NewRoute(routing::answers_route(family));
        netlink.request(&route, NLM_F_CREATE | NLM_F_REPLACE)?;
    }
    for rule in wanted.iter().filter(|rule| !there.contains(**rule)) {
        let message = RouteNetlinkMessage::NewRule(message(family, rule));
        netlink.request(&message, NLM_F_CREATE | NLM_F_EXCL)?;
    }
    for rule in there.iter().filter(|rule| !wanted.contains(rule)) {
        remove(
            netlink,
            &RouteNetlinkMessage::DelRule(message(family, rule)),
        )?;
    }
    if wanted.is_empty() && !there.is_empty() && routing::rules(netlink, family)?.is_empty() {
        remove(
            netlink,
            &RouteNetlinkMessage::DelRoute(routing::answers_route(family)),
        )?;
    }
    Ok(())
}

/// Removes something that may be gone meanwhile.
fn remove(netlink: &mut Netlink, what: &RouteNetlinkMessage) -> io::Result<()> {
    match netlink.request(what, 0) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(()),
        done => done,
    }
}

/// Ours of a family, in the network namespace of this socket.
pub fn interface_rules(
    netlink: &mut Netlink,
    family: AddressFamily,
) -> io::Result<BTreeSet<InterfaceRule>> {
    let mut question = RuleMessage::default();
    question.header.family = family;
    let answers = netlink.list(&RouteNetlinkMessage::GetRule(question))?;
    let ours = answers.into_iter().filter_map(|answer| match answer {
        RouteNetlinkMessage::NewRule(rule) if rule.header.family == family => ours(&rule),
        _ => None,
    });
    Ok(ours.collect())
}

/// Nobody else's rule has this table, an interface and this protocol.
fn ours(rule: &RuleMessage) -> Option<InterfaceRule> {
    let has = |wanted: RuleAttribute| rule.attributes.contains(&wanted);
    if !has(RuleAttribute::Table(TABLE)) || !has(RuleAttribute::IpProtocol(IpProtocol::Tcp)) {
        return None;
    }
    let (mut interface, mut to, mut mark) = (None, all(rule.header.family), 0);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Iifname(name) => interface = Some(name.clone()),
            RuleAttribute::Destination(addr) => {
                to = IpNet::new(*addr, rule.header.dst_len).ok()?;
            }
            RuleAttribute::FwMark(bits) => mark = *bits,
            _ => {}
        }
    }
    Some(InterfaceRule {
        interface: interface?,
        to,
        mark,
    })
}

fn all(family: AddressFamily) -> IpNet {
    if family == AddressFamily::Inet {
        IpNet::V4(ipnet::Ipv4Net::default())
    } else {
        IpNet::V6(ipnet::Ipv6Net::default())
    }
}

/// A rule as the kernel takes it.
pub fn message(family: AddressFamily, rule: &InterfaceRule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Iifname(rule.interface.clone()),
        RuleAttribute::IpProtocol(IpProtocol::Tcp),
        RuleAttribute::Table(TABLE),
    ];
    if rule.mark != 0 {
        let mark = [
            RuleAttribute::FwMark(rule.mark),
            RuleAttribute::FwMask(rule.mark),
        ];
        message.attributes.extend(mark);
    }
    if rule.to.prefix_len() != 0 {
        message.header.dst_len = rule.to.prefix_len();
        let to = RuleAttribute::Destination(rule.to.network());
        message.attributes.push(to);
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_read_as_it_was_written() {
        for (family, to, mark) in [
            (AddressFamily::Inet, "0.0.0.0/0", 15006),
            (AddressFamily::Inet, "10.0.0.0/8", 0),
            (AddressFamily::Inet6, "::/0", 0),
            (AddressFamily::Inet6, "fd00::/8", 15006),
        ] {
            let rule = InterfaceRule {
                interface: "eth1".to_owned(),
                to: to.parse().unwrap(),
                mark,
            };
            assert_eq!(ours(&message(family, &rule)), Some(rule));
        }
    }

    #[test]
    fn other_rules_are_none_of_ours() {
        let rule = InterfaceRule {
            interface: "eth1".to_owned(),
            to: "10.0.0.0/8".parse().unwrap(),
            mark: 15006,
        };
        let of = |at: usize| {
            let mut message = message(AddressFamily::Inet, &rule);
            message.attributes.remove(at);
            ours(&message)
        };
        assert_eq!([of(0), of(1), of(2)], [None, None, None]);
    }
}
