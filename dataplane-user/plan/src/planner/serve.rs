//! Writes one service into the tables, or leaves it out.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::tables::Block;
use model::{Gravity, Istio, Problem, Service};

use super::{
    super::{
        mirror::Writes,
        room::LeftOut,
        service_update::{ServicePools, ServiceUpdate},
        wanted::{self, WantedKey},
    },
    Dirty, Planner, Scratch,
};

/// Returns the flags that all blocks of a service have.
pub(super) fn flags(istio: &Istio, service: &Service) -> u16 {
    let mut flags = 0;
    if istio.refuses(service) {
        flags |= Block::REFUSED;
    }
    if istio.waypoint_of_service(service).is_some() {
        flags |= Block::HBONE | Block::WAYPOINT;
    }
    flags
}

impl Planner {
    /// Gives the service the pools and keys that it should have. `flags`: the flags of all of its blocks.
    pub(super) fn update_service(
        &mut self,
        service: &Dirty,
        flags: u16,
        keys_before: usize,
        scratch: &mut Scratch,
        writes: &mut Writes,
    ) {
        let Dirty { name, old, new, .. } = service;
        let left = self.budgets.left(name);
        let before = self.services.remove(name).unwrap_or_default();
        let mut problems = Vec::new();
        scratch.keys.clear();
        if let Some(new) = new {
            wanted::keys(new, &mut scratch.keys);
            problems.extend(left.map(|left| self.budgets.problem(new, &scratch.keys, left)));
            self.claims.retain_owned(&mut scratch.keys, name);
        }
        match new {
            Some(new) if left != Some(LeftOut::Whole) => {
                if self.has_room(service, left, keys_before, &before, &scratch.keys, writes) {
                    let mut update = ServiceUpdate {
                        mirror: &mut self.mirror,
                        reach: &self.reach,
                        adopted: self.adopted.as_ref(),
                        writes,
                        cluster: &mut scratch.cluster,
                        local: &mut scratch.local,
                        without_endpoints: left.is_some(),
                        flags,
                        problems,
                    };
                    let after = update.apply(new, &scratch.keys, before);
                    problems = update.problems;
                    if after.indices().next().is_some() {
                        self.services.insert(name.clone(), after);
                    }
                } else {
                    problems.push(self.wait(new, flags, &scratch.keys, before, writes));
                }
            }
            _ => {
                for index in before.indices() {
                    self.mirror.retire_pool(index, writes);
                }
                for WantedKey { key, .. } in &scratch.keys {
                    self.mirror.set_key(*key, self.unclaimed(key), writes);
                }
            }
        }
        if let Some(old) = old {
            wanted::keys(old, &mut scratch.keys);
            for WantedKey { key, .. } in &scratch.keys {
                if !self.is_taken(key) {
                    self.mirror.set_key(*key, self.unclaimed(key), writes);
                }
            }
        }
        if problems.is_empty() {
            self.problems.remove(name);
        } else {
            self.problems.insert(name.clone(), problems);
        }
    }

    /// Returns whether the tables have room for the new state of a service, beside their present and retired entries.
    /// There is room unless nearly all entries change in one plan, or the free slots are scattered.
    pub(super) fn has_room(
        &mut self,
        service: &Dirty,
        left: Option<LeftOut>,
        keys_before: usize,
        before: &ServicePools,
        keys: &[WantedKey],
        writes: &Writes,
    ) -> bool {
        let room = *self.budgets.room();
        let mirror = &mut self.mirror;
        let [all_keys, pools, mut slots, sources] = service.cost;
        if left == Some(LeftOut::Endpoints) {
            slots = 0;
        }
        let lens = || {
            let new = service.new.as_deref().filter(|_| left.is_none());
            new.map(|new| wanted::blocks(new, keys)).unwrap_or_default()
        };
        let more = [all_keys, pools, slots, sources];
        if mirror.has_room(&room, keys_before, writes, more, lens) {
            return true;
        }
        // Nearly always, the tables already hold most of the service.
        let known = |wanted: &&WantedKey| !mirror.keys.contains_key(&wanted.key);
        let new_keys = keys.iter().filter(known).count() as u64;
        let new_pools = pools.saturating_sub(before.indices().count() as u64);
        let more = [new_keys, new_pools, slots, sources];
        mirror.has_room(&room, keys_before, writes, more, lens)
    }

    /// Leaves a service in its present state until there is room for its new state. Removes its keys that lead to a
    /// pool of another service.
    pub(super) fn wait(
        &mut self,
        service: &Service,
        flags: u16,
        keys: &[WantedKey],
        mut before: ServicePools,
        writes: &mut Writes,
    ) -> Problem {
        let own: BTreeSet<u32> = before.indices().collect();
        let mut referred = BTreeSet::new();
        for WantedKey { key, .. } in keys {
            let pool = self.mirror.keys.get(key).map(|known| known.pool());
            if pool.is_some_and(|pool| own.contains(&pool)) {
                referred.extend(pool);
            } else if pool.is_some() {
                self.mirror.set_key(*key, self.unclaimed(key), writes);
            }
        }
        // Retires pools without keys, except those for clients from outside and those of an affinity group.
        let external = |index: &u32| (*index, self.mirror.pools[*index as usize].pool.external);
        let externals: BTreeMap<u32, u32> = own.iter().map(external).collect();
        let mirror = &mut self.mirror;
        let mut keep = |index: &mut u32, is_referred: bool| {
            if *index != 0 && !is_referred {
                mirror.retire_pool(std::mem::take(index), writes);
            }
        };
        let address = referred.contains(&before.address);
        keep(&mut before.address, address);
        for pools in before.ports.iter_mut().flat_map(|(.., families)| families) {
            let external = externals.get(&pools.cluster).copied();
            let [cluster, local] = [pools.cluster, pools.local].map(|i| referred.contains(&i));
            let is_external = cluster && external == Some(pools.local);
            keep(&mut pools.local, local || is_external);
            keep(&mut pools.cluster, cluster || local);
        }
        // A flag needs no room, and must not wait.
        for index in before.indices() {
            let block = self.mirror.pools[index as usize].pool.block;
            let flags = flags | self.reach.flags(self.mirror.block(block));
            let flags = flags & (Block::HBONE | Block::WAYPOINT);
            self.mirror.add_flags(index, flags, writes);
        }
        if before.indices().next().is_some() {
            self.services.insert(service.name.clone(), before);
        }
        self.waiting.insert(service.name.clone());
        Problem {
            gravity: Gravity::Warning,
            place: format!("service {}", service.name),
            text: "the earlier state is served: the change waits for room, because too much of a table changes at \
                   once or its free entries are scattered. If this stays so, raise limits.frontends \
                   and limits.endpoints"
                .to_owned(),
        }
    }
}
