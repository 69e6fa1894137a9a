//! Keys and values of the packet path's tables, which the TC programs share with user space.
//!
//! ```text
//! IFACES     hash  ifindex    -> Iface        kinds of interfaces: pods' side or uplink
//! SOURCES    lpm   SourceKey  -> u32          load balancers' clients; addresses of pods; networks that IPsec protects
//! NODE_ADDRS array index      -> Addr         the node's addresses that flows are masqueraded to
//! CONNTRACK  cells FlowKey    -> Translation  flows, by the addresses and ports of their requests
//! ANSWERS    slots FlowKey, PortKey -> cell   flows, by the addresses and ports of their replies
//! SEQUENCES  array cell       -> Sequences    how far a TCP flow's directions have got (`tcp`)
//! CAME_BY    array cell / 2   -> [u32; 2]     the uplink by which a flow's client comes
//! FRAGMENTS  lru   FragmentKey-> Fragment     the ports of a datagram whose later fragments come
//! ```
//!
//! # A flow
//!
//! A flow has one entry of 64 bytes, for both directions, and a slot of four that leads to it. Packets from the client
//! find it by (client, VIP), the key. The entry says which endpoint answers. If the flow is masqueraded, the entry also
//! says from which address and port of the node the endpoint sees the client come. Packets from the endpoint find the
//! entry by the slot, by (endpoint, client) or, if the flow is masqueraded, by (endpoint, the node's port).
//! [`cells`](crate::cells) describes where an entry is, and how programs make and remove it.
//!
//! A client may reach one endpoint through two VIPs from one port at the same time. The second flow then has another
//! port of the client's ([`Translation::seen_port`]), because replies carry only the endpoint's and the client's
//! address and port.
//!
//! # Time
//!
//! Entries say when they were last used in [`Tick`]s of 2^32 ns (4.3 s), and are written to only
//! when the tick or a flag changes: a packet of a flow in use costs a lookup and no store.

use core::ops::RangeInclusive;

use crate::{Addr, Port, Protocol, states::Timeouts};

layout! {
    /// An interface with our programs on it.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Iface {
        /// [`Iface::PEER`], [`Iface::LOCAL`] and others, and which pod's it is ([`Iface::of_pod`]).
        pub flags: u16,
        /// Index into `NODE_ADDRS` of the address that IPv4 flows leaving by this interface are
        /// masqueraded to; 0: there is none.
        pub masquerade_v4: u8,
        /// Likewise for IPv6.
        pub masquerade_v6: u8,
        /// Its layer-2 segment: the number of the bridge that it is, is a port of, or stands on; 0: none.
        pub segment: u32,
    }

    /// The key of `SOURCES`. `BPF_MAP_TYPE_LPM_TRIE`: the bits after the first word are matched from the first byte's
    /// highest bit on.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub struct SourceKey {
        /// How many bits count, [`SourceKey::SET_BITS`] included.
        pub prefix: u32,
        /// The set: [`SourceKey::PODS`], [`SourceKey::HOST`], [`SourceKey::BRIDGES`], or the pool of a load balancer whose source ranges they
        /// are.
        pub set: u32,
        /// The address.
        pub addr: Addr,
    }

    /// The addresses, ports and protocol of a packet. Aligned to eight bytes, because it is compared by words.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct FlowKey {
        /// Source address.
        pub src: Addr,
        /// Destination address.
        pub dst: Addr,
        /// Source port.
        pub src_port: Port,
        /// Destination port.
        pub dst_port: Port,
        /// TCP or UDP.
        pub protocol: Protocol,
        /// Zero.
        pub padding: u8,
        /// Zero.
        pub reserved: u16,
    }

    /// The translation of a flow's packets, and the bits of [`crate::seen`] for them.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Translation {
        /// The endpoint.
        pub endpoint: Addr,
        /// The endpoint's port.
        pub endpoint_port: Port,
        /// The port that the endpoint sees the client come from. [`Port::ANY`]: the client's own.
        pub node_port: Port,
        /// When last used, by either direction.
        pub used: Tick,
        /// Flags of [`crate::seen`], of requests and of replies.
        pub seen: u8,
        /// Index into `NODE_ADDRS` of the address that the endpoint sees the client come from; 0:
        /// the flow is not masqueraded.
        pub node_addr: u8,
    }

    /// The endpoint, ports and protocol of replies to a masqueraded flow: an endpoint sees each port of the node's used
    /// once, for any of the node's addresses.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct PortKey {
        /// The endpoint.
        pub endpoint: Addr,
        /// The endpoint's port.
        pub endpoint_port: Port,
        /// The port that the endpoint sees the client come from.
        pub node_port: Port,
        /// TCP or UDP.
        pub protocol: Protocol,
        /// Zero.
        pub padding: u8,
        /// Zero.
        pub reserved: u16,
    }

    /// The fields that the fragments of one datagram share (RFC 791 section 3.2, RFC 8200 section 4.5).
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct FragmentKey {
        /// Source address.
        pub src: Addr,
        /// Destination address.
        pub dst: Addr,
        /// The identification, in network order; IPv4's in the first two bytes.
        pub identification: [u8; 4],
        /// TCP or UDP.
        pub protocol: Protocol,
        /// Zero.
        pub padding: u8,
        /// Zero.
        pub reserved: u16,
    }

    /// The fields that only the first fragment carries.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fragment {
        /// Source port.
        pub src_port: Port,
        /// Destination port.
        pub dst_port: Port,
    }

    /// A time in units of 2^32 ns since boot (CLOCK_MONOTONIC), modulo 2^16: three days and a quarter, more than any
    /// timeout.
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Tick(u16);
}

impl Iface {
    /// Packets for the pod at the other end may be handed over by `bpf_redirect_peer`: no other program or rule has
    /// anything on the interface's way out, which the helper bypasses.
    pub const PEER: u16 = 1;
    /// The interface is a pod's. Packets that arrive here come from pods, even if their source address says otherwise
    /// ([`PacketConfig::DETECT_BY_INTERFACE`]).
    pub const LOCAL: u16 = 2;
    /// Our programs belong on it, and were attached: `status` compares this. Until then a pod's interface lacks this
    /// flag, and any other interface is not in the table ([`Iface::is_ready`]).
    pub const ATTACHED: u16 = 4;
    /// Its packets have no link-layer header: a tunnel's, WireGuard's, a tun's.
    pub const BARE: u16 = 8;
    /// A packet must arrive at the interface to which the route to its source leads. At an uplink: an IPv4 flow begins
    /// here only if the route leads to this interface (`rp_filter` is 1). At a pod's interface, for both families and
    /// each packet: the route may also lead to another interface of the same pod or in the same segment.
    pub const STRICT: u16 = 16;
    /// There must be a route to a packet's source: for an IPv4 flow that begins at an uplink (`rp_filter` is 2). At a
    /// pod's interface, for each packet, the route must not lead to another pod: the interface is a port of a switch in
    /// which the node has no address, or none that it knows of.
    pub const LOOSE: u16 = 32;
    /// From this bit on: which pod is at the other end, as a number from 1 on; 0: not known.
    const POD_AT: u32 = 6;

    /// The flag bits for an interface whose other end is in a network namespace, by the number that the node's own
    /// namespace knows it by. There is room for a thousand; others count as not known.
    pub fn of_pod(netns: i32) -> u16 {
        let number = u16::try_from(netns).map_or(0, |netns| netns.saturating_add(1));
        if number > u16::MAX >> Self::POD_AT {
            return 0;
        }
        number << Self::POD_AT
    }

    /// Whether the programs see a pod's replies, because they are attached to its interface. An interface that is not a
    /// pod's may need no programs and counts as ready.
    #[inline(always)]
    pub const fn is_ready(self) -> bool {
        self.flags & (Self::LOCAL | Self::ATTACHED) != Self::LOCAL
    }

    /// Whether the interface is a pod's, and the agent asks the programs to check the sources of the pod's packets.
    #[inline(always)]
    pub const fn checks_a_pod(self) -> bool {
        self.flags & Self::LOCAL != 0 && self.flags & (Self::STRICT | Self::LOOSE) != 0
    }

    /// Whether the other ends of both belong to one pod.
    #[inline(always)]
    pub const fn is_same_pod(self, other: Self) -> bool {
        let pod = self.flags >> Self::POD_AT;
        pod != 0 && pod == other.flags >> Self::POD_AT
    }

    /// Whether both are in one layer-2 segment.
    #[inline(always)]
    pub const fn is_same_segment(self, other: Self) -> bool {
        self.segment != 0 && self.segment == other.segment
    }
}

impl SourceKey {
    /// The set of pods' addresses (a pool's index is never 0).
    pub const PODS: u32 = 0;
    /// The set of the node's own addresses: destinations of its routes of type `local` (no pool has this index).
    pub const HOST: u32 = u32::MAX;
    /// The set of the addresses of the node's bridges that are no uplinks: as a rule, no other machine has a route to them.
    /// No pool has this index.
    pub const BRIDGES: u32 = 1 << 30;
    /// Sets from this one on are networks of IPsec policies ([`PacketConfig::policies`]). No pool has such an index;
    /// [`SourceKey::HOST`] is none of these sets.
    pub const POLICIES: u32 = 1 << 31;
    /// IPsec policies require packets between two networks to be encrypted, or dropped.
    pub const PROTECTED: u32 = 1;
    /// IPsec policies let packets between two networks pass as they are.
    pub const PASSED: u32 = 2;
    /// The bits of the key that hold the set.
    pub const SET_BITS: u32 = 32;

    /// Whether the network is an IPsec policy's.
    pub const fn is_of_policy(&self) -> bool {
        self.set >= Self::POLICIES && self.set != Self::HOST
    }

    /// Whether the network is of pods or of the node, and not a load balancer's source range.
    pub const fn is_of_node(&self) -> bool {
        self.set == Self::PODS || self.set == Self::HOST || self.set == Self::BRIDGES
    }

    /// A whole address, for lookups.
    #[inline(always)]
    pub const fn host(set: u32, addr: Addr) -> Self {
        Self::network(set, addr, 128)
    }

    /// A network of `length` bits, counted as those of a 16-byte address (96 more than as an IPv4
    /// one).
    #[inline(always)]
    pub const fn network(set: u32, addr: Addr, length: u32) -> Self {
        Self {
            prefix: Self::SET_BITS + length,
            set,
            addr,
        }
    }
}

impl FlowKey {
    /// The key of a packet.
    #[inline(always)]
    pub const fn new(
        src: Addr,
        src_port: Port,
        dst: Addr,
        dst_port: Port,
        protocol: Protocol,
    ) -> Self {
        Self {
            src,
            dst,
            src_port,
            dst_port,
            protocol,
            padding: 0,
            reserved: 0,
        }
    }
}

impl Translation {
    /// Returns the port that the endpoint sees the client of the flow `key` come from.
    #[inline(always)]
    pub fn seen_port(&self, key: &FlowKey) -> Port {
        if self.node_port == Port::ANY {
            key.src_port
        } else {
            self.node_port
        }
    }
}

impl PortKey {
    /// A port of the node's, as an endpoint sees it.
    #[inline(always)]
    pub const fn new(
        endpoint: Addr,
        endpoint_port: Port,
        node_port: Port,
        protocol: Protocol,
    ) -> Self {
        Self {
            endpoint,
            endpoint_port,
            node_port,
            protocol,
            padding: 0,
            reserved: 0,
        }
    }
}

impl Tick {
    /// From `bpf_ktime_get_ns()`, or `bpf_ktime_get_coarse_ns()`, or CLOCK_MONOTONIC.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "modulo 2^16")]
    pub const fn from_ns(ns: u64) -> Self {
        Self((ns >> 32) as u16)
    }

    /// From the number in the table.
    #[inline(always)]
    pub const fn from_number(number: u16) -> Self {
        Self(number)
    }

    /// The number in the table.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        self.0
    }

    /// How many ticks before `now` this was; 0 also for the next tick, which another CPU may have seen already.
    #[inline(always)]
    pub const fn ticks_before(self, now: Self) -> u32 {
        let ticks = now.0.wrapping_sub(self.0);
        if ticks == u16::MAX { 0 } else { ticks as u32 }
    }

    /// How many seconds before `now` this was, rounded up. A time later than `now` (by a tick that began while the
    /// table was read) counts as now.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^48 ns")]
    pub const fn age_seconds(self, now: Self) -> u32 {
        ((self.ticks_before(now) as u64 * (1 << 32)).div_ceil(1_000_000_000)) as u32
    }
}

/// For how long after its beginning a UDP flow's packets do not make it a stream, in nanoseconds (`stream_ts` in
/// `net/netfilter/nf_conntrack_proto_udp.c`).
pub const STREAM_AFTER: u64 = 2_000_000_000;

/// Returns the first and the last port, host byte order, of the range from which a client's flow gets another port than
/// its own. The ranges are netfilter's (`nf_nat_l4proto_unique_tuple` in `net/netfilter/nf_nat_core.c`), because some
/// servers trust ports below 1024.
#[inline(always)]
pub const fn client_ports(own: Port) -> (u16, u16) {
    match own.host() {
        0..512 => (1, 511),
        512..1024 => (600, 1023),
        _ => (1024, u16::MAX),
    }
}

layout! {
    /// Settings of the TC programs, written by user space: element 0 of `PACKET_CONFIG`.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PacketConfig {
        /// Flags: [`PacketConfig::DETECT_BY_ADDRESS`] and so on; and [`PacketConfig::bare`].
        pub flags: u32,
        /// The first port of the host's own ephemeral range (`net.ipv4.ip_local_port_range`), host byte order:
        /// masqueraded flows get these ports only if few others are left ([`PacketConfig::avoids`]).
        pub ephemeral_first: u16,
        /// The last port of that range.
        pub ephemeral_last: u16,
        /// The bits of a place that count: the number of cells of `CONNTRACK`, a power of two, minus one. `ANSWERS` has
        /// twice as many slots.
        pub cells: u32,
        /// The set in `SOURCES` of the networks to which packets of IPsec policies go (value 0: such a network is not
        /// protected); 0: no policy protects anything; [`PacketConfig::ALL_PROTECTED`]: everything is protected. The
        /// values of this set are sets of the networks from which such packets come, whose values are
        /// [`SourceKey::PROTECTED`] and [`SourceKey::PASSED`].
        pub policies: u32,
        /// How many ICMP errors may be sent.
        pub errors: ErrorLimits,
        /// The timeouts of flows.
        pub timeouts: Timeouts,
        /// The secret of the flows' tables, an even number: it decides in which cells a flow may be, so that no client
        /// can predict them. 0: there are no tables.
        pub secret: u64,
    }

    /// How many ICMP errors the programs may send: the kernel's own limits, from its sysctls.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ErrorLimits {
        /// The kinds of errors that are limited: [`ErrorLimits::UNREACHABLE_V4`] and so on.
        pub kinds: u32,
        /// One error in so many milliseconds to each IPv4 address (`net.ipv4.icmp_ratelimit`), after a first
        /// [`ErrorLimits::BURST`]; 0: any number.
        pub v4_ms: u32,
        /// Likewise for IPv6 (`net.ipv6.icmp.ratelimit`).
        pub v6_ms: u32,
        /// Errors in a second to all addresses (`net.ipv4.icmp_msgs_per_sec`, which is for both families).
        pub per_second: u32,
        /// How many more at once (`net.ipv4.icmp_msgs_burst`).
        pub burst: u32,
        /// Zero.
        pub reserved: u32,
    }
}

impl ErrorLimits {
    /// Destination unreachable, the type of refusals (`net.ipv4.icmp_ratemask`).
    pub const UNREACHABLE_V4: u32 = 1;
    /// Time exceeded.
    pub const EXCEEDED_V4: u32 = 2;
    /// Destination unreachable of ICMPv6 (`net.ipv6.icmp.ratemask`).
    pub const UNREACHABLE_V6: u32 = 4;
    /// Time exceeded of ICMPv6.
    pub const EXCEEDED_V6: u32 = 8;
    /// How many errors one address gets at once (`XRLIM_BURST_FACTOR` in `net/ipv4/inetpeer.c`).
    pub const BURST: u32 = 6;
}

impl PacketConfig {
    /// Every packet counts as covered by an IPsec policy.
    pub const ALL_PROTECTED: u32 = u32::MAX;
    /// A client is a pod if its address is in the set [`SourceKey::PODS`] (kube-proxy's detectLocalMode ClusterCIDR and
    /// NodeCIDR).
    pub const DETECT_BY_ADDRESS: u32 = 1;
    /// A client is a pod if its packets arrive at an interface with [`Iface::LOCAL`] (BridgeInterface and
    /// InterfaceNamePrefix).
    pub const DETECT_BY_INTERFACE: u32 = 2;
    /// Flags by which the programs recognize pods.
    pub const DETECTS: u32 = Self::DETECT_BY_ADDRESS | Self::DETECT_BY_INTERFACE;
    /// Every flow to a cluster IP is masqueraded (`packets.masqueradeAll`).
    pub const MASQUERADE_ALL: u32 = 4;
    /// A packet's route does not depend on its ports: no routing rule matches ports, and no multipath route hashes
    /// them.
    pub const WAYS_BY_ADDRESS: u32 = 8;
    /// An interface has addresses in several networks: the route decides which one a flow is masqueraded to.
    pub const SEVERAL_NETWORKS: u32 = 1 << 8;
    /// There are several uplinks: answers leave by the one that their flow came by, if a route leads to the client by it.
    pub const SEVERAL_UPLINKS: u32 = 1 << 9;
    /// A program may be preempted by another on its CPU, in its middle (`PREEMPT_RT`).
    pub const PREEMPTIBLE: u32 = 1 << 15;
    /// The first port that masqueraded flows get, host byte order.
    pub const FIRST_PORT: u16 = 1024;
    /// How many ports there are from [`Self::FIRST_PORT`] on.
    pub const PORTS: u32 = (1 << 16) - Self::FIRST_PORT as u32;
    /// Kubernetes' default range of node ports (`--service-node-port-range`), host byte order.
    pub const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

    /// Returns whether masqueraded flows get another port than this one (host byte order). The fewer ports are left,
    /// the higher `need` is:
    ///
    /// * [`need::LITTLE`]: no port that the host's own sockets get. And for UDP no port of Kubernetes' default range of
    ///   node ports: if a service gets this port later, datagrams of an endpoint's socket would go to the service.
    /// * [`need::MORE`]: no port that `connect()` tries first, which is every second one of the host's range
    ///   (`__inet_hash_connect` in `net/ipv4/inet_hashtables.c`), and no such node port.
    /// * [`need::ALL`]: no port that `connect()` tries first. These ports are the node's own, for any number of flows.
    #[inline(always)]
    pub const fn avoids(&self, port: u16, protocol: Protocol, need: u32) -> bool {
        if port < Self::FIRST_PORT {
            return true;
        }
        let of_host = self.ephemeral_first <= port && port <= self.ephemeral_last;
        if of_host && (need < need::MORE || (port - self.ephemeral_first) & 1 == 0) {
            return true;
        }
        let is_tcp = protocol.number() == Protocol::TCP.number();
        need < need::ALL
            && !is_tcp
            && *Self::NODE_PORTS.start() <= port
            && port <= *Self::NODE_PORTS.end()
    }

    /// Returns how many masqueraded flows of a protocol an endpoint can have: one for each port that is not avoided.
    pub fn ports(&self) -> u32 {
        let free = |port: &u16| !self.avoids(*port, Protocol::TCP, need::ALL);
        u32::try_from((0..=u16::MAX).filter(free).count()).unwrap_or(Self::PORTS)
    }

    /// The flag bit of an interface: if it is set, this interface may have [`Iface::BARE`]. So packets of all other
    /// interfaces, on most nodes of all, need no look at `IFACES`.
    #[inline(always)]
    pub const fn bare(ifindex: u32) -> u32 {
        1 << (16 + ifindex % 16)
    }
}

/// Takes a token from a bucket: `empty_at` is the time at which the bucket was empty, if tokens come one in `interval`.
/// Returns this time after one more token is taken `now`; `None` if there is none. The bucket holds `burst` tokens
/// (`inet_peer_xrlim_allow` in `net/ipv4/inetpeer.c`).
#[inline(always)]
pub const fn take_token(empty_at: u64, now: u64, interval: u64, burst: u32) -> Option<u64> {
    let full = now.saturating_sub(interval * burst as u64);
    let empty_at = if empty_at > full { empty_at } else { full };
    let taken = empty_at + interval;
    if taken > now { None } else { Some(taken) }
}

/// How urgently ports are needed: [`PacketConfig::avoids`].
pub mod need {
    /// There are enough ports that no other use needs.
    pub const LITTLE: u32 = 0;
    /// There are not enough such ports.
    pub const MORE: u32 = 1;
    /// All ports except those that the node's own sockets need.
    pub const ALL: u32 = 2;
}

/// The word of `DIRECT`: 0 if all flows belong to services. Else how many other flows were made, and
/// [`direct::DATAGRAMS`].
pub mod direct {
    /// Datagrams to an endpoint itself may collide with flows to the endpoint, too: the socket programs serve their
    /// clients now, and the packet path did so until lately.
    pub const DATAGRAMS: u64 = 1 << 63;
}

/// How many interfaces `IFACES` has room for.
pub const IFACES: u32 = 4096;
/// The most addresses whose limit of ICMP errors is remembered.
pub const ERROR_BUCKETS: u32 = 4096;
/// How many networks `SOURCES` has room for.
pub const SOURCES: u32 = 1 << 20;
/// How many addresses `NODE_ADDRS` has room for; element 0 is never one.
pub const NODE_ADDRS: u32 = 256;
/// How many fragmented datagrams are remembered at a time.
pub const FRAGMENTS: u32 = 4096;
/// The default room for flows ([`cells::cells_for`](crate::cells::cells_for)).
pub const DEFAULT_FLOWS: u32 = 65_536;

const _: () = assert!(size_of::<Iface>() == 8);
const _: () = assert!(size_of::<SourceKey>() == 24);
const _: () = assert!(size_of::<FlowKey>() == 40 && size_of::<Translation>() == 24);
const _: () = assert!(size_of::<PortKey>() == 24);
const _: () = assert!(size_of::<FragmentKey>() == 40 && size_of::<Fragment>() == 4);
const _: () = assert!(size_of::<PacketConfig>() == 96);
const _: () = assert!(size_of::<ErrorLimits>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_one_by_one() {
        const SECOND: u64 = 1_000_000_000;
        let mut empty_at = 0;
        let mut take = |now| {
            let after = take_token(empty_at, now, SECOND, 6);
            empty_at = after.unwrap_or(empty_at);
            after.is_some()
        };
        let now = 1000 * SECOND;
        assert_eq!((0..10).filter(|_| take(now)).count(), 6, "all at once");
        assert!(!take(now + SECOND - 1));
        assert!(take(now + SECOND) && !take(now + SECOND), "one a second");
        let later = now + 60 * SECOND;
        assert_eq!((0..10).filter(|_| take(later)).count(), 6, "no more");
        assert!(!take(later - SECOND), "another CPU is behind");
    }

    #[test]
    fn pods_are_told_apart() {
        let of = |netns| Iface {
            flags: Iface::ATTACHED | Iface::of_pod(netns),
            masquerade_v4: 0,
            masquerade_v6: 0,
            segment: 0,
        };
        assert!(of(0).is_same_pod(of(0)) && of(1022).is_same_pod(of(1022)));
        assert!(!of(0).is_same_pod(of(1)) && !of(1022).is_same_pod(of(0)));
        for unknown in [-1, 1023, 100_000] {
            assert_eq!(of(unknown).flags, Iface::ATTACHED);
            assert!(!of(unknown).is_same_pod(of(unknown)));
        }
    }

    #[test]
    fn interfaces_have_flags_of_their_own() {
        use Iface as I;
        let of = |flags| Iface {
            flags,
            ..I::default()
        };
        let flags = [I::PEER, I::LOCAL, I::ATTACHED, I::BARE, I::STRICT, I::LOOSE];
        assert_eq!(flags.map(u16::trailing_zeros), [0, 1, 2, 3, 4, 5]);
        assert_eq!(I::of_pod(0), 1 << 6);
        for (flags, is_ready, checks_a_pod) in [
            (0, true, false),
            (I::ATTACHED, true, false),
            (I::LOCAL, false, false),
            (I::LOCAL | I::ATTACHED, true, false),
            (I::LOCAL | I::PEER | I::BARE, false, false),
            (I::LOCAL | I::STRICT, false, true),
            (I::LOCAL | I::LOOSE, false, true),
            (I::ATTACHED | I::STRICT | I::LOOSE, true, false),
        ] {
            assert_eq!(of(flags).is_ready(), is_ready, "{flags:#b}");
            assert_eq!(of(flags).checks_a_pod(), checks_a_pod, "{flags:#b}");
        }
        let on = |segment| Iface {
            segment,
            ..I::default()
        };
        assert!(on(7).is_same_segment(on(7)) && !on(7).is_same_segment(on(8)));
        assert!(!on(0).is_same_segment(on(0)), "in no segment");
    }

    #[test]
    fn sets_of_networks_are_apart() {
        use SourceKey as S;
        let addr = Addr::from_v4([10, 0, 0, 0]);
        for (set, of_policy, of_node) in [
            (S::PODS, false, true),
            (S::HOST, false, true),
            (S::BRIDGES, false, true),
            (1, false, false),
            (S::BRIDGES - 1, false, false),
            (S::POLICIES - 1, false, false),
            (S::POLICIES, true, false),
            (S::HOST - 1, true, false),
        ] {
            let key = S::network(set, addr, 96 + 8);
            assert_eq!((key.prefix, key.set), (32 + 96 + 8, set));
            assert_eq!(S::host(set, addr).prefix, 32 + 128);
            assert_eq!(key.is_of_policy(), of_policy, "{set:#x}");
            assert_eq!(key.is_of_node(), of_node, "{set:#x}");
        }
    }

    #[test]
    fn settings_have_flags_of_their_own() {
        use PacketConfig as P;
        let flags = [
            P::DETECT_BY_ADDRESS,
            P::DETECT_BY_INTERFACE,
            P::MASQUERADE_ALL,
            P::WAYS_BY_ADDRESS,
            P::SEVERAL_NETWORKS,
            P::SEVERAL_UPLINKS,
            P::PREEMPTIBLE,
        ];
        assert_eq!(flags.map(u32::trailing_zeros), [0, 1, 2, 3, 8, 9, 15]);
        assert!(flags.iter().all(|flag| flag.is_power_of_two()));
        assert_eq!(P::DETECTS, 3);
        for (ifindex, bit) in [(0, 16), (1, 17), (15, 31), (16, 16), (u32::MAX, 31)] {
            assert_eq!(P::bare(ifindex), 1 << bit);
        }
        assert_eq!(P::PORTS, 64_512);
    }

    #[test]
    fn a_client_keeps_its_range_of_ports() {
        for (own, first, last) in [
            (0, 1, 511),
            (511, 1, 511),
            (512, 600, 1023),
            (1023, 600, 1023),
            (1024, 1024, 65_535),
            (65_535, 1024, 65_535),
        ] {
            assert_eq!(client_ports(Port::new(own)), (first, last), "{own}");
        }
        let (own, other) = (Port::new(40_000), Port::new(50_000));
        let addr = Addr::UNSPECIFIED;
        let key = FlowKey::new(addr, own, addr, Port::new(80), Protocol::TCP);
        for (node_port, seen) in [(Port::ANY, own), (other, other)] {
            let value = Translation {
                endpoint: addr,
                endpoint_port: Port::new(80),
                node_port,
                used: Tick::default(),
                seen: 0,
                node_addr: 0,
            };
            assert_eq!(value.seen_port(&key), seen);
        }
    }

    #[test]
    fn ticks_wrap() {
        let at = |seconds: u64| Tick::from_ns(seconds * 1_000_000_000);
        let wrap = (1_u64 << 48) / 1_000_000_000;
        assert!(at(100).age_seconds(at(130)) >= 26);
        assert!(at(wrap - 5).age_seconds(at(wrap + 30)) <= 40);
        assert_eq!(at(100).age_seconds(at(95)), 0, "read in the tick before");
        let tick = Tick::from_number;
        assert_eq!(
            Tick::from_ns(0x0001_2345_0000_0000 | 0xffff_ffff),
            tick(0x2345)
        );
        for (before, now, ticks, seconds) in [
            (7, 7, 0, 0),
            (7, 8, 1, 5),
            (7, 10, 3, 13),
            (u16::MAX, 1, 2, 9),
            (8, 7, 0, 0),
            (9, 7, 0xfffe, 281_467),
        ] {
            assert_eq!(tick(before).number(), before);
            assert_eq!(tick(before).ticks_before(tick(now)), ticks);
            assert_eq!(tick(before).age_seconds(tick(now)), seconds);
        }
    }

    #[test]
    fn ports_are_avoided_as_long_as_there_are_others() {
        let usual = PacketConfig {
            ephemeral_first: 32_768,
            ephemeral_last: 60_999,
            ..PacketConfig::default()
        };
        let all = PacketConfig {
            ephemeral_first: 1024,
            ephemeral_last: 65_535,
            ..PacketConfig::default()
        };
        let left = |config: &PacketConfig, protocol, need| {
            (0..=u16::MAX)
                .filter(|port| !config.avoids(*port, protocol, need))
                .count()
        };
        let (tcp, udp) = (Protocol::TCP, Protocol::UDP);
        assert_eq!(left(&usual, tcp, need::LITTLE), 36_280);
        assert_eq!(left(&usual, udp, need::LITTLE), 36_280 - 2768);
        assert_eq!(left(&usual, tcp, need::MORE), 36_280 + 14_116);
        assert_eq!(left(&all, tcp, need::LITTLE), 0);
        assert_eq!(left(&all, tcp, need::MORE), 32_256);
        for (config, ports) in [(usual, 50_396), (all, 32_256)] {
            for protocol in [tcp, udp] {
                assert_eq!(left(&config, protocol, need::ALL), ports);
            }
            assert_eq!(config.ports() as usize, ports);
        }
    }
}
