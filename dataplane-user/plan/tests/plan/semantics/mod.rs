//! Tables of cases, one for each rule.

mod claims;
mod departures;
mod tables;
mod waypoints;

use std::{sync::Arc, time::Duration};

use dataplane_common::{
    Addr, Port,
    decide::{self, Tables},
    packet::SourceKey,
    tables::{Block, Frontend, FrontendKey, Kind, Pool},
};
use dataplane_plan::{AdoptError, Plan, Planner, PoolRole, Write};
use model::{
    Endpoint, Gateway, IstioNamespace, Node, Place, Protocol, Service, ServiceName, ServicePort,
    ServiceType, Snapshot, TrafficPolicy, UseWaypoint, Workload, WorkloadName,
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

/// Each step has a policy for clients from outside, and the pools of the port in the order in which they are written.
#[test]
fn local_endpoints_come_first_unless_clients_from_outside_no_longer_get_them() {
    use PoolRole::{Cluster, Local};
    let mut web = service("web", &["10.96.0.1"], &["10.0.0.1 local"]);
    web.internal_policy = TrafficPolicy::Local;
    let mut node = Node1::default();
    for (outside, wanted) in [
        (TrafficPolicy::Local, [Local, Cluster]),
        (TrafficPolicy::Local, [Local, Cluster]),
        (TrafficPolicy::Cluster, [Cluster, Local]),
        (TrafficPolicy::Cluster, [Local, Cluster]),
    ] {
        web.external_policy = outside;
        web.ports[0].endpoints[0].port += 1;
        let plan = node.plan(&snapshot([web.clone()]));
        let pools = plan.writes.iter().filter_map(|write| match write {
            Write::Pool { index, .. } => Some(node.planner.pool_owner(*index)?.role),
            _ => None,
        });
        let pools = pools.filter(|role| *role != PoolRole::NoSuchPort);
        assert_eq!(pools.collect::<Vec<_>>(), wanted, "{outside:?}");
    }
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
    // A Pod's host port may be at a loopback address of the node, but nothing else.
    let mut service = self::service("a", &["127.0.0.2"], &["10.0.0.1"]);
    service.kind = ServiceType::HostPort;
    service.external_ips = ips(&["127.0.0.1"]);
    let served = Node1::new([service]).planner.served();
    let [(_, problem)] = &served.problems().collect::<Vec<_>>()[..] else {
        panic!("{served:?}")
    };
    assert!(
        problem.text.starts_with("spec.clusterIPs: 127.0.0.2"),
        "{problem:?}"
    );
}
