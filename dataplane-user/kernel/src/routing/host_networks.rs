//! The addresses that the routes assign to this host itself: its interfaces' addresses, loopback's network, and the
//! destinations of `ip route add local`. A local default route names no address. Transparent proxies add such a route
//! to a table that only marked packets reach, and so does the agent for capture by packets.

use std::{io, net::IpAddr};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};

use crate::{
    error::{Doing, Error},
    rtnetlink::Netlink,
};

/// Returns the networks whose addresses are this host itself: the destinations of all routes of type `local` except
/// default routes, in any routing table.
///
/// # Errors
/// If the kernel cannot list the routes.
pub fn host_networks() -> Result<Vec<IpNet>, Error> {
    let list = || -> io::Result<Vec<IpNet>> {
        let mut netlink = Netlink::open()?;
        netlink.filter()?;
        let mut all = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            question.header.kind = RouteType::Local;
            for answer in netlink.list_of_family(&RouteNetlinkMessage::GetRoute(question))? {
                if let RouteNetlinkMessage::NewRoute(route) = answer
                    && route.header.kind == RouteType::Local
                {
                    all.extend(destination(&route));
                }
            }
        }
        Ok(all)
    };
    list().doing(|| "cannot ask for the host's own addresses".to_owned())
}

/// Returns a route's destination, `None` for a default route.
fn destination(route: &RouteMessage) -> Option<IpNet> {
    let length = route.header.destination_prefix_length;
    if length == 0 {
        return None;
    }
    route.attributes.iter().find_map(|attribute| {
        let addr: IpAddr = match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(addr)) => (*addr).into(),
            RouteAttribute::Destination(RouteAddress::Inet6(addr)) => (*addr).into(),
            _ => return None,
        };
        IpNet::new(addr, length).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_host_itself() {
        let all = host_networks().unwrap();
        let loopback = IpAddr::from([127, 0, 0, 1]);
        assert!(all.iter().any(|net| net.contains(&loopback)), "{all:?}");
        assert!(!all.contains(&"0.0.0.0/0".parse().unwrap()), "{all:?}");
    }
}
