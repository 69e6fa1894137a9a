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
