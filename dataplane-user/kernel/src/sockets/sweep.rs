//! Removes places in `PEERS`, and entries of `ORIGINS`, whose sockets have closed without a program reporting it.
//!
//! The kernel reports closed sockets to the programs, but not its own sockets (`inet_release` leaves out sockets with
//! `sk_kern_sock`): NFS's, and the subflows of MPTCP, one for each socket of a process. Their places are found by
//! listing all sockets.

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use dataplane_common::{
    Addr, Port, Protocol,
    capture::Tuple,
    tables::{BEING_WRITTEN, PeerSets, SOCKET_ELEMENTS, SOCKET_SETS, SOCKET_WAYS, flow_owner},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use zerocopy::FromBytes as _;

use super::{CLOSED, CONNECTED, FAMILIES, Listed, SOCK_DIAG_BY_FAMILY, list, origins::Origins};
use crate::{
    cgroup2_root,
    error::{Doing, Error},
    map::Mapped,
    namespaces,
    netlink::Netlink,
    pins::{Pins, spec},
    sys::netns_cookie,
};

/// Between the two looks at the start.
const MOMENT: Duration = Duration::from_millis(100);

/// Looks for such places and entries.
#[derive(Debug)]
pub struct Sweeper {
    noted: Mapped<PeerSets>,
    origins: Option<Origins>,
    /// The cgroup whose processes' sockets have places, as `/proc/PID/cgroup` has it.
    cgroup: PathBuf,
    /// The owners whose sockets were not there the last time.
    missed: HashSet<u64>,
}

impl Sweeper {
    /// Opens the pinned table of an agent that serves the processes of a cgroup; `None` if there is none, or if there
    /// may be sockets that this process cannot see: those of network namespaces that only processes outside of its PID
    /// namespace are in.
    ///
    /// # Errors
    /// If the pins are not ours, or may not be opened.
    pub fn open(bpffs: &Path, cgroup: &Path) -> Result<Option<Self>, Error> {
        let sees_all = namespaces::sees_all_processes()
            .doing(|| "cannot ask for this process's PID namespace".to_owned())?;
        let pins = Pins::new(bpffs);
        let Some((noted, _)) = pins.open_map(spec("PEERS"))? else {
            return Ok(None);
        };
        if !sees_all {
            return Ok(None);
        }
        Ok(Some(Self {
            noted: Mapped::map(noted, SOCKET_ELEMENTS, true)
                .doing(|| "cannot map table PEERS".to_owned())?,
            origins: Origins::open(&pins)?,
            cgroup: Path::new("/").join(cgroup.strip_prefix(cgroup2_root()?).unwrap_or(cgroup)),
            missed: HashSet::new(),
        }))
    }

    /// How many places are taken.
    pub fn taken(&self) -> usize {
        self.owners().count()
    }

    /// Removes the entries that earlier agents' programs have left in `ORIGINS`. Returns the number of removed entries.
    ///
    /// # Errors
    /// The errors of [`Sweeper::sweep`].
    pub fn purge(&mut self) -> io::Result<usize> {
        let Some(origins) = &mut self.origins else {
            return Ok(0);
        };
        let mut freed = 0;
        for _ in 0..2 {
            let tuples = origins.noted()?;
            if tuples.is_empty() {
                break;
            }
            freed += origins.sweep(&tuples, &living(&self.cgroup)?.tuples)?;
            thread::sleep(MOMENT);
        }
        Ok(freed)
    }

    /// Frees the places of sockets that are not connected, now and the last time, because `connect()` records an
    /// endpoint shortly before the socket is connected. A place for what a UDP socket sends without being connected is
    /// freed if there is no such socket. Does the same with entries of `ORIGINS`. Returns the number of freed places and
    /// entries.
    ///
    /// # Errors
    /// If the kernel cannot list the sockets of a network namespace. Then nothing is freed.
    pub fn sweep(&mut self) -> io::Result<usize> {
        let noted: HashSet<u64> = self.owners().map(|(_, owner)| owner).collect();
        let tuples = self.origins.as_ref().map(Origins::noted).transpose()?;
        let tuples = tuples.unwrap_or_default();
        let living = if noted.is_empty() && tuples.is_empty() {
            Living::default()
        } else {
            living(&self.cgroup)?
        };
        let mut freed = match &mut self.origins {
            Some(origins) => origins.sweep(&tuples, &living.tuples)?,
            None => 0,
        };
        let mut missed: HashSet<u64> = noted.difference(&living.owners).copied().collect();
        let gone: HashSet<u64> = missed.intersection(&self.missed).copied().collect();
        for ((element, word), owner) in self.owners() {
            if gone.contains(&owner)
                && let Some(word) = self.noted.word(element, word)
            {
                // Fails if the place was freed meanwhile, and belongs to another socket now.
                let was = word.compare_exchange(owner, 0, Ordering::Relaxed, Ordering::Relaxed);
                freed += usize::from(was.is_ok());
            }
        }
        missed.retain(|owner| !gone.contains(owner));
        self.missed = missed;
        Ok(freed)
    }

    /// The places that are taken, as element and word, and whose they are.
    fn owners(&self) -> impl Iterator<Item = ((u32, usize), u64)> {
        let places = (0..SOCKET_ELEMENTS)
            .flat_map(|element| (0..SOCKET_SETS * SOCKET_WAYS).map(move |word| (element, word)));
        places.filter_map(|(element, word)| {
            let owner = self.noted.word(element, word)?.load(Ordering::Relaxed);
            (owner != 0 && owner != BEING_WRITTEN).then_some(((element, word), owner))
        })
    }
}

/// The connected sockets, and the unconnected UDP sockets that have a port, of every network namespace that a process in
/// the cgroup may be in.
#[derive(Debug, Default)]
struct Living {
    /// The owners of the places that the sockets may have.
    owners: HashSet<u64>,
    /// The addresses and ports of the TCP sockets.
    tuples: HashSet<Tuple>,
}

fn living(cgroup: &Path) -> io::Result<Living> {
    let mut living = Living::default();
    let visited = namespaces::visit(|_| {
        let netns = netns_cookie()?;
        let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
        for protocol in [Protocol::TCP, Protocol::UDP] {
            let unconnected = u32::from(protocol == Protocol::UDP) << CLOSED;
            for family in FAMILIES {
                let request = list(protocol, family, CONNECTED | unconnected, None);
                netlink.dump(SOCK_DIAG_BY_FAMILY, &request, |answer| {
                    if let Ok((socket, _)) = Listed::read_from_prefix(answer) {
                        let cookie = socket.id.cookie();
                        if socket.state != CLOSED {
                            living.owners.insert(cookie);
                        }
                        if protocol == Protocol::TCP {
                            living.tuples.insert(tuple(netns, &socket));
                        } else {
                            living.owners.insert(flow_owner(cookie));
                        }
                    }
                })?;
            }
        }
        Ok(())
    });
    for (path, error) in visited.unread {
        // `/proc/PID/ns/net`: a process that may not be looked at, whose sockets have no places if it is not served.
        let process = path.parent().and_then(Path::parent);
        let is_process = path.starts_with("/proc") && path.ends_with("ns/net");
        if !is_process || process.is_none_or(|process| is_in(process, cgroup)) {
            return Err(error);
        }
    }
    Ok(living)
}

/// A connection, as its client's socket has it.
fn tuple(netns: u64, socket: &Listed) -> Tuple {
    let (proxy, proxy_port) = socket.peer();
    let source = socket.id.source;
    Tuple {
        netns,
        client: if socket.family == FAMILIES[0] {
            Addr::from_v4_word(source[0])
        } else {
            Addr::from_words(source)
        },
        proxy,
        client_port: Port::from_be(socket.id.source_port),
        proxy_port,
        reserved: 0,
    }
}

/// Whether a process is in a cgroup, in the form of `/proc/PID/cgroup`. A process that has ended is nowhere.
fn is_in(process: &Path, cgroup: &Path) -> bool {
    let Ok(all) = fs::read_to_string(process.join("cgroup")) else {
        return false;
    };
    let own = all.lines().find_map(|line| line.strip_prefix("0::"));
    own.is_none_or(|own| Path::new(own).starts_with(cgroup))
}

const _: () = assert!(std::mem::offset_of!(PeerSets, owners) == 0);
