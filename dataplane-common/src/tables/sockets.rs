//! Tables of sockets: the VIPs that a connected socket, or an unconnected UDP socket, talks to.

use super::Endpoint;
use crate::{Addr, Port, Protocol};

layout! {
    /// The VIP that a connected socket was connected to, or that an unconnected UDP socket sends to.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Peer {
        /// The VIP.
        pub vip: Addr,
        /// The endpoint chosen for it: of a connected socket, the peer that the kernel knows.
        pub endpoint: Addr,
        /// The VIP's port.
        pub vip_port: Port,
        /// The endpoint's port.
        pub endpoint_port: Port,
    }
}

/// How many elements a table of sockets has: a power of two.
pub const SOCKET_ELEMENTS: u32 = 256;

/// How many sets there are in an element: a power of two. Their first places lie next to each other, and so do the
/// second ones: the memory that a socket needs is then in the caches, because the sockets before it have brought it
/// there.
pub const SOCKET_SETS: usize = 16;

/// How many sockets there are in a set.
pub const SOCKET_WAYS: usize = 4;

/// The owners of an element's places, the first ones of all sets, then the second: socket cookies, or [`flow_owner`] of
/// one; 0 for a free place. A program takes a place by an atomic exchange, and from then on only its socket uses it.
pub type Owners = [[u64; SOCKET_SETS]; SOCKET_WAYS];

/// The bit that tells a socket's two owners apart.
const FLOW: u64 = 1 << 63;

/// The owner of a place that a socket has for what it sends without being connected. It is in the set of the socket's
/// cookie.
#[inline(always)]
pub const fn flow_owner(cookie: u64) -> u64 {
    cookie ^ FLOW
}

/// Whether an owner is a [`flow_owner`]. The two highest bits of a cookie are equal: the kernel counts cookies up from
/// 1, and those that it gives in an interrupt down from 2⁶⁴ - 1 (`include/linux/cookie.h`).
pub const fn is_flow_owner(owner: u64) -> bool {
    (owner ^ owner << 1) & FLOW != 0
}

/// The owner of a place whose record is being written: of no socket.
pub const BEING_WRITTEN: u64 = flow_owner(0);

/// The set of a socket in a table of sockets. A socket has a few places in it and is found without a hash, a lock or an
/// allocation.
///
/// The kernel numbers sockets one after the other, so successive ones are in successive sets, and a set is full only if
/// sockets of several rounds live on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketSet {
    /// The index of the element.
    pub element: u32,
    /// The index of the set in the element.
    pub set: usize,
}

impl SocketSet {
    /// By the socket's cookie.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "its low bits are wanted")]
    pub const fn of(cookie: u64) -> Self {
        Self {
            element: (cookie / SOCKET_SETS as u64) as u32 % SOCKET_ELEMENTS,
            set: cookie as usize % SOCKET_SETS,
        }
    }
}

/// How many elements `PEER_PORTS` has: a bit for each port.
pub const PEER_PORTS: u32 = 65_536 / 64;

layout! {
    /// Sockets and their VIPs: a connected socket's VIP, and under [`flow_owner`] the VIP of an unconnected UDP socket
    /// that sends to this VIP only. Nothing changes a record of the second kind while it has its owner, except that its
    /// `endpoint_port` becomes 0 if it is no longer valid.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug)]
    pub struct PeerSets {
        /// The sockets that own the places.
        pub owners: Owners,
        /// Their VIPs.
        pub peers: [[Peer; SOCKET_SETS]; SOCKET_WAYS],
    }
}

/// How many flows an unconnected UDP socket remembers: a power of two.
pub const UDP_FLOWS: usize = 16;

layout! {
    /// The VIPs that an unconnected UDP socket talks to, the newest written over the oldest, if the socket talks to
    /// several or its set of [`PeerSets`] was full.
    ///
    /// They are in the socket's own storage and live exactly as long as the socket: no shared LRU, in which busy
    /// sockets would evict quiet ones.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug)]
    pub struct UdpFlows {
        /// How many flows were ever written; the next goes to this modulo [`UDP_FLOWS`].
        pub written: u32,
        /// The flow that was sent to last: if two VIPs share an endpoint, its replies count as answers of the VIP that
        /// was asked last.
        pub recent: u32,
        /// The flows; one whose `endpoint_port` is 0 is not there (yet).
        pub flows: [Peer; UDP_FLOWS],
    }
}

/// How many elements `SIBLINGS` has. The least recently used one is evicted.
pub const SIBLINGS: u32 = 16_384;

layout! {
    /// A flow of sockets that share a local port (`SO_REUSEADDR`, `SO_REUSEPORT`).
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct SiblingKey {
        /// The sockets' network namespace (`SO_NETNS_COOKIE`).
        pub netns: u64,
        /// The other end.
        pub addr: Addr,
        /// Its port.
        pub port: Port,
        /// The port that the sockets share.
        pub local: Port,
        /// TCP or UDP.
        pub protocol: Protocol,
        /// Zero.
        pub reserved: [u8; 3],
    }
}

layout! {
    /// The VIP by which one of the sockets reaches the other end.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Sibling {
        /// The VIP that the socket asked and that the other end answers; or the other end itself, if it has asked the
        /// socket.
        pub vip: Endpoint,
        /// The socket's cookie, if it is connected there; 0 otherwise.
        pub socket: u64,
    }
}

const _: () = assert!(size_of::<Peer>() == 36);
const _: () = assert!(size_of::<PeerSets>() == 16 * 176);
const _: () = assert!(SOCKET_ELEMENTS.is_power_of_two() && SOCKET_SETS.is_power_of_two());
const _: () = assert!(size_of::<UdpFlows>() == 8 + 36 * UDP_FLOWS);
const _: () = assert!(UDP_FLOWS.is_power_of_two());
const _: () = assert!(size_of::<SiblingKey>() == 32 && size_of::<Sibling>() == 32);
