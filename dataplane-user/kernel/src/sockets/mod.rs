//! Connected sockets whose endpoint is gone: found by the records that `connect` made for them, and destroyed
//! (`SOCK_DESTROY`, `sock_diag(7)`), so that their processes learn of it at once.
//!
//! A record says which VIP a socket was connected to, so a socket that was connected to an endpoint without a VIP is
//! not touched. The record is in `PEERS` by the socket's cookie, which the kernel shows of each socket that it lists;
//! or, if its set there is full, in the socket's own storage, which the kernel adds to its list of TCP sockets
//! (`INET_DIAG_REQ_SK_BPF_STORAGES`). The kernel does not add the storage to its list of UDP sockets
//! (`inet_sk_diag_fill` in net/ipv4/inet_diag.c), so those whose set is full are not found.

mod arrivals;
mod cgroups;
mod origins;
mod sweep;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

pub(super) use arrivals::destroy_arrived;
pub(super) use cgroups::other_ends;
pub use cgroups::{Elsewhere, PodCgroups, own_elsewhere, pod_cgroups};
use dataplane_common::{
    Addr, Port, Protocol,
    tables::{Peer, PeerSets, SOCKET_ELEMENTS, is_flow_owner},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
pub use sweep::Sweeper;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    error::{Doing, Error},
    map::Mapped,
    namespaces,
    netlink::{Netlink, attribute, content},
    pins::{MAPS, MapSpec, Pins},
};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

/// `struct inet_diag_sockid`: ports and addresses in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct SocketId {
    source_port: u16,
    destination_port: u16,
    source: [u32; 4],
    destination: [u32; 4],
    interface: u32,
    cookie: [u32; 2],
}

/// `struct inet_diag_req_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Request {
    family: u8,
    protocol: u8,
    extensions: u8,
    padding: u8,
    states: u32,
    id: SocketId,
}

/// `struct inet_diag_msg`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Listed {
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    write_queue: u32,
    uid: u32,
    inode: u32,
}

const _: () = assert!(size_of::<Request>() == 56 && size_of::<Listed>() == 72);

#[expect(clippy::cast_possible_truncation, reason = "2 and 10")]
const FAMILIES: [u8; 2] = [libc::AF_INET as u8, libc::AF_INET6 as u8];

impl SocketId {
    /// Any socket.
    const ANY: Self = Self {
        source_port: 0,
        destination_port: 0,
        source: [0; 4],
        destination: [0; 4],
        interface: 0,
        cookie: [u32::MAX; 2], // INET_DIAG_NOCOOKIE
    };

    fn cookie(&self) -> u64 {
        u64::from(self.cookie[0]) | u64::from(self.cookie[1]) << 32
    }
}

impl Listed {
    /// Whom it is connected to.
    fn peer(&self) -> (Addr, Port) {
        self.end(self.id.destination, self.id.destination_port)
    }

    /// Its own address and port, and those of its peer.
    fn ends(&self) -> [SocketAddr; 2] {
        let own = self.end(self.id.source, self.id.source_port);
        [own, self.peer()].map(|(addr, port)| SocketAddr::new(addr.ip(), port.host()))
    }

    fn end(&self, words: [u32; 4], port: u16) -> (Addr, Port) {
        let addr = if self.family == FAMILIES[0] {
            Addr::from_v4_word(words[0])
        } else {
            Addr::from_words(words)
        };
        (addr, Port::from_be(port))
    }
}

/// The records of connected sockets.
#[derive(Debug)]
pub struct Peers {
    noted: Mapped<PeerSets>,
    /// The map whose values are in sockets' own storage.
    stored: OwnedFd,
}

/// The destroyed sockets.
#[derive(Debug, Default)]
pub struct Destroyed {
    /// The sockets: protocol, and record.
    pub sockets: Vec<(Protocol, Peer)>,
    /// How many namespaces were looked into.
    pub namespaces: usize,
    /// How many sockets should have been destroyed and were found nowhere: they were closed, are
    /// just being connected, or are in a namespace that cannot be entered.
    pub not_found: usize,
    /// The errors, and where they happened.
    pub errors: Vec<(PathBuf, io::Error)>,
}

impl Peers {
    /// Opens the pinned tables; `None` if there are none.
    ///
    /// # Errors
    /// If the pins are not ours, or may not be opened.
    pub fn open(bpffs: &Path) -> Result<Option<Self>, Error> {
        let pins = Pins::new(bpffs);
        let open = |name: &str| {
            let spec = MAPS.iter().find(|spec: &&MapSpec| spec.name == name);
            pins.open_map(spec.expect("a table of ours"))
        };
        let (Some((noted, _)), Some((stored, _))) = (open("PEERS")?, open("MORE_PEERS")?) else {
            return Ok(None);
        };
        Ok(Some(Self {
            noted: Mapped::map(noted, SOCKET_ELEMENTS, false)
                .doing(|| "cannot map table PEERS".to_owned())?,
            stored,
        }))
    }

    /// Returns the table's records of connected sockets, by cookie. A place that is taken or freed just now may be read half and half:
    /// `destroy` destroys only sockets that the kernel lists with that very peer.
    fn in_sets(&self) -> impl Iterator<Item = (u64, Peer)> {
        let sets = (0..SOCKET_ELEMENTS).filter_map(|index| self.noted.get(index));
        sets.flat_map(|sets| sets.owners.into_iter().zip(sets.peers))
            .flat_map(|(owners, peers)| owners.into_iter().zip(peers))
            // Of unconnected sockets, which ask for the endpoint again with each datagram.
            .filter(|(owner, _)| !is_flow_owner(*owner))
            // Free, or connected again since, and not through a VIP.
            .filter(|(cookie, peer)| *cookie != 0 && peer.endpoint_port != Port::ANY)
    }

    /// The endpoints of connected sockets that the programs translated, by the sockets' cookies ([`cookie`]).
    pub fn endpoints(&self) -> HashMap<u64, SocketAddr> {
        let endpoint = |peer: Peer| SocketAddr::new(peer.endpoint.ip(), peer.endpoint_port.host());
        let noted = self
            .in_sets()
            .map(|(cookie, peer)| (cookie, endpoint(peer)));
        noted.collect()
    }

    /// Destroys the connected sockets, in every network namespace, whose record `stale` holds of.
    pub fn destroy(
        &self,
        protocols: &[Protocol],
        stale: impl Fn(Protocol, &Peer) -> bool + Sync,
    ) -> Destroyed {
        let mut wanted: HashMap<u64, Peer> = self
            .in_sets()
            .filter(|(_, peer)| protocols.iter().any(|protocol| stale(*protocol, peer)))
            .collect();
        let visited = namespaces::visit(|_| {
            let mut here = Here {
                netlink: Netlink::open(NETLINK_SOCK_DIAG)?,
                stored: &self.stored,
                wanted: &mut wanted,
                destroyed: Vec::new(),
            };
            for protocol in protocols {
                for family in FAMILIES {
                    here.destroy(*protocol, family, &stale)?;
                }
            }
            Ok(here.destroyed)
        });
        let mut errors = visited.unread;
        // A process whose namespace this agent may not see: the namespace is entered by its name.
        errors.retain(|(_, error)| error.kind() != io::ErrorKind::PermissionDenied);
        Destroyed {
            namespaces: visited.found.len() + errors.len(),
            sockets: visited.found.into_iter().flatten().collect(),
            not_found: wanted.len(),
            errors,
        }
    }
}

/// One namespace.
struct Here<'a> {
    netlink: Netlink,
    stored: &'a OwnedFd,
    /// The wanted sockets by cookie. A socket that was found is removed.
    wanted: &'a mut HashMap<u64, Peer>,
    destroyed: Vec<(Protocol, Peer)>,
}

impl Here<'_> {
    fn destroy(
        &mut self,
        protocol: Protocol,
        family: u8,
        stale: &impl Fn(Protocol, &Peer) -> bool,
    ) -> io::Result<()> {
        let mut found = Vec::new();
        let request = list(protocol, family, CONNECTED, Some(self.stored));
        let wanted = &mut *self.wanted;
        let listed = self.netlink.dump(SOCK_DIAG_BY_FAMILY, &request, |answer| {
            let Ok((socket, rest)) = Listed::read_from_prefix(answer) else {
                return;
            };
            let Some(peer) = wanted
                .get(&socket.id.cookie())
                .copied()
                .or_else(|| noted(rest))
            else {
                return;
            };
            // Connected again since, and not through a VIP; or another protocol's.
            if (peer.endpoint, peer.endpoint_port) == socket.peer() && stale(protocol, &peer) {
                wanted.remove(&socket.id.cookie());
                found.push((socket, peer));
            }
        });
        match listed {
            // The kernel has no list of this protocol's sockets (no such module).
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            listed => listed?,
        }
        for (socket, peer) in found {
            if destroy(&mut self.netlink, protocol, &socket)? {
                self.destroyed.push((protocol, peer));
            }
        }
        Ok(())
    }
}

/// Destroys a socket. Returns false if the socket was closed, or connected elsewhere, since it was listed.
fn destroy(netlink: &mut Netlink, protocol: Protocol, socket: &Listed) -> io::Result<bool> {
    let request = Request {
        family: socket.family,
        protocol: protocol.number(),
        extensions: 0,
        padding: 0,
        states: u32::MAX,
        id: socket.id,
    };
    // By its cookie too: the socket that took its place is a different one.
    match netlink.ask(SOCK_DESTROY, request.as_bytes()) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// A TCP socket that listens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listens {
    /// At which port.
    pub port: u16,
    /// At which address.
    pub addr: IpAddr,
    /// The socket's inode.
    pub inode: u64,
}

/// The TCP sockets that listen at a port in this thread's network namespace; 0: at any.
///
/// # Errors
/// `ENOENT` if the kernel has no list of TCP sockets (no such module).
pub(super) fn listening(port: u16) -> io::Result<Vec<Listens>> {
    const LISTEN: u32 = 1 << 10;
    let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
    let mut found = Vec::new();
    for family in FAMILIES {
        let request = Request {
            family,
            protocol: Protocol::TCP.number(),
            extensions: 0,
            padding: 0,
            states: LISTEN,
            id: SocketId {
                source_port: port.to_be(),
                ..SocketId::ANY
            },
        };
        netlink.dump(SOCK_DIAG_BY_FAMILY, request.as_bytes(), |answer| {
            let Ok((socket, _)) = Listed::read_from_prefix(answer) else {
                return;
            };
            let words = socket.id.source;
            let addr = if socket.family == FAMILIES[0] {
                Ipv4Addr::from(words[0].to_ne_bytes()).into()
            } else {
                let mut bytes = [0; 16];
                bytes.copy_from_slice(words.as_bytes());
                Ipv6Addr::from(bytes).into()
            };
            found.push(Listens {
                port: u16::from_be(socket.id.source_port),
                addr,
                inode: socket.inode.into(),
            });
        })?;
    }
    Ok(found)
}

/// The states of connected sockets: not of those that listen, wait for late segments, or are closed
/// (`include/net/tcp_states.h`). A connected UDP socket is "established".
const CONNECTED: u32 = 0b1011_0011_1110;

/// The state of an unconnected UDP socket (`TCP_CLOSE`).
const CLOSED: u8 = 7;

/// A request for the sockets of a protocol and family in some states (bits), with their stored records.
fn list(protocol: Protocol, family: u8, states: u32, stored: Option<&OwnedFd>) -> Vec<u8> {
    const SK_BPF_STORAGES: u16 = 2; // INET_DIAG_REQ_SK_BPF_STORAGES
    const MAP_FD: u16 = 1; // SK_DIAG_BPF_STORAGE_REQ_MAP_FD
    let request = Request {
        family,
        protocol: protocol.number(),
        extensions: 0,
        padding: 0,
        states,
        id: SocketId::ANY,
    };
    let mut bytes = request.as_bytes().to_vec();
    if let Some(map) = stored {
        let map = attribute(MAP_FD, &map.as_raw_fd().to_ne_bytes());
        bytes.extend(attribute(SK_BPF_STORAGES, &map));
    }
    bytes
}

/// Returns the record in the socket's own storage.
fn noted<T: FromBytes>(rest: &[u8]) -> Option<T> {
    const SK_BPF_STORAGES: u16 = 20; // INET_DIAG_SK_BPF_STORAGES
    const STORAGE: u16 = 1; // SK_DIAG_BPF_STORAGE
    const VALUE: u16 = 3; // SK_DIAG_BPF_STORAGE_MAP_VALUE
    let value = content(content(content(rest, SK_BPF_STORAGES)?, STORAGE)?, VALUE)?;
    T::read_from_prefix(value).ok().map(|(record, _)| record)
}

/// The number by which the kernel and its programs know a socket (`SO_COOKIE`).
///
/// # Errors
/// If it is no socket.
pub fn cookie(socket: impl AsFd) -> io::Result<u64> {
    Ok(rustix::net::sockopt::socket_cookie(socket)?)
}

/// Whether the kernel destroys sockets when it is asked to: tried on one of our own.
///
/// # Errors
/// If the kernel refuses.
pub fn can_destroy() -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let own = socket.local_addr()?;
    socket.connect(own)?;
    let loopback = u32::from_ne_bytes(Ipv4Addr::LOCALHOST.octets());
    let id = SocketId {
        source_port: own.port().to_be(),
        destination_port: own.port().to_be(),
        source: [loopback, 0, 0, 0],
        destination: [loopback, 0, 0, 0],
        ..SocketId::ANY
    };
    let request = Request {
        family: FAMILIES[0],
        protocol: Protocol::UDP.number(),
        extensions: 0,
        padding: 0,
        states: u32::MAX,
        id,
    };
    Netlink::open(NETLINK_SOCK_DIAG)?.ask(SOCK_DESTROY, request.as_bytes())
}
