//! Settings of the TC programs: ports, limits of ICMP errors, and the recognition of pods.

use core::ops::RangeInclusive;

use crate::{Protocol, states::Timeouts};

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
        /// values of this set are sets of the networks from which such packets come, whose values have bits of
        /// [`SourceKey::PROTECTED`](super::SourceKey::PROTECTED) and
        /// [`SourceKey::SURELY_FORWARD`](super::SourceKey::SURELY_FORWARD).
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
    /// A client is a pod if its address is in the set [`SourceKey::PODS`](super::SourceKey::PODS) (kube-proxy's detectLocalMode ClusterCIDR and
    /// NodeCIDR).
    pub const DETECT_BY_ADDRESS: u32 = 1;
    /// A client is a pod if its packets arrive at an interface with [`Iface::LOCAL`](super::Iface::LOCAL) (BridgeInterface and
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
    /// New flows go through the stack: the program on the way in gives their packets only their new destination.
    pub const STACK_IN: u32 = 1 << 10;
    /// There may be flows that go through the stack: the program on the way out translates the rest of their packets.
    pub const STACK_OUT: u32 = 1 << 11;
    /// The flags of the path through the stack.
    pub const STACK: u32 = Self::STACK_IN | Self::STACK_OUT;
    /// There may be flows that bypass the stack ([`Bypass`](super::Bypass)).
    pub const BYPASS: u32 = 1 << 12;
    /// New flows bypass the stack.
    pub const BYPASS_NEW: u32 = 1 << 13;
    /// Flows that bypass the stack go on to do so when new ones may not. (Only the agent reads it.)
    pub const BYPASS_STAYS: u32 = 1 << 14;
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

    /// The flag bit of an interface: if it is set, this interface may have [`Iface::BARE`](super::Iface::BARE). So packets of all other
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
        // connect() tries even ports first, as this range begins with one.
        let avoids = |port| usual.avoids(port, tcp, need::MORE);
        assert!(avoids(32_768) && !avoids(32_769) && avoids(60_998) && !avoids(60_999));
        for (config, ports) in [(usual, 50_396), (all, 32_256)] {
            for protocol in [tcp, udp] {
                assert_eq!(left(&config, protocol, need::ALL), ports);
            }
            assert_eq!(config.ports() as usize, ports);
        }
    }
}
