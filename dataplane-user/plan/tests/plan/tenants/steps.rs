//! The objects that tenants write: those of a hostile tenant, and those of others.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, LazyLock},
};

use dataplane_plan::entries::Entries;
use imbl::OrdMap;
use model::{
    At, Backend, Endpoint, Entry, EntryName, EntryPort, EntryResolution, ExportTo, Hints, Host,
    Location, Protocol, Service, ServicePort, ServiceType, Snapshot,
};
use proptest::prelude::*;
use serde_json::json;
use smallvec::SmallVec;
use source::{
    ExternalIps,
    objects::{self, Findings, Outcome},
};

use super::{
    super::clusters::{Change, change, ips, service},
    HOSTILE, NOW,
};

/// Number of entries of the other tenants.
const ENTRIES: usize = 4;

/// The changes of one step.
#[derive(Clone, Debug)]
pub struct Step {
    pub others: Vec<Change>,
    pub entries: Vec<(usize, Option<Entry>)>,
    pub hostile: Vec<(usize, Option<Service>)>,
    pub hostile_entries: Vec<(usize, Option<Entry>)>,
    pub grace: bool,
    pub restart: bool,
}

pub fn entry_name(index: usize) -> EntryName {
    EntryName::new(["test", "other"][index % 2], &format!("x{index}"))
}

/// Hosts of the hostile tenant that are names of the cluster to clients with a search list, or names that resolvers answer
/// themselves.
const RELATIVE: &str = "web wpad localhost *.localhost db.invalid s0.test *.s0.test s1.other.svc *.test *.other *.s0 *.s1 *.svc \
     kubernetes.default *.default.svc kube-dns.kube-system";

/// Destinations of the agent's own sockets: a resolver and the API server, each at a cluster IP and outside.
pub const OF_AGENT: [(&str, u16, Protocol); 6] = [
    ("10.96.99.10", 53, Protocol::Udp),
    ("10.96.99.10", 53, Protocol::Tcp),
    ("203.0.113.53", 53, Protocol::Udp),
    ("203.0.113.53", 53, Protocol::Tcp),
    ("10.96.99.1", 443, Protocol::Tcp),
    ("203.0.113.6", 6443, Protocol::Tcp),
];

/// Ports that the agent listens on.
pub const RESERVED: [u16; 2] = [15021, 10256];

const HOSTS: [&str; 4] = [
    "db0.example.com",
    "db1.example.com",
    "shared.example.com",
    "*.example.com",
];

/// Addresses that hosts of the other tenants get if no other host has them.
static GIVEN: LazyLock<Vec<IpAddr>> = LazyLock::new(|| {
    let entries = (0..2).map(|index| {
        let hosts = HOSTS.map(|name| host(name, None));
        let entry = Entry {
            name: entry_name(index),
            hosts: hosts.into_iter().collect(),
            wants_vips: true,
            ports: [entry_port(80, Protocol::Tcp)].into_iter().collect(),
            ..no_entry()
        };
        (entry.name.clone(), Arc::new(entry))
    });
    let entries = entries.collect();
    let taken = Entries::new([]).take(&entries, &OrdMap::new(), &Snapshot::default(), NOW);
    let hosts = taken
        .entries
        .values()
        .flat_map(|entry| entry.hosts.clone())
        .collect::<Vec<_>>();
    hosts.iter().flat_map(|host| host.vips.clone()).collect()
});

fn no_entry() -> Entry {
    Entry {
        preference: [None; 2],
        identities: Box::default(),
        name: entry_name(0),
        created: None,
        hosts: SmallVec::new(),
        addresses: SmallVec::new(),
        ranges: SmallVec::new(),
        wants_vips: false,
        resolution: EntryResolution::Static,
        location: Location::External,
        export_to: ExportTo::All,
        ports: SmallVec::new(),
        backends: Vec::new(),
    }
}

fn host(name: &str, assigned: Option<IpAddr>) -> Host {
    Host {
        assigned: assigned.into_iter().collect(),
        ..Host::new(name.into())
    }
}

fn entry_port(port: u16, protocol: Protocol) -> EntryPort {
    EntryPort {
        name: port.to_string().into(),
        port,
        protocol,
        target: None,
    }
}

fn address_of_agent() -> impl Strategy<Value = IpAddr> {
    prop::sample::select(
        OF_AGENT
            .map(|(addr, ..)| addr.parse::<IpAddr>().unwrap())
            .to_vec(),
    )
}

/// Returns the hosts that the source serves for an entry of the hostile tenant.
fn served_hosts(names: &[&str]) -> SmallVec<[Host; 1]> {
    let object = json!({
        "metadata": { "namespace": HOSTILE, "name": "x" },
        "spec": {
            "hosts": names, "resolution": "STATIC",
            "ports": [{ "number": 80, "name": "web", "protocol": "TCP" }],
        },
    });
    let object = serde_json::from_value(object).unwrap();
    let node = model::Node::default();
    let entry = objects::service_entry(object, &node, &mut Findings::default());
    entry.entry.hosts
}

/// Returns the Services of the cluster itself: DNS, and the API server.
pub fn of_cluster() -> [Service; 2] {
    let dns = json!([
        { "name": "udp", "protocol": "UDP", "port": 53 },
        { "name": "tcp", "protocol": "TCP", "port": 53 },
    ]);
    let api = json!([{ "port": 443 }]);
    [
        ("kube-system/kube-dns", "10.96.99.10", dns, "10.0.99.53:53"),
        ("default/kubernetes", "10.96.99.1", api, "203.0.113.6:6443"),
    ]
    .map(|(name, ip, ports, at)| {
        let (namespace, name) = name.split_once('/').unwrap();
        let at: SocketAddr = at.parse().unwrap();
        let object = json!({
            "metadata": { "namespace": namespace, "name": name },
            "spec": { "clusterIPs": [ip], "ports": ports },
        });
        let object = serde_json::from_value(object).unwrap();
        let Outcome::Served(mut service) = objects::service(object, &mut Findings::default())
        else {
            panic!("{namespace}/{name} is another proxy's");
        };
        for port in &mut service.ports {
            port.endpoints = vec![endpoint(at.ip(), at.port(), false)];
        }
        service
    })
}

fn endpoint(addr: IpAddr, port: u16, local: bool) -> Endpoint {
    Endpoint {
        local,
        ..Endpoint::new(addr, port)
    }
}

fn given() -> impl Strategy<Value = IpAddr> {
    prop::sample::select(GIVEN.clone())
}

/// An entry with valid fields.
fn entry(assigned: impl Strategy<Value = Option<IpAddr>>) -> impl Strategy<Value = Entry> {
    let addresses = ips(
        &[
            "198.51.100.7",
            "198.51.100.8",
            "10.96.0.1",
            "192.0.2.1",
            "192.0.2.2",
            "203.0.113.1",
            "10.0.0.1",
            "fd02::1",
            "fd98::7",
        ],
        3,
    );
    let ports = prop::sample::subsequence(vec![80u16, 443, 5432], 1..=2);
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)];
    let backend = prop::sample::select(vec![
        "10.0.0.1",
        "10.0.0.2",
        "198.51.100.1",
        "fd00::1",
        "db.example.org",
    ]);
    let backends = prop::collection::btree_map(backend, 1u32..3, 0..4);
    let resolution = prop_oneof![
        6 => Just(EntryResolution::Static),
        1 => Just(EntryResolution::Dns),
        1 => Just(EntryResolution::None),
    ];
    (
        prop::sample::subsequence(HOSTS.to_vec(), 1..=2),
        assigned,
        addresses,
        any::<bool>(),
        (ports, protocol),
        backends,
        resolution,
        prop::option::of(0i64..3),
    )
        .prop_map(
            |(hosts, assigned, addresses, wants_vips, ports, backends, resolution, created)| {
                let mut assigned = assigned;
                let (ports, protocol) = ports;
                let backend = |(at, weight): (&str, u32)| Backend {
                    hints: Hints::default(),
                    at: (at.parse()).map_or_else(|_| At::Name(at.into()), At::Address),
                    ports: SmallVec::new(),
                    weight,
                    local: false,
                };
                Entry {
                    created,
                    hosts: hosts
                        .into_iter()
                        .map(|name| host(name, assigned.take()))
                        .collect(),
                    addresses: addresses.into(),
                    wants_vips,
                    resolution,
                    ports: ports
                        .into_iter()
                        .map(|port| entry_port(port, protocol))
                        .collect(),
                    backends: backends.into_iter().map(backend).collect(),
                    ..no_entry()
                }
            },
        )
}

/// An entry that claims as much as an author can write: too many fields, older than all others, with the others'
/// addresses and those of the agent's servers, and with names of the cluster.
fn hostile_entry() -> impl Strategy<Value = Entry> {
    let ports = prop_oneof![3 => Just(0u16), 1 => 1u16..200];
    let backends = prop_oneof![3 => Just(0u32), 1 => 1u32..200];
    let created = prop_oneof![2 => Just(Some(-1)), 1 => Just(None), 1 => Just(Some(1))];
    let address = || prop_oneof![2 => given(), 1 => address_of_agent()];
    let addresses = prop::collection::vec(address(), 0..3);
    let entry = entry(prop::option::of(address()));
    let relative = prop::sample::subsequence(RELATIVE.split(' ').collect::<Vec<_>>(), 0..=3);
    (entry, ports, backends, created, addresses, relative).prop_map(
        |(mut entry, ports, backends, created, addresses, relative)| {
            entry.created = created;
            entry.hosts.extend(served_hosts(&relative));
            entry.addresses.extend(addresses);
            entry
                .ports
                .extend((1000..1000 + ports).map(|port| entry_port(port, Protocol::Tcp)));
            entry.backends.extend((0..backends).map(|n| Backend {
                hints: Hints::default(),
                at: At::Address(std::net::Ipv4Addr::from_bits(0x0a09_0000 + n).into()),
                ports: SmallVec::new(),
                weight: 1 + n % 7,
                local: n.is_multiple_of(2),
            }));
            entry
        },
    )
}

/// A Service or the host ports of a pod that claim as much as an author can write.
fn hostile() -> impl Strategy<Value = Service> {
    let ports = prop_oneof![3 => Just(0u16), 2 => 1u16..5, 2 => 5u16..250];
    let endpoints = prop_oneof![2 => 0u32..5, 2 => 5u32..120];
    let ranges = prop_oneof![3 => Just(0u8), 1 => 1u8..200];
    let created = prop_oneof![2 => Just(Some(-1)), 1 => Just(None), 1 => Just(Some(1))];
    let more_ips = prop::collection::vec(
        prop_oneof![
            given(),
            address_of_agent(),
            Just("198.51.100.7".parse().unwrap())
        ],
        0..3,
    );
    let of_pod = prop::bool::weighted(0.2);
    // Ports of the agent, and those of its servers.
    let agents = (
        prop::sample::select(vec![RESERVED[0], RESERVED[1], 53, 6443]),
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)],
        any::<bool>(),
    );
    let agents = prop::option::of(agents);
    (
        service(),
        ports,
        endpoints,
        ranges,
        created,
        more_ips,
        (of_pod, agents),
    )
        .prop_map(
            |(mut service, ports, endpoints, ranges, created, more_ips, (of_pod, agents))| {
                service.created = created;
                service.external_ips.extend(more_ips);
                if of_pod {
                    service.kind = ServiceType::HostPort;
                    service.cluster_ips.clear();
                    service.load_balancer_ips.clear();
                    if let Some((.., is_at_node)) = agents {
                        let loopback = (!is_at_node).then_some(IpAddr::from([127, 0, 0, 1]));
                        service.external_ips = loopback.into_iter().collect();
                    }
                    for port in &mut service.ports {
                        port.node_port = None;
                    }
                }
                let endpoint = |n: u32| {
                    let addr = std::net::Ipv4Addr::from_bits(0x0a09_0000 + n);
                    endpoint(addr.into(), 80, n.is_multiple_of(2))
                };
                let port = |port: u16, protocol, node_port| ServicePort {
                    name: port.to_string().into(),
                    node_port,
                    endpoints: (0..endpoints).map(endpoint).collect(),
                    ..ServicePort::new(port, protocol)
                };
                service.ports.extend((1000..1000 + ports).map(|number| {
                    let has_node_port = !of_pod && number.is_multiple_of(3);
                    port(
                        number,
                        Protocol::Tcp,
                        has_node_port.then_some(30_000 + number),
                    )
                }));
                service
                    .ports
                    .extend(agents.map(|(number, protocol, is_at_node)| {
                        port(number, protocol, is_at_node.then_some(number))
                    }));
                let range = |n: u8| format!("198.51.100.{n}/32").parse().unwrap();
                service.source_ranges.extend((0..ranges).map(range));
                service
            },
        )
}

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    fn some<T: std::fmt::Debug>(
        of: usize,
        what: impl Strategy<Value = T>,
    ) -> impl Strategy<Value = Vec<(usize, Option<T>)>> {
        prop::collection::vec((0..of, prop::option::weighted(0.8, what)), 0..4)
    }
    let step = (
        prop::collection::vec(change(), 0..4),
        some(ENTRIES, entry(Just(None))),
        some(4, hostile()),
        some(4, hostile_entry()),
        any::<bool>(),
        prop::bool::weighted(0.2),
    );
    let step = step.prop_map(
        |(others, entries, hostile, hostile_entries, grace, restart)| Step {
            others,
            entries,
            hostile,
            hostile_entries,
            grace,
            restart,
        },
    );
    prop::collection::vec(step, 1..7)
}

/// All external IPs, or those in a range, or none.
pub fn admits() -> impl Strategy<Value = ExternalIps> {
    prop_oneof![
        2 => Just(ExternalIps::Any),
        1 => Just(ExternalIps::Within(vec!["192.0.2.0/24".parse().unwrap()])),
        1 => Just(ExternalIps::Within(Vec::new())),
    ]
}
