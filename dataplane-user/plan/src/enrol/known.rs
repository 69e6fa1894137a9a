//! The destinations that workloads with `egress: deny` may reach, and those that speak HBONE, and their share of table
//! `KNOWN`. An entry that is left out never opens a destination, and never makes a connection plaintext.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    sync::Arc,
};

use dataplane_common::{
    Port, Protocol,
    capture::{self, CAPTURED, EXCLUDED, Enrolled, HBONE, LISTED, REACHABLE, SHARED, WAYPOINT},
    tables::FrontendKey,
};
use ipnet::{IpNet, Ipv4Net};
use model::{Egress, Reachable, Service, ServiceName, Snapshot, Workload};

use super::{
    super::{
        Captured, range_key,
        shares::{self, Shares},
        wanted::protocol,
    },
    Member,
    budgets::part,
};

/// The destinations that `KNOWN` has no room for.
#[derive(Debug, Default)]
pub struct Unlisted {
    /// The services and pods that workloads with `egress: deny` cannot reach because their namespaces have too many endpoints.
    pub endpoints: Vec<ServiceName>,
    /// The workloads that speak HBONE have too many addresses, so all connections of workloads with identities go to the proxy.
    pub hbone: bool,
}

/// Adds the destinations that a workload with `egress: deny` may reach, the addresses of workloads that speak HBONE, and the
/// addresses that get a label.
pub fn known(snapshot: &Snapshot, members: &[Member], wanted: &mut Captured) -> Unlisted {
    let room = part(capture::KNOWN);
    let hbone = !add_hbone(snapshot, wanted, room);
    let endpoints = known_within(snapshot, members, wanted, room);
    Unlisted { endpoints, hbone }
}

/// Adds the addresses of workloads that speak HBONE or have a waypoint, if entries of workloads need them: a connection to such
/// an address must not go direct. They may take half of `room`. Returns false if they do not fit.
fn add_hbone(snapshot: &Snapshot, wanted: &mut Captured, room: u64) -> bool {
    let in_namespaces = wanted.namespaces.values_mut().map(|entry| &mut entry.flags);
    let by_packets = wanted.locals.values_mut().map(|local| &mut local.flags);
    let flags = in_namespaces.chain(by_packets);
    let encrypting: Vec<_> = flags
        .filter(|flags| **flags & Enrolled::ENCRYPTS != 0)
        .collect();
    if encrypting.is_empty() {
        return true;
    }
    let keys_of = |of: &Arc<Workload>| {
        let addresses = of.addresses.iter();
        let keys = addresses.map(|addr| FrontendKey::address((*addr).into()));
        keys.collect::<Vec<_>>()
    };
    let mut values: BTreeMap<FrontendKey, u32> = BTreeMap::new();
    for workload in snapshot.workloads.values() {
        let value = match snapshot.istio.waypoint_of_workload(workload) {
            Some(_) => LISTED | HBONE | WAYPOINT,
            None if workload.speaks_hbone => LISTED | HBONE,
            None => continue,
        };
        for key in keys_of(workload) {
            *values.entry(key).or_default() |= value;
        }
    }
    let mut seen = BTreeSet::new();
    for key in snapshot.workloads.values().flat_map(keys_of) {
        if let Some(value) = values.get_mut(&key)
            && !seen.insert(key)
        {
            *value |= SHARED;
        }
    }
    let room = room / 2;
    let has_room = values.len() as u64 <= room;
    if !has_room {
        for flags in encrypting {
            *flags &= !(Enrolled::ONLY_HBONE | Enrolled::FAIL_OPEN);
        }
    }
    // Those that fit stay also without room for all: they are removed only after the flags have changed.
    let fitting = values.into_iter().zip(0..room);
    wanted.known.extend(fitting.map(|(entry, _)| entry));
    has_room
}

/// As [`known`], with `room` entries in `KNOWN`.
fn known_within(
    snapshot: &Snapshot,
    members: &[Member],
    wanted: &mut Captured,
    room: u64,
) -> Vec<ServiceName> {
    let workloads = snapshot.workloads.values().map(|w| &w.addresses);
    let named = members.iter().map(|member| &member.workload.addresses);
    // Addresses of the configured workloads come first.
    for addr in named.chain(workloads).flatten() {
        // Labels may fill half of the table.
        if wanted.known.len() as u64 >= room / 2 {
            break;
        }
        let key = FrontendKey::address((*addr).into());
        wanted.known.entry(key).or_insert(LISTED);
    }
    if members.iter().all(|m| m.policy.egress != Egress::Deny) {
        return Vec::new();
    }
    if let Some(stated) = &snapshot.reachable {
        state(stated, wanted);
    }
    let workloads = snapshot.workloads.values();
    let pods: HashSet<IpAddr> = workloads
        .flat_map(|w| w.addresses.iter().copied())
        .collect();
    let mut items: Vec<_> = snapshot
        .services
        .values()
        .map(|service| Item::of_service(service, &pods))
        .chain(snapshot.workloads.values().map(|w| Item::of_pod(w)))
        .filter(|item| !item.keys.is_empty())
        .collect();
    let mut all: BTreeSet<FrontendKey> = BTreeSet::new();
    let room = room.saturating_sub(wanted.known.len() as u64);
    let fits = items.iter().all(|item| {
        all.extend(&item.keys);
        all.len() as u64 <= room
    });
    if fits {
        wanted
            .known
            .extend(all.into_iter().map(|key| (key, LISTED)));
        return Vec::new();
    }
    let mut shares = Shares::of([room]);
    for item in &items {
        shares.change(item.name.namespace(), &[0], &item.cost());
    }
    shares.divide();
    items.sort_by(|a, b| a.name.namespace().cmp(b.name.namespace()));
    let mut left_out = Vec::new();
    for items in items.chunk_by_mut(|a, b| a.name.namespace() == b.name.namespace()) {
        items.sort_by_cached_key(|item| {
            let age = (item.created.is_none(), item.created);
            (
                Reverse(shares.smallness(&item.cost())),
                age,
                item.name.clone(),
            )
        });
        let mut left = shares.budget();
        for item in items {
            if shares::take(&item.cost(), &mut left) {
                wanted
                    .known
                    .extend(item.keys.iter().map(|key| (*key, LISTED)));
            } else {
                left_out.push(item.name.clone());
            }
        }
    }
    left_out
}

/// The entries of a service or a pod in `KNOWN`.
struct Item {
    name: ServiceName,
    created: Option<i64>,
    keys: BTreeSet<FrontendKey>,
}

impl Item {
    /// Returns the Service's own endpoints at addresses of Pods.
    fn of_service(service: &Service, pods: &HashSet<IpAddr>) -> Self {
        let own = service.own_endpoints();
        let of_pods = own.filter(|(_, endpoint)| pods.contains(&endpoint.addr));
        let endpoints =
            of_pods.map(|(of, e)| FrontendKey::new(e.addr.into(), Port::new(e.port), protocol(of)));
        Self {
            name: service.name.clone(),
            created: service.created,
            keys: endpoints.collect(),
        }
    }

    /// Returns the ports that a pod declares.
    fn of_pod(pod: &Workload) -> Self {
        let keys = pod.addresses.iter().flat_map(|addr| {
            let ports = pod.ports.iter();
            ports
                .map(|(of, port)| FrontendKey::new((*addr).into(), Port::new(*port), protocol(*of)))
        });
        Self {
            name: ServiceName::new(pod.name.namespace(), pod.name.name()),
            created: None,
            keys: keys.collect(),
        }
    }

    fn cost(&self) -> [u64; 1] {
        [self.keys.len() as u64]
    }
}

/// Adds the ranges that the operator has stated.
fn state(stated: &Reachable, wanted: &mut Captured) {
    let is_v6 = |range: &IpNet| range.addr().is_ipv6();
    if stated.ranges.iter().any(is_v6) {
        // The table holds IPv4 as v4-mapped IPv6. Ranges of IPv6 such as ::/0 must not match those addresses.
        let all = IpNet::V4(Ipv4Net::default());
        wanted.ranges.insert(range_key(REACHABLE, &all), EXCLUDED);
    }
    let ranges = stated.ranges.iter();
    let ranges = ranges.map(|range| (range_key(REACHABLE, range), CAPTURED));
    wanted.ranges.extend(ranges);
    for server in stated.servers() {
        for protocol in [Protocol::TCP, Protocol::UDP] {
            let port = Port::new(server.port());
            let key = FrontendKey::new(server.ip().into(), port, protocol);
            wanted.known.insert(key, LISTED);
        }
    }
}

#[cfg(test)]
mod tests {
    use model::{
        Endpoint, Part, Place, Protocol, ServicePort, ServiceType, Split, UseWaypoint, WorkloadName,
    };

    use super::*;
    use crate::enrol::{
        MeshStatements,
        budgets::tests::{pod, snapshot},
        members,
    };

    /// Each line has the flags of a workload, the room, and then its flags and the values of three addresses: a Pod that speaks
    /// HBONE, or has a waypoint, has the first one, another Pod the second one, and two Pods have the third one, of which one
    /// speaks HBONE.
    #[test]
    fn addresses_that_speak_hbone_are_all_there_or_everything_goes_to_the_proxy() {
        let (encrypts, pass) = (Enrolled::ENCRYPTS, Enrolled::FAIL_OPEN);
        let only = encrypts | Enrolled::ONLY_HBONE | pass;
        let (speaks, gated) = (LISTED | HBONE, LISTED | HBONE | WAYPOINT);
        let shared = speaks | SHARED;
        for (flags, room, has_waypoint, wanted, values) in [
            (only, 4, false, only, [speaks, LISTED, shared]),
            (only, 3, false, encrypts, [speaks, LISTED, LISTED]),
            (only, 0, false, encrypts, [LISTED; 3]),
            (only, 4, true, only, [gated, LISTED, shared]),
            (only, 0, true, encrypts, [LISTED; 3]),
            (encrypts, 4, false, encrypts, [speaks, LISTED, shared]),
            (pass, 0, false, pass, [LISTED; 3]),
        ] {
            let pods = [pod("shop", "a", 1), pod("shop", "b", 1)];
            let mut snapshot = snapshot(pods);
            snapshot.istio.waypoints = true;
            let gate = || UseWaypoint::Gateway(ServiceName::new("other", "gate"));
            for (number, addr) in (1..).zip([1, 2, 3, 3]) {
                let name = WorkloadName::new("other", &format!("w{number}"));
                let addr = format!("10.0.0.{addr}");
                let is_gated = number == 1 && has_waypoint;
                let pod = Workload {
                    addresses: [addr.parse().unwrap()].into_iter().collect(),
                    speaks_hbone: number % 2 == 1 && !is_gated,
                    waypoint: is_gated.then(gate),
                    ..Workload::new(name.clone(), Place::Elsewhere)
                };
                snapshot.workloads.insert(name, Arc::new(pod));
            }
            let entry = Enrolled {
                flags,
                ..Enrolled::default()
            };
            let mut tables = Captured::default();
            tables.namespaces.insert(7, entry);
            let fits = add_hbone(&snapshot, &mut tables, room);
            assert_eq!(fits, wanted == flags || flags == pass);
            known_within(&snapshot, &[], &mut tables, 1000);
            assert_eq!(tables.namespaces[&7].flags, wanted);
            let value = |addr: &str| {
                let addr: IpAddr = addr.parse().unwrap();
                tables.known[&FrontendKey::address(addr.into())]
            };
            assert_eq!(["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(value), values);
        }
    }

    #[test]
    fn a_namespace_with_too_many_endpoints_is_unknown_and_the_others_are_known() {
        let service = |namespace: &str, name: &str, first: u32, count: u32| {
            let endpoints = (first..first + count)
                .map(|n| Endpoint::new(std::net::Ipv4Addr::from_bits(n).into(), 80));
            let port = ServicePort {
                endpoints: endpoints.collect(),
                ..ServicePort::new(80, Protocol::Tcp)
            };
            Arc::new(Service {
                ports: [port].into_iter().collect(),
                ..Service::new(ServiceName::new(namespace, name), ServiceType::ClusterIp)
            })
        };
        let mut snapshot = snapshot([pod("shop", "web", 1)]);
        // More than one namespace may have, but less than the table holds: labels fill the other half.
        let huge = 450;
        for service in [
            service("hog", "a", 0x0b00_0000, huge),
            service("hog", "b", 0x0c00_0000, 10),
            service("shop", "db", 0x0a00_0000, 100),
        ] {
            snapshot.services.insert(service.name.clone(), service);
        }
        let members = members(&MeshStatements::default(), &snapshot);
        let mut wanted = Captured::default();
        // No endpoint has the address of a Pod.
        known_within(&snapshot, &members, &mut wanted, 1000);
        assert_eq!(wanted.known.len(), 0);
        let pods = [(0x0a00_0000, 100), (0x0b00_0000, huge), (0x0c00_0000, 10)];
        for (first, count) in pods {
            for n in first..first + count {
                let addr: IpAddr = std::net::Ipv4Addr::from_bits(n).into();
                let name = WorkloadName::new("pods", &n.to_string());
                let pod = Workload {
                    addresses: [addr].into_iter().collect(),
                    ..Workload::new(name.clone(), Place::Elsewhere)
                };
                snapshot.workloads.insert(name, Arc::new(pod));
            }
        }
        // A ServiceEntry does not open a port of a Pod.
        let mut entry = service("shop", "entry", 0x0a00_0000, 100);
        let opened = Arc::make_mut(&mut entry);
        opened.kind = ServiceType::Entry;
        for endpoint in &mut opened.ports[0].endpoints {
            endpoint.port = 81;
        }
        // A route to a Pod does not open it either. The Service's own endpoints stay reachable.
        let mut routed = service("shop", "routed", 0x0a00_0000, 100);
        let mut own = service("shop", "routed", 0x0a00_0000, 1);
        Arc::make_mut(&mut own).ports[0].endpoints[0].port = 82;
        let split = Arc::make_mut(&mut routed);
        split.ports[0]
            .endpoints
            .clone_from(&entry.ports[0].endpoints);
        split.ports[0].split = Some(Arc::new(Split {
            by: "TCPRoute shop/r".into(),
            own,
            parts: vec![Part {
                weight: 1,
                backend: Some((Arc::clone(&entry), 0)),
            }],
        }));
        for service in [entry, routed] {
            snapshot.services.insert(service.name.clone(), service);
        }
        let left_out = known_within(&snapshot, &members, &mut wanted, 1000);
        assert_eq!(left_out, [ServiceName::new("hog", "a")]);
        assert!(wanted.known.len() <= 1000);
        let is_known = |ip: [u8; 4]| {
            let (addr, port) = (IpAddr::from(ip).into(), Port::new(80));
            let key = |port| FrontendKey::new(addr, port, dataplane_common::Protocol::TCP);
            assert!(!wanted.known.contains_key(&key(Port::new(81))));
            wanted.known.contains_key(&key(port))
        };
        let own = IpAddr::from([10, 0, 0, 0]).into();
        let own = FrontendKey::new(own, Port::new(82), dataplane_common::Protocol::TCP);
        assert!(wanted.known.contains_key(&own));
        assert!(is_known([10, 0, 0, 99]) && is_known([12, 0, 0, 9]) && !is_known([11, 0, 0, 0]));
    }
    /// The ranges that the operator has stated, and their entries. A range of IPv6 does not hold for IPv4.
    #[test]
    fn what_the_operator_has_stated_is_reachable() {
        let mut denied = snapshot([pod("shop", "web", 1)]);
        let members = members(&MeshStatements::default(), &denied);
        for (ranges, wanted) in [
            (&["10.0.0.0/8"][..], &[("10.0.0.0/8", CAPTURED)][..]),
            (
                &["10.0.0.0/8", "::/0"],
                &[
                    ("0.0.0.0/0", EXCLUDED),
                    ("10.0.0.0/8", CAPTURED),
                    ("::/0", CAPTURED),
                ],
            ),
        ] {
            denied.reachable = Some(Arc::new(Reachable {
                ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
                resolvers: vec!["192.0.2.53".parse().unwrap()],
            }));
            let mut tables = Captured::default();
            let unlisted = known(&denied, &members, &mut tables);
            assert!(!unlisted.hbone && unlisted.endpoints.is_empty());
            let key = |(range, said): &(&str, u32)| {
                (range_key(REACHABLE, &range.parse().unwrap()), *said)
            };
            assert_eq!(tables.ranges, wanted.iter().map(key).collect());
            let resolver: IpAddr = [192, 0, 2, 53].into();
            let resolver = |of| FrontendKey::new(resolver.into(), Port::new(53), of);
            let both = [
                dataplane_common::Protocol::TCP,
                dataplane_common::Protocol::UDP,
            ];
            assert_eq!(tables.known, both.map(|of| (resolver(of), LISTED)).into());
            // Without a workload that is denied egress, nobody asks.
            let mut tables = Captured::default();
            known(&denied, &[], &mut tables);
            assert!(tables.ranges.is_empty() && tables.known.is_empty());
        }
    }

    /// Addresses that get a label fill half of the table, those of the configured workloads first.
    #[test]
    fn labels_fill_half_of_the_table() {
        let at = |name: &str, addr: u8, rules| Workload {
            addresses: [[10, 0, 0, addr].into()].into_iter().collect(),
            rules,
            ..Workload::new(WorkloadName::new("shop", name), Place::Address)
        };
        let captured = Arc::clone(&pod("shop", "z", 1).rules);
        let others = (1..=5).map(|n| at(&format!("w{n}"), n, Arc::default()));
        let all = snapshot(others.chain([at("z", 9, captured)]));
        let members = members(&MeshStatements::default(), &all);
        let mut tables = Captured::default();
        known_within(&all, &members, &mut tables, 6);
        let known = tables
            .known
            .into_iter()
            .map(|(key, said)| (key.addr.ip().to_string(), said));
        let wanted = ["10.0.0.1", "10.0.0.2", "10.0.0.9"];
        assert_eq!(
            known.collect::<Vec<_>>(),
            wanted.map(|addr| (addr.to_owned(), LISTED))
        );
    }

    /// Of services of one namespace that do not all fit, the smaller ones are reachable, then the older ones, then the first by
    /// name.
    #[test]
    fn of_a_namespace_the_largest_services_are_not_reachable_then_the_younger() {
        let mut all = snapshot([pod("shop", "web", 0)]);
        let endpoints = |first: u8, count: u8| -> Vec<Endpoint> {
            let addrs = (first..first + count).map(|n| IpAddr::from([10, 0, 0, n]));
            addrs.map(|addr| Endpoint::new(addr, 80)).collect()
        };
        for (n, (name, created, count)) in (0..).zip([
            ("a-large", Some(1), 9),
            ("a-young", Some(9), 4),
            ("b-ageless", None, 4),
            ("c-old", Some(1), 4),
            ("d-old", Some(1), 4),
            ("e-small", None, 1),
        ]) {
            let endpoints = endpoints(n * 20, count);
            for endpoint in &endpoints {
                let name = WorkloadName::new("pods", &endpoint.addr.to_string());
                let pod = Workload {
                    addresses: [endpoint.addr].into_iter().collect(),
                    ..Workload::new(name.clone(), Place::Elsewhere)
                };
                all.workloads.insert(name, Arc::new(pod));
            }
            let port = ServicePort {
                endpoints,
                ..ServicePort::new(80, Protocol::Tcp)
            };
            let service = Service {
                created,
                ports: [port].into(),
                ..Service::new(ServiceName::new("hog", name), ServiceType::ClusterIp)
            };
            all.services.insert(service.name.clone(), Arc::new(service));
        }
        let members = members(&MeshStatements::default(), &all);
        for (room, wanted) in [
            (26, ""),
            (25, "a-large"),
            (16, "b-ageless a-large"),
            (10, "a-young b-ageless a-large"),
            (8, "d-old a-young b-ageless a-large"),
        ] {
            let mut tables = Captured::default();
            // Labels take half of the room.
            let left_out = known_within(&all, &members, &mut tables, 2 * room);
            let names: Vec<_> = left_out.iter().map(ServiceName::name).collect();
            assert_eq!(names.join(" "), wanted, "{room}");
        }
    }
}
