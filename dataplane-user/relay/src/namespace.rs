//! Sockets in workloads' network namespaces. A socket belongs to the namespace in which it was made, also if a process
//! in another namespace uses it.

use std::{collections::HashMap, io, net::IpAddr, os::fd::OwnedFd};

use super::{
    attachment::{Attached, Namespace},
    socket,
};

/// Sockets of one workload and family that are opened at a time, at most: opening them takes a switch to another
/// process and back.
const AT_A_TIME: usize = 8;
/// Sockets that a worker keeps for the next connections, at most.
const KEPT: usize = 32;

/// A worker's sockets for the next connections of busy workloads.
#[derive(Debug, Default)]
pub struct Stock {
    /// The shelves by attachment and family.
    shelves: HashMap<(u64, bool), Shelf>,
    kept: usize,
}

#[derive(Debug)]
struct Shelf {
    sockets: Vec<OwnedFd>,
    /// How many are opened the next time.
    next: usize,
}

impl Stock {
    /// A new socket, in the namespace from which an attachment's connections are made.
    ///
    /// # Errors
    /// If none can be opened.
    pub fn take(&mut self, attached: &Attached, v4: bool) -> io::Result<OwnedFd> {
        let Some(Namespace { open, .. }) = &attached.namespace else {
            return socket::new(v4);
        };
        let kept = self.shelves.entry((attached.id, v4)).or_insert(Shelf {
            sockets: Vec::new(),
            next: 1,
        });
        if let Some(socket) = kept.sockets.pop() {
            self.kept -= 1;
            return Ok(socket);
        }
        let room = KEPT.saturating_sub(self.kept);
        let mut opened = open(v4, kept.next.min(room + 1))?;
        kept.next = (kept.next * 2).min(AT_A_TIME);
        let first = opened.pop();
        self.kept += opened.len();
        kept.sockets = opened;
        first.ok_or_else(|| io::Error::other("no socket was opened"))
    }

    /// Closes an attachment's spare sockets. Sockets keep their namespace alive, and with it the interfaces of a
    /// removed pod.
    pub fn leave(&mut self, attachment: u64) {
        for v4 in [true, false] {
            let removed = self.shelves.remove(&(attachment, v4));
            self.kept -= removed.map_or(0, |kept| kept.sockets.len());
        }
    }

    /// Closes all spare sockets.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether there are spare sockets.
    pub fn has_some(&self) -> bool {
        self.kept > 0
    }
}

/// The addresses of this network namespace's interfaces.
///
/// # Errors
/// If the query to the kernel fails.
pub fn local_addresses() -> io::Result<Box<[IpAddr]>> {
    let addresses = nix::ifaddrs::getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    Ok(addresses.collect())
}
