//! What is known of a network namespace.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkMessage},
    nsid::{NsidAttribute, NsidMessage},
};

use crate::kernel::{opener, rtnetlink::Netlink, sys};

/// A network namespace of this machine.
#[derive(Debug)]
pub struct Namespace {
    /// Keeps it.
    pub file: OwnedFd,
    /// Its number for programs (`SO_NETNS_COOKIE`).
    pub cookie: u64,
    /// Its addresses, but for loopback and link-local ones.
    pub addresses: Vec<IpAddr>,
    /// Its interfaces, by name.
    pub interfaces: BTreeMap<String, u32>,
}

/// What is known of the network namespace that this thread is in.
///
/// # Errors
/// The kernel's refusal.
pub fn this_namespace() -> io::Result<Namespace> {
    let mut netlink = Netlink::open()?;
    let mut interfaces = BTreeMap::new();
    for answer in netlink.list(&RouteNetlinkMessage::GetLink(LinkMessage::default()))? {
        let RouteNetlinkMessage::NewLink(link) = answer else {
            continue;
        };
        let name = link.attributes.into_iter().find_map(|what| match what {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        });
        interfaces.extend(name.map(|name| (name, link.header.index)));
    }
    let mut addresses = Vec::new();
    for answer in netlink.list(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))? {
        let RouteNetlinkMessage::NewAddress(message) = answer else {
            continue;
        };
        let (mut own, mut other) = (None, None);
        for what in message.attributes {
            match what {
                // On a link between two, the address is the other's.
                AddressAttribute::Local(address) => own = Some(address),
                AddressAttribute::Address(address) => other = Some(address),
                _ => {}
            }
        }
        addresses.extend(own.or(other));
    }
    addresses.retain(|addr| match addr {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    });
    Ok(Namespace {
        file: opener::this_namespace()?,
        cookie: sys::netns_cookie()?,
        addresses,
        interfaces,
    })
}

/// Whether a network namespace is at the other end of some link of this thread's: the kernel gave it
/// a number here then.
///
/// # Errors
/// The kernel's refusal.
pub fn is_linked(namespace: &Namespace) -> io::Result<bool> {
    let mut message = NsidMessage::default();
    let fd = u32::try_from(namespace.file.as_raw_fd()).unwrap_or(u32::MAX);
    message.attributes = vec![NsidAttribute::Fd(fd)];
    let answers = Netlink::open()?.ask(&RouteNetlinkMessage::GetNsId(message))?;
    Ok(answers.iter().any(|answer| match answer {
        RouteNetlinkMessage::NewNsId(found) => found
            .attributes
            .iter()
            .any(|attribute| matches!(attribute, NsidAttribute::Id(id) if *id >= 0)),
        _ => false,
    }))
}
