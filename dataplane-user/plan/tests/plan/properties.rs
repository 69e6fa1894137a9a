//! Properties that hold for any sequence of snapshots, and for an interruption at any write.

use std::collections::{BTreeMap, BTreeSet};

use dataplane_common::{
    Addr, Port, decide,
    tables::{Block, FrontendKey, Kind},
};
use dataplane_plan::{LeftOut, Planner, Room, Write};
use model::{Protocol, ServiceName, Snapshot};
use proptest::prelude::*;

use super::{
    clusters::{Change, apply, change},
    oracle::{self, Expected},
    sim::{Resolved, Sim},
};

/// The changes between two snapshots.
#[derive(Clone, Debug)]
struct Step {
    changes: Vec<Change>,
    grace: bool,
    /// Whether a new agent adopts the tables before this step. If so, whether it plans the old snapshot first.
    restart: Option<bool>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let restart = prop_oneof![4 => Just(None), 1 => Just(Some(true)), 1 => Just(Some(false))];
    let step = (
        prop::collection::vec(change(), 1..5),
        any::<bool>(),
        restart,
    )
        .prop_map(|(changes, grace, restart)| Step {
            changes,
            grace,
            restart,
        });
    prop::collection::vec(step, 1..8)
}

/// The affinity group of each service's port, by family.
type Groups = BTreeMap<(ServiceName, (u16, Protocol), bool), u32>;

/// Returns the affinity groups. Each port of a service has one per family, for all its keys, and shares it with no
/// other.
fn groups(sim: &Sim, expected: &BTreeMap<FrontendKey, Expected>) -> Groups {
    let mut groups = Groups::new();
    for (key, Expected { owner, .. }) in expected {
        if let Some((service, Some(port), _)) = owner {
            let group = sim.pools[&sim.keys[key].pool()].affinity_group;
            let id = (service.clone(), *port, key.addr.is_v4());
            assert_eq!(
                *groups.entry(id).or_insert(group),
                group,
                "{key:?} is in another group"
            );
        }
    }
    let distinct: BTreeSet<_> = groups.values().collect();
    assert_eq!(
        distinct.len(),
        groups.len(),
        "two ports share a group: {groups:?}"
    );
    groups
}

/// Returns the permitted answers of a key while the tables change from one snapshot to the next: its former answer, its
/// new answer, and, if it moves to another pool, the new answer of its former pool.
fn allowed(
    key: &FrontendKey,
    before: &BTreeMap<FrontendKey, Expected>,
    after: &BTreeMap<FrontendKey, Expected>,
    next: &Snapshot,
) -> Vec<Option<Resolved>> {
    let resolved =
        |tables: &BTreeMap<FrontendKey, Expected>| tables.get(key).map(|e| e.resolved.clone());
    let mut allowed = vec![resolved(before), resolved(after)];
    if let Some(Expected {
        owner: Some((name, Some(port), policy)),
        resolved,
    }) = before.get(key)
        && let Some(service) = next.services.get(name)
    {
        let v4 = key.addr.is_v4();
        allowed.extend(oracle::answer(service, *port, v4, resolved.kind, *policy).map(Some));
    }
    allowed
}

/// Returns whether the present answer of a key is permitted for each kind of client: it has the endpoints of one
/// permitted answer, all source ranges that every permitted answer has, and none that no permitted answer has.
fn is_between(now: Option<&Resolved>, allowed: &[Option<Resolved>]) -> bool {
    let Some(now) = now else {
        return allowed.contains(&None);
    };
    let allowed: Vec<_> = allowed.iter().flatten().collect();
    let all = allowed.iter().filter_map(|a| a.ranges.clone());
    let every_range = || all.clone().reduce(|a, b| &a & &b).unwrap_or_default();
    let ranges = match &now.ranges {
        None => allowed.iter().any(|a| a.ranges.is_none()),
        Some(ranges) => {
            let open = allowed.iter().any(|a| a.ranges.is_none());
            let known = all.clone().reduce(|a, b| &a | &b).unwrap_or_default();
            ranges.is_superset(&every_range()) && (open || ranges.is_subset(&known))
        }
    };
    ranges
        && allowed.iter().any(|a| a.inside() == now.inside())
        && allowed.iter().any(|a| a.outside() == now.outside())
}

/// A destination that is a cluster IP's port is never refused on its way in or out.
fn destination(sim: &Sim, key: &FrontendKey) -> Option<Resolved> {
    // No client connects to an address without a port: such a key stands for ports without an entry.
    let protocol = match key.protocol {
        dataplane_common::Protocol::ANY => dataplane_common::Protocol::TCP,
        of => of,
    };
    let frontend = decide::find_frontend(sim, key.addr, key.port, protocol, false);
    (!frontend.is_none()).then(|| sim.resolve(frontend))
}

fn run(steps: Vec<Step>) {
    let mut sim = Sim::default();
    let mut planner = Planner::new();
    let mut snapshot = Snapshot::default();
    let mut before = BTreeMap::new();
    let mut groups_before = Groups::new();
    for step in steps {
        if let Some(looks_at_old) = step.restart {
            sim.grace();
            planner = Planner::adopt(sim.contents()).expect("consistent tables");
            if looks_at_old {
                let plan = planner.plan(&snapshot);
                assert!(plan.is_empty(), "nothing changed, but: {:?}", plan.writes);
                sim.assert_mirrored_by(&planner);
            } else {
                groups_before.clear();
            }
        }
        for change in step.changes {
            apply(&mut snapshot, change);
        }
        let after = oracle::expected(&snapshot);
        let start = sim.clone();
        let shown = planner.served();
        let plan = planner.plan(&snapshot);
        for write in &plan.writes {
            if let Write::Pool {
                index, fresh: true, ..
            } = write
            {
                // Otherwise the connections of one service would be counted as another's.
                assert_eq!(shown.pool_owner(*index), None, "pool {index} is reused");
            }
        }
        let mut end = sim.clone();
        end.apply(&plan, |_| {});
        let keys: BTreeSet<_> = before.keys().chain(after.keys()).copied().collect();
        sim.apply(&plan, |sim| {
            for key in &keys {
                let allowed = allowed(key, &before, &after, &snapshot);
                let now = sim.keys.get(key).map(|frontend| sim.resolve(*frontend));
                assert!(
                    is_between(now.as_ref(), &allowed),
                    "{key:?} is {now:?}, not one of {allowed:?}"
                );
                // The same lookup through addresses without a port, except node ports.
                if key.addr != FrontendKey::node_port(true, Port::ANY, key.protocol).addr
                    && key.addr != Addr::UNSPECIFIED
                {
                    let now = destination(sim, key);
                    let ends = [destination(&start, key), destination(&end, key)];
                    let on_the_way = [&ends, &allowed[2..]].concat();
                    let is_node_port = now.as_ref().is_some_and(|r| r.kind == Kind::NODE_PORT);
                    assert!(
                        is_node_port || is_between(now.as_ref(), &on_the_way),
                        "destination {key:?} is {now:?}, not one of {ends:?}"
                    );
                }
            }
        });
        sim.assert_mirrored_by(&planner);

        let wanted: BTreeMap<_, _> = after
            .iter()
            .map(|(k, e)| (*k, e.resolved.clone()))
            .collect();
        assert_eq!(sim.resolved(), wanted);
        let mut alone = Sim::default();
        alone.apply(&Planner::new().plan(&snapshot), |_| {});
        assert_eq!(sim.resolved(), alone.resolved(), "the way here matters");
        assert!(planner.plan(&snapshot.clone()).is_empty());

        let groups = groups(&sim, &after);
        for (port, group) in &groups {
            assert_eq!(
                groups_before.get(port).unwrap_or(group),
                group,
                "{port:?}: group changed"
            );
        }
        for (key, Expected { owner, .. }) in &after {
            let known = planner.pool_owner(sim.keys[key].pool());
            let known = known.map(|o| (o.service.clone(), o.port));
            assert_eq!(
                known,
                owner.clone().map(|(service, port, _)| (service, port))
            );
        }
        for service in snapshot.services.keys() {
            let mine = |e: &Expected| e.owner.as_ref().is_some_and(|(owner, ..)| owner == service);
            let mine: BTreeSet<_> = after
                .iter()
                .filter(|(_, e)| mine(e))
                .map(|(k, _)| *k)
                .collect();
            let keys: BTreeSet<_> = planner
                .service_keys(service)
                .into_iter()
                .map(|(k, _)| k)
                .collect();
            assert_eq!(keys, mine);
        }
        if step.grace {
            sim.grace();
            planner.grace_passed();
        }
        before = after;
        groups_before = groups;
    }
}

/// Runs the steps in tables that are too small. No plan exceeds the tables, the services left out follow from the last
/// snapshot alone, and all others are as in tables with room for all.
fn run_within(room: Room, steps: Vec<Step>) {
    let mut sim = Sim::default();
    let mut planner = Planner::new().with_room(room);
    let mut snapshot = Snapshot::default();
    for step in steps {
        if step.restart.is_some() {
            sim.grace();
            let adopted = Planner::adopt(sim.contents()).expect("consistent tables");
            planner = adopted.with_room(room);
        }
        for change in step.changes {
            apply(&mut snapshot, change);
        }
        reconcile_within(room, &mut planner, &mut sim, &snapshot);
        let mut alone = (Planner::new().with_room(room), Sim::default());
        reconcile_within(room, &mut alone.0, &mut alone.1, &snapshot);
        assert_eq!(planner.left_out(), alone.0.left_out());
        assert!(!alone.0.is_waiting(), "half of the tables is free");
        for (key, Expected { resolved, owner }) in oracle::expected(&snapshot) {
            let now = sim.keys.get(&key).map(|frontend| sim.resolve(*frontend));
            let left = owner.and_then(|(owner, ..)| planner.left_out().get(&owner).copied());
            match left {
                // Scattered slots may leave a service in its former state.
                None if planner.is_waiting() => {}
                None => assert_eq!(now, Some(resolved), "{key:?}"),
                Some(LeftOut::Endpoints) => {
                    let empty = now.is_some_and(|now| now.endpoints.is_empty());
                    assert!(empty || planner.is_waiting(), "{key:?}");
                }
                Some(LeftOut::Whole) => {
                    assert!(
                        now.is_none_or(|now| now.kind == Kind::NODE_ADDRESS),
                        "{key:?}"
                    );
                }
            }
        }
        let served = planner.served();
        let problems: BTreeSet<_> = served.problems().map(|(name, _)| name).collect();
        assert!(
            planner
                .left_out()
                .keys()
                .all(|name| problems.contains(name))
        );
    }
}

pub fn reconcile_within(room: Room, planner: &mut Planner, sim: &mut Sim, snapshot: &Snapshot) {
    for _ in 0..3 {
        let plan = planner.plan(snapshot);
        let demand = plan.demand;
        assert!(demand.frontends <= room.frontends, "{demand:?}");
        assert!(demand.pools <= room.pools + 1, "{demand:?}");
        assert!(demand.endpoints <= room.endpoints, "{demand:?}");
        assert!(demand.sources <= room.sources, "{demand:?}");
        sim.apply(&plan, |_| {});
        sim.assert_mirrored_by(planner);
        if planner.wants_grace() {
            sim.grace();
            planner.grace_passed();
        }
        if !planner.is_waiting() {
            return;
        }
    }
}

proptest! {
    /// A full table leaves out the services that do not fit, independent of history, and no others.
    #[test]
    fn a_full_table_leaves_out_what_does_not_fit_and_nothing_else(
        steps in steps(),
        room in (12u32..90, 12u32..60, 4u32..120, 0u32..40),
    ) {
        let (frontends, pools, endpoints, sources) = room;
        run_within(Room { frontends, pools, endpoints, sources }, steps);
    }

    /// Any sequence of snapshots ends in the tables of the last snapshot. After every single write every service is
    /// whole, also over restarts of the agent.
    #[test]
    fn every_service_is_whole_at_any_moment(steps in steps()) {
        run(steps);
    }

    /// The binary search of the programs finds exactly the listed endpoints.
    #[test]
    fn contains_agrees_with_a_naive_search(
        ports in prop::collection::btree_set(1u16..2000, 0..700),
        base in 0u32..10,
        probe in 1u16..2000,
    ) {
        let mut sim = Sim::default();
        let endpoint = |port| {
            // Port and address matter, including all words of the address and their highest bits.
            let [high, low] = [(port % 3) as u8, (port % 7) as u8].map(|n| n.wrapping_mul(0x70));
            let addr = if port % 2 == 0 {
                Addr::from_v4([high, 0, 0, low])
            } else {
                Addr::from_v6([high, 0, 0, 0, 0, low, 0, 0, low, 0, 0, high, 0, 0, 0, low])
            };
            dataplane_common::tables::Endpoint::new(addr, Port::new(port))
        };
        let mut endpoints: Vec<_> = ports.iter().map(|p| endpoint(*p)).collect();
        endpoints.sort_by(decide::order);
        sim.slots.extend((base..).zip(endpoints.iter().copied()));
        let block = Block::new(base, endpoints.len().try_into().unwrap(), 0);
        prop_assert_eq!(decide::contains(&sim, block, &endpoint(probe)), ports.contains(&probe));
        for endpoint in &endpoints {
            prop_assert!(decide::contains(&sim, block, endpoint));
        }
    }

    /// A draw returns a slot of the block, and all slots equally often.
    #[test]
    fn draw_is_uniform_and_in_range(base in any::<u16>(), len in 1u16..200) {
        let block = Block::new(base.into(), len, Block::NO_LOCAL);
        let mut drawn = vec![0u32; len.into()];
        let rounds = 1000 * u32::from(len);
        for i in 0..rounds {
            // Takes values from the whole range of 32 bits, equally spaced.
            let random = ((u64::from(i) << 32) / u64::from(rounds)).try_into().unwrap();
            let slot = decide::draw(block, random) - block.base();
            drawn[slot as usize] += 1;
        }
        prop_assert!(drawn.iter().all(|n| (999..=1001).contains(n)), "{:?}", drawn);
        prop_assert_eq!(decide::draw(block, u32::MAX), block.base() + u32::from(len) - 1);
    }
}
