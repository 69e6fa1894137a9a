//! Numbers and flags of workloads.

use dataplane_common::capture::{REFUSED, TrafficKey};
use model::{
    Egress, Inbound, Mode, Policy, Snapshot,
    authorization::{PlainClients, Verdict},
};

use super::*;
use crate::range_key;

#[test]
fn numbers_of_workloads_are_not_used_again() {
    let mut tables = Captured::default();
    let entry = Enrolled {
        workload: 7,
        ..Enrolled::default()
    };
    tables.namespaces.insert(1, entry);
    let mut enroller = Enroller::after(&tables, false, false);
    assert_eq!(enroller.earlier(), 7);
    let [one, other] = ["one", "other"].map(|name| WorkloadName::new("shop", name));
    assert_eq!(
        [&one, &other, &one].map(|name| enroller.number(name)),
        [8, 9, 8]
    );
    enroller.keep_numbers(&[9].into());
    assert_eq!([&one, &other].map(|name| enroller.number(name)), [10, 9]);
    assert_eq!(enroller.earlier(), 7);
}

/// Entries of a Pod that was not inspected stay, but its queries go to its own resolvers.
#[test]
fn queries_of_a_pod_that_was_not_inspected_are_not_captured() {
    let local = Local {
        workload: 7,
        resolvers: 9,
        ..Local::default()
    };
    let addr = dataplane_common::Addr::UNSPECIFIED;
    let mut held = Captured::default();
    held.locals.insert(addr, local);
    let mut tables = Captured::default();
    tables.keep(&held, |workload, _| workload == 7);
    let wanted = Local {
        resolvers: 0,
        ..local
    };
    assert_eq!(tables.locals[&addr], wanted);
}

#[test]
fn the_node_is_at_its_addresses() {
    let mut snapshot = Snapshot::default();
    let addr = std::net::IpAddr::from([10, 0, 0, 1]);
    Arc::make_mut(&mut snapshot.node).addresses.push(addr);
    assert_eq!(Member::of_node(&snapshot).workload.addresses[..], [addr]);
}

/// What an earlier agent's tables hold, and the first numbers of a policy, of a policy of Istio's above those of all agents,
/// and of a workload. Numbers stay as long as the tables hold them.
#[test]
fn numbers_of_an_earlier_agent_are_not_given_again() {
    type Hold = fn(&mut Captured);
    let own = TrafficKey::NOT_ALLOWED;
    let rows: [(Hold, [u32; 3]); 7] = [
        (|_| (), [1, 1, 1]),
        (|of| _ = of.namespaces.insert(1, entry()), [7, 1, 5]),
        (|of| _ = of.cgroups.insert(1, entry()), [7, 1, 5]),
        (
            |of| {
                let local = Local {
                    policy: 2,
                    resolvers: 3,
                    workload: 9,
                    ..Local::default()
                };
                of.locals.insert(dataplane_common::Addr::UNSPECIFIED, local);
            },
            [4, 1, 10],
        ),
        (
            |of| _ = of.rules.insert(rule(RuleKey::SOURCES), 1),
            [8, 1, 1],
        ),
        (
            |of| _ = of.rules.insert(rule(RuleKey::INTERFACE), 1),
            [1, 1, 1],
        ),
        (
            |of| {
                let any = "0.0.0.0/0".parse().unwrap();
                let said = REFUSED | (TrafficKey::NOT_ALLOWED + 3) << REFUSED_BY;
                of.ranges.insert(range_key(7, &any), said);
            },
            [8, 4, 1],
        ),
    ];
    let name = PolicyName {
        namespace: "shop".into(),
        object: "AuthorizationPolicy p".into(),
    };
    let any = || "0.0.0.0/0".parse().unwrap();
    let policy = Policy {
        plain_clients: Some(Arc::new(PlainClients {
            ports: BTreeMap::new(),
            others: [(any(), Verdict::Denied(name.clone()))].into(),
            of_root: false,
        })),
        ..Policy::default()
    };
    let member = Member {
        policy,
        ..Member::of_node(&Snapshot::default())
    };
    let to: Resolvers = [(any(), true)].into_iter().collect();
    let write = |enroller: &mut Enroller| {
        let mut tables = Captured::default();
        let entry = enroller.enrol(&member, &mut tables);
        tables.namespaces.insert(1, entry);
        enroller.capture_queries(1, &to, &mut tables);
        tables
    };
    for (case, (hold, wanted)) in rows.into_iter().enumerate() {
        let mut held = Captured::default();
        hold(&mut held);
        let mut enroller = Enroller::after(&held, false, false);
        let tables = write(&mut enroller);
        let entry = tables.namespaces[&1];
        let first = entry.policy.min(tables.sets_of_clients().next().unwrap());
        let refusers: Vec<_> = enroller.refusers().collect();
        assert_eq!(refusers, [(own + wanted[1], &name)], "{case}");
        assert_eq!([first, entry.workload], [wanted[0], wanted[2]], "{case}");
        assert_eq!(entry.resolvers, first + 2, "{case}");
        enroller.keep_policies(&tables);
        assert_eq!(write(&mut enroller), tables, "{case}");
        enroller.keep_policies(&Captured::default());
        assert_eq!(enroller.refusers().count(), 0, "{case}");
        assert!(
            write(&mut enroller).namespaces[&1].resolvers > entry.resolvers,
            "{case}"
        );
    }
}

fn entry() -> Enrolled {
    Enrolled {
        policy: 5,
        workload: 4,
        resolvers: 6,
        ..Enrolled::default()
    }
}

fn rule(kind: u32) -> RuleKey {
    RuleKey { of: 7, kind, id: 0 }
}

/// Whether a rule says that connections which come in by an interface are captured.
#[test]
fn connections_of_machines_are_captured_where_something_judges_them() {
    let interfaces = [("eth9".to_owned(), 9), ("tap0".to_owned(), 3)].into();
    for (mode, egress, wanted) in [
        (Mode::Proxy, Egress::Allow, Some(CAPTURED)),
        (Mode::Kernel, Egress::Deny, Some(CAPTURED)),
        (Mode::Kernel, Egress::Allow, None),
    ] {
        let policy = Policy {
            mode,
            egress,
            virtual_interfaces: ["tap0".into(), "gone".into()].into(),
            excluded_interfaces: ["eth9".into()].into(),
            ..Policy::default()
        };
        let member = Member {
            policy,
            ..Member::of_node(&Snapshot::default())
        };
        let mut tables = Captured::default();
        let home = Home {
            cookie: 1,
            interfaces: &interfaces,
        };
        let mut enroller = Enroller::after(&tables, false, false);
        let entry = enroller.enrol_namespace(&member, home, &mut tables);
        assert_ne!(entry.flags & Enrolled::HAS_INTERFACES, 0);
        let said = |id| {
            let (of, kind) = (entry.workload, RuleKey::INTERFACE);
            tables.rules.get(&RuleKey { of, kind, id }).copied()
        };
        assert_eq!([said(3), said(9)], [wanted, Some(EXCLUDED)], "{mode:?}");
    }
}

/// Each line has whether plain connections go to the proxy if the mode is `auto`, the mode that results, whether the agent
/// has certificates, the service account, and the flags that result.
#[test]
fn with_auto_only_judged_connections_come_by_the_proxy() {
    let flags = [
        Enrolled::PROXY,
        Enrolled::INBOUND,
        Enrolled::TUNNELS,
        Enrolled::ENCRYPTS,
        Enrolled::ONLY_HBONE,
        Enrolled::REFUSES_SERVICES,
    ];
    for (auto, mode, tunnels, account, wanted) in [
        (Some(false), Mode::Proxy, true, "web", "101110"),
        (Some(true), Mode::Proxy, true, "web", "111110"),
        (None, Mode::Proxy, true, "web", "111100"),
        (None, Mode::Proxy, true, "", "111001"),
        (None, Mode::Proxy, false, "web", "110001"),
        (None, Mode::Kernel, true, "web", "000001"),
    ] {
        let of_node = Member::of_node(&Snapshot::default());
        let workload = Workload {
            account: account.into(),
            ..(*of_node.workload).clone()
        };
        let member = Member {
            policy: Policy {
                mode,
                // `mesh.unsupported: deny`.
                refused: Some(Box::default()),
                ..Policy::default()
            },
            workload: Arc::new(workload),
            auto: auto.map(|plain_to_proxy| Auto { plain_to_proxy }),
            ..of_node
        };
        let mut tables = Captured::default();
        let mut enroller = Enroller::after(&tables, false, tunnels);
        let entry = enroller.enrol(&member, &mut tables);
        let found = flags.map(|flag| u8::from(entry.flags & flag != 0).to_string());
        assert_eq!(
            found.concat(),
            wanted,
            "{auto:?} {mode:?} {tunnels} {account}"
        );
    }
}

#[test]
fn workloads_whose_inbound_connections_go_to_the_agents_proxy_accept_tunnels() {
    let proxied = || Policy {
        mode: Mode::Proxy,
        ..Policy::default()
    };
    let with = |ports: &[(u16, bool)]| Policy {
        inbound_ports: ports.iter().copied().collect(),
        ..proxied()
    };
    let inbound = |inbound| Policy {
        inbound,
        ..with(&[(80, true)])
    };
    let kernel = Policy {
        mode: Mode::Kernel,
        ..proxied()
    };
    for (policy, foreign, tunnels, wanted) in [
        (proxied(), false, true, true),
        (proxied(), false, false, false),
        (proxied(), true, true, false),
        (kernel, false, true, false),
        (inbound(Inbound::Listed), false, true, true),
        (inbound(Inbound::None), false, true, false),
        (with(&[(80, false)]), false, true, true),
        (with(&[(15_008, false)]), false, true, false),
        (with(&[(15_008, true)]), false, true, false),
    ] {
        let said = format!("{policy:?}, foreign {foreign}, tunnels {tunnels}");
        let member = Member {
            policy,
            ..Member::of_node(&Snapshot::default())
        };
        let mut tables = Captured::default();
        let mut enroller = Enroller::after(&tables, foreign, tunnels);
        let home = Home {
            cookie: 1,
            interfaces: &BTreeMap::new(),
        };
        let entry = enroller.enrol_namespace(&member, home, &mut tables);
        assert_eq!(entry.flags & Enrolled::TUNNELS != 0, wanted, "{said}");
        assert_eq!(tables.namespaces[&1].flags, entry.flags);
    }
}
