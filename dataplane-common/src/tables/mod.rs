//! Keys and values of the kernel's tables.
//!
//! ```text
//! FRONTENDS  hash   FrontendKey -> Frontend          VIPs' ports, and the pool that answers each
//! POOLS      array  pool        -> Pool              which block of endpoints; the word that flips
//! ENDPOINTS  array  slot        -> Endpoint          blocks of endpoints, sorted
//! STATS      array  see StatsHeader                  connections and refusals by pool and CPU
//! AFFINITY   hash   AffinityKey -> Affinity          the endpoint that a client used last
//! PEERS      array  SocketSet   -> PeerSets          sockets' VIPs: connected, or the only one
//! PEER_PORTS array  port / 64   -> bits              which ports the endpoints of PEERS have had
//! MORE_PEERS sk     socket      -> Peer              a connected socket's VIP, if its set of PEERS is full
//! FLOWS      sk     socket      -> UdpFlows          an unconnected UDP socket's VIPs, if not in PEERS
//! SIBLINGS   lru    SiblingKey  -> Sibling           as FLOWS, by port: for sockets that share one
//! SHARED_PORTS array port / 64  -> bits              which local ports SIBLINGS has had
//! REASONS    percpu Reason      -> u64               verdicts by reason
//! EVENTS     ring   Event                            while `dataplane monitor` listens
//! CONFIG     array  0           -> Config
//! VIPS       array  VipPlace    -> VipElement        which addresses may be in FRONTENDS at all
//! ```
//!
//! The tables of the packet path are in [`crate::packet`], the tables of mesh capture in [`crate::capture`].
//!
//! The first five are one-element arrays of maps: the outer map is pinned and known to the programs, so that a larger
//! copy can replace a table while they run. A write of the outer element also waits for every running program
//! (`maybe_wait_bpf_programs` in `kernel/bpf/syscall.c`): this is the grace period before blocks and slots are reused.

mod sockets;
mod words;

pub use sockets::{
    BEING_WRITTEN, Owners, PEER_PORTS, Peer, PeerSets, SIBLINGS, SOCKET_ELEMENTS, SOCKET_SETS,
    SOCKET_WAYS, Sibling, SiblingKey, SocketSet, UDP_FLOWS, UdpFlows, flow_owner, is_flow_owner,
};
pub use words::{Block, Frontend, Kind};

use crate::{Addr, Port, Protocol};

layout! {
    /// The key by which a connection's destination is looked up.
    ///
    /// Three kinds of key share the table:
    /// * a VIP's port: address, port, protocol;
    /// * an address as such: port and protocol *any* ([`FrontendKey::address`]). Its value decides about
    ///   ports that have no key of their own;
    /// * a node port: address *unspecified* ([`FrontendKey::node_port`]), reached over an address
    ///   whose own entry is [`Kind::NODE_ADDRESS`].
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub struct FrontendKey {
        /// The destination address.
        pub addr: Addr,
        /// The destination port.
        pub port: Port,
        /// TCP or UDP.
        pub protocol: Protocol,
        /// Zero.
        pub reserved: u8,
    }
}

impl FrontendKey {
    /// A VIP's port.
    #[inline(always)]
    pub const fn new(addr: Addr, port: Port, protocol: Protocol) -> Self {
        Self {
            addr,
            port,
            protocol,
            reserved: 0,
        }
    }

    /// The address as such.
    #[inline(always)]
    pub const fn address(addr: Addr) -> Self {
        Self::new(addr, Port::ANY, Protocol::ANY)
    }

    /// Whether it is an address as such, whose other ports the programs refuse. It is removed before its ports' keys,
    /// and written after them.
    pub fn is_address(&self) -> bool {
        self.port == Port::ANY && self.protocol == Protocol::ANY
    }

    /// A node port, of IPv4 (`v4`) or IPv6: the families have different endpoints.
    #[inline(always)]
    pub const fn node_port(v4: bool, port: Port, protocol: Protocol) -> Self {
        let addr = if v4 {
            Addr::from_v4([0; 4])
        } else {
            Addr::UNSPECIFIED
        };
        Self::new(addr, port, protocol)
    }
}

layout! {
    /// The endpoints that may answer for a service's port, in one family and by one traffic policy.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Pool {
        /// Where its endpoints are. Flipped by one 8-byte store.
        pub block: Block,
        /// Session affinity's timeout in seconds; 0: no affinity. At most 86 400 (Kubernetes' limit).
        pub affinity_seconds: u32,
        /// The pool whose affinity entries it shares: the index of a pool of the same service port and family
        /// (ClusterIP and NodePort share, as in kube-proxy).
        pub affinity_group: u32,
        /// The pool that answers clients from outside of the cluster on node ports, external IPs and load
        /// balancers; 0: this pool. If `externalTrafficPolicy` is Local, that pool has the endpoints on this
        /// node, and the flow is not masqueraded.
        pub external: u32,
        /// Whether the load balancer's addresses are open to a part of the clients only
        /// (`loadBalancerSourceRanges`): 1, and they are the set of `SOURCES` with this pool's index;
        /// otherwise 0.
        pub ranged: u32,
    }
}

layout! {
    /// A slot of `ENDPOINTS`. Blocks are sorted by address, then port, so that membership is a binary
    /// search.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub struct Endpoint {
        /// Its address.
        pub addr: Addr,
        /// Its port.
        pub port: Port,
        /// Zero.
        pub reserved: [u8; 6],
    }
}

impl Endpoint {
    /// No endpoint: none has port 0.
    pub const NONE: Self = Self::new(Addr::UNSPECIFIED, Port::ANY);

    /// An endpoint.
    #[inline(always)]
    pub const fn new(addr: Addr, port: Port) -> Self {
        Self {
            addr,
            port,
            reserved: [0; 6],
        }
    }

    /// Whether this is [`Endpoint::NONE`].
    #[inline(always)]
    pub const fn is_none(&self) -> bool {
        self.port.be() == 0
    }
}

layout! {
    /// Counters of a pool on one CPU, in connections and datagrams of unconnected sockets.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PoolStats {
        /// Translated to an endpoint.
        pub translated: u64,
        /// Refused because there are no endpoints ([`crate::Reason::NoEndpoints`]).
        pub no_endpoints: u64,
        /// Refused by policy ([`crate::Reason::NoLocalEndpoint`]).
        pub no_local: u64,
        /// Refused because the service does not have the port ([`crate::Reason::PortNotServed`]).
        pub no_such_port: u64,
    }
}

layout! {
    /// Element 0 of `STATS`. The element of pool `p` (from 1) on CPU `c` is `c * stride + p`: each CPU has its own run
    /// of elements, so that CPUs do not share cache lines. The programs still add to counters atomically, because a
    /// program can be preempted.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct StatsHeader {
        /// Elements per CPU.
        pub stride: u64,
        /// Zero.
        pub reserved: [u64; 3],
    }
}

layout! {
    /// The client and service port whose endpoint [`Affinity`] remembers.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct AffinityKey {
        /// The client: its address, or for a local socket its network namespace
        /// ([`Addr::from_netns_cookie`]).
        pub client: Addr,
        /// [`Pool::affinity_group`].
        pub group: u32,
    }
}

layout! {
    /// The endpoint that a client used last.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Affinity {
        /// The endpoint.
        pub endpoint: Endpoint,
        /// When, in nanoseconds since boot (CLOCK_MONOTONIC): refreshed by use.
        pub used_at: u64,
    }
}

layout! {
    /// Settings of the programs, written by user space with plain stores into the mapped table.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Config {
        /// The node's own network namespace (`SO_NETNS_COOKIE`): only there are loopback addresses
        /// the node's. 0 until known.
        pub host_netns: u64,
        /// Events are written until then (CLOCK_MONOTONIC, nanoseconds): a lease, so that a killed listener costs
        /// little and not for long. 0: no listener.
        pub listen_until: u64,
        /// Whether anything is captured at all ([`crate::capture::MESH_NAMESPACES`] and so on): on a node without a
        /// mesh, a connection looks at nothing else.
        pub mesh: u64,
        /// The agent's DNS server answers until then (CLOCK_MONOTONIC, nanoseconds): a lease, which its threads renew,
        /// because a socket exists even if no thread reads from it.
        pub queries_until: u64,
        /// How many network namespaces are in `BY_PACKETS`: on most nodes none, and then the programs do not look
        /// there.
        pub by_packets: u64,
    }
}

/// How many network namespaces `BY_PACKETS` has room for. The socket programs leave the sockets of these namespaces
/// alone, and the packet path serves the packets of these sockets.
pub const BY_PACKETS: u32 = 4096;

/// Why the sockets of a network namespace are left alone: the upper half of a value of `BY_PACKETS`. The lower half is the
/// interface by which its packets come.
pub mod by_packets {
    /// Rules of its own translate the packets that it sends.
    pub const RULES: u32 = 1;
    /// It is nested in a pod's.
    pub const NESTED: u32 = 2;
    /// The operator or the pod asks for it.
    pub const ASKED: u32 = 3;
    /// It has raw sockets, or IPsec: their packets and those of a socket are one flow, which goes to one endpoint.
    pub const RAW: u32 = 4;
}

const _: () = assert!(size_of::<FrontendKey>() == 20 && align_of::<FrontendKey>() == 4);
const _: () = assert!(size_of::<Frontend>() == 8);
const _: () = assert!(size_of::<Pool>() == 24 && align_of::<Pool>() == 8);
const _: () = assert!(size_of::<Endpoint>() == 24 && align_of::<Endpoint>() == 8);
const _: () = assert!(size_of::<PoolStats>() == 32);
const _: () = assert!(size_of::<StatsHeader>() == size_of::<PoolStats>());
const _: () = assert!(size_of::<AffinityKey>() == 20);
const _: () = assert!(size_of::<Affinity>() == 32);
const _: () = assert!(size_of::<Config>() == 40);

#[cfg(test)]
mod tests {
    extern crate std;

    use std::format;

    use super::*;

    #[test]
    fn keys_are_of_three_kinds() {
        let addr = Addr::from_v4([10, 96, 0, 1]);
        let (port, tcp) = (Port::new(80), Protocol::TCP);
        let address = FrontendKey::address(addr);
        assert_eq!(address.addr, addr);
        for (key, is_address) in [
            (address, true),
            (FrontendKey::new(addr, port, tcp), false),
            (FrontendKey::new(addr, Port::ANY, tcp), false),
            (FrontendKey::new(addr, port, Protocol::ANY), false),
        ] {
            assert_eq!(key.is_address(), is_address, "{key:?}");
        }
        let node_ports = [true, false].map(|v4| FrontendKey::node_port(v4, port, tcp));
        for (key, v4) in node_ports.into_iter().zip([true, false]) {
            assert_eq!((key.port, key.protocol), (port, tcp));
            assert!(key.addr.is_unspecified() && key.addr.is_v4() == v4);
        }
    }

    /// The bits are those that are documented: older programs read them.
    #[test]
    fn words_have_fixed_bits() {
        let frontend = Frontend::new(0x89ab_cdef, Kind::NODE_PORT);
        assert_eq!(frontend.word(), 0x0004_89ab_cdef);
        assert_eq!(Frontend::from_word(frontend.word()), frontend);
        assert_eq!(
            (frontend.pool(), frontend.kind()),
            (0x89ab_cdef, Kind::NODE_PORT)
        );
        assert!(!frontend.is_none() && Frontend::NONE.is_none());
        assert_eq!(format!("{frontend:?}"), "NodePort -> pool 2309737967");

        let block = Block::new(0x89ab_cdef, 0x4567, 0x8123);
        assert_eq!(block.word(), 0x8123_4567_89ab_cdef);
        assert_eq!(Block::from_word(block.word()), block);
        assert_eq!(
            (block.base(), block.len(), block.flags()),
            (0x89ab_cdef, 0x4567, 0x8123)
        );
        assert!(!block.is_empty() && Block::new(7, 0, 1).is_empty());
        assert_eq!(format!("{:?}", Block::new(7, 2, 0)), "7+2");
        assert_eq!(format!("{:?}", Block::new(7, 0, 0x12)), "7+0 flags 0x12");
    }

    #[test]
    fn kinds_have_numbers_and_words() {
        for (number, kind, word) in [
            (0, Frontend::NONE.kind(), "unknown"),
            (1, Kind::CLUSTER_IP, "ClusterIP"),
            (2, Kind::EXTERNAL_IP, "ExternalIP"),
            (3, Kind::LOAD_BALANCER, "LoadBalancer"),
            (4, Kind::NODE_PORT, "NodePort"),
            (5, Kind::CLUSTER_ADDRESS, "cluster address"),
            (6, Kind::NODE_ADDRESS, "node address"),
        ] {
            assert_eq!((kind.number(), kind.word()), (number, word));
        }
    }

    #[test]
    fn no_endpoint_has_port_0() {
        let addr = Addr::from_v4([10, 244, 0, 1]);
        assert!(Endpoint::NONE.is_none() && Endpoint::new(addr, Port::ANY).is_none());
        assert!(!Endpoint::new(addr, Port::new(1)).is_none());
    }

    #[test]
    fn successive_sockets_are_in_successive_sets() {
        for (cookie, element, set) in [
            (1, 0, 1),
            (15, 0, 15),
            (16, 1, 0),
            (0x0fff, 255, 15),
            (0x1000, 0, 0),
            (0x0123_4567_89ab_cdef, 0xde, 0xf),
        ] {
            assert_eq!(SocketSet::of(cookie), SocketSet { element, set });
            assert_eq!(SocketSet::of(flow_owner(cookie)), SocketSet::of(cookie));
        }
        assert_eq!(PEER_PORTS, 1024);
    }

    #[test]
    fn owners_of_one_socket_are_told_apart() {
        for cookie in [1, 0x1000, u64::MAX >> 2, u64::MAX, u64::MAX - 0x1000] {
            assert!(!is_flow_owner(cookie), "{cookie:x}");
            assert!(is_flow_owner(flow_owner(cookie)), "{cookie:x}");
        }
        assert!(!is_flow_owner(0) && is_flow_owner(BEING_WRITTEN));
    }
}
