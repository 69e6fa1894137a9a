//! The part of the tables that clients can reach: keys that lead to a pool, and slots of live pools.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::tables::{Block, FrontendKey, Pool};

/// Follows each write. The cost of a write grows with its change and not with the tables.
///
/// A pool is live if a key refers to it, or if another pool that a key refers to has it as its affinity group or as its
/// pool for clients from outside.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// The keys that refer to each pool.
    keys: BTreeMap<u32, BTreeSet<FrontendKey>>,
    /// For each live pool, the pools of keys that refer to it, including itself.
    pools: BTreeMap<u32, BTreeSet<u32>>,
    /// Number of live pools that have each slot.
    slots: BTreeMap<u32, u32>,
}

pub fn slots(block: Block) -> impl Iterator<Item = u32> {
    block.base()..block.base() + u32::from(block.len())
}

/// Returns the pools that the pool of a key refers to.
fn referred(index: u32, pools: &BTreeMap<u32, Pool>) -> impl Iterator<Item = u32> + use<> {
    let pool = pools.get(&index).copied().unwrap_or_default();
    let referred = BTreeSet::from([index, pool.affinity_group, pool.external]);
    referred.into_iter().filter(|index| *index != 0)
}

impl Live {
    /// Adds a key that refers to a pool.
    pub fn add(&mut self, key: FrontendKey, pool: u32, pools: &BTreeMap<u32, Pool>) {
        if pool == 0 {
            return;
        }
        let keys = self.keys.entry(pool).or_default();
        let first = keys.is_empty();
        keys.insert(key);
        if first {
            self.refer(pool, pools);
        }
    }

    /// Removes a key that referred to a pool.
    pub fn remove(&mut self, key: &FrontendKey, pool: u32, pools: &BTreeMap<u32, Pool>) {
        if let Some(keys) = self.keys.get_mut(&pool) {
            keys.remove(key);
            if keys.is_empty() {
                self.keys.remove(&pool);
                self.forget(pool, pools);
            }
        }
    }

    /// Prepares for a write to a pool.
    pub fn before_write(&mut self, index: u32, pools: &BTreeMap<u32, Pool>) {
        if self.keys.contains_key(&index) {
            self.forget(index, pools);
        }
        if self.pools.contains_key(&index) {
            self.release(index, pools);
        }
    }

    /// Follows a write to a pool.
    pub fn after_write(&mut self, index: u32, pools: &BTreeMap<u32, Pool>) {
        if self.pools.contains_key(&index) {
            self.hold(index, pools);
        }
        if self.keys.contains_key(&index) {
            self.refer(index, pools);
        }
    }

    fn refer(&mut self, from: u32, pools: &BTreeMap<u32, Pool>) {
        for to in referred(from, pools) {
            let referring = self.pools.entry(to).or_default();
            let first = referring.is_empty();
            referring.insert(from);
            if first {
                self.hold(to, pools);
            }
        }
    }

    fn forget(&mut self, from: u32, pools: &BTreeMap<u32, Pool>) {
        for to in referred(from, pools) {
            let referring = self
                .pools
                .get_mut(&to)
                .expect("a pool that was referred to");
            referring.remove(&from);
            if referring.is_empty() {
                self.pools.remove(&to);
                self.release(to, pools);
            }
        }
    }

    fn hold(&mut self, index: u32, pools: &BTreeMap<u32, Pool>) {
        for slot in pools.get(&index).into_iter().flat_map(|p| slots(p.block)) {
            *self.slots.entry(slot).or_default() += 1;
        }
    }

    fn release(&mut self, index: u32, pools: &BTreeMap<u32, Pool>) {
        for slot in pools.get(&index).into_iter().flat_map(|p| slots(p.block)) {
            let users = self.slots.get_mut(&slot).expect("a slot of a live pool");
            *users -= 1;
            if *users == 0 {
                self.slots.remove(&slot);
            }
        }
    }

    /// Returns whether clients can reach a slot.
    pub fn has_slot(&self, slot: u32) -> bool {
        self.slots.contains_key(&slot)
    }

    /// Returns the keys whose answers use a pool.
    pub fn keys_of(&self, index: u32) -> impl Iterator<Item = &FrontendKey> {
        let pools = self.pools.get(&index).into_iter().flatten();
        pools.flat_map(|pool| &self.keys[pool])
    }

    /// Returns all live pools.
    pub fn pools(&self) -> BTreeSet<u32> {
        self.pools.keys().copied().collect()
    }

    /// Returns all slots of live pools.
    pub fn slots(&self) -> BTreeSet<u32> {
        self.slots.keys().copied().collect()
    }
}
