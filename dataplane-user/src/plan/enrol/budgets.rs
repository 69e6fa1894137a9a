//! What of capture's tables each workload and namespace may have.
//!
//! The tables have a fixed size. As long as all fits into them, all is there. If it does not, each namespace gets its
//! [share](super::super::shares), and what does not fit into that is left out by itself: a workload's own rules, so that
//! all of its connections are captured; a service's endpoints, so that they are unknown destinations; some of a
//! workload's addresses. Nothing is open because it was left out.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dataplane_common::{Addr, capture};

use super::{
    super::{
        Captured,
        shares::{self, Shares},
    },
    Member,
};
use crate::model::{Egress, Policy, Rules, Service, ServiceName, Snapshot};

/// Half of a table: the other half is for what changes, during which new and old rules are there. The configuration's own
/// rules have a sixteenth.
const fn part(table: u32) -> u64 {
    (table - table / 16) as u64 / 2
}

/// What there is of `RULES` and of `RANGES`.
pub(super) const ROOM: [u64; 2] = [part(capture::RULES); 2];

/// What a policy takes of `RULES` and of `RANGES`.
fn cost(policy: &Policy) -> [u64; 2] {
    let rules = policy.outbound_ports.len()
        + policy.inbound_ports.len()
        + policy.excluded_uids.len()
        + policy.excluded_gids.len()
        + policy.excluded_interfaces.len();
    let ranges = policy.outbound_ranges.len();
    [rules as u64, ranges as u64 + u64::from(ranges > 0)]
}

/// Which of the members have more rules than there is room for in their namespaces' budgets: by their index. Of a
/// namespace those with the most rules come first, then the last by name. Equal policies of a namespace count once.
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
    shares.settle();
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

/// What is left of rules whose lists do not fit: whether, by what and how connections are captured.
pub(super) fn without_lists(rules: &Rules) -> Rules {
    Rules {
        captured: rules.captured,
        captured_by: rules.captured_by,
        mode: rules.mode,
        egress: rules.egress,
        without_proxy: rules.without_proxy,
        acceleration: rules.acceleration,
        ..Rules::default()
    }
}

/// Adds whom connections may reach whose egress policy is deny, and whose addresses are worth a label. Returns the
/// services that are not among them, because their namespaces have too many endpoints.
pub fn known(snapshot: &Snapshot, members: &[Member], wanted: &mut Captured) -> Vec<ServiceName> {
    let room = part(capture::KNOWN);
    let workloads = snapshot.workloads.values().map(|w| &w.addresses);
    let named = members.iter().map(|member| &member.workload.addresses);
    // Those of the configuration first.
    for addr in named.chain(workloads).flatten() {
        if wanted.known.len() as u64 >= room {
            break;
        }
        wanted.known.insert((*addr).into(), 1);
    }
    if members.iter().all(|m| m.policy.egress != Egress::Deny) {
        return Vec::new();
    }
    let endpoints = |service: &Service| -> BTreeSet<IpAddr> {
        let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
        endpoints.map(|endpoint| endpoint.addr).collect()
    };
    let mut all: BTreeSet<Addr> = BTreeSet::new();
    let room = room - wanted.known.len() as u64;
    let fits = snapshot.services.values().all(|service| {
        all.extend(endpoints(service).into_iter().map(Addr::from));
        all.len() as u64 <= room
    });
    if fits {
        wanted.known.extend(all.into_iter().map(|addr| (addr, 1)));
        return Vec::new();
    }
    let mut shares = Shares::of([room]);
    let costs: Vec<_> = snapshot
        .services
        .values()
        .map(|service| (service, [endpoints(service).len() as u64]))
        .collect();
    for (service, cost) in &costs {
        shares.change(service.name.namespace(), &[0], cost);
    }
    shares.settle();
    let mut left_out = Vec::new();
    for services in costs.chunk_by(|(a, _), (b, _)| a.name.namespace() == b.name.namespace()) {
        let mut services = services.to_vec();
        services.sort_by_cached_key(|(service, cost)| {
            let age = (service.created.is_none(), service.created);
            (Reverse(shares.smallness(cost)), age, service.name.clone())
        });
        let mut left = shares.budget();
        for (service, cost) in services {
            if shares::take(&cost, &mut left) {
                let endpoints = endpoints(service).into_iter();
                wanted.known.extend(endpoints.map(|addr| (addr.into(), 1)));
            } else {
                left_out.push(service.name.clone());
            }
        }
    }
    left_out
}

/// Leaves out addresses of workloads that have so many that not all fit. Returns how many of each workload, by its
/// number.
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
    shares.settle();
    let [budget] = shares.budget();
    let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
    wanted.locals.retain(|_, local| {
        let taken = taken.entry(local.workload).or_default();
        *taken += 1;
        // Those of no workload are the node's.
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

    use dataplane_common::capture::{Enrolled, Local};

    use super::*;
    use ipnet::IpNet;
    use proptest::prelude::*;

    use crate::{
        model::{Layers, Node, Place, Workload, WorkloadName},
        plan::enrol::{Enroller, Said, members, members::members_within},
    };

    /// A pod whose annotations exclude so many ports and ask for `egress: deny`.
    fn pod(namespace: &str, name: &str, ports: u16) -> Workload {
        let own = Rules {
            captured: Some(true),
            egress: Some(Egress::Deny),
            // Different policies.
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

    /// Eight pods of a tenant with 41 500 excluded ports each: they lose their exclusions, and others keep theirs.
    #[test]
    fn a_tenant_with_more_rules_than_the_table_holds_is_captured_whole() {
        let hogs = (0..8).map(|n| pod("hog", &format!("p{n}"), 41_500));
        let shop = (0..50).map(|n| pod("shop", &format!("p{n}"), 100));
        let snapshot = snapshot(hogs.chain(shop).chain([pod("hog", "small", 10)]));
        let said = Said {
            all: vec![(
                "mesh.rules".to_owned(),
                Rules {
                    outbound_ports: [(9999, false)].into(),
                    ..Rules::default()
                },
            )],
            ..Said::default()
        };
        let start = Instant::now();
        let members = members(&said, &snapshot);
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
        let mut enroller = Enroller::after(&Captured::default(), false);
        let mut tables = Captured::default();
        let mut whole = 0;
        for member in &members {
            let entry = enroller.enrol(member, &mut tables);
            // Closed stays closed, whatever does not fit.
            assert_ne!(entry.flags & Enrolled::EGRESS_DENY, 0);
            let name = &member.workload.name;
            if member.over_budget {
                assert_eq!(name.namespace(), "hog");
                assert_eq!(member.policy.outbound_ports, [(9999, false)].into());
                assert!(member.policy.inbound_others && member.policy.excluded_uids.is_empty());
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
        let members = members(&Said::default(), &snapshot((0..10).map(same)));
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
                    reserved: 0,
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
        use crate::model::{
            Endpoint, Hints, Protocol, Records, ServicePort, ServiceType, TrafficPolicy,
        };
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
                records: Records::ClusterIps,
                ports: [port].into_iter().collect(),
            })
        };
        let mut snapshot = snapshot([pod("shop", "web", 1)]);
        let huge = u32::try_from(part(capture::KNOWN)).unwrap();
        for service in [
            service("hog", "a", 0x0b00_0000, huge),
            service("hog", "b", 0x0c00_0000, 10),
            service("shop", "db", 0x0a00_0000, 100),
        ] {
            snapshot.services.insert(service.name.clone(), service);
        }
        let members = members(&Said::default(), &snapshot);
        let mut wanted = Captured::default();
        let left_out = known(&snapshot, &members, &mut wanted);
        assert_eq!(left_out, [ServiceName::new("hog", "a")]);
        assert_eq!(wanted.known.len(), 110);
        let is_known = |ip: [u8; 4]| wanted.known.contains_key(&IpAddr::from(ip).into());
        assert!(is_known([10, 0, 0, 99]) && is_known([12, 0, 0, 9]) && !is_known([11, 0, 0, 0]));
    }

    /// What the tables say of each pod of a namespace, without the numbers.
    type Told =
        BTreeMap<WorkloadName, (u32, BTreeSet<(u32, u32, u32)>, BTreeSet<(u32, Addr, u32)>)>;

    fn told(snapshot: &Snapshot, namespace: &str) -> Told {
        let members = members_within(&Said::default(), snapshot, [40; 2]);
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

        /// Whatever the annotations of a tenant's pods say, the tables say the same of others' pods.
        #[test]
        fn a_tenants_annotations_change_nothing_of_others(
            // At most three policies of two ports, two ranges and one user.
            others in prop::collection::vec(own_rules(3), 0..4),
            hostile in prop::collection::vec(own_rules(60), 0..8),
        ) {
            let alone = snapshot(pods("shop", others.clone()));
            let beside = snapshot(pods("shop", others).chain(pods("evil", hostile)));
            prop_assert_eq!(told(&beside, "shop"), told(&alone, "shop"));
        }
    }
}
