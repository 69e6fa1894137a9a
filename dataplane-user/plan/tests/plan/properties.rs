//! Properties that hold for any sequence of snapshots, and for an interruption at any write.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use dataplane_common::{
    Addr, Port, decide,
    tables::{Block, FrontendKey, Kind},
};
use dataplane_plan::{LeftOut, Planner, Room, Write};
use model::{
    Endpoint, Hints, Node, Protocol, Records, Service, ServiceName, ServicePort, ServiceType,
    Snapshot, TrafficPolicy,
};
use proptest::prelude::*;

use super::{
    oracle::{self, Expected},
    sim::{Resolved, Sim},
};

/// A change to the cluster.
#[derive(Clone, Debug)]
pub enum Change {
    Set(usize, Box<Service>),
    Remove(usize),
    Endpoints(usize, Vec<Endpoint>),
    InternalPolicy(usize, TrafficPolicy),
    ExternalPolicy(usize, TrafficPolicy),
    Ranges(usize, Vec<&'static str>),
    Affinity(usize, Option<Duration>),
    Created(usize, Option<i64>),
    NodeAddresses(Vec<IpAddr>),
}

/// The changes between two snapshots.
#[derive(Clone, Debug)]
struct Step {
    changes: Vec<Change>,
    grace: bool,
    /// Whether a new agent adopts the tables before this step. If so, whether it plans the old snapshot first.
    restart: Option<bool>,
}

const NAMES: usize = 5;

fn name(index: usize) -> ServiceName {
    ServiceName::new(["test", "other"][index % 2], &format!("s{index}"))
}

pub fn ips(all: &'static [&'static str], most: usize) -> impl Strategy<Value = Vec<IpAddr>> {
    let most = most.min(all.len());
    prop::sample::subsequence(all, 0..=most)
        .prop_map(|ips| ips.into_iter().map(|ip| ip.parse().unwrap()).collect())
}

pub fn endpoints() -> impl Strategy<Value = Vec<Endpoint>> {
    let addr = prop::sample::select(vec![
        "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.1.0.9", "fd00::1", "fd00::2",
    ]);
    let conditions = prop_oneof![
        5 => Just((true, true, false)),
        1 => Just((false, true, true)),
        1 => Just((false, false, true)),
        1 => Just((false, false, false)),
    ];
    let endpoint = (addr, 80u16..83, any::<bool>(), conditions, hints()).prop_map(
        |(addr, port, local, (ready, serving, terminating), hints)| Endpoint {
            addr: addr.parse().unwrap(),
            port,
            local,
            ready,
            serving,
            terminating,
            hints,
        },
    );
    prop::collection::vec(endpoint, 0..7).prop_map(|mut endpoints| {
        endpoints.sort_by_key(|e| (e.addr, e.port));
        endpoints.dedup_by_key(|e| (e.addr, e.port));
        endpoints
    })
}

/// Hints as a node `here` in the zone `near` sees them.
fn hints() -> impl Strategy<Value = Hints> {
    let node = Node {
        name: "here".into(),
        zone: "near".into(),
        ..Node::default()
    };
    let names = |here: &'static str| {
        prop_oneof![
            1 => Just(vec![]),
            2 => Just(vec![here]),
            2 => Just(vec!["other"]),
            1 => Just(vec!["other", here]),
        ]
    };
    (names("near"), names("here")).prop_map(move |(zones, nodes)| Hints::new(&node, zones, nodes))
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)]
}

fn affinity() -> impl Strategy<Value = Option<Duration>> {
    prop::option::of((1u64..4).prop_map(Duration::from_secs))
}

fn ranges() -> impl Strategy<Value = Vec<&'static str>> {
    let all = vec![
        "10.0.0.0/8",
        "10.9.0.0/16",
        "192.0.2.7/32",
        "fd00::/8",
        "0.0.0.0/0",
    ];
    prop_oneof![
        1 => Just(vec![]),
        2 => prop::sample::subsequence(all, 0..=3),
    ]
}

fn created() -> impl Strategy<Value = Option<i64>> {
    prop::option::of(0i64..3)
}

pub fn service() -> impl Strategy<Value = Service> {
    let port = (
        prop::sample::select(vec![80u16, 443]),
        prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)],
        prop::option::of(prop::sample::select(vec![30080u16, 30081])),
        endpoints(),
    )
        .prop_map(|(port, protocol, node_port, endpoints)| ServicePort {
            node_port,
            endpoints,
            ..ServicePort::new(port, protocol)
        });
    let kind = prop_oneof![
        4 => Just(ServiceType::LoadBalancer),
        1 => Just(ServiceType::ClusterIp),
        1 => Just(ServiceType::ExternalName),
    ];
    let addresses = (
        // 192.0.2.1 is also an external IP and an address of the node.
        ips(
            &[
                "10.96.0.1",
                "10.96.0.2",
                "10.96.0.3",
                "192.0.2.1",
                "fd96::1",
                "fd96::2",
            ],
            2,
        ),
        ips(&["192.0.2.1", "192.0.2.2", "fd02::1", "10.96.0.1"], 2),
        ips(&["203.0.113.1", "192.0.2.2", "fd03::1"], 2),
        ranges(),
    );
    (
        kind,
        created(),
        addresses,
        affinity(),
        policy(),
        policy(),
        prop::collection::vec(port, 1..3),
    )
        .prop_map(
            |(kind, created, addresses, affinity, internal_policy, external_policy, ports)| {
                let (cluster_ips, external_ips, load_balancer_ips, ranges) = addresses;
                let mut ports = ports;
                ports.sort_by_key(|p| (p.port, p.protocol));
                ports.dedup_by_key(|p| (p.port, p.protocol));
                Service {
                    name: name(0),
                    kind,
                    created,
                    cluster_ips: cluster_ips.into(),
                    external_ips: external_ips.into(),
                    load_balancer_ips: load_balancer_ips.into(),
                    source_ranges: ranges.iter().map(|r| r.parse().unwrap()).collect(),
                    affinity,
                    internal_policy,
                    external_policy,
                    health_check_node_port: None,
                    aside: Vec::new(),
                    records: Records::ClusterIps,
                    ports: ports.into(),
                }
            },
        )
}

pub fn change() -> impl Strategy<Value = Change> {
    let which = 0..NAMES;
    prop_oneof![
        4 => (which.clone(), service()).prop_map(|(i, mut s)| {
            s.name = name(i);
            Change::Set(i, Box::new(s))
        }),
        1 => which.clone().prop_map(Change::Remove),
        3 => (which.clone(), endpoints()).prop_map(|(i, e)| Change::Endpoints(i, e)),
        1 => (which.clone(), policy()).prop_map(|(i, p)| Change::InternalPolicy(i, p)),
        1 => (which.clone(), policy()).prop_map(|(i, p)| Change::ExternalPolicy(i, p)),
        1 => (which.clone(), ranges()).prop_map(|(i, r)| Change::Ranges(i, r)),
        1 => (which.clone(), affinity()).prop_map(|(i, a)| Change::Affinity(i, a)),
        1 => (which, created()).prop_map(|(i, c)| Change::Created(i, c)),
        1 => ips(&["192.0.2.1", "192.0.2.9", "10.96.0.3", "fd02::1"], 4).prop_map(Change::NodeAddresses),
    ]
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

pub fn apply(snapshot: &mut Snapshot, change: Change) {
    let edit = |snapshot: &mut Snapshot, i, edit: &dyn Fn(&mut Service)| {
        if let Some(service) = snapshot.services.get_mut(&name(i)) {
            edit(Arc::make_mut(service));
        }
    };
    match change {
        Change::Set(i, service) => {
            snapshot.services.insert(name(i), Arc::new(*service));
        }
        Change::Remove(i) => {
            snapshot.services.remove(&name(i));
        }
        Change::Endpoints(i, endpoints) => {
            edit(snapshot, i, &|s| {
                s.ports[0].endpoints.clone_from(&endpoints);
            });
        }
        Change::InternalPolicy(i, policy) => edit(snapshot, i, &|s| s.internal_policy = policy),
        Change::ExternalPolicy(i, policy) => edit(snapshot, i, &|s| s.external_policy = policy),
        Change::Ranges(i, ranges) => edit(snapshot, i, &|s| {
            s.source_ranges = ranges.iter().map(|r| r.parse().unwrap()).collect();
        }),
        Change::Affinity(i, affinity) => edit(snapshot, i, &|s| s.affinity = affinity),
        Change::Created(i, created) => edit(snapshot, i, &|s| s.created = created),
        Change::NodeAddresses(addresses) => {
            snapshot.node = Arc::new(Node {
                name: "here".into(),
                addresses,
                ..Node::default()
            });
        }
    }
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
