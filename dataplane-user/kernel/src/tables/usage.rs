//! How full the tables are.

use dataplane_common::tables::{Endpoint, Pool, PoolStats};
use plan::Demand;

use super::{Limits, Tables, affinity, len};
use crate::error::{Doing, Error};

/// How full a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Its name.
    pub table: &'static str,
    /// Entries in use; for pools and endpoints, up to the highest in use.
    pub used: u32,
    /// Entries there is room for now.
    pub capacity: u32,
    /// Entries there may be room for, by its limit.
    pub limit: u32,
    /// Kernel memory that it holds, about: elements and buckets.
    pub bytes: u64,
}

impl Tables {
    /// How full the tables are.
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn usage(&self, limits: Limits) -> Result<Vec<Usage>, Error> {
        let contents = self.contents()?;
        let affinity = self
            .affinity
            .entries()
            .doing(|| "cannot read table AFFINITY".to_owned())?;
        Ok(self.usage_of(
            limits,
            &Demand {
                frontends: len(contents.frontends.len()),
                pools: len(contents.pools.len()),
                endpoints: len(contents.endpoints.len()),
                affinity_groups: 0,
                sources: len(contents.sources.len()),
            },
            len(affinity.len()),
        ))
    }

    /// Like [`Tables::usage`], but takes the contents' sizes from the planner.
    pub fn usage_of(&self, limits: Limits, used: &Demand, affinity: u32) -> Vec<Usage> {
        // A hash's element: 48 bytes of `struct htab_elem`, then key and value, each rounded up to
        // eight; and a bucket of 16 for each.
        let hash = |capacity: u32, value: u64| u64::from(capacity) * (48 + 24 + value + 16);
        let array = |capacity: u32, value: usize| u64::from(capacity) * value as u64;
        vec![
            Usage {
                table: "FRONTENDS",
                used: used.frontends,
                capacity: self.frontends.capacity(),
                limit: limits.frontends,
                bytes: hash(self.frontends.capacity(), 8),
            },
            Usage {
                table: "POOLS",
                used: used.pools,
                capacity: self.pools.capacity(),
                limit: limits.frontends,
                bytes: array(self.pools.capacity(), size_of::<Pool>())
                    + array(self.stats.capacity(), size_of::<PoolStats>()),
            },
            Usage {
                table: "ENDPOINTS",
                used: used.endpoints,
                capacity: self.endpoints.capacity(),
                limit: limits.endpoints,
                bytes: array(self.endpoints.capacity(), size_of::<Endpoint>()),
            },
            Usage {
                table: "AFFINITY",
                used: affinity,
                capacity: self.affinity.capacity(),
                limit: limits.affinity.max(self.affinity.capacity()),
                bytes: affinity::bytes(self.affinity.capacity(), affinity),
            },
        ]
    }
}
