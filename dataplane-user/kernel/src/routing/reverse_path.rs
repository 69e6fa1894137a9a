//! The kernel's check of the sources of IPv4 packets (`rp_filter`), and whether the programs can make this check too.

use std::{fs, io};

use netlink_packet_route::{
    AddressFamily,
    route::{RouteAttribute, RouteMessage, RouteType},
    rule::{RuleAttribute, RuleMessage},
};

use crate::{
    error::{Doing, Error},
    limits::number,
    rtnetlink::Netlink,
};

/// Returns the kernel's check of sources at an interface: 0 none, 1 that the route back leads to it, 2 that there is a
/// route back. The greater number of the interface's and of `all` counts.
pub fn reverse_path(interface: &str) -> u8 {
    let of = |name: &str| number(&format!("ipv4/conf/{name}/rp_filter"));
    of("all").max(of(interface)).unwrap_or(0)
}

/// Returns the kernel's check of sources at each interface of the network namespace that this thread is in, at `all`
/// and for new ones (`default`), if there is a check.
///
/// # Errors
/// If the query to the kernel fails.
pub fn reverse_paths() -> io::Result<Vec<(String, u8)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc/sys/net/ipv4/conf")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let asks = number(&format!("ipv4/conf/{name}/rp_filter")).unwrap_or(0);
        if asks != 0 {
            all.push((name, asks));
        }
    }
    all.sort();
    Ok(all)
}

/// Whether the programs learn by which interface the kernel would send to a source, wherever that is: no route has several
/// next hops, of which they learn one and the kernel takes any (`fib_info_nh_uses_dev` in `net/ipv4/fib_semantics.c`); and
/// no rule asks where a packet arrived, which the kernel leaves out of this question (`__fib_validate_source` in
/// `net/ipv4/fib_frontend.c`).
///
/// # Errors
/// If the query to the kernel fails.
pub fn shows_reverse_paths() -> Result<bool, Error> {
    let ask = || -> io::Result<bool> {
        let mut netlink = Netlink::open()?;
        let routes = netlink.routes(AddressFamily::Inet)?;
        let rules = netlink.rules(AddressFamily::Inet)?;
        Ok(!routes.iter().any(has_several_hops) && !rules.iter().any(asks_for_arrival))
    };
    ask().doing(|| "cannot ask for the routes and their rules".to_owned())
}

/// Whether a rule asks by which interface a packet has arrived.
fn asks_for_arrival(rule: &RuleMessage) -> bool {
    let arrives = |attribute: &RuleAttribute| matches!(attribute, RuleAttribute::Iifname(_));
    rule.attributes.iter().any(arrives)
}

fn has_several_hops(route: &RouteMessage) -> bool {
    if route.header.kind != RouteType::Unicast {
        return false;
    }
    let mut by_number = false;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::MultiPath(hops) => return hops.len() > 1,
            RouteAttribute::Oif(_) => return false,
            // The kernel may list next hops that are objects of their own by their number alone
            // (`net.ipv4.nexthop_compat_mode`).
            RouteAttribute::NhId(_) => by_number = true,
            _ => {}
        }
    }
    by_number
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::route::RouteNextHop;

    use super::*;

    fn route(attributes: Vec<RouteAttribute>) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.kind = RouteType::Unicast;
        route.attributes = attributes;
        route
    }

    #[test]
    fn several_next_hops_are_noticed() {
        let hops = |count| RouteAttribute::MultiPath(vec![RouteNextHop::default(); count]);
        let by_number = RouteAttribute::NhId(7);
        for (attributes, several) in [
            (vec![RouteAttribute::Oif(2)], false),
            (vec![hops(2)], true),
            (vec![hops(1)], false),
            (vec![by_number.clone(), RouteAttribute::Oif(2)], false),
            (vec![by_number.clone(), hops(2)], true),
            (vec![by_number], true),
        ] {
            let route = route(attributes);
            assert_eq!(has_several_hops(&route), several, "{route:?}");
        }
    }

    #[test]
    fn a_rule_that_asks_where_packets_arrive_is_noticed() {
        let mut rule = RuleMessage::default();
        rule.attributes = vec![RuleAttribute::Table(100)];
        assert!(!asks_for_arrival(&rule));
        rule.attributes
            .push(RuleAttribute::Iifname("eth1".to_owned()));
        assert!(asks_for_arrival(&rule));
    }
}
