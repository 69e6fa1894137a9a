//! Keys and values of the tables of mesh capture: which connections go to a proxy, and by which rules.
//!
//! ```text
//! CAPTURE    array   0           -> CaptureConfig  ports, and how the agent's proxy is recognised
//! NAMESPACES hash    netns cookie-> Enrolled       workloads with a network namespace of their own
//! CGROUPS    hash    cgroup id   -> Enrolled       workloads in the node's namespace
//! LOCALS     hash    Addr        -> Local          addresses at which workloads are reached
//! RULES      hash    RuleKey     -> u32            a policy's ports, users, interfaces, sets of clients
//! RANGES     lpm     RangeKey    -> u32            a policy's destination ranges; of policy 0, those that are reachable
//!                                                 under every egress policy; a workload's resolvers; a set of clients
//! KNOWN      hash    FrontendKey -> u32            ports of Pods, and resolvers, for egress; and workloads'
//!                                                 addresses, for labels and tunnels: [`LISTED`], [`HBONE`], [`SHARED`]
//! ASKERS     sk      socket      -> Askers         senders that a UDP socket may answer, though egress is denied
//! ORIGINS    hash    Tuple       -> Origin         connections on their way to a proxy
//! ORIGIN_COUNTS array counter    -> u64            how many of them each workload has: `origins.rs`
//! PROBES     hash    Tuple       -> u64            the kubelet's connections to workloads, and when each began
//! OWN        sk      socket      -> u32            the proxy's sockets that connect from a client's address
//! ACCEPTED   sk      socket      -> Origin         connections that a proxy has accepted
//! LISTENERS  sockhash ListenerKey-> socket         the proxy's listeners: for a workload's inbound and outbound connections,
//!                                                 for tunnels to it, for a workload that is captured by packets, and for
//!                                                 virtual interfaces
//! METERS     array   SocketSet   -> MeterSets      direct connections, which are measured
//! MORE_METERS sk     socket      -> Meter          likewise, for sockets whose set is full
//! TRAFFIC    hash    TrafficKey  -> Traffic        counters of direct connections
//! ```
//!
//! # A policy is immutable
//!
//! The agent writes a policy's rules under a number that is not in use yet, then points the workload's entry to the
//! number in one write, then removes the old rules: a connection sees the old policy or the new one. Numbers are not
//! reused, so the agent needs no grace period.
//!
//! # The original destination
//!
//! `connect` keeps the destination for the socket, as it keeps a VIP (`PEERS`). When the connection's four addresses
//! are known (`TCP_CONNECT_CB`), the destination goes to `ORIGINS`. When the proxy's side of the connection is there
//! (`PASSIVE_ESTABLISHED_CB`), it moves to that socket. An entry is removed when it is used, and at the latest when the
//! client's socket is closed. So a reused port finds no other connection's destination. `ORIGINS` also has the proxy's
//! own connections from clients' addresses, which `sk_lookup` must not capture: `connect` marks these sockets in `OWN`,
//! by the agent's cgroup.
//!
//! # Probes
//!
//! A program at the cgroup of the kubelet writes the kubelet's connections to workloads to `PROBES`, before the first
//! packet is sent, and removes them when the socket is closed. `sk_lookup` in the workload's network namespace does not
//! capture connections in `PROBES`. Only the kubelet's own socket makes an entry: an address or a mark would not do. The
//! value is the time in ns of `CLOCK_MONOTONIC`. After [`PROBE_BEGINS`] an entry has no effect, because its
//! connection is established or has failed.
//!
//! # Tunnels
//!
//! Port [`TUNNELS`] of a workload with [`Enrolled::TUNNELS`] is the proxy's, whatever the workload's rules say. `sk_lookup` in
//! the workload's network namespace gives the connections to a listener of the proxy, which is bound to another port. So an
//! application may listen at port [`TUNNELS`], too, but only the workload itself reaches this application. If there is no
//! listener, the program refuses the connections ([`tunnel`]). A workload that is captured by packets accepts no tunnels:
//! packets to such a workload go to its own sockets, which are elsewhere.

mod decisions;
mod fields;
mod traffic;
mod word;

pub use decisions::{
    Circumstances, Rules, by_interface, decide_datagram, decide_outbound, excludes_user, exempts,
    inbound, is_exempt, is_query, judged, judged_at, must_be_plain, outbound, tunnel,
    without_proxy,
};
pub use fields::Field;
pub use traffic::{Meter, MeterSets, TRAFFIC, Traffic, TrafficKey};
pub use word::{
    MESH_CGROUPS, MESH_DENIES, MESH_DNS, MESH_GUARD, MESH_NAMESPACES, MESH_PACKETS, MESH_PORT,
    dns_server, is_proxy,
};

use crate::{Addr, Port};

layout! {
    /// Settings that all captured workloads share.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct CaptureConfig {
        /// The cgroup of the agent, whose proxy's connections are not captured; 0: it has none. The first
        /// word in every layout.
        pub agent_cgroup: u64,
        /// The cgroup of the previous agent, if it differs: its proxy serves its connections until they end. (On
        /// Kubernetes each agent has its pod's cgroup.)
        pub before_cgroup: u64,
        /// The mark of the sockets of the agent's proxy (`SO_MARK`).
        pub mark: u32,
        /// At which levels of the hierarchy there are entries of `CGROUPS`, one bit each.
        pub levels: u32,
        /// The proxy's port for outbound connections, at loopback in the workload's namespace.
        pub outbound: Port,
        /// The port of the proxy's listeners for inbound connections.
        pub inbound: Port,
        /// [`CaptureConfig::FOREIGN`] and so on.
        pub flags: u32,
    }

    /// A workload whose connections are captured.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Enrolled {
        /// Its policy's number, for `RULES` and `RANGES`.
        pub policy: u32,
        /// The policy's flags: [`Enrolled::PROXY`] and so on; 0: nothing in the namespace is captured, and the guard
        /// lets its connections pass.
        pub flags: u32,
        /// Its own number, for `TRAFFIC` and for rules of its interfaces.
        pub workload: u32,
        /// The number of its resolvers in `RANGES`, which no policy has; 0: its queries are not captured.
        pub resolvers: u32,
    }

    /// An address at which a workload is reached.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Local {
        /// Its network namespace; 0 if it is captured by its packets ([`Enrolled::PACKETS`]).
        pub netns: u64,
        /// As [`Enrolled::policy`].
        pub policy: u32,
        /// As [`Enrolled::flags`].
        pub flags: u32,
        /// As [`Enrolled::workload`].
        pub workload: u32,
        /// As [`Enrolled::resolvers`], of a workload that is captured by its packets; else 0.
        pub resolvers: u32,
    }

    /// A rule of a policy.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct RuleKey {
        /// [`Enrolled::policy`]; for [`RuleKey::INTERFACE`], [`Enrolled::workload`].
        pub of: u32,
        /// [`RuleKey::OUTBOUND_PORT`] and so on.
        pub kind: u32,
        /// Port in host order, user, group or interface number.
        pub id: u32,
    }

    /// A destination range of a policy.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct RangeKey {
        /// Bits that count: 32 of the policy's number, then those of the address.
        pub bits: u32,
        /// [`Enrolled::policy`].
        pub policy: u32,
        /// The range.
        pub addr: Addr,
    }

    /// A connection to a proxy, by its addresses in its network namespace.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Tuple {
        /// The namespace: loopback addresses are in all of them.
        pub netns: u64,
        /// The client.
        pub client: Addr,
        /// The proxy.
        pub proxy: Addr,
        /// The client's port.
        pub client_port: Port,
        /// The proxy's port.
        pub proxy_port: Port,
        /// Zero.
        pub reserved: u32,
    }

    /// The original destination of a connection.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Origin {
        /// Its destination.
        pub addr: Addr,
        /// Its port.
        pub port: Port,
        /// The element of `ORIGIN_COUNTS` that counts the entry; 0: it is not counted.
        pub counter: u16,
    }

    /// A proxy's listener for inbound connections of a network namespace, for tunnels to it, for connections that come into
    /// it by virtual interfaces, or for outbound ones of a workload that is captured by its packets.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct ListenerKey {
        /// The network namespace; 0 if it is for a workload's packets.
        pub netns: u64,
        /// 4 or 6: the family of connections that it can accept.
        pub family: u32,
        /// [`Enrolled::workload`]; 0 if it is for inbound connections of a network namespace; [`ListenerKey::OUTBOUND`];
        /// [`ListenerKey::TUNNELS`].
        pub workload: u32,
    }

    /// A sender of a datagram to a UDP socket, which the socket may answer.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Asker {
        /// Its address.
        pub addr: Addr,
        /// Its port; 0 in a free place.
        pub port: Port,
        /// Zero.
        pub reserved: u16,
    }

    /// The latest askers of a socket, each in the place that its address and port lead to.
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct Askers {
        /// The places.
        pub places: [Asker; ASKERS],
    }
}

impl CaptureConfig {
    /// The proxy is not the agent's: the process that listens at `inbound` in a workload's namespace is the proxy.
    pub const FOREIGN: u32 = 1;
    /// `LOCALS` has a workload whose inbound connections go direct and are measured. Without this flag, the programs
    /// ignore connections that arrive.
    pub const ARRIVALS: u32 = 1 << 1;
}

impl Enrolled {
    /// Outbound connections go to the proxy; without it, direct.
    pub const PROXY: u32 = 1;
    /// Unknown destinations are refused.
    pub const EGRESS_DENY: u32 = 1 << 1;
    /// While the proxy does not listen, connections go direct; without it, they are refused.
    pub const FAIL_OPEN: u32 = 1 << 2;
    /// Inbound connections go to the proxy.
    pub const INBOUND: u32 = 1 << 3;
    /// Inbound ports without a rule are captured.
    pub const INBOUND_OTHERS: u32 = 1 << 4;
    /// There are rules of this kind: without it, the programs look for none.
    pub const HAS_RANGES: u32 = 1 << 5;
    /// See [`Enrolled::HAS_RANGES`].
    pub const HAS_OUTBOUND_PORTS: u32 = 1 << 6;
    /// See [`Enrolled::HAS_RANGES`].
    pub const HAS_INBOUND_PORTS: u32 = 1 << 7;
    /// See [`Enrolled::HAS_RANGES`].
    pub const HAS_USERS: u32 = 1 << 8;
    /// See [`Enrolled::HAS_RANGES`].
    pub const HAS_INTERFACES: u32 = 1 << 9;
    /// Its connections are captured by the packets that it sends. Without [`Enrolled::CAPTURED`]: they were, and the
    /// connections that its proxy still has go on.
    pub const PACKETS: u32 = 1 << 10;
    /// Of a [`Local`]: its connections were captured by packets, and now by sockets. The connections that its proxy
    /// still has go on.
    pub const PACKETS_BEFORE: u32 = 1 << 11;
    /// Only users and groups with a rule that says so are captured. Needs [`Enrolled::HAS_USERS`].
    pub const ONLY_USERS: u32 = 1 << 12;
    /// Connections that come into its network namespace by some of its interfaces are captured as outbound ones.
    pub const VIRTUAL: u32 = 1 << 13;
    /// Flags that need the program at the socket lookup of the network namespace.
    pub const LOOKED_UP: u32 = Self::PROXY
        | Self::INBOUND
        | Self::VIRTUAL
        | Self::REFUSES_INBOUND
        | Self::JUDGES_INBOUND
        | Self::TUNNELS;
    /// Some range of loopback is captured. Needs [`Enrolled::HAS_RANGES`].
    pub const LOOPBACK: u32 = 1 << 14;
    /// Outbound connections to a service with [`Block::REFUSED`](crate::tables::Block::REFUSED) are refused.
    pub const REFUSES_SERVICES: u32 = 1 << 15;
    /// Inbound connections are refused, at least at some ports.
    pub const REFUSES_INBOUND: u32 = 1 << 16;
    /// Inbound connections to ports without a rule are refused, if [`Enrolled::INBOUND_OTHERS`] captures them.
    pub const REFUSES_OTHER_PORTS: u32 = 1 << 17;
    /// Inbound connections to port [`TUNNELS`] go to the proxy's listener for tunnels.
    pub const TUNNELS: u32 = 1 << 18;
    /// The workload has an identity, and the agent's proxy makes tunnels: a connection to a destination that speaks HBONE does
    /// not go direct while the proxy does not listen.
    pub const ENCRYPTS: u32 = 1 << 19;
    /// Only outbound connections to destinations that speak HBONE go to the proxy, all others direct. Needs
    /// [`Enrolled::PROXY`] and [`Enrolled::ENCRYPTS`].
    pub const ONLY_HBONE: u32 = 1 << 20;
    /// Without a proxy: Istio's policies forbid inbound connections of some clients ([`judged`]).
    pub const JUDGES_INBOUND: u32 = 1 << 21;
    /// The entry is a workload's. Without this flag, an entry with resolvers belongs to a workload of which the agent
    /// captures only the DNS queries. Any other entry belongs to a namespace without a captured workload.
    pub const CAPTURED: u32 = 1 << 31;

    /// Whether it is the entry of a namespace whose connections the guard lets pass.
    pub const fn is_let_go(&self) -> bool {
        self.flags == 0 && self.workload == 0
    }

    /// Whether the programs look at the connections or the queries of the workload.
    #[inline(always)]
    pub const fn is_judged(&self) -> bool {
        self.flags & Self::CAPTURED != 0 || self.resolvers != 0
    }
}

impl Local {
    /// Whether its connections are captured by its packets, or were.
    pub const fn is_by_packets(&self) -> bool {
        self.flags & Enrolled::PACKETS != 0
    }

    /// Whether there are, or may be, connections that are captured by its packets.
    #[inline(always)]
    pub const fn has_packets(&self) -> bool {
        self.flags & (Enrolled::PACKETS | Enrolled::PACKETS_BEFORE) != 0
    }

    /// Whether connections to it are measured at arrival: no proxy stands between the workload and its clients.
    #[inline(always)]
    pub const fn is_measured(&self) -> bool {
        let flags = Enrolled::CAPTURED | Enrolled::INBOUND | Enrolled::PACKETS;
        self.flags & flags == Enrolled::CAPTURED
    }

    /// The workload, as it is enrolled.
    pub const fn enrolled(&self) -> Enrolled {
        Enrolled {
            policy: self.policy,
            flags: self.flags,
            workload: self.workload,
            resolvers: self.resolvers,
        }
    }
}

impl Asker {
    /// The place of an address and port.
    #[inline(always)]
    pub const fn place(addr: Addr, port: Port) -> usize {
        let [a, b, c, d] = addr.words();
        let mixed = (a ^ b ^ c ^ d ^ port.be() as u32).wrapping_mul(0x9e37_79b1);
        (mixed >> 26) as usize & (ASKERS - 1)
    }
}

impl ListenerKey {
    /// The workload's number in the key of [`ListenerKey::of_outbound`].
    pub const OUTBOUND: u32 = u32::MAX;
    /// The workload's number in the key of [`ListenerKey::of_tunnels`].
    pub const TUNNELS: u32 = u32::MAX - 1;

    /// For inbound connections to a network namespace.
    pub const fn of_namespace(netns: u64, v4: bool) -> Self {
        Self {
            netns,
            family: if v4 { 4 } else { 6 },
            workload: 0,
        }
    }

    /// For tunnels to a network namespace.
    pub const fn of_tunnels(netns: u64, v4: bool) -> Self {
        Self {
            workload: Self::TUNNELS,
            ..Self::of_namespace(netns, v4)
        }
    }

    /// For connections that come into a network namespace by virtual interfaces. `workload`: the workload in this
    /// namespace.
    pub const fn of_interfaces(netns: u64, workload: u32, v4: bool) -> Self {
        Self {
            netns,
            family: if v4 { 4 } else { 6 },
            workload,
        }
    }

    /// For outbound connections in a network namespace that are led to an address of loopback other than 127.0.0.1:
    /// [`spread`].
    pub const fn of_outbound(netns: u64) -> Self {
        Self {
            netns,
            family: 4,
            workload: Self::OUTBOUND,
        }
    }

    /// For outbound connections of a workload that is captured by its packets.
    pub const fn of_packets(workload: u32, v4: bool) -> Self {
        Self {
            netns: 0,
            family: if v4 { 4 } else { 6 },
            workload,
        }
    }
}

impl RuleKey {
    /// A destination port of outbound connections.
    pub const OUTBOUND_PORT: u32 = 1;
    /// A local port of inbound connections.
    pub const INBOUND_PORT: u32 = 2;
    /// A user.
    pub const USER: u32 = 3;
    /// A group.
    pub const GROUP: u32 = 4;
    /// An interface of the workload: [`EXCLUDED`] if no inbound connection is captured there, [`CAPTURED`] if connections that
    /// come in there are captured as outbound ones, or both.
    pub const INTERFACE: u32 = 5;
    /// A local port, or [`RuleKey::ALL_PORTS`]: the value is the number of a set of clients in `RANGES`.
    pub const SOURCES: u32 = 6;
    /// All ports without a rule of their own. Old rules go in the order of their keys: this one before those of ports.
    pub const ALL_PORTS: u32 = 0;
}

/// Value of a rule: its connections are captured.
pub const CAPTURED: u32 = 1;
/// Value of a rule: its connections are not captured.
pub const EXCLUDED: u32 = 2;
/// Value of a rule about a local port: its connections are refused ([`crate::Reason::Unsupported`]).
/// In a set of clients: their connections are refused by the policy whose number is above [`REFUSED_BY`] bits.
pub const REFUSED: u32 = 4;
/// See [`REFUSED`].
pub const REFUSED_BY: u32 = 3;
/// Value of a rule: its connections are not captured, but the egress policy still applies to them. Labels and
/// annotations have this value where the configuration denies egress.
pub const JUDGED: u32 = 3;

/// Value of an entry of `KNOWN`: the destination is known.
pub const LISTED: u32 = 1;
/// In the value of an address in `KNOWN`: a workload that has the address speaks HBONE, or has a waypoint.
pub const HBONE: u32 = 1 << 1;
/// Beside [`HBONE`]: the workload has a waypoint. No program reads it, only `explain`.
pub const WAYPOINT: u32 = 1 << 2;
/// In the value of an address in `KNOWN` with [`HBONE`]: several workloads have the address, so the proxy refuses connections to
/// it. Only `explain` reads this.
pub const SHARED: u32 = 1 << 3;

/// The address of loopback at which a captured connection to this destination is handed to the proxy. If all
/// connections had one address, two sockets of one local port could not connect to two destinations, and all of a
/// workload's connections would share the local ports of one destination. The function never returns 127.0.0.1, a
/// broadcast address or an address above 127.127.255.255. IPv6 has only one loopback address.
#[inline(always)]
pub const fn spread(addr: Addr, port: Port) -> Addr {
    let words = addr.words();
    let folded = words[0] ^ words[1] ^ words[2] ^ words[3];
    let ports = (port.be() as u32).wrapping_mul(0x85eb_ca6b);
    let mixed = folded.wrapping_mul(0x9e37_79b1) ^ ports;
    let [_, second, third, last] = (mixed ^ mixed >> 15)
        .wrapping_mul(0x2c1b_3c6d)
        .to_be_bytes();
    Addr::from_v4([127, second & 0x7f | 1, third, last])
}

/// The policy whose ranges are reachable under every egress policy.
pub const REACHABLE: u32 = 0;

/// The port of resolvers.
pub const DNS: Port = Port::new(53);

/// The port at which workloads accept tunnels (HBONE).
pub const TUNNELS: Port = Port::new(15_008);

/// The bit that the mark of the proxy's sockets has in addition if they connect from a client's address. Only the
/// answers to them carry it, and so come back to the proxy. On the node, packets that were handed to the proxy's socket
/// have this bit likewise, and no socket has it.
pub const FROM_CLIENT: u32 = 1 << 31;

/// Whether the mark `found`, of a packet or of a socket, has every bit of a mark of ours. The other bits belong to
/// other programs: the function ignores them.
#[inline(always)]
pub const fn has_mark(found: u32, mark: u32) -> bool {
    found & mark == mark
}

/// The most workloads on one node.
pub const WORKLOADS: u32 = 16_384;
/// The most listeners of proxies. A workload has three, or five if it accepts tunnels: then 9830 workloads have room.
pub const LISTENERS: u32 = WORKLOADS * 3;
/// The most rules, and the most ranges, of all policies together.
pub const RULES: u32 = 262_144;
/// The most addresses of workloads and endpoints.
pub const KNOWN: u32 = 1 << 20;
/// The most connections on their way to a proxy at once.
pub const ORIGINS: u32 = 1 << 17;
/// The most connections of the kubelet to workloads at once.
pub const PROBES: u32 = 1 << 13;
/// The time in ns in which the first packets of such a connection arrive. A kubelet gives its probe up earlier.
pub const PROBE_BEGINS: u64 = 60_000_000_000;
/// How many senders a UDP socket may answer at the same time, though egress is denied to it.
pub const ASKERS: usize = 64;

const _: () = assert!(size_of::<CaptureConfig>() == 32);
const _: () = assert!(size_of::<Enrolled>() == 16);
const _: () = assert!(size_of::<Local>() == 24);
const _: () = assert!(size_of::<RuleKey>() == 12);
const _: () = assert!(size_of::<RangeKey>() == 24);
const _: () = assert!(size_of::<Tuple>() == 48);
const _: () = assert!(size_of::<Origin>() == 20);
const _: () = assert!(size_of::<ListenerKey>() == 16);
const _: () = assert!(size_of::<Asker>() == 20);
const _: () = assert!(ASKERS.is_power_of_two());

#[cfg(test)]
mod tests;
