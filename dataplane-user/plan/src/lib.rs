//! From a [`Snapshot`](model::Snapshot) to the tables that the kernel should hold, and the
//! difference to what it holds. Pure and deterministic: no clock, no randomness, no I/O.
//!
//! A [`Planner`] mirrors what the kernel holds. [`Planner::plan`] compares a snapshot with the last
//! one, and so costs what changed, not what there is.
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
//! A pool that lives on loses source ranges right after step 2. So while they change, both those
//! before and those after are let in, and never by a key that was not there before.
//!
//! Among the keys, an address as such comes after its ports and goes before them, since it refuses
//! every port that has no key.
//!
//! A key that moves from one pool to another (step 4) may, until it has moved, already show what the
//! pool that it leaves shows after step 2: new endpoints of the service it belonged to, as a whole.
//!
//! What is freed (slots, pools) is *retired*: not used again before a grace period has passed,
//! after which no running program can still read it ([`Planner::grace_passed`]).

#![forbid(unsafe_code)]

mod adopt;
mod blocks;
mod capture;
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
mod settle;
mod shares;
pub mod vips;
mod wanted;

pub use adopt::AdoptError;
use capture::captures_loopback;
pub use capture::{Captured, Policies, Resolvers, range_key};
use dataplane_common::{
    packet::SourceKey,
    tables::{Block, Endpoint, Frontend, FrontendKey, Pool},
};
pub use departures::{Departed, Departures};
pub use diff::{Answer, Change, Empty, changes};
use model::{Protocol, ServiceName};
pub use planner::Planner;
pub use room::LeftOut;
pub use wanted::{key_text, source_key};

/// One write to the kernel's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Fills slots from `base` on, none of which is in use.
    Endpoints {
        /// First slot.
        base: u32,
        /// What goes there; sorted as [`dataplane_common::decide::order`] has it.
        endpoints: Vec<Endpoint>,
    },
    /// Lets a network use a load balancer: adds it to the set of a pool.
    AddSource {
        /// Not in the table.
        key: SourceKey,
    },
    /// Sets a pool: its affinity, then, in one store, its block. `fresh`: the pool was not in use,
    /// and its counters start from 0.
    Pool {
        /// Which.
        index: u32,
        /// Its new value.
        pool: Pool,
        /// Not in use before.
        fresh: bool,
    },
    /// Adds a key.
    Insert {
        /// Not in the table.
        key: FrontendKey,
        /// Its value.
        frontend: Frontend,
    },
    /// Gives a key to another service's pool. Frees a hash element: the kernel room waits for a
    /// grace period before the next [`Write::Insert`] or [`Write::Replace`].
    Replace {
        /// In the table.
        key: FrontendKey,
        /// Its new value.
        frontend: Frontend,
    },
    /// Removes a key. Frees a hash element, as [`Write::Replace`] does.
    Remove {
        /// In the table.
        key: FrontendKey,
    },
    /// Removes a network from the set of a pool, which may be gone.
    RemoveSource {
        /// In the table.
        key: SourceKey,
    },
}

/// How large the tables must be before a plan is applied. Pools and endpoints count from index 0,
/// used or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Keys in `FRONTENDS`, at the most at any moment of the plan.
    pub frontends: u32,
    /// One more than the highest pool index.
    pub pools: u32,
    /// One more than the highest slot.
    pub endpoints: u32,
    /// How many affinity groups there are.
    pub affinity_groups: u32,
    /// Source ranges, at the most at any moment of the plan.
    pub sources: u32,
}

/// How many entries the tables of services have room for, at the most at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Of `FRONTENDS`.
    pub frontends: u32,
    /// Of `POOLS`, without the first, which is never used.
    pub pools: u32,
    /// Slots of `ENDPOINTS`.
    pub endpoints: u32,
    /// Of `SOURCES`.
    pub sources: u32,
}

impl Default for Room {
    /// For whatever there is.
    fn default() -> Self {
        Self {
            frontends: u32::MAX,
            pools: u32::MAX,
            endpoints: u32::MAX,
            sources: u32::MAX,
        }
    }
}

/// What the kernel holds, as read from its tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Every frontend, in any order.
    pub frontends: Vec<(FrontendKey, Frontend)>,
    /// Every pool by index; trailing unused ones may be left out.
    pub pools: Vec<Pool>,
    /// Every slot by index; trailing unused ones may be left out.
    pub endpoints: Vec<Endpoint>,
    /// Every source range, in any order; not the networks of pods.
    pub sources: Vec<SourceKey>,
}

impl Contents {
    /// Forgets which blocks are reachable from workloads with `egress: deny`.
    pub fn forget_reachable(&mut self) {
        for pool in &mut self.pools {
            let Pool { block, .. } = pool;
            *block = Block::new(block.base(), block.len(), block.flags() & !Block::REACHABLE);
        }
    }
}

/// What is to be done, in order.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The writes.
    pub writes: Vec<Write>,
    /// What the tables must hold first.
    pub demand: Demand,
}

impl Plan {
    /// Whether the kernel already holds what it should.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }
}

/// A frontend that two services claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The key.
    pub key: FrontendKey,
    /// Who serves it: whose claim is of the stronger kind, then the older service, then the first by name.
    pub winner: ServiceName,
    /// Who does not.
    pub losers: Vec<ServiceName>,
}

/// Whose a pool is. Its family is that of the keys that refer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOwner {
    /// The service.
    pub service: ServiceName,
    /// The service's port, as on its VIPs; none for [`PoolRole::NoSuchPort`].
    pub port: Option<(u16, Protocol)>,
    /// What it is for.
    pub role: PoolRole,
}

/// What a pool is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolRole {
    /// All endpoints that may be used.
    Cluster,
    /// Those on this node: for the cluster IPs of a service with `internalTrafficPolicy: Local`, and
    /// for clients from outside of the cluster if `externalTrafficPolicy` is Local.
    Local,
    /// The ports that a cluster address does not have: always empty.
    NoSuchPort,
}
