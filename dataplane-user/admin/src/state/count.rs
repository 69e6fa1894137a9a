//! Counters, with the kernel's present values.

use std::{sync::MutexGuard, time::Instant};

use plan::PoolOwner;

use super::State;
use crate::{
    counters::{Counters, PortKey},
    direct::{Direct, by_address},
    lock::lock,
};

impl State {
    /// Returns the counters of direct connections.
    pub fn direct(&self) -> MutexGuard<'_, Direct> {
        let mut direct = lock(&self.direct);
        if direct.is_idle() {
            return direct;
        }
        let tables = kernel::CaptureTables::open(&self.paths.bpffs);
        // Without the table nothing is counted, and the earlier counts stay.
        let Ok(traffic) = tables.and_then(|tables| tables.traffic()) else {
            return direct;
        };
        let served = self.served();
        let snapshot = &served.snapshot;
        let all = direct.workloads().chain(snapshot.workloads.values());
        let by_address = by_address(all, &snapshot.node);
        direct.update(
            traffic,
            |pool| Some(served.pool_owner(pool)?.service.clone()),
            |addr| by_address.get(&addr).cloned().flatten(),
            Instant::now(),
        );
        direct
    }

    /// Returns the present counters of every service's port.
    pub fn counters(&self) -> MutexGuard<'_, Counters> {
        self.count();
        lock(&self.counters)
    }

    /// Reads the kernel's counters.
    pub(super) fn count(&self) {
        // One at a time, because a late one would bring older figures.
        let mut counters = lock(&self.counters);
        // Opened each time, because a grown table replaces the earlier one. Without it nothing is counted, and the
        // earlier counts stay.
        let growing = lock(&self.growing);
        let tables = kernel::Tables::open(&self.paths.bpffs);
        drop(growing);
        let Ok(tables) = tables else {
            return;
        };
        let before = self.served();
        let counted: Vec<_> = before
            .pools_after(0)
            .map(|(pool, owner)| (pool, owner, tables.pool_stats(pool)))
            .collect();
        // A pool is reused for another service only after a view was published in which the pool has no owner.
        let after = self.served();
        let is_still = |pool, owner| after.pool_owner(pool) == Some(owner);
        let counted = counted.into_iter();
        let counted = counted.filter(|(pool, owner, _)| is_still(*pool, owner));
        counters.update(counted.map(|(pool, owner, stats)| (pool, key(owner), stats)));
    }
}

/// Returns the service's port of a pool.
fn key(owner: &PoolOwner) -> PortKey {
    PortKey {
        service: owner.service.clone(),
        port: owner.port,
    }
}
