//! Replacing a table by a copy while programs run: a larger copy, or a copy in which many keys have changed.

use std::{collections::HashMap, io, mem};

use dataplane_common::{
    packet,
    tables::{Frontend, FrontendKey},
};
use plan::{Demand, Room};
use tracing::warn;

use super::{
    super::{
        error::{Doing, Error},
        map::{Mapped, Plain},
    },
    Outer, Tables, new_affinity, new_frontends, put,
};

/// Elements of FRONTENDS that are copied in less than the time of a grace period.
const COPIED_IN_A_WAIT: usize = 8192;

/// How large tables may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// VIP ports, cluster addresses and node ports together (`limits.frontends`). 100 000 services
    /// with one port have 200 000.
    pub frontends: u32,
    /// Endpoint slots (`limits.endpoints`): pools' endpoints, each pool's rounded up to a power of
    /// two.
    pub endpoints: u32,
    /// Clients of services with session affinity whose endpoints are remembered (`limits.affinityClients`).
    pub affinity: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            frontends: 1 << 21,
            endpoints: 1 << 22,
            affinity: 1 << 17,
        }
    }
}

impl Limits {
    /// How much services may take of the tables.
    pub fn room(&self) -> Room {
        Room {
            frontends: self.frontends,
            pools: self.frontends,
            endpoints: self.endpoints,
            sources: packet::SOURCES,
        }
    }
}

/// A table that was replaced by a larger copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Its name.
    pub table: &'static str,
    /// Capacity before.
    pub from: u32,
    /// Capacity now.
    pub to: u32,
}

impl Tables {
    /// Makes the tables large enough. Replaces each table that is too small by a larger copy, one table after the
    /// other. A copy has the same content as the original.
    pub(crate) fn reserve(
        &mut self,
        demand: &Demand,
        limits: Limits,
    ) -> Result<Vec<Growth>, Error> {
        // A table that was larger before stays so.
        let check = |table, needed: u32, (capacity, limit): (u32, u32), knob| {
            if needed > limit.max(capacity) {
                return Err(Error::TableFull {
                    table,
                    needed: needed.into(),
                    limit,
                    knob,
                });
            }
            Ok(())
        };
        check(
            "FRONTENDS",
            demand.frontends,
            (self.frontends.capacity(), limits.frontends),
            "limits.frontends",
        )?;
        check(
            "POOLS",
            demand.pools,
            (self.pools.capacity(), limits.frontends.saturating_add(1)),
            "limits.frontends",
        )?;
        check(
            "ENDPOINTS",
            demand.endpoints,
            (self.endpoints.capacity(), limits.endpoints),
            "limits.endpoints",
        )?;
        if demand.sources > packet::SOURCES {
            return Err(Error::SourcesFull {
                needed: demand.sources,
                limit: packet::SOURCES,
            });
        }
        let mut grown = Vec::new();
        let mut note = |table, from, to| grown.push(Growth { table, from, to });

        let from = self.frontends.capacity();
        if demand.frontends > from {
            let to = roomy(demand.frontends, from, limits.frontends);
            self.grow_frontends(to)
                .map_err(|e| grow_error("FRONTENDS", to, e))?;
            note("FRONTENDS", from, to);
        }
        let from = self.endpoints.capacity();
        if demand.endpoints > from {
            let to = roomy(demand.endpoints, from, limits.endpoints);
            self.grow_endpoints(to)
                .map_err(|e| grow_error("ENDPOINTS", to, e))?;
            note("ENDPOINTS", from, to);
        }
        let from = self.pools.capacity();
        if demand.pools > from {
            let to = roomy(demand.pools, from, limits.frontends.saturating_add(1));
            self.grow_stats(to)
                .map_err(|e| grow_error("STATS", to, e))?;
            self.grow_pools(to)
                .map_err(|e| grow_error("POOLS", to, e))?;
            note("POOLS", from, to);
        }
        let from = self.affinity.capacity();
        let to = limits.affinity;
        if demand.affinity_groups > 0 && to > from {
            self.grow_affinity(to)
                .map_err(|e| grow_error("AFFINITY", to, e))?;
            note("AFFINITY", from, to);
        }
        Ok(grown)
    }

    /// Moves keys to other pools. `freed`: whether a hash element was freed since the last grace period.
    ///
    /// The kernel keeps the former element of a key for the next key that changes, so each single change waits for a grace
    /// period. Many keys change in a copy of the table, which takes one grace period.
    pub(crate) fn replace_frontends(
        &mut self,
        changes: &[(FrontendKey, Frontend)],
        freed: &mut bool,
    ) -> Result<(), Error> {
        let capacity = self.frontends.capacity();
        if changes.len() > 2 + capacity as usize / COPIED_IN_A_WAIT {
            let doing = || format!("cannot change {} entries of FRONTENDS", changes.len());
            let mut entries = self.frontends.entries().doing(doing)?;
            let mut wanted: HashMap<_, _> = changes.iter().copied().collect();
            let mut before = Vec::with_capacity(changes.len());
            for (key, frontend) in &mut entries {
                if let Some(new) = wanted.remove(key) {
                    self.vips.add(key, new);
                    before.push((*key, mem::replace(frontend, new)));
                }
            }
            for (key, new) in wanted {
                self.vips.add(&key, new);
                entries.push((key, new));
            }
            match self.put_frontends(capacity, entries) {
                Ok(()) => {
                    *freed = false;
                    for (key, frontend) in before {
                        self.vips.remove(&key, frontend);
                    }
                    return Ok(());
                }
                // No memory for the copy. The changes take longer without it.
                Err(error) => {
                    warn!(
                        "cannot copy FRONTENDS: {error}; {} keys change one by one",
                        changes.len()
                    );
                    let new: HashMap<_, _> = changes.iter().copied().collect();
                    for (key, _) in before {
                        self.vips.remove(&key, new[&key]);
                    }
                }
            }
        }
        for (key, frontend) in changes {
            if *freed {
                self.grace()?;
            }
            self.replace_frontend(key, *frontend)?;
            *freed = true;
        }
        Ok(())
    }

    fn grow_frontends(&mut self, capacity: u32) -> io::Result<()> {
        let entries = self.frontends.entries()?;
        self.put_frontends(capacity, entries)
    }

    /// Puts a table with these entries in the place of FRONTENDS, and waits until no program uses the former one.
    fn put_frontends(
        &mut self,
        capacity: u32,
        entries: impl IntoIterator<Item = (FrontendKey, Frontend)>,
    ) -> io::Result<()> {
        let new = new_frontends(capacity)?;
        let (keys, values): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
        new.set_all(&keys, &values)?;
        put(&self.outer[Outer::Frontends as usize], new.fd())?;
        self.frontends = new;
        Ok(())
    }

    fn grow_pools(&mut self, capacity: u32) -> io::Result<()> {
        let new = Mapped::create("pools", capacity)?;
        copy(&self.pools, &new);
        put(&self.outer[Outer::Pools as usize], new.fd())?;
        self.pools = new;
        Ok(())
    }

    fn grow_endpoints(&mut self, capacity: u32) -> io::Result<()> {
        let new = Mapped::create("endpoints", capacity)?;
        copy(&self.endpoints, &new);
        put(&self.outer[Outer::Endpoints as usize], new.fd())?;
        self.endpoints = new;
        Ok(())
    }

    fn grow_stats(&mut self, pools: u32) -> io::Result<()> {
        let outer = &self.outer[Outer::Stats as usize];
        self.stats = self.stats.grow(pools, |new| put(outer, new))?;
        Ok(())
    }

    /// Clients whom the programs remember in the old table during the copy are brought over
    /// afterwards.
    fn grow_affinity(&mut self, capacity: u32) -> io::Result<()> {
        let new = new_affinity(capacity)?;
        for (key, value) in self.affinity.entries()? {
            new.set(&key, &value)?;
        }
        put(&self.outer[Outer::Affinity as usize], new.fd())?;
        for (key, value) in self.affinity.entries()? {
            new.add(&key, &value)?;
        }
        self.affinity = new;
        Ok(())
    }
}

/// A capacity with headroom: a third more than is needed, and half as much again as there was, so
/// that a table which grows little by little is seldom copied.
fn roomy(needed: u32, before: u32, limit: u32) -> u32 {
    needed
        .saturating_add(needed / 3)
        .max(before.saturating_add(before / 2))
        .min(limit)
}

fn grow_error(table: &'static str, capacity: u32, source: io::Error) -> Error {
    Error::Grow {
        table,
        capacity,
        source,
    }
}

fn copy<T: Plain>(from: &Mapped<T>, to: &Mapped<T>) {
    for index in 0..from.capacity() {
        if let Some(value) = from.get(index) {
            to.set(index, value);
        }
    }
}
