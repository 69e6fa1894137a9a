//! Endpoints that left, whose flows end.

use dataplane_plan::{Departed, Departures};

use super::*;

const UDP: dataplane_common::Protocol = dataplane_common::Protocol::UDP;

/// Returns the departures when a service of `protocol` gets other endpoints. `None`: the service does not exist.
fn departed(
    watched: dataplane_common::Protocol,
    protocol: Protocol,
    states: [Option<&[&str]>; 2],
) -> Departed {
    let mut planner = Planner::new();
    let mut departures = Departures::new(&[watched]);
    let [_, last] = states.map(|endpoints| {
        let web = endpoints.map(|endpoints| {
            let mut web = service("web", &["10.96.0.1", "fd96::1"], endpoints);
            web.ports[0].protocol = protocol;
            web.ports[0].node_port = Some(30080);
            web
        });
        planner.plan(&snapshot(web));
        departures.after(&planner)
    });
    last
}

/// Returns the endpoints of 1 to 3 to which flows from a VIP end, and those that are not listed.
fn ends(departed: &Departed, vip: &str, port: u16, is_frontend: bool) -> String {
    let vip = (addr(vip), Port::new(port));
    let net = if vip.0.is_v4() { "10.0.0." } else { "fd00::" };
    let endpoint = |n: &u8| (addr(&format!("{net}{n}")), Port::new(8080));
    let text = |does_end: &dyn Fn((Addr, Port)) -> bool| -> String {
        let all = (1..=3).filter(|n| does_end(endpoint(n)));
        all.map(|n| n.to_string()).collect()
    };
    let stale = text(&|endpoint| departed.is_stale(vip, TCP, endpoint, |_| is_frontend));
    let unlisted = text(&|endpoint| departed.is_unlisted(vip, endpoint, |_| is_frontend));
    format!("{stale}/{unlisted}")
}

/// Each line has the endpoints before and after, and the endpoints of IPv4 and of IPv6 to which flows end, and after `/`
/// those to which no SYN goes.
#[test]
fn flows_to_endpoints_that_left_end() {
    type Endpoints<'a> = Option<&'a [&'a str]>;
    let (one, both) = (&["10.0.0.1"][..], &["10.0.0.1", "10.0.0.2"][..]);
    let table: &[(Endpoints, Endpoints, [&str; 2])] = &[
        // Flows of an earlier agent may lead anywhere.
        (None, Some(one), ["23/23", "/"]),
        (Some(&[]), Some(one), ["23/23", "/"]),
        (Some(both), Some(one), ["23/23", "/"]),
        (Some(one), Some(both), ["/", "/"]),
        (
            Some(&["10.0.0.1", "10.0.0.3"]),
            Some(&["10.0.0.2", "10.0.0.3"]),
            ["1/1", "/"],
        ),
        // An endpoint that does not serve any more ends its flows, but keeps its address.
        (
            Some(both),
            Some(&["10.0.0.1", "10.0.0.2 unready"]),
            ["23/", "/"],
        ),
        (
            Some(both),
            Some(&["10.0.0.1", "10.0.0.2 terminating"]),
            ["/", "/"],
        ),
        (Some(&["10.0.0.1 unready"]), Some(one), ["23/", "/"]),
        // Without an endpoint, flows stay.
        (Some(one), Some(&[]), ["/", "/"]),
        (Some(one), None, ["/", "/"]),
        // Each family by itself.
        (Some(&["10.0.0.1", "fd00::1"]), Some(one), ["/", "/"]),
        (
            Some(&["10.0.0.1", "fd00::1", "fd00::2"]),
            Some(&["10.0.0.1", "fd00::2"]),
            ["/", "13/13"],
        ),
    ];
    for (before, after, wanted) in table {
        let found = departed(TCP, Protocol::Tcp, [*before, *after]);
        let of = |vips: [&str; 2], port, is_frontend| {
            vips.map(|vip| ends(&found, vip, port, is_frontend))
        };
        assert_eq!(
            of(["10.96.0.1", "fd96::1"], 80, true),
            *wanted,
            "{before:?} {after:?}"
        );
        // A node port, unless another service has the port at the node's address.
        let node = ["192.0.2.9", "2001:db8::9"];
        assert_eq!(of(node, 30080, false), *wanted, "{before:?} {after:?}");
        for (port, is_frontend) in [(30080, true), (80, false)] {
            assert_eq!(
                of(node, port, is_frontend),
                ["/", "/"],
                "{before:?} {after:?}"
            );
        }
        let has_stale = wanted.iter().any(|ends| !ends.starts_with('/'));
        assert_eq!(found.has_stale(), has_stale);
        assert_eq!(found.is_empty(), wanted.iter().all(|ends| *ends == "/"));
    }
}

/// Only flows of watched protocols end. A SYN is of TCP.
#[test]
fn departures_are_those_of_the_watched_protocols() {
    let states = [None, Some(&["10.0.0.1"][..])];
    let (vip, other) = (
        (addr("10.96.0.1"), Port::new(80)),
        (addr("10.0.0.2"), Port::new(8080)),
    );
    for (watched, protocol, wanted) in [
        (TCP, Protocol::Tcp, [true, false, true]),
        (UDP, Protocol::Tcp, [false, false, true]),
        (UDP, Protocol::Udp, [false, true, false]),
        (TCP, Protocol::Udp, [false; 3]),
    ] {
        let mut all = Departed::default();
        all.extend(departed(watched, protocol, states));
        // Newer departures of another service leave the older ones.
        all.extend(Departed::default());
        let stale = |of| all.is_stale(vip, of, other, |_| true);
        let found = [
            stale(TCP),
            stale(UDP),
            all.is_unlisted(vip, other, |_| true),
        ];
        assert_eq!(found, wanted, "{watched} {protocol:?}");
        assert_eq!(all.is_empty(), wanted == [false; 3]);
    }
}

/// A service that loses an address to another leaves flows behind, to endpoints that the other service does not have.
#[test]
fn an_address_that_changes_hands_leaves_flows_behind() {
    const VIP: &str = "192.0.2.1";
    let with_vip = |name: &str, created, endpoints: &[&str]| Service {
        external_ips: ips(&[VIP]),
        created: Some(created),
        ..service(name, &["10.96.0.1"], endpoints)
    };
    let older = with_vip("older", 1, &["10.0.0.1"]);
    let younger = Service {
        cluster_ips: ips(&["10.96.0.2"]),
        ..with_vip("younger", 2, &["10.0.0.2"])
    };
    let without = Service {
        external_ips: ips(&[]),
        ..older.clone()
    };
    for after in [vec![younger.clone()], vec![without, younger.clone()]] {
        let mut planner = Planner::new();
        let mut departures = Departures::new(&[TCP]);
        planner.plan(&snapshot(vec![older.clone(), younger.clone()]));
        departures.after(&planner);
        planner.plan(&snapshot(after));
        let departed = departures.after(&planner);
        for (endpoint, gone) in [("10.0.0.1", true), ("10.0.0.2", false)] {
            let endpoint = (addr(endpoint), Port::new(8080));
            let vip = (addr(VIP), Port::new(80));
            let stale = departed.is_stale(vip, TCP, endpoint, |_| true);
            let unlisted = departed.is_unlisted(vip, endpoint, |_| true);
            assert_eq!([stale, unlisted], [gone; 2], "{endpoint:?}");
        }
    }
}
