//! Computes the tables that the kernel should hold for a [`Snapshot`](model::Snapshot), and the difference from the
//! present tables. Pure and deterministic: no clock, no randomness, no I/O.
//!
//! A [`Planner`] mirrors the tables of the kernel. [`Planner::plan`] compares a snapshot with the last one, so its cost
//! grows with the change and not with the tables.
//!
//! # Order of writes
//!
//! Any prefix of a plan's writes leaves every service whole:
//!
//! 1. endpoints go into slots that no pool refers to, and new source ranges into their sets;
//! 2. then the pool's word flips to them, once per pool, a port's local endpoints before all of its
//!    endpoints, which refer to them;
//! 3. then new keys appear, whose pools are complete;
//! 4. then keys change owner, then keys disappear, then the source ranges of their pools.
//!
//! A pool that stays loses source ranges right after step 2. So during a change both the former and the new ranges are
//! allowed, but only at keys that were there before.
//!
//! An address without a port is inserted after its ports and removed before them, because it refuses every port that
//! has no key.
//!
//! A key that moves from one pool to another (step 4) may show, before it moves, the state of its former pool after
//! step 2: the complete new endpoints of its former service.
//!
//! Freed slots and pools are *retired*: they are not reused before a grace period has passed, after which no running
//! program can still read them ([`Planner::grace_passed`]).

#![forbid(unsafe_code)]

mod adopt;
mod blocks;
mod capture;
mod captured;
mod claims;
mod departures;
mod diff;
pub mod enrol;
pub mod entries;
pub mod ipsec;
mod mirror;
mod planner;
mod reach;
mod room;
pub mod routes;
mod served;
mod service_update;
mod shares;
pub mod vips;
mod wanted;

pub use adopt::AdoptError;
use capture::captures_loopback;
pub use capture::{Policies, Resolvers};
pub use captured::{Captured, range_key};
use dataplane_common::{
    packet::SourceKey,
    tables::{Block, Endpoint, Frontend, FrontendKey, Pool},
};
pub use departures::{Departed, Departures};
pub use diff::{Answer, Change, Empty, changes};
use model::{Protocol, ServiceName};
pub use planner::Planner;
pub use room::LeftOut;
pub use served::Served;
pub use wanted::{key_text, source_key};

/// One write to the kernel's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Fills slots from `base` on. None of them is in use.
    Endpoints {
        /// First slot.
        base: u32,
        /// The endpoints, sorted by [`dataplane_common::decide::order`].
        endpoints: Vec<Endpoint>,
    },
    /// Allows a network at a load balancer: adds it to the source ranges of a pool.
    AddSource {
        /// A key that is not in the table.
        key: SourceKey,
    },
    /// Sets a pool: its affinity, then, in one store, its block. If `fresh`, the pool was not in use, and its counters
    /// start from 0.
    Pool {
        /// Index of the pool.
        index: u32,
        /// Its new value.
        pool: Pool,
        /// Whether the pool was not in use before.
        fresh: bool,
    },
    /// Adds a key.
    Insert {
        /// A key that is not in the table.
        key: FrontendKey,
        /// Its value.
        frontend: Frontend,
    },
    /// Moves a key to the pool of another service. Frees a hash element: the kernel crate waits for a grace period
    /// before the next [`Write::Insert`] or [`Write::Replace`], or changes many keys in a copy of the table.
    Replace {
        /// A key that is in the table.
        key: FrontendKey,
        /// Its new value.
        frontend: Frontend,
    },
    /// Removes a key. Frees a hash element, as [`Write::Replace`] does.
    Remove {
        /// A key that is in the table.
        key: FrontendKey,
        /// Its present value.
        frontend: Frontend,
    },
    /// Removes a network from the source ranges of a pool. The pool may already be removed.
    RemoveSource {
        /// A key that is in the table.
        key: SourceKey,
    },
}

/// Minimum sizes of the tables for a plan. Pools and endpoints count from index 0, used or unused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Maximum number of keys in `FRONTENDS` during the plan.
    pub frontends: u32,
    /// One more than the highest pool index.
    pub pools: u32,
    /// One more than the highest slot.
    pub endpoints: u32,
    /// Number of affinity groups.
    pub affinity_groups: u32,
    /// Maximum number of source ranges during the plan.
    pub sources: u32,
}

/// Maximum number of entries in the tables of services at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Keys in `FRONTENDS`.
    pub frontends: u32,
    /// Pools in `POOLS`, without the first, which is never used.
    pub pools: u32,
    /// Slots of `ENDPOINTS`.
    pub endpoints: u32,
    /// Source ranges in `SOURCES`.
    pub sources: u32,
}

impl Default for Room {
    /// Room without limits.
    fn default() -> Self {
        Self {
            frontends: u32::MAX,
            pools: u32::MAX,
            endpoints: u32::MAX,
            sources: u32::MAX,
        }
    }
}

/// Contents of the kernel's tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Every frontend, in any order.
    pub frontends: Vec<(FrontendKey, Frontend)>,
    /// Every pool by index. Unused pools at the end may be missing.
    pub pools: Vec<Pool>,
    /// Every slot by index. Unused slots at the end may be missing.
    pub endpoints: Vec<Endpoint>,
    /// Every source range, in any order, without the networks of pods.
    pub sources: Vec<SourceKey>,
}

impl Contents {
    /// Forgets which blocks are reachable from workloads with `egress: deny`, which captured workloads may not reach, and which
    /// have endpoints that speak HBONE, or waypoints.
    pub fn forget_reachable(&mut self) {
        for pool in &mut self.pools {
            let Pool { block, .. } = pool;
            let forgotten = Block::REACHABLE | Block::REFUSED | Block::HBONE | Block::WAYPOINT;
            let flags = block.flags() & !forgotten;
            *block = Block::new(block.base(), block.len(), flags);
        }
    }
}

/// Writes to the tables, in order.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The writes.
    pub writes: Vec<Write>,
    /// Sizes that the tables must have before the first write.
    pub demand: Demand,
}

impl Plan {
    /// Returns whether the tables are already as wanted.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }
}

/// A key that several services claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The key.
    pub key: FrontendKey,
    /// The service that serves it: first the stronger kind of claim, then the older service, then the first name.
    pub winner: ServiceName,
    /// The other services.
    pub losers: Vec<ServiceName>,
}

/// The owner of a pool. The family of a pool is that of the keys that refer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOwner {
    /// The service.
    pub service: ServiceName,
    /// The service's port, as on its VIPs. `None` for [`PoolRole::NoSuchPort`].
    pub port: Option<(u16, Protocol)>,
    /// The purpose of the pool.
    pub role: PoolRole,
}

/// Purposes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolRole {
    /// All usable endpoints.
    Cluster,
    /// The endpoints on this node: for the cluster IPs of a service with `internalTrafficPolicy: Local`, and for
    /// clients from outside of the cluster if `externalTrafficPolicy` is Local.
    Local,
    /// Ports that a cluster address does not have: always empty.
    NoSuchPort,
}
