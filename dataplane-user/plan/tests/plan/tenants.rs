//! Isolation of tenants: changes by one tenant do not change the entries of other tenants in the tables or in DNS,
//! except for addresses that the tenant's claims win by rule. With the tenant or without
//! it, the agent's own sockets connect to the same servers, and the same entries decide about the cluster's names without
//! its domain. The tables hold no more for the tenant than its objects' size.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    num::NonZero,
    sync::{Arc, LazyLock},
    thread,
};

use dataplane_common::{
    Port, decide,
    tables::{Frontend, FrontendKey, Kind},
};
use dataplane_plan::{Planner, Room, entries::Entries};
use imbl::OrdMap;
use model::{
    At, Backend, Endpoint, Entry, EntryName, EntryPort, EntryResolution, ExportTo, Hints, Host,
    Location, Names, Protocol, Service, ServiceName, ServicePort, ServiceType, Snapshot,
};
use proptest::{
    prelude::*,
    test_runner::{RngSeed, TestRunner},
};
use serde_json::json;
use smallvec::SmallVec;
use source::{
    Admitted, ExternalIps,
    objects::{self, Findings, Outcome},
};

use super::{
    oracle::{self, Claim},
    properties::{Change, apply, change, ips, reconcile_within, service},
    sim::{Resolved, Sim},
};

const HOSTILE: &str = "evil";

/// Large enough that each of the three namespaces may have as much as the other tenants' two ever want.
const ROOM: Room = Room {
    frontends: 900,
    pools: 600,
    endpoints: 1800,
    sources: 200,
};

/// Number of entries of the other tenants.
const ENTRIES: usize = 4;

/// The time of all steps, in seconds since the epoch: no number becomes free again within a run.
const NOW: u64 = 1_800_000_000;

/// The changes of one step.
#[derive(Clone, Debug)]
struct Step {
    others: Vec<Change>,
    entries: Vec<(usize, Option<Entry>)>,
    hostile: Vec<(usize, Option<Service>)>,
    hostile_entries: Vec<(usize, Option<Entry>)>,
    grace: bool,
    restart: bool,
}

fn entry_name(index: usize) -> EntryName {
    EntryName::new(["test", "other"][index % 2], &format!("x{index}"))
}

/// Hosts of the hostile tenant that are names of the cluster to clients with a search list, or names that resolvers answer
/// themselves.
const RELATIVE: &str = "web wpad localhost *.localhost db.invalid s0.test *.s0.test s1.other.svc *.test *.other *.s0 *.s1 *.svc \
     kubernetes.default *.default.svc kube-dns.kube-system";

/// Destinations of the agent's own sockets: a resolver and the API server, each at a cluster IP and outside.
const OF_AGENT: [(&str, u16, Protocol); 6] = [
    ("10.96.99.10", 53, Protocol::Udp),
    ("10.96.99.10", 53, Protocol::Tcp),
    ("203.0.113.53", 53, Protocol::Udp),
    ("203.0.113.53", 53, Protocol::Tcp),
    ("10.96.99.1", 443, Protocol::Tcp),
    ("203.0.113.6", 6443, Protocol::Tcp),
];

/// Ports that the agent listens on.
const RESERVED: [u16; 2] = [15021, 10256];

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
fn of_cluster() -> [Service; 2] {
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
        addr,
        port,
        local,
        ready: true,
        serving: true,
        terminating: false,
        hints: Hints::default(),
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
                    port,
                    protocol,
                    node_port,
                    endpoints: (0..endpoints).map(endpoint).collect(),
                    weights: None,
                    split: None,
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

fn steps() -> impl Strategy<Value = Vec<Step>> {
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
fn admits() -> impl Strategy<Value = ExternalIps> {
    prop_oneof![
        2 => Just(ExternalIps::Any),
        1 => Just(ExternalIps::Within(vec!["192.0.2.0/24".parse().unwrap()])),
        1 => Just(ExternalIps::Within(Vec::new())),
    ]
}

/// A node: its planner, its tables, and their wanted contents.
struct Node {
    planner: Planner,
    sim: Sim,
    admits: ExternalIps,
    admitted: Admitted,
    joined: Entries,
    /// The objects of the source.
    said: Snapshot,
    /// The snapshot that is served.
    snapshot: Snapshot,
}

fn admitted(admits: &ExternalIps) -> Admitted {
    Admitted::new(admits.clone()).with_reserved_ports(RESERVED.to_vec())
}

impl Node {
    fn new(admits: &ExternalIps) -> Self {
        let of_cluster = of_cluster().map(|service| (service.name.clone(), Arc::new(service)));
        Self {
            planner: Planner::new().with_room(ROOM),
            sim: Sim::default(),
            admits: admits.clone(),
            admitted: admitted(admits),
            joined: Entries::new([]),
            said: Snapshot {
                services: of_cluster.into_iter().collect(),
                ..Snapshot::default()
            },
            snapshot: Snapshot::default(),
        }
    }

    fn put(&mut self, name: EntryName, entry: Option<&Entry>) {
        match entry {
            Some(entry) => {
                let entry = Entry {
                    name: name.clone(),
                    ..entry.clone()
                };
                self.said.entries.insert(name, Arc::new(entry));
            }
            None => _ = self.said.entries.remove(&name),
        }
    }

    fn take(&mut self, step: &Step) {
        if step.restart {
            self.sim.grace();
            let adopted = Planner::adopt(self.sim.contents()).expect("consistent tables");
            self.planner = adopted.with_room(ROOM);
            self.joined = Entries::new(self.joined.records());
            self.admitted = admitted(&self.admits);
        }
        let node = Arc::make_mut(&mut self.said.node);
        node.own.clone_from(&node.addresses);
        let (services, _) = self.admitted.take(&self.said.services, &self.said.node);
        let (entries, _) = self.admitted.take_entries(&self.said.entries);
        let taken = self.joined.take(&entries, &services, &self.said, NOW);
        self.snapshot = Snapshot {
            services: taken.services,
            entries: taken.entries,
            ..self.said.clone()
        };
        reconcile_within(ROOM, &mut self.planner, &mut self.sim, &self.snapshot);
        if step.grace {
            self.sim.grace();
            self.planner.grace_passed();
        }
    }

    /// Returns the addresses assigned to hosts. Another node may have assigned others.
    fn given(&self) -> BTreeSet<IpAddr> {
        let services = self.snapshot.services.values();
        let entries = services.filter(|service| service.kind == ServiceType::Entry);
        entries
            .flat_map(|entry| entry.cluster_ips.clone())
            .collect()
    }

    /// Returns the answers of the ports of the other tenants' hosts, at their assigned addresses.
    fn hosts(&self) -> BTreeMap<(EntryName, Arc<str>, bool, u16), Option<Resolved>> {
        let mut found = BTreeMap::new();
        for entry in self.snapshot.entries.values() {
            if entry.name.namespace() == HOSTILE || entry.resolution == EntryResolution::None {
                continue;
            }
            let mine = entry.addresses.iter().collect::<BTreeSet<_>>();
            for host in &entry.hosts {
                for vip in host.vips.iter().filter(|vip| !mine.contains(vip)) {
                    for port in &entry.ports {
                        let protocol = oracle::protocol(port.protocol);
                        let key = FrontendKey::new((*vip).into(), Port::new(port.port), protocol);
                        let now = self.sim.keys.get(&key);
                        let name = (
                            entry.name.clone(),
                            Arc::clone(&host.name),
                            vip.is_ipv4(),
                            port.port,
                        );
                        found.insert(name, now.map(|frontend| self.sim.resolve(*frontend)));
                    }
                }
            }
        }
        found
    }

    /// Returns the DNS answers for the other tenants' services.
    fn names(&self) -> (Vec<Arc<Service>>, Vec<BTreeSet<ServiceName>>) {
        let names = Names::of(&self.snapshot);
        let others = (self.said.services.keys()).filter(|name| name.namespace() != HOSTILE);
        let found: Vec<_> = others
            .filter_map(|name| names.service(name.namespace(), name.name()).cloned())
            .collect();
        let addresses = found.iter().flat_map(|service| service.cluster_ips.clone());
        let pointers = addresses.map(|addr| {
            let services = names.of_address(addr).map(|service| service.name.clone());
            services
                .filter(|name| name.namespace() != HOSTILE)
                .collect()
        });
        let pointers = pointers.collect();
        (found, pointers)
    }

    /// Returns the entries that decide about names by which a client with a search list also asks for the other tenants'
    /// services, and about names that resolvers answer themselves: by the client's namespace and the name.
    fn short_names(&self) -> BTreeMap<(&'static str, String), Option<EntryName>> {
        let names = Names::of(&self.snapshot);
        let mut asked = BTreeSet::new();
        for client in ["test", "other", "third"] {
            asked.extend(
                ["web", "wpad", "localhost", "db.localhost", "db.invalid"]
                    .map(|name| (client, name.to_owned())),
            );
            for service in self.said.services.keys() {
                let (name, of) = (service.name(), service.namespace());
                if of == HOSTILE {
                    continue;
                }
                let own = (of == client).then(|| name.to_owned());
                let others = [format!("{name}.{of}"), format!("{name}.{of}.svc")];
                for form in others.into_iter().chain(own) {
                    asked.insert((client, format!("pod.{form}")));
                    asked.insert((client, form));
                }
            }
        }
        let decided = asked.into_iter().map(|(client, name)| {
            let found = names.host(&name, client, None);
            let found = found.map(|(entry, _)| entry.name.clone());
            ((client, name), found)
        });
        decided.collect()
    }

    fn find(&self, addr: IpAddr, port: u16, protocol: Protocol) -> Frontend {
        let (port, protocol) = (Port::new(port), oracle::protocol(protocol));
        decide::find_frontend(&self.sim, addr.into(), port, protocol, true)
    }

    /// Returns the endpoints to which the agent's own sockets connect; `None`: they connect to the destination itself. The
    /// programs translate cluster IPs for these sockets, and no other VIPs.
    fn of_agent(&self) -> [Option<Resolved>; OF_AGENT.len()] {
        OF_AGENT.map(|(addr, port, protocol)| {
            let frontend = self.find(addr.parse().unwrap(), port, protocol);
            (frontend.kind() == Kind::CLUSTER_IP).then(|| self.sim.resolve(frontend))
        })
    }

    /// Asserts that no service has a port that the agent listens on, at an address of the node. Cluster IPs do not count,
    /// because the API server assigns none that a node has.
    fn assert_agents_ports_are_free(&self) {
        let own = self.snapshot.node.own.iter().copied();
        for addr in own.chain([IpAddr::from([127, 0, 0, 1])]) {
            for (port, protocol) in RESERVED
                .into_iter()
                .flat_map(|port| [(port, Protocol::Tcp), (port, Protocol::Udp)])
            {
                let found = self.find(addr, port, protocol);
                let is_of_cluster =
                    [Kind::CLUSTER_IP, Kind::CLUSTER_ADDRESS].contains(&found.kind());
                assert!(
                    found.is_none() || is_of_cluster,
                    "{addr}, {port}: {found:?}"
                );
            }
        }
    }

    /// Returns the pools of each service, and the endpoints in them.
    fn sizes(&self) -> BTreeMap<ServiceName, [usize; 2]> {
        let mut sizes = BTreeMap::<_, [usize; 2]>::new();
        for (index, owner) in self.planner.served().pools_after(0) {
            let size = sizes.entry(owner.service.clone()).or_default();
            size[0] += 1;
            size[1] += self.planner.pool(index).map_or(0, |(_, pool)| pool.len());
        }
        sizes
    }

    /// Asserts that the tables hold no more for the hostile tenant than its objects' size: a key for each port at each
    /// address, a pool for each port, family and policy, and in the pools the endpoints by their weights.
    fn assert_bounded(&self) {
        /// Addresses of an entry's hosts: of each family, for each of five hosts, now and in each step before.
        const OF_HOSTS: usize = 2 * 5 * 10;

        if self.planner.is_waiting() {
            return; // An earlier state of an object is served.
        }
        let mut bounds = [0; 3];
        let mut add = |keys, pools, endpoints| {
            for (bound, more) in bounds.iter_mut().zip([keys, pools, endpoints]) {
                *bound += more;
            }
        };
        for service in self.said.services.values() {
            if service.name.namespace() == HOSTILE {
                let (ports, own) = (service.ports.len(), service.cluster_ips.len());
                let more = service.external_ips.len() + service.load_balancer_ips.len();
                let endpoints = service.ports.iter().map(|port| port.endpoints.len());
                let node_ports = 2;
                let keys = ports * (own + more + node_ports) + own;
                add(keys, 4 * ports + 1, 2 * endpoints.sum::<usize>());
            }
        }
        for entry in self.said.entries.values() {
            if entry.name.namespace() == HOSTILE {
                let (ports, addresses) = (entry.ports.len(), entry.addresses.len() + OF_HOSTS);
                let places = entry.backends.iter().map(|backend| backend.weight as usize);
                add(
                    (ports + 1) * addresses,
                    2 * ports + 1,
                    ports * places.sum::<usize>(),
                );
            }
        }
        let is_hostile = |frontend: &&Frontend| {
            let owner = self.planner.pool_owner(frontend.pool());
            owner.is_some_and(|owner| owner.service.namespace() == HOSTILE)
        };
        let mut taken = [self.sim.keys.values().filter(is_hostile).count(), 0, 0];
        for (name, [pools, endpoints]) in self.sizes() {
            if name.namespace() == HOSTILE {
                taken[1] += pools;
                taken[2] += endpoints;
            }
        }
        let is_within = taken
            .iter()
            .zip(&bounds)
            .all(|(taken, bound)| taken <= bound);
        assert!(is_within, "{taken:?} of {bounds:?}");
    }
}

fn run(admits: &ExternalIps, steps: Vec<Step>) {
    let (mut alone, mut beside) = (Node::new(admits), Node::new(admits));
    for step in steps {
        for node in [&mut alone, &mut beside] {
            for change in &step.others {
                apply(&mut node.said, change.clone());
            }
            for (index, entry) in &step.entries {
                node.put(entry_name(*index), entry.as_ref());
            }
        }
        for (index, service) in &step.hostile {
            let name = ServiceName::new(HOSTILE, &format!("e{index}"));
            match service {
                Some(service) => {
                    let mut service = service.clone();
                    service.name = name.clone();
                    beside.said.services.insert(name, Arc::new(service));
                }
                None => _ = beside.said.services.remove(&name),
            }
        }
        for (index, entry) in &step.hostile_entries {
            let name = EntryName::new(HOSTILE, &format!("x{index}"));
            beside.put(name, entry.as_ref());
        }
        alone.take(&step);
        beside.take(&step);
        assert!(alone.planner.left_out().is_empty(), "there is room for all");
        let given = &alone.given() | &beside.given();
        let claimed = oracle::claims(&beside.snapshot);
        let owner = |key: &FrontendKey| claimed.get(key)?.service();
        // An entry cannot have an address that a Service or an endpoint of a Service has, on any port.
        let services = beside.snapshot.services.values();
        let hostile = services.filter(|service| {
            service.name.namespace() == HOSTILE && service.kind != ServiceType::Entry
        });
        let mut taken = BTreeSet::new();
        for service in hostile {
            let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
            taken.extend(endpoints.map(|endpoint| endpoint.addr));
            let own = service.cluster_ips.iter().chain(&service.external_ips);
            taken.extend(own.chain(&service.load_balancer_ips));
        }
        let without = oracle::claims(&alone.snapshot);
        let of_entry = |key: &FrontendKey| {
            let owner = without.get(key).and_then(Claim::service);
            owner.is_some_and(|owner| owner.name().starts_with("serviceentry:"))
        };
        let by_rule = |key: &FrontendKey| {
            owner(key).is_some_and(|owner| owner.namespace() == HOSTILE)
                || (taken.contains(&key.addr.ip()) && of_entry(key))
        };
        let of_others = |node: &Node| {
            let mut resolved = node.sim.resolved();
            resolved.retain(|key, _| !by_rule(key) && !given.contains(&key.addr.ip()));
            resolved
        };
        assert_eq!(of_others(&beside), of_others(&alone));
        let hosts = |node: &Node| {
            let mut hosts = node.hosts();
            // A host has no answer if a Service's field or an older entry claims its address.
            hosts.retain(|_, resolved| resolved.is_some());
            hosts
        };
        let (mut with, mut alone_has) = (hosts(&beside), hosts(&alone));
        let lost: Vec<_> = beside
            .snapshot
            .entries
            .values()
            .flat_map(|entry| {
                let vips = entry.hosts.iter().flat_map(|host| {
                    let name = Arc::clone(&host.name);
                    host.vips.iter().map(move |vip| (Arc::clone(&name), *vip))
                });
                let name = entry.name.clone();
                let ports = entry.ports.clone();
                vips.flat_map(move |(host, vip)| {
                    let name = name.clone();
                    ports.clone().into_iter().map(move |port| {
                        let protocol = oracle::protocol(port.protocol);
                        let key = FrontendKey::new(vip.into(), Port::new(port.port), protocol);
                        (
                            key,
                            (name.clone(), Arc::clone(&host), vip.is_ipv4(), port.port),
                        )
                    })
                })
            })
            .filter(|(key, _)| owner(key).is_some_and(|owner| owner.namespace() == HOSTILE))
            .collect();
        for (_, name) in lost {
            with.remove(&name);
            alone_has.remove(&name);
        }
        assert_eq!(with, alone_has);
        assert_eq!(beside.names(), alone.names());
        assert_eq!(beside.short_names(), alone.short_names());
        assert_eq!(beside.of_agent(), alone.of_agent());
        beside.assert_agents_ports_are_free();
        beside.assert_bounded();
        let sizes = alone.sizes();
        for (name, [pools, endpoints]) in beside.sizes() {
            // Without a key that the tenant has won, a service may have fewer.
            let is_entry = name.name().starts_with("serviceentry:");
            if name.namespace() != HOSTILE && !is_entry {
                let [most_pools, most_endpoints] = sizes.get(&name).copied().unwrap_or_default();
                let is_same = pools <= most_pools && endpoints <= most_endpoints;
                assert!(is_same, "{name} has grown");
            }
        }
        for (name, left) in beside.planner.left_out() {
            assert_eq!(name.namespace(), HOSTILE, "{left:?}");
        }
    }
}

/// Number of runs (`DATAPLANE_TENANT_RUNS`).
fn runs() -> u32 {
    let given = std::env::var("DATAPLANE_TENANT_RUNS");
    given.map_or(500, |given| {
        given.parse().expect("DATAPLANE_TENANT_RUNS: a number")
    })
}

/// The runs are shared among as many threads as there are processors.
#[test]
fn a_tenant_changes_nothing_of_others() {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = u32::try_from(threads).expect("so many processors");
    let cases = runs().div_ceil(threads);
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut config = ProptestConfig {
                    cases,
                    source_file: Some(file!()),
                    ..ProptestConfig::default()
                };
                // With one seed, all threads would draw the same cases.
                if let RngSeed::Fixed(seed) = config.rng_seed {
                    config.rng_seed = RngSeed::Fixed(seed.wrapping_add(thread.into()));
                }
                let mut runner = TestRunner::new(config);
                let ended = runner.run(&(admits(), steps()), |(admits, steps)| {
                    run(&admits, steps);
                    Ok(())
                });
                if let Err(error) = ended {
                    panic!("{error}\n{runner}");
                }
            });
        }
    });
}
