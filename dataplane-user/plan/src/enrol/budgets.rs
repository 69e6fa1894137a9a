//! Divides the capture tables among workloads and namespaces.
//!
//! The tables have a fixed size. As long as all entries fit, all are written. Otherwise each namespace gets its
//! [share](super::super::shares), and the agent leaves out single objects that exceed the share: a workload's own
//! rules, so that all of its connections are captured, or some of its addresses. An entry that is left out never opens
//! a destination. [`known`](super::known) divides the destinations of services.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use dataplane_common::capture;
use model::{Policy, Rules, authorization::Clients};

use super::{
    super::{
        Captured, captures_loopback,
        shares::{self, Shares},
    },
    Member,
};

/// Half of a table. The other half is for changes, during which the table holds old and new rules. One sixteenth is
/// reserved for the configuration's own rules.
pub(super) const fn part(table: u32) -> u64 {
    (table - table / 16) as u64 / 2
}

/// Space in `RULES` and in `RANGES`.
pub(super) const ROOM: [u64; 2] = [part(capture::RULES); 2];

/// The name of the budget of the sets of clients that follow from Istio's policies of the root namespace alone. No namespace has
/// this name.
const OF_ROOT: &str = "*";

/// Returns the number of entries of `RULES` and of `RANGES` that a policy needs, without the sets of clients that are counted
/// already.
fn cost(policy: &Policy, counted: &BTreeSet<&Clients>) -> [u64; 2] {
    let clients = policy.plain_clients.as_ref();
    let rules = policy.outbound_ports.len()
        + policy.inbound_ports.len()
        + (policy.refused.as_ref()).map_or(0, |refused| refused.ports.len())
        + policy.included_uids.len()
        + policy.included_gids.len()
        + policy.excluded_uids.len()
        + policy.excluded_gids.len()
        + policy.excluded_interfaces.len()
        + clients.map_or(0, |clients| clients.ports.len() + 1);
    let new: BTreeSet<&Clients> = sets(policy).filter(|set| !counted.contains(set)).collect();
    let clients: usize = new.into_iter().map(BTreeMap::len).sum();
    let ranges = policy.outbound_ranges.len() + clients;
    // A policy with ranges also needs an entry for all of IPv4, and entries that except parts of loopback.
    let more =
        u64::from(!policy.outbound_ranges.is_empty()) + 3 * u64::from(captures_loopback(policy));
    [rules as u64, ranges as u64 + more]
}

/// Returns the sets of clients of a policy. The tables hold equal sets once.
fn sets(policy: &Policy) -> impl Iterator<Item = &Clients> {
    let clients = policy.plain_clients.iter();
    clients.flat_map(|clients| clients.ports.values().chain([&clients.others]))
}

/// Whether the sets of clients of a policy follow from Istio's policies of the root namespace alone.
fn is_of_root(policy: &Policy) -> bool {
    (policy.plain_clients.as_ref()).is_some_and(|clients| clients.of_root)
}

/// Returns the indices of the members whose rules exceed their namespace's budget: in each namespace first the members
/// with the most rules, then the last by name. Equal policies of a namespace count once, and so do equal sets of clients. The sets
/// of the root namespace's policies have a budget of their own.
pub(super) fn over_budget(members: &[Member], room: [u64; 2]) -> BTreeSet<usize> {
    let none = BTreeSet::new();
    let costs = members.iter().map(|member| cost(&member.policy, &none));
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
    let of_root = members.iter().map(|member| &member.policy);
    let of_root = of_root.filter(|policy| is_of_root(policy)).flat_map(sets);
    let of_root: BTreeSet<&Clients> = of_root.collect();
    for set in &of_root {
        shares.change(OF_ROOT, &[0; 2], &[0, set.len() as u64]);
    }
    for (namespace, policies) in &policies {
        let mut counted = of_root.clone();
        for policy in policies.keys() {
            shares.change(namespace, &[0; 2], &cost(policy, &counted));
            counted.extend(sets(policy));
        }
    }
    shares.divide();
    let mut by_size: Vec<&Clients> = of_root.iter().copied().collect();
    by_size.sort_by_key(|set| set.len());
    let mut left = shares.budget();
    by_size.retain(|set| !shares::take(&[0, set.len() as u64], &mut left));
    let left_out: BTreeSet<&Clients> = by_size.into_iter().collect();
    let has_left_out =
        |policy| is_of_root(policy) && sets(policy).any(|set| left_out.contains(set));
    let mut over: BTreeSet<usize> = (0..members.len())
        .filter(|index| has_left_out(&members[*index].policy))
        .collect();
    for (namespace, policies) in policies {
        if !shares.is_over(namespace) {
            continue;
        }
        let mut policies: Vec<_> = policies.into_iter().collect();
        policies.sort_by_key(|(policy, who)| {
            (Reverse(shares.smallness(&cost(policy, &of_root))), who[0])
        });
        let mut counted = of_root.clone();
        let mut left = shares.budget();
        for (policy, who) in policies {
            if shares::take(&cost(policy, &counted), &mut left) {
                counted.extend(sets(policy));
            } else {
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
        ..Rules::default()
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
pub(super) mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr},
        sync::Arc,
        time::Instant,
    };

    use dataplane_common::{
        Addr,
        capture::{Enrolled, Local},
    };
    use ipnet::IpNet;
    use model::{
        Egress, Inbound, Layers, Node, Place, Snapshot, Workload, WorkloadName,
        authorization::{PlainClients, Verdict},
    };
    use proptest::prelude::*;

    use super::*;
    use crate::enrol::{Enroller, Judge, MeshStatements, members, members::members_within};

    /// A pod with `egress: deny` whose annotations exclude `ports` ports.
    pub fn pod(namespace: &str, name: &str, ports: u16) -> Workload {
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

    pub fn snapshot(pods: impl IntoIterator<Item = Workload>) -> Snapshot {
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
        let mut enroller = Enroller::after(&Captured::default(), false, false);
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

    /// Pods of two namespaces with a set of 30 ranges each, in tables with room for 40: whether the Pods of a namespace have one set,
    /// whether it is the same in both namespaces and of the root namespace, and how many Pods are over budget.
    #[test]
    fn equal_sets_of_clients_count_once() {
        let pod = |namespace: &str, number: u16, first: u32, of_root| {
            let ranges =
                (0..30).map(|of| IpNet::from(IpAddr::from(Ipv4Addr::from_bits(first + of))));
            let clients = PlainClients {
                ports: BTreeMap::new(),
                others: ranges.map(|range| (range, Verdict::NotAllowed)).collect(),
                of_root,
            };
            let of_node = Member::of_node(&Snapshot::default());
            let name = WorkloadName::new(namespace, &format!("p{number}"));
            Member {
                workload: Arc::new(Workload::new(name, Place::Address)),
                policy: Policy {
                    plain_clients: Some(Arc::new(clients)),
                    // Makes the policies differ.
                    excluded_uids: [u32::from(number)].into(),
                    ..Policy::default()
                },
                ..of_node
            }
        };
        for (is_one, of_root, wanted) in [
            (true, true, 0),
            (false, true, 3),
            // Each namespace has half of the room.
            (true, false, 4),
        ] {
            let first = |namespace: u32, number: u32| {
                if is_one {
                    0
                } else {
                    100 * namespace + 50 * number
                }
            };
            let pods = [("a", 0), ("b", 1)]
                .into_iter()
                .flat_map(|(namespace, index)| {
                    [0, 1]
                        .map(|number| pod(namespace, number, first(index, number.into()), of_root))
                });
            let pods: Vec<Member> = pods.collect();
            let over = over_budget(&pods, [40; 2]);
            assert_eq!(over.len(), wanted, "{is_one} {of_root}");
        }
        let of_one = [0, 1].map(|number| pod("a", number, 0, false));
        assert!(over_budget(&of_one, [40; 2]).is_empty());
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
                let addr = Ipv4Addr::from_bits((workload << 24) + n);
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

    /// The entries of each pod of a namespace, without numbers.
    type PodEntries =
        BTreeMap<WorkloadName, (u32, BTreeSet<(u32, u32, u32)>, BTreeSet<(u32, Addr, u32)>)>;

    fn told(snapshot: &Snapshot, namespace: &str) -> PodEntries {
        let members = members_within(
            &MeshStatements::default(),
            snapshot,
            [40; 2],
            &mut Judge::default(),
        );
        let mut enroller = Enroller::after(&Captured::default(), false, false);
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
            let addr = Ipv4Addr::from_bits(0x0a00_0000 | u32::from(net) << 8);
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
