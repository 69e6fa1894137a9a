//! A kernel that executes plans and objects to everything a real one would suffer from.

use std::collections::{BTreeMap, BTreeSet};

use dataplane::plan::{Contents, Plan, Planner, Write};
use dataplane_common::{
    VipPlace, VipWords,
    decide::{self, Tables},
    tables::{Block, Endpoint, Frontend, FrontendKey, Kind, Pool},
};

/// How a key is answered, with everything that a client can notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    pub kind: Kind,
    pub flags: u16,
    pub affinity_seconds: u32,
    pub endpoints: Vec<Endpoint>,
}

#[derive(Clone, Debug, Default)]
pub struct Sim {
    pub keys: BTreeMap<FrontendKey, Frontend>,
    pub pools: BTreeMap<u32, Pool>,
    pub slots: BTreeMap<u32, Endpoint>,
    /// Not to be written before a grace period.
    retired_slots: BTreeSet<u32>,
    retired_pools: BTreeSet<u32>,
}

impl Tables for Sim {
    fn vips(&self, index: u32) -> VipWords {
        let mut words = VipWords::default();
        for (key, frontend) in &self.keys {
            let place = VipPlace::of(key.addr);
            if place.index() == index {
                match place.bit(frontend.kind()) {
                    bit @ 0..64 => words.prefixes |= 1 << bit,
                    bit => words.addresses |= 1 << (bit - 64),
                }
            }
        }
        words
    }
    fn frontend(&self, key: &FrontendKey) -> Frontend {
        self.keys.get(key).copied().unwrap_or(Frontend::NONE)
    }
    fn pool(&self, index: u32) -> Option<Pool> {
        self.pools.get(&index).copied()
    }
    fn endpoint(&self, slot: u32) -> Option<Endpoint> {
        self.slots.get(&slot).copied()
    }
}

fn slots(block: Block) -> impl Iterator<Item = u32> {
    block.base()..block.base() + u32::from(block.len())
}

impl Sim {
    /// Resolves a frontend as the programs do; panics on anything dangling.
    pub fn resolve(&self, frontend: Frontend) -> Resolved {
        if frontend.kind() == Kind::NODE_ADDRESS {
            assert_eq!(frontend.pool(), 0);
            return Resolved {
                kind: frontend.kind(),
                flags: 0,
                affinity_seconds: 0,
                endpoints: vec![],
            };
        }
        assert_ne!(frontend.pool(), 0);
        let pool = self
            .pool(frontend.pool())
            .expect("a pool that was never written");
        let endpoints: Vec<_> = slots(pool.block)
            .map(|slot| self.endpoint(slot).expect("a slot never written"))
            .collect();
        assert!(
            endpoints.is_sorted_by(|a, b| decide::order(a, b).is_lt()),
            "{endpoints:?}"
        );
        for endpoint in &endpoints {
            assert!(decide::contains(self, pool.block, endpoint));
        }
        Resolved {
            kind: frontend.kind(),
            flags: pool.block.flags(),
            affinity_seconds: pool.affinity_seconds,
            endpoints,
        }
    }

    /// What every key resolves to.
    pub fn resolved(&self) -> BTreeMap<FrontendKey, Resolved> {
        self.keys
            .iter()
            .map(|(key, frontend)| (*key, self.resolve(*frontend)))
            .collect()
    }

    /// The pools that keys refer to, and their affinity groups.
    fn live_pools(&self) -> BTreeSet<u32> {
        let referred: BTreeSet<_> = self
            .keys
            .values()
            .map(|f| f.pool())
            .filter(|p| *p != 0)
            .collect();
        let groups = referred
            .iter()
            .map(|p| self.pools[p].affinity_group)
            .filter(|g| *g != 0);
        groups
            .collect::<BTreeSet<_>>()
            .union(&referred)
            .copied()
            .collect()
    }

    fn live_slots(&self) -> BTreeSet<u32> {
        self.live_pools()
            .iter()
            .flat_map(|p| slots(self.pools[p].block))
            .collect()
    }

    /// Executes the plan; `after_each` looks at the tables after each write.
    pub fn apply(&mut self, plan: &Plan, mut after_each: impl FnMut(&Self)) {
        let live_before = self.live_pools();
        let mut flipped = BTreeSet::new();
        let demand = plan.demand;
        for write in &plan.writes {
            match write {
                Write::Endpoints { base, endpoints } => {
                    assert!(!endpoints.is_empty());
                    let live = self.live_slots();
                    for (slot, endpoint) in (*base..).zip(endpoints) {
                        assert!(slot < demand.endpoints, "slot {slot} beyond {demand:?}");
                        assert!(!live.contains(&slot), "slot {slot} is in use");
                        assert!(
                            !self.retired_slots.contains(&slot),
                            "slot {slot} may be read"
                        );
                        self.slots.insert(slot, *endpoint);
                    }
                }
                Write::Pool { index, pool, fresh } => {
                    assert!(
                        *index != 0 && *index < demand.pools,
                        "pool {index} beyond {demand:?}"
                    );
                    assert!(flipped.insert(*index), "pool {index} is written twice");
                    assert!(
                        !self.retired_pools.contains(index),
                        "pool {index} may be read"
                    );
                    assert_eq!(*fresh, !live_before.contains(index), "fresh, pool {index}");
                    assert!(*fresh || self.pools[index] != *pool, "a write for nothing");
                    let before = self.pools.insert(*index, *pool);
                    if let Some(before) = before.filter(|_| !fresh)
                        && before.block.base() != pool.block.base()
                    {
                        self.retired_slots.extend(slots(before.block));
                    }
                }
                Write::Insert { key, frontend } => {
                    assert!(
                        self.keys.insert(*key, *frontend).is_none(),
                        "{key:?} is there"
                    );
                    assert!(self.keys.len() <= demand.frontends as usize, "{demand:?}");
                }
                Write::Replace { key, frontend } => {
                    let before = self.keys.insert(*key, *frontend);
                    assert!(
                        before.is_some_and(|before| before != *frontend),
                        "{key:?}: {before:?}"
                    );
                }
                Write::Remove { key } => {
                    assert!(self.keys.remove(key).is_some(), "{key:?} is not there");
                }
            }
            after_each(self);
        }
        let groups = self.live_pools();
        let groups = groups.iter().filter(|p| {
            let pool = &self.pools[p];
            pool.affinity_group == **p && pool.affinity_seconds != 0
        });
        assert_eq!(
            demand.affinity_groups as usize,
            groups.count(),
            "affinity groups"
        );
        for index in live_before.difference(&self.live_pools()) {
            self.retired_pools.insert(*index);
            self.retired_slots.extend(slots(self.pools[index].block));
        }
    }

    pub fn grace(&mut self) {
        self.retired_pools.clear();
        self.retired_slots.clear();
    }

    /// The tables as an agent reads them.
    pub fn contents(&self) -> Contents {
        let pools = self.pools.last_key_value().map_or(0, |(last, _)| last + 1);
        let slots = self.slots.last_key_value().map_or(0, |(last, _)| last + 1);
        let nothing = Endpoint::new(
            dataplane_common::Addr::UNSPECIFIED,
            dataplane_common::Port::ANY,
        );
        Contents {
            frontends: self.keys.iter().map(|(k, f)| (*k, *f)).collect(),
            pools: (0..pools)
                .map(|i| self.pools.get(&i).copied().unwrap_or_default())
                .collect(),
            endpoints: (0..slots)
                .map(|i| self.slots.get(&i).copied().unwrap_or(nothing))
                .collect(),
        }
    }

    /// That the planner knows what is in the tables.
    pub fn assert_mirrored_by(&self, planner: &Planner) {
        let keys: Vec<_> = self.keys.iter().map(|(k, f)| (*k, *f)).collect();
        assert_eq!(planner.frontends(), keys);
        // Nothing leaks.
        let pools: BTreeSet<_> = planner.pools().map(|(index, ..)| index).collect();
        assert_eq!(pools, self.live_pools());
        for (_, frontend) in keys {
            if frontend.kind() != Kind::NODE_ADDRESS {
                let (pool, endpoints) = planner.pool(frontend.pool()).expect("live");
                assert_eq!(pool, self.pools[&frontend.pool()]);
                assert_eq!(endpoints, self.resolve(frontend).endpoints);
            }
        }
    }
}
