//! The filter in front of `FRONTENDS`. Most destinations do not belong to a service, and one element of a small table,
//! which stays in the processor's cache, recognises most of them.
//!
//! `FRONTENDS` is a large hash. Two lookups, each in another part of memory, are needed to find that an address is not
//! in it. A server that answers thousands of clients would pay this for each of them. `VIPS` has a bit for every
//! frontend's address instead. A clear bit means that no frontend has the address; a set bit means that a frontend may
//! have it.
//!
//! Addresses are hashed by all but their last byte (an IPv4 /24, an IPv6 /120) to an element, and
//! there to three bits, one in each word:
//!
//! * [`VipWords::prefixes`]: a cluster IP is in this prefix. Cluster IPs are many and lie close together, apart from
//!   other addresses: 100 000 in a /12 are in 4 096 prefixes, 6 % of the bits.
//! * [`VipWords::addresses`]: this very address (its prefix and, modulo 64, its last byte) is one of a load balancer,
//!   an external IP, or one of the node's with a host port of its own.
//! * [`VipWords::nodes`]: this very address is one of the node's. Like the addresses before, these are few and lie
//!   among addresses that do not belong to a service: the node's own beside its pods' and the other nodes'. They have a
//!   word of their own because mostly no frontend has such an address and a port: the program then skips that lookup.
//!
//! Node ports' keys have no address. The bit of the unspecified address stands for node ports outside of Kubernetes'
//! default range ([`PacketConfig::NODE_PORTS`]): with it, a masqueraded flow gets another port than theirs. Node ports
//! in the range have no bit.
//!
//! A fourth word says which UDP ports frontends have, cluster IPs excepted ([`ClaimedPort`]): a datagram that this host
//! sends from another port needs no further look.

use crate::{
    Addr, Port, Protocol,
    packet::PacketConfig,
    tables::{FrontendKey, Kind},
};

/// How many elements `VIPS` has: a power of two.
pub const VIP_ELEMENTS: u32 = 1024;

layout! {
    /// An element of `VIPS`. Each word is set and cleared by atomic stores, while programs read it.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct VipWords {
        /// Prefixes that have cluster IPs.
        pub prefixes: u64,
        /// Addresses that other frontends have, with a port.
        pub addresses: u64,
        /// Addresses of the node.
        pub nodes: u64,
    }
}

layout! {
    /// An element of `VIPS`, with all its words.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct VipElement {
        /// By address.
        pub words: VipWords,
        /// By port: see [`ClaimedPort`].
        pub ports: u64,
    }
}

impl VipWords {
    /// Every address may be a frontend's.
    pub const ALL: Self = Self {
        prefixes: u64::MAX,
        addresses: u64::MAX,
        nodes: u64::MAX,
    };

    /// Sets a bit ([`VipPlace::bit`]).
    pub const fn set(&mut self, bit: u32) {
        let mask = 1 << (bit % 64);
        match bit / 64 {
            0 => self.prefixes |= mask,
            1 => self.addresses |= mask,
            _ => self.nodes |= mask,
        }
    }
}

/// Where an address is in `VIPS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VipPlace {
    index: u32,
    prefix_bit: u32,
    address_bit: u32,
}

impl VipPlace {
    /// The place of an address.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "ten bits and six")]
    pub const fn of(addr: Addr) -> Self {
        // 2^64 divided by the golden ratio: neighbours are spread evenly by the product's high bits
        // (Knuth, The Art of Computer Programming, 6.4).
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        // Numbers, not bytes in memory: the same on every architecture.
        let (high, low) = addr.halves();
        let mixed = (high.wrapping_mul(GOLDEN) ^ (low >> 8)).wrapping_mul(GOLDEN);
        let prefix_bit = (mixed >> 48) as u32 & 63;
        Self {
            index: (mixed >> 54) as u32,
            prefix_bit,
            address_bit: prefix_bit.wrapping_add(low as u32) & 63,
        }
    }

    /// Whether a frontend with this key has a bit in the filter.
    pub fn has_one(key: &FrontendKey) -> bool {
        !key.addr.is_unspecified() || !PacketConfig::NODE_PORTS.contains(&key.port.host())
    }

    /// The index in `VIPS` of the element that has the address's bits.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Whether a frontend may have the address, by its element.
    #[inline(always)]
    pub const fn is_set(self, words: VipWords) -> bool {
        let of_address = words.addresses | words.nodes;
        (words.prefixes >> self.prefix_bit | of_address >> self.address_bit) & 1 != 0
    }

    /// Whether a frontend may have the address and a port.
    #[inline(always)]
    pub const fn may_have_ports(self, words: VipWords) -> bool {
        (words.prefixes >> self.prefix_bit | words.addresses >> self.address_bit) & 1 != 0
    }

    /// Whether the first look at the filter lets the frontend with this key be found, if it has the address: user space
    /// checks the filter by this.
    pub fn finds(self, words: VipWords, key: &FrontendKey) -> bool {
        if key.port == Port::ANY {
            self.is_set(words)
        } else {
            self.may_have_ports(words)
        }
    }

    /// Whether a cluster IP may have the address.
    #[inline(always)]
    pub const fn may_be_cluster(self, words: VipWords) -> bool {
        words.prefixes >> self.prefix_bit & 1 != 0
    }

    /// The bit that stands for a frontend of `kind` with this address: 0-63 in the element's first
    /// word, 64-127 in its second, 128-191 in its third.
    pub const fn bit(self, kind: Kind) -> u32 {
        match kind {
            Kind::CLUSTER_IP | Kind::CLUSTER_ADDRESS => self.prefix_bit,
            Kind::NODE_ADDRESS => 128 + self.address_bit,
            _ => 64 + self.address_bit,
        }
    }
}

/// The place in `VIPS` of a UDP port that a frontend has at an address which may be a host's: a node port, an external
/// IP, a load balancer's address, or a host port. This host may itself send a packet with such a source. The answer
/// then belongs to this host, and not to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimedPort(u16);

impl ClaimedPort {
    /// The place of a port.
    #[inline(always)]
    pub const fn of(port: Port) -> Self {
        Self(port.host())
    }

    /// The place of a frontend's port; `None` if the filter does not record this port.
    pub fn of_frontend(key: &FrontendKey, kind: Kind) -> Option<Self> {
        let of_cluster = kind == Kind::CLUSTER_IP || kind == Kind::CLUSTER_ADDRESS;
        let is_claimed = key.protocol == Protocol::UDP && key.port != Port::ANY && !of_cluster;
        is_claimed.then(|| Self::of(key.port))
    }

    /// The index in `VIPS` of the element that has the port's bit.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        (self.0 / 64) as u32
    }

    /// Whether a frontend may have the port, by its element's word.
    #[inline(always)]
    pub const fn is_set(self, ports: u64) -> bool {
        ports >> (self.0 % 64) & 1 != 0
    }

    /// The bit, among all of the element ([`VipPlace::bit`]): 192-255.
    pub const fn bit(self) -> u32 {
        192 + (self.0 % 64) as u32
    }
}

const _: () = assert!(size_of::<VipWords>() == 24 && size_of::<VipElement>() == 32);
const _: () = assert!(VIP_ELEMENTS == 65_536 / 64);
const _: () = assert!(VIP_ELEMENTS == 1 << (64 - 54));

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{
        collections::{BTreeMap, BTreeSet},
        vec::Vec,
    };

    use super::*;

    fn v4(address: u32) -> Addr {
        Addr::from_v4(address.to_be_bytes())
    }

    fn v6(address: u128) -> Addr {
        Addr::from_v6(address.to_be_bytes())
    }

    fn place(address: &str) -> VipPlace {
        VipPlace::of(Addr::from(address.parse::<std::net::IpAddr>().unwrap()))
    }

    /// The elements of the filter with frontends of these addresses.
    fn filter(kind: Kind, addrs: impl IntoIterator<Item = Addr>) -> BTreeMap<u32, VipWords> {
        let mut filter = BTreeMap::<u32, VipWords>::new();
        for addr in addrs {
            let place = VipPlace::of(addr);
            let words = filter.entry(place.index()).or_default();
            words.set(place.bit(kind));
        }
        filter
    }

    fn may_be(filter: &BTreeMap<u32, VipWords>, addr: Addr) -> bool {
        let place = VipPlace::of(addr);
        place.is_set(filter.get(&place.index()).copied().unwrap_or_default())
    }

    /// The percentage of the addresses that count as VIPs.
    fn percent(filter: &BTreeMap<u32, VipWords>, addrs: impl IntoIterator<Item = Addr>) -> usize {
        let all: Vec<Addr> = addrs.into_iter().collect();
        all.iter().filter(|addr| may_be(filter, **addr)).count() * 100 / all.len()
    }

    const SERVICES_V4: u32 = u32::from_be_bytes([10, 96, 0, 0]);
    const PODS_V4: u32 = u32::from_be_bytes([10, 244, 0, 0]);
    const SERVICES_V6: u128 = 0xfd00_0010_0096_u128 << 80;
    const PODS_V6: u128 = 0xfd00_0010_0244_u128 << 80;

    /// Numbers of no pattern (xorshift64), the same in each run.
    fn noise() -> impl Iterator<Item = u64> {
        std::iter::successors(Some(0x1234_5678_9abc_def1_u64), |x| {
            let x = x ^ x << 13;
            let x = x ^ x >> 7;
            Some(x ^ x << 17)
        })
    }

    #[test]
    fn every_frontend_passes() {
        let addrs: Vec<Addr> = noise()
            .take(2000)
            .flat_map(|n| {
                [
                    v4(u32::try_from(n >> 32).unwrap()),
                    v6(u128::from(n) << 64 | u128::from(n.rotate_left(9))),
                ]
            })
            .collect();
        for kind in [Kind::CLUSTER_IP, Kind::LOAD_BALANCER] {
            let filter = filter(kind, addrs.iter().copied());
            assert!(addrs.iter().all(|addr| may_be(&filter, *addr)), "{kind:?}");
        }
    }

    /// The figures in the module's documentation for a /12 (and IPv6's /108, as large) that is full of cluster IPs.
    #[test]
    fn a_full_service_network_leaves_others_alone() {
        let prefixes_v4: Vec<Addr> = (0..4096).map(|n| v4(SERVICES_V4 + n * 256)).collect();
        let prefixes_v6: Vec<Addr> = (0..4096).map(|n| v6(SERVICES_V6 + n * 256)).collect();
        for services in [&prefixes_v4, &prefixes_v6] {
            let bits: BTreeSet<(u32, u32)> = services
                .iter()
                .map(|addr| VipPlace::of(*addr))
                .map(|place| (place.index(), place.bit(Kind::CLUSTER_IP)))
                .collect();
            assert!(bits.len() > 4000, "{} bits for 4096 prefixes", bits.len());
            let filter = filter(Kind::CLUSTER_IP, services.iter().copied());
            let others = [
                percent(&filter, (0..65_536).map(|n| v4(PODS_V4 + n))),
                percent(&filter, (0..65_536).map(|n| v6(PODS_V6 + (n << 64) + 5))),
                percent(&filter, (0..65_536).map(|n| v6(PODS_V6 + (n << 8) + 5))),
                percent(
                    &filter,
                    noise()
                        .take(65_536)
                        .map(|n| v4(u32::try_from(n >> 32).unwrap())),
                ),
                percent(
                    &filter,
                    noise().take(65_536).map(|n| v6(u128::from(n) << 64 | 1)),
                ),
            ];
            assert!(others.iter().all(|percent| *percent <= 8), "{others:?} %");
        }
    }

    /// A node's own address does not make its neighbours count as VIPs, pods or nodes.
    #[test]
    fn a_node_address_is_alone_in_its_prefix() {
        let node = v4(PODS_V4 + 1);
        let filter = filter(Kind::NODE_ADDRESS, [node]);
        let suspicious: Vec<u32> = (0..256)
            .filter(|n| may_be(&filter, v4(PODS_V4 + n)))
            .collect();
        assert_eq!(suspicious, [1, 65, 129, 193]);
    }

    #[test]
    fn a_prefix_has_one_bit_and_its_addresses_have_their_own() {
        let all: Vec<VipPlace> = (0..256)
            .map(|n| VipPlace::of(v4(SERVICES_V4 + n)))
            .collect();
        for place in &all {
            assert_eq!(place.index(), all[0].index());
            assert_eq!(place.bit(Kind::CLUSTER_IP), all[0].bit(Kind::CLUSTER_IP));
        }
        let addresses: BTreeSet<u32> = all.iter().map(|p| p.bit(Kind::EXTERNAL_IP)).collect();
        assert_eq!(addresses, (64..128).collect());
    }

    /// Each kind has a word of its own. A set bit says no more about an address than the word's meaning.
    #[test]
    fn words_have_meanings_of_their_own() {
        let place = place("10.96.0.1");
        let of = |kind| {
            let mut words = VipWords::default();
            words.set(place.bit(kind));
            words
        };
        let key = |port| FrontendKey::new(v4(SERVICES_V4 + 1), Port::new(port), Protocol::TCP);
        for (kind, cluster, ports) in [
            (Kind::CLUSTER_IP, true, true),
            (Kind::CLUSTER_ADDRESS, true, true),
            (Kind::LOAD_BALANCER, false, true),
            (Kind::NODE_PORT, false, true),
            (Kind::NODE_ADDRESS, false, false),
        ] {
            let words = of(kind);
            assert!(
                place.is_set(words) && place.finds(words, &key(0)),
                "{kind:?}"
            );
            assert_eq!(place.may_be_cluster(words), cluster, "{kind:?}");
            assert_eq!(place.may_have_ports(words), ports, "{kind:?}");
            assert_eq!(place.finds(words, &key(80)), ports, "{kind:?}");
        }
        // An external IP may be an address of the node, too.
        let both = VipWords {
            prefixes: 0,
            ..VipWords::ALL
        };
        assert!(place.is_set(both) && place.may_have_ports(both));
        let all = VipWords::ALL;
        assert!(place.is_set(all) && place.may_have_ports(all) && place.may_be_cluster(all));
        let none = VipWords::default();
        let is_set = place.is_set(none) || place.may_have_ports(none) || place.may_be_cluster(none);
        assert!(!is_set && !place.finds(none, &key(0)) && !place.finds(none, &key(80)));
        // Bits that are set already stay set.
        let mut all = all;
        all.set(place.bit(Kind::CLUSTER_IP));
        all.set(place.bit(Kind::NODE_ADDRESS));
        all.set(place.bit(Kind::LOAD_BALANCER));
        assert_eq!(all, VipWords::ALL);
    }

    #[test]
    fn node_ports_of_the_default_range_have_no_bit() {
        for (addr, port, has_one) in [
            (v4(SERVICES_V4), 30_000, true),
            (v4(SERVICES_V4), 80, true),
            (v4(0), 29_999, true),
            (v4(0), 30_000, false),
            (v6(0), 32_767, false),
            (v6(0), 32_768, true),
        ] {
            let key = FrontendKey::new(addr, Port::new(port), Protocol::UDP);
            assert_eq!(VipPlace::has_one(&key), has_one, "{addr} {port}");
        }
    }

    #[test]
    fn udp_ports_of_hosts_addresses_are_claimed() {
        for (port, protocol, kind, is_claimed) in [
            (53, Protocol::UDP, Kind::EXTERNAL_IP, true),
            (53, Protocol::UDP, Kind::NODE_PORT, true),
            (53, Protocol::TCP, Kind::EXTERNAL_IP, false),
            (0, Protocol::UDP, Kind::NODE_ADDRESS, false),
            (53, Protocol::UDP, Kind::CLUSTER_IP, false),
            (53, Protocol::UDP, Kind::CLUSTER_ADDRESS, false),
        ] {
            let key = FrontendKey::new(v4(SERVICES_V4), Port::new(port), protocol);
            let wanted = is_claimed.then(|| ClaimedPort::of(Port::new(port)));
            assert_eq!(ClaimedPort::of_frontend(&key, kind), wanted, "{key:?}");
        }
        for (port, index, bit) in [(0, 0, 192), (53, 0, 245), (64, 1, 192), (65_535, 1023, 255)] {
            let place = ClaimedPort::of(Port::new(port));
            assert_eq!((place.index(), place.bit()), (index, bit), "{port}");
            let only = 1 << (bit - 192);
            assert!(place.is_set(only) && place.is_set(u64::MAX) && !place.is_set(!only));
        }
    }

    /// The families share one code path, and pinned bits have one meaning on every architecture.
    #[test]
    fn places_are_fixed() {
        assert_eq!(place("10.96.0.1"), place("::ffff:10.96.0.1"));
        // Computed independently, in another language.
        for (address, index, prefix_bit, address_bit) in [
            ("10.96.0.1", 127, 33, 34),
            ("192.0.2.7", 98, 11, 18),
            ("fd00:10:96::1", 175, 42, 43),
            ("fd00:10:96::a:7:1234", 60, 30, 18),
        ] {
            let wanted = VipPlace {
                index,
                prefix_bit,
                address_bit,
            };
            assert_eq!(place(address), wanted, "{address}");
        }
    }
}
