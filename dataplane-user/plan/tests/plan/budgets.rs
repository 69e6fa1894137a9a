//! Tables without room for all services.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane_common::{
    Addr, Port,
    tables::{Block, FrontendKey, Kind},
};
use dataplane_plan::{Departures, LeftOut, Plan, Planner, Room, Write};
use model::{
    Endpoint, Place, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot,
    TrafficPolicy, Workload, WorkloadName,
};

use super::sim::Sim;

/// A service with a cluster IP and `ports` ports of `endpoints` endpoints each.
fn service(
    namespace: &str,
    name: &str,
    (created, vip): (i64, u32),
    ports: u16,
    endpoints: u32,
) -> Service {
    let endpoint =
        |n: u32| Endpoint::new(std::net::Ipv4Addr::from_bits(0x0af4_0000 + n).into(), 8080);
    let port = |port: u16| ServicePort {
        name: port.to_string().into(),
        endpoints: (0..endpoints).map(endpoint).collect(),
        ..ServicePort::new(port, Protocol::Tcp)
    };
    Service {
        created: Some(created),
        cluster_ips: [address(vip)].into_iter().collect(),
        ports: (1..=ports).map(port).collect(),
        ..Service::new(ServiceName::new(namespace, name), ServiceType::ClusterIp)
    }
}

fn address(vip: u32) -> std::net::IpAddr {
    std::net::Ipv4Addr::from_bits(0x0a60_0000 + vip).into()
}

fn key(vip: u32, port: u16) -> FrontendKey {
    let tcp = dataplane_common::Protocol::TCP;
    FrontendKey::new(Addr::from(address(vip)), Port::new(port), tcp)
}

/// Small tables, and their planner.
struct Small {
    planner: Planner,
    sim: Sim,
    room: Room,
    snapshot: Snapshot,
}

impl Small {
    fn new(room: Room) -> Self {
        Self {
            planner: Planner::new().with_room(room),
            sim: Sim::default(),
            room,
            snapshot: Snapshot::default(),
        }
    }

    fn set(&mut self, services: impl IntoIterator<Item = Service>) -> Plan {
        for service in services {
            let name = service.name.clone();
            self.snapshot.services.insert(name, Arc::new(service));
        }
        self.plan()
    }

    fn remove(&mut self, namespace: &str, name: &str) -> Plan {
        let name = ServiceName::new(namespace, name);
        self.snapshot.services.remove(&name);
        self.plan()
    }

    fn plan(&mut self) -> Plan {
        let plan = self.planner.plan(&self.snapshot);
        let demand = plan.demand;
        assert!(demand.frontends <= self.room.frontends, "{demand:?}");
        assert!(demand.endpoints <= self.room.endpoints, "{demand:?}");
        self.sim.apply(&plan, |_| {});
        if self.planner.wants_grace() {
            self.sim.grace();
            self.planner.grace_passed();
        }
        assert!(!self.planner.is_waiting());
        plan
    }

    /// Returns the number of endpoints of a port. `None` if no frontend exists, so packets are left alone.
    fn endpoints(&self, vip: u32, port: u16) -> Option<usize> {
        let frontend = self.sim.keys.get(&key(vip, port))?;
        Some(self.sim.resolve(*frontend).endpoints.len())
    }

    fn left_out(&self) -> Vec<(&str, LeftOut)> {
        let all = self.planner.left_out().iter();
        all.map(|(name, left)| (name.as_str(), *left)).collect()
    }

    fn problems(&self) -> Vec<String> {
        let served = self.planner.served();
        let all = served.problems();
        all.map(|(_, problem)| format!("{}: {}", problem.place, problem.text))
            .collect()
    }
}

const FEW_SLOTS: Room = Room {
    frontends: 100_000,
    pools: 100_000,
    endpoints: 20_000,
    sources: 100,
};

/// 4 300 ports of 1 000 endpoints each exceed a table of the default size. This test does the same on a smaller scale.
#[test]
fn a_service_that_fills_a_table_is_left_out_by_itself() {
    let mut small = Small::new(FEW_SLOTS);
    let shop = |n: u32| service("shop", &format!("s{n}"), (100, n), 1, 3);
    small.set((0..50).map(shop));
    assert!(small.left_out().is_empty());
    small.set([service("thief", "huge", (1, 1000), 430, 100)]);
    assert_eq!(small.left_out(), [("thief/huge", LeftOut::Endpoints)]);
    let [problem] = &small.problems()[..] else {
        panic!("{:?}", small.problems())
    };
    for word in [
        "service thief/huge",
        "55040 entries of table ENDPOINTS",
        "namespace thief",
        "limits.endpoints",
    ] {
        assert!(problem.contains(word), "{problem}");
    }
    // Connections to the large service are refused. Other services stay, and new ones are served.
    assert_eq!(small.endpoints(1000, 430), Some(0));
    small.set([service("shop", "new", (200, 51), 1, 5)]);
    assert_eq!(small.endpoints(51, 1), Some(5));
    assert!((0..50).all(|n| small.endpoints(n, 1) == Some(3)));
    // Without changes the result is stable, also over a restart.
    let plan = small.plan();
    assert!(plan.is_empty(), "{:?}", plan.writes);
    small.sim.grace();
    let adopted = Planner::adopt(small.sim.contents()).unwrap();
    small.planner = adopted.with_room(small.room);
    let plan = small.plan();
    assert!(plan.is_empty(), "{:?}", plan.writes);
    assert_eq!(small.left_out(), [("thief/huge", LeftOut::Endpoints)]);
    // When the service fits, it is served.
    small.set([service("thief", "huge", (1, 1000), 43, 100)]);
    assert_eq!(small.endpoints(1000, 43), Some(100));
    assert!(small.left_out().is_empty() && small.problems().is_empty());
}

#[test]
fn a_service_that_waits_for_room_says_that_an_endpoint_speaks_hbone() {
    let mut small = Small::new(FEW_SLOTS);
    small.snapshot.reachable = Some(Arc::default());
    let plan = |small: &mut Small| {
        let plan = small.planner.plan(&small.snapshot);
        small.sim.apply(&plan, |_| {});
        let web = small.sim.keys[&key(1, 1)];
        small.sim.resolve(web).inside().1 & Block::HBONE
    };
    // No grace period passes, so no slot is freed.
    for change in 0..20 {
        let mut web = service("shop", "web", (1, 1), 1, 4000);
        web.ports[0].endpoints[0].port += change;
        let name = web.name.clone();
        small.snapshot.services.insert(name, Arc::new(web));
        assert_eq!(plan(&mut small), 0);
        if small.planner.is_waiting() {
            break;
        }
    }
    assert!(small.planner.is_waiting());
    let name = WorkloadName::new("shop", "web-1");
    let pod = Workload {
        addresses: ["10.244.0.1".parse().unwrap()].into_iter().collect(),
        speaks_hbone: true,
        ..Workload::new(name.clone(), Place::Elsewhere)
    };
    small.snapshot.workloads.insert(name, Arc::new(pod));
    assert_eq!(plan(&mut small), Block::HBONE);
    assert!(small.planner.is_waiting());
}

#[test]
fn of_a_namespace_the_largest_lose_first_then_the_younger() {
    let mut small = Small::new(FEW_SLOTS);
    // 9375 slots: eight services of 1024 each. The oldest is the last by name.
    let middle = |n: u32| {
        let age = 100 - i64::from(n);
        service("hog", &format!("s{n:02}"), (age, n), 1, 1000)
    };
    small.set((0..12).map(middle));
    small.set([service("hog", "large", (1, 20), 1, 3000)]);
    small.set([service("hog", "tiny", (1000, 21), 1, 2)]);
    small.set([service("other", "one", (1000, 22), 1, 600)]);
    let left: Vec<_> = small.left_out().into_iter().map(|(name, _)| name).collect();
    let [large, younger @ ..] = &left[..] else {
        panic!("{left:?}")
    };
    assert_eq!(*large, "hog/large");
    // The 1024 slots of others stay theirs: the next step leaves seven eighths.
    assert_eq!(younger, ["hog/s00", "hog/s01", "hog/s02", "hog/s03"]);
    assert_eq!(small.endpoints(21, 1), Some(2));
    assert_eq!(small.endpoints(22, 1), Some(600));
    // A served service is removed: the oldest of the services that were left out takes its place.
    small.remove("hog", "s11");
    assert_eq!(small.endpoints(3, 1), Some(1000));
    assert_eq!(small.endpoints(2, 1), Some(0));
    // The youngest one is created anew as the oldest one, with the same needs.
    small.set([service("hog", "s00", (0, 0), 1, 1000)]);
    assert_eq!(
        [0, 2, 3].map(|vip| small.endpoints(vip, 1)),
        [1000, 0, 0].map(Some)
    );
}

#[test]
fn a_service_without_room_for_its_keys_keeps_others_from_its_address() {
    let room = Room {
        frontends: 100,
        ..FEW_SLOTS
    };
    let mut small = Small::new(room);
    small.set([service("hog", "wide", (1, 1), 60, 1)]);
    assert_eq!(small.left_out(), [("hog/wide", LeftOut::Whole)]);
    assert_eq!(small.endpoints(1, 1), None);
    assert!(small.problems()[0].contains("61 entries of table FRONTENDS"));
    let mut taker = service("thief", "taker", (1, 2), 1, 1);
    taker.external_ips = [address(1)].into_iter().collect();
    small.set([taker]);
    assert_eq!(small.endpoints(2, 1), Some(1));
    assert_eq!(small.endpoints(1, 1), None);
    assert_eq!(small.planner.served().conflict_count(), 1);
    // An address of the node stays the node's while no service is served there.
    small.snapshot.node = Arc::new(model::Node {
        addresses: vec![address(1)],
        ..model::Node::default()
    });
    small.plan();
    let own = FrontendKey::address(Addr::from(address(1)));
    assert_eq!(small.sim.keys[&own].kind(), Kind::NODE_ADDRESS);
    assert!(
        small
            .planner
            .service_keys(&ServiceName::new("hog", "wide"))
            .is_empty()
    );
    small.set([service("hog", "wide", (1, 1), 20, 1)]);
    assert_eq!(small.endpoints(1, 20), Some(1));
    assert_eq!(small.sim.keys[&own].kind(), Kind::CLUSTER_ADDRESS);
}

#[test]
fn pools_that_come_and_go_are_used_again() {
    let mut planner = Planner::new();
    let mut pools = 0;
    for turn in 0..5000 {
        // A service without endpoints retires only its pool.
        let mut web = service("shop", "web", (1, 1), 1, 0);
        if turn % 2 == 0 {
            web.external_policy = TrafficPolicy::Local;
        }
        let mut snapshot = Snapshot::default();
        snapshot.services.insert(web.name.clone(), Arc::new(web));
        pools = planner.plan(&snapshot).demand.pools;
        if planner.wants_grace() {
            planner.grace_passed();
        }
    }
    assert!(pools < 1100, "{pools}");
}

/// Each line has tables of which one is small, and the table that is named with its option.
#[test]
fn a_service_that_does_not_fit_names_the_table_that_it_needs_most() {
    let large = Room {
        sources: 100_000,
        ..FEW_SLOTS
    };
    for (room, wanted, option) in [
        (
            Room {
                frontends: 40,
                ..large
            },
            "31 entries of table FRONTENDS",
            true,
        ),
        (
            Room { pools: 60, ..large },
            "31 entries of table POOLS",
            true,
        ),
        (
            Room {
                sources: 100,
                ..large
            },
            "60 entries of table SOURCES",
            false,
        ),
        (
            Room {
                endpoints: 100,
                ..large
            },
            "120 entries of table ENDPOINTS",
            true,
        ),
    ] {
        let mut small = Small::new(room);
        let mut wide = service("hog", "wide", (1, 1), 30, 4);
        // The load balancer has no address, so its ranges count, but not its keys.
        let range = |n: u8| ipnet::IpNet::new([10, n, 0, 0].into(), 16).unwrap();
        wide.source_ranges = [1, 2].map(range).into_iter().collect();
        small.set([wide]);
        let [problem] = &small.problems()[..] else {
            panic!("{:?}", small.problems())
        };
        assert!(problem.contains(wanted), "{problem}");
        assert_eq!(problem.contains("or raise limits."), option, "{problem}");
    }
}

#[test]
fn large_tables_may_retire_an_eighth_of_their_pools() {
    let mut planner = Planner::new();
    let mut plan = |local: u32| {
        let web = |n: u32| {
            let mut web = service("shop", &n.to_string(), (1, n), 1, 0);
            if n < local {
                web.external_policy = TrafficPolicy::Local;
            }
            web
        };
        planner.plan(&of((0..5000).map(web)));
        planner.wants_room()
    };
    // Two pools of each service, and a third one for local endpoints.
    assert!(!plan(1800));
    assert!(!plan(400), "1400 pools of 11 801 are retired");
    assert!(plan(0));
}

/// Services with many ports keep their pools, as those with few do.
#[test]
fn a_service_with_many_ports_flips_the_pools_of_its_ports() {
    let mut small = Small::new(FEW_SLOTS);
    small.set([service("shop", "web", (1, 1), 20, 2)]);
    let pools = |small: &Small| -> Vec<u32> {
        (1..=22)
            .map(|port| small.sim.keys.get(&key(1, port)).map_or(0, |of| of.pool()))
            .collect()
    };
    let before = pools(&small);
    let mut changed = service("shop", "web", (1, 1), 22, 3);
    changed
        .ports
        .retain(|port| port.port != 7 && port.port != 20);
    let plan = small.set([changed]);
    small.sim.assert_mirrored_by(&small.planner);
    let after = pools(&small);
    for port in 1..=22 {
        let [before, after] = [before[port - 1], after[port - 1]];
        match port {
            7 | 20 => assert_eq!(after, 0),
            21.. => assert!(after > 21, "a new pool: {after}"),
            _ => assert_eq!(after, before),
        }
    }
    let flips = |is_fresh| {
        let is = |write: &&Write| matches!(write, Write::Pool { fresh, .. } if *fresh == is_fresh);
        plan.writes.iter().filter(is).count()
    };
    assert_eq!([flips(false), flips(true)], [18, 2]);
}

/// While one namespace exceeds its budget, a new service of another namespace costs only its own writes.
#[test]
fn a_change_costs_the_same_beside_a_namespace_that_is_over_its_budget() {
    let mut small = Small::new(FEW_SLOTS);
    let hog = |n: u32| service("hog", &format!("s{n}"), (100, n), 1, 60);
    small.set((0..1000).map(hog));
    small.set([service("shop", "db", (100, 4000), 1, 3)]);
    assert!(small.left_out().len() > 500);
    let plan = small.set([service("shop", "web", (1, 5000), 1, 3)]);
    // Two pools, a block and two keys.
    assert_eq!(plan.writes.len(), 5, "{:?}", plan.writes);
}

/// Returns the time to plan snapshots one after the other, and to find the departures.
fn time(snapshots: &[Snapshot]) -> Duration {
    let mut planner = Planner::new();
    let mut departures = Departures::new(&[dataplane_common::Protocol::TCP]);
    let start = Instant::now();
    for snapshot in snapshots {
        planner.plan(snapshot);
        departures.after(&planner);
    }
    start.elapsed()
}

/// Thirty times as many objects of one author cost about thirty times as much, and not a thousand times, as a
/// comparison of each with each would.
fn assert_linear(what: &str, snapshots: impl Fn(u16) -> Vec<Snapshot>) {
    // Another process may use the CPU for a while, but hardly in three runs.
    let mut seen = Vec::new();
    for _ in 0..3 {
        let few = time(&snapshots(1000)).max(Duration::from_millis(2));
        let many = time(&snapshots(30_000));
        if many < few * 200 {
            return;
        }
        seen.push((many, few));
    }
    panic!("{what}: how long it takes, and a thirtieth of it: {seen:?}");
}

fn of(services: impl IntoIterator<Item = Service>) -> Snapshot {
    let services = services.into_iter().map(|s| (s.name.clone(), Arc::new(s)));
    Snapshot {
        services: services.collect(),
        ..Snapshot::default()
    }
}

#[test]
fn all_ports_of_a_service_that_change_cost_what_each_costs() {
    assert_linear("ports", |ports| {
        let mut wide = service("shop", "wide", (1, 1), ports, 2);
        let before = of([wide.clone()]);
        for port in &mut wide.ports {
            port.endpoints.remove(0);
        }
        vec![before, of([wide])]
    });
}

#[test]
fn contested_addresses_cost_what_each_costs() {
    assert_linear("addresses", |addresses| {
        let all: Vec<_> = (0..addresses)
            .map(|n| address(100 + u32::from(n)))
            .collect();
        let [mut a, mut b] = ["a", "b"].map(|name| {
            let mut service = service("shop", name, (1, 1), 1, 1);
            service.external_ips = all.iter().copied().collect();
            service
        });
        b.created = Some(2);
        let both = of([a.clone(), b.clone()]);
        a.created = Some(3);
        vec![both, of([a.clone(), b.clone()]), of([a])]
    });
    assert_linear("claimants", |claimants| {
        let one = |n: u16| {
            let mut one = service("shop", &format!("s{n}"), (1, 1), 1, 1);
            one.created = Some(i64::from(n));
            one
        };
        let all = of((0..claimants).map(one));
        vec![all, of((0..claimants).skip(1).step_by(2).map(one)), of([])]
    });
}
