//! Which addresses hosts of entries have, step by step.

use model::{
    At, Backend, Endpoint, EntryPort, ExportTo, Hints, Host, Location, Preference, Protocol,
    ServicePort, ServiceType, Weights,
};

use super::{super::vips::Number, *};

const NOW: u64 = 1_800_000_000;

/// An entry with these hosts, `a=192.0.2.1` with an address from a control plane, and with these addresses of its own.
fn entry(name: &str, hosts: &str, addresses: &str) -> Entry {
    let addresses = addresses.split_whitespace().map(|of| of.parse().unwrap());
    let host = |host: &str| {
        let (name, assigned) = host.split_once('=').unwrap_or((host, ""));
        Host {
            assigned: assigned.parse().into_iter().collect(),
            ..Host::new(name.into())
        }
    };
    let addresses: SmallVec<[IpAddr; 1]> = addresses.collect();
    let port = EntryPort {
        name: "tcp".into(),
        port: 80,
        protocol: Protocol::Tcp,
        target: None,
    };
    Entry {
        name: EntryName::new("shop", name),
        created: None,
        hosts: hosts.split_whitespace().map(host).collect(),
        wants_vips: addresses.is_empty(),
        addresses,
        ranges: SmallVec::new(),
        resolution: EntryResolution::Static,
        location: Location::External,
        export_to: ExportTo::All,
        ports: [port].into_iter().collect(),
        preference: [None; 2],
        backends: vec![Backend::at([203, 0, 113, 1].into())],
        identities: Box::default(),
    }
}

fn take(entries: &mut Entries, all: &[Entry], services: &[Service], now: u64) -> Derived {
    let all = all.iter().map(|of| (of.name.clone(), Arc::new(of.clone())));
    let services = services
        .iter()
        .map(|of| (of.name.clone(), Arc::new(of.clone())));
    let (all, services) = (all.collect(), services.collect());
    entries.take(&all, &services, &Snapshot::default(), now)
}

fn says(entries: &Entries) -> Vec<&str> {
    entries.problems().map(|problem| &*problem.text).collect()
}

/// Of hosts that are endpoints themselves, the first one has the entry's addresses; otherwise all hosts have them.
#[test]
fn the_addresses_of_an_entry_are_those_of_its_service() {
    for (resolution, hosts, wanted) in [
        (EntryResolution::Static, "a b", [1, 1]),
        (EntryResolution::Hosts, "a b", [1, 0]),
        (EntryResolution::Hosts, "a=192.0.2.5 b=192.0.2.6", [1, 1]),
    ] {
        let entry = Entry {
            resolution,
            ..entry("e", hosts, "192.0.2.1")
        };
        let served = take(&mut Entries::new([]), &[entry], &[], NOW).entries;
        let hosts = &served[&EntryName::new("shop", "e")].hosts;
        let found = [0, 1].map(|at| hosts[at].vips.len());
        assert_eq!(found, wanted, "{resolution:?}");
    }
}

#[test]
fn a_host_says_why_it_has_no_address() {
    let mut entries = Entries::new([]);
    for address in (1..=u16::MAX)
        .filter_map(Number::new)
        .flat_map(Number::addresses)
    {
        entries.vips.foreign(address, true);
    }
    take(&mut entries, &[entry("e", "a", "")], &[], NOW);
    let wanted = "spec.hosts[0]: a has no address: none of the 65521 addresses is free; it gets one when some time has passed";
    assert_eq!(says(&entries), [wanted]);
}

/// Entries in the order of time: `h` wants the number of the address that a control plane gives to `a` and takes back.
#[test]
fn an_address_that_a_control_plane_takes_back_is_another_hosts_ten_minutes_later() {
    let name = EntryName::new("shop", "h");
    let h = || entry("h", "h", "");
    let alone = take(&mut Entries::new([]), &[h()], &[], NOW).entries;
    let given = alone[&name].hosts[0].given[0];
    let with = format!("a={given}");
    let mut entries = Entries::new([]);
    let mut step = |hosts: &str, others: &[Entry], later: u64| {
        let all = [&[entry("e", hosts, "")], others].concat();
        let mut served = take(&mut entries, &all, &[], NOW + later).entries;
        let e = served.remove(&EntryName::new("shop", "e")).unwrap();
        let others = served.values().map(|of| of.hosts[0].vips.contains(&given));
        (e.hosts[0].former.to_vec(), others.collect::<Vec<_>>())
    };
    // Only a control plane's own ranges are kept.
    assert_eq!(step("a=198.51.100.9", &[], 0), (vec![], vec![]));
    assert_eq!(step("a", &[], 1), (vec![], vec![]));
    for later in [2, 4] {
        assert_eq!(step(&with, &[], later), (vec![], vec![]));
        assert_eq!(step("a", &[], later + 1), (vec![given], vec![]));
    }
    let claims = entry("f", &format!("f={given}"), "");
    assert_eq!(step("a", &[claims], 6), (vec![given], vec![false]));
    assert_eq!(step("a", &[h()], 604), (vec![given], vec![false]));
    assert_eq!(step("a", &[], 605), (vec![], vec![]));
    assert_eq!(step("a", &[h()], 1300), (vec![], vec![true]));
}

/// An address that two Services have is taken until both have given it up.
#[test]
fn an_address_of_two_services_is_taken_while_one_of_them_has_it() {
    let service = |name: &str| Service {
        external_ips: [[192, 0, 2, 1].into()].into_iter().collect(),
        ..Service::new(ServiceName::new("shop", name), ServiceType::ClusterIp)
    };
    let both = [service("a"), service("b")];
    let mut entries = Entries::new([]);
    for (created, services, is_taken) in
        [(1, &both[..], true), (2, &both[..1], true), (3, &[], false)]
    {
        let entry = Entry {
            created: Some(created),
            ..entry("e", "h", "192.0.2.1")
        };
        take(&mut entries, &[entry], services, NOW);
        assert_eq!(says(&entries).len(), usize::from(is_taken), "{created}");
    }
}

/// An endpoint of a Service keeps an entry from its address: whether the operator has stated which addresses are external, whether
/// the Pods of all nodes are known, and whether the address is taken.
#[test]
fn an_endpoints_address_is_taken_unless_it_is_known_to_be_no_pods() {
    for (is_stated, everywhere, is_taken) in [
        (false, true, true),
        (true, false, true),
        (true, true, false),
    ] {
        let mut service = Service::new(ServiceName::new("shop", "a"), ServiceType::ClusterIp);
        service.ports.push(ServicePort {
            endpoints: vec![Endpoint::new([192, 0, 2, 1].into(), 80)],
            ..ServicePort::new(80, Protocol::Tcp)
        });
        let snapshot = Snapshot {
            pods: PodAddresses {
                everywhere,
                ..PodAddresses::default()
            },
            ..Snapshot::default()
        };
        let entry = entry("e", "h", "192.0.2.1");
        let all = [(entry.name.clone(), Arc::new(entry))]
            .into_iter()
            .collect();
        let services = [(service.name.clone(), Arc::new(service))];
        let mut entries = Entries::new([]).with_stated_addresses(is_stated);
        entries.take(&all, &services.into_iter().collect(), &snapshot, NOW);
        assert_eq!(
            says(&entries).len(),
            usize::from(is_taken),
            "{is_stated} {everywhere}"
        );
    }
}

#[test]
fn only_beside_a_control_plane_a_new_host_waits() {
    let all = [entry("e", "a=240.240.0.9", ""), entry("f", "b", "")];
    let mut entries = Entries::new([]);
    take(&mut entries, &all, &[], NOW);
    assert!(!entries.defers());
    let mut entries = Entries::new([]).with_control_plane();
    take(&mut entries, &all, &[], NOW);
    assert!(entries.defers());
}

/// A name with two addresses has the part of one endpoint.
#[test]
fn the_addresses_of_a_name_share_its_part_of_the_connections() {
    let at = |last| IpAddr::from([203, 0, 113, last]);
    let name = EndpointName {
        namespace: "shop".into(),
        name: "db.example.com".into(),
    };
    let resolved = Resolved {
        addresses: [at(2), at(3)].into(),
        problem: None,
    };
    let mut entries = Entries::new([]).with_names([(name, resolved)].into());
    let mut entry = entry("e", "h", "192.0.2.1");
    entry.backends.push(Backend {
        at: At::Name("db.example.com".into()),
        ..Backend::at(at(1))
    });
    let served = take(&mut entries, &[entry], &[], NOW).entries;
    let backends = served.values().flat_map(|of| &of.backends);
    let found: Vec<_> = backends.map(|of| (of.at.clone(), of.weight)).collect();
    let wanted = [(1, 2), (2, 1), (3, 1)].map(|(last, weight)| (At::Address(at(last)), weight));
    assert_eq!(found, wanted);
    assert!(says(&entries).is_empty());
}

#[test]
fn an_entry_is_a_service_with_all_that_it_says() {
    let at = |last| IpAddr::from([203, 0, 113, last]);
    let mut entry = entry("e", "a", "192.0.2.1");
    let given = IpAddr::from([240, 240, 0, 1]);
    entry.hosts[0].given.push(given);
    entry.created = Some(7);
    entry.preference = [Some(Preference::SameNode), Some(Preference::Any)];
    let backend = |last, weight, local| Backend {
        weight,
        local,
        ..Backend::at(at(last))
    };
    let without_port = Backend {
        ports: [("tcp".into(), Backend::NO_PORT)].into_iter().collect(),
        ..backend(3, 1, false)
    };
    entry.backends = vec![backend(1, 1, true), backend(2, 3, false), without_port];
    let endpoint = |last, local| Endpoint {
        local,
        hints: Hints::default().preferring(Preference::SameNode, local),
        ..Endpoint::new(at(last), 80)
    };
    let port = ServicePort {
        name: "tcp".into(),
        endpoints: vec![endpoint(1, true), endpoint(2, false)],
        weights: Weights::of(vec![1, 3]),
        ..ServicePort::new(80, Protocol::Tcp)
    };
    let wanted = Service {
        created: Some(7),
        cluster_ips: [given].into_iter().collect(),
        external_ips: [[192, 0, 2, 1].into()].into_iter().collect(),
        ports: [port].into_iter().collect(),
        ..Service::new(service_name(&entry.name), ServiceType::Entry)
    };
    assert_eq!(services(&entry).collect::<Vec<_>>(), [wanted]);
}
