//! From a destination to the pool that answers it: the same code in the kernel programs, in
//! `dataplane explain` and in the tests.

use crate::{
    Addr, Port, Protocol, Reason, VipPlace, VipWords,
    tables::{Block, Endpoint, Frontend, FrontendKey, Kind, Pool},
};

/// The source of the tables: the kernel's own maps, those maps read from user space, or a test's.
pub trait Tables {
    /// Reads an element of the filter: [`VipWords::ALL`] if it cannot be read.
    fn vips(&self, index: u32) -> VipWords;
    /// Looks up a frontend: [`Frontend::NONE`] if the key is not there.
    fn frontend(&self, key: &FrontendKey) -> Frontend;
    /// Reads a pool. The block must be read as one word.
    fn pool(&self, index: u32) -> Option<Pool>;
    /// Reads a slot.
    fn endpoint(&self, slot: u32) -> Option<Endpoint>;
}

/// Whether a frontend may have this address: one look at the filter (`VIPS`), which is cheap enough for each packet.
/// `false` is certain, `true` is not.
#[inline(always)]
pub fn may_be_vip<T: Tables>(tables: &T, addr: Addr) -> bool {
    let place = VipPlace::of(addr);
    place.is_set(tables.vips(place.index()))
}

/// Whether a destination can be a frontend for any client: loopback addresses can be the node's own, and have its node
/// ports.
#[inline(always)]
pub fn may_be_served<T: Tables>(tables: &T, addr: Addr) -> bool {
    may_be_vip(tables, addr) || addr.is_loopback() || addr.is_unspecified()
}

/// The one endpoint that answers a frontend's connections from sockets of the node, or [`Endpoint::NONE`] if there are several
/// or none, or if packets decide (a load balancer's address with source ranges).
#[inline(always)]
pub fn only_endpoint<T: Tables>(tables: &T, frontend: Frontend) -> Endpoint {
    if frontend.is_none() {
        return Endpoint::NONE;
    }
    let Some(pool) = tables.pool(frontend.pool()) else {
        return Endpoint::NONE;
    };
    if pool.block.len() != 1 || frontend.kind() == Kind::LOAD_BALANCER && pool.ranged != 0 {
        return Endpoint::NONE;
    }
    match tables.endpoint(pool.block.base()) {
        Some(endpoint) => endpoint,
        None => Endpoint::NONE,
    }
}

/// Whether a workload whose egress policy is deny may reach a frontend. A frontend without endpoints refuses by itself.
#[inline(always)]
pub fn is_reachable<T: Tables>(tables: &T, frontend: Frontend) -> bool {
    match tables.pool(frontend.pool()) {
        Some(pool) => pool.block.is_empty() || pool.block.flags() & Block::REACHABLE != 0,
        None => false,
    }
}

/// Whether captured workloads may not connect to a frontend by TCP.
#[inline(always)]
pub fn is_refused<T: Tables>(tables: &T, frontend: Frontend) -> bool {
    let pool = tables.pool(frontend.pool());
    !frontend.is_none() && pool.is_some_and(|pool| pool.block.flags() & Block::REFUSED != 0)
}

/// Whether a connection to a frontend may reach an endpoint that speaks HBONE.
#[inline(always)]
pub fn may_speak_hbone<T: Tables>(tables: &T, frontend: Frontend) -> bool {
    let pool = tables.pool(frontend.pool());
    pool.is_none_or(|pool| pool.block.flags() & Block::HBONE != 0)
}

/// Returns the frontend of a destination, or [`Frontend::NONE`].
///
/// `own_loopback` says that a loopback address is the node's own: the client is in the node's network namespace. A
/// destination that does not belong to a service costs one look at the filter. A VIP's port costs one lookup more, a
/// node port two. It is never more than three, for any number of services.
#[inline(always)]
pub fn find_frontend<T: Tables>(
    tables: &T,
    addr: Addr,
    port: Port,
    protocol: Protocol,
    own_loopback: bool,
) -> Frontend {
    let place = VipPlace::of(addr);
    if addr.is_loopback() || addr.is_unspecified() {
        if !own_loopback {
            return Frontend::NONE;
        }
        // A pod's host port may have this very address (`can_be_external_ip` in the plan), a service cannot.
        if place.may_have_ports(tables.vips(place.index())) {
            let exact = tables.frontend(&FrontendKey::new(addr, port, protocol));
            if !exact.is_none() {
                return exact;
            }
        }
    } else {
        let words = tables.vips(place.index());
        if !place.is_set(words) {
            return Frontend::NONE;
        }
        if place.may_have_ports(words) {
            let exact = tables.frontend(&FrontendKey::new(addr, port, protocol));
            if !exact.is_none() {
                return exact;
            }
        }
        let address = tables.frontend(&FrontendKey::address(addr));
        if address.kind() != Kind::NODE_ADDRESS {
            return address;
        }
    }
    tables.frontend(&FrontendKey::node_port(addr.is_v4(), port, protocol))
}

/// Why an empty pool refuses.
#[inline(always)]
pub fn refusal(block: Block) -> Reason {
    if block.flags() & Block::NO_SUCH_PORT != 0 {
        Reason::PortNotServed
    } else if block.flags() & Block::NO_LOCAL != 0 {
        Reason::NoLocalEndpoint
    } else {
        Reason::NoEndpoints
    }
}

/// Draws one of the block's slots, uniformly: `random` is 32 random bits, scaled rather than
/// reduced (no division, and a bias below one in 65 536 for the largest block).
#[inline(always)]
pub fn draw(block: Block, random: u32) -> u32 {
    let offset = (u64::from(random) * u64::from(block.len())) >> 32;
    block.base().wrapping_add(offset as u32)
}

/// Whether `endpoint` is in the (sorted) block: a binary search of at most 17 steps.
///
/// The half to search next is computed instead of branched to: the verifier walks both ways of a branch, and its state
/// differs from then on. The verifier of Linux 6.1 did not finish a branching search within minutes. This search takes
/// it less than a second, on an emulated machine.
#[inline(always)]
pub fn contains<T: Tables>(tables: &T, block: Block, endpoint: &Endpoint) -> bool {
    let wanted = sort_key(endpoint);
    // The last slot that is not greater is among the `left` slots from `low` on, if there is one.
    let mut low = block.base();
    let mut left = u32::from(block.len());
    // 2^16 > Block::MAX_LEN; the verifier needs a fixed bound.
    for _ in 0..16 {
        if left <= 1 {
            break;
        }
        let half = left >> 1;
        let Some(middle) = tables.endpoint(low.wrapping_add(half)) else {
            return false;
        };
        low = low.wrapping_add(half & !mask_if_less(wanted, sort_key(&middle)));
        left -= half;
    }
    left != 0
        && tables
            .endpoint(low)
            .is_some_and(|found| sort_key(&found) == wanted)
}

/// An endpoint as three numbers in the order of [`order`].
#[inline(always)]
fn sort_key(endpoint: &Endpoint) -> [u64; 3] {
    let (high, low) = endpoint.addr.halves();
    [high, low, u64::from(endpoint.port.host())]
}

/// All bits if `a < b`, none otherwise, without a branch: the borrow of a subtraction of three
/// words.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a borrow is 0 or 1")]
fn mask_if_less(a: [u64; 3], b: [u64; 3]) -> u32 {
    let mut borrow = 0;
    for (a, b) in a.into_iter().zip(b).rev() {
        let difference = a.wrapping_sub(b).wrapping_sub(borrow);
        // Hacker's Delight, 2-16.
        borrow = ((!a & b) | ((!a | b) & difference)) >> 63;
    }
    (borrow as u32).wrapping_neg()
}

/// The order of endpoints in a block: by address, then port.
#[inline(always)]
pub fn order(a: &Endpoint, b: &Endpoint) -> core::cmp::Ordering {
    if a.addr == b.addr {
        a.port.host().cmp(&b.port.host())
    } else {
        a.addr.cmp(&b.addr)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{collections::HashMap, vec::Vec};

    use super::*;

    /// Tables in memory.
    #[derive(Default)]
    struct Fake {
        vips: HashMap<u32, VipWords>,
        frontends: HashMap<FrontendKey, Frontend>,
        pools: HashMap<u32, Pool>,
        endpoints: Vec<Endpoint>,
    }

    impl Tables for Fake {
        fn vips(&self, index: u32) -> VipWords {
            self.vips.get(&index).copied().unwrap_or_default()
        }

        fn frontend(&self, key: &FrontendKey) -> Frontend {
            self.frontends.get(key).copied().unwrap_or(Frontend::NONE)
        }

        fn pool(&self, index: u32) -> Option<Pool> {
            self.pools.get(&index).copied()
        }

        fn endpoint(&self, slot: u32) -> Option<Endpoint> {
            self.endpoints.get(slot as usize).copied()
        }
    }

    fn addr(text: &str) -> Addr {
        text.parse::<core::net::IpAddr>().unwrap().into()
    }

    fn endpoint(text: &str) -> Endpoint {
        let socket: core::net::SocketAddr = text.parse().unwrap();
        Endpoint::new(socket.ip().into(), Port::new(socket.port()))
    }

    impl Fake {
        /// Adds a frontend, and its bit in the filter.
        fn serve(&mut self, key: FrontendKey, pool: u32, kind: Kind) {
            self.frontends.insert(key, Frontend::new(pool, kind));
            if VipPlace::has_one(&key) {
                let place = VipPlace::of(key.addr);
                self.vips
                    .entry(place.index())
                    .or_default()
                    .set(place.bit(kind));
            }
        }

        fn node() -> Self {
            let mut tables = Self::default();
            let port = |text, port| FrontendKey::new(addr(text), Port::new(port), Protocol::TCP);
            let node_port = |v4| FrontendKey::node_port(v4, Port::new(30_080), Protocol::TCP);
            tables.serve(port("10.96.0.1", 80), 1, Kind::CLUSTER_IP);
            tables.serve(
                FrontendKey::address(addr("10.96.0.1")),
                2,
                Kind::CLUSTER_ADDRESS,
            );
            tables.serve(port("203.0.113.5", 80), 3, Kind::LOAD_BALANCER);
            tables.serve(
                FrontendKey::address(addr("192.0.2.1")),
                0,
                Kind::NODE_ADDRESS,
            );
            tables.serve(node_port(true), 4, Kind::NODE_PORT);
            tables.serve(node_port(false), 5, Kind::NODE_PORT);
            tables.serve(port("127.0.0.5", 8080), 6, Kind::EXTERNAL_IP);
            // The filter does not know these frontends, so the programs do not look for them.
            let hidden = Frontend::new(7, Kind::EXTERNAL_IP);
            for key in [
                port("10.244.0.9", 80),
                port("192.0.2.1", 30_080),
                port("127.0.0.6", 30_080),
            ] {
                tables.frontends.insert(key, hidden);
            }
            tables
        }
    }

    #[test]
    fn a_destination_has_one_frontend() {
        let tables = Fake::node();
        for (to, port, own_loopback, pool) in [
            ("10.96.0.1", 80, false, 1),
            ("10.96.0.1", 81, false, 2),
            ("203.0.113.5", 80, false, 3),
            ("203.0.113.5", 81, false, 0),
            ("10.244.0.9", 80, true, 0),
            ("192.0.2.1", 30_080, false, 4),
            ("192.0.2.1", 30_081, false, 0),
            ("127.0.0.1", 30_080, true, 4),
            ("127.0.0.1", 30_080, false, 0),
            ("127.0.0.6", 30_080, true, 4),
            ("127.0.0.5", 8080, true, 6),
            ("127.0.0.5", 8080, false, 0),
            ("127.0.0.5", 30_080, true, 4),
            ("0.0.0.0", 30_080, true, 4),
            ("0.0.0.0", 30_080, false, 0),
            ("::1", 30_080, true, 5),
            ("::", 30_080, true, 5),
        ] {
            let find = |protocol| {
                find_frontend(&tables, addr(to), Port::new(port), protocol, own_loopback).pool()
            };
            assert_eq!(find(Protocol::TCP), pool, "{to}:{port} {own_loopback}");
            let by_udp = if to == "10.96.0.1" { 2 } else { 0 };
            assert_eq!(find(Protocol::UDP), by_udp, "{to}:{port} by UDP");
        }
        for (to, vip, served) in [
            ("10.96.0.1", true, true),
            ("192.0.2.1", true, true),
            ("10.244.0.9", false, false),
            ("127.0.0.1", false, true),
            ("::", false, true),
        ] {
            assert_eq!(may_be_vip(&tables, addr(to)), vip, "{to}");
            assert_eq!(may_be_served(&tables, addr(to)), served, "{to}");
        }
    }

    #[test]
    fn pools_say_what_may_be_reached() {
        let mut tables = Fake {
            endpoints: [endpoint("10.244.0.1:80"), endpoint("10.244.0.2:80")].into(),
            ..Fake::default()
        };
        let of_nobody = Frontend::NONE;
        let of = |pool, kind| Frontend::new(pool, kind);
        for (pool, base, len, flags, ranged) in [
            (0, 0, 1, Block::REFUSED, 0),
            (1, 1, 1, 0, 0),
            (2, 0, 2, Block::REACHABLE, 0),
            (3, 1, 1, Block::REFUSED, 1),
            (4, 0, 0, 0, 0),
            (5, 9, 1, 0, 0),
        ] {
            let block = Block::new(base, len, flags);
            let pool_of = Pool {
                block,
                ranged,
                ..Pool::default()
            };
            tables.pools.insert(pool, pool_of);
        }
        for (frontend, only, reachable, refused) in [
            (of_nobody, false, false, false),
            (of(1, Kind::CLUSTER_IP), true, false, false),
            (of(1, Kind::LOAD_BALANCER), true, false, false),
            (of(2, Kind::CLUSTER_IP), false, true, false),
            (of(3, Kind::LOAD_BALANCER), false, false, true),
            (of(3, Kind::EXTERNAL_IP), true, false, true),
            (of(4, Kind::CLUSTER_IP), false, true, false),
            (of(5, Kind::CLUSTER_IP), false, false, false),
            (of(6, Kind::CLUSTER_IP), false, false, false),
        ] {
            let wanted = if only {
                tables.endpoints[1]
            } else {
                Endpoint::NONE
            };
            assert_eq!(only_endpoint(&tables, frontend), wanted, "{frontend:?}");
            assert_eq!(is_reachable(&tables, frontend), reachable, "{frontend:?}");
            assert_eq!(is_refused(&tables, frontend), refused, "{frontend:?}");
        }
    }

    #[test]
    fn pools_say_whether_an_endpoint_may_speak_hbone() {
        let mut tables = Fake::default();
        for (pool, flags) in [(1, Block::REACHABLE), (2, Block::HBONE)] {
            let block = Block::new(0, 1, flags);
            // Source ranges make no difference.
            let pool_of = Pool {
                block,
                ranged: 1,
                ..Pool::default()
            };
            tables.pools.insert(pool, pool_of);
        }
        for (pool, wanted) in [(1, false), (2, true), (3, true)] {
            let found = may_speak_hbone(&tables, Frontend::new(pool, Kind::LOAD_BALANCER));
            assert_eq!(found, wanted, "{pool}");
        }
    }

    #[test]
    fn an_empty_pool_says_why() {
        let (port, local) = (Block::NO_SUCH_PORT, Block::NO_LOCAL);
        for (flags, reason) in [
            (0, Reason::NoEndpoints),
            (Block::REACHABLE | Block::REFUSED, Reason::NoEndpoints),
            (local, Reason::NoLocalEndpoint),
            (port, Reason::PortNotServed),
            (port | local, Reason::PortNotServed),
        ] {
            assert_eq!(refusal(Block::new(0, 0, flags)), reason, "{flags}");
        }
    }

    #[test]
    fn slots_are_drawn_uniformly() {
        let block = Block::new(10, 4, Block::REACHABLE);
        for (random, slot) in [
            (0, 10),
            (0x3fff_ffff, 10),
            (0x4000_0000, 11),
            (0x8000_0000, 12),
            (0xc000_0000, 13),
            (u32::MAX, 13),
        ] {
            assert_eq!(draw(block, random), slot, "{random:#x}");
        }
    }

    /// Endpoints whose addresses and ports differ in any of their parts.
    fn endpoints() -> Vec<Endpoint> {
        let addrs =
            "10.0.0.1 10.0.1.0 203.0.113.200 :: ::1 ::8000:0:0:1 1:: 8000:: 8000::1 ffff::1";
        let of = |text| [1, 80, 256, 0x8000, u16::MAX].map(|port| (addr(text), port));
        let mut all: Vec<_> = addrs
            .split_whitespace()
            .flat_map(of)
            .map(|(addr, port)| Endpoint::new(addr, Port::new(port)))
            .collect();
        all.sort_by_key(|endpoint| (endpoint.addr.octets(), endpoint.port.host()));
        all
    }

    #[test]
    fn endpoints_are_ordered_by_address_and_port() {
        let all = endpoints();
        for (at, one) in all.iter().enumerate() {
            for (before, other) in all.iter().enumerate() {
                assert_eq!(order(one, other), at.cmp(&before), "{one:?} {other:?}");
                let mask = if at < before { u32::MAX } else { 0 };
                assert_eq!(mask_if_less(sort_key(one), sort_key(other)), mask);
            }
        }
    }

    /// Every second endpoint is in the block.
    #[test]
    fn a_block_contains_its_endpoints_and_no_others() {
        let all = endpoints();
        let half: Vec<Endpoint> = all.iter().copied().step_by(2).collect();
        for base in [0, 3] {
            for len in 0..half.len() - base {
                let tables = Fake {
                    endpoints: half.clone(),
                    ..Fake::default()
                };
                let inside = &half[base..base + len];
                let number = |n: usize| u16::try_from(n).unwrap();
                let block = Block::new(number(base).into(), number(len), 0);
                for endpoint in &all {
                    let found = contains(&tables, block, endpoint);
                    assert_eq!(found, inside.contains(endpoint), "{block:?} {endpoint:?}");
                }
            }
        }
        // Slots that the table does not have.
        let tables = Fake::default();
        assert!(!contains(&tables, Block::new(0, 1, 0), &all[0]));
        assert!(!contains(&tables, Block::new(0, 9, 0), &all[0]));
    }
}
