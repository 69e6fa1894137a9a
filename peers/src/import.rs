//! Tests that kube-proxy's rules, in each mode and family, can be converted back to the services that they were written
//! for, as far as rules show services.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use migrate::kube_proxy::{Error, Imported, Masquerade, Text, import, write};
use model::{
    Endpoint, Hints, Node, Protocol, Records, Service, ServiceName, ServicePort, ServiceType,
    Snapshot, TrafficPolicy,
};
use proptest::prelude::*;
use smallvec::SmallVec;

use super::{Cluster, Family, LocalDetector, iptables, nftables, port::ports};

/// A drawn endpoint: its number, whether it has an IPv4 address, whether it is on this node, its conditions (ready,
/// serving, terminating), and the hint for its zone.
type EndpointDraw = (u8, bool, bool, (bool, bool, bool), Option<bool>);
/// A drawn service.
#[derive(Clone, Debug)]
struct Draw {
    families: [bool; 2],
    external_ips: u8,
    load_balancer_ips: u8,
    ranges: Vec<bool>,
    affinity: Option<u16>,
    internal_local: bool,
    external_local: bool,
    node_ports: bool,
    ports: Vec<(bool, Vec<EndpointDraw>)>,
}

fn endpoint_draw() -> impl Strategy<Value = EndpointDraw> {
    let conditions = prop_oneof![
        4 => Just((true, true, false)),
        1 => Just((false, true, true)),
        1 => Just((false, false, false)),
    ];
    (
        0_u8..6,
        any::<bool>(),
        any::<bool>(),
        conditions,
        prop::option::weighted(0.7, any::<bool>()),
    )
}

fn draw() -> impl Strategy<Value = Draw> {
    let families = prop_oneof![Just([true, false]), Just([false, true]), Just([true, true])];
    let ports = prop::collection::vec(
        (any::<bool>(), prop::collection::vec(endpoint_draw(), 0..6)),
        1..4,
    );
    (
        families,
        0_u8..3,
        0_u8..3,
        prop::collection::vec(any::<bool>(), 0..3),
        prop::option::weighted(0.3, 1_u16..20_000),
        (any::<bool>(), any::<bool>(), any::<bool>()),
        ports,
    )
        .prop_map(
            |(families, external_ips, load_balancer_ips, ranges, affinity, flags, ports)| Draw {
                families,
                external_ips,
                load_balancer_ips,
                ranges,
                affinity,
                internal_local: flags.0,
                external_local: flags.1,
                node_ports: flags.2,
                ports,
            },
        )
}

fn ip(v4: bool, net: u8, number: usize) -> IpAddr {
    let number = u16::try_from(number).unwrap();
    let [high, low] = number.to_be_bytes();
    if v4 {
        Ipv4Addr::new(10, net, high, low).into()
    } else {
        Ipv6Addr::new(0xfd00, u16::from(net), 0, 0, 0, 0, 0, number).into()
    }
}

fn service(index: usize, draw: &Draw, node: &Node) -> Service {
    let families = || {
        let all = [true, false].into_iter().zip(draw.families);
        all.filter_map(|(v4, has)| has.then_some(v4))
    };
    let of_kind = |net: u8, count: u8| -> Vec<IpAddr> {
        families()
            .flat_map(|v4| (0..count).map(move |n| ip(v4, net, 1 + index * 8 + usize::from(n))))
            .collect()
    };
    let policy = |local| {
        if local {
            TrafficPolicy::Local
        } else {
            TrafficPolicy::Cluster
        }
    };
    let range =
        |(n, v4): (usize, &bool)| IpNet::new(ip(*v4, 7, n << 8), if *v4 { 24 } else { 120 });
    let ports = draw
        .ports
        .iter()
        .enumerate()
        .map(|(number, (udp, endpoints))| {
            let port = u16::try_from(80 + number).unwrap();
            let mut endpoints: Vec<Endpoint> = endpoints
                .iter()
                .map(
                    |(n, v4, local, (ready, serving, terminating), hint)| Endpoint {
                        addr: ip(*v4, 244, 1 + index * 16 + usize::from(*n)),
                        port: 8000 + port,
                        local: *local,
                        ready: *ready,
                        serving: *serving,
                        terminating: *terminating,
                        hints: Hints::new(
                            node,
                            hint.map(|here| if here { "here" } else { "there" }),
                            [],
                        ),
                    },
                )
                .collect();
            endpoints.sort_unstable();
            endpoints.dedup_by_key(|endpoint| endpoint.addr);
            let node_port = 30_000 + index * 8 + number;
            ServicePort {
                name: if draw.ports.len() == 1 {
                    "".into()
                } else {
                    format!("p{number}").into()
                },
                node_port: draw.node_ports.then_some(u16::try_from(node_port).unwrap()),
                endpoints,
                ..ServicePort::new(port, if *udp { Protocol::Udp } else { Protocol::Tcp })
            }
        });
    let affinity = draw
        .affinity
        .map(|seconds| Duration::from_secs(seconds.into()));
    let load_balancer_ips = of_kind(12, draw.load_balancer_ips);
    let checked = draw.external_local && !load_balancer_ips.is_empty();
    Service {
        name: ServiceName::new(["shop", "a-b"][index % 2], &format!("web-{index}")),
        kind: ServiceType::ClusterIp,
        created: None,
        cluster_ips: of_kind(96, 1).into_iter().collect(),
        external_ips: of_kind(11, draw.external_ips).into_iter().collect(),
        load_balancer_ips: load_balancer_ips.into_iter().collect(),
        source_ranges: draw
            .ranges
            .iter()
            .enumerate()
            .filter_map(|draw| range(draw).ok())
            .collect(),
        affinity,
        internal_policy: policy(draw.internal_local),
        external_policy: policy(draw.external_local),
        health_check_node_port: checked.then_some(u16::try_from(31_000 + index).unwrap()),
        aside: Vec::new(),
        identities: Box::default(),
        records: Records::ClusterIps,
        ports: ports.collect::<SmallVec<_>>(),
    }
}

fn node() -> Node {
    Node {
        name: "node1".into(),
        addresses: vec![ip(true, 9, 1), ip(false, 9, 1)],
        zone: "here".into(),
        ..Node::default()
    }
}

fn snapshot(draws: &[Draw]) -> Snapshot {
    let node = node();
    let services = draws.iter().enumerate().map(|(index, draw)| {
        let service = service(index, draw, &node);
        (service.name.clone(), Arc::new(service))
    });
    Snapshot {
        services: services.collect(),
        node: Arc::new(node.clone()),
        ..Snapshot::default()
    }
}

fn cluster() -> impl Strategy<Value = Cluster> {
    let nets = || {
        let nets = [
            IpNet::new(ip(true, 244, 0), 16),
            IpNet::new(ip(false, 244, 0), 64),
        ];
        nets.into_iter().map(Result::unwrap)
    };
    let local = prop_oneof![
        Just(LocalDetector::None),
        Just(LocalDetector::Networks(nets().collect())),
        Just(LocalDetector::Networks(nets().take(1).collect())),
        Just(LocalDetector::Interface("cbr0".into())),
        Just(LocalDetector::InterfacePrefix("cali".into())),
    ];
    (local, prop::bool::weighted(0.2), any::<bool>()).prop_map(|(local, masquerade_all, given)| {
        Cluster {
            local,
            masquerade_all,
            node_ports_on: if given {
                vec![ip(true, 9, 2), ip(false, 9, 3)]
            } else {
                vec![]
            },
            service_networks: vec![],
        }
    })
}

/// Returns kube-proxy's rules of one mode, for both families.
fn rules(is_nft: bool, snapshot: &Snapshot, cluster: &Cluster) -> Vec<Text> {
    let of_family = |family| {
        let text = if is_nft {
            nftables::rules(snapshot, cluster, family)
        } else {
            iptables::rules(snapshot, cluster, family)
        };
        let origin = format!("{family:?}");
        Text { origin, text }
    };
    Family::BOTH.map(of_family).into()
}

/// Returns the lines of rules, with each element of a map as its own line. The order of elements carries no
/// information; the order of other lines follows the order of endpoints.
fn lines(texts: &[Text]) -> BTreeSet<String> {
    let all = texts.iter().flat_map(|text| {
        text.text.lines().map(|line| {
            let line = line.trim().trim_start_matches("elements = { ");
            let line = line.trim_end_matches(" }").trim_end_matches(',');
            format!("{} {line}", text.origin)
        })
    });
    all.collect()
}

/// Describes services as clients see them: one line for each port and family.
fn seen(snapshot: &Snapshot) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for family in Family::BOTH {
        for port in ports(snapshot, family) {
            let addrs = |endpoints: &[&Endpoint]| -> Vec<String> {
                endpoints
                    .iter()
                    .map(|e| format!("{}:{}", e.addr, e.port))
                    .collect()
            };
            let outside: BTreeSet<IpAddr> = port
                .external_ips()
                .chain(port.load_balancer_ips())
                .collect();
            all.insert(format!(
                "{} {} {} {:?} at {} and {outside:?}, node port {:?}: {:?} here {:?}",
                port.service.name,
                port.spec.name,
                port.spec.protocol.word(),
                port.spec.port,
                port.cluster_ip,
                port.spec.node_port,
                addrs(&port.cluster),
                addrs(&port.local),
            ));
        }
    }
    all
}

/// Returns which clients the rules of a family masquerade, if the family has a service.
fn masquerade(cluster: &Cluster, v4: bool) -> Masquerade {
    if cluster.masquerade_all {
        return Masquerade::All;
    }
    match &cluster.local {
        LocalDetector::None => Masquerade::Nobody,
        LocalDetector::Networks(nets) => {
            let mut nets = nets.iter().filter(|net| net.addr().is_ipv4() == v4);
            nets.next()
                .map_or(Masquerade::Nobody, |net| Masquerade::OutsideOf(*net))
        }
        LocalDetector::Interface(name) => Masquerade::NotFromInterface(name.clone()),
        LocalDetector::InterfacePrefix(name) => Masquerade::NotFromPrefix(name.clone()),
    }
}

fn check(is_nft: bool, mut wanted: Snapshot, cluster: &Cluster) {
    // If no rule leads to an endpoint, the rules do not show whether the service has endpoints.
    let endpoints_are_unknown = |service: &Service| {
        service.internal_policy == TrafficPolicy::Local
            && ports(&wanted, Family::V4)
                .chain(ports(&wanted, Family::V6))
                .any(|port| {
                    port.service.name == service.name
                        && port.served
                        && port.cluster.is_empty()
                        && port.local.is_empty()
                })
    };
    let services = wanted.services.values();
    let unknown: Vec<ServiceName> = services
        .filter(|service| endpoints_are_unknown(service))
        .map(|service| service.name.clone())
        .collect();
    for name in unknown {
        wanted.services.remove(&name);
    }
    let texts = rules(is_nft, &wanted, cluster);
    let all = || {
        texts
            .iter()
            .map(|text| &*text.text)
            .collect::<Vec<_>>()
            .join("\n")
    };
    let imported = import(&texts);
    if let Err(Error::NoServices(_)) = imported {
        let none = Snapshot {
            services: wanted_none(),
            ..wanted.clone()
        };
        assert_eq!(seen(&none), seen(&wanted), "{}", all());
        return;
    }
    let Imported {
        services,
        facts,
        leftovers,
        more,
        stale,
    } = imported.unwrap_or_else(|error| panic!("{error}\n{}", all()));
    assert!(
        leftovers.is_empty() && more == 0 && stale == 0,
        "{leftovers:?}, {stale}\n{}",
        all()
    );
    let found = Snapshot {
        services,
        ..wanted.clone()
    };
    assert_eq!(seen(&found), seen(&wanted), "{}", all());
    let again = rules(is_nft, &found, cluster);
    let (again, first) = (lines(&again), lines(&texts));
    let missing: Vec<_> = first.difference(&again).collect();
    let extra: Vec<_> = again.difference(&first).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:#?}\nextra {extra:#?}\n{}",
        all()
    );
    // Repeat the comparison with the manifests that the imported services become.
    let mut file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    let imported = Imported {
        services: found.services.clone(),
        ..Imported::default()
    };
    write(&imported, &wanted.node.name, &mut file).unwrap();
    let read = source::manifests::load(&[file.path().into()], &wanted.node).unwrap();
    let of_manifests = lines(&rules(is_nft, &read.snapshot, cluster));
    let differs: Vec<_> = first.symmetric_difference(&of_manifests).collect();
    assert!(differs.is_empty(), "{differs:#?}\n{}", all());
    for (v4, said) in [true, false].into_iter().zip(facts.masquerade) {
        if let Some(said) = said {
            assert_eq!(said, masquerade(cluster, v4), "{}", all());
        }
    }
    let given = cluster.node_ports_on.iter().copied().map(IpNet::from);
    let wanted: BTreeSet<IpNet> = match (cluster.node_ports_on.is_empty(), is_nft) {
        (false, _) => given.collect(),
        (true, true) => node().addresses.into_iter().map(IpNet::from).collect(),
        (true, false) => ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap()).into(),
    };
    assert_eq!(facts.node_ports, wanted, "{}", all());
    assert_eq!(facts.mark, Some(0x4000));
}

/// An empty value: no services were read before.
fn wanted_none<T: Default>() -> T {
    T::default()
}

/// Number of test runs: `DATAPLANE_FUZZ_RUNS`, or 48 if the variable is not set.
fn runs() -> u32 {
    std::env::var("DATAPLANE_FUZZ_RUNS").map_or(48, |runs| runs.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: runs(), ..ProptestConfig::default() })]

    #[test]
    fn services_come_back_from_iptables_rules(
        draws in prop::collection::vec(draw(), 0..5),
        cluster in cluster(),
    ) {
        check(false, snapshot(&draws), &cluster);
    }

    #[test]
    fn services_come_back_from_nftables_rules(
        draws in prop::collection::vec(draw(), 0..5),
        cluster in cluster(),
    ) {
        check(true, snapshot(&draws), &cluster);
    }
}
