//! Which addresses are this host itself, by its routes: its interfaces' addresses, loopback's network, and what
//! `ip route add local` adds.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};

use super::{
    error::{Doing, Error},
    rtnetlink::Netlink,
};

/// The networks whose addresses are this host itself: the destinations of all routes of type `local`, in whichever
/// table.
///
/// # Errors
/// If the kernel does not tell.
pub fn host_networks() -> Result<Vec<IpNet>, Error> {
    let list = || -> io::Result<Vec<IpNet>> {
        let mut netlink = Netlink::open()?;
        netlink.filter()?;
        let mut all = Vec::new();
        for (family, nowhere) in [
            (AddressFamily::Inet, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            (AddressFamily::Inet6, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
        ] {
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            question.header.kind = RouteType::Local;
            let answers = match netlink.list(&RouteNetlinkMessage::GetRoute(question)) {
                // A kernel without that family.
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => continue,
                answers => answers?,
            };
            for answer in answers {
                if let RouteNetlinkMessage::NewRoute(route) = answer
                    && route.header.kind == RouteType::Local
                {
                    all.extend(destination(&route, nowhere));
                }
            }
        }
        Ok(all)
    };
    list().doing(|| "cannot ask for the host's own addresses".to_owned())
}

/// A route's destination; `everywhere` is the address of the default route's.
fn destination(route: &RouteMessage, everywhere: IpAddr) -> Option<IpNet> {
    let mut found = everywhere;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(addr)) => found = (*addr).into(),
            RouteAttribute::Destination(RouteAddress::Inet6(addr)) => found = (*addr).into(),
            _ => {}
        }
    }
    IpNet::new(found, route.header.destination_prefix_length).ok()
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
