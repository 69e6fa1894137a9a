//! Divides the capture tables among workloads and namespaces.
//!
//! The tables have a fixed size. As long as all entries fit, all are written. Otherwise each namespace gets its
//! [share](super::super::shares), and the agent leaves out single objects that exceed the share: a workload's own
//! rules, so that all of its connections are captured; a service's endpoints, so that they are unknown destinations;
//! some of a workload's addresses. An entry that is left out never opens a destination.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
};

use dataplane_common::{
    Port, Protocol,
    capture::{self, CAPTURED, EXCLUDED, REACHABLE},
    tables::FrontendKey,
};
use ipnet::{IpNet, Ipv4Net};
use model::{Egress, Policy, Reachable, Rules, Service, ServiceName, Snapshot, Workload};

use super::{
    super::{
        Captured, captures_loopback, range_key,
        shares::{self, Shares},
        wanted::protocol,
    },
    Member,
};

/// Half of a table. The other half is for changes, during which the table holds old and new rules. One sixteenth is
/// reserved for the configuration's own rules.
const fn part(table: u32) -> u64 {
    (table - table / 16) as u64 / 2
}

/// Space in `RULES` and in `RANGES`.
pub(super) const ROOM: [u64; 2] = [part(capture::RULES); 2];

/// Returns the number of entries of `RULES` and of `RANGES` that a policy needs.
fn cost(policy: &Policy) -> [u64; 2] {
    let rules = policy.outbound_ports.len()
        + policy.inbound_ports.len()
        + policy.included_uids.len()
        + policy.included_gids.len()
        + policy.excluded_uids.len()
        + policy.excluded_gids.len()
        + policy.excluded_interfaces.len();
    let ranges = policy.outbound_ranges.len();
    // A policy with ranges also needs an entry for all of IPv4, and entries that except parts of loopback.
    let more = u64::from(ranges > 0) + 3 * u64::from(captures_loopback(policy));
    [rules as u64, ranges as u64 + more]
}

/// Returns the indices of the members whose rules exceed their namespace's budget: in each namespace first the members
/// with the most rules, then the last by name. Equal policies of a namespace count once.
pub(super) fn over_budget(members: &[Member], room: [u64; 2]) -> BTreeSet<usize> {
    let costs = members.iter().map(|member| cost(&member.policy));
    let all = costs.fold([0; 2], |all, cost| [all[0] + cost[0], all[1] + cost[1]]);
    if all.iter().zip(room).all(|(all, room)| *all <= room) {
        return BTreeSet::new();
    }
    let mut shares = Shares::of(room);
    let mut policies: BTreeMap<&str, BTreeMap<&Policy, Vec<usize>>> = BTreeMap::new();
    for (index, member) in members.iter().enumerate() {
        let of = policies
            .entry(member.workload.name.namespace())
            .or_default();
        of.entry(&member.policy).or_default().push(index);
    }
    for (namespace, policies) in &policies {
        for policy in policies.keys() {
            shares.change(namespace, &[0; 2], &cost(policy));
        }
    }
    shares.divide();
    let mut over = BTreeSet::new();
    for (namespace, policies) in policies {
        if !shares.is_over(namespace) {
            continue;
        }
        let mut policies: Vec<_> = policies
            .into_iter()
            .map(|(policy, who)| (cost(policy), who))
            .collect();
        policies.sort_by_key(|(cost, who)| (Reverse(shares.smallness(cost)), who[0]));
        let mut left = shares.budget();
        for (cost, who) in policies {
            if !shares::take(&cost, &mut left) {
                over.extend(who);
            }
        }
    }
    over
}

/// Returns rules without the lists that do not fit: only whether, by which means and in which mode connections are
/// captured. Virtual interfaces stay, because they are few, and fewer connections would be captured without them.
pub(super) fn without_lists(rules: &Rules) -> Rules {
    Rules {
        captured: rules.captured,
        captured_by: rules.captured_by,
        allow_packets: rules.allow_packets,
        mode: rules.mode,
        egress: rules.egress,
        without_proxy: rules.without_proxy,
        dns: rules.dns,
        virtual_interfaces: rules.virtual_interfaces.clone(),
        waypoint: rules.waypoint.clone(),
        ..Rules::default()
    }
}

/// Adds the destinations that a workload with `egress: deny` may reach, and the addresses that get a label. Returns the
/// services and pods that are left out because their namespaces have too many endpoints.
pub fn known(snapshot: &Snapshot, members: &[Member], wanted: &mut Captured) -> Vec<ServiceName> {
    known_within(snapshot, members, wanted, part(capture::KNOWN))
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
        wanted.known.insert(key, 1);
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
        wanted.known.extend(all.into_iter().map(|key| (key, 1)));
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
                wanted.known.extend(item.keys.iter().map(|key| (*key, 1)));
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
            wanted.known.insert(key, 1);
        }
    }
}

/// Removes addresses of workloads with the most addresses until the rest fits. Returns the number of removed addresses
/// by the workload's number.
pub fn fit_addresses(wanted: &mut Captured) -> BTreeMap<u32, usize> {
    let room = part(capture::WORKLOADS * 4);
    let mut left_out = BTreeMap::new();
    if wanted.locals.len() as u64 <= room {
        return left_out;
    }
    let mut shares = Shares::of([room]);
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    for local in wanted.locals.values() {
        *counts.entry(local.workload).or_default() += 1;
    }
    for (workload, count) in &counts {
        shares.change(&workload.to_string(), &[0], &[*count]);
    }
    shares.divide();
    let [budget] = shares.budget();
    let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
    wanted.locals.retain(|_, local| {
        let taken = taken.entry(local.workload).or_default();
        *taken += 1;
        // Addresses without a workload are the node's.
        let fits = local.workload == 0 || *taken <= budget;
        if !fits {
            *left_out.entry(local.workload).or_default() += 1;
        }
        fits
    });
    left_out
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Instant};

    use dataplane_common::{
        Addr,
        capture::{Enrolled, Local},
    };
    use model::{Inbound, Layers, Node, Part, Place, Split, WorkloadName};
    use proptest::prelude::*;

    use super::*;
    use crate::enrol::{Enroller, MeshStatements, members, members::members_within};

    /// A pod with `egress: deny` whose annotations exclude `ports` ports.
    fn pod(namespace: &str, name: &str, ports: u16) -> Workload {
        let own = Rules {
            captured: Some(true),
            egress: Some(Egress::Deny),
            // Makes the policies differ.
            excluded_uids: name.bytes().map(u32::from).collect(),
            outbound_ports: (1..=ports).map(|port| (port, false)).collect(),
            inbound_others: Some(false),
            ..Rules::default()
        };
        Workload {
            rules: Arc::new(Layers {
                own,
                namespace: Rules::default(),
            }),
            ..Workload::new(WorkloadName::new(namespace, name), Place::Address)
        }
    }

    fn snapshot(pods: impl IntoIterator<Item = Workload>) -> Snapshot {
        let pods = pods
            .into_iter()
            .map(|pod| (pod.name.clone(), Arc::new(pod)));
        Snapshot {
            workloads: pods.collect(),
            node: Arc::new(Node::default()),
            ..Snapshot::default()
        }
    }

    /// Eight pods of a tenant exclude 41 500 ports each. They lose their exclusions; pods of others do not.
    #[test]
    fn a_tenant_with_more_rules_than_the_table_holds_is_captured_whole() {
        let hogs = (0..8).map(|n| pod("hog", &format!("p{n}"), 41_500));
        let shop = (0..50).map(|n| pod("shop", &format!("p{n}"), 100));
        let snapshot = snapshot(hogs.chain(shop).chain([pod("hog", "small", 10)]));
        let said = MeshStatements {
            all: vec![(
                "mesh.rules".to_owned(),
                Rules {
                    outbound_ports: [(9999, false)].into(),
                    ..Rules::default()
                },
            )],
            ..MeshStatements::default()
        };
        let start = Instant::now();
        let members = members(&said, &snapshot);
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
        let mut enroller = Enroller::after(&Captured::default(), false);
        let mut tables = Captured::default();
        let mut whole = 0;
        for member in &members {
            let entry = enroller.enrol(member, &mut tables);
            // Egress stays denied even if the rules do not fit.
            assert_ne!(entry.flags & Enrolled::EGRESS_DENY, 0);
            let name = &member.workload.name;
            if member.over_budget {
                assert_eq!(name.namespace(), "hog");
                assert_eq!(member.policy.outbound_ports, [(9999, false)].into());
                assert!(
                    member.policy.inbound == Inbound::All && member.policy.excluded_uids.is_empty()
                );
                assert!(member.rules.iter().all(|rule| rule.of != "41500"));
                whole += 1;
            } else if name.namespace() == "shop" {
                assert_eq!(member.policy.outbound_ports.len(), 101);
            }
        }
        assert!((6..8).contains(&whole), "{whole}");
        let small = members.iter().find(|m| m.workload.name.name() == "small");
        assert!(!small.unwrap().over_budget);
        assert!(tables.rules.len() as u64 <= part(capture::RULES) + 1);
    }

    #[test]
    fn equal_policies_of_a_namespace_are_one() {
        let same = |n: u32| Workload {
            name: WorkloadName::new("shop", &format!("p{n}")),
            ..pod("shop", "p", 20_000)
        };
        let members = members(&MeshStatements::default(), &snapshot((0..10).map(same)));
        assert!(members.iter().all(|member| !member.over_budget));
    }

    #[test]
    fn one_with_too_many_addresses_keeps_some_and_the_others_keep_all() {
        let mut wanted = Captured::default();
        let mut add = |workload: u32, addresses: u32| {
            for n in 0..addresses {
                let local = Local {
                    netns: 1,
                    policy: 0,
                    flags: 0,
                    workload,
                    resolvers: 0,
                };
                let addr = std::net::Ipv4Addr::from_bits((workload << 24) + n);
                wanted.locals.insert(IpAddr::from(addr).into(), local);
            }
        };
        (1..100).for_each(|workload| add(workload, 2));
        add(0, 3);
        add(200, 65_900);
        let left_out = fit_addresses(&mut wanted);
        assert_eq!(left_out.len(), 1);
        assert!(left_out[&200] > 30_000);
        assert!(wanted.locals.len() as u64 <= part(capture::WORKLOADS * 4));
        let others = wanted.locals.values().filter(|local| local.workload != 200);
        assert_eq!(others.count(), 99 * 2 + 3);
        assert_eq!(
            wanted.locals.values().filter(|l| l.workload == 0).count(),
            3
        );
    }

    #[test]
    fn a_namespace_with_too_many_endpoints_is_unknown_and_the_others_are_known() {
        use model::{Endpoint, Hints, Protocol, Records, ServicePort, ServiceType, TrafficPolicy};
        let service = |namespace: &str, name: &str, first: u32, count: u32| {
            let endpoints = (first..first + count).map(|n| Endpoint {
                addr: std::net::Ipv4Addr::from_bits(n).into(),
                port: 80,
                local: false,
                ready: true,
                serving: true,
                terminating: false,
                hints: Hints::default(),
            });
            let port = ServicePort {
                name: "".into(),
                port: 80,
                protocol: Protocol::Tcp,
                node_port: None,
                endpoints: endpoints.collect(),
                weights: None,
                split: None,
            };
            Arc::new(Service {
                name: ServiceName::new(namespace, name),
                kind: ServiceType::ClusterIp,
                created: None,
                cluster_ips: [].into_iter().collect(),
                external_ips: [].into_iter().collect(),
                load_balancer_ips: [].into_iter().collect(),
                source_ranges: [].into_iter().collect(),
                affinity: None,
                internal_policy: TrafficPolicy::Cluster,
                external_policy: TrafficPolicy::Cluster,
                health_check_node_port: None,
                aside: Vec::new(),
                records: Records::ClusterIps,
                ports: [port].into_iter().collect(),
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

    /// The entries of each pod of a namespace, without numbers.
    type Told =
        BTreeMap<WorkloadName, (u32, BTreeSet<(u32, u32, u32)>, BTreeSet<(u32, Addr, u32)>)>;

    fn told(snapshot: &Snapshot, namespace: &str) -> Told {
        let members = members_within(&MeshStatements::default(), snapshot, [40; 2]);
        let mut enroller = Enroller::after(&Captured::default(), false);
        let mut tables = Captured::default();
        let entries: Vec<_> = members
            .iter()
            .map(|member| (member, enroller.enrol(member, &mut tables)))
            .collect();
        assert!(tables.rules.len() <= 40 && tables.ranges.len() <= 40);
        let of = entries
            .into_iter()
            .filter(|(member, _)| member.workload.name.namespace() == namespace);
        of.map(|(member, entry)| {
            let rules = tables
                .rules
                .iter()
                .filter(|(key, _)| key.of == entry.policy);
            let ranges = tables.ranges.iter();
            let ranges = ranges.filter(|(key, _)| key.policy == entry.policy);
            let told = (
                entry.flags,
                rules.map(|(key, said)| (key.kind, key.id, *said)).collect(),
                ranges
                    .map(|(key, said)| (key.bits, key.addr, *said))
                    .collect(),
            );
            (member.workload.name.clone(), told)
        })
        .collect()
    }

    fn own_rules(most: u16) -> impl Strategy<Value = Rules> {
        let ranges = (1..=most, any::<u16>(), 16u8..=32);
        let range = ranges.prop_map(|(_, net, bits)| {
            let addr = std::net::Ipv4Addr::from_bits(0x0a00_0000 | u32::from(net) << 8);
            IpNet::new(addr.into(), bits)
                .expect("a length of IPv4")
                .trunc()
        });
        (
            any::<bool>(),
            prop::collection::btree_map(1..most * 4, any::<bool>(), 0..usize::from(most)),
            prop::collection::btree_map(range, any::<bool>(), 0..usize::from(most)),
            prop::collection::btree_set(0u32..9, 0..2),
        )
            .prop_map(
                |(deny, outbound_ports, outbound_ranges, excluded_uids)| Rules {
                    captured: Some(true),
                    egress: deny.then_some(Egress::Deny),
                    outbound_ports,
                    outbound_ranges,
                    excluded_uids,
                    ..Rules::default()
                },
            )
    }

    fn pods(namespace: &'static str, all: Vec<Rules>) -> impl Iterator<Item = Workload> {
        all.into_iter().enumerate().map(move |(n, own)| Workload {
            rules: Arc::new(Layers {
                own,
                namespace: Rules::default(),
            }),
            ..Workload::new(
                WorkloadName::new(namespace, &format!("p{n}")),
                Place::Address,
            )
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Annotations of one tenant's pods never change the entries of other tenants' pods.
        #[test]
        fn a_tenants_annotations_change_nothing_of_others(
            // At most three policies of two ports, two ranges and one user each.
            others in prop::collection::vec(own_rules(3), 0..4),
            hostile in prop::collection::vec(own_rules(60), 0..8),
        ) {
            let alone = snapshot(pods("shop", others.clone()));
            let beside = snapshot(pods("shop", others).chain(pods("evil", hostile)));
            prop_assert_eq!(told(&beside, "shop"), told(&alone, "shop"));
        }
    }
}
