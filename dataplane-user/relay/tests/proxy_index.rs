//! Properties of the proxy's index and of the choice of endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use dataplane_relay::{Found, Index, Target};
use model::{
    Endpoint, Hints, Locality, Node, Part, Place, Preference, Protocol, Service, ServiceName,
    ServicePort, ServiceType, Snapshot, Split, TrafficPolicy, Workload, WorkloadName,
};
use proptest::prelude::*;
use smallvec::{SmallVec, smallvec};

fn ip(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, last))
}

fn this_node() -> Node {
    Node {
        name: "here".into(),
        addresses: vec![IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))],
        own: Vec::new(),
        zone: "z1".into(),
        addresses_from: Vec::new(),
        leaving: None,
        name_given: true,
        ..Node::default()
    }
}

/// Hints of a control plane, or ranks by the places of endpoints.
fn hints() -> impl Strategy<Value = Hints> {
    let hinted = prop_oneof![
        Just((None, None)),
        Just((Some("z1"), None)),
        Just((Some("z2"), None)),
        Just((Some("z1"), Some("here"))),
        Just((Some("z2"), Some("there"))),
    ];
    let ranked = (prop_oneof![Just("z1"), Just("z2")], any::<bool>()).prop_map(|(zone, local)| {
        let at = Locality {
            zone,
            ..Locality::default()
        };
        let at = Hints::default().located(&this_node(), at);
        at.preferring(Preference::SameNode, local)
    });
    prop_oneof![
        4 => hinted.prop_map(|(zone, node)| Hints::new(&this_node(), zone, node)),
        1 => ranked,
    ]
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let states = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (1..20_u8, 1..3_u16, states, hints(), any::<bool>()).prop_map(
        |(last, port, (ready, serving, terminating, local), hints, v6)| Endpoint {
            addr: if v6 {
                IpAddr::V6(Ipv4Addr::new(10, 244, 0, last).to_ipv6_compatible())
            } else {
                IpAddr::V4(Ipv4Addr::new(10, 244, 0, last))
            },
            port,
            local,
            ready,
            serving,
            terminating,
            hints,
        },
    )
}

fn port() -> impl Strategy<Value = ServicePort> {
    let protocol = prop_oneof![4 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)];
    let endpoints = prop::collection::btree_set(endpoint(), 0..8);
    let node_port = prop::option::of(30_000..30_003_u16);
    (80..83_u16, protocol, endpoints, node_port).prop_map(
        |(port, protocol, endpoints, node_port)| ServicePort {
            name: format!("p{port}").into(),
            node_port,
            endpoints: endpoints.into_iter().collect(),
            ..ServicePort::new(port, protocol)
        },
    )
}

prop_compose! {
    fn service()(
        number in 0..6_u8,
        created in prop::option::of(0..3_i64),
        cluster_ips in prop::collection::btree_set(1..5_u8, 0..2),
        external_ips in prop::collection::btree_set(1..8_u8, 0..2),
        affinity in any::<bool>(),
        local in any::<bool>(),
        ports in prop::collection::vec(port(), 0..3),
    ) -> Service {
        let mut seen = BTreeSet::new();
        let ports: SmallVec<[ServicePort; 1]> =
            ports.into_iter().filter(|p| seen.insert((p.port, p.protocol))).collect();
        Service {
            created,
            cluster_ips: cluster_ips.into_iter().map(ip).collect(),
            external_ips: external_ips.into_iter().map(ip).collect(),
            affinity: affinity.then_some(Duration::from_mins(1)),
            internal_policy: if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster },
            ports,
            ..Service::new(ServiceName::new("default", &format!("s{number}")), ServiceType::NodePort)
        }
    }
}

fn snapshot(services: Vec<Service>) -> Snapshot {
    let mut snapshot = Snapshot {
        node: Arc::new(this_node()),
        ..Snapshot::default()
    };
    for service in services {
        snapshot
            .services
            .insert(service.name.clone(), Arc::new(service));
    }
    snapshot
}

/// Every destination that any of the services here could have.
fn destinations() -> impl Iterator<Item = SocketAddr> {
    let vips = (1..8).flat_map(|last| (79..84).map(move |port| SocketAddr::new(ip(last), port)));
    let node = (30_000..30_004).map(|port| SocketAddr::new(this_node().addresses[0], port));
    let pods = (1..20).map(|last| SocketAddr::new(Ipv4Addr::new(10, 244, 0, last).into(), 1));
    vips.chain(node).chain(pods)
}

/// Returns the result of `find` as text, for comparison.
fn told(index: &Index, destination: SocketAddr) -> String {
    match index.find(destination) {
        Found::Service(target) => {
            let all: Vec<_> = target.endpoints(true).collect();
            format!("{} {} {all:?}", target.service(), target.port().port)
        }
        other => format!("{other:?}"),
    }
}

/// Whom the model itself says that this node should use.
fn usable(port: &ServicePort, policy: TrafficPolicy, v4: bool) -> BTreeSet<SocketAddr> {
    let usable = port.usable(v4, policy);
    usable.map(|e| SocketAddr::new(e.addr, e.port)).collect()
}

fn targets(index: &Index) -> BTreeMap<SocketAddr, Arc<Target>> {
    destinations()
        .filter_map(|at| match index.find(at) {
            Found::Service(target) => Some((at, target)),
            _ => None,
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// After any updates, an index finds the targets that an index made of the last snapshot alone finds.
    #[test]
    fn a_changed_index_is_as_good_as_a_new_one(
        steps in prop::collection::vec(prop::collection::vec(service(), 0..6), 1..5),
    ) {
        let mut index = Index::default();
        for services in steps {
            let snapshot = snapshot(services);
            index = index.updated(snapshot.clone());
            let fresh = Index::default().updated(snapshot);
            for destination in destinations() {
                prop_assert_eq!(told(&index, destination), told(&fresh, destination), "{}", destination);
            }
        }
        let empty = index.updated(snapshot(vec![]));
        for destination in destinations() {
            prop_assert!(matches!(empty.find(destination), Found::Unknown), "{}", destination);
        }
    }

    /// If several services claim one address, the strongest claim serves it: a cluster IP, then a node port, then an external IP.
    /// Of equal claims, the oldest service's does. A service without a creation time counts as the youngest.
    #[test]
    fn the_strongest_claim_serves_an_address(services in prop::collection::vec(service(), 0..6)) {
        let snapshot = snapshot(services);
        let index = Index::default().updated(snapshot.clone());
        for (at, target) in targets(&index) {
            let claims = snapshot.services.values().filter(|service| {
                let vip = service.cluster_ips.contains(&at.ip()) || service.external_ips.contains(&at.ip());
                service.ports.iter().any(|port| {
                    port.protocol == Protocol::Tcp
                        && ((vip && port.port == at.port())
                            || (port.node_port == Some(at.port())
                                && snapshot.node.addresses.contains(&at.ip())))
                })
            });
            let weakness = |service: &Service| {
                let by = |ips: &[IpAddr]| {
                    let has_port = service.ports.iter().any(|port| port.protocol == Protocol::Tcp && port.port == at.port());
                    has_port && ips.contains(&at.ip())
                };
                match () {
                    () if by(&service.cluster_ips) => 0,
                    () if !by(&service.external_ips) => 1,
                    // A node port, too.
                    () if service.ports.iter().any(|port| port.node_port == Some(at.port()))
                        && snapshot.node.addresses.contains(&at.ip()) => 1,
                    () => 2,
                }
            };
            let first = claims.min_by_key(|s| (weakness(s), s.created.is_none(), s.created, s.name.clone()));
            prop_assert_eq!(Some(target.service()), first.map(|service| &service.name), "{}", at);
        }
    }

    /// Endpoints that this node should use come first, each once; then other ready endpoints. An endpoint that has
    /// failed is not tried again, and endpoints of the other family are left out.
    #[test]
    fn endpoints_are_tried_in_order_of_preference(
        services in prop::collection::vec(service(), 1..6),
        client in 1..250_u8,
        v4 in any::<bool>(),
    ) {
        let snapshot = snapshot(services);
        let index = Index::default().updated(snapshot.clone());
        let client = IpAddr::V4(Ipv4Addr::new(10, 244, 1, client));
        for (at, target) in targets(&index) {
            let service = &snapshot.services[target.service()];
            let policy = if service.cluster_ips.contains(&at.ip()) {
                service.internal_policy
            } else {
                TrafficPolicy::Cluster
            };
            let near = usable(target.port(), policy, v4);
            let ready: BTreeSet<SocketAddr> = target.port().endpoints.iter()
                .filter(|e| e.ready && e.addr.is_ipv4() == v4 && policy == TrafficPolicy::Cluster)
                .map(|e| SocketAddr::new(e.addr, e.port))
                .collect();
            prop_assert_eq!(target.has_endpoint(v4), !near.is_empty());
            let mut tried = vec![];
            while let Some(next) = target.choose(v4, client, &tried) {
                prop_assert!(!tried.contains(&next));
                if tried.len() < near.len() {
                    prop_assert!(near.contains(&next), "{} is not preferred", next);
                } else {
                    prop_assert!(ready.contains(&next), "{} is not ready", next);
                }
                tried.push(next);
            }
            let all: BTreeSet<SocketAddr> = near.union(&ready).copied().collect();
            prop_assert_eq!(tried.into_iter().collect::<BTreeSet<_>>(), all);
            // With session affinity a client stays at its endpoint when others come or go.
            if service.affinity.is_some() {
                let first = target.choose(v4, client, &[]);
                prop_assert!((0..10).all(|_| target.choose(v4, client, &[]) == first));
                let others = near.iter().filter(|e| Some(**e) != first).copied();
                for other in others {
                    prop_assert_eq!(target.choose(v4, client, &[other]), first);
                }
            }
        }
    }
}

/// With nine degrees of freedom, a uniform draw exceeds 50 once in ten million times.
#[test]
fn endpoints_are_drawn_uniformly() {
    let endpoints =
        (0..10).map(|last| Endpoint::new(IpAddr::V4(Ipv4Addr::new(10, 244, 0, last)), 80));
    let mut service = Service {
        cluster_ips: smallvec![ip(1)],
        ..Service::new(ServiceName::new("default", "web"), ServiceType::ClusterIp)
    };
    service.ports.push(ServicePort {
        endpoints: endpoints.collect(),
        ..ServicePort::new(80, Protocol::Tcp)
    });
    for affinity in [false, true] {
        service.affinity = affinity.then_some(Duration::from_mins(1));
        let index = Index::default().updated(snapshot(vec![service.clone()]));
        let targets = targets(&index);
        let target = &targets[&SocketAddr::new(ip(1), 80)];
        let mut counts: BTreeMap<SocketAddr, f64> = BTreeMap::new();
        for client in 0..20_000_u32 {
            let client = IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + client));
            let drawn = target.choose(true, client, &[]).expect("there are ten");
            *counts.entry(drawn).or_default() += 1.0;
        }
        let chi_squared: f64 = counts.values().map(|n| (n - 2000.0).powi(2) / 2000.0).sum();
        assert!(
            counts.len() == 10 && chi_squared < 50.0,
            "{chi_squared:.1}: {counts:?}"
        );
    }
}

/// An address identifies a workload only as long as exactly one workload has it, and the node does not.
#[test]
fn an_address_that_several_have_or_the_node_is_nobodys() {
    let workload = |name: &str, addresses: &[IpAddr]| {
        Arc::new(Workload {
            addresses: addresses.iter().copied().collect(),
            ..Workload::new(WorkloadName::new("default", name), Place::Elsewhere)
        })
    };
    let mut snapshot = Snapshot {
        node: Arc::new(this_node()),
        ..Snapshot::default()
    };
    let node = this_node().addresses[0];
    let mut index = Index::default();
    let mut step = |add: &[Arc<Workload>], remove: &[&str]| {
        for new in add {
            snapshot.workloads.insert(new.name.clone(), Arc::clone(new));
        }
        for name in remove {
            let name = WorkloadName::new("default", name);
            snapshot.workloads.remove(&name);
        }
        index = index.updated(snapshot.clone());
        [ip(1), ip(2), node].map(|addr| {
            let known = index.workload(addr);
            known.map(|workload| workload.name.name().to_owned())
        })
    };
    let some = |name: &str| Some(name.to_owned());
    let before = [workload("a", &[ip(1)]), workload("host", &[node, ip(2)])];
    assert_eq!(step(&before, &[]), [some("a"), some("host"), None]);
    // A new pod has the address already.
    let b = [workload("b", &[ip(1)])];
    assert_eq!(step(&b, &[]), [None, some("host"), None]);
    assert_eq!(step(&[], &["a"]), [some("b"), some("host"), None]);
    // It changes its address.
    let b = [workload("b", &[ip(2)])];
    assert_eq!(step(&b, &[]), [None, None, None]);
    assert_eq!(step(&[], &["host"]), [None, some("b"), None]);
}

/// For a workload that is denied egress, a Service of Pods opens their ports without further configuration; a
/// ServiceEntry does not.
#[test]
fn the_endpoints_of_an_entry_are_reached_by_its_addresses_only() {
    let pod = SocketAddr::new(Ipv4Addr::new(10, 244, 0, 1).into(), 81);
    let endpoint = Endpoint::new(pod.ip(), pod.port());
    let service = Service {
        cluster_ips: smallvec![ip(1)],
        ports: smallvec![ServicePort {
            endpoints: vec![endpoint],
            ..ServicePort::new(80, Protocol::Tcp)
        }],
        ..Service::new(ServiceName::new("default", "db"), ServiceType::ClusterIp)
    };
    let vip = SocketAddr::new(ip(1), 80);
    let mut index = Index::default();
    // A route that leads to the entry opens nothing either, and a Service that is split keeps its own endpoints.
    let mut entry = service.clone();
    entry.kind = ServiceType::Entry;
    let split = |own: &[Endpoint], to: &Service| {
        let mut own_service = service.clone();
        own_service.ports[0].endpoints = own.to_vec();
        let mut routed = own_service.clone();
        routed.ports[0].endpoints.clone_from(&to.ports[0].endpoints);
        routed.ports[0].split = Some(Arc::new(Split {
            by: "TCPRoute default/r".into(),
            own: Arc::new(own_service),
            parts: vec![Part {
                weight: 1,
                backend: Some((Arc::new(to.clone()), 0)),
            }],
        }));
        routed
    };
    let mut other = entry.clone();
    other.ports[0].endpoints[0].port = 82;
    for (service, direct) in [
        (service.clone(), true),
        (entry.clone(), false),
        (split(&[], &entry), false),
        (split(&[endpoint], &other), true),
        (service.clone(), true),
    ] {
        let kind = service.kind;
        let mut snapshot = snapshot(vec![service]);
        snapshot.reachable = Some(Arc::default());
        let name = WorkloadName::new("default", "pod");
        let workload = Workload {
            addresses: [pod.ip()].into_iter().collect(),
            ..Workload::new(name.clone(), Place::Elsewhere)
        };
        snapshot.workloads.insert(name, Arc::new(workload));
        index = index.updated(snapshot);
        assert_eq!(index.is_reachable(pod), direct, "{kind:?}");
        let Found::Service(target) = index.find(vip) else {
            panic!("{kind:?}");
        };
        assert!(index.is_service_reachable(&target, true));
    }
}
