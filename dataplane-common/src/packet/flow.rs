//! A flow: its keys, its translation, and the time of its last use.

use crate::{Addr, Port, Protocol};

layout! {
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

const _: () = assert!(size_of::<FlowKey>() == 40 && size_of::<Translation>() == 24);
const _: () = assert!(size_of::<PortKey>() == 24);
const _: () = assert!(size_of::<FragmentKey>() == 40 && size_of::<Fragment>() == 4);

#[cfg(test)]
mod tests {
    use super::*;

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
}
