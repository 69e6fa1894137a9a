//! The planner: finds the changes of a snapshot, and the writes that follow from them.

mod serve;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use dataplane_common::{
    Addr,
    tables::{Endpoint, Frontend, FrontendKey, Kind, Pool},
};
use imbl::{OrdMap, ordmap::DiffItem};
use model::{Problem, Service, ServiceName, Snapshot};
use serve::flags;

use super::{
    AdoptError, Contents, Plan, PoolOwner, Room, Served,
    adopt::{self, Adopted},
    claims::{Claims, Rank, shrink},
    mirror::{Mirror, Writes},
    reach::Reach,
    room::{Budgets, LeftOut},
    service_update::ServicePools,
    shares::Entries,
    wanted::{self, WantedKey},
};

/// Minimum number of retired slots for which a grace period is worthwhile, whatever the table's size.
const RETIRED_AT_LEAST: u32 = 1024;

/// Mirrors the kernel's tables and plans the writes for the next snapshot.
///
/// If a plan could not be applied completely, drop the planner and [`Planner::adopt`] the kernel's tables: a planner
/// cannot take a plan back.
#[derive(Debug)]
pub struct Planner {
    last: Snapshot,
    mirror: Mirror,
    claims: Claims,
    budgets: Budgets,
    reach: Reach,
    /// Services that wait for a grace period, after which the tables have room for their new state.
    waiting: BTreeSet<ServiceName>,
    /// The pools of every service that has pools.
    services: HashMap<ServiceName, ServicePools>,
    /// This node's addresses.
    node: BTreeSet<Addr>,
    problems: OrdMap<ServiceName, Vec<Problem>>,
    /// Set between adoption and the first plan.
    adopted: Option<Adopted>,
    /// Whether keys were removed or changed owner since the last grace period.
    freed_keys: bool,
    scratch: Scratch,
}

/// Buffers, reused from plan to plan.
#[derive(Debug, Default)]
struct Scratch {
    keys: Vec<WantedKey>,
    old_keys: Vec<WantedKey>,
    cluster: Vec<Endpoint>,
    local: Vec<Endpoint>,
}

/// A service that has to be planned again.
struct Dirty {
    name: ServiceName,
    old: Option<Arc<Service>>,
    new: Option<Arc<Service>>,
    /// Entries of the tables that the new state needs.
    cost: Entries,
}

impl Default for Planner {
    fn default() -> Self {
        Self {
            last: Snapshot::default(),
            mirror: Mirror::default(),
            claims: Claims::default(),
            budgets: Budgets::of(Room::default()),
            reach: Reach::default(),
            waiting: BTreeSet::new(),
            services: HashMap::new(),
            node: BTreeSet::new(),
            problems: OrdMap::new(),
            adopted: None,
            freed_keys: false,
            scratch: Scratch::default(),
        }
    }
}

impl Planner {
    /// Returns a planner for empty tables.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the size of the tables, before the first plan. No plan demands more. Services without room are [left
    /// out](Planner::left_out).
    #[must_use]
    pub fn with_room(mut self, room: Room) -> Self {
        self.budgets = Budgets::of(room);
        self
    }

    /// Returns a planner for tables that an earlier agent wrote. The first plan compares everything, removes unwanted
    /// entries, and leaves correct entries alone.
    ///
    /// Slots and pools that the earlier agent freed are free at once, so the caller must wait for a grace period
    /// between reading `contents` and applying the first plan.
    ///
    /// # Errors
    ///
    /// If this program does not write such tables. They must then not be used.
    pub fn adopt(contents: Contents) -> Result<Self, AdoptError> {
        let (mirror, adopted) = adopt::adopt(contents)?;
        Ok(Self {
            mirror,
            adopted: Some(adopted),
            ..Self::default()
        })
    }

    /// Returns the writes that make the tables those of `snapshot`. The caller applies them before the next plan.
    pub fn plan(&mut self, snapshot: &Snapshot) -> Plan {
        let mut writes = Writes::default();
        let keys_before = self.mirror.keys.len();
        let mut scratch = std::mem::take(&mut self.scratch);
        let node_changed = self.node_changes(snapshot);

        let dirty = self.claim(snapshot, &mut scratch);
        for addr in node_changed {
            let key = FrontendKey::address(addr);
            if !self.is_taken(&key) {
                self.mirror.set_key(key, self.unclaimed(&key), &mut writes);
            }
        }
        for service in &dirty {
            let new = service.new.as_deref();
            let flags = new.map_or(0, |new| flags(&snapshot.istio, new));
            self.update_service(service, flags, keys_before, &mut scratch, &mut writes);
        }
        if self.adopted.take().is_some() {
            self.remove_strays(&mut writes);
        }

        self.scratch = scratch;
        self.last = snapshot.clone();
        self.freed_keys |= writes.frees_keys();
        let demand = self.mirror.demand(keys_before, &writes);
        Plan {
            writes: writes.in_order(),
            demand,
        }
    }

    /// Returns whether a grace period is worthwhile now: keys changed owner or were removed, or [room](Self::wants_room)
    /// is wanted.
    pub fn wants_grace(&self) -> bool {
        self.freed_keys || self.wants_room()
    }

    /// Returns whether a grace period is worthwhile while further changes wait: services wait for room, or much of the
    /// table is retired, so that the table would grow.
    pub fn wants_room(&self) -> bool {
        let Mirror {
            live_slots,
            retired_slots,
            pools,
            retired_pools,
            ..
        } = &self.mirror;
        let pool_bound = (RETIRED_AT_LEAST as usize).max(pools.len() / 8);
        !self.waiting.is_empty()
            || *retired_slots > RETIRED_AT_LEAST.max(live_slots / 8)
            || retired_pools.len() > pool_bound
    }

    /// Returns whether services wait for a grace period, and so for the next plan, which may be of the same snapshot.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the services without room in the tables, and the parts of each that are left out.
    pub fn left_out(&self) -> &BTreeMap<ServiceName, LeftOut> {
        self.budgets.left_out()
    }

    /// Makes retired slots and pools free. The caller reports that every program has ended that was running when the
    /// last plan had been written.
    pub fn grace_passed(&mut self) {
        self.freed_keys = false;
        self.mirror.reuse_retired();
        // Frees the buffers that a large former state needed.
        self.scratch = Scratch::default();
        shrink(&mut self.mirror.keys);
        self.claims.shrink();
    }

    /// Returns a view of the state after the last plan, for other threads. Cheap.
    pub fn served(&self) -> Served {
        Served {
            snapshot: self.last.clone(),
            left_out: self.budgets.left_out().len(),
            owners: self.mirror.owners.clone(),
            contested: self.claims.contested(),
            problems: self.problems.clone(),
        }
    }

    /// Returns the last planned snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        &self.last
    }

    /// Returns the owner of a pool. `None` if the pool is not in use.
    pub fn pool_owner(&self, index: u32) -> Option<&PoolOwner> {
        self.mirror.owner(index)
    }

    /// Returns the keys that one service owns. Keys that it only claims are left out. Cheap.
    pub fn service_keys(&self, name: &ServiceName) -> Vec<(FrontendKey, Frontend)> {
        let mut keys = Vec::new();
        if let Some(service) = self.last.services.get(name)
            && self.services.contains_key(name)
        {
            wanted::keys(service, &mut keys);
        }
        self.claims.retain_owned(&mut keys, name);
        keys.iter()
            .filter_map(|w| Some((w.key, *self.mirror.keys.get(&w.key)?)))
            .filter(|(_, frontend)| frontend.kind() != Kind::NODE_ADDRESS)
            .collect()
    }

    /// Returns the value of a key.
    pub fn frontend(&self, key: &FrontendKey) -> Option<Frontend> {
        self.mirror.keys.get(key).copied()
    }

    /// Returns a pool in use and its endpoints.
    pub fn pool(&self, index: u32) -> Option<(Pool, &[Endpoint])> {
        let slot = self
            .mirror
            .pools
            .get(index as usize)
            .filter(|slot| slot.live)?;
        Some((slot.pool, self.mirror.block(slot.pool.block)))
    }

    /// Returns every key with its value, in the order of the keys.
    pub fn frontends(&self) -> Vec<(FrontendKey, Frontend)> {
        let mut keys: Vec<_> = self.mirror.keys.iter().map(|(k, f)| (*k, *f)).collect();
        keys.sort_unstable_by_key(|(key, _)| *key);
        keys
    }

    /// Returns the addresses that the node gained or lost.
    fn node_changes(&mut self, snapshot: &Snapshot) -> Vec<Addr> {
        if self.last.node.addresses == snapshot.node.addresses {
            return Vec::new();
        }
        // Loopback belongs to the node without an entry, and to every pod as well.
        let addresses = snapshot
            .node
            .addresses
            .iter()
            .filter(|ip| wanted::can_be_vip(**ip));
        let node = addresses.map(|ip| Addr::from(*ip)).collect::<BTreeSet<_>>();
        let changed = node.symmetric_difference(&self.node).copied().collect();
        self.node = node;
        changed
    }

    /// Updates the claims. Returns the services that changed, and those that won or lost a key because of the changes.
    fn claim(&mut self, snapshot: &Snapshot, scratch: &mut Scratch) -> Vec<Dirty> {
        let mut dirty = Vec::new();
        let mut contested = Vec::new();
        let reach = self.reach.update(&self.last, snapshot);
        // A clone is free, and lets the services be read while `self` is borrowed.
        let last = self.last.services.clone();
        if last.is_empty() {
            // Most services have one port and one address.
            self.claims.reserve(2 * snapshot.services.len());
            self.mirror.keys.reserve(2 * snapshot.services.len());
            self.services.reserve(snapshot.services.len());
        }
        for change in last.diff(&snapshot.services) {
            let (name, old, new) = match change {
                DiffItem::Add(name, new) => (name, None, Some(new)),
                DiffItem::Update {
                    old: (_, old),
                    new: (name, new),
                } => (name, Some(old), Some(new)),
                DiffItem::Remove(name, old) => (name, Some(old), None),
            };
            self.reach
                .change(old.map(|old| &**old), new.map(|new| &**new));
            let cost = self.claim_keys(snapshot, old, new, scratch, &mut contested);
            dirty.push(Dirty {
                name: name.clone(),
                old: old.cloned(),
                new: new.cloned(),
                cost,
            });
        }

        let changed = dirty.len();
        contested.sort_unstable();
        contested.dedup();
        let mut others = self.budgets.decide(snapshot);
        others.append(&mut self.waiting);
        others.extend(reach);
        let istio = &snapshot.istio;
        others.extend(istio.changed(&self.last.istio, &snapshot.services).cloned());
        for key in contested {
            if let Some((loser, winner)) = self.claims.decide(&key) {
                others.extend([loser, winner]);
            }
        }
        for name in others {
            // The changes are sorted by name.
            if dirty[..changed]
                .binary_search_by(|d| d.name.cmp(&name))
                .is_err()
            {
                let service = snapshot.services.get(&name).cloned();
                let cost = service.as_deref().map(|service| {
                    wanted::keys(service, &mut scratch.keys);
                    wanted::cost(service, &scratch.keys)
                });
                dirty.push(Dirty {
                    name,
                    old: service.clone(),
                    new: service,
                    cost: cost.unwrap_or_default(),
                });
            }
        }
        dirty
    }

    /// Claims the keys of a service that has changed, and notes which are contested. Returns the entries that it needs.
    /// Services come in the order of their names, so claims of earlier services are those of `snapshot`.
    fn claim_keys(
        &mut self,
        snapshot: &Snapshot,
        old: Option<&Arc<Service>>,
        new: Option<&Arc<Service>>,
        scratch: &mut Scratch,
        contested: &mut Vec<FrontendKey>,
    ) -> Entries {
        let Scratch { keys, old_keys, .. } = scratch;
        let is_update = old.is_some() && new.is_some();
        let costs = [(old, &mut *old_keys), (new, &mut *keys)].map(|(service, keys)| {
            keys.clear();
            let Some(service) = service else {
                return Entries::default();
            };
            wanted::keys(service, keys);
            let cost = wanted::cost(service, keys);
            // The keys of a service that comes or goes are not searched.
            if is_update {
                keys.sort_unstable_by_key(|wanted| wanted.key);
            }
            cost
        });
        let Some(name) = new.or(old).map(|service| &service.name) else {
            return costs[1];
        };
        let has_other_age = old
            .zip(new)
            .is_some_and(|(old, new)| old.created != new.created);
        self.budgets
            .change(name, &costs[0], &costs[1], has_other_age);
        let find = |keys: &[WantedKey], key| {
            let found = keys.binary_search_by_key(key, |wanted| wanted.key);
            found.ok().map(|at| keys[at].claim)
        };
        for wanted in old_keys.iter() {
            let (key, Some(old)) = (&wanted.key, old) else {
                continue;
            };
            let (claims, is_same_age) =
                (&mut self.claims, new.map(|new| new.created == old.created));
            let is_contested = match new.zip(find(keys, key)) {
                Some((_, claim)) if claim == wanted.claim && is_same_age == Some(true) => continue,
                Some((new, claim)) => {
                    claims.change(key, &Rank::of(old, wanted.claim), Rank::of(new, claim))
                }
                None => claims.remove(key, &Rank::of(old, wanted.claim)),
            };
            contested.extend(is_contested.then_some(*key));
        }
        let last = &self.last.services;
        let known = |owner: &ServiceName| {
            let services = if owner < name {
                &snapshot.services
            } else {
                last
            };
            services.get(owner).map(|service| &**service)
        };
        for wanted in keys.iter() {
            if let Some(new) = new
                && find(old_keys, &wanted.key).is_none()
                && self.claims.add(wanted, new, known)
            {
                contested.push(wanted.key);
            }
        }
        costs[1]
    }

    /// Returns whether a key belongs to a service that is served. A service that is left out still owns its keys.
    fn is_taken(&self, key: &FrontendKey) -> bool {
        let owner = self.claims.owner(key);
        owner.is_some_and(|owner| self.budgets.left(owner) != Some(LeftOut::Whole))
    }

    /// Returns the value of a key that no service owns.
    fn unclaimed(&self, key: &FrontendKey) -> Option<Frontend> {
        let is_node = key.is_address() && self.node.contains(&key.addr);
        is_node.then_some(Frontend::new(0, Kind::NODE_ADDRESS))
    }

    /// Removes unclaimed keys after adoption, and retires the pools whose owner was not found.
    fn remove_strays(&mut self, writes: &mut Writes) {
        let strays = self
            .mirror
            .keys
            .keys()
            .filter(|key| self.claims.owner(key).is_none());
        for key in strays.copied().collect::<Vec<_>>() {
            self.mirror.set_key(key, self.unclaimed(&key), writes);
        }
        let ownerless = (0..).zip(&self.mirror.pools);
        let ownerless =
            ownerless.filter(|(index, slot)| slot.live && self.mirror.owner(*index).is_none());
        for index in ownerless.map(|(index, _)| index).collect::<Vec<_>>() {
            self.mirror.retire_pool(index, writes);
        }
        let pools = &self.mirror.pools;
        let of_nobody = |index: &u32| pools.get(*index as usize).is_none_or(|slot| !slot.live);
        let stray: Vec<u32> = self
            .mirror
            .sources
            .keys()
            .copied()
            .filter(of_nobody)
            .collect();
        for index in stray {
            self.mirror.set_sources(index, &BTreeSet::new(), writes);
        }
    }
}

#[cfg(test)]
mod tests;
