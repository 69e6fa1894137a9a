//! Isolation of tenants: changes by one tenant do not change the entries of other tenants in the tables or in DNS,
//! except for addresses that the tenant's claims win by rule.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZero,
    sync::{Arc, LazyLock},
    thread,
};

use dataplane_common::{Port, tables::FrontendKey};
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
use smallvec::SmallVec;
use source::{Admitted, ExternalIps};

use super::{
    oracle::{self, Claim},
    properties::{Change, apply, change, ips, service, settle_within},
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
/// addresses.
fn hostile_entry() -> impl Strategy<Value = Entry> {
    let ports = prop_oneof![3 => Just(0u16), 1 => 1u16..200];
    let backends = prop_oneof![3 => Just(0u32), 1 => 1u32..200];
    let created = prop_oneof![2 => Just(Some(-1)), 1 => Just(None), 1 => Just(Some(1))];
    let addresses = prop::collection::vec(given(), 0..3);
    let entry = entry(prop::option::of(given()));
    (entry, ports, backends, created, addresses).prop_map(
        |(mut entry, ports, backends, created, addresses)| {
            entry.created = created;
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
        prop_oneof![given(), Just("198.51.100.7".parse().unwrap())],
        0..3,
    );
    let of_pod = prop::bool::weighted(0.2);
    (
        service(),
        ports,
        endpoints,
        ranges,
        created,
        more_ips,
        of_pod,
    )
        .prop_map(
            |(mut service, ports, endpoints, ranges, created, more_ips, of_pod)| {
                service.created = created;
                service.external_ips.extend(more_ips);
                if of_pod {
                    service.kind = ServiceType::HostPort;
                    service.cluster_ips.clear();
                    service.load_balancer_ips.clear();
                    for port in &mut service.ports {
                        port.node_port = None;
                    }
                }
                let endpoint = |n: u32| Endpoint {
                    addr: std::net::Ipv4Addr::from_bits(0x0a09_0000 + n).into(),
                    port: 80,
                    local: n.is_multiple_of(2),
                    ready: true,
                    serving: true,
                    terminating: false,
                    hints: Hints::default(),
                };
                let port = |port: u16| ServicePort {
                    name: port.to_string().into(),
                    port,
                    protocol: Protocol::Tcp,
                    node_port: (!of_pod && port.is_multiple_of(3)).then_some(30_000 + port),
                    endpoints: (0..endpoints).map(endpoint).collect(),
                    weights: None,
                    split: None,
                };
                service.ports.extend((1000..1000 + ports).map(port));
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

impl Node {
    fn new(admits: &ExternalIps) -> Self {
        Self {
            planner: Planner::new().with_room(ROOM),
            sim: Sim::default(),
            admits: admits.clone(),
            admitted: Admitted::new(admits.clone()),
            joined: Entries::new([]),
            said: Snapshot::default(),
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
            self.admitted = Admitted::new(self.admits.clone());
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
        settle_within(ROOM, &mut self.planner, &mut self.sim, &self.snapshot);
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
