//! Whatever a tenant does with its own objects, the tables have of every other tenant what they would have without it,
//! but for the claims that it wins by rule.

use std::sync::Arc;

use dataplane::{
    model::{Endpoint, Hints, Protocol, Service, ServiceName, ServicePort, Snapshot},
    plan::{Planner, Room},
};
use dataplane_common::tables::FrontendKey;
use proptest::prelude::*;

use super::{
    oracle,
    properties::{Change, apply, change, service, settle_within},
    sim::Sim,
};

const HOSTILE: &str = "evil";

/// So much that each of the three namespaces has room for the most that the two of the others ever want.
const ROOM: Room = Room {
    frontends: 600,
    pools: 400,
    endpoints: 1200,
    sources: 200,
};

/// What happens at a time.
#[derive(Clone, Debug)]
struct Step {
    others: Vec<Change>,
    hostile: Vec<(usize, Option<Service>)>,
    grace: bool,
    restart: bool,
}

/// Everything that an author can write, too much of it, and older than all.
fn hostile() -> impl Strategy<Value = Service> {
    let ports = prop_oneof![3 => Just(0u16), 2 => 1u16..5, 2 => 5u16..400];
    let endpoints = prop_oneof![2 => 0u32..5, 2 => 5u32..300];
    let ranges = prop_oneof![3 => Just(0u8), 1 => 1u8..200];
    let created = prop_oneof![2 => Just(Some(-1)), 1 => Just(None), 1 => Just(Some(1))];
    (service(), ports, endpoints, ranges, created).prop_map(
        |(mut service, ports, endpoints, ranges, created)| {
            service.created = created;
            let endpoint = |n: u32| Endpoint {
                addr: std::net::Ipv4Addr::from_bits(0x0a09_0000 + n).into(),
                port: 80,
                local: n.is_multiple_of(2),
                ready: true,
                serving: true,
                terminating: false,
                hints: Hints::default(),
            };
            let port = |port: u16| ServicePort {
                name: port.to_string().into(),
                port,
                protocol: Protocol::Tcp,
                node_port: port.is_multiple_of(3).then_some(30_000 + port),
                endpoints: (0..endpoints).map(endpoint).collect(),
                weights: None,
            };
            service.ports.extend((1000..1000 + ports).map(port));
            let range = |n: u8| format!("198.51.100.{n}/32").parse().unwrap();
            service.source_ranges.extend((0..ranges).map(range));
            service
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (
        prop::collection::vec(change(), 0..4),
        prop::collection::vec((0..4usize, prop::option::weighted(0.8, hostile())), 0..4),
        any::<bool>(),
        prop::bool::weighted(0.2),
    );
    let step = step.prop_map(|(others, hostile, grace, restart)| Step {
        others,
        hostile,
        grace,
        restart,
    });
    prop::collection::vec(step, 1..7)
}

/// A node: its planner, its tables, and what they are to hold.
struct Node {
    planner: Planner,
    sim: Sim,
    snapshot: Snapshot,
}

impl Node {
    fn new() -> Self {
        Self {
            planner: Planner::new().with_room(ROOM),
            sim: Sim::default(),
            snapshot: Snapshot::default(),
        }
    }

    fn settle(&mut self, step: &Step) {
        if step.restart {
            self.sim.grace();
            let adopted = Planner::adopt(self.sim.contents()).expect("consistent tables");
            self.planner = adopted.with_room(ROOM);
        }
        settle_within(ROOM, &mut self.planner, &mut self.sim, &self.snapshot);
        if step.grace {
            self.sim.grace();
            self.planner.grace_passed();
        }
    }
}

fn run(steps: Vec<Step>) {
    let (mut alone, mut beside) = (Node::new(), Node::new());
    for step in steps {
        for change in &step.others {
            apply(&mut alone.snapshot, change.clone());
            apply(&mut beside.snapshot, change.clone());
        }
        for (index, service) in &step.hostile {
            let name = ServiceName::new(HOSTILE, &format!("e{index}"));
            match service {
                Some(service) => {
                    let mut service = service.clone();
                    service.name = name.clone();
                    beside.snapshot.services.insert(name, Arc::new(service));
                }
                None => _ = beside.snapshot.services.remove(&name),
            }
        }
        alone.settle(&step);
        beside.settle(&step);
        assert!(alone.planner.left_out().is_empty(), "there is room for all");
        let claimed = oracle::expected(&beside.snapshot);
        let is_hostile = |key: &FrontendKey| {
            let owner = claimed
                .get(key)
                .and_then(|e: &oracle::Expected| e.owner.as_ref());
            owner.is_some_and(|(owner, ..)| owner.namespace() == HOSTILE)
        };
        let of_others = |node: &Node| {
            let mut resolved = node.sim.resolved();
            resolved.retain(|key, _| !is_hostile(key));
            resolved
        };
        assert_eq!(of_others(&beside), of_others(&alone));
        for (name, left) in beside.planner.left_out() {
            assert_eq!(name.namespace(), HOSTILE, "{left:?}");
        }
    }
}

/// How many runs: as many as `DATAPLANE_TENANT_RUNS` says.
fn runs() -> u32 {
    let given = std::env::var("DATAPLANE_TENANT_RUNS");
    given.map_or(2000, |given| {
        given.parse().expect("DATAPLANE_TENANT_RUNS: a number")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(runs()))]

    #[test]
    fn a_tenant_changes_nothing_of_others(steps in steps()) {
        run(steps);
    }
}
