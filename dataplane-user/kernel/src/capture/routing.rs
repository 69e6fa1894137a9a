//! The rules and routes of a mesh, in workloads' network namespaces and the node's: by these, answers to a client's
//! address come back to the proxy ([`route_answers`]), and packets go to the sockets to which the programs assigned
//! them ([`route_to_sockets`]).

use std::{
    fs::File,
    io::{self, Write as _},
};

use dataplane_common::capture::FROM_CLIENT;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use super::listeners::is_v6_off;
use crate::{opener, rtnetlink::Netlink, sysctl};

/// The routing table by which answers to a client's address come back to the proxy.
pub const TABLE: u32 = 15_006;
/// The condition of a rule on a packet's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The bits that are looked at.
    pub mask: u32,
    /// Their value.
    pub value: u32,
}

impl Mark {
    /// Matches marks that have all these bits. Other bits of the mark may have any value, because other programs use
    /// them.
    pub const fn with(bits: u32) -> Self {
        Self {
            mask: bits,
            value: bits,
        }
    }
}

/// The sysctl by which answers have the mark of the connection that they answer.
pub const FWMARK_ACCEPT: &str = "ipv4/tcp_fwmark_accept";
/// The sysctls by which packets that answer for no socket, such as the reset of a closed port, have the mark of the packet
/// that they answer.
pub const FWMARK_REFLECT: [&str; 2] = ["ipv4/fwmark_reflect", "ipv6/fwmark_reflect"];

/// Returns a message with the reason why [`FWMARK_ACCEPT`] cannot be set, and the remedy.
pub fn cannot_accept_marks(error: &io::Error) -> String {
    let otherwise = "set mesh.proxy.keepSource to false";
    let reason = sysctl::reason(error, "mesh", "mesh", otherwise);
    format!("cannot set /proc/sys/net/{FWMARK_ACCEPT}: {reason}")
}

/// In the network namespace that this thread is in: has packets that answer the proxy, which has
/// connected from a client's address, come back to it. They have the mark of the connection or packet that they answer
/// (`net.ipv4.tcp_fwmark_accept` and `fwmark_reflect`, which are set here), and a route of their own.
///
/// # Errors
/// If the kernel refuses.
pub fn route_answers(mark: u32) -> io::Result<()> {
    route_to_sockets(mark)?;
    let settings = opener::mark_settings().unwrap_or_else(mark_settings);
    let set = settings.and_then(|settings| {
        let mut settings = settings.into_iter();
        settings.try_for_each(|mut setting| setting.write_all(b"1"))
    });
    set.map_err(|error| {
        let text = cannot_accept_marks(&error);
        io::Error::new(error.kind(), text)
    })
}

/// Opens the sysctls that [`route_answers`] sets. Leaves out the sysctls of a family that this kernel does not have.
///
/// # Errors
/// If a sysctl cannot be opened for writing.
pub fn mark_settings() -> io::Result<Vec<File>> {
    // The first one is IPv6's, too.
    let mut settings = vec![sysctl::open(FWMARK_ACCEPT)?];
    for name in FWMARK_REFLECT {
        match sysctl::open(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            setting => settings.push(setting?),
        }
    }
    Ok(settings)
}

/// Delivers packets that have these bits in their mark to local sockets, whatever their destination, in the network
/// namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn route_to_sockets(mark: u32) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        match route_family(&mut netlink, family, mark) {
            Err(_) if family == AddressFamily::Inet6 && is_v6_off() => {}
            done => done?,
        }
    }
    Ok(())
}

fn route_family(netlink: &mut Netlink, family: AddressFamily, mark: u32) -> io::Result<()> {
    let route = RouteNetlinkMessage::NewRoute(answers_route(family));
    netlink.request(&route, NLM_F_CREATE | NLM_F_REPLACE)?;
    let wanted = Mark::with(mark);
    if !rules(netlink, family)?.contains(&wanted) {
        let rule = RouteNetlinkMessage::NewRule(answers_rule(family, wanted));
        netlink.request(&rule, NLM_F_CREATE | NLM_F_EXCL)?;
    }
    Ok(())
}

/// The inverse of [`route_answers`] and [`route_to_sockets`]. It leaves the sysctls as they are, because another
/// process may rely on them now.
///
/// # Errors
/// If the kernel refuses.
pub fn route_answers_no_more(mark: u32) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // There may be several rules, of agents that did not check. A rule that does not exist is no error.
        let rules = rules(&mut netlink, family).unwrap_or_default();
        for known in rules.into_iter().filter(|known| known.value == mark) {
            let rule = RouteNetlinkMessage::DelRule(answers_rule(family, known));
            let _ = netlink.request(&rule, 0);
        }
        let route = RouteNetlinkMessage::DelRoute(answers_route(family));
        let _ = netlink.request(&route, 0);
    }
    Ok(())
}

pub fn answers_rule(family: AddressFamily, mark: Mark) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = family;
    rule.header.action = RuleAction::ToTable;
    rule.attributes = vec![
        RuleAttribute::FwMark(mark.value),
        RuleAttribute::FwMask(mark.mask),
        RuleAttribute::Table(TABLE),
    ];
    rule
}

pub fn answers_route(family: AddressFamily) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header = RouteHeader {
        address_family: family,
        table: RouteHeader::RT_TABLE_UNSPEC,
        protocol: RouteProtocol::Static,
        scope: RouteScope::Host,
        kind: RouteType::Local,
        ..RouteHeader::default()
    };
    // Loopback is number 1 in every namespace.
    route.attributes = vec![RouteAttribute::Table(TABLE), RouteAttribute::Oif(1)];
    route
}

/// Returns the marks of our rules. An agent must not make such a rule again: the kernel takes two rules without a
/// preference for different ones.
pub fn rules(netlink: &mut Netlink, family: AddressFamily) -> io::Result<Vec<Mark>> {
    Ok(netlink.rules(family)?.iter().filter_map(our_mark).collect())
}

/// Returns the mark of our rule in a message: only our rules have both this table and this bit.
fn our_mark(rule: &RuleMessage) -> Option<Mark> {
    let table = RuleAttribute::Table(TABLE);
    if !rule.attributes.contains(&table) {
        return None;
    }
    let (mut value, mut mask) = (0, u32::MAX);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(found) => value = *found,
            RuleAttribute::FwMask(found) => mask = *found,
            _ => {}
        }
    }
    (value & FROM_CLIENT != 0).then_some(Mark { mask, value })
}

/// Whether our route exists.
pub fn has_our_route(netlink: &mut Netlink, family: AddressFamily) -> io::Result<bool> {
    let is_ours = |route: &RouteMessage| {
        route.header.kind == RouteType::Local
            && route.attributes.contains(&RouteAttribute::Table(TABLE))
    };
    Ok(netlink.routes(family)?.iter().any(is_ours))
}
