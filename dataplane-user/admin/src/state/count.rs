//! Counters, with the kernel's present values.

use std::{sync::MutexGuard, time::Instant};

use dataplane_common::tables::PoolStats;
use plan::Planner;

use super::State;
use crate::{
    counters::{Counters, PortKey},
    direct::{Direct, by_address},
    lock::lock,
};

/// Pools looked at while the planner is locked: it must not wait for long.
const POOLS_AT_ONCE: u32 = 4096;

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
        let snapshot = self.snapshot();
        let all = direct.workloads().chain(snapshot.workloads.values());
        let by_address = by_address(all, &snapshot.node);
        let planner = lock(&self.planner);
        direct.update(
            traffic,
            |pool| owner(&planner, pool).map(|key| key.service),
            |addr| by_address.get(&addr).cloned().flatten(),
            Instant::now(),
        );
        drop(planner);
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
        let end = lock(&self.known).pools;
        let runs = (1..end).step_by(POOLS_AT_ONCE as usize);
        counters.update(runs.flat_map(|from| {
            let planner = lock(&self.planner);
            let given = lock(&self.given);
            let stats = |pool| match given.binary_search(&pool) {
                Ok(_) => PoolStats::default(),
                Err(_) => tables.pool_stats(pool),
            };
            let run = from..from.saturating_add(POOLS_AT_ONCE).min(end);
            run.filter_map(|pool| Some((pool, owner(&planner, pool)?, stats(pool))))
                .collect::<Vec<_>>()
        }));
    }
}

/// Returns the service's port of a pool.
pub(super) fn owner(planner: &Planner, pool: u32) -> Option<PortKey> {
    let owner = planner.pool_owner(pool)?;
    Some(PortKey {
        service: owner.service.clone(),
        port: owner.port,
    })
}
