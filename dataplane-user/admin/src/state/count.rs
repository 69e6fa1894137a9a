//! Counters, with the kernel's present values.

use std::{sync::MutexGuard, time::Instant};

use plan::PoolOwner;

use super::State;
use crate::{
    counters::{Counters, PortKey},
    direct::{Direct, by_address},
    lock::lock,
};

/// Pools whose counters are read before their owners are looked at again.
const POOLS_AT_ONCE: usize = 4096;

impl State {
    /// Returns the counters of direct connections.
    pub fn direct(&self) -> MutexGuard<'_, Direct> {
        let mut direct = lock(&self.direct);
        if direct.is_idle() {
            return direct;
        }
        let tables = kernel::capture::CaptureTables::open(&self.paths.bpffs);
        // Without the table nothing is counted, and the earlier counts stay.
        let Ok(traffic) = tables.and_then(|tables| tables.traffic()) else {
            return direct;
        };
        let served = self.served();
        let snapshot = &served.snapshot;
        let all = direct.workloads().chain(snapshot.workloads.values());
        let by_address = by_address(all, &snapshot.node);
        let refused = direct.update(
            traffic,
            |pool| Some(served.pool_owner(pool)?.service.clone()),
            |addr| by_address.get(&addr).cloned().flatten(),
            Instant::now(),
        );
        if let Some(proxy) = self.proxy.get() {
            for of in refused {
                proxy.count_in_kernel(&of.workload, of.by.as_ref(), of.count);
            }
        }
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
        let tables = kernel::tables::Tables::open(&self.paths.bpffs);
        drop(growing);
        let Ok(tables) = tables else {
            return;
        };
        let served = self.served();
        let mut pools = served.pools_after(0);
        let runs = std::iter::from_fn(|| {
            let run = pools.by_ref().take(POOLS_AT_ONCE);
            let counted: Vec<_> = run
                .map(|(pool, owner)| (pool, owner, tables.pool_stats(pool)))
                .collect();
            // A pool is reused for another service only after a view was published in which it has no owner.
            let now = self.served.borrow();
            let is_still = |pool, owner| now.pool_owner(pool) == Some(owner);
            let known = counted
                .iter()
                .filter(|(pool, owner, _)| is_still(*pool, owner));
            let known = known.map(|(pool, owner, stats)| (*pool, key(owner), *stats));
            (!counted.is_empty()).then(|| known.collect::<Vec<_>>())
        });
        counters.update(runs.flatten());
    }
}

/// Returns the service's port of a pool.
fn key(owner: &PoolOwner) -> PortKey {
    PortKey {
        service: owner.service.clone(),
        port: owner.port,
    }
}
