//! The listening sockets of a proxy that is not ours, which need not know of us.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tracing::debug;

use crate::kernel::{self, Namespace, namespaces};

/// The sockets that listen at a port in a namespace, with the family of connections that they take;
/// only of those families that are `wanted`.
///
/// # Errors
/// If that cannot be read: nobody knows whether there is one.
pub fn listeners(
    namespace: &Namespace,
    port: u16,
    wanted: impl Fn(u32) -> bool,
) -> Result<Vec<(u32, OwnedFd)>, String> {
    if !wanted(4) && !wanted(6) {
        return Ok(Vec::new());
    }
    let read = || kernel::listening(port);
    let told = |error: io::Error| format!("cannot look for its proxy's listening socket: {error}");
    let sockets = namespaces::within(namespace.file.as_fd(), read).map_err(told)?;
    // One of IPv6 takes both, unless it says that it does not, which is asked when it is there.
    let mut inodes: HashMap<u64, &[u32]> = HashMap::new();
    for socket in sockets {
        let families: &[u32] = if socket.addr.is_ipv4() { &[4] } else { &[6, 4] };
        inodes.insert(socket.inode, families);
    }
    inodes.retain(|_, families| families.iter().any(|family| wanted(*family)));
    let mut found = Vec::new();
    for (inode, socket) in taken(&inodes).map_err(told)? {
        let only_v6 = rustix::net::sockopt::ipv6_v6only(&socket).unwrap_or(false);
        for family in inodes[&inode] {
            if *family == 4 && only_v6 || !wanted(*family) {
                continue;
            }
            match socket.try_clone() {
                Ok(socket) => found.push((*family, socket)),
                Err(error) => debug!("cannot keep a listening socket: {error}"),
            }
        }
    }
    Ok(found)
}

/// Descriptors of our own for sockets of other processes.
fn taken(inodes: &HashMap<u64, &[u32]>) -> io::Result<Vec<(u64, OwnedFd)>> {
    let mut found: Vec<(u64, OwnedFd)> = Vec::new();
    if inodes.is_empty() {
        return Ok(found);
    }
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let descriptors = fs::read_dir(process.path().join("fd"));
        for entry in descriptors.into_iter().flatten().flatten() {
            let Ok(link) = fs::read_link(entry.path()) else {
                continue;
            };
            let inode = link
                .to_str()
                .and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']'))
                .and_then(|inode| inode.parse().ok());
            let Some(inode) = inode.filter(|inode| inodes.contains_key(inode)) else {
                continue;
            };
            if found.iter().any(|(known, _)| *known == inode) {
                continue;
            }
            let number = entry.file_name().to_str().and_then(|n| n.parse().ok());
            let (Some(pid), Some(number)) = (Pid::from_raw(pid), number) else {
                continue;
            };
            let taken = pidfd_open(pid, PidfdFlags::empty())
                .and_then(|process| pidfd_getfd(process, number, PidfdGetfdFlags::empty()));
            match taken {
                Ok(socket) => found.push((inode, socket)),
                Err(error) => debug!(?pid, number, "cannot take a listening socket: {error}"),
            }
        }
    }
    Ok(found)
}
