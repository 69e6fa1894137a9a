//! The keys of a service, and their cost in the tables.

use model::{Endpoint, Protocol, ServiceName};

use super::*;

/// A service of type LoadBalancer at `10.96.0.1:80/tcp`, with an endpoint on this node and another one.
fn service(change: impl FnOnce(&mut Service)) -> Service {
    let endpoint = |n: u8| Endpoint {
        local: n == 1,
        ..Endpoint::new([10, 0, 0, n].into(), 8080)
    };
    let mut service = Service {
        cluster_ips: ips(&["10.96.0.1"]),
        ports: [ServicePort {
            endpoints: vec![endpoint(1), endpoint(2)],
            ..ServicePort::new(80, Protocol::Tcp)
        }]
        .into(),
        ..Service::new(ServiceName::new("shop", "web"), ServiceType::LoadBalancer)
    };
    change(&mut service);
    service
}

fn ips<C: FromIterator<IpAddr>>(all: &[&str]) -> C {
    all.iter().map(|ip| ip.parse().unwrap()).collect()
}

fn of_v6(addr: &str) -> Endpoint {
    Endpoint::new(addr.parse().unwrap(), 8080)
}

/// Returns each key with its kind, its claim, and `Local` if it is limited to endpoints of this node.
fn told(service: &Service) -> Vec<String> {
    let mut all = Vec::new();
    keys(service, &mut all);
    let told = all.iter().map(|wanted| {
        let key = key_text(&wanted.key);
        let is_local = wanted.policy == TrafficPolicy::Local;
        let policy = if is_local { " Local" } else { "" };
        format!("{key} {} {:?}{policy}", wanted.kind.word(), wanted.claim)
    });
    told.collect()
}

/// A change of a service, and its keys.
type Case = (fn(&mut Service), &'static [&'static str]);

const CASES: &[Case] = &[
    (
        |_| {},
        &[
            "10.96.0.1:80/tcp ClusterIP ClusterIp",
            "10.96.0.1 cluster address ClusterIp",
        ],
    ),
    (
        |s| {
            s.cluster_ips = ips(&["10.96.0.1", "fd96::1"]);
            s.external_ips = ips(&["192.0.2.7"]);
            s.load_balancer_ips = ips(&["203.0.113.1"]);
            s.ports[0].node_port = Some(30080);
            (s.internal_policy, s.external_policy) = (TrafficPolicy::Local, TrafficPolicy::Local);
        },
        &[
            "10.96.0.1:80/tcp ClusterIP ClusterIp Local",
            "[fd96::1]:80/tcp ClusterIP ClusterIp Local",
            "192.0.2.7:80/tcp ExternalIP ExternalIp",
            "203.0.113.1:80/tcp LoadBalancer LoadBalancer",
            "*:30080/tcp NodePort NodePort",
            "[*]:30080/tcp NodePort NodePort",
            "10.96.0.1 cluster address ClusterIp",
            "fd96::1 cluster address ClusterIp",
        ],
    ),
    // One address by two fields is one key, with the stronger claim.
    (
        |s| {
            s.external_ips = ips(&["192.0.2.7", "192.0.2.8", "10.96.0.1"]);
            s.load_balancer_ips = ips(&["192.0.2.7", "192.0.2.9"]);
        },
        &[
            "10.96.0.1:80/tcp ClusterIP ClusterIp",
            "192.0.2.7:80/tcp ExternalIP LoadBalancer",
            "192.0.2.8:80/tcp ExternalIP ExternalIp",
            "192.0.2.9:80/tcp LoadBalancer LoadBalancer",
            "10.96.0.1 cluster address ClusterIp",
        ],
    ),
    // A process of this node listens at 10.96.0.1:80 and 192.0.2.7:80.
    (
        |s| {
            s.external_ips = ips(&["192.0.2.7"]);
            s.load_balancer_ips = ips(&["203.0.113.1"]);
            let listens = ["10.96.0.1", "192.0.2.7", "203.0.113.1"];
            s.aside = listens
                .map(|ip| (ip.parse().unwrap(), Protocol::Tcp, 80))
                .into();
        },
        &["203.0.113.1:80/tcp LoadBalancer LoadBalancer"],
    ),
    // It listens at another port.
    (
        |s| s.aside = vec![(ips::<Vec<_>>(&["10.96.0.1"])[0], Protocol::Udp, 80)],
        &["10.96.0.1:80/tcp ClusterIP ClusterIp"],
    ),
    (
        |s| {
            s.kind = ServiceType::HostPort;
            s.cluster_ips.clear();
            s.external_ips = ips(&["127.0.0.1", "::1", "0.0.0.0", "192.0.2.1", "224.0.0.1"]);
        },
        &[
            "127.0.0.1:80/tcp ExternalIP HostPort",
            "[::1]:80/tcp ExternalIP HostPort",
            "192.0.2.1:80/tcp ExternalIP HostPort",
        ],
    ),
    (
        |s| s.ports[0].port = 0,
        &["10.96.0.1 cluster address ClusterIp"],
    ),
    (
        |s| s.ports[0].node_port = Some(0),
        &[
            "10.96.0.1:80/tcp ClusterIP ClusterIp",
            "10.96.0.1 cluster address ClusterIp",
        ],
    ),
    // Without cluster IPs, the endpoints tell the families of node ports.
    (
        |s| {
            s.cluster_ips.clear();
            s.ports[0].node_port = Some(30080);
        },
        &["*:30080/tcp NodePort NodePort"],
    ),
    (
        |s| {
            s.cluster_ips.clear();
            s.ports[0].node_port = Some(30080);
            s.ports[0].endpoints = vec![of_v6("fd00::1")];
        },
        &["[*]:30080/tcp NodePort NodePort"],
    ),
    (|s| s.kind = ServiceType::ExternalName, &[]),
    (
        |s| {
            s.kind = ServiceType::ClusterIp;
            s.cluster_ips.clear();
            s.external_ips = ips(&["192.0.2.7"]);
        },
        &[],
    ),
];

#[test]
fn a_service_has_the_keys_of_its_kinds_of_addresses() {
    for (number, (change, wanted)) in CASES.iter().enumerate() {
        assert_eq!(told(&service(change)), *wanted, "case {number}");
    }
}

/// Services with few and with very many keys, that name addresses, ports or node ports once or twice.
#[test]
fn no_key_is_there_twice() {
    type Change = fn(&mut Service);
    let changes: [(Change, usize); 5] = [
        (|_| {}, 1),
        (|s| s.external_ips = ips(&["192.0.2.7", "192.0.2.7"]), 2),
        (
            |s| {
                s.external_ips = ips(&["192.0.2.7"]);
                s.load_balancer_ips = ips(&["192.0.2.7"]);
            },
            2,
        ),
        (|s| s.ports.push(s.ports[0].clone()), 1),
        (
            |s| {
                let ports = s.ports.iter_mut();
                ports.for_each(|port| port.node_port = Some(30080));
            },
            1,
        ),
    ];
    for count in [1, 2, 40] {
        for (number, (change, of_port)) in changes.iter().enumerate() {
            let service = service(|s| {
                let port = |n| ServicePort::new(n, Protocol::Tcp);
                s.ports = (1..=count).map(port).collect();
                change(s);
            });
            let mut all = Vec::new();
            keys(&service, &mut all);
            let distinct: BTreeSet<FrontendKey> = all.iter().map(|wanted| wanted.key).collect();
            assert_eq!(distinct.len(), all.len(), "{count}, change {number}");
            let shared = if number == 4 { 2 } else { 1 };
            assert_eq!(
                all.len(),
                usize::from(count) * of_port + shared,
                "{count}, change {number}"
            );
            // Of two kinds of one address, the first counts.
            let is_lb = |wanted: &WantedKey| wanted.kind == Kind::LOAD_BALANCER;
            assert!(!all.iter().any(is_lb), "{count}, change {number}");
        }
    }
    let service = service(|s| s.ports = vec![s.ports[0].clone(); 40].into());
    assert_eq!(told(&service).len(), 2, "one port, very many times");
}

/// Each line has the keys, pools, slots and source ranges that a service needs at most, and the lengths of its present blocks.
#[test]
fn the_cost_of_a_service_counts_what_it_may_ever_need() {
    type Case<'a> = (fn(&mut Service), Entries, &'a [usize]);
    let cases: &[Case] = &[
        (|_| {}, [2, 2, 2, 0], &[2]),
        (|s| s.ports[0].endpoints.clear(), [2, 2, 0, 0], &[]),
        (
            |s| s.ports[0].endpoints.push(of_v6("fd00::1")),
            [2, 2, 2, 0],
            &[2],
        ),
        (
            |s| {
                s.ports[0]
                    .endpoints
                    .extend([of_v6("fd00::1"), of_v6("fd00::2"), of_v6("fd00::3")]);
                s.cluster_ips = ips(&["10.96.0.1", "fd96::1"]);
            },
            [4, 3, 6, 0],
            &[2, 3],
        ),
        // An endpoint that is not ready may become so.
        (
            |s| {
                let endpoint = &mut s.ports[0].endpoints[0];
                (endpoint.ready, endpoint.serving) = (false, false);
            },
            [2, 2, 2, 0],
            &[1],
        ),
        // Pools of the endpoints on this node.
        (
            |s| s.internal_policy = TrafficPolicy::Local,
            [2, 3, 4, 0],
            &[2, 1],
        ),
        (
            |s| s.external_policy = TrafficPolicy::Local,
            [2, 3, 4, 0],
            &[2, 1],
        ),
        (|s| s.ports[0].node_port = Some(30080), [3, 2, 2, 0], &[2]),
        (
            |s| {
                s.load_balancer_ips = ips(&["203.0.113.1"]);
                let ranges = ["10.0.0.0/8", "192.0.2.0/24", "fd00::/8"];
                s.source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
                s.ports.push(ServicePort {
                    port: 81,
                    ..s.ports[0].clone()
                });
            },
            [5, 3, 4, 4],
            &[2, 2],
        ),
        (
            |s| {
                let ranges = ["10.0.0.0/8", "0.0.0.0/0"];
                s.source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
            },
            [2, 2, 2, 0],
            &[2],
        ),
        (
            |s| s.ports[0].weights = Weights::of(vec![3, 2]),
            [2, 2, 8, 0],
            &[5],
        ),
    ];
    for (number, (change, wanted, lens)) in cases.iter().enumerate() {
        let service = service(change);
        let mut all = Vec::new();
        keys(&service, &mut all);
        assert_eq!(cost(&service, &all), *wanted, "case {number}");
        assert_eq!(blocks(&service, &all), *lens, "case {number}");
    }
}

#[test]
fn keys_and_networks_of_both_families() {
    let key = |addr: &str, port| {
        FrontendKey::new(
            addr.parse::<IpAddr>().unwrap().into(),
            Port::new(port),
            dataplane_common::Protocol::UDP,
        )
    };
    let node_port =
        |v4| FrontendKey::node_port(v4, Port::new(30080), dataplane_common::Protocol::TCP);
    for (key, wanted) in [
        (key("10.96.0.10", 53), "10.96.0.10:53/udp"),
        (key("fd00::a", 53), "[fd00::a]:53/udp"),
        (
            FrontendKey::address(key("10.96.0.10", 0).addr),
            "10.96.0.10",
        ),
        (FrontendKey::address(key("fd00::a", 0).addr), "fd00::a"),
        (node_port(true), "*:30080/tcp"),
        (node_port(false), "[*]:30080/tcp"),
    ] {
        assert_eq!(key_text(&key), wanted);
    }
    for (network, addr, length) in [
        ("198.51.100.9/24", "198.51.100.0", 96 + 24),
        ("fd00::9/8", "fd00::", 8),
    ] {
        let addr: IpAddr = addr.parse().unwrap();
        let wanted = SourceKey::network(7, addr.into(), length);
        assert_eq!(source_key(7, &network.parse().unwrap()), wanted);
    }
}
