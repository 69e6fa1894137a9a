//! Tables of cases, one for each rule.

use std::{sync::Arc, time::Duration};

use dataplane_common::{
    Addr, Port,
    decide::{self, Tables},
    packet::SourceKey,
    tables::{Block, Frontend, FrontendKey, Kind, Pool},
};
use dataplane_plan::{AdoptError, Departures, Plan, Planner, PoolRole, Write};
use model::{
    AllowedNamespaces, Endpoint, Gateway, IstioNamespace, Node, Protocol, Service, ServiceName,
    ServicePort, ServiceType, Snapshot, TrafficPolicy, UseWaypoint,
};

use super::sim::Sim;

const TCP: dataplane_common::Protocol = dataplane_common::Protocol::TCP;

fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<std::net::IpAddr>().unwrap())
}

fn ips<C: FromIterator<std::net::IpAddr>>(texts: &[&str]) -> C {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn vip(text: &str, port: u16) -> FrontendKey {
    FrontendKey::new(addr(text), Port::new(port), TCP)
}

/// An endpoint on port 8080: `10.0.0.1` and words: `local`, `unready`, `terminating` (and serving), `gone`
/// (terminating, not serving).
fn endpoint(text: &str) -> Endpoint {
    let mut words = text.split(' ');
    let addr = words.next().unwrap().parse().unwrap();
    let mut e = Endpoint::new(addr, 8080);
    for word in words {
        match word {
            "local" => e.local = true,
            "unready" => (e.ready, e.serving) = (false, false),
            "terminating" => (e.ready, e.terminating) = (false, true),
            "gone" => (e.ready, e.serving, e.terminating) = (false, false, true),
            _ => panic!("{word}"),
        }
    }
    e
}

/// A service with port 80/tcp.
fn service(name: &str, cluster_ips: &[&str], endpoints: &[&str]) -> Service {
    let mut endpoints: Vec<_> = endpoints.iter().map(|e| endpoint(e)).collect();
    endpoints.sort_unstable();
    let port = ServicePort {
        endpoints,
        ..ServicePort::new(80, Protocol::Tcp)
    };
    Service {
        created: Some(100),
        cluster_ips: ips(cluster_ips),
        ports: [port].into(),
        ..Service::new(ServiceName::new("test", name), ServiceType::LoadBalancer)
    }
}

fn snapshot(services: impl IntoIterator<Item = Service>) -> Snapshot {
    let services = services.into_iter().map(|s| (s.name.clone(), Arc::new(s)));
    Snapshot {
        services: services.collect(),
        ..Snapshot::default()
    }
}

/// A change that damages the tables.
type Damage = Box<dyn Fn(&mut dataplane_plan::Contents)>;

/// A planner and the tables that it has written.
#[derive(Default)]
struct Node1 {
    planner: Planner,
    sim: Sim,
}

impl Node1 {
    fn new(services: impl IntoIterator<Item = Service>) -> Self {
        let mut node = Self::default();
        node.plan(&snapshot(services));
        node
    }

    fn plan(&mut self, snapshot: &Snapshot) -> Plan {
        let plan = self.planner.plan(snapshot);
        self.sim.apply(&plan, |_| {});
        plan
    }

    /// Returns the answer to a destination: `left alone`, or the kind, and the endpoints' addresses or the reason for a
    /// refusal.
    fn answer(&self, to: &str, port: u16) -> String {
        let found = decide::find_frontend(&self.sim, addr(to), Port::new(port), TCP, true);
        if found.is_none() {
            return "left alone".to_owned();
        }
        let pool = self.sim.pool(found.pool()).unwrap();
        let resolved = self.sim.resolve(found);
        if resolved.ranges.is_some() {
            return "left alone".to_owned(); // at the socket
        }
        let endpoints = resolved.endpoints;
        let mut words = vec![format!("{:?}", found.kind())];
        words.extend(endpoints.iter().map(|endpoint| endpoint.addr.to_string()));
        if endpoints.is_empty() {
            words.push(format!("{:?}", decide::refusal(pool.block)));
        }
        words.join(" ")
    }
}

#[test]
fn usable_endpoints() {
    let table: &[(&[&str], &str, &str)] = &[
        // Endpoints, answer under policy Cluster, answer under policy Local.
        (
            &["10.0.0.1", "10.0.0.2 local"],
            "10.0.0.1 10.0.0.2",
            "10.0.0.2",
        ),
        (
            &["10.0.0.1 unready", "10.0.0.2 local"],
            "10.0.0.2",
            "10.0.0.2",
        ),
        (
            &["10.0.0.1", "10.0.0.2 local terminating"],
            "10.0.0.1",
            "10.0.0.2",
        ),
        (
            &["10.0.0.1 terminating", "10.0.0.2 terminating"],
            "10.0.0.1 10.0.0.2",
            "NoLocalEndpoint",
        ),
        (
            &["10.0.0.1 terminating", "10.0.0.2 local unready"],
            "10.0.0.1",
            "NoLocalEndpoint",
        ),
        (
            &["10.0.0.1", "10.0.0.2 local gone"],
            "10.0.0.1",
            "NoLocalEndpoint",
        ),
        (
            &["10.0.0.1 gone", "10.0.0.2 local unready"],
            "NoEndpoints",
            "NoEndpoints",
        ),
        (&[], "NoEndpoints", "NoEndpoints"),
        (&["fd00::1", "10.0.0.9"], "10.0.0.9", "NoLocalEndpoint"),
        (&["fd00::1 local"], "NoEndpoints", "NoEndpoints"),
    ];
    for (endpoints, cluster, local) in table {
        for (policy, expected) in [
            (TrafficPolicy::Cluster, cluster),
            (TrafficPolicy::Local, local),
        ] {
            let mut service = service("a", &["10.96.0.1"], endpoints);
            service.internal_policy = policy;
            let node = Node1::new([service]);
            let answer = node.answer("10.96.0.1", 80);
            assert_eq!(
                answer,
                format!("ClusterIP {expected}"),
                "{endpoints:?} {policy:?}"
            );
        }
    }
}

#[test]
fn addresses_of_each_kind() {
    let mut a = service("a", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2 local"]);
    a.external_ips = ips(&["192.0.2.7"]);
    a.load_balancer_ips = ips(&["203.0.113.1"]);
    a.ports[0].node_port = Some(30080);
    // The external policy is for clients from outside, the internal one for cluster IPs.
    a.external_policy = TrafficPolicy::Local;
    a.internal_policy = TrafficPolicy::Local;
    let mut node = Node1::default();
    let mut with_node = snapshot([a]);
    let addresses = ["192.0.2.1", "192.0.2.7", "10.96.0.1"];
    with_node.node = Arc::new(Node {
        name: "here".into(),
        addresses: ips(&addresses),
        ..Node::default()
    });
    node.plan(&with_node);
    for (to, port, expected) in [
        ("10.96.0.1", 80, "ClusterIP 10.0.0.2"),
        ("192.0.2.7", 80, "ExternalIP 10.0.0.1 10.0.0.2"),
        ("203.0.113.1", 80, "LoadBalancer 10.0.0.1 10.0.0.2"),
        ("192.0.2.1", 30080, "NodePort 10.0.0.1 10.0.0.2"),
        ("127.0.0.1", 30080, "NodePort 10.0.0.1 10.0.0.2"),
        // An external IP that is also a node's address.
        ("192.0.2.7", 30080, "NodePort 10.0.0.1 10.0.0.2"),
        // A port that the service does not have.
        ("10.96.0.1", 81, "cluster address PortNotServed"),
        ("203.0.113.1", 81, "left alone"),
        ("192.0.2.1", 80, "left alone"),
        ("192.0.2.7", 81, "left alone"),
        // A cluster IP that is also a node's address is the cluster's.
        ("10.96.0.1", 30080, "cluster address PortNotServed"),
        ("10.0.0.1", 8080, "left alone"),
    ] {
        assert_eq!(node.answer(to, port), expected, "{to}:{port}");
    }
    // The service is removed: its cluster IP belongs to the node again.
    node.plan(&Snapshot {
        node: with_node.node.clone(),
        ..Snapshot::default()
    });
    assert_eq!(node.sim.keys.len(), 3);
    assert!(
        node.sim
            .keys
            .values()
            .all(|f| *f == Frontend::new(0, Kind::NODE_ADDRESS))
    );
    // The node's addresses change.
    let other = Node {
        name: "here".into(),
        addresses: vec!["192.0.2.9".parse().unwrap()],
        ..Node::default()
    };
    node.plan(&Snapshot {
        node: Arc::new(other),
        ..Snapshot::default()
    });
    assert_eq!(
        node.sim.keys.keys().collect::<Vec<_>>(),
        [&FrontendKey::address(addr("192.0.2.9"))]
    );
}

#[test]
fn families_of_node_ports() {
    let both = &["10.0.0.1", "fd00::1"][..];
    let table: &[(&[&str], &[&str], &str, &str)] = &[
        // Cluster IPs, endpoints, over IPv4, over IPv6.
        (&["10.96.0.1"], both, "NodePort 10.0.0.1", "left alone"),
        (&["fd96::1"], both, "left alone", "NodePort fd00::1"),
        (
            &["10.96.0.1", "fd96::1"],
            both,
            "NodePort 10.0.0.1",
            "NodePort fd00::1",
        ),
        (
            &["10.96.0.1", "fd96::1"],
            &[],
            "NodePort NoEndpoints",
            "NodePort NoEndpoints",
        ),
        (&[], &["fd00::1"], "left alone", "NodePort fd00::1"),
        (&[], &[], "left alone", "left alone"),
    ];
    for (cluster_ips, endpoints, v4, v6) in table {
        let mut service = service("a", cluster_ips, endpoints);
        service.ports[0].node_port = Some(30080);
        let node = Node1::new([service]);
        let answers = (node.answer("127.0.0.1", 30080), node.answer("::1", 30080));
        assert_eq!(
            answers,
            ((*v4).to_owned(), (*v6).to_owned()),
            "{cluster_ips:?} {endpoints:?}"
        );
    }
}

#[test]
fn source_ranges_are_left_to_the_packet_path_family_by_family() {
    let table: &[(&[&str], &str, &str)] = &[
        (&[], "LoadBalancer 10.0.0.1", "LoadBalancer fd00::1"),
        (&["10.0.0.0/8"], "left alone", "LoadBalancer fd00::1"),
        (&["fd00::/8"], "LoadBalancer 10.0.0.1", "left alone"),
        (&["fd00::/8", "10.0.0.0/8"], "left alone", "left alone"),
    ];
    for (ranges, v4, v6) in table {
        let mut service = service("a", &["10.96.0.1", "fd96::1"], &["10.0.0.1", "fd00::1"]);
        service.load_balancer_ips = ips(&["203.0.113.1", "2001:db8::1"]);
        service.source_ranges = ranges.iter().map(|r| r.parse().unwrap()).collect();
        service.ports[0].node_port = Some(30080);
        let node = Node1::new([service]);
        assert_eq!(node.answer("203.0.113.1", 80), *v4, "{ranges:?}");
        assert_eq!(node.answer("2001:db8::1", 80), *v6, "{ranges:?}");
        // Source ranges apply to the load balancer's addresses only.
        assert_eq!(node.answer("10.96.0.1", 80), "ClusterIP 10.0.0.1");
        assert_eq!(node.answer("127.0.0.1", 30080), "NodePort 10.0.0.1");
        assert_eq!(node.planner.served().problems().count(), 0);
    }
}

/// With `externalTrafficPolicy: Local`, clients from outside get the endpoints of this node. Without such endpoints
/// their packets are dropped, and refused only if the service has no endpoint at all.
#[test]
fn clients_from_outside_and_local_endpoints() {
    let table: &[(&[&str], u16, &[&str])] = &[
        (&["10.0.0.1", "10.0.0.2 local"], 0, &["10.0.0.2"]),
        (&["10.0.0.1"], Block::NO_LOCAL, &[]),
        (&[], 0, &[]),
        (
            &["10.0.0.1", "10.0.0.2 local terminating"],
            0,
            &["10.0.0.2"],
        ),
    ];
    for (endpoints, flags, wanted) in table {
        let mut service = service("a", &["10.96.0.1"], endpoints);
        service.external_policy = TrafficPolicy::Local;
        service.external_ips = ips(&["192.0.2.7"]);
        service.load_balancer_ips = ips(&["203.0.113.1"]);
        service.ports[0].node_port = Some(30080);
        let mut node = Node1::new([service.clone()]);
        let outside = |node: &Node1, to: &str, port| {
            let found = decide::find_frontend(&node.sim, addr(to), Port::new(port), TCP, true);
            node.sim.resolve(found).external.map(|(flags, endpoints)| {
                let addrs = endpoints.iter().map(|e| e.addr.to_string());
                (flags, addrs.collect::<Vec<_>>())
            })
        };
        let wanted = wanted.iter().map(ToString::to_string).collect::<Vec<_>>();
        for (to, port) in [("192.0.2.7", 80), ("203.0.113.1", 80), ("127.0.0.1", 30080)] {
            let found = outside(&node, to, port);
            assert_eq!(found, Some((*flags, wanted.clone())), "{to} {endpoints:?}");
        }
        assert_eq!(outside(&node, "10.96.0.1", 80), None);
        // The cluster IP's own policy uses the same pool.
        let pools = node.sim.pools.len();
        service.internal_policy = TrafficPolicy::Local;
        node.plan(&snapshot([service]));
        assert_eq!(node.sim.pools.len(), pools);
    }
}

#[test]
fn source_ranges_are_in_the_set_of_their_pool() {
    let mut service = service("a", &["10.96.0.1"], &["10.0.0.1"]);
    service.load_balancer_ips = ips(&["203.0.113.1"]);
    service.source_ranges = ["198.51.100.9/24", "fd00::/8"]
        .iter()
        .map(|r| r.parse().unwrap())
        .collect();
    let mut node = Node1::new([service.clone()]);
    let key = FrontendKey::new(addr("203.0.113.1"), Port::new(80), TCP);
    let pool = node.sim.keys[&key].pool();
    let wanted = SourceKey::network(pool, addr("198.51.100.0"), 96 + 24);
    assert_eq!(node.sim.sources.iter().collect::<Vec<_>>(), [&wanted]);
    assert_eq!(node.sim.pools[&pool].ranged, 1);
    // With a range of all addresses, the table needs no source ranges.
    service.source_ranges.push("0.0.0.0/0".parse().unwrap());
    node.plan(&snapshot([service]));
    assert!(node.sim.sources.is_empty());
    assert_eq!(node.sim.pools[&pool].ranged, 0);
}

#[test]
fn no_vip_of_services_that_have_none() {
    for kind in [ServiceType::ClusterIp, ServiceType::ExternalName] {
        let mut service = service("a", &[], &["10.0.0.1"]);
        service.kind = kind;
        service.external_ips = ips(&["192.0.2.7"]);
        service.ports[0].node_port = Some(30080);
        assert_eq!(Node1::new([service]).sim.keys.len(), 0, "{kind:?}");
    }
}

#[test]
fn addresses_that_cannot_be_vips_are_reported() {
    let mut service = service("a", &["10.96.0.1"], &["10.0.0.1"]);
    let bad = [
        "0.0.0.0",
        "127.0.0.1",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "224.0.0.1",
        "ff02::1",
    ];
    service.external_ips = ips(&bad);
    let node = Node1::new([service]);
    assert_eq!(node.sim.keys.len(), 2, "{:?}", node.sim.keys);
    assert_eq!(node.planner.served().problems().count(), bad.len());
}

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
    let other_base = sound.pools[other as usize].block.base();
    let out_of_range = |kind, pool| AdoptError::PoolOutOfRange {
        key,
        kind,
        pool,
        pools,
    };
    let with_pool = move |change: fn(&mut Pool)| -> Damage {
        Box::new(move |c| change(&mut c.pools[pool as usize]))
    };
    let cases: Vec<(Damage, AdoptError)> = vec![
        (
            Box::new(move |c| c.frontends[at].1 = Frontend::new(99, c.frontends[at].1.kind())),
            out_of_range(Kind::CLUSTER_IP, 99),
        ),
        (
            Box::new(move |c| c.frontends[at].1 = Frontend::new(0, c.frontends[at].1.kind())),
            out_of_range(Kind::CLUSTER_IP, 0),
        ),
        (
            Box::new(move |c| {
                c.frontends[at].1 = Frontend::new(c.frontends[at].1.pool(), Kind::NODE_ADDRESS);
            }),
            out_of_range(Kind::NODE_ADDRESS, pool),
        ),
        (
            Box::new(move |c| c.frontends[at].1 = Frontend::from_word(9 << 32 | u64::from(pool))),
            AdoptError::UnknownKind { key, number: 9 },
        ),
        (
            Box::new(move |c| c.frontends.push(c.frontends[at])),
            AdoptError::DuplicateKey(key),
        ),
        (
            with_pool(|p| p.affinity_group = 99),
            AdoptError::GroupOutOfRange {
                pool,
                group: 99,
                pools,
            },
        ),
        (
            with_pool(|p| p.block = Block::new(1 << 20, 2, 0)),
            AdoptError::BlockOutOfRange {
                pool,
                base: 1 << 20,
                len: 2,
                slots: sound.endpoints.len(),
            },
        ),
        (
            with_pool(|p| p.block = Block::new(p.block.base() - 1, 2, 0)),
            AdoptError::MisalignedBlock {
                base: block.base() - 1,
            },
        ),
        (
            Box::new(move |c| c.pools[pool as usize].block = c.pools[other as usize].block),
            AdoptError::OverlappingBlocks {
                first: other_base,
                second: other_base,
            },
        ),
        (
            Box::new(move |c| {
                let at = block.base() as usize;
                c.endpoints.swap(at, at + 1);
            }),
            AdoptError::UnsortedBlock {
                pool,
                slot: block.base() + 1,
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

/// A service that loses an address to another leaves flows behind, to endpoints that the other service does not have.
#[test]
fn an_address_that_changes_hands_leaves_flows_behind() {
    const VIP: &str = "192.0.2.1";
    let with_vip = |name: &str, created, endpoints: &[&str]| Service {
        external_ips: ips(&[VIP]),
        created: Some(created),
        ..service(name, &["10.96.0.1"], endpoints)
    };
    let older = with_vip("older", 1, &["10.0.0.1"]);
    let younger = Service {
        cluster_ips: ips(&["10.96.0.2"]),
        ..with_vip("younger", 2, &["10.0.0.2"])
    };
    let without = Service {
        external_ips: ips(&[]),
        ..older.clone()
    };
    for after in [vec![younger.clone()], vec![without, younger.clone()]] {
        let mut planner = Planner::new();
        let mut departures = Departures::new(&[TCP]);
        planner.plan(&snapshot(vec![older.clone(), younger.clone()]));
        departures.after(&planner);
        planner.plan(&snapshot(after));
        let departed = departures.after(&planner);
        for (endpoint, gone) in [("10.0.0.1", true), ("10.0.0.2", false)] {
            let endpoint = (addr(endpoint), Port::new(8080));
            let vip = (addr(VIP), Port::new(80));
            let stale = departed.is_stale(vip, TCP, endpoint, |_| true);
            let unlisted = departed.is_unlisted(vip, endpoint, |_| true);
            assert_eq!([stale, unlisted], [gone; 2], "{endpoint:?}");
        }
    }
}

/// Returns the addresses whose port 80 captured workloads may not connect to.
fn refused(node: &Node1) -> String {
    let keys = node.planner.frontends().into_iter();
    let refused = keys.filter(|(_, frontend)| decide::is_refused(&node.sim, *frontend));
    let addresses = refused.map(|(key, _)| key.addr.ip().to_string());
    addresses.collect::<Vec<_>>().join(" ")
}

/// Each change of a label is planned, as by an agent that starts then or that adopts the tables, and nothing but the
/// frontends that the Service has won is refused.
#[test]
fn services_with_a_waypoint_are_refused_at_the_keys_that_they_have_won() {
    let other = |name: &str, cluster_ip: &str, external_ip: &str| {
        let mut service = service(name, &[cluster_ip], &["10.0.0.1"]);
        service.name = ServiceName::new("other", name);
        service.external_ips = ips(&[external_ip]);
        service
    };
    let mut entry = service("serviceentry:web:a.example", &[], &["10.0.0.9"]);
    (entry.kind, entry.external_ips) = (ServiceType::Entry, ips(&["198.51.100.9"]));
    let mut of_host = service("web:host", &[], &["10.0.0.9"]);
    (of_host.kind, of_host.external_ips) = (ServiceType::HostPort, ips(&["192.0.2.9"]));
    let mut last = snapshot([
        service("web", &["10.96.0.1"], &["10.0.0.1", "10.0.0.2 local"]),
        service("web-2", &["10.96.0.2"], &["10.0.0.2"]),
        other("taker", "10.96.0.7", "10.96.0.1"),
        other("free", "10.96.0.8", "203.0.113.8"),
        entry,
        of_host,
    ]);
    let mut node = Node1::default();
    // Each line has labels of objects of namespace `test`, or of a Namespace, and the addresses that are refused. Another
    // tenant claims the cluster IP of `web`; host ports never have a waypoint.
    let cases = "
        =>
        Service web=gate => 10.96.0.1
        test=gate, Service web=none => 10.96.0.2 198.51.100.9
        test=gate, Service web=none, ServiceEntry web=none => 10.96.0.2
        test=gate, ServiceEntry web=none => 10.96.0.1 10.96.0.2
        Service web=none =>
        other=gate => 10.96.0.7 10.96.0.8 203.0.113.8
        =>
        ServiceEntry web=gate => 198.51.100.9
        warn, test=gate, other=gate =>
        Service web=gate => 10.96.0.1";
    for case in cases.lines().skip(1) {
        let (labels, wanted) = case.split_once("=>").unwrap();
        last.istio.namespaces.clear();
        for (label, value) in labels.split(',').filter_map(|label| label.split_once('=')) {
            let label = label.trim();
            let gate = UseWaypoint::Gateway(ServiceName::new("test", "gate"));
            let used = (value.trim() == "gate").then_some(gate);
            let namespace = if label == "other" { label } else { "test" };
            let of = last.istio.namespaces.entry(namespace.into()).or_default();
            let of = Arc::make_mut(of);
            match label {
                "test" | "other" => of.waypoint = used,
                _ => {
                    let used = used.unwrap_or(UseWaypoint::None);
                    of.labels.insert(label.into(), used);
                }
            }
        }
        let denies = !labels.contains("warn");
        let restarts = last.istio.denies != denies;
        last.istio.denies = denies;
        if restarts {
            node.planner = Planner::adopt(node.sim.contents()).unwrap();
        }
        node.plan(&last);
        let mut fresh = Node1::default();
        fresh.plan(&last);
        for node in [&node, &fresh] {
            assert_eq!(refused(node), wanted.trim(), "{case}");
        }
    }
}

/// Each line has what the namespace's waypoint is for, and the addresses whose connections go to the proxy because of it.
/// Each change is planned, as by an agent that starts then or that adopts the tables.
#[test]
fn services_with_a_waypoint_are_reached_through_the_proxy() {
    let of = IstioNamespace {
        waypoint: Some(UseWaypoint::Gateway(ServiceName::new("other", "gate"))),
        labels: [(Arc::from("Service free"), UseWaypoint::None)]
            .into_iter()
            .collect(),
        ..IstioNamespace::default()
    };
    let mut last = snapshot([
        service("web", &["10.96.0.1"], &["10.0.0.1"]),
        service("free", &["10.96.0.2"], &["10.0.0.2"]),
    ]);
    last.istio.namespaces.insert("test".into(), Arc::new(of));
    let mut node = Node1::default();
    for (on, traffic, wanted) in [
        (false, "", ""),
        (true, "", "10.96.0.1"),
        (true, "workload", ""),
        (true, "service", "10.96.0.1"),
        (true, "none", ""),
        (true, "all", "10.96.0.1"),
        (false, "all", ""),
    ] {
        let name = ServiceName::new("other", "gate");
        let restarts = last.istio.waypoints != on;
        last.istio.waypoints = on;
        last.istio.gateways.clear();
        if !traffic.is_empty() {
            let gateway = Gateway {
                for_services: ["service", "all"].contains(&traffic),
                for_workloads: ["workload", "all"].contains(&traffic),
                addresses: Box::default(),
                allowed: AllowedNamespaces::Same,
            };
            last.istio.gateways.insert(name, Arc::new(gateway));
        }
        if restarts {
            node.planner = Planner::adopt(node.sim.contents()).unwrap();
        }
        node.plan(&last);
        let mut fresh = Node1::default();
        fresh.plan(&last);
        for node in [&node, &fresh] {
            let flags = |frontend: &Frontend| {
                let pool = node.sim.pool(frontend.pool()).unwrap();
                pool.block.flags() & (Block::HBONE | Block::WAYPOINT)
            };
            let keys = node.planner.frontends().into_iter();
            let found = keys.filter(|(key, _)| key.port == Port::new(80));
            let found = found.filter(|(_, of)| flags(of) == Block::HBONE | Block::WAYPOINT);
            let found: Vec<_> = found.map(|(key, _)| key.addr.ip().to_string()).collect();
            assert_eq!(found.join(" "), wanted, "{on} {traffic}");
        }
    }
}
