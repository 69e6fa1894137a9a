//! Several services claim one address and port.

use dataplane_plan::Served;

use super::*;

#[test]
fn the_older_service_wins_then_the_name() {
    let named = |name, created| {
        let mut s = service(name, &["10.96.0.1"], &[]);
        s.created = created;
        s
    };
    // The result is the same in every order of arrival.
    for (all, ranking) in [
        (
            [("a", Some(2)), ("b", Some(1)), ("c", None)],
            ["b", "a", "c"],
        ),
        (
            [("a", None), ("b", Some(2)), ("c", Some(2))],
            ["b", "c", "a"],
        ),
        ([("a", None), ("b", None), ("c", None)], ["a", "b", "c"]),
    ] {
        for order in [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ] {
            let mut node = Node1::default();
            let mut now = Snapshot::default();
            for i in order {
                let s = named(all[i].0, all[i].1);
                now.services.insert(s.name.clone(), Arc::new(s));
                node.plan(&now);
            }
            let ranked = ranking.map(|name| ServiceName::new("test", name));
            let conflicts: Vec<_> = node.planner.served().conflicts().collect();
            // Two conflicts: the port, and the address without a port.
            assert_eq!(conflicts.len(), 2);
            for conflict in conflicts {
                assert_eq!(conflict.winner, ranked[0]);
                assert_eq!(conflict.losers, ranked[1..]);
            }
            // The winner is removed, and the next service takes over with a Replace.
            now.services.remove(&ranked[0]);
            let plan = node.plan(&now);
            let replaced = plan
                .writes
                .iter()
                .filter(|w| matches!(w, Write::Replace { .. }))
                .count();
            assert_eq!(replaced, 2, "{:?}", plan.writes);
            let owner = |key: &FrontendKey| {
                node.planner
                    .pool_owner(node.sim.keys[key].pool())
                    .map(|o| o.service.clone())
            };
            assert_eq!(owner(&vip("10.96.0.1", 80)).as_ref(), Some(&ranked[1]));
            assert_eq!(
                owner(&FrontendKey::address(addr("10.96.0.1"))).as_ref(),
                Some(&ranked[1])
            );
            now.services.remove(&ranked[2]);
            node.plan(&now);
            assert_eq!(node.planner.served().conflict_count(), 0);
        }
    }
}

/// The kind of a service's claim to an address counts before the service's age.
#[test]
fn an_older_service_takes_nothing_that_was_given_to_another() {
    let by = |claim: &str, name: &str, created: i64| {
        let mut s = service(name, &[], &["10.0.0.1 local"]);
        s.created = Some(created);
        let vips = ips(&["192.0.2.80"]);
        match claim {
            "cluster IP" => s.cluster_ips = ips(&["192.0.2.80"]),
            "load balancer" => s.load_balancer_ips = vips,
            "external IP" => s.external_ips = vips,
            "host port" => (s.kind, s.external_ips) = (ServiceType::HostPort, vips),
            "node port" | "host port everywhere" => {
                s.ports[0].port = 8080;
                s.ports[0].node_port = Some(80);
                if claim != "node port" {
                    s.kind = ServiceType::HostPort;
                }
            }
            _ => panic!("{claim}"),
        }
        s
    };
    let at_address = ["cluster IP", "load balancer", "external IP", "host port"];
    let at_node = ["node port", "host port everywhere"];
    for ranking in [&at_address[..], &at_node[..]] {
        for (at, stronger) in ranking.iter().enumerate() {
            for weaker in &ranking[at + 1..] {
                // The weaker claim is older and first by name, and is added first or last.
                let (thief, owner) = (by(weaker, "a", 1), by(stronger, "b", 2));
                for order in [[&thief, &owner], [&owner, &thief]] {
                    let mut node = Node1::default();
                    let mut now = Snapshot::default();
                    for s in order {
                        now.services.insert(s.name.clone(), Arc::new(s.clone()));
                        node.plan(&now);
                    }
                    let conflicts: Vec<_> = node.planner.served().conflicts().collect();
                    assert_eq!(conflicts.len(), 1, "{stronger} and {weaker}: {conflicts:?}");
                    assert_eq!(conflicts[0].winner, owner.name, "{stronger} and {weaker}");
                    assert_eq!(conflicts[0].losers, std::slice::from_ref(&thief.name));
                    let key = conflicts[0].key;
                    let pool = node.sim.keys[&key].pool();
                    let served = node.planner.pool_owner(pool).unwrap();
                    assert_eq!(served.service, owner.name);
                }
            }
        }
    }
}

/// A service that claims an address by another field than before may win or lose the address.
#[test]
fn a_claim_that_becomes_another_kind_is_settled_again() {
    let mut a = service("a", &[], &["10.0.0.1"]);
    let mut b = service("b", &[], &["10.0.0.2"]);
    a.external_ips = ips(&["192.0.2.80"]);
    b.external_ips = ips(&["192.0.2.80"]);
    let mut node = Node1::new([a.clone(), b.clone()]);
    let winner = |node: &Node1| {
        node.planner
            .served()
            .conflicts()
            .next()
            .unwrap()
            .winner
            .name()
            .to_owned()
    };
    assert_eq!(winner(&node), "a");
    b.load_balancer_ips = std::mem::take(&mut b.external_ips);
    node.plan(&snapshot([a.clone(), b.clone()]));
    assert_eq!(winner(&node), "b");
    let key = vip("192.0.2.80", 80);
    let served = |node: &Node1| node.planner.pool_owner(node.sim.keys[&key].pool()).cloned();
    assert_eq!(served(&node).unwrap().service, b.name);
    b.external_ips = std::mem::take(&mut b.load_balancer_ips);
    node.plan(&snapshot([a.clone(), b]));
    assert_eq!(winner(&node), "a");
    assert_eq!(served(&node).unwrap().service, a.name);
}

#[test]
fn roles_share_a_pool_unless_the_policy_keeps_them_apart() {
    let mut a = service("a", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2 local"]);
    a.ports[0].node_port = Some(30080);
    a.affinity = Some(Duration::from_secs(7));
    let mut node = Node1::new([a.clone()]);
    let pool = |node: &Node1, key: &FrontendKey| {
        let index = node.sim.keys[key].pool();
        (index, node.sim.pools[&index])
    };
    let (cluster_ip, node_port) = (
        vip("10.96.0.1", 80),
        FrontendKey::node_port(true, Port::new(30080), TCP),
    );
    let shared = pool(&node, &cluster_ip);
    assert_eq!(shared, pool(&node, &node_port));
    assert_eq!(
        (shared.1.affinity_group, shared.1.affinity_seconds),
        (shared.0, 7)
    );

    a.internal_policy = TrafficPolicy::Local;
    node.plan(&snapshot([a.clone()]));
    let local = pool(&node, &cluster_ip);
    assert_ne!(local.0, shared.0);
    assert_eq!(pool(&node, &node_port), shared);
    assert_eq!(local.1.affinity_group, shared.0, "they share the affinity");
    let role = |pool| node.planner.pool_owner(pool).map(|owner| owner.role);
    assert_eq!(role(shared.0), Some(PoolRole::Cluster));
    assert_eq!(role(local.0), Some(PoolRole::Local));

    a.internal_policy = TrafficPolicy::Cluster;
    node.plan(&snapshot([a]));
    assert_eq!(pool(&node, &cluster_ip), shared);
}

/// The bare address of a host may be that of several entries, each at its own ports. It may not be that of others.
#[test]
fn entries_share_the_address_of_a_host() {
    let entry = |name: &str, port| {
        let mut entry = service(name, &["240.240.0.9"], &[]);
        (entry.kind, entry.ports[0].port) = (ServiceType::Entry, port);
        entry
    };
    let mut other = service("other", &[], &[]);
    other.cluster_ips = ips(&["240.240.0.9"]);
    other.ports[0].port = 82;
    let conflicts = |services: &[Service]| {
        let node = Node1::new(services.iter().cloned());
        let served = node.planner.served();
        let keys = served
            .conflicts()
            .map(|of| dataplane_plan::key_text(&of.key));
        let keys: Vec<String> = keys.collect();
        assert_eq!(served.conflict_count(), keys.len());
        keys.join(" ")
    };
    let (a, b, c) = (entry("a", 80), entry("b", 81), entry("c", 80));
    assert_eq!(conflicts(&[a.clone(), b.clone()]), "");
    assert_eq!(conflicts(&[a.clone(), c]), "240.240.0.9:80/tcp");
    assert_eq!(conflicts(&[a, b, other]), "240.240.0.9");
}

#[test]
fn owners_of_pools_are_read_from_any_pool_on() {
    let node = Node1::new([
        service("a", &["10.96.0.1"], &["10.0.0.1"]),
        service("b", &["10.96.0.2"], &["10.0.0.1"]),
    ]);
    let mut served = node.planner.served();
    let after = |served: &Served, after| -> Vec<u32> {
        served.pools_after(after).map(|(pool, _)| pool).collect()
    };
    assert_eq!(after(&served, 0), [1, 2, 3, 4]);
    assert_eq!(after(&served, 2), [3, 4]);
    assert!(after(&served, u32::MAX).is_empty());
    for (pool, owner) in served.pools_after(0) {
        assert_eq!(Some(&**owner), node.planner.pool_owner(pool));
    }
    served.retain_owners(|pool| pool == 3);
    assert_eq!(after(&served, 0), [3]);
    assert!(served.pool_owner(3).is_some() && served.pool_owner(2).is_none());
}
