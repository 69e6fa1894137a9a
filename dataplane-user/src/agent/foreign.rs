//! The listening sockets of a proxy that is not ours, which need not know of us.

use std::{
    collections::HashMap,
    fs,
    os::fd::{AsFd, OwnedFd},
};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tracing::debug;

use crate::kernel::{Namespace, namespaces};

/// `TCP_LISTEN` in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// The sockets that listen at a port in a namespace, with the family of connections that they take;
/// only of those families that are `wanted`.
pub fn listeners(
    namespace: &Namespace,
    port: u16,
    wanted: impl Fn(u32) -> bool,
) -> Vec<(u32, OwnedFd)> {
    if !wanted(4) && !wanted(6) {
        return Vec::new();
    }
    let read = || {
        // "thread-self": the namespace of whoever asks.
        let table = |name| fs::read_to_string(format!("/proc/thread-self/net/{name}"));
        Ok((
            table("tcp").unwrap_or_default(),
            table("tcp6").unwrap_or_default(),
        ))
    };
    let Ok((v4, v6)) = namespaces::within(namespace.file.as_fd(), read) else {
        return Vec::new();
    };
    let mut inodes: HashMap<u64, Vec<u32>> = HashMap::new();
    for inode in of_port(&v4, port) {
        inodes.entry(inode).or_default().push(4);
    }
    for inode in of_port(&v6, port) {
        let families = inodes.entry(inode).or_default();
        families.push(6);
        // Unless it says that it takes IPv6 only, which is asked when it is there.
        families.push(4);
    }
    inodes.retain(|_, families| families.iter().any(|family| wanted(*family)));
    let mut found = Vec::new();
    for (inode, socket) in sockets(&inodes) {
        let only_v6 = rustix::net::sockopt::ipv6_v6only(&socket).unwrap_or(false);
        for family in &inodes[&inode] {
            if *family == 4 && only_v6 || !wanted(*family) {
                continue;
            }
            match socket.try_clone() {
                Ok(socket) => found.push((*family, socket)),
                Err(error) => debug!("cannot keep a listening socket: {error}"),
            }
        }
    }
    found
}

/// Inodes of the sockets that listen at a port, by `/proc/net/tcp`.
fn of_port(table: &str, port: u16) -> impl Iterator<Item = u64> {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_whitespace();
        let local = fields.nth(1)?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?;
        (local.ends_with(&suffix) && state == LISTEN)
            .then(|| inode.parse().ok())
            .flatten()
    })
}

/// Descriptors of our own for sockets of other processes.
fn sockets(inodes: &HashMap<u64, Vec<u32>>) -> Vec<(u64, OwnedFd)> {
    let mut found: Vec<(u64, OwnedFd)> = Vec::new();
    if inodes.is_empty() {
        return found;
    }
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
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
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_listening_sockets_by_their_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   \
                     uid  timeout inode\n   0: 0100007F:3A9E 00000000:0000 0A 00000000:00000000 \
                     00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0\n   \
                     1: 0100007F:3A9E 0100007F:D431 01 00000000:00000000 00:00000000 00000000     \
                     0        0 4712 1 0000000000000000 20 4 30 10 -1\n";
        assert_eq!(of_port(table, 15006).collect::<Vec<_>>(), [4711]);
        assert_eq!(of_port(table, 15001).count(), 0);
    }
}
