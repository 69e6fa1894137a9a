//! What is known of a network namespace.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    os::fd::{AsRawFd, OwnedFd},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    nsid::{NsidAttribute, NsidMessage},
};

use crate::kernel::{rtnetlink::Netlink, sys};

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
    let file = fs::File::open("/proc/thread-self/ns/net")?;
    let mut addresses = Vec::new();
    let mut interfaces = BTreeMap::new();
    for interface in nix::ifaddrs::getifaddrs()? {
        let name = interface.interface_name;
        if !interfaces.contains_key(&name) {
            match nix::net::if_::if_nametoindex(name.as_str()) {
                Ok(index) => interfaces.insert(name.clone(), index),
                // The interface has gone since, and its addresses with it.
                Err(nix::errno::Errno::ENODEV | nix::errno::Errno::ENXIO) => continue,
                Err(error) => return Err(error.into()),
            };
        }
        let Some(address) = interface.address else {
            continue;
        };
        if let Some(v4) = address.as_sockaddr_in() {
            addresses.push(IpAddr::V4(v4.ip()));
        } else if let Some(v6) = address.as_sockaddr_in6() {
            addresses.push(IpAddr::V6(v6.ip()));
        }
    }
    addresses.retain(|addr| match addr {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    });
    Ok(Namespace {
        file: file.into(),
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
