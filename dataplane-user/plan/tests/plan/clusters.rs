//! Snapshots of a cluster, and changes to them, as strategies.

use std::{net::IpAddr, sync::Arc, time::Duration};

use model::{
    Endpoint, Hints, Node, Protocol, Records, Service, ServiceName, ServicePort, ServiceType,
    Snapshot, TrafficPolicy,
};
use proptest::prelude::*;

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
                    identities: Box::default(),
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
