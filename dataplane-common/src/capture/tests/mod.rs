extern crate std;

mod decisions;
mod hbone;

use std::{collections::HashSet, vec::Vec};

use super::*;

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
        E::ENCRYPTS,
        E::ONLY_HBONE,
        E::JUDGES_INBOUND,
    ];
    assert!(bits(&enrolled).into_iter().eq(0..22));
    assert_eq!(bits(&[LISTED, HBONE, WAYPOINT, SHARED]), [0, 1, 2, 3]);
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
        E::JUDGES_INBOUND,
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
    assert_eq!((LISTENERS, PROBES), (49_152, 8192));
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
    // Each part tells, whatever the others are. Of 64 places, 256 askers by chance leave one free.
    let all = u32::MAX;
    let last = Addr::from_words([0, 0, 0, all]);
    for wanted in [
        places(&mut (0..256).map(|port| (last, 4000 + port))),
        places(&mut bytes().map(|n| (Addr::from_v4([192, 0, 2, n]), 53))),
        places(&mut bytes().map(|n| (Addr::from_words([n.into(), all, all, all]), 53))),
        places(&mut bytes().map(|n| (Addr::from_words([all, n.into(), all, all]), 53))),
        places(&mut bytes().map(|n| (Addr::from_words([all, all, n.into(), all]), 53))),
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
