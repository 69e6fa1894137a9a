//! Places in `PEERS` whose sockets are gone, and of which nobody told.
//!
//! The kernel tells the programs that a socket is closed, but not of its own (`inet_release` leaves out those with
//! `sk_kern_sock`): NFS's, and the subflows of MPTCP, one for each socket that a process has. Their places are found by
//! asking for all sockets that there are.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use dataplane_common::{
    Protocol,
    tables::{PeerSets, SOCKET_ELEMENTS, SOCKET_SETS, SOCKET_WAYS},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use zerocopy::FromBytes as _;

use super::{FAMILIES, Listed, SOCK_DIAG_BY_FAMILY, list};
use crate::kernel::{
    cgroup2_root,
    error::{Doing, Error},
    map::Mapped,
    namespaces,
    netlink::Netlink,
    pins::{Pins, spec},
};

/// Looks for such places.
#[derive(Debug)]
pub struct Sweeper {
    noted: Mapped<PeerSets>,
    /// Whose processes' sockets have places, as `/proc/PID/cgroup` has it.
    cgroup: PathBuf,
    /// The sockets that were not there the last time.
    missed: HashSet<u64>,
}

impl Sweeper {
    /// Opens the pinned table of an agent that serves the processes of a cgroup; `None` if there is none, or if there may be sockets that this process does not get to
    /// see: those of network namespaces that only processes outside of its PID namespace are in.
    ///
    /// # Errors
    /// If what is there is not ours, or may not be opened.
    pub fn open(bpffs: &Path, cgroup: &Path) -> Result<Option<Self>, Error> {
        let sees_all = namespaces::sees_all_processes()
            .doing(|| "cannot ask for this process's PID namespace".to_owned())?;
        let Some((noted, _)) = Pins::new(bpffs).open_map(spec("PEERS"))? else {
            return Ok(None);
        };
        if !sees_all {
            return Ok(None);
        }
        Ok(Some(Self {
            noted: Mapped::map(noted, SOCKET_ELEMENTS, true)
                .doing(|| "cannot map table PEERS".to_owned())?,
            cgroup: Path::new("/").join(cgroup.strip_prefix(cgroup2_root()?).unwrap_or(cgroup)),
            missed: HashSet::new(),
        }))
    }

    /// How many places are taken.
    pub fn taken(&self) -> usize {
        self.owners().count()
    }

    /// Frees the places of sockets that are not connected, now and the last time: `connect()` notes an endpoint shortly
    /// before the socket has it. Answers how many places that were.
    ///
    /// # Errors
    /// If there is a network namespace whose sockets the kernel does not tell. Nothing was freed then.
    pub fn sweep(&mut self) -> io::Result<usize> {
        let noted: HashSet<u64> = self.owners().map(|(_, cookie)| cookie).collect();
        if noted.is_empty() {
            self.missed.clear();
            return Ok(0);
        }
        let living = living(&self.cgroup)?;
        let mut missed: HashSet<u64> = noted.difference(&living).copied().collect();
        let gone: HashSet<u64> = missed.intersection(&self.missed).copied().collect();
        let mut freed = 0;
        for ((element, word), cookie) in self.owners() {
            if gone.contains(&cookie)
                && let Some(owner) = self.noted.word(element, word)
            {
                // Unless it was freed since, and is another's by now.
                let was = owner.compare_exchange(cookie, 0, Ordering::Relaxed, Ordering::Relaxed);
                freed += usize::from(was.is_ok());
            }
        }
        missed.retain(|cookie| !gone.contains(cookie));
        self.missed = missed;
        Ok(freed)
    }

    /// The places that are taken, as element and word, and whose they are.
    fn owners(&self) -> impl Iterator<Item = ((u32, usize), u64)> {
        let places = (0..SOCKET_ELEMENTS)
            .flat_map(|element| (0..SOCKET_SETS * SOCKET_WAYS).map(move |word| (element, word)));
        places.filter_map(|(element, word)| {
            let cookie = self.noted.word(element, word)?.load(Ordering::Relaxed);
            (cookie != 0).then_some(((element, word), cookie))
        })
    }
}

/// The cookies of the connected sockets of every network namespace that a process in the cgroup may be in.
fn living(cgroup: &Path) -> io::Result<HashSet<u64>> {
    let visited = namespaces::visit(|_| {
        let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
        let mut cookies = Vec::new();
        for protocol in [Protocol::TCP, Protocol::UDP] {
            for family in FAMILIES {
                let request = list(protocol, family, None);
                netlink.dump(SOCK_DIAG_BY_FAMILY, &request, |answer| {
                    if let Ok((socket, _)) = Listed::read_from_prefix(answer) {
                        cookies.push(socket.id.cookie());
                    }
                })?;
            }
        }
        Ok(cookies)
    });
    for (path, error) in visited.unread {
        // `/proc/PID/ns/net`: a process that may not be looked at, whose sockets have no places if it is not served.
        let process = path.parent().and_then(Path::parent);
        let is_process = path.starts_with("/proc") && path.ends_with("ns/net");
        if !is_process || process.is_none_or(|process| is_in(process, cgroup)) {
            return Err(error);
        }
    }
    Ok(visited.found.into_iter().flatten().collect())
}

/// Whether a process is in a cgroup, which is given as `/proc/PID/cgroup` has it. One that has ended is nowhere.
fn is_in(process: &Path, cgroup: &Path) -> bool {
    let Ok(all) = fs::read_to_string(process.join("cgroup")) else {
        return false;
    };
    let own = all.lines().find_map(|line| line.strip_prefix("0::"));
    own.is_none_or(|own| Path::new(own).starts_with(cgroup))
}

const _: () = assert!(std::mem::offset_of!(PeerSets, owners) == 0);
