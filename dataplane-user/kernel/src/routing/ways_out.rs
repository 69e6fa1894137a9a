//! Lists the interfaces by which a network namespace's routes lead out.

use std::{collections::BTreeMap, io, net::IpAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType},
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};

use crate::{
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
/// If the query to the kernel fails.
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
            let name = |index: u32| names.get(&index).cloned().unwrap_or_default();
            let routes = netlink.routes(family)?;
            all.extend(routes.iter().filter_map(|route| way(route, name)));
        }
        Ok(Some(all))
    };
    read().doing(|| "cannot list the routes".to_owned())
}

/// Whether the only routing rules are the kernel's own, and those for packets with a mark or by an interface, which a socket's
/// first packet does not have.
fn goes_by_main(netlink: &mut Netlink, family: AddressFamily) -> io::Result<bool> {
    Ok(netlink.rules(family)?.iter().all(is_usual))
}

/// Anything that is not known here may tell sockets' packets apart, or send them elsewhere.
fn is_usual(rule: &RuleMessage) -> bool {
    // With "not", a rule matches all other packets.
    if rule.header.flags.contains(RuleFlags::Invert) {
        return false;
    }
    let mut table = u32::from(rule.header.table);
    let (mut value, mut mask) = (0, u32::MAX);
    let mut by_interface = false;
    let mut asks_more = rule.header.src_len != 0 || rule.header.dst_len != 0;
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(found) => value = *found,
            RuleAttribute::FwMask(found) => mask = *found,
            // A socket's own packets have loopback as their incoming interface (`flowi_iif`).
            RuleAttribute::Iifname(name) if name != "lo" => by_interface = true,
            RuleAttribute::Table(found) => table = *found,
            // These numbers are the kernel's answers for attributes that the owner has not set.
            RuleAttribute::Priority(_)
            | RuleAttribute::Protocol(_)
            | RuleAttribute::SuppressPrefixLen(u32::MAX)
            | RuleAttribute::SuppressIfGroup(u32::MAX) => {}
            _ => asks_more = true,
        }
    }
    if value & mask != 0 || by_interface {
        return true;
    }
    // `RT_TABLE_LOCAL` and `RT_TABLE_DEFAULT`.
    let usual = [255, RouteHeader::RT_TABLE_MAIN, 253].map(u32::from);
    let is_known = usual.contains(&table) || table == OUR_TABLE;
    rule.header.action == RuleAction::ToTable && !asks_more && is_known
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

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(attributes: &[RuleAttribute]) -> RuleMessage {
        let mut rule = RuleMessage::default();
        rule.header.action = RuleAction::ToTable;
        rule.header.table = RouteHeader::RT_TABLE_MAIN;
        rule.attributes = attributes.to_vec();
        rule
    }

    #[test]
    fn rules_that_may_be_about_a_sockets_first_packet_are_not_usual() {
        use RuleAttribute::{
            FwMark, FwMask, Iifname, IpProtocol, SuppressIfGroup, SuppressPrefixLen, Table,
        };
        let tcp = IpProtocol(netlink_packet_route::IpProtocol::Tcp);
        let from = |name: &str| Iifname(name.to_owned());
        for usual in [
            &[][..],
            &[Table(255)],
            &[
                SuppressPrefixLen(u32::MAX),
                SuppressIfGroup(u32::MAX),
                Table(253),
            ],
            &[Table(77), FwMark(1)],
            &[Table(77), FwMark(3), FwMask(2)],
            &[Table(77), from("virt0"), tcp.clone()],
        ] {
            assert!(is_usual(&rule(usual)), "{usual:?}");
        }
        for other in [
            &[Table(77)][..],
            &[SuppressPrefixLen(0)],
            &[SuppressIfGroup(1)],
            &[Table(77), FwMark(0)],
            &[Table(77), FwMark(1), FwMask(2)],
            &[Table(77), from("lo")],
            &[tcp],
        ] {
            assert!(!is_usual(&rule(other)), "{other:?}");
        }
        for mut inverted in [rule(&[Table(77), FwMark(1)]), rule(&[from("virt0")])] {
            inverted.header.flags = RuleFlags::Invert;
            assert!(!is_usual(&inverted), "{inverted:?}");
        }
        let mut from_somebody = rule(&[]);
        from_somebody.header.src_len = 8;
        assert!(!is_usual(&from_somebody));
    }
}
