//! By which interfaces a network namespace's routes lead out.

use std::{collections::BTreeMap, io, net::IpAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use super::{
    capture::OUR_TABLE,
    error::{Doing, Error},
    interfaces::interfaces,
    rtnetlink::Netlink,
};

/// A route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// The destinations.
    pub to: IpNet,
    /// The metric: of several routes to the same destinations, the smallest is taken.
    pub metric: u32,
    /// The names of the interfaces by which packets leave; none if they do not.
    pub by: Vec<String>,
}

/// The routes of table `main` of the network namespace that this thread is in. `None`: packets do not only go by this table.
///
/// # Errors
/// If the kernel does not tell.
pub fn ways_out() -> Result<Option<Vec<Way>>, Error> {
    let names: BTreeMap<u32, String> = interfaces()?
        .into_iter()
        .map(|interface| (interface.index, interface.name))
        .collect();
    let read = || -> io::Result<Option<Vec<Way>>> {
        let mut netlink = Netlink::open()?;
        let mut all = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            if !goes_by_main(&mut netlink, family)? {
                return Ok(None);
            }
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            let answers = match netlink.list(&RouteNetlinkMessage::GetRoute(question)) {
                // A kernel without that family.
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => continue,
                answers => answers?,
            };
            for answer in answers {
                if let RouteNetlinkMessage::NewRoute(route) = answer
                    && route.header.address_family == family
                {
                    all.extend(way(&route, |index| {
                        names.get(&index).cloned().unwrap_or_default()
                    }));
                }
            }
        }
        Ok(Some(all))
    };
    read().doing(|| "cannot list the routes".to_owned())
}

/// Whether the only routing rules are the kernel's own, and those for packets with a mark or by an interface, which a socket's
/// first packet does not have.
fn goes_by_main(netlink: &mut Netlink, family: AddressFamily) -> io::Result<bool> {
    let mut question = RuleMessage::default();
    question.header.family = family;
    let answers = netlink.list(&RouteNetlinkMessage::GetRule(question))?;
    Ok(answers.iter().all(|answer| match answer {
        RouteNetlinkMessage::NewRule(rule) if rule.header.family == family => is_usual(rule),
        _ => true,
    }))
}

fn is_usual(rule: &RuleMessage) -> bool {
    let mut table = u32::from(rule.header.table);
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(mark) if *mark != 0 => return true,
            RuleAttribute::Iifname(_) => return true,
            RuleAttribute::Table(found) => table = *found,
            _ => {}
        }
    }
    // `RT_TABLE_LOCAL` and `RT_TABLE_DEFAULT`.
    let usual = [255, RouteHeader::RT_TABLE_MAIN, 253];
    let has_no_source = rule.header.src_len == 0 && rule.header.dst_len == 0;
    rule.header.action == RuleAction::ToTable
        && has_no_source
        && (usual.map(u32::from).contains(&table) || table == OUR_TABLE)
}

/// A route of table `main`.
fn way(route: &RouteMessage, name: impl Fn(u32) -> String) -> Option<Way> {
    let length = route.header.destination_prefix_length;
    let mut found = Way {
        to: if route.header.address_family == AddressFamily::Inet {
            IpNet::V4(Ipv4Net::default())
        } else {
            IpNet::V6(Ipv6Net::default())
        },
        metric: 0,
        by: Vec::new(),
    };
    let mut table = u32::from(route.header.table);
    let is_out = route.header.kind == RouteType::Unicast;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Table(of) => table = *of,
            RouteAttribute::Priority(metric) => found.metric = *metric,
            RouteAttribute::Destination(to) => {
                let addr: IpAddr = match to {
                    RouteAddress::Inet(addr) => (*addr).into(),
                    RouteAddress::Inet6(addr) => (*addr).into(),
                    _ => return None,
                };
                found.to = IpNet::new(addr, length).ok()?;
            }
            RouteAttribute::Oif(index) if is_out => found.by.push(name(*index)),
            RouteAttribute::MultiPath(hops) if is_out => {
                found
                    .by
                    .extend(hops.iter().map(|hop| name(hop.interface_index)));
            }
            _ => {}
        }
    }
    (table == u32::from(RouteHeader::RT_TABLE_MAIN)).then_some(found)
}
