//! The decisions about connections and datagrams, on made-up rules.

use std::collections::HashMap;

use super::*;
use crate::Reason;

/// Rules and circumstances.
#[expect(clippy::struct_excessive_bools, reason = "the answers of the trait")]
#[derive(Clone, Default)]
pub(super) struct Fake {
    /// By kind and number.
    pub(super) rules: HashMap<(u32, u32), u32>,
    pub(super) ranges: HashMap<Addr, u32>,
    pub(super) is_own: bool,
    pub(super) is_itself: bool,
    pub(super) is_known: bool,
    pub(super) is_refused: bool,
    pub(super) speaks_hbone: bool,
    pub(super) listens: bool,
}

/// The numbers of the policy, of the workload and of its resolvers.
const POLICY: u32 = 5;
const WORKLOAD: u32 = 6;
const RESOLVERS: u32 = 7;
/// The address of a resolver.
const RESOLVER: &str = "10.96.0.10";

impl Rules for Fake {
    fn rule(&self, key: &RuleKey) -> u32 {
        let of = if key.kind == RuleKey::INTERFACE {
            WORKLOAD
        } else {
            POLICY
        };
        assert_eq!(key.of, of);
        self.rules.get(&(key.kind, key.id)).copied().unwrap_or(0)
    }

    fn range(&self, policy: u32, to: Addr) -> u32 {
        if policy == RESOLVERS {
            return if to == addr(RESOLVER) { CAPTURED } else { 0 };
        }
        assert_eq!(policy, POLICY);
        self.ranges.get(&to).copied().unwrap_or(0)
    }
}

impl Circumstances for Fake {
    fn is_own(&self) -> bool {
        self.is_own
    }

    fn is_itself(&self) -> bool {
        self.is_itself
    }

    fn is_known(&self) -> bool {
        self.is_known
    }

    fn is_refused(&self) -> bool {
        self.is_refused
    }

    fn speaks_hbone(&self) -> bool {
        self.speaks_hbone
    }

    fn listens(&self) -> bool {
        self.listens
    }
}

pub(super) fn enrolled(flags: u32) -> Enrolled {
    Enrolled {
        policy: POLICY,
        flags,
        workload: WORKLOAD,
        resolvers: RESOLVERS,
    }
}

/// Rules about ports 81 to 83, ranges, users, groups and interfaces.
pub(super) fn rules() -> Fake {
    let mut fake = Fake::default();
    for (byte, value) in (1_u8..).zip([CAPTURED, EXCLUDED, JUDGED]) {
        let nth = u32::from(byte);
        fake.rules.insert((RuleKey::OUTBOUND_PORT, 80 + nth), value);
        fake.rules.insert((RuleKey::USER, nth), value);
        fake.rules.insert((RuleKey::GROUP, nth), value);
        fake.rules.insert((RuleKey::INTERFACE, nth), value);
        fake.ranges.insert(Addr::from_v4([10, 0, 0, byte]), value);
        fake.ranges
            .insert(Addr::from_v4([127, 0, 0, 10 + byte]), value);
    }
    for (port, value) in [(81, CAPTURED), (82, EXCLUDED), (83, REFUSED)] {
        fake.rules.insert((RuleKey::INBOUND_PORT, port), value);
    }
    fake
}

#[test]
fn users_and_groups_are_excluded() {
    let fake = rules();
    let (all, only) = (
        Enrolled::HAS_USERS,
        Enrolled::HAS_USERS | Enrolled::ONLY_USERS,
    );
    for (flags, user, group, excluded) in [
        (0, 2, 2, false),
        (Enrolled::ONLY_USERS, 2, 2, false),
        (all, 0, 0, false),
        (all, 1, 1, false),
        (all, 0, 1, false),
        (all, 2, 0, true),
        (all, 0, 2, true),
        (all, 1, 2, true),
        (only, 0, 0, true),
        (only, 1, 0, false),
        (only, 1, 1, false),
        (only, 0, 1, false),
        (only, 2, 0, true),
        (only, 1, 2, true),
    ] {
        let found = excludes_user(&fake, &enrolled(flags), (user, group));
        assert_eq!(found, excluded, "{flags:#x} {user} {group}");
    }
}

#[test]
fn ports_come_before_ranges() {
    let fake = rules();
    let (ports, ranges) = (Enrolled::HAS_OUTBOUND_PORTS, Enrolled::HAS_RANGES);
    let both = ports | ranges;
    let captured = (Reason::Captured, true, false);
    let port = (Reason::ExcludedPort, false, true);
    let range = (Reason::ExcludedRange, false, true);
    let judged_port = (Reason::ExcludedPort, true, false);
    let judged_range = (Reason::ExcludedRange, true, false);
    let loopback = (Reason::ExcludedLoopback, false, false);
    for (flags, to, at, wanted) in [
        (0, "10.0.0.2", 82, captured),
        (ports, "10.0.0.2", 80, captured),
        (ports, "10.0.0.2", 81, captured),
        (ports, "10.0.0.1", 82, port),
        (ports, "10.0.0.1", 83, judged_port),
        (ranges, "10.0.0.1", 82, captured),
        (ranges, "10.0.0.2", 81, range),
        (ranges, "10.0.0.3", 81, judged_range),
        (ranges, "10.0.0.4", 81, captured),
        (both, "10.0.0.2", 81, captured),
        (both, "10.0.0.2", 80, range),
        (both, "10.0.0.2", 83, judged_port),
        (both, "127.0.0.11", 81, loopback),
        (both, "0.0.0.0", 81, loopback),
        (both, "::1", 81, loopback),
        (both | Enrolled::LOOPBACK, "127.0.0.11", 81, captured),
        (both | Enrolled::LOOPBACK, "127.0.0.12", 81, loopback),
        (both | Enrolled::LOOPBACK, "127.0.0.14", 81, loopback),
        (both | Enrolled::LOOPBACK, "::", 81, loopback),
    ] {
        let (to, at, enrolled) = (addr(to), Port::new(at), enrolled(flags));
        let (reason, is_judged) = outbound(&fake, &enrolled, to, at, false);
        let is_exempt = exempts(&fake, &enrolled, to, at);
        assert_eq!((reason, is_judged, is_exempt), wanted, "{to} {at}");
        let user = outbound(&fake, &enrolled, to, at, true);
        assert_eq!(user, (Reason::ExcludedUser, false));
    }
}

pub(super) const CONFIG: CaptureConfig = CaptureConfig {
    agent_cgroup: 0,
    before_cgroup: 0,
    mark: 0,
    levels: 0,
    outbound: Port::new(15_001),
    inbound: Port::new(15_006),
    flags: 0,
};

pub(super) const RULED: u32 = Enrolled::HAS_OUTBOUND_PORTS | Enrolled::HAS_RANGES;
pub(super) const PROXIED: u32 = RULED | Enrolled::PROXY;
const DENIED: u32 = RULED | Enrolled::EGRESS_DENY;
const BOTH: u32 = PROXIED | DENIED;

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn outbound_connections_are_judged() {
    let plain = rules;
    let own = || Fake {
        is_own: true,
        ..rules()
    };
    let itself = || Fake {
        is_itself: true,
        ..rules()
    };
    let known = || Fake {
        is_known: true,
        ..rules()
    };
    let refused = || Fake {
        is_refused: true,
        ..known()
    };
    let listens = || Fake {
        listens: true,
        ..refused()
    };
    let limited = PROXIED | Enrolled::REFUSES_SERVICES;
    for (fake, flags, to, port, wanted) in [
        (plain(), RULED, "10.9.0.1", 80, (Reason::Direct, false)),
        (plain(), PROXIED, "10.9.0.1", 80, (Reason::ProxyDown, false)),
        (
            listens(),
            PROXIED,
            "10.9.0.1",
            80,
            (Reason::Captured, false),
        ),
        (listens(), BOTH, "10.9.0.1", 80, (Reason::Captured, false)),
        (known(), BOTH, "10.9.0.1", 80, (Reason::ProxyDown, true)),
        (
            known(),
            BOTH | Enrolled::FAIL_OPEN,
            "10.9.0.1",
            80,
            (Reason::ProxyBypassed, true),
        ),
        (
            plain(),
            DENIED,
            "10.9.0.1",
            80,
            (Reason::EgressDenied, false),
        ),
        (known(), DENIED, "10.9.0.1", 80, (Reason::Direct, true)),
        // Excluded, by the configuration or by an object that the egress policy still applies to.
        (plain(), BOTH, "10.9.0.1", 82, (Reason::ExcludedPort, true)),
        (
            plain(),
            PROXIED,
            "10.9.0.1",
            82,
            (Reason::ExcludedPort, false),
        ),
        (plain(), BOTH, "10.0.0.2", 80, (Reason::ExcludedRange, true)),
        (plain(), BOTH, "10.9.0.1", 83, (Reason::EgressDenied, false)),
        (known(), BOTH, "10.9.0.1", 83, (Reason::ExcludedPort, true)),
        (
            plain(),
            PROXIED,
            "10.0.0.3",
            80,
            (Reason::ExcludedRange, false),
        ),
        (
            plain(),
            BOTH,
            "127.0.0.1",
            80,
            (Reason::ExcludedLoopback, false),
        ),
        // To itself.
        (
            itself(),
            BOTH,
            "10.9.0.1",
            80,
            (Reason::ExcludedLoopback, true),
        ),
        (
            itself(),
            PROXIED,
            "10.9.0.1",
            80,
            (Reason::ExcludedLoopback, false),
        ),
        (itself(), BOTH, "10.9.0.1", 82, (Reason::ExcludedPort, true)),
        // To the proxy.
        (
            plain(),
            PROXIED,
            "127.0.0.1",
            15_001,
            (Reason::Recursive, false),
        ),
        (plain(), BOTH, "::1", 15_006, (Reason::Recursive, false)),
        (
            own(),
            PROXIED,
            "10.9.0.1",
            15_006,
            (Reason::Recursive, false),
        ),
        (
            plain(),
            PROXIED,
            "10.9.0.1",
            15_001,
            (Reason::ProxyDown, false),
        ),
        (own(), PROXIED, "10.9.0.1", 80, (Reason::ProxyDown, false)),
        (own(), RULED, "10.9.0.1", 15_001, (Reason::Direct, false)),
        // A service with objects that limit connections.
        (
            listens(),
            limited,
            "10.9.0.1",
            80,
            (Reason::Unsupported, false),
        ),
        (plain(), limited, "10.9.0.1", 80, (Reason::ProxyDown, false)),
        (
            refused(),
            limited,
            "10.9.0.1",
            83,
            (Reason::ExcludedPort, false),
        ),
    ] {
        let to = (addr(to), Port::new(port));
        let found = decide_outbound(&fake, &CONFIG, &enrolled(flags), to, false);
        assert_eq!(found, wanted, "{to:?} {flags:#x}");
        let user = decide_outbound(&fake, &CONFIG, &enrolled(flags), to, true);
        assert_eq!(user, (Reason::ExcludedUser, false), "{to:?} {flags:#x}");
    }
}

#[test]
fn datagrams_are_judged_if_egress_is_denied() {
    let plain = rules;
    let itself = || Fake {
        is_itself: true,
        ..rules()
    };
    let known = || Fake {
        is_known: true,
        ..rules()
    };
    let passes = |checked| (Reason::NotService, checked);
    let denied = (Reason::EgressDenied, false);
    for (fake, flags, port, user, wanted) in [
        (plain(), PROXIED, 53, false, passes(false)),
        (plain(), DENIED, 53, false, denied),
        (plain(), DENIED, 53, true, passes(false)),
        (plain(), DENIED, 82, false, passes(true)),
        (plain(), DENIED, 83, false, denied),
        (known(), DENIED, 53, false, passes(true)),
        (itself(), DENIED, 53, false, passes(true)),
    ] {
        let to = (addr("10.9.0.1"), Port::new(port));
        let found = decide_datagram(&fake, &enrolled(flags), to, user);
        assert_eq!(found, wanted, "{port} {flags:#x}");
    }
}

#[test]
fn queries_go_to_resolvers() {
    let fake = rules();
    for (resolvers, to, port, user, wanted) in [
        (RESOLVERS, RESOLVER, 53, false, true),
        (RESOLVERS, RESOLVER, 53, true, false),
        (RESOLVERS, RESOLVER, 54, false, false),
        (RESOLVERS, "10.96.0.11", 53, false, false),
        (0, RESOLVER, 53, false, false),
    ] {
        let enrolled = Enrolled {
            resolvers,
            ..enrolled(0)
        };
        let found = is_query(&fake, &enrolled, (addr(to), Port::new(port)), user);
        assert_eq!(found, wanted, "{to} {port}");
    }
}

#[test]
fn connections_by_virtual_interfaces_are_captured() {
    let foreign = CaptureConfig::FOREIGN;
    let proxied = Enrolled::VIRTUAL | Enrolled::PROXY;
    for (flags, config, port, interface, wanted) in [
        (proxied, 0, 80, 1, Reason::Captured),
        (proxied, 0, 80, 3, Reason::Captured),
        (proxied, 0, 80, 2, Reason::NotService),
        (proxied, 0, 80, 4, Reason::NotService),
        (Enrolled::PROXY, 0, 80, 1, Reason::NotService),
        (proxied, 0, 15_001, 1, Reason::Recursive),
        (proxied, 0, 15_006, 1, Reason::Recursive),
        (proxied, foreign, 15_001, 1, Reason::NotService),
        (proxied, foreign, 80, 1, Reason::Captured),
        (proxied | Enrolled::EGRESS_DENY, 0, 80, 1, Reason::Captured),
        (
            proxied | Enrolled::EGRESS_DENY,
            foreign,
            80,
            1,
            Reason::EgressDenied,
        ),
        (Enrolled::VIRTUAL, 0, 80, 1, Reason::Captured),
        (
            Enrolled::VIRTUAL | Enrolled::EGRESS_DENY,
            0,
            80,
            1,
            Reason::EgressDenied,
        ),
    ] {
        let config = CaptureConfig {
            flags: config,
            ..CONFIG
        };
        let enrolled = enrolled(flags);
        let found = by_interface(&rules(), &config, &enrolled, Port::new(port), interface);
        assert_eq!(found, wanted, "{flags:#x} {port} {interface}");
    }
}

#[test]
fn inbound_connections_have_rules() {
    let (ports, interfaces) = (Enrolled::HAS_INBOUND_PORTS, Enrolled::HAS_INTERFACES);
    let others = Enrolled::INBOUND_OTHERS;
    let refuses = others | Enrolled::REFUSES_OTHER_PORTS;
    let (captured, excluded) = (Reason::CapturedInbound, Reason::ExcludedPort);
    for (flags, port, interface, wanted) in [
        (0, 80, 4, excluded),
        (others, 80, 4, captured),
        (others, 82, 2, captured),
        (refuses, 80, 4, Reason::Unsupported),
        (Enrolled::REFUSES_OTHER_PORTS, 80, 4, excluded),
        (ports, 80, 4, excluded),
        (ports, 81, 4, captured),
        (ports | refuses, 81, 4, captured),
        (ports | others, 82, 4, excluded),
        (ports | others, 83, 4, Reason::Unsupported),
        (interfaces | others, 80, 1, captured),
        (interfaces | others, 80, 2, Reason::ExcludedInterface),
        (interfaces | others, 80, 3, Reason::ExcludedInterface),
        (interfaces | others, 80, 4, captured),
    ] {
        let local = Local {
            netns: 1,
            policy: POLICY,
            flags,
            workload: WORKLOAD,
            resolvers: 0,
        };
        let found = inbound(&rules(), &local, port, interface);
        assert_eq!(found, wanted, "{flags:#x} {port} {interface}");
    }
}

/// Whatever the rules about the port and the interface say, and whether or not connections pass without a proxy.
#[test]
fn tunnels_go_before_all_rules() {
    let ports = Enrolled::HAS_INBOUND_PORTS | Enrolled::HAS_INTERFACES;
    let tunnels = Enrolled::TUNNELS;
    let others = Enrolled::INBOUND | Enrolled::INBOUND_OTHERS | Enrolled::FAIL_OPEN;
    for (flags, port, wanted) in [
        (0, 15_008, None),
        (others, 15_008, None),
        (others | Enrolled::REFUSES_INBOUND, 15_008, None),
        (tunnels, 15_008, Some(Reason::CapturedInbound)),
        (tunnels | others, 15_008, Some(Reason::CapturedInbound)),
        (tunnels | ports, 15_008, Some(Reason::CapturedInbound)),
        (
            tunnels | others | Enrolled::REFUSES_INBOUND,
            15_008,
            Some(Reason::Unsupported),
        ),
        (tunnels | others, 15_006, None),
        (tunnels | others, 80, None),
        // Only the low half would be the port.
        (tunnels | others, 15_008 + (1 << 16), None),
    ] {
        let local = Local {
            flags,
            ..Local::default()
        };
        assert_eq!(tunnel(&local, port), wanted, "{flags:#x} {port}");
    }
    assert!(Reason::Unsupported.is_refusal() && Reason::ProxyDown.is_refusal());
}
