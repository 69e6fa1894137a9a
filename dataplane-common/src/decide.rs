//! From a destination to the pool that answers it: the same code in the kernel programs, in
//! `dataplane explain` and in the tests.

use crate::{
    Addr, Port, Protocol, Reason,
    tables::{Block, Endpoint, Frontend, FrontendKey, Kind, Pool},
};

/// Where the tables are: the kernel's own maps, those maps read from user space, or a test's.
pub trait Tables {
    /// Looks up a frontend: [`Frontend::NONE`] if the key is not there.
    fn frontend(&self, key: &FrontendKey) -> Frontend;
    /// Reads a pool. The block must be read as one word.
    fn pool(&self, index: u32) -> Option<Pool>;
    /// Reads a slot.
    fn endpoint(&self, slot: u32) -> Option<Endpoint>;
}

/// Which frontend a destination is, or [`Frontend::NONE`].
///
/// `own_loopback` says that a loopback address is the node's own, that is, that the client is in
/// the node's network namespace. Two lookups where the destination is no service's, one where it
/// is a VIP's port, three for a node port; never more, whatever the number of services.
#[inline(always)]
pub fn find_frontend<T: Tables>(
    tables: &T,
    addr: Addr,
    port: Port,
    protocol: Protocol,
    own_loopback: bool,
) -> Frontend {
    let exact = tables.frontend(&FrontendKey::new(addr, port, protocol));
    if !exact.is_none() {
        return exact;
    }
    if addr.is_loopback() {
        if !own_loopback {
            return Frontend::NONE;
        }
    } else {
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

/// Whether `endpoint` is in the (sorted) block: a binary search of at most 16 steps.
#[inline(always)]
pub fn contains<T: Tables>(tables: &T, block: Block, endpoint: &Endpoint) -> bool {
    let mut low = 0u32;
    let mut high = u32::from(block.len());
    // 2^16 > Block::MAX_LEN; a fixed bound is what the verifier can follow.
    for _ in 0..17 {
        if low >= high {
            return false;
        }
        let middle = low.midpoint(high);
        let Some(found) = tables.endpoint(block.base().wrapping_add(middle)) else {
            return false;
        };
        match order(&found, endpoint) {
            core::cmp::Ordering::Equal => return true,
            core::cmp::Ordering::Less => low = middle + 1,
            core::cmp::Ordering::Greater => high = middle,
        }
    }
    false
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
