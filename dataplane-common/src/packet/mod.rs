//! Keys and values of the packet path's tables, which the TC programs share with user space.
//!
//! ```text
//! IFACES     hash  ifindex    -> Iface        kinds of interfaces: pods' side or uplink
//! SOURCES    lpm   SourceKey  -> u32          load balancers' clients; addresses of pods; networks that IPsec protects
//! NODE_ADDRS array index      -> Addr         the node's addresses that flows are masqueraded to
//! CONNTRACK  cells FlowKey    -> Translation  flows, by the addresses and ports of their requests
//! ANSWERS    slots FlowKey, PortKey -> cell   flows, by the addresses and ports of their replies
//! SEQUENCES  array cell       -> Sequences    how far a TCP flow's directions have got (`tcp`)
//! CAME_BY    array cell / 2   -> [u32; 2]     the uplink by which a flow's client comes, and the flow's path
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

mod bypass;
mod config;
mod flow;

pub use bypass::{BYPASSES, Bypass};
pub use config::{ErrorLimits, PacketConfig, need, take_token};
pub use flow::{
    FlowKey, Fragment, FragmentKey, PortKey, STREAM_AFTER, Tick, Translation, client_ports,
};

use crate::Addr;

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
    /// Bits of the value of a network of IPsec policies: policies of any direction require packets to be encrypted, or dropped.
    pub const PROTECTED: u32 = 0b111;
    /// A policy for packets that leave requires it. (The bit's number is the direction's, as for the others.)
    pub const PROTECTED_OUT: u32 = 1 << 1;
    /// A policy for packets that the stack forwards requires it, as they arrive.
    pub const PROTECTED_FORWARD: u32 = 1 << 2;
    /// Likewise, and no policy that selects by more than addresses may come before.
    pub const SURELY_FORWARD: u32 = 1 << 3;
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

/// The bits of a word of `CAME_BY`, beside the interface.
pub mod came_by {
    /// In the stack, a rule of the kernel's masquerades the flow's requests to the port that they have already. So the kernel's
    /// conntrack translates the answers back.
    pub const KERNELS: u32 = 1 << 31;
    /// The flow began on the path through the stack, and stays on it. The kernel's conntrack would not take up a connection in
    /// its middle well: it misses the sequence numbers, and may masquerade the packets.
    pub const THROUGH: u32 = 1 << 30;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Port, Protocol};

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
            P::STACK_IN,
            P::STACK_OUT,
            P::BYPASS,
            P::BYPASS_NEW,
            P::BYPASS_STAYS,
            P::PREEMPTIBLE,
        ];
        assert_eq!(
            flags.map(u32::trailing_zeros),
            [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]
        );
        assert!(flags.iter().all(|flag| flag.is_power_of_two()));
        assert_eq!(P::DETECTS, 3);
        for (ifindex, bit) in [(0, 16), (1, 17), (15, 31), (16, 16), (u32::MAX, 31)] {
            assert_eq!(P::bare(ifindex), 1 << bit);
        }
        assert_eq!(P::PORTS, 64_512);
        assert_eq!((came_by::KERNELS, came_by::THROUGH), (1 << 31, 1 << 30));
        assert_eq!(direct::DATAGRAMS, 1 << 63);
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
    fn pods_are_told_apart() {
        let of = |netns| Iface {
            flags: Iface::ATTACHED | Iface::of_pod(netns),
            masquerade_v4: 0,
            masquerade_v6: 0,
            segment: 0,
        };
        assert!(of(0).is_same_pod(of(0)) && of(1022).is_same_pod(of(1022)));
        assert!(!of(0).is_same_pod(of(1)) && !of(1022).is_same_pod(of(0)));
        for unknown in [-1, 1023, 1024, 60_000, 100_000] {
            assert_eq!(of(unknown).flags, Iface::ATTACHED);
            assert!(!of(unknown).is_same_pod(of(unknown)));
        }
    }
}
