//! What entries are served as follows from the last objects, and not from those before.

use std::{collections::HashMap, sync::Arc};

use dataplane_plan::entries::Entries;
use imbl::OrdMap;
use model::{
    At, Backend, EndpointName, Entry, EntryName, EntryPort, EntryResolution, ExportTo, Host,
    Location, Place, Problem, Protocol, Resolved, ServiceType, Snapshot, Workload, WorkloadName,
};
use proptest::prelude::*;

use super::clusters::{self, apply, ips};

const NOW: u64 = 1_800_000_000;

/// Addresses of services, endpoints, Pods and nodes in [`clusters`], and others.
const ADDRESSES: &[&str] = &[
    "198.51.100.7",
    "10.96.0.1",
    "192.0.2.1",
    "192.0.2.2",
    "203.0.113.1",
    "10.0.0.1",
    "10.0.0.2",
    "fd02::1",
    "fd98::7",
];
/// Addresses of endpoints, and names of them: of DNS, of Services that come and go, and of one that never exists.
const ENDPOINTS: &[&str] = &[
    "198.51.100.1",
    "fd00::9",
    "a.example.org",
    "b.example.org",
    "s0.test.svc",
    "s1.other.svc.cluster.local",
    "none.test.svc",
];

#[derive(Clone, Debug)]
enum Change {
    Cluster(clusters::Change),
    Entry(usize, Option<Box<Entry>>),
    /// The addresses of a workload of this node.
    Workload(usize, Vec<std::net::IpAddr>),
    /// The addresses of Pods, and whether they are those of all nodes.
    Pods(Vec<std::net::IpAddr>, bool),
    /// The addresses of a name, and whether it has a problem.
    Name(&'static str, Vec<std::net::IpAddr>, bool),
}

fn entry() -> impl Strategy<Value = Entry> {
    let resolution = prop_oneof![
        1 => Just(EntryResolution::None),
        2 => Just(EntryResolution::Dns),
        2 => Just(EntryResolution::Hosts),
    ];
    (
        prop::sample::subsequence(&["a.example.org", "b.example.org"][..], 1..=2),
        (ips(ADDRESSES, 3), ips(ADDRESSES, 1)),
        resolution,
        prop::sample::subsequence(&[80u16, 443][..], 0..=2),
        prop::sample::subsequence(ENDPOINTS, 0..=3),
    )
        .prop_map(
            |(hosts, (addresses, ranges), resolution, ports, endpoints)| Entry {
                name: EntryName::new("", ""),
                created: None,
                hosts: hosts
                    .into_iter()
                    .map(|host| Host::new(host.into()))
                    .collect(),
                addresses: addresses.into(),
                ranges: ranges.into(),
                wants_vips: false,
                // The names of an entry without ports are not looked up for it.
                resolution: match resolution {
                    EntryResolution::Hosts if ports.is_empty() => EntryResolution::Dns,
                    resolution => resolution,
                },
                location: Location::External,
                export_to: ExportTo::All,
                backends: match resolution {
                    EntryResolution::Dns if !ports.is_empty() => {
                        endpoints.into_iter().map(backend).collect()
                    }
                    _ => Vec::new(),
                },
                ports: ports.into_iter().map(port).collect(),
                preference: [None; 2],
                identities: Box::default(),
            },
        )
}

fn port(port: u16) -> EntryPort {
    EntryPort {
        name: port.to_string().into(),
        port,
        protocol: Protocol::Tcp,
        target: None,
    }
}

fn backend(at: &str) -> Backend {
    let at = at.parse().map_or_else(|_| At::Name(at.into()), At::Address);
    Backend {
        at,
        ..Backend::at([192, 0, 2, 99].into())
    }
}

fn change() -> impl Strategy<Value = Change> {
    let names = prop::sample::select(&["a.example.org", "b.example.org"][..]);
    prop_oneof![
        3 => clusters::change().prop_map(Change::Cluster),
        4 => (0..3usize, prop::option::weighted(0.8, entry()))
            .prop_map(|(index, entry)| Change::Entry(index, entry.map(Box::new))),
        1 => (0..2usize, ips(ADDRESSES, 2)).prop_map(|(index, ips)| Change::Workload(index, ips)),
        1 => (ips(ADDRESSES, 2), any::<bool>()).prop_map(|(ips, all)| Change::Pods(ips, all)),
        2 => (names, ips(&["198.51.100.1", "198.51.100.2"], 2), any::<bool>())
            .prop_map(|(name, ips, fails)| Change::Name(name, ips, fails)),
    ]
}

fn run(stated: bool, resolves: bool, steps: Vec<Vec<Change>>) {
    let entries = |known| {
        let entries = Entries::new([]).with_stated_addresses(stated);
        if resolves {
            entries.with_names(known)
        } else {
            entries
        }
    };
    let mut served = entries(HashMap::new());
    let mut snapshot = Snapshot::default();
    let (mut wanted, mut before) = (Vec::new(), Vec::new());
    let mut last = OrdMap::new();
    for changes in steps {
        for change in changes {
            match change {
                Change::Cluster(change) => apply(&mut snapshot, change),
                Change::Entry(index, entry) => {
                    let name = EntryName::new(["test", "other"][index % 2], &format!("e{index}"));
                    match entry {
                        Some(entry) => {
                            let name = name.clone();
                            let entry = Arc::new(Entry {
                                name: name.clone(),
                                ..*entry
                            });
                            snapshot.entries.insert(name, entry);
                        }
                        None => _ = snapshot.entries.remove(&name),
                    }
                }
                Change::Workload(index, addresses) => {
                    let name = WorkloadName::new("test", &format!("w{index}"));
                    let workload = Workload {
                        addresses: addresses.into_iter().collect(),
                        ..Workload::new(name.clone(), Place::Address)
                    };
                    snapshot.workloads.insert(name, Arc::new(workload));
                }
                Change::Pods(addresses, everywhere) => {
                    snapshot.pods = model::PodAddresses::default();
                    snapshot.pods.add(&addresses);
                    snapshot.pods.everywhere = everywhere;
                }
                // Without a resolver, nobody reports addresses.
                Change::Name(name, addresses, fails) if resolves => {
                    let name = EndpointName {
                        namespace: "test".into(),
                        name: name.into(),
                    };
                    let found = Resolved {
                        addresses: addresses.into(),
                        problem: fails.then(|| "no resolver".into()),
                    };
                    let known = served.known_names().get(&name) == Some(&found);
                    let is_new = wanted.contains(&name) && !known;
                    let learnt = served.learn([(name.clone(), found.clone())]);
                    assert!(learnt || !is_new, "{name} is {found:?}");
                    if is_new {
                        assert_eq!(served.known_names().get(&name), Some(&found));
                    }
                }
                Change::Name(..) => {}
            }
        }
        let node = Arc::make_mut(&mut snapshot.node);
        node.own.clone_from(&node.addresses);
        let take = |entries: &mut Entries| {
            entries.take(&snapshot.entries, &snapshot.services, &snapshot, NOW)
        };
        let found = take(&mut served);
        let mut fresh = entries(served.known_names().clone());
        let alone = take(&mut fresh);
        assert_eq!(found.services, alone.services);
        assert_eq!(found.entries, alone.entries);
        let problems: Vec<Problem> = served.problems().cloned().collect();
        assert_eq!(problems, fresh.problems().cloned().collect::<Vec<_>>());
        assert_eq!(found.other_problems, problems != before);
        before = problems;
        wanted = served.take_wanted_names().unwrap_or(wanted);
        assert_eq!(wanted, fresh.take_wanted_names().unwrap_or_default());
        assert_eq!(served.take_wanted_names(), None);
        assert!(!served.learn([]), "all is served");
        for (name, service) in &found.services {
            let before = last.get(name).filter(|before| **before == *service);
            let is_shared = before.is_none_or(|before| Arc::ptr_eq(before, service));
            assert!(service.kind != ServiceType::Entry || is_shared, "{name}");
        }
        last = found.services;
    }
}

proptest! {
    #[test]
    fn entries_are_served_as_by_an_agent_that_starts_now(
        stated: bool,
        resolves in prop::bool::weighted(0.8),
        steps in prop::collection::vec(prop::collection::vec(change(), 1..4), 1..10),
    ) {
        run(stated, resolves, steps);
    }
}
