//! Tenants share the capture tables.

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
    Egress, Inbound, Layers, Node, Place, RefusedInbound, Snapshot, Workload, WorkloadName,
    authorization::{PlainClients, Verdict},
};
use proptest::prelude::*;

use super::*;
use crate::enrol::{
    Enroller, Home, Judge, MeshStatements, members, members::members_within,
    statements::tests::everything,
};

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

/// Each line has the entries that are missing for a Pod in `RULES` and in `RANGES`, and whether the Pod is over budget.
#[test]
fn a_pod_is_over_budget_if_either_table_has_no_room() {
    assert_eq!(part(1600), 750);
    let mut rules = (*pod("shop", "p", 10).rules).clone();
    rules.own.outbound_ranges = [("10.0.0.0/8".parse().unwrap(), true)].into();
    let pod = Workload {
        rules: Arc::new(rules),
        ..pod("shop", "p", 10)
    };
    let members = members(&MeshStatements::default(), &snapshot([pod]));
    let cost = cost(&members[0].policy, &BTreeSet::new());
    for (missing, wanted) in [([0, 0], 0), ([1, 0], 1), ([0, 1], 1), ([1, 1], 1)] {
        let room = [0, 1].map(|table| cost[table] - missing[table]);
        assert_eq!(over_budget(&members, room).len(), wanted, "{missing:?}");
    }
}

/// One list after the other, and then all of them. Each has two elements, and ranges of IPv6, which need the most entries.
#[test]
fn a_policy_costs_what_it_takes_in_the_tables() {
    fn range(range: &str) -> IpNet {
        range.parse().unwrap()
    }
    fn clients(range: &str) -> Clients {
        [(range.parse().unwrap(), Verdict::NotAllowed)].into()
    }
    type Change = fn(&mut Policy);
    let changes: &[Change] = &[
        |of| of.outbound_ports = [(80, false), (81, true)].into(),
        |of| of.inbound_ports = [(80, false), (81, true)].into(),
        |of| {
            of.refused = Some(Box::new(RefusedInbound {
                ports: [(82, true), (83, false)].into(),
                others: true,
            }));
        },
        |of| of.included_uids = [1, 2].into(),
        |of| of.included_gids = [1, 2].into(),
        |of| of.excluded_uids = [3, 4].into(),
        |of| of.excluded_gids = [3, 4].into(),
        |of| of.excluded_interfaces = ["eth1".into(), "eth2".into()].into(),
        |of| of.outbound_ranges = [(range("fd00::/8"), true)].into(),
        |of| {
            let ranges = ["fd00::/8", "127.1.0.0/16"];
            of.outbound_ranges = ranges.map(|of| (range(of), true)).into();
        },
        |of| {
            let ports = [(80, clients("10.0.0.0/8")), (81, clients("fd00::/8"))];
            of.plain_clients = Some(Arc::new(PlainClients {
                ports: ports.into(),
                others: clients("10.0.0.0/8"),
                of_root: false,
            }));
        },
    ];
    let mut everything = Policy::default();
    let interfaces = [("eth1".to_owned(), 1), ("eth2".to_owned(), 2)].into();
    for change in changes.iter().map(Some).chain([None]) {
        let mut policy = Policy {
            inbound: Inbound::All,
            ..everything.clone()
        };
        if let Some(change) = change {
            change(&mut everything);
            policy = Policy {
                inbound: Inbound::All,
                ..Policy::default()
            };
            change(&mut policy);
        }
        let member = Member {
            policy,
            ..Member::of_node(&Snapshot::default())
        };
        let mut tables = Captured::default();
        let home = Home {
            cookie: 1,
            interfaces: &interfaces,
        };
        Enroller::after(&Captured::default(), false, false).enrol_namespace(
            &member,
            home,
            &mut tables,
        );
        let wanted = [tables.rules.len() as u64, tables.ranges.len() as u64];
        let policy = &member.policy;
        assert_eq!(cost(policy, &BTreeSet::new()), wanted, "{policy:?}");
        let counted: BTreeSet<&Clients> = sets(policy).collect();
        let sets: u64 = counted.iter().map(|set| set.len() as u64).sum();
        assert_eq!(cost(policy, &counted), [wanted[0], wanted[1] - sets]);
    }
}

#[test]
fn without_lists_the_settings_stay() {
    let wanted = Rules {
        inbound: None,
        inbound_others: None,
        outbound_ranges: BTreeMap::new(),
        outbound_ports: BTreeMap::new(),
        inbound_ports: BTreeMap::new(),
        included_uids: BTreeSet::new(),
        included_gids: BTreeSet::new(),
        excluded_uids: BTreeSet::new(),
        excluded_gids: BTreeSet::new(),
        excluded_interfaces: BTreeSet::new(),
        ..everything()
    };
    assert_eq!(without_lists(&everything()), wanted);
}

/// Pods of two namespaces with a set of 30 ranges each, in tables with room for 40: whether the Pods of a namespace have one set,
/// whether it is the same in both namespaces and of the root namespace, and how many Pods are over budget.
#[test]
fn equal_sets_of_clients_count_once() {
    let pod = |namespace: &str, number: u16, first: u32, of_root| {
        let ranges = (0..30).map(|of| IpNet::from(IpAddr::from(Ipv4Addr::from_bits(first + of))));
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
                [0, 1].map(|number| pod(namespace, number, first(index, number.into()), of_root))
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
    let room = part(capture::WORKLOADS * 4);
    assert!((room / 2..=room).contains(&(wanted.locals.len() as u64)));
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
