//! Service to endpoint, on the live tables.

use core::ptr::{self, read_volatile, write_volatile};

use aya_ebpf::helpers::generated::{
    bpf_get_prandom_u32, bpf_get_smp_processor_id, bpf_ktime_get_ns,
};
use dataplane_common::{
    Addr, Port, Protocol, Reason, VipWords, decide,
    tables::{
        Affinity, AffinityKey, Block, Endpoint, Frontend, FrontendKey, Kind, Peer, Pool, PoolStats,
        StatsHeader,
    },
};

use crate::{
    atomic,
    tables::{AFFINITY, BY_PACKETS, CONFIG, ENDPOINTS, FRONTENDS, POOLS, REASONS, STATS, VIPS},
};

/// The kernel's own maps.
pub struct Live;

impl decide::Tables for Live {
    #[inline(always)]
    fn vips(&self, index: u32) -> VipWords {
        let Some(words) = VIPS.get_ptr(index) else {
            return VipWords::ALL;
        };
        // SAFETY: an array's element stays. Each word is read by one load while user space may store
        // to it.
        unsafe {
            VipWords {
                prefixes: read_volatile(&raw const (*words).words.prefixes),
                addresses: read_volatile(&raw const (*words).words.addresses),
                nodes: read_volatile(&raw const (*words).words.nodes),
            }
        }
    }

    #[inline(always)]
    fn frontend(&self, key: &FrontendKey) -> Frontend {
        let Some(table) = FRONTENDS.get(0) else {
            return Frontend::NONE;
        };
        match table.get_ptr_mut(key) {
            // SAFETY: the value is eight aligned bytes, read by one load. Its element is not reused
            // while this program runs: user space waits for a grace period after it frees one.
            Some(value) => Frontend::from_word(unsafe { read_volatile(value.cast::<u64>()) }),
            None => Frontend::NONE,
        }
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
                external: read_volatile(&raw const (*pool).external),
                ranged: read_volatile(&raw const (*pool).ranged),
            })
        }
    }

    #[inline(always)]
    fn endpoint(&self, slot: u32) -> Option<Endpoint> {
        ENDPOINTS.get_value(0, &slot).copied()
    }
}

/// The decision about a destination, and its reason.
///
/// Every field has a value for every reason: the payload of an `enum`'s other variants would be undefined, and the
/// compiler may copy undefined bytes, which the verifier does not allow.
pub struct Verdict {
    /// The reason.
    pub reason: Reason,
    /// The pool of the destination, whichever endpoint answers; 0: none.
    pub pool: u32,
    /// The flags of the block that the endpoint is from.
    pub flags: u16,
    /// The new destination; [`Endpoint::NONE`] to leave the destination alone or to refuse it.
    pub endpoint: Endpoint,
}

impl Verdict {
    /// Returns the reason, also if the drawn slot belongs to a backend of a route without an endpoint. [`choose`]
    /// leaves this check to its callers, because the verifier walks each branch there again in all code that follows.
    #[inline(always)]
    pub fn reason(&self) -> Reason {
        match self.reason {
            Reason::Translated if self.endpoint.is_none() => Reason::NoEndpoints,
            reason => reason,
        }
    }

    /// The egress policy denies the workload this destination.
    pub const DENIED: Self = Self::without_endpoint(Reason::EgressDenied, 0);

    #[inline(always)]
    pub const fn without_endpoint(reason: Reason, pool: u32) -> Self {
        Self {
            reason,
            pool,
            flags: 0,
            endpoint: Endpoint::NONE,
        }
    }
}

/// The caller's question.
pub struct Request {
    /// The destination.
    pub addr: Addr,
    /// Its port.
    pub port: Port,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Whether loopback is the node's own.
    pub own_loopback: bool,
    /// The caller's network namespace (`SO_NETNS_COOKIE`).
    pub netns: u64,
}

impl Request {
    /// The record for the socket if `endpoint` is chosen.
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

/// Decides. `verdict` becomes the decision; its endpoint is the one that this client already uses for this destination,
/// if any. `only_cluster_ips`: the client may use no other frontends ([`dataplane_common::OF_AGENT`]).
#[inline(always)]
pub fn decide(request: &Request, only_cluster_ips: bool, verdict: &mut Verdict) {
    select_decide(request, u32::from(only_cluster_ips), verdict);
}

/// [`decide`]. With external linkage: the verifier looks at it once, not on each way that leads to it.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn select_decide(
    request: *const Request,
    only_cluster_ips: u32,
    verdict: *mut Verdict,
) -> u32 {
    // SAFETY: values, or null: the verifier sees to it where it is called.
    if let (Some(request), Some(verdict)) = unsafe { (request.as_ref(), verdict.as_mut()) } {
        *verdict = find(request, &verdict.endpoint, only_cluster_ips != 0);
    }
    0
}

#[inline(always)]
fn find(request: &Request, used: &Endpoint, only_cluster_ips: bool) -> Verdict {
    let frontend = decide::find_frontend(
        &Live,
        request.addr,
        request.port,
        request.protocol,
        request.own_loopback,
    );
    if frontend.is_none() || is_by_packets(request.netns) {
        return Verdict::without_endpoint(Reason::NotService, 0);
    }
    let kind = frontend.kind();
    if only_cluster_ips && kind != Kind::CLUSTER_IP && kind != Kind::CLUSTER_ADDRESS {
        return Verdict::without_endpoint(Reason::NotService, 0);
    }
    let index = frontend.pool();
    let Some(pool) = decide::Tables::pool(&Live, index) else {
        return Verdict::without_endpoint(Reason::Dangling, index);
    };
    // Only the packet shows the client's address in the network, the socket does not yet.
    if kind == Kind::LOAD_BALANCER && pool.ranged != 0 {
        return Verdict::without_endpoint(Reason::NotService, index);
    }
    if pool.block.is_empty() {
        return Verdict::without_endpoint(decide::refusal(pool.block), index);
    }
    choose::<true>(&pool, index, Addr::from_netns_cookie(request.netns), used)
}

/// Whether the packet path serves this network namespace: its own rules have to see the VIP.
#[inline(always)]
pub fn is_by_packets(netns: u64) -> bool {
    let Some(config) = CONFIG.get(0) else {
        return false;
    };
    // SAFETY: user space stores the whole word.
    unsafe {
        read_volatile(&raw const config.by_packets) != 0 && BY_PACKETS.get_ptr(netns).is_some()
    }
}

/// Chooses one of the endpoints of a pool that is not empty, given the one that this client already uses for this
/// destination, if any. The chosen endpoint may be [`Endpoint::NONE`] ([`Verdict::reason`]). `REMEMBER`: if the pool
/// has session affinity, a drawn endpoint is remembered at once; otherwise the caller has to [remember](remember) it
/// when the client is served.
#[inline(always)]
pub fn choose<const REMEMBER: bool>(
    pool: &Pool,
    index: u32,
    client: Addr,
    used: &Endpoint,
) -> Verdict {
    let mut earlier = *used;
    let mut affinity = ptr::null_mut::<Affinity>();
    let mut now = 0;
    let client = AffinityKey {
        client,
        group: pool.affinity_group,
    };
    if pool.affinity_seconds != 0 {
        // SAFETY: the helper has no preconditions.
        now = unsafe { bpf_ktime_get_ns() };
        if let Some(entry) = AFFINITY.get_value_ptr_mut(0, &client) {
            affinity = entry;
            // SAFETY: an element may be removed and reused while it is read; the value is then an endpoint of another
            // client, which the block contains or not like any other.
            let (endpoint, used_at) = unsafe { ((*entry).endpoint, (*entry).used_at) };
            let timeout = u64::from(pool.affinity_seconds) * 1_000_000_000;
            if earlier.is_none() && now.wrapping_sub(used_at) <= timeout {
                earlier = endpoint;
            }
        }
    }
    if !earlier.is_none() && decide::contains(&Live, pool.block, &earlier) {
        if !affinity.is_null() {
            // SAFETY: one aligned word of the element above.
            unsafe { write_volatile(&raw mut (*affinity).used_at, now) };
        }
        return Verdict {
            endpoint: earlier,
            reason: Reason::Kept,
            pool: index,
            flags: pool.block.flags(),
        };
    }
    // SAFETY: the helper has no preconditions.
    let random = unsafe { bpf_get_prandom_u32() };
    let Some(endpoint) = decide::Tables::endpoint(&Live, decide::draw(pool.block, random)) else {
        return Verdict::without_endpoint(Reason::Dangling, index);
    };
    if REMEMBER && pool.affinity_seconds != 0 {
        remember_at(&client, endpoint, now);
    }
    Verdict {
        endpoint,
        reason: Reason::Translated,
        pool: index,
        flags: pool.block.flags(),
    }
}

#[inline(always)]
fn remember_at(client: &AffinityKey, endpoint: Endpoint, now: u64) {
    let entry = Affinity {
        endpoint,
        used_at: now,
    };
    let kept = AFFINITY
        .get(0)
        .is_some_and(|table| table.insert(*client, entry, 0).is_ok());
    if !kept {
        count(Reason::AffinityFull);
    }
}

/// Remembers the endpoint of a client for session affinity.
#[inline(never)]
pub fn remember(client: Addr, group: u32, endpoint: Endpoint) {
    // SAFETY: the helper has no preconditions.
    let now = unsafe { bpf_ktime_get_ns() };
    remember_at(&AffinityKey { client, group }, endpoint, now);
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
