//! The contents of the tables: their sizes, their order, tables of other agents, and departures.

use super::*;

#[test]
fn writes_are_few() {
    let mut a = service("a", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2"]);
    a.ports[0].node_port = Some(30080);
    let mut node = Node1::new([a.clone()]);
    // Endpoints change: a new block and one flip, for the cluster IP and the node port.
    a.ports[0].endpoints[1] = endpoint("10.0.0.3");
    let plan = node.plan(&snapshot([a.clone()]));
    assert!(
        matches!(
            plan.writes[..],
            [Write::Endpoints { .. }, Write::Pool { fresh: false, .. }]
        ),
        "{:?}",
        plan.writes
    );
    // Affinity changes: no new block.
    let before = node.sim.pools.clone();
    a.affinity = Some(Duration::from_hours(3));
    let plan = node.plan(&snapshot([a.clone()]));
    let [
        Write::Pool {
            index,
            pool,
            fresh: false,
        },
    ] = plan.writes[..]
    else {
        panic!("{:?}", plan.writes);
    };
    assert_eq!(pool.block, before[&index].block);
    assert_eq!(pool.affinity_seconds, 10_800);
    // A change that no client notices: no write.
    a.created = Some(3);
    a.ports[0].endpoints.push(endpoint("10.0.0.9 unready"));
    assert_eq!(node.plan(&snapshot([a.clone()])).writes, []);
    // Clients from outside get the endpoints of this node: first their pool is written, then the pool that refers to
    // it.
    a.external_policy = TrafficPolicy::Local;
    let plan = node.plan(&snapshot([a.clone()]));
    assert!(
        matches!(
            plan.writes[..],
            [
                Write::Pool { fresh: true, .. },
                Write::Pool { fresh: false, .. }
            ]
        ),
        "{:?}",
        plan.writes
    );
    a.external_policy = TrafficPolicy::Cluster;
    node.plan(&snapshot([a.clone()]));
    // The last endpoint is removed: one flip.
    a.ports[0].endpoints.clear();
    let plan = node.plan(&snapshot([a]));
    assert!(
        matches!(plan.writes[..], [Write::Pool { .. }]),
        "{:?}",
        plan.writes
    );
}

#[test]
fn affinity_is_at_least_a_second_and_at_most_a_day() {
    for (timeout, seconds) in [
        (Duration::from_millis(1), 1),
        (Duration::from_secs(100_000), 86_400),
    ] {
        let mut a = service("a", &["10.96.0.1"], &[]);
        a.affinity = Some(timeout);
        let node = Node1::new([a]);
        let pool = node.sim.keys[&vip("10.96.0.1", 80)].pool();
        assert_eq!(node.sim.pools[&pool].affinity_seconds, seconds);
    }
}

#[test]
fn a_pool_has_so_many_endpoints_and_no_more() {
    let mut a = service("a", &["10.96.0.1"], &[]);
    let endpoints = |count: u32| {
        let addr = |i| std::net::Ipv4Addr::from_bits(0x0a00_0000 + i).into();
        (0..count)
            .map(|i| Endpoint {
                addr: addr(i),
                ..endpoint("10.0.0.1")
            })
            .collect::<Vec<_>>()
    };
    for (count, problems) in [(65_535, 0), (65_536, 1), (3, 0)] {
        a.ports[0].endpoints = endpoints(count);
        let mut planner = Planner::new();
        planner.plan(&snapshot([a.clone()]));
        let pool = planner.frontend(&vip("10.96.0.1", 80)).unwrap().pool();
        let (_, found) = planner.pool(pool).unwrap();
        assert_eq!(found.len(), (count as usize).min(Block::MAX_LEN));
        assert_eq!(found[0].addr, addr("10.0.0.0"), "the first are kept");
        assert_eq!(planner.served().problems().count(), problems);
    }
}

#[test]
fn thousand_flips_a_second_want_a_grace_every_few_hundred() {
    let mut a = service("a", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
    let mut node = Node1::new([a.clone()]);
    assert!(!node.planner.wants_grace(), "nothing was retired");
    let mut graces = 0;
    for i in 0..1000u16 {
        a.ports[0].endpoints[0].port = 1000 + i;
        node.plan(&snapshot([a.clone()]));
        if node.planner.wants_grace() {
            graces += 1;
            node.sim.grace();
            node.planner.grace_passed();
            assert!(!node.planner.wants_grace());
        }
    }
    assert_eq!(graces, 3);
    let highest = *node.sim.slots.last_key_value().unwrap().0;
    assert!(highest < 1100, "slots are used again: {highest}");
    // A removed key needs a grace period at once, unless further changes wait.
    node.plan(&snapshot([]));
    assert!(node.planner.wants_grace());
    assert!(!node.planner.wants_room());
}

#[test]
fn large_tables_may_retire_an_eighth() {
    // 16 384 slots live, and 4 retired by each flip.
    let mut large = service("large", &["10.96.0.9"], &[]);
    let addr = |i: u32| std::net::Ipv4Addr::from_bits(0x0a00_0000 + i).into();
    let endpoint = |i: u32| Endpoint {
        addr: addr(i),
        ..endpoint("10.0.0.1")
    };
    large.ports[0].endpoints = (0..16_384 - 4).map(endpoint).collect();
    let mut small = service(
        "small",
        &["10.96.0.1"],
        &["10.0.0.1", "10.0.0.2", "10.0.0.3"],
    );
    let mut planner = Planner::new();
    let mut flips_to_grace = |services: &[&Service]| {
        planner.plan(&snapshot(services.iter().map(|s| (*s).clone())));
        planner.grace_passed();
        (1..10_000u16).find(|i| {
            small.ports[0].endpoints[0].port = 1000 + i;
            let others = services.iter().map(|s| (*s).clone());
            planner.plan(&snapshot(others.chain([small.clone()])));
            planner.wants_grace()
        })
    };
    // The first plan only inserts.
    assert_eq!(flips_to_grace(&[&large]), Some(2 + 2048 / 4));
    assert_eq!(
        flips_to_grace(&[]),
        Some(2 + 1024 / 4),
        "what is gone does not count"
    );
}

#[test]
fn damaged_tables_are_named() {
    let mut a = service("a", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
    a.internal_policy = TrafficPolicy::Local;
    a.ports[0].node_port = Some(30080);
    let mut b = service("b", &["10.96.0.2"], &["10.0.0.1", "10.0.0.2"]);
    b.created = None;
    let sound = Node1::new([a, b]).sim.contents();
    assert!(Planner::adopt(sound.clone()).is_ok());

    let key = vip("10.96.0.2", 80);
    let at = sound.frontends.iter().position(|(k, _)| *k == key).unwrap();
    let pool = sound.frontends[at].1.pool();
    let block = sound.pools[pool as usize].block;
    let pools = sound.pools.len();
    let other = sound
        .frontends
        .iter()
        .find(|(k, _)| k.addr == Addr::from_v4([0; 4]))
        .unwrap()
        .1
        .pool();
    let out_of_range = |kind, pool| AdoptError::PoolOutOfRange {
        key,
        kind,
        pool,
        pools,
    };
    // The first index that is not one of a pool.
    let beyond = u32::try_from(pools).unwrap();
    let slots = sound.endpoints.len();
    let end = u32::try_from(slots).unwrap();
    let with_key =
        |frontend: Frontend| -> Damage { Box::new(move |c| c.frontends[at].1 = frontend) };
    let with_pool = |change: Box<dyn Fn(&mut Pool)>| -> Damage {
        Box::new(move |c| change(&mut c.pools[pool as usize]))
    };
    let swapped = |slot: u32| -> Damage {
        Box::new(move |c| c.endpoints.swap(slot as usize, slot as usize - 1))
    };
    let block_out_of_range = |base| AdoptError::BlockOutOfRange {
        pool,
        base,
        len: 2,
        slots,
    };
    let other_block = sound.pools[other as usize].block;
    let cases: Vec<(Damage, AdoptError)> = vec![
        (
            with_key(Frontend::new(beyond, Kind::CLUSTER_IP)),
            out_of_range(Kind::CLUSTER_IP, beyond),
        ),
        (
            with_key(Frontend::new(0, Kind::CLUSTER_IP)),
            out_of_range(Kind::CLUSTER_IP, 0),
        ),
        (
            with_key(Frontend::new(pool, Kind::NODE_ADDRESS)),
            out_of_range(Kind::NODE_ADDRESS, pool),
        ),
        (
            with_key(Frontend::from_word(9 << 32 | u64::from(pool))),
            AdoptError::UnknownKind { key, number: 9 },
        ),
        (
            Box::new(move |c| c.frontends.push(c.frontends[at])),
            AdoptError::DuplicateKey(key),
        ),
        (
            with_pool(Box::new(move |p| p.affinity_group = beyond)),
            AdoptError::GroupOutOfRange {
                pool,
                group: beyond,
                pools,
            },
        ),
        (
            with_pool(Box::new(move |p| p.external = beyond)),
            AdoptError::ExternalOutOfRange {
                pool,
                external: beyond,
                pools,
            },
        ),
        (
            with_pool(Box::new(move |p| p.block = Block::new(end - 1, 2, 0))),
            block_out_of_range(end - 1),
        ),
        (
            with_pool(Box::new(|p| p.block = Block::new(1 << 20, 2, 0))),
            block_out_of_range(1 << 20),
        ),
        (
            with_pool(Box::new(|p| p.block = Block::new(p.block.base() - 1, 2, 0))),
            AdoptError::MisalignedBlock {
                base: block.base() - 1,
            },
        ),
        (
            with_pool(Box::new(move |p| p.block = other_block)),
            AdoptError::OverlappingBlocks {
                first: other_block.base(),
                second: other_block.base(),
            },
        ),
        (
            swapped(block.base() + 1),
            AdoptError::UnsortedBlock {
                pool,
                slot: block.base() + 1,
            },
        ),
        (
            swapped(other_block.base() + 2),
            AdoptError::UnsortedBlock {
                pool: other,
                slot: other_block.base() + 2,
            },
        ),
    ];
    for (damage, error) in cases {
        let mut contents = sound.clone();
        damage(&mut contents);
        assert_eq!(Planner::adopt(contents).err(), Some(error));
    }
    assert_eq!(
        out_of_range(Kind::CLUSTER_IP, 99).to_string(),
        format!("table FRONTENDS: 10.96.0.2:80/tcp (ClusterIP) refers to pool 99 of {pools}")
    );
}

#[test]
fn pools_that_another_owner_had_are_not_shown_to_their_keys() {
    // While no agent runs, the key, alone in its pool, moves to another service, with another kind of address or
    // traffic policy.
    let mut was = service("was", &[], &[]);
    was.external_ips = ips(&["192.0.2.7"]);
    let mut load_balancer = service("is", &[], &["10.0.0.1"]);
    load_balancer.load_balancer_ips = ips(&["192.0.2.7"]);
    let cluster = service("was", &["10.96.0.1"], &[]);
    let mut local = service("is", &["10.96.0.1"], &["10.0.0.1"]);
    local.internal_policy = TrafficPolicy::Local;
    for (was, is, to) in [
        (was, load_balancer, "192.0.2.7"),
        (cluster, local, "10.96.0.1"),
    ] {
        let mut node = Node1::new([was]);
        node.planner = Planner::adopt(node.sim.contents()).unwrap();
        let plan = node.planner.plan(&snapshot([is]));
        let mut answers = vec![node.answer(to, 80)];
        let mut sim = node.sim.clone();
        sim.apply(&plan, |sim| {
            answers.push(
                Node1 {
                    planner: Planner::new(),
                    sim: sim.clone(),
                }
                .answer(to, 80),
            );
        });
        answers.dedup();
        assert_eq!(answers.len(), 2, "{answers:?}");
    }
}

#[test]
fn changes_as_a_person_reads_them() {
    let mut a = service("a", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2"]);
    let gone = service("gone", &["10.96.0.2"], &["10.0.0.5"]);
    let moving = service("moving", &["10.96.0.3"], &["10.0.0.6"]);
    let before = Node1::new([a.clone(), gone, moving.clone()]).sim.contents();
    a.ports[0].endpoints[0] = endpoint("10.0.0.3");
    a.ports[0].node_port = Some(30080);
    a.affinity = Some(Duration::from_mins(1));
    let mut owner = service("owner", &["10.96.0.3"], &[]);
    owner.created = Some(1);
    let mut planner = Planner::adopt(before.clone()).unwrap();
    let plan = planner.plan(&snapshot([a, moving, owner]));
    assert!(!plan.is_empty());
    let changes = dataplane_plan::changes(&before, &planner);
    let lines: Vec<_> = changes.iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        [
            "+ *:30080/tcp NodePort of test/a: +10.0.0.2:8080, +10.0.0.3:8080, affinity 60 s",
            "~ 10.96.0.1:80/tcp ClusterIP of test/a: -10.0.0.1:8080, +10.0.0.3:8080, affinity 60 s",
            "- 10.96.0.2 cluster address",
            "- 10.96.0.2:80/tcp ClusterIP: -10.0.0.5:8080",
            "~ 10.96.0.3:80/tcp ClusterIP of test/owner: -10.0.0.6:8080, refuses: no endpoints",
        ]
    );
    let json = serde_json::to_value(&changes[0]).unwrap();
    assert_eq!(json["key"], "*:30080/tcp");
    assert_eq!(json["before"], serde_json::Value::Null);
    assert_eq!(json["after"]["endpoints"][1], "10.0.0.3:8080");
    assert_eq!(json["after"]["affinity_seconds"], 60);
    let last = serde_json::to_value(changes.last().unwrap()).unwrap();
    assert_eq!(last["after"]["refuses"], "no-endpoints");

    let adopted = Node1::new([service("a", &["10.96.0.1"], &[])])
        .sim
        .contents();
    let mut planner = Planner::adopt(adopted.clone()).unwrap();
    planner.plan(&snapshot([service("a", &["10.96.0.1"], &[])]));
    assert_eq!(dataplane_plan::changes(&adopted, &planner), []);
}

/// Clients of an address that another service has now, with the same endpoints, see no change.
#[test]
fn a_move_to_an_equal_pool_is_no_change() {
    let was = service("was", &["10.96.0.3", "10.96.0.4"], &["10.0.0.6"]);
    let before = Node1::new([was]).sim.contents();
    let mut planner = Planner::adopt(before.clone()).unwrap();
    let plan = planner.plan(&snapshot([
        service("was", &["10.96.0.4"], &["10.0.0.6"]),
        service("is", &["10.96.0.3"], &["10.0.0.6"]),
    ]));
    assert!(!plan.is_empty());
    assert_eq!(dataplane_plan::changes(&before, &planner), []);
}

/// Each step has a change of a service, and the lines about its changed keys.
#[test]
fn each_change_of_an_answer_is_named() {
    type Step<'a> = (fn(&mut Service), &'a [&'a str]);
    let mut web = service("web", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2 local"]);
    let other = Service {
        created: Some(200),
        external_ips: ips(&["192.0.2.7"]),
        ..service("other", &["10.96.0.2"], &["10.0.0.5"])
    };
    let mut node = Node1::new([web.clone(), other.clone()]);
    let steps: &[Step] = &[
        (
            |web| web.affinity = Some(Duration::from_secs(7)),
            &["~ 10.96.0.1:80/tcp ClusterIP of test/web: affinity 7 s"],
        ),
        (
            |web| web.affinity = Some(Duration::from_secs(8)),
            &["~ 10.96.0.1:80/tcp ClusterIP of test/web: affinity 8 s"],
        ),
        (
            |web| web.ports[0].endpoints[0].port = 8081,
            &["~ 10.96.0.1:80/tcp ClusterIP of test/web: -10.0.0.1:8080, +10.0.0.1:8081"],
        ),
        (
            |web| web.affinity = None,
            &["~ 10.96.0.1:80/tcp ClusterIP of test/web: no affinity"],
        ),
        (
            |web| web.internal_policy = TrafficPolicy::Local,
            &["~ 10.96.0.1:80/tcp ClusterIP of test/web: changes hands, -10.0.0.1:8081"],
        ),
        (
            |web| web.ports[0].endpoints.truncate(1),
            &[
                "~ 10.96.0.1:80/tcp ClusterIP of test/web: -10.0.0.2:8080, refuses: no endpoint on this node",
            ],
        ),
        (
            |web| web.ports[0].endpoints.clear(),
            &["~ 10.96.0.1:80/tcp ClusterIP of test/web: refuses: no endpoints"],
        ),
        (
            |web| web.external_ips = ips(&["192.0.2.7"]),
            &[
                "~ 192.0.2.7:80/tcp ExternalIP of test/web: changes hands, -10.0.0.5:8080, refuses: no endpoints",
            ],
        ),
        (
            |web| std::mem::swap(&mut web.external_ips, &mut web.load_balancer_ips),
            &["~ 192.0.2.7:80/tcp LoadBalancer of test/web: was ExternalIP"],
        ),
        (
            |web| web.cluster_ips = ips(&["10.96.0.3"]),
            &[
                "- 10.96.0.1 cluster address",
                "- 10.96.0.1:80/tcp ClusterIP",
                "+ 10.96.0.3 cluster address of test/web: refuses ports that the service does not have",
                "+ 10.96.0.3:80/tcp ClusterIP of test/web: refuses: no endpoints",
            ],
        ),
    ];
    for (step, wanted) in steps {
        let before = node.sim.contents();
        step(&mut web);
        node.plan(&snapshot([web.clone(), other.clone()]));
        let changes = dataplane_plan::changes(&before, &node.planner);
        let lines: Vec<_> = changes.iter().map(ToString::to_string).collect();
        assert_eq!(lines, *wanted);
    }
}

#[test]
fn flags_that_only_a_mesh_needs_are_forgotten() {
    let own = Block::NO_LOCAL | Block::NO_SUCH_PORT;
    let of_mesh = Block::REACHABLE | Block::REFUSED | Block::HBONE | Block::WAYPOINT;
    let pool = |flags| Pool {
        block: Block::new(4, 2, flags),
        affinity_seconds: 7,
        ..Pool::default()
    };
    let contents = |flags| dataplane_plan::Contents {
        pools: vec![pool(flags), pool(0)],
        ..dataplane_plan::Contents::default()
    };
    let mut found = contents(own | of_mesh);
    found.forget_reachable();
    assert_eq!(found, contents(own));
}
