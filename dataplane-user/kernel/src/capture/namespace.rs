//! Network namespaces: their identity, addresses and links.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    os::{
        fd::{AsFd as _, AsRawFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkMessage},
    nsid::{NsidAttribute, NsidMessage},
};

use crate::{namespaces, opener, rtnetlink::Netlink, sys};

/// A network namespace of this machine.
#[derive(Debug)]
pub struct Namespace {
    /// Keeps it.
    pub file: OwnedFd,
    /// Its number for programs (`SO_NETNS_COOKIE`).
    pub cookie: u64,
    /// The device and the inode number of its file, which are equal by every path.
    pub inode: (u64, u64),
}

/// The network namespace that this thread is in.
///
/// # Errors
/// If the kernel refuses.
pub fn this_namespace() -> io::Result<Namespace> {
    let file = fs::File::from(opener::this_namespace()?);
    let metadata = file.metadata()?;
    Ok(Namespace {
        file: file.into(),
        cookie: sys::netns_cookie()?,
        inode: (metadata.dev(), metadata.ino()),
    })
}

/// Returns the addresses of the network namespace that this thread is in, without loopback and link-local ones.
///
/// # Errors
/// If the kernel refuses.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    let all = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    for answer in Netlink::open()?.list(&all)? {
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
    Ok(addresses)
}

/// The numbers of the interfaces in a network namespace, by name.
///
/// # Errors
/// If the namespace cannot be entered.
pub fn indices(namespace: &Namespace) -> io::Result<BTreeMap<String, u32>> {
    let all = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let links = namespaces::within(namespace.file.as_fd(), || Netlink::open()?.list(&all))?;
    let found = links.into_iter().filter_map(|answer| {
        let RouteNetlinkMessage::NewLink(link) = answer else {
            return None;
        };
        let mut names = link.attributes.into_iter();
        let name = names.find_map(|what| match what {
            LinkAttribute::IfName(name) => Some(name),
            _ => None,
        });
        Some((name?, link.header.index))
    });
    Ok(found.collect())
}

/// Whether a network namespace belongs to this process's user namespace, which is the node's: then a process made it
/// that may do as much as root on the node. A namespace that a container has made for itself belongs to the container's
/// user namespace.
///
/// # Errors
/// If the kernel refuses.
pub fn is_the_nodes(namespace: &Namespace) -> io::Result<bool> {
    let own = fs::metadata("/proc/self/ns/user")?;
    let owner = match sys::owner_of_namespace(namespace.file.as_fd()) {
        Ok(owner) => fs::File::from(owner).metadata()?,
        // It belongs to one that this process is not in.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok((owner.dev(), owner.ino()) == (own.dev(), own.ino()))
}

/// Whether a network namespace is at the other end of some link of this thread's: the kernel gave it
/// a number here then.
///
/// # Errors
/// If the kernel refuses.
pub fn is_linked(namespace: &Namespace) -> io::Result<bool> {
    number(&mut Netlink::open()?, namespace).map(|number| number.is_some())
}

/// Returns the id that a network namespace has in the namespace in which the socket was opened; `None` if it has no id
/// there.
pub fn number(netlink: &mut Netlink, namespace: &Namespace) -> io::Result<Option<i32>> {
    let mut message = NsidMessage::default();
    let fd = u32::try_from(namespace.file.as_raw_fd()).unwrap_or(u32::MAX);
    message.attributes = vec![NsidAttribute::Fd(fd)];
    let answers = netlink.ask(&RouteNetlinkMessage::GetNsId(message))?;
    Ok(answers.iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewNsId(found) => {
            let mut attributes = found.attributes.iter();
            attributes.find_map(|attribute| match attribute {
                NsidAttribute::Id(id) if *id >= 0 => Some(*id),
                _ => None,
            })
        }
        _ => None,
    }))
}
