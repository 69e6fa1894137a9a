//! Service to endpoint, on the live tables.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::helpers::generated::{
    bpf_get_prandom_u32, bpf_get_smp_processor_id, bpf_ktime_get_ns,
};
use dataplane_common::{
    Addr, Port, Protocol, Reason, decide,
    tables::{
        Affinity, AffinityKey, Block, Endpoint, Frontend, FrontendKey, Peer, Pool, PoolStats,
        StatsHeader,
    },
};

use crate::{
    atomic,
    tables::{AFFINITY, ENDPOINTS, FRONTENDS, POOLS, REASONS, STATS},
};

/// The kernel's own maps.
pub struct Live;

impl decide::Tables for Live {
    #[inline(always)]
    fn frontend(&self, key: &FrontendKey) -> Option<Frontend> {
        // SAFETY: the value is eight aligned bytes, read at once. Its element is not reused while
        // this program runs: user space waits for a grace period after it frees one.
        unsafe { FRONTENDS.get(0)?.get(key).map(|value| read_volatile(value)) }
    }

    #[inline(always)]
    fn pool(&self, index: u32) -> Option<Pool> {
        let pool = POOLS.get_value_ptr_mut(0, &index)?;
        // SAFETY: points into an array's element, which stays. The block is one aligned word, read
        // by one load while user space may store to it.
        unsafe {
            Some(Pool {
                block: Block::from_word(read_volatile(&raw const (*pool).block).word()),
                affinity_seconds: read_volatile(&raw const (*pool).affinity_seconds),
                affinity_group: read_volatile(&raw const (*pool).affinity_group),
            })
        }
    }

    #[inline(always)]
    fn endpoint(&self, slot: u32) -> Option<Endpoint> {
        ENDPOINTS.get_value(0, &slot).copied()
    }
}

/// What is to be done with a destination.
pub enum Verdict {
    /// No service's: left alone.
    Pass,
    /// Refused.
    Refuse { reason: Reason, pool: u32 },
    /// Goes to `endpoint`.
    Translate {
        endpoint: Endpoint,
        reason: Reason,
        pool: u32,
    },
}

/// What asks.
pub struct Request {
    /// The destination.
    pub addr: Addr,
    /// Its port.
    pub port: Port,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Whether loopback is the node's own.
    pub own_loopback: bool,
    /// The network namespace that asks (`SO_NETNS_COOKIE`).
    pub netns: u64,
}

impl Request {
    /// What the socket is to remember if `endpoint` is chosen.
    #[inline(always)]
    pub fn peer(&self, endpoint: &Endpoint) -> Peer {
        Peer {
            vip: self.addr,
            endpoint: endpoint.addr,
            vip_port: self.port,
            endpoint_port: endpoint.port,
        }
    }
}

/// Decides, given the endpoint that this client already uses for this destination, if any.
#[inline(always)]
pub fn decide(request: &Request, used: Option<Endpoint>) -> Verdict {
    let Some(frontend) = decide::find_frontend(
        &Live,
        request.addr,
        request.port,
        request.protocol,
        request.own_loopback,
    ) else {
        return Verdict::Pass;
    };
    let index = frontend.pool;
    let Some(pool) = decide::Tables::pool(&Live, index) else {
        return Verdict::Refuse {
            reason: Reason::Dangling,
            pool: index,
        };
    };
    if pool.block.is_empty() {
        return Verdict::Refuse {
            reason: decide::refusal(pool.block),
            pool: index,
        };
    }
    if let Some(endpoint) = used
        && decide::contains(&Live, pool.block, &endpoint)
    {
        return Verdict::Translate {
            endpoint,
            reason: Reason::Kept,
            pool: index,
        };
    }
    if pool.affinity_seconds != 0 {
        return with_affinity(Addr::from_netns_cookie(request.netns), index, &pool);
    }
    match draw(pool.block) {
        Some(endpoint) => Verdict::Translate {
            endpoint,
            reason: Reason::Translated,
            pool: index,
        },
        None => Verdict::Refuse {
            reason: Reason::Dangling,
            pool: index,
        },
    }
}

#[inline(always)]
fn draw(block: Block) -> Option<Endpoint> {
    // SAFETY: the helper has no preconditions.
    let random = unsafe { bpf_get_prandom_u32() };
    decide::Tables::endpoint(&Live, decide::draw(block, random))
}

/// Session affinity `ClientIP`: the client's last endpoint, if it is still in the pool and was used
/// within the timeout; else a new one, remembered.
#[inline(always)]
fn with_affinity(client: Addr, index: u32, pool: &Pool) -> Verdict {
    let key = AffinityKey {
        client,
        group: pool.affinity_group,
    };
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    let timeout = u64::from(pool.affinity_seconds) * 1_000_000_000;
    let table = AFFINITY.get(0);
    if let Some(table) = table
        && let Some(entry) = table.get_ptr_mut(&key)
    {
        // SAFETY: an LRU element may be reused while it is read; what is read is then only an
        // endpoint that the block does not contain, or another client's, which is as good.
        let (endpoint, used_at) = unsafe { ((*entry).endpoint, (*entry).used_at) };
        if now.wrapping_sub(used_at) <= timeout && decide::contains(&Live, pool.block, &endpoint) {
            // SAFETY: one aligned word of the same element.
            unsafe { write_volatile(&raw mut (*entry).used_at, now) };
            return Verdict::Translate {
                endpoint,
                reason: Reason::Kept,
                pool: index,
            };
        }
    }
    let Some(endpoint) = draw(pool.block) else {
        return Verdict::Refuse {
            reason: Reason::Dangling,
            pool: index,
        };
    };
    let entry = Affinity {
        endpoint,
        used_at: now,
    };
    if table.is_none_or(|table| table.insert(&key, entry, 0).is_err()) {
        count(Reason::AffinityFull);
    }
    Verdict::Translate {
        endpoint,
        reason: Reason::Translated,
        pool: index,
    }
}

/// Counts a verdict by reason.
#[inline(always)]
pub fn count(reason: Reason) {
    if let Some(counter) = REASONS.get_ptr_mut(reason as u32) {
        // SAFETY: this CPU's own aligned word; atomic, since another program may preempt this one.
        unsafe { atomic::add(counter, 1) };
    }
}

/// Counts a verdict by pool.
#[inline(always)]
pub fn count_pool(pool: u32, reason: Reason) {
    let Some(stats) = STATS.get(0) else { return };
    let Some(header) = stats.get_ptr(0) else {
        return;
    };
    // SAFETY: the header is written before the map is put in place, and has a pool's size.
    let stride = unsafe { (*header.cast::<StatsHeader>()).stride } as u32;
    // SAFETY: the helper has no preconditions.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    if pool >= stride {
        return;
    }
    let Some(element) = stats.get_ptr_mut(cpu.wrapping_mul(stride).wrapping_add(pool)) else {
        return;
    };
    // SAFETY: an array's element stays; only the address is computed here.
    let counter = unsafe { counter(element, reason) };
    // SAFETY: an aligned word of the element, which user space reads while it changes.
    unsafe { atomic::add(counter, 1) };
}

/// # Safety
/// `stats` must point to a table's element.
#[inline(always)]
unsafe fn counter(stats: *mut PoolStats, reason: Reason) -> *mut u64 {
    // SAFETY: field addresses within the element.
    unsafe {
        match reason {
            Reason::NoEndpoints => &raw mut (*stats).no_endpoints,
            Reason::NoLocalEndpoint => &raw mut (*stats).no_local,
            Reason::PortNotServed => &raw mut (*stats).no_such_port,
            _ => &raw mut (*stats).translated,
        }
    }
}
