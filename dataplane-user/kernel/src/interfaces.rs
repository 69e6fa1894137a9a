//! The interfaces of this network namespace and their addresses, and news of them.

use std::{collections::BTreeMap, fs, io, net::IpAddr};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope},
    link::{LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteType},
    rule::{RuleAttribute, RuleMessage},
};
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};

use super::{
    error::{Doing, Error},
    rtnetlink::Netlink,
};

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct Interface {
    /// The kernel's number of it.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its kind: `veth`, `bridge`, `vxlan` and so on; empty for hardware.
    pub kind: String,
    /// The header of its packets before the IP header.
    pub link: Link,
    /// Whether it is up.
    pub up: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// The network namespace of its other end, by the number that this one knows it by, if that is another.
    pub peer: Option<i32>,
    /// The bridge, bond, switch or VRF that it is a port of: its number.
    pub master: Option<u32>,
    /// The interface that it stands on, as a VLAN does, or its other end, if that is in this network namespace: its number.
    pub below: Option<u32>,
    /// Whether a default route leads out by it.
    pub default_route: bool,
    /// Its addresses that mean something elsewhere (scope global), with the networks that they are
    /// in, in the kernel's order; secondary and deprecated ones, and those that are not usable yet,
    /// are left out.
    pub addresses: Vec<IpNet>,
    /// Whether it will have such an IPv6 address in a moment, if no other host on the link has it (RFC 4862 section
    /// 5.4).
    pub tentative: bool,
}

/// The header before the IP header of packets at an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// Ethernet's header.
    #[default]
    Ethernet,
    /// Nothing: WireGuard, tun, tunnels of IP in IP.
    Bare,
    /// Something else: PPP, GRE, InfiniBand; the number of `include/uapi/linux/if_arp.h`.
    Other(u16),
}

impl From<LinkLayerType> for Link {
    fn from(kind: LinkLayerType) -> Self {
        match kind {
            LinkLayerType::Ether | LinkLayerType::Loopback => Self::Ethernet,
            // The types in `dev_is_mac_header_xmit` (`include/linux/if_arp.h`) that show programs no outer header. GRE
            // is not among them, because it may show one.
            LinkLayerType::None
            | LinkLayerType::Rawip
            | LinkLayerType::Tunnel
            | LinkLayerType::Tunnel6
            | LinkLayerType::Sit => Self::Bare,
            other => Self::Other(other.into()),
        }
    }
}

/// Every interface, in the order of the numbers.
///
/// # Errors
/// If the query to the kernel fails.
pub fn interfaces() -> Result<Vec<Interface>, Error> {
    list().doing(|| "cannot ask for the network interfaces".to_owned())
}

/// Every interface, without its addresses and routes, in the order of the numbers: one list of the kernel's, not four. Where many
/// interfaces come and go, each list waits for those changes.
///
/// # Errors
/// If the query to the kernel fails.
pub fn links() -> Result<Vec<Interface>, Error> {
    let list = || -> io::Result<_> { Ok(links_by(&mut Netlink::open()?)?.into_values().collect()) };
    list().doing(|| "cannot ask for the network interfaces".to_owned())
}

/// Returns the index of the interface by which an address is reached without a gateway; `None` if it is reached by a
/// gateway, or not at all.
///
/// # Errors
/// If the query to the kernel fails.
pub fn way_to(addr: IpAddr) -> io::Result<Option<u32>> {
    way_by(&mut Netlink::open()?, addr)
}

/// Like [`way_to`], in the network namespace in which the socket was opened.
pub(crate) fn way_by(netlink: &mut Netlink, addr: IpAddr) -> io::Result<Option<u32>> {
    let way = way_out(netlink, addr)?;
    Ok(way.filter(|way| !way.has_another_hop).map(|way| way.index))
}

/// Returns the index of the interface by which packets to an address leave; `None` if they stay on this host, or have
/// no route.
///
/// # Errors
/// If the kernel cannot look up the route.
pub fn leaves_by(addr: IpAddr) -> io::Result<Option<u32>> {
    let way = way_out(&mut Netlink::open()?, addr)?;
    Ok(way.map(|way| way.index))
}

/// The outgoing interface of packets to an address.
struct WayOut {
    /// The interface's number.
    index: u32,
    /// Whether it goes to a gateway there.
    has_another_hop: bool,
}

fn way_out(netlink: &mut Netlink, addr: IpAddr) -> io::Result<Option<WayOut>> {
    let mut question = RouteMessage::default();
    question.header.address_family = match addr {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    question.header.destination_prefix_length = if addr.is_ipv4() { 32 } else { 128 };
    question.attributes = vec![RouteAttribute::Destination(addr.into())];
    let answers = match netlink.ask(&RouteNetlinkMessage::GetRoute(question)) {
        Ok(answers) => answers,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let found = answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewRoute(route) => Some(route),
        _ => None,
    });
    let Some(route) = found.filter(|route| route.header.kind == RouteType::Unicast) else {
        return Ok(None);
    };
    let (mut out, mut has_another_hop) = (None, false);
    for attribute in route.attributes {
        match attribute {
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => has_another_hop = true,
            RouteAttribute::Oif(index) => out = Some(index),
            _ => {}
        }
    }
    Ok(out.map(|index| WayOut {
        index,
        has_another_hop,
    }))
}

fn links_by(netlink: &mut Netlink) -> io::Result<BTreeMap<u32, Interface>> {
    let links = netlink.list(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let found = links.into_iter().filter_map(|answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some((link.header.index, interface(link))),
        _ => None,
    });
    Ok(found.collect())
}

fn list() -> io::Result<Vec<Interface>> {
    let mut netlink = Netlink::open()?;
    let mut found = links_by(&mut netlink)?;
    for answer in netlink.list(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))? {
        if let RouteNetlinkMessage::NewAddress(message) = answer
            && let Some(interface) = found.get_mut(&message.header.index)
        {
            interface.addresses.extend(address(&message));
            interface.tentative |= is_tentative(&message);
        }
    }
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        for index in netlink.routes(family)?.iter().flat_map(ways_out) {
            if let Some(interface) = found.get_mut(&index) {
                interface.default_route = true;
            }
        }
    }
    Ok(found.into_values().collect())
}

fn interface(link: LinkMessage) -> Interface {
    let flags = link.header.flags;
    let mut interface = Interface {
        index: link.header.index,
        link: link.header.link_layer_type.into(),
        up: flags.contains(LinkFlags::Up),
        loopback: flags.contains(LinkFlags::Loopback),
        ..Interface::default()
    };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name = name,
            LinkAttribute::LinkNetNsId(netns) => interface.peer = Some(netns),
            LinkAttribute::Controller(index) if index != 0 => interface.master = Some(index),
            LinkAttribute::Link(index) if index != 0 => interface.below = Some(index),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    if let LinkInfo::Kind(kind) = info {
                        interface.kind = kind.to_string();
                    }
                }
            }
            _ => {}
        }
    }
    if interface.peer.is_some() {
        // The number is that namespace's.
        interface.below = None;
    }
    interface
}

/// Whether the address will be usable in a moment.
fn is_tentative(message: &AddressMessage) -> bool {
    let flags = message.header.flags;
    message.header.scope == AddressScope::Universe
        && flags.contains(AddressHeaderFlags::Tentative)
        && !flags.contains(AddressHeaderFlags::Dadfailed)
}

/// Returns the address if the kernel prefers it as the source of outgoing packets (`inet_select_addr` for IPv4,
/// `ipv6_dev_get_saddr` for IPv6).
fn address(message: &AddressMessage) -> Option<IpNet> {
    let header = &message.header;
    let unusable = AddressHeaderFlags::Secondary
        | AddressHeaderFlags::Deprecated
        | AddressHeaderFlags::Tentative
        | AddressHeaderFlags::Dadfailed;
    let mut flags = header.flags;
    if header.family == AddressFamily::Inet6 {
        // There it says that the address is a temporary one, which the kernel prefers.
        flags.remove(AddressHeaderFlags::Secondary);
    }
    if header.scope != AddressScope::Universe || flags.intersects(unusable) {
        return None;
    }
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            // On a point-to-point interface the other one is the peer's.
            AddressAttribute::Local(local) => found = Some(*local),
            AddressAttribute::Address(address) => found = found.or(Some(*address)),
            _ => {}
        }
    }
    IpNet::new(found?, header.prefix_len).ok()
}

/// The interfaces by which a default route leads out.
fn ways_out(route: &RouteMessage) -> Vec<u32> {
    let header = &route.header;
    if header.destination_prefix_length != 0
        || header.kind != RouteType::Unicast
        || header.table != RouteHeader::RT_TABLE_MAIN
    {
        return Vec::new();
    }
    let mut ways = Vec::new();
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => ways.push(*index),
            RouteAttribute::MultiPath(hops) => {
                ways.extend(hops.iter().map(|hop| hop.interface_index));
            }
            _ => {}
        }
    }
    ways
}

/// Whether the route of a packet depends on its addresses, its mark, its class and its incoming interface, but not on
/// its ports: no rule (`ip rule`) matches ports or a protocol, and the choice among several next hops does not depend
/// on ports (`fib_multipath_hash_policy` in `Documentation/networking/ip-sysctl.rst`). `false` if the query to the
/// kernel fails.
pub fn ways_by_address() -> bool {
    let by_ports = |rule: &RuleMessage| {
        rule.attributes.iter().any(|attribute| {
            matches!(
                attribute,
                RuleAttribute::IpProtocol(_)
                    | RuleAttribute::SourcePortRange(_)
                    | RuleAttribute::DestinationPortRange(_)
            )
        })
    };
    let rules = || -> io::Result<bool> {
        let mut netlink = Netlink::open()?;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            if netlink.rules(family)?.iter().any(by_ports) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let hops = ["ipv4", "ipv6"].iter().all(|family| {
        let policy = format!("/proc/sys/net/{family}/fib_multipath_hash_policy");
        // Not there: a kernel that does not choose, or not of this family.
        fs::read_to_string(policy).map_or(true, |policy| policy.trim() == "0")
    });
    hops && rules().unwrap_or(false)
}

/// Tells when interfaces, addresses, routes or their rules change.
pub struct News {
    socket: TokioSocket,
}

// `include/uapi/linux/rtnetlink.h`
const RTNLGRP_LINK: u32 = 1;
const RTNLGRP_IPV4_IFADDR: u32 = 5;
const RTNLGRP_IPV4_ROUTE: u32 = 7;
const RTNLGRP_IPV4_RULE: u32 = 8;
const RTNLGRP_IPV6_IFADDR: u32 = 9;
const RTNLGRP_IPV6_ROUTE: u32 = 11;
const RTNLGRP_IPV6_RULE: u32 = 19;

impl News {
    /// Starts to receive the changes in this thread's network namespace. Must be called within a runtime.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn new() -> Result<Self, Error> {
        let open = || -> io::Result<Self> {
            let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
            socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
            for group in [
                RTNLGRP_LINK,
                RTNLGRP_IPV4_IFADDR,
                RTNLGRP_IPV4_ROUTE,
                RTNLGRP_IPV4_RULE,
                RTNLGRP_IPV6_IFADDR,
                RTNLGRP_IPV6_ROUTE,
                RTNLGRP_IPV6_RULE,
            ] {
                socket.socket_mut().add_membership(group)?;
            }
            Ok(Self { socket })
        };
        open().doing(|| "cannot listen for changes of the network interfaces".to_owned())
    }

    /// Waits until something has changed. The caller then reads the new state, so nothing is lost if several changes
    /// come before it reads.
    ///
    /// # Errors
    /// If the kernel reports no more changes.
    pub async fn changed(&mut self) -> io::Result<()> {
        let mut buffer = Vec::with_capacity(64 * 1024);
        loop {
            buffer.clear();
            match self.socket.recv(&mut buffer).await {
                Ok(()) if matters(&buffer) => return Ok(()),
                Ok(()) => {}
                // More than it keeps: something has certainly changed.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether a datagram of news can concern us. Routes come and go by the thousands on some nodes, and only default routes
/// count, those to the host itself, and those with several next hops; the kernel also says that a link has sent something.
fn matters(datagram: &[u8]) -> bool {
    const RTM_NEWROUTE: u16 = 24;
    const RTM_DELROUTE: u16 = 25;
    const HEADER: usize = 16;
    const RTN_LOCAL: u8 = 2;
    const RTA_OIF: u16 = 4;
    let kind = datagram.get(4..6).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match kind {
        // struct rtmsg: family, length of the destination's prefix, and so on; the eighth byte is the type.
        Some(RTM_NEWROUTE | RTM_DELROUTE) => {
            datagram.get(HEADER + 1) == Some(&0)
                || datagram.get(HEADER + 7) == Some(&RTN_LOCAL)
                // A route with several next hops has the interface in each next hop, and not in the route.
                || !has_attribute(datagram.get(HEADER + 12..).unwrap_or_default(), RTA_OIF)
        }
        _ => true,
    }
}

/// Whether there is an attribute of this kind among those of a message (`struct rtattr`).
fn has_attribute(mut attributes: &[u8], kind: u16) -> bool {
    while let Some(&[a, b, c, d]) = attributes.first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        if u16::from_ne_bytes([c, d]) == kind {
            return true;
        }
        if length < 4 {
            return false;
        }
        let next = length.next_multiple_of(4);
        attributes = attributes.get(next..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found() {
        let all = interfaces().unwrap();
        let lo = all.iter().find(|i| i.index == 1).expect("interface 1");
        assert_eq!((lo.name.as_str(), lo.loopback), ("lo", true));
        assert_eq!(lo.addresses, Vec::new(), "of scope host");
    }

    #[test]
    fn only_some_routes_matter() {
        let mut news = vec![0; 28];
        // To which network, and by which interface.
        for kind in [1, 4] {
            news.extend([8, 0, kind, 0, 2, 0, 0, 0]);
        }
        news[4] = 24;
        assert!(matters(&news), "a default route");
        news[17] = 32;
        news[23] = 1;
        assert!(!matters(&news));
        // RTA_MULTIPATH, or RTA_NH_ID alone.
        for kind in [9, 30] {
            news[38] = kind;
            assert!(matters(&news), "several next hops");
        }
        news[38] = 4;
        assert!(!matters(&news));
        news[23] = 2;
        assert!(matters(&news));
        news[4] = 16;
        assert!(matters(&news));
    }
}
