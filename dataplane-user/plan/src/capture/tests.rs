//! Tests that decide connections by the entries of a policy.

use std::{collections::BTreeSet, net::IpAddr};

use dataplane_common::{
    Port, Reason,
    capture::{self, Local},
};
use model::{Mode, Rules};

use super::*;

fn said(rules: &Rules, addr: &str, port: u16, user: u32) -> Reason {
    let mut tables = Captured::default();
    let policy = rules.policy().expect("captured");
    let (policy, flags) = Policies::after(7).add(&policy, true, &mut tables);
    let enrolled = Enrolled {
        policy,
        flags,
        ..Enrolled::default()
    };
    let addr: IpAddr = addr.parse().unwrap();
    let excludes_user = capture::excludes_user(&tables, &enrolled, (user, 0));
    capture::outbound(
        &tables,
        &enrolled,
        addr.into(),
        Port::new(port),
        excludes_user,
    )
    .0
}

fn rules(edit: impl FnOnce(&mut Rules)) -> Rules {
    let mut rules = Rules {
        captured: Some(true),
        ..Rules::default()
    };
    edit(&mut rules);
    rules
}

#[test]
fn the_longest_prefix_decides_and_the_more_specific_layer_of_the_same() {
    let all = rules(|r| {
        r.outbound_ranges
            .insert("10.0.0.0/8".parse().unwrap(), false);
        r.outbound_ranges.insert("fd00::/8".parse().unwrap(), false);
    });
    let own = rules(|r| {
        r.outbound_ranges
            .insert("10.1.0.0/16".parse().unwrap(), true);
        r.outbound_ranges.insert("fd00::/8".parse().unwrap(), true);
    });
    let both = own.over(&all);
    assert_eq!(said(&both, "10.2.0.1", 80, 0), Reason::ExcludedRange);
    assert_eq!(said(&both, "10.1.0.1", 80, 0), Reason::Captured);
    assert_eq!(said(&both, "11.1.0.1", 80, 0), Reason::Captured);
    assert_eq!(said(&both, "fd00::1", 80, 0), Reason::Captured);
    assert_eq!(said(&all, "fd00::1", 80, 0), Reason::ExcludedRange);
}

#[test]
fn all_of_one_family_is_nothing_of_the_other() {
    let six = rules(|r| {
        r.outbound_ranges.insert("::/0".parse().unwrap(), false);
    });
    assert_eq!(said(&six, "2001:db8::1", 80, 0), Reason::ExcludedRange);
    assert_eq!(said(&six, "192.0.2.1", 80, 0), Reason::Captured);
    let four = rules(|r| {
        r.outbound_ranges
            .insert("0.0.0.0/0".parse().unwrap(), false);
    });
    assert_eq!(said(&four, "2001:db8::1", 80, 0), Reason::Captured);
    assert_eq!(said(&four, "192.0.2.1", 80, 0), Reason::ExcludedRange);
}

#[test]
fn what_is_included_excludes_everything_else() {
    let only = rules(|r| r.include_ranges(["10.1.0.0/16".parse().unwrap()]));
    assert_eq!(said(&only, "10.1.0.1", 80, 0), Reason::Captured);
    assert_eq!(said(&only, "10.2.0.1", 80, 0), Reason::ExcludedRange);
    assert_eq!(said(&only, "2001:db8::1", 80, 0), Reason::ExcludedRange);
    let ports = rules(|r| {
        r.include_ranges([]);
        r.outbound_ports.insert(443, true);
    });
    assert_eq!(said(&ports, "10.2.0.1", 443, 0), Reason::Captured);
    assert_eq!(said(&ports, "10.2.0.1", 80, 0), Reason::ExcludedRange);
}

#[test]
fn without_inbound_capture_no_port_is_captured() {
    let all = rules(|r| {
        r.inbound_ports.insert(80, true);
    });
    let none = rules(|r| r.inbound = Some(false));
    let again = rules(|r| r.inbound = Some(true));
    let captured = |rules: &Rules| {
        let mut tables = Captured::default();
        let policy = rules.policy().expect("captured");
        let (policy, flags) = Policies::after(7).add(&policy, true, &mut tables);
        let local = Local {
            netns: 1,
            policy,
            flags,
            workload: 1,
            resolvers: 0,
        };
        let inbound = flags & Enrolled::INBOUND != 0;
        (
            inbound,
            capture::inbound(&tables, &local, 80, 2) == Reason::CapturedInbound,
        )
    };
    assert_eq!(captured(&all), (true, true));
    assert_eq!(captured(&none.over(&all)), (false, false));
    assert_eq!(captured(&again.over(&none.over(&all))), (true, true));
}

/// Port 81 is excluded from capture. Each line has the refused ports (`*`: all others, `!`: not), and the refused ones of
/// 80, 81 and 90, without and with a list of the only captured ports, 80.
#[test]
fn inbound_connections_that_are_captured_may_be_refused() {
    for (refused, wanted) in [
        ("", ["", ""]),
        ("*", ["80 90", "80"]),
        ("* !80 !81", ["90", ""]),
        ("80 81", ["80", "80"]),
        ("90", ["90", ""]),
    ] {
        for (listed, wanted) in [false, true].into_iter().zip(wanted) {
            let policy = rules(|r| {
                r.inbound_ports.insert(81, false);
                if listed {
                    r.inbound_ports.insert(80, true);
                    r.inbound_others = Some(false);
                }
            });
            let ports = refused.split_whitespace().filter(|word| *word != "*");
            let port = |word: &str| {
                (
                    word.trim_matches('!').parse().unwrap(),
                    !word.starts_with('!'),
                )
            };
            let refused = model::RefusedInbound {
                ports: ports.map(port).collect(),
                others: refused.starts_with('*'),
            };
            let mut policy = policy.policy().expect("captured");
            policy.refused = Some(Box::new(refused));
            let mut tables = Captured::default();
            let (policy, flags) = Policies::after(7).add(&policy, false, &mut tables);
            let local = Local {
                netns: 1,
                policy,
                flags,
                workload: 1,
                resolvers: 0,
            };
            let verdict = |port: &u32| capture::inbound(&tables, &local, *port, 2);
            let found = [80, 81, 90].into_iter();
            let found = found.filter(|port| verdict(port) == Reason::Unsupported);
            let found: Vec<String> = found.map(|port| port.to_string()).collect();
            assert_eq!(found.join(" "), wanted, "{listed}");
            assert_eq!(flags & Enrolled::INBOUND, 0, "in the kernel's mode");
            let has_flag = flags & Enrolled::REFUSES_INBOUND != 0;
            assert!(has_flag || found.is_empty(), "the program is attached");
        }
    }
}

#[test]
fn users_loopback_and_ports_come_before_ranges() {
    let all = rules(|r| {
        r.excluded_uids.insert(1500);
        r.outbound_ports.insert(22, false);
    });
    assert_eq!(said(&all, "192.0.2.1", 80, 1500), Reason::ExcludedUser);
    assert_eq!(said(&all, "127.0.0.1", 80, 0), Reason::ExcludedLoopback);
    assert_eq!(said(&all, "::1", 80, 0), Reason::ExcludedLoopback);
    assert_eq!(said(&all, "192.0.2.1", 22, 0), Reason::ExcludedPort);
    assert_eq!(said(&all, "192.0.2.1", 80, 0), Reason::Captured);
}

#[test]
fn loopback_is_captured_by_its_own_ranges_only() {
    let wide = rules(|r| {
        r.include_ranges(["0.0.0.0/0".parse().unwrap(), "64.0.0.0/2".parse().unwrap()]);
    });
    assert_eq!(said(&wide, "127.1.2.3", 80, 0), Reason::ExcludedLoopback);
    let one = rules(|r| {
        r.outbound_ranges
            .insert("127.1.2.0/24".parse().unwrap(), true);
        r.outbound_ranges
            .insert("127.1.2.9/32".parse().unwrap(), false);
        r.outbound_ranges.insert("::/0".parse().unwrap(), true);
        r.outbound_ports.insert(443, true);
        r.outbound_ports.insert(22, false);
        r.excluded_uids.insert(1500);
    });
    assert_eq!(said(&one, "127.1.2.3", 80, 0), Reason::Captured);
    assert_eq!(said(&one, "127.1.2.3", 22, 0), Reason::ExcludedPort);
    assert_eq!(said(&one, "127.1.2.3", 80, 1500), Reason::ExcludedUser);
    for addr in ["127.1.2.9", "127.1.3.1", "127.0.0.1", "::1", "0.0.0.0"] {
        assert_eq!(said(&one, addr, 443, 0), Reason::ExcludedLoopback, "{addr}");
    }
    assert_eq!(said(&one, "192.0.2.1", 80, 0), Reason::Captured);
    let all = rules(|r| r.include_ranges(["127.0.0.0/8".parse().unwrap()]));
    assert_eq!(said(&all, "127.0.0.2", 80, 0), Reason::Captured);
    assert_eq!(said(&all, "127.0.0.1", 80, 0), Reason::ExcludedLoopback);
    assert_eq!(said(&all, "192.0.2.1", 80, 0), Reason::ExcludedRange);
}

#[test]
fn only_ranges_within_loopback_capture_it() {
    for (range, is_captured, wanted) in [
        ("127.1.2.0/24", true, true),
        ("127.0.0.0/8", true, true),
        ("127.1.2.0/24", false, false),
        ("127.0.0.1/32", true, false),
        ("10.0.0.0/8", true, false),
        ("0.0.0.0/0", true, false),
        ("::1/128", true, false),
    ] {
        let outbound_ranges = [(range.parse().unwrap(), is_captured)].into();
        let policy = Policy {
            outbound_ranges,
            ..Policy::default()
        };
        assert_eq!(captures_loopback(&policy), wanted, "{range}");
    }
}

/// Each line has a part of a policy, and the flags by which it differs from a policy without this part, without a proxy and
/// with one.
#[test]
fn parts_of_a_policy_have_flags() {
    use Enrolled as E;
    type Edit = fn(&mut Policy);
    let flags = |proxied, edit: Edit| {
        let mut policy = Policy {
            mode: if proxied { Mode::Proxy } else { Mode::Kernel },
            inbound: Inbound::Listed,
            without_proxy: WithoutProxy::Refuse,
            ..Policy::default()
        };
        edit(&mut policy);
        let mut tables = Captured::default();
        Policies::default().add(&policy, false, &mut tables).1
    };
    let plain = [false, true].map(|proxied| flags(proxied, |_| {}));
    assert_eq!(plain, [E::CAPTURED, E::CAPTURED | E::PROXY | E::INBOUND]);
    let users = E::HAS_USERS;
    let lines: [(Edit, [u32; 2]); 15] = [
        (|p| p.included_uids = [1].into(), [users | E::ONLY_USERS; 2]),
        (|p| p.included_gids = [1].into(), [users | E::ONLY_USERS; 2]),
        (|p| p.excluded_uids = [1].into(), [users; 2]),
        (|p| p.excluded_gids = [1].into(), [users; 2]),
        (|p| p.egress = Egress::Deny, [E::EGRESS_DENY; 2]),
        (
            |p| p.virtual_interfaces = ["tap0".into()].into(),
            [0, E::VIRTUAL],
        ),
        (
            |p| {
                p.egress = Egress::Deny;
                p.virtual_interfaces = ["tap0".into()].into();
            },
            [E::EGRESS_DENY | E::VIRTUAL; 2],
        ),
        (|p| p.without_proxy = WithoutProxy::Pass, [E::FAIL_OPEN; 2]),
        (|p| p.inbound = Inbound::All, [E::INBOUND_OTHERS; 2]),
        (|p| p.inbound = Inbound::None, [0, E::INBOUND]),
        (
            |p| p.outbound_ranges = [("10.0.0.0/8".parse().unwrap(), true)].into(),
            [E::HAS_RANGES; 2],
        ),
        (
            |p| p.outbound_ranges = [("127.0.0.0/8".parse().unwrap(), true)].into(),
            [E::HAS_RANGES | E::LOOPBACK; 2],
        ),
        (
            |p| p.outbound_ports = [(80, true)].into(),
            [E::HAS_OUTBOUND_PORTS; 2],
        ),
        (
            |p| p.inbound_ports = [(80, true)].into(),
            [E::HAS_INBOUND_PORTS; 2],
        ),
        (
            |p| p.refused = Some(Box::default()),
            [E::REFUSES_SERVICES; 2],
        ),
    ];
    for (nth, (edit, differ)) in lines.into_iter().enumerate() {
        let found = [false, true].map(|proxied| flags(proxied, edit));
        let found = [found[0] ^ plain[0], found[1] ^ plain[1]];
        assert_eq!(found, differ, "line {nth}");
    }
    // Connections go on as before, whatever else the policy says.
    let only_queries = flags(true, |p| {
        p.only_queries = true;
        p.egress = Egress::Deny;
        p.excluded_uids = [1].into();
    });
    assert_eq!(only_queries, users);
    let none = flags(true, |p| {
        p.inbound = Inbound::None;
        p.refused = Some(Box::new(model::RefusedInbound {
            others: true,
            ..model::RefusedInbound::default()
        }));
    });
    assert_eq!(none ^ plain[1], E::INBOUND | E::REFUSES_SERVICES);
}

#[test]
fn the_longest_range_is_shown_as_it_was_given() {
    let mut tables = Captured::default();
    let policy = rules(|r| {
        for range in ["10.0.0.0/8", "10.1.0.0/16", "fd00::/8"] {
            r.outbound_ranges.insert(range.parse().unwrap(), false);
        }
    });
    let (policy, _) = Policies::default().add(&policy.policy().unwrap(), true, &mut tables);
    for (addr, wanted) in [
        ("10.2.0.1", "10.0.0.0/8"),
        ("10.1.0.1", "10.1.0.0/16"),
        ("fd00::1", "fd00::/8"),
    ] {
        let addr: IpAddr = addr.parse().unwrap();
        let wanted: IpNet = wanted.parse().unwrap();
        let found = tables.longest_range(policy, addr.into());
        assert_eq!(found, Some((wanted, EXCLUDED)));
        assert_eq!(tables.longest_range(policy + 1, addr.into()), None);
    }
}

#[test]
fn only_included_users_and_groups_are_captured() {
    let one = rules(|r| r.included_uids = [1500].into());
    assert_eq!(said(&one, "192.0.2.1", 80, 1500), Reason::Captured);
    assert_eq!(said(&one, "192.0.2.1", 80, 7), Reason::ExcludedUser);
    // Every process of the test has group 0.
    let group = rules(|r| r.included_gids = [0].into()).over(&one);
    assert_eq!(said(&group, "192.0.2.1", 80, 7), Reason::Captured);
    // A user or group that any layer excludes is excluded.
    let excluded = rules(|r| r.excluded_uids = [1500].into());
    for both in [group.over(&excluded), excluded.over(&group)] {
        assert_eq!(said(&both, "192.0.2.1", 80, 1500), Reason::ExcludedUser);
        assert_eq!(said(&both, "192.0.2.1", 80, 7), Reason::Captured);
    }
    let other = rules(|r| r.included_gids = [5].into());
    assert_eq!(said(&other, "192.0.2.1", 80, 1500), Reason::ExcludedUser);
}

#[test]
fn a_workload_that_cannot_be_looked_at_keeps_all_its_entries_and_rules() {
    let mut held = Captured::default();
    // No number of a policy is one of a workload.
    let mut policies = Policies::after(100);
    let resolvers = [("192.0.2.53/32".parse().unwrap(), true)].into();
    let resolvers = policies.add_resolvers(&resolvers, &mut held);
    assert_eq!((resolvers, held.ranges.len()), (101, 1));
    let with_port = |port| {
        rules(|r| {
            r.outbound_ports.insert(port, false);
            r.outbound_ranges
                .insert("10.0.0.0/8".parse().unwrap(), false);
        })
    };
    let mut enrol = |workload, cookie: u64, port, addr: &str| {
        let policy = with_port(port).policy().unwrap();
        let (policy, flags) = policies.add(&policy, true, &mut held);
        let entry = Enrolled {
            policy,
            flags,
            workload,
            resolvers: if cookie == 11 { resolvers } else { 0 },
        };
        let local = Local {
            netns: cookie,
            policy,
            flags,
            workload,
            resolvers: 0,
        };
        match cookie {
            0 => _ = held.cgroups.insert(workload.into(), entry),
            _ => _ = held.namespaces.insert(cookie, entry),
        }
        let addr: IpAddr = addr.parse().unwrap();
        held.locals.insert(addr.into(), local);
        let key = RuleKey {
            of: workload,
            kind: RuleKey::INTERFACE,
            id: 3,
        };
        held.rules.insert(key, EXCLUDED);
    };
    enrol(1, 11, 22, "10.0.0.1");
    enrol(2, 12, 23, "10.0.0.2");
    enrol(3, 0, 24, "10.0.0.3");
    let mut all = Captured::default();
    all.keep(&held, |_, _| true);
    assert_eq!(all, held);
    let mut none = Captured::default();
    none.keep(&held, |_, _| false);
    assert_eq!(none, Captured::default());
    // An entry that was read again wins over the old entry.
    let mut one = Captured::default();
    one.namespaces.insert(12, Enrolled::default());
    one.keep(&held, |workload, _| workload != 1);
    assert_eq!(one.namespaces[&12], Enrolled::default());
    assert_eq!(one.cgroups, held.cgroups);
    assert!(one.rules.keys().all(|key| key.id != 22 && key.of != 1));
    assert!(one.rules.keys().any(|key| key.id == 24));
    // Policies of the workloads 2 and 3; resolvers of workload 1.
    let policies: BTreeSet<u32> = one.ranges.keys().map(|key| key.policy).collect();
    assert_eq!(policies, [103, 104].into());
}

#[test]
fn equal_policies_share_a_number_and_others_do_not() {
    let mut tables = Captured::default();
    let mut policies = Policies::after(3);
    let one = rules(|_| {}).policy().unwrap();
    let other = rules(|r| {
        r.outbound_ports.insert(22, false);
    });
    let other = other.policy().unwrap();
    let (a, _) = policies.add(&one, true, &mut tables);
    let (b, _) = policies.add(&other, true, &mut tables);
    assert_eq!((a, b), (4, 5));
    assert_eq!(policies.add(&one, true, &mut tables).0, 4);
    policies.keep(|number| number != 4, |_| true);
    assert_eq!(policies.add(&one, true, &mut tables).0, 6);
}
