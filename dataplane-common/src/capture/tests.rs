extern crate std;

use std::{
    collections::{HashMap, HashSet},
    vec::Vec,
};

use super::*;
use crate::Reason;

fn addr(text: &str) -> Addr {
    text.parse::<core::net::IpAddr>().unwrap().into()
}

#[test]
fn flags_are_bits_of_their_own() {
    use Enrolled as E;
    let bits = |flags: &[u32]| -> Vec<u32> {
        assert!(flags.iter().all(|flag| flag.is_power_of_two()));
        flags.iter().map(|flag| flag.trailing_zeros()).collect()
    };
    let enrolled = [
        E::PROXY,
        E::EGRESS_DENY,
        E::FAIL_OPEN,
        E::INBOUND,
        E::INBOUND_OTHERS,
        E::HAS_RANGES,
        E::HAS_OUTBOUND_PORTS,
        E::HAS_INBOUND_PORTS,
        E::HAS_USERS,
        E::HAS_INTERFACES,
        E::PACKETS,
        E::PACKETS_BEFORE,
        E::ONLY_USERS,
        E::VIRTUAL,
        E::LOOPBACK,
        E::REFUSES_SERVICES,
        E::REFUSES_INBOUND,
        E::REFUSES_OTHER_PORTS,
        E::TUNNELS,
    ];
    assert!(bits(&enrolled).into_iter().eq(0..19));
    assert_eq!(bits(&[E::CAPTURED, FROM_CLIENT]), [31, 31]);
    assert_eq!(
        bits(&[CaptureConfig::FOREIGN, CaptureConfig::ARRIVALS]),
        [0, 1]
    );
    let looked_up = [
        E::PROXY,
        E::INBOUND,
        E::VIRTUAL,
        E::REFUSES_INBOUND,
        E::TUNNELS,
    ];
    assert_eq!(E::LOOKED_UP, looked_up.into_iter().sum::<u32>());
    let mesh = [
        MESH_NAMESPACES,
        MESH_CGROUPS,
        MESH_GUARD,
        MESH_PACKETS,
        MESH_DENIES,
    ];
    assert_eq!(mesh, [1, 2, 4, 8, 16]);
    assert_eq!((KNOWN, ORIGINS), (1_048_576, 131_072));
}

#[test]
fn entries_say_what_the_programs_look_at() {
    for (flags, workload, resolvers, is_let_go, is_judged) in [
        (0, 0, 0, true, false),
        (0, 0, 3, true, true),
        (0, 7, 0, false, false),
        (Enrolled::PACKETS, 0, 0, false, false),
        (Enrolled::CAPTURED, 7, 0, false, true),
        (Enrolled::CAPTURED | Enrolled::PROXY, 7, 3, false, true),
    ] {
        let enrolled = Enrolled {
            flags,
            workload,
            resolvers,
            policy: 0,
        };
        assert_eq!(enrolled.is_let_go(), is_let_go, "{enrolled:?}");
        assert_eq!(enrolled.is_judged(), is_judged, "{enrolled:?}");
        let local = Local {
            netns: 1,
            policy: 5,
            flags,
            workload,
            resolvers,
        };
        assert_eq!(
            local.enrolled(),
            Enrolled {
                policy: 5,
                ..enrolled
            }
        );
    }
    let (captured, inbound) = (Enrolled::CAPTURED, Enrolled::INBOUND);
    let (now, before) = (Enrolled::PACKETS, Enrolled::PACKETS_BEFORE);
    for (flags, is_by_packets, has_packets, is_measured) in [
        (0, false, false, false),
        (captured, false, false, true),
        (captured | Enrolled::PROXY | before, false, true, true),
        (captured | inbound, false, false, false),
        (captured | now, true, true, false),
        (now, true, true, false),
        (before, false, true, false),
        (inbound, false, false, false),
    ] {
        let local = Local {
            flags,
            ..Local::default()
        };
        assert_eq!(local.is_by_packets(), is_by_packets, "{flags:#x}");
        assert_eq!(local.has_packets(), has_packets, "{flags:#x}");
        assert_eq!(local.is_measured(), is_measured, "{flags:#x}");
    }
}

#[test]
fn askers_have_places_by_address_and_port() {
    let places = |askers: &mut dyn Iterator<Item = (Addr, u16)>| {
        let place = |(addr, port)| Asker::place(addr, Port::new(port));
        let places: HashSet<usize> = askers.map(place).collect();
        assert!(places.iter().all(|place| *place < ASKERS));
        places.len()
    };
    let bytes = || 0..=u8::MAX;
    // Of 64 places, 256 askers by chance leave one free.
    for wanted in [
        places(&mut (0..256).map(|port| (addr("192.0.2.1"), 4000 + port))),
        places(&mut bytes().map(|n| (Addr::from_v4([192, 0, 2, n]), 53))),
        places(&mut bytes().map(|n| (Addr::from_words([n.into(), 1, 2, 3]), 53))),
        places(&mut bytes().map(|n| (Addr::from_words([1, n.into(), 2, 3]), 53))),
        places(&mut bytes().map(|n| (Addr::from_words([1, 2, n.into(), 3]), 53))),
    ] {
        assert!(wanted > 48, "{wanted}");
    }
}

#[test]
fn listeners_have_keys_of_their_own() {
    let keys = [true, false].map(|v4| {
        [
            ListenerKey::of_namespace(7, v4),
            ListenerKey::of_interfaces(7, 3, v4),
            ListenerKey::of_packets(3, v4),
            ListenerKey::of_tunnels(7, v4),
        ]
        .map(|key| (key.netns, key.family, key.workload))
    });
    let tunnels = u32::MAX - 1;
    let v4 = [(7, 4, 0), (7, 4, 3), (0, 4, 3), (7, 4, tunnels)];
    assert_eq!(keys[0], v4);
    assert_eq!(keys[1], v4.map(|(netns, _, of)| (netns, 6, of)));
    let key = ListenerKey::of_outbound(7);
    assert_eq!((key.netns, key.family, key.workload), (7, 4, u32::MAX));
}

/// Destinations that differ in any part get many addresses, and only such that the function promises.
#[test]
fn destinations_are_spread() {
    let spread_of = |to: &mut dyn Iterator<Item = (Addr, u16)>| {
        let of = |(addr, port)| spread(addr, Port::new(port)).octets();
        let all: HashSet<[u8; 16]> = to.map(of).collect();
        for octets in &all {
            let [a, b, c, d] = octets[12..] else { panic!() };
            assert!(a == 127 && b & 1 == 1 && b < 128, "{a}.{b}.{c}.{d}");
        }
        all
    };
    let bytes = || 0..=u8::MAX;
    let to = addr("10.96.0.1");
    for all in [
        spread_of(&mut (0..256).map(|port| (to, 8000 + port))),
        spread_of(&mut bytes().map(|n| (Addr::from_v4([10, 96, 0, n]), 80))),
        spread_of(&mut bytes().map(|n| (Addr::from_words([n.into(), 1, 2, 3]), 80))),
        spread_of(&mut bytes().map(|n| (Addr::from_words([1, n.into(), 2, 3]), 80))),
        spread_of(&mut bytes().map(|n| (Addr::from_words([1, 2, n.into(), 3]), 80))),
    ] {
        assert!(all.len() > 250, "{}", all.len());
    }
    // Of 2^22 addresses, 65 536 destinations by chance share 500.
    let all = spread_of(&mut (0..=u16::MAX).map(|port| (to, port)));
    assert!(all.len() > 64_000, "{}", all.len());
}

#[test]
fn proxies_and_resolvers_are_at_loopback() {
    let (proxy, dns) = (Port::new(15_001), Port::new(15_053));
    let mesh =
        MESH_NAMESPACES | u64::from(proxy.be()) << MESH_PORT | u64::from(dns.be()) << MESH_DNS;
    assert_eq!(dns_server(mesh), dns);
    for (to, port, wanted) in [
        ("127.0.0.1", proxy, true),
        ("::1", dns, true),
        ("127.0.0.1", Port::new(80), false),
        ("10.0.0.1", proxy, false),
        ("10.0.0.1", dns, false),
    ] {
        assert_eq!(is_proxy(mesh, addr(to), port), wanted, "{to} {port}");
    }
    for (found, wanted) in [(0x30, true), (0xf0, true), (0x20, false), (0, false)] {
        assert_eq!(has_mark(found, 0x30), wanted, "{found:#x}");
    }
}

/// Rules and circumstances.
#[expect(clippy::struct_excessive_bools, reason = "the answers of the trait")]
#[derive(Clone, Default)]
struct Fake {
    /// By kind and number.
    rules: HashMap<(u32, u32), u32>,
    ranges: HashMap<Addr, u32>,
    is_own: bool,
    is_itself: bool,
    is_known: bool,
    is_refused: bool,
    listens: bool,
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

    fn listens(&self) -> bool {
        self.listens
    }
}

fn enrolled(flags: u32) -> Enrolled {
    Enrolled {
        policy: POLICY,
        flags,
        workload: WORKLOAD,
        resolvers: RESOLVERS,
    }
}

/// Rules about ports 81 to 83, ranges, users, groups and interfaces.
fn rules() -> Fake {
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

const CONFIG: CaptureConfig = CaptureConfig {
    agent_cgroup: 0,
    before_cgroup: 0,
    mark: 0,
    levels: 0,
    outbound: Port::new(15_001),
    inbound: Port::new(15_006),
    flags: 0,
};

const RULED: u32 = Enrolled::HAS_OUTBOUND_PORTS | Enrolled::HAS_RANGES;
const PROXIED: u32 = RULED | Enrolled::PROXY;
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
