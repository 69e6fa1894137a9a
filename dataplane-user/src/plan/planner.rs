//! The planner: what changed in the snapshot, and which writes follow from it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use dataplane_common::{
    Addr,
    tables::{Endpoint, Frontend, FrontendKey, Kind, Pool},
};
use imbl::ordmap::DiffItem;

use super::{
    AdoptError, Conflict, Contents, Plan, PoolOwner,
    adopt::{self, Adopted},
    claims::Claims,
    mirror::{Mirror, Writes},
    settle::{ServicePools, Settle},
    wanted::{self, WantedKey},
};
use crate::model::{Problem, Service, ServiceName, Snapshot};

/// Retired slots that are worth a grace period, whatever the table's size.
const RETIRED_AT_LEAST: u32 = 1024;

/// Mirrors the kernel's tables and says what to write for the next snapshot.
///
/// If a plan could not be applied as a whole, throw the planner away and [`Planner::adopt`] what
/// the kernel holds: there is no way back in here.
#[derive(Debug, Default)]
pub struct Planner {
    last: Snapshot,
    mirror: Mirror,
    claims: Claims,
    /// The pools of every service that has some.
    services: HashMap<ServiceName, ServicePools>,
    /// This node's addresses.
    node: BTreeSet<Addr>,
    problems: BTreeMap<ServiceName, Vec<Problem>>,
    /// Between adoption and the first plan.
    adopted: Option<Adopted>,
    /// Whether keys were removed or changed owner since the last grace period.
    freed_keys: bool,
    scratch: Scratch,
}

/// Buffers that are the same in every plan.
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
}

impl Planner {
    /// For empty tables.
    pub fn new() -> Self {
        Self::default()
    }

    /// For tables that an earlier agent wrote. The first plan then compares everything, removes
    /// what nobody wants, and leaves alone what is right already.
    ///
    /// What that agent had freed is free at once: wait for a grace period between reading
    /// `contents` and applying the first plan.
    ///
    /// # Errors
    ///
    /// If the tables are not what this program writes, and so must not be relied on.
    pub fn adopt(contents: Contents) -> Result<Self, AdoptError> {
        let (mirror, adopted) = adopt::adopt(contents)?;
        Ok(Self {
            mirror,
            adopted: Some(adopted),
            ..Self::default()
        })
    }

    /// What to write so that the tables are those of `snapshot`. Takes for granted that it is
    /// written before the next plan.
    pub fn plan(&mut self, snapshot: &Snapshot) -> Plan {
        let mut writes = Writes::default();
        let keys_before = self.mirror.keys.len();
        let mut scratch = std::mem::take(&mut self.scratch);
        let node_changed = self.node_changes(snapshot);

        let dirty = self.claim(snapshot, &mut scratch);
        for service in &dirty {
            self.settle(service, &mut scratch, &mut writes);
        }
        for addr in node_changed {
            let key = FrontendKey::address(addr);
            if self.claims.owner(&key).is_none() {
                self.mirror.set_key(key, self.unclaimed(&key), &mut writes);
            }
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

    /// Whether a grace period is worth its wait now: keys changed owner or were removed, or much
    /// of the table is retired.
    pub fn wants_grace(&self) -> bool {
        let bound = RETIRED_AT_LEAST.max(self.mirror.live_slots / 8);
        self.freed_keys || self.mirror.retired_slots > bound
    }

    /// Every program that was running when the last plan had been written has ended: what was
    /// retired until then may be used again.
    pub fn grace_passed(&mut self) {
        self.freed_keys = false;
        self.mirror.reuse_retired();
    }

    /// The keys that several services claim, in the order of the keys.
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.claims.conflicts().collect()
    }

    /// What is not served as written, by service. Conflicts are apart: [`Planner::conflicts`].
    pub fn problems(&self) -> impl Iterator<Item = (&ServiceName, &Problem)> {
        self.problems
            .iter()
            .flat_map(|(name, problems)| problems.iter().map(move |p| (name, p)))
    }

    /// The last planned snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        &self.last
    }

    /// Who uses the pool; none if nobody does.
    pub fn pool_owner(&self, index: u32) -> Option<&PoolOwner> {
        self.mirror.pools.get(index as usize)?.owner.as_ref()
    }

    /// Every pool in use, with its index and its owner, in the order of the indices.
    pub fn pools(&self) -> impl Iterator<Item = (u32, &PoolOwner, Pool)> {
        let slots = (0..).zip(&self.mirror.pools);
        slots.filter_map(|(index, slot)| Some((index, slot.owner.as_ref()?, slot.pool)))
    }

    /// The pools of one service, with their owner's details; cheap.
    pub fn service_pools(&self, service: &ServiceName) -> Vec<(u32, &PoolOwner, Pool)> {
        let Some(pools) = self.services.get(service) else {
            return Vec::new();
        };
        pools
            .indices()
            .filter_map(|index| {
                let slot = self.mirror.pools.get(index as usize)?;
                Some((index, slot.owner.as_ref()?, slot.pool))
            })
            .collect()
    }

    /// The keys of one service, those that it claims in vain left out; cheap.
    pub fn service_keys(&self, name: &ServiceName) -> Vec<(FrontendKey, Frontend)> {
        let mut keys = Vec::new();
        if let Some(service) = self.last.services.get(name) {
            wanted::keys(service, &mut keys);
        }
        self.claims.retain_owned(&mut keys, name);
        keys.iter()
            .filter_map(|w| Some((w.key, *self.mirror.keys.get(&w.key)?)))
            .collect()
    }

    /// What a key is answered with.
    pub fn frontend(&self, key: &FrontendKey) -> Option<Frontend> {
        self.mirror.keys.get(key).copied()
    }

    /// A pool in use and its endpoints.
    pub fn pool(&self, index: u32) -> Option<(Pool, &[Endpoint])> {
        let slot = self
            .mirror
            .pools
            .get(index as usize)
            .filter(|slot| slot.live)?;
        Some((slot.pool, self.mirror.block(slot.pool.block)))
    }

    /// Every key with its value, in the order of the keys.
    pub fn frontends(&self) -> Vec<(FrontendKey, Frontend)> {
        let mut keys: Vec<_> = self.mirror.keys.iter().map(|(k, f)| (*k, *f)).collect();
        keys.sort_unstable_by_key(|(key, _)| *key);
        keys
    }

    /// The node's addresses that came or went.
    fn node_changes(&mut self, snapshot: &Snapshot) -> Vec<Addr> {
        if Arc::ptr_eq(&self.last.node, &snapshot.node)
            || self.last.node.addresses == snapshot.node.addresses
        {
            return Vec::new();
        }
        // Loopback is the node's own without an entry, and every pod's too.
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

    /// Brings the claims up to date; returns the services that changed, and those that won or
    /// lost a key by it.
    fn claim(&mut self, snapshot: &Snapshot, scratch: &mut Scratch) -> Vec<Dirty> {
        let mut dirty = Vec::new();
        let mut contested = Vec::new();
        // A clone costs nothing, and lets the services be used beside `self`.
        let last = self.last.services.clone();
        if last.is_empty() {
            // Most have a port and an address.
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
            self.claim_keys(name, old, new, scratch, &mut contested);
            dirty.push(Dirty {
                name: name.clone(),
                old: old.cloned(),
                new: new.cloned(),
            });
        }

        let changed = dirty.len();
        let rank = |key: &FrontendKey, name: &ServiceName| {
            let service = snapshot.services.get(name);
            let claim = service.map(|service| wanted::claim(service, key));
            let created = service.and_then(|service| service.created);
            (claim, created.is_none(), created, name.clone())
        };
        contested.sort_unstable();
        contested.dedup();
        let mut others = BTreeSet::new();
        for key in contested {
            if let Some((loser, winner)) = self.claims.settle(&key, |name| rank(&key, name)) {
                others.extend([loser, winner]);
            }
        }
        for name in others {
            // The changes are in the order of the names.
            if dirty[..changed]
                .binary_search_by(|d| d.name.cmp(&name))
                .is_err()
            {
                let service = snapshot.services.get(&name).cloned();
                dirty.push(Dirty {
                    name,
                    old: service.clone(),
                    new: service,
                });
            }
        }
        dirty
    }

    fn claim_keys(
        &mut self,
        name: &ServiceName,
        old: Option<&Arc<Service>>,
        new: Option<&Arc<Service>>,
        scratch: &mut Scratch,
        contested: &mut Vec<FrontendKey>,
    ) {
        let Scratch { keys, old_keys, .. } = scratch;
        for (service, keys) in [(old, &mut *old_keys), (new, &mut *keys)] {
            keys.clear();
            if let Some(service) = service {
                wanted::keys(service, keys);
                keys.sort_unstable_by_key(|wanted| wanted.key);
            }
        }
        // By what a service claims a key decides who wins, then its age.
        if let (Some(old), Some(new)) = (old, new) {
            let all = old_keys.iter().map(|wanted| wanted.key);
            let other = |key: &FrontendKey| {
                old.created != new.created || wanted::claim(old, key) != wanted::claim(new, key)
            };
            contested.extend(all.filter(|key| self.claims.is_contested(key) && other(key)));
        }
        let has = |keys: &[WantedKey], key| keys.binary_search_by_key(key, |w| w.key).is_ok();
        for WantedKey { key, .. } in old_keys.iter().filter(|w| !has(keys, &w.key)) {
            if self.claims.remove(key, name) {
                contested.push(*key);
            }
        }
        for WantedKey { key, .. } in keys.iter().filter(|w| !has(old_keys, &w.key)) {
            if self.claims.add(*key, name) {
                contested.push(*key);
            }
        }
    }

    /// Lets the service's pools and keys be as they should.
    fn settle(&mut self, service: &Dirty, scratch: &mut Scratch, writes: &mut Writes) {
        let Dirty { name, old, new } = service;
        let before = self.services.remove(name).unwrap_or_default();
        let mut problems = Vec::new();
        if let Some(new) = new {
            wanted::keys(new, &mut scratch.keys);
            self.claims.retain_owned(&mut scratch.keys, name);
            let mut settle = Settle {
                mirror: &mut self.mirror,
                adopted: self.adopted.as_ref(),
                writes,
                cluster: &mut scratch.cluster,
                local: &mut scratch.local,
                problems: Vec::new(),
            };
            let after = settle.settle(new, &scratch.keys, before);
            problems = settle.problems;
            if after.indices().next().is_some() {
                self.services.insert(name.clone(), after);
            }
        } else {
            for index in before.indices() {
                self.mirror.retire_pool(index, writes);
            }
        }
        if let Some(old) = old {
            wanted::keys(old, &mut scratch.keys);
            for WantedKey { key, .. } in &scratch.keys {
                if self.claims.owner(key).is_none() {
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

    /// What a key is that no service claims.
    fn unclaimed(&self, key: &FrontendKey) -> Option<Frontend> {
        let is_node = wanted::is_address(key) && self.node.contains(&key.addr);
        is_node.then_some(Frontend::new(0, Kind::NODE_ADDRESS))
    }

    /// After adoption: removes the keys that nobody wants and gives up the pools whose owner was
    /// not found.
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
        let ownerless = ownerless.filter(|(_, slot)| slot.live && slot.owner.is_none());
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
