//! Contents of the kernel's tables after the planned writes, and the slots and pools that are free.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use dataplane_common::{
    packet::SourceKey,
    tables::{Block, Endpoint, Frontend, FrontendKey, Pool},
};
use imbl::Vector;

use super::{Demand, PoolOwner, Room, Write, blocks, blocks::Blocks, shares::Entries};

/// The tables, with their free slots and pools.
#[derive(Debug)]
pub(super) struct Mirror {
    pub(super) keys: HashMap<FrontendKey, Frontend>,
    /// By index. The first is never used.
    pub(super) pools: Vec<Slot>,
    /// The owners of the pools. A live pool without an owner was adopted, and its owner has not been found yet.
    pub(super) owners: Vector<Option<Arc<PoolOwner>>>,
    /// By slot.
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) blocks: Blocks,
    pub(super) free_pools: BTreeSet<u32>,
    /// Blocks that no pool refers to. A running program may still read them.
    pub(super) retired_blocks: Vec<Block>,
    /// Pools that no key refers to. A running program may still read them.
    pub(super) retired_pools: Vec<u32>,
    /// Slots of `retired_blocks`.
    pub(super) retired_slots: u32,
    /// Slots of blocks that pools refer to.
    pub(super) live_slots: u32,
    /// Number of pools that are the affinity group of pools with affinity.
    pub(super) affinity_groups: u32,
    /// The source ranges of each pool that has some.
    pub(super) sources: HashMap<u32, BTreeSet<SourceKey>>,
    /// Total number of source ranges.
    pub(super) source_count: usize,
}

/// An element of `POOLS`.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    pub(super) pool: Pool,
    /// Whether keys refer to it, or another pool's affinity group does.
    pub(super) live: bool,
}

/// Wanted contents of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contents<'a> {
    pub(super) endpoints: &'a [Endpoint],
    pub(super) flags: u16,
    pub(super) affinity_seconds: u32,
    pub(super) affinity_group: u32,
    /// The pool of the local endpoints, if clients from outside get those; 0: none.
    pub(super) external: u32,
    /// The networks that may use the load balancer's addresses; empty: all networks.
    pub(super) sources: &'a BTreeSet<SourceKey>,
}

/// The writes of a plan, by kind.
#[derive(Debug, Default)]
pub(super) struct Writes {
    endpoints: Vec<Write>,
    add_sources: Vec<SourceKey>,
    pools: Vec<Write>,
    inserts: Vec<(FrontendKey, Frontend)>,
    replaces: Vec<(FrontendKey, Frontend)>,
    removes: Vec<(FrontendKey, Frontend)>,
    /// Source ranges of pools that stay.
    drop_sources: Vec<SourceKey>,
    /// Source ranges of pools that are retired.
    remove_sources: Vec<SourceKey>,
}

impl Default for Mirror {
    fn default() -> Self {
        Self {
            keys: HashMap::new(),
            pools: vec![Slot::default()],
            owners: Vector::unit(None),
            endpoints: Vec::new(),
            blocks: Blocks::default(),
            free_pools: BTreeSet::new(),
            retired_blocks: Vec::new(),
            retired_pools: Vec::new(),
            retired_slots: 0,
            live_slots: 0,
            affinity_groups: 0,
            sources: HashMap::new(),
            source_count: 0,
        }
    }
}

impl Mirror {
    /// Returns the endpoints of a block.
    pub(super) fn block(&self, block: Block) -> &[Endpoint] {
        let base = block.base() as usize;
        self.endpoints
            .get(base..base + usize::from(block.len()))
            .unwrap_or_default()
    }

    /// Returns whether the pool holds a port's local endpoints: its affinity group is another pool, the pool of all
    /// endpoints.
    pub(super) fn is_local(&self, index: u32) -> bool {
        self.pools[index as usize].pool.affinity_group != index
    }

    /// Returns a free pool, with `owner` as its owner.
    pub(super) fn take_pool(&mut self, owner: PoolOwner) -> u32 {
        let index = self.free_pools.pop_first().unwrap_or_else(|| {
            let len = self.pools.len() + 1;
            grow(&mut self.pools, len);
            self.pools.push(Slot::default());
            self.owners.push_back(None);
            count(self.pools.len() - 1)
        });
        self.pools[index as usize] = Slot::default();
        self.set_owner(index, Some(owner));
        index
    }

    /// Sets the owner of a pool.
    pub(super) fn set_owner(&mut self, index: u32, owner: Option<PoolOwner>) {
        if self.owner(index) != owner.as_ref() {
            self.owners.set(index as usize, owner.map(Arc::new));
        }
    }

    /// Returns the owner of a pool.
    pub(super) fn owner(&self, index: u32) -> Option<&PoolOwner> {
        self.owners.get(index as usize)?.as_deref()
    }

    /// Makes the pool hold `contents`, by at most one write. Writes nothing if the pool already holds them.
    pub(super) fn set_pool(&mut self, index: u32, contents: Contents<'_>, writes: &mut Writes) {
        let Slot {
            pool: before, live, ..
        } = self.pools[index as usize];
        debug_assert!(contents.endpoints.len() <= Block::MAX_LEN);
        let len = u16::try_from(contents.endpoints.len()).unwrap_or(u16::MAX);
        let base = if self.block(before.block) == contents.endpoints {
            before.block.base()
        } else {
            self.retire_block(before.block);
            self.fill(contents.endpoints, writes)
        };
        let pool = Pool {
            block: Block::new(base, len, contents.flags),
            affinity_seconds: contents.affinity_seconds,
            affinity_group: contents.affinity_group,
            external: contents.external,
            ranged: u32::from(!contents.sources.is_empty()),
        };
        self.set_sources(index, contents.sources, writes);
        if !live || pool != before {
            writes.pools.push(Write::Pool {
                index,
                pool,
                fresh: !live,
            });
        }
        self.affinity_groups -= u32::from(live && has_group(index, &before));
        self.affinity_groups += u32::from(has_group(index, &pool));
        let slot = &mut self.pools[index as usize];
        slot.pool = pool;
        slot.live = true;
    }

    /// Adds flags to the block of a pool that stays as it is otherwise.
    pub(super) fn add_flags(&mut self, index: u32, flags: u16, writes: &mut Writes) {
        let pool = &mut self.pools[index as usize].pool;
        let block = pool.block;
        if block.flags() & flags == flags {
            return;
        }
        pool.block = Block::new(block.base(), block.len(), block.flags() | flags);
        writes.pools.push(Write::Pool {
            index,
            pool: *pool,
            fresh: false,
        });
    }

    /// Makes a pool have these source ranges.
    pub(super) fn set_sources(
        &mut self,
        index: u32,
        wanted: &BTreeSet<SourceKey>,
        writes: &mut Writes,
    ) {
        // Nearly every pool has no source ranges, before and after.
        if wanted.is_empty() && !self.sources.contains_key(&index) {
            return;
        }
        let before = self.sources.remove(&index).unwrap_or_default();
        writes.add_sources.extend(wanted.difference(&before));
        writes.drop_sources.extend(before.difference(wanted));
        self.source_count = self.source_count + wanted.len() - before.len();
        if !wanted.is_empty() {
            self.sources.insert(index, wanted.clone());
        }
    }

    fn fill(&mut self, endpoints: &[Endpoint], writes: &mut Writes) -> u32 {
        if endpoints.is_empty() {
            return 0;
        }
        let base = self.blocks.take(endpoints.len());
        let slots = blocks::slots(endpoints.len());
        self.live_slots += slots;
        let (start, end) = (base as usize, (base + slots) as usize);
        if self.endpoints.len() < end {
            grow(&mut self.endpoints, end);
            self.endpoints.resize(end, NO_ENDPOINT);
        }
        self.endpoints[start..start + endpoints.len()].copy_from_slice(endpoints);
        writes.endpoints.push(Write::Endpoints {
            base,
            endpoints: endpoints.to_vec(),
        });
        base
    }

    fn retire_block(&mut self, block: Block) {
        if !block.is_empty() {
            let slots = blocks::slots(block.len().into());
            self.live_slots -= slots;
            self.retired_slots += slots;
            self.retired_blocks.push(block);
        }
    }

    /// Retires a pool that no key refers to after the plan.
    pub(super) fn retire_pool(&mut self, index: u32, writes: &mut Writes) {
        // Keys refer to the pool until they are removed, so its source ranges are removed after them.
        let sources = self.sources.remove(&index).unwrap_or_default();
        self.source_count -= sources.len();
        writes.remove_sources.extend(sources);
        self.set_owner(index, None);
        let slot = std::mem::take(&mut self.pools[index as usize]);
        if slot.live {
            self.affinity_groups -= u32::from(has_group(index, &slot.pool));
            self.retire_block(slot.pool.block);
        }
        self.retired_pools.push(index);
    }

    /// Makes retired blocks and pools free.
    pub(super) fn reuse_retired(&mut self) {
        for block in std::mem::take(&mut self.retired_blocks) {
            self.blocks.give_back(block.base(), block.len().into());
        }
        self.retired_slots = 0;
        self.free_pools.extend(self.retired_pools.drain(..));
    }

    /// Sets the value of `key`, or removes the key.
    pub(super) fn set_key(
        &mut self,
        key: FrontendKey,
        frontend: Option<Frontend>,
        writes: &mut Writes,
    ) {
        let Some(frontend) = frontend else {
            let before = self.keys.remove(&key);
            writes.removes.extend(before.map(|before| (key, before)));
            return;
        };
        match self.keys.insert(key, frontend) {
            None => writes.inserts.push((key, frontend)),
            Some(before) if before != frontend => writes.replaces.push((key, frontend)),
            Some(_) => {}
        }
    }

    /// Returns the table sizes for a plan that had `keys_before` keys and inserts before it removes.
    pub(super) fn demand(&self, keys_before: usize, writes: &Writes) -> Demand {
        Demand {
            frontends: count(keys_before + writes.inserts.len()),
            pools: count(self.pools.len()),
            endpoints: count(self.endpoints.len()),
            affinity_groups: self.affinity_groups,
            // Removed source ranges stay until the end of the plan.
            sources: count(self.source_count + writes.gone_sources()),
        }
    }

    /// Returns whether the tables stay within `room` if a service gets `more` keys, pools, slots and source ranges in a
    /// plan that had `keys_before` keys. `lens` returns the lengths of the new blocks; it is called only if slots are
    /// scarce.
    pub(super) fn has_room(
        &mut self,
        room: &Room,
        keys_before: usize,
        writes: &Writes,
        [keys, pools, slots, sources]: Entries,
        lens: impl FnOnce() -> Vec<usize>,
    ) -> bool {
        let within = |used: usize, more: u64, limit: u32| used as u64 + more <= limit.into();
        let new_pools = pools.saturating_sub(self.free_pools.len() as u64);
        let known_sources = self.source_count + writes.gone_sources();
        within(keys_before + writes.inserts.len(), keys, room.frontends)
            && within(self.pools.len() - 1, new_pools, room.pools)
            && within(known_sources, sources, room.sources)
            // The base of each block is the next multiple of the block's size.
            && (within(self.blocks.top() as usize, 2 * slots, room.endpoints)
                || self.blocks.has_room(&lens(), room.endpoints))
    }
}

/// Contents of slots that were never written.
const NO_ENDPOINT: Endpoint = Endpoint::new(
    dataplane_common::Addr::UNSPECIFIED,
    dataplane_common::Port::ANY,
);

/// Reserves memory for `len` elements and an eighth more. A `Vec` would double, which wastes memory for a large table.
fn grow<T>(elements: &mut Vec<T>, len: usize) {
    if len > elements.capacity() {
        elements.reserve_exact(len + len / 8 + 16 - elements.len());
    }
}

/// Converts a number of elements of a table. Tables have fewer than 2^32 elements, because their indices are 32 bits
/// wide.
pub(super) fn count(elements: usize) -> u32 {
    u32::try_from(elements).expect("a table of 2^32 elements does not fit into any node")
}

/// Returns whether the pool stands for an affinity group that is in use.
pub(super) fn has_group(index: u32, pool: &Pool) -> bool {
    pool.affinity_group == index && pool.affinity_seconds != 0
}

impl Writes {
    /// Number of source ranges that the plan removes.
    fn gone_sources(&self) -> usize {
        self.drop_sources.len() + self.remove_sources.len()
    }

    /// Returns whether keys change owner or disappear.
    pub(super) fn frees_keys(&self) -> bool {
        !(self.replaces.is_empty() && self.removes.is_empty())
    }

    /// Returns all writes in the order that the crate documents.
    pub(super) fn in_order(mut self) -> Vec<Write> {
        // An address without a port refuses the ports that have no key. So it is inserted after its ports and removed
        // before them: no client is refused during the change.
        self.inserts
            .sort_unstable_by_key(|(key, _)| (key.is_address(), *key));
        self.replaces
            .sort_unstable_by_key(|(key, _)| (key.is_address(), *key));
        self.removes
            .sort_unstable_by_key(|(key, _)| (!key.is_address(), *key));
        self.add_sources.sort_unstable();
        self.drop_sources.sort_unstable();
        self.remove_sources.sort_unstable();
        let mut writes = self.endpoints;
        let lens = [
            self.pools.len(),
            self.inserts.len(),
            self.replaces.len(),
            self.removes.len(),
            self.add_sources.len(),
            self.drop_sources.len(),
            self.remove_sources.len(),
        ];
        writes.reserve_exact(lens.iter().sum());
        let add = |key| Write::AddSource { key };
        writes.extend(self.add_sources.into_iter().map(add));
        writes.append(&mut self.pools);
        // Before a new key appears, which would otherwise be open to the networks that were allowed until now.
        let drop = |key| Write::RemoveSource { key };
        writes.extend(self.drop_sources.into_iter().map(drop));
        let insert = |(key, frontend)| Write::Insert { key, frontend };
        writes.extend(self.inserts.into_iter().map(insert));
        let replace = |(key, frontend)| Write::Replace { key, frontend };
        writes.extend(self.replaces.into_iter().map(replace));
        let remove = |(key, frontend)| Write::Remove { key, frontend };
        writes.extend(self.removes.into_iter().map(remove));
        let remove = |key| Write::RemoveSource { key };
        writes.extend(self.remove_sources.into_iter().map(remove));
        writes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_key;

    fn sources(count: u8) -> BTreeSet<SourceKey> {
        let networks = (0..count).map(|n| format!("10.0.{n}.0/24").parse().unwrap());
        networks.map(|of| source_key(1, &of)).collect()
    }

    /// More keys, pools, slots and source ranges in tables with room for 10 of each and for 16 slots, the blocks of the slots, and
    /// whether there is room. There are five keys and source ranges, three pools of which one is free, and four slots.
    #[test]
    fn a_service_needs_room_in_each_table() {
        for (more, lens, wanted) in [
            ([5, 8, 6, 5], None, true),
            ([6, 8, 6, 5], None, false),
            ([5, 9, 6, 5], None, false),
            ([5, 8, 6, 6], None, false),
            ([5, 8, 7, 5], Some(8), true),
            ([5, 8, 7, 5], Some(16), false),
        ] {
            let mut mirror = Mirror {
                pools: vec![Slot::default(); 4],
                free_pools: [3].into(),
                source_count: 3,
                ..Mirror::default()
            };
            mirror.blocks.take(4);
            let key = FrontendKey::address(dataplane_common::Addr::UNSPECIFIED);
            let inserted = Frontend::new(1, dataplane_common::tables::Kind::CLUSTER_ADDRESS);
            let writes = Writes {
                inserts: vec![(key, inserted)],
                drop_sources: sources(1).into_iter().collect(),
                remove_sources: sources(1).into_iter().collect(),
                ..Writes::default()
            };
            let room = Room {
                frontends: 10,
                pools: 10,
                endpoints: 16,
                sources: 10,
            };
            let lens = || vec![lens.expect("nothing is scarce")];
            let found = mirror.has_room(&room, 4, &writes, more, lens);
            assert_eq!(found, wanted, "{more:?}");
        }
    }

    #[test]
    fn flags_are_added_to_those_that_are_there() {
        let mut mirror = Mirror::default();
        mirror.pools[0].pool.block = Block::new(0, 0, Block::HBONE);
        let both = Block::HBONE | Block::WAYPOINT;
        for _ in 0..2 {
            let mut writes = Writes::default();
            mirror.add_flags(0, both, &mut writes);
            assert_eq!(mirror.pools[0].pool.block.flags(), both);
        }
    }

    #[test]
    fn source_ranges_go_with_their_pool() {
        let (mut mirror, mut writes) = (Mirror::default(), Writes::default());
        mirror.pools.push(Slot::default());
        for (count, wanted) in [(2, 2), (3, 3), (1, 1)] {
            mirror.set_sources(1, &sources(count), &mut writes);
            assert_eq!(mirror.source_count, wanted);
        }
        mirror.retire_pool(1, &mut writes);
        assert_eq!((mirror.source_count, writes.remove_sources.len()), (0, 1));
        assert_eq!(mirror.demand(0, &writes).sources, 3);
    }
}
