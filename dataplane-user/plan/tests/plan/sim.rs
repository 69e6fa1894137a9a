//! A simulated kernel that executes plans and rejects writes that would harm a real one.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::{
    Addr, VipPlace, VipWords,
    decide::{self, Tables},
    packet::SourceKey,
    tables::{Block, Endpoint, Frontend, FrontendKey, Kind, Pool},
};
use dataplane_plan::{Contents, Plan, Planner, Write};

use super::live::{Live, slots};

/// The answer of a key, with all properties that a client can notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    pub kind: Kind,
    pub flags: u16,
    pub affinity_seconds: u32,
    pub endpoints: Vec<Endpoint>,
    /// Flags and endpoints for clients from outside of the cluster, if they differ.
    pub external: Option<(u16, Vec<Endpoint>)>,
    /// The networks of permitted clients: prefix length and address. `None`: all clients.
    pub ranges: Option<BTreeSet<(u32, Addr)>>,
}

impl Resolved {
    /// Returns the answer for clients of the cluster.
    pub fn inside(&self) -> (Kind, u16, u32, &[Endpoint]) {
        (
            self.kind,
            self.flags,
            self.affinity_seconds,
            &self.endpoints,
        )
    }

    /// Returns the answer for clients from outside.
    pub fn outside(&self) -> (Kind, u16, &[Endpoint]) {
        match &self.external {
            Some((flags, endpoints)) => (self.kind, *flags, endpoints),
            None => (self.kind, self.flags, &self.endpoints),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Sim {
    pub keys: BTreeMap<FrontendKey, Frontend>,
    pub pools: BTreeMap<u32, Pool>,
    pub slots: BTreeMap<u32, Endpoint>,
    pub sources: BTreeSet<SourceKey>,
    /// Slots that must not be written before a grace period.
    retired_slots: BTreeSet<u32>,
    retired_pools: BTreeSet<u32>,
    live: Live,
}

impl Tables for Sim {
    fn vips(&self, index: u32) -> VipWords {
        let mut words = VipWords::default();
        for (key, frontend) in &self.keys {
            let place = VipPlace::of(key.addr);
            if place.index() == index {
                words.set(place.bit(frontend.kind()));
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

impl Sim {
    /// Resolves a frontend as the programs do. Panics on a dangling reference.
    pub fn resolve(&self, frontend: Frontend) -> Resolved {
        if frontend.kind() == Kind::NODE_ADDRESS {
            assert_eq!(frontend.pool(), 0);
            return Resolved {
                kind: frontend.kind(),
                flags: 0,
                affinity_seconds: 0,
                endpoints: vec![],
                external: None,
                ranges: None,
            };
        }
        assert_ne!(frontend.pool(), 0);
        let kind = frontend.kind();
        let pool = self
            .pool(frontend.pool())
            .expect("a pool that was never written");
        // The packet path reads the pool for outside by the kind of frontend.
        let from_outside = [Kind::NODE_PORT, Kind::EXTERNAL_IP, Kind::LOAD_BALANCER];
        let external = (pool.external != 0 && from_outside.contains(&kind)).then(|| {
            let external = self.pool(pool.external).expect("a pool never written");
            assert_eq!(external.affinity_group, pool.affinity_group);
            (external.block.flags(), self.endpoints(external.block))
        });
        let ranges = (pool.ranged != 0 && kind == Kind::LOAD_BALANCER).then(|| {
            let set = self.sources.iter().filter(|key| key.set == frontend.pool());
            set.map(|key| (key.prefix - SourceKey::SET_BITS, key.addr))
                .collect()
        });
        Resolved {
            kind,
            flags: pool.block.flags(),
            affinity_seconds: pool.affinity_seconds,
            endpoints: self.endpoints(pool.block),
            external,
            ranges,
        }
    }

    fn endpoints(&self, block: Block) -> Vec<Endpoint> {
        let endpoints: Vec<_> = slots(block)
            .map(|slot| self.endpoint(slot).expect("a slot never written"))
            .collect();
        assert!(
            endpoints.is_sorted_by(|a, b| decide::order(a, b).is_le()),
            "{endpoints:?}"
        );
        for endpoint in &endpoints {
            assert!(decide::contains(self, block, endpoint));
        }
        endpoints
    }

    /// Returns the answer of every key.
    pub fn resolved(&self) -> BTreeMap<FrontendKey, Resolved> {
        self.keys
            .iter()
            .map(|(key, frontend)| (*key, self.resolve(*frontend)))
            .collect()
    }

    /// Returns the pools that keys refer to, their affinity groups, and those for clients from outside.
    fn live_pools(&self) -> BTreeSet<u32> {
        let referred: BTreeSet<_> = self.keys.values().map(|f| f.pool()).collect();
        let of = |p: &u32| {
            let pool = self.pools.get(p).copied().unwrap_or_default();
            [*p, pool.affinity_group, pool.external]
        };
        let live = referred.iter().flat_map(of).filter(|p| *p != 0);
        live.collect()
    }

    fn live_slots(&self) -> BTreeSet<u32> {
        self.live_pools()
            .iter()
            .flat_map(|p| slots(self.pools[p].block))
            .collect()
    }

    /// Executes the plan. After each write, checks that every changed key resolves to a whole service, and calls
    /// `after_each`.
    pub fn apply(&mut self, plan: &Plan, mut after_each: impl FnMut(&Self)) {
        let live_before = self.live.pools();
        let mut flipped = BTreeSet::new();
        let demand = plan.demand;
        for write in &plan.writes {
            match write {
                Write::Endpoints { base, endpoints } => {
                    assert!(!endpoints.is_empty());
                    for (slot, endpoint) in (*base..).zip(endpoints) {
                        assert!(slot < demand.endpoints, "slot {slot} beyond {demand:?}");
                        assert!(!self.live.has_slot(slot), "slot {slot} is in use");
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
                    self.live.before_write(*index, &self.pools);
                    let before = self.pools.insert(*index, *pool);
                    self.live.after_write(*index, &self.pools);
                    if let Some(before) = before.filter(|_| !fresh)
                        && before.block.base() != pool.block.base()
                    {
                        self.retired_slots.extend(slots(before.block));
                    }
                    for key in self.live.keys_of(*index) {
                        self.resolve(self.keys[key]);
                    }
                }
                Write::Insert { key, frontend } => {
                    assert!(
                        self.keys.insert(*key, *frontend).is_none(),
                        "{key:?} is there"
                    );
                    assert!(self.keys.len() <= demand.frontends as usize, "{demand:?}");
                    self.live.add(*key, frontend.pool(), &self.pools);
                    self.resolve(*frontend);
                }
                Write::Replace { key, frontend } => {
                    let before = self.keys.insert(*key, *frontend);
                    assert!(
                        before.is_some_and(|before| before != *frontend),
                        "{key:?}: {before:?}"
                    );
                    let before = before.expect("was just seen").pool();
                    self.live.remove(key, before, &self.pools);
                    self.live.add(*key, frontend.pool(), &self.pools);
                    self.resolve(*frontend);
                }
                Write::AddSource { key } => {
                    assert!(self.sources.insert(*key), "{key:?} is there");
                    assert!(self.sources.len() <= demand.sources as usize, "{demand:?}");
                }
                Write::RemoveSource { key } => {
                    assert!(self.sources.remove(key), "{key:?} is not there");
                }
                Write::Remove { key, frontend } => {
                    assert_eq!(self.keys.remove(key), Some(*frontend), "{key:?}");
                    self.live.remove(key, frontend.pool(), &self.pools);
                }
            }
            after_each(self);
        }
        // The state that was updated write by write equals the state of the whole tables.
        let live = self.live_pools();
        assert_eq!(self.live.pools(), live);
        assert_eq!(self.live.slots(), self.live_slots());
        let groups = live.iter().filter(|p| {
            let pool = &self.pools[p];
            pool.affinity_group == **p && pool.affinity_seconds != 0
        });
        assert_eq!(
            demand.affinity_groups as usize,
            groups.count(),
            "affinity groups"
        );
        for SourceKey { set, .. } in &self.sources {
            assert!(live.contains(set), "ranges of no pool");
            assert_eq!(self.pools[set].ranged, 1, "ranges that nobody looks at");
        }
        for index in live_before.difference(&live) {
            self.retired_pools.insert(*index);
            self.retired_slots.extend(slots(self.pools[index].block));
        }
    }

    pub fn grace(&mut self) {
        self.retired_pools.clear();
        self.retired_slots.clear();
    }

    /// Returns the tables as an agent reads them.
    pub fn contents(&self) -> Contents {
        let pools = self.pools.last_key_value().map_or(0, |(last, _)| last + 1);
        let slots = self.slots.last_key_value().map_or(0, |(last, _)| last + 1);
        let nothing = Endpoint::new(Addr::UNSPECIFIED, dataplane_common::Port::ANY);
        Contents {
            frontends: self.keys.iter().map(|(k, f)| (*k, *f)).collect(),
            pools: (0..pools)
                .map(|i| self.pools.get(&i).copied().unwrap_or_default())
                .collect(),
            endpoints: (0..slots)
                .map(|i| self.slots.get(&i).copied().unwrap_or(nothing))
                .collect(),
            sources: self.sources.iter().copied().collect(),
        }
    }

    /// Asserts that the planner's mirror equals the tables.
    pub fn assert_mirrored_by(&self, planner: &Planner) {
        let keys: Vec<_> = self.keys.iter().map(|(k, f)| (*k, *f)).collect();
        assert_eq!(planner.frontends(), keys);
        // No pool or slot leaks.
        let served = planner.served();
        let pools: BTreeSet<_> = served.pools_after(0).map(|(index, _)| index).collect();
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
