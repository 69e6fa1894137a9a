//! On real maps, which no program knows.

use std::collections::HashSet;

use dataplane_common::{
    Addr, Port, Protocol,
    cells::{self, NOWHERE},
    packet::{FlowKey, PacketConfig, Tick, Translation},
    seen,
    states::Timeouts,
};

use super::{Census, Collector, Conntrack, Flow, Listed, State, now};

fn conntrack() -> Option<Conntrack> {
    conntrack_for(1024)
}

/// Creates tables with room for this many flows. If this process may not create maps, prints the reason and returns
/// `None`.
pub fn conntrack_for(flows: u32) -> Option<Conntrack> {
    match Conntrack::unpinned(flows) {
        Ok(conntrack) => Some(conntrack),
        Err(error)
            if error.is_permission()
                && std::env::var_os("DATAPLANE_REQUIRE_PRIVILEGES").is_none() =>
        {
            println!("skipped, for want of privileges: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

const VIP: Addr = Addr::from_v4([10, 96, 0, 10]);
const ENDPOINT: Addr = Addr::from_v4([10, 244, 1, 5]);
const NODE: Addr = Addr::from_v4([192, 168, 77, 2]);

/// Returns the tick of this many seconds ago.
fn ago(seconds: u64) -> Tick {
    let now = std::time::Duration::from(
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap(),
    );
    // Also on machines that just booted, the clock's beginning is then far in the past.
    Tick::from_ns(
        u64::try_from(now.as_nanos())
            .unwrap()
            .wrapping_sub(seconds * 1_000_000_000),
    )
}

fn flow(client: u16, protocol: Protocol, used: Tick, requests: u8, replies: u8) -> Flow {
    let client_port = Port::new(client);
    Flow {
        key: FlowKey::new(
            Addr::from_v4([192, 0, 2, 7]),
            client_port,
            VIP,
            Port::new(53),
            protocol,
        ),
        to: Translation {
            endpoint: ENDPOINT,
            endpoint_port: Port::new(5353),
            node_port: Port::ANY,
            used,
            seen: requests | seen::in_replies(replies),
            node_addr: 0,
        },
    }
}

fn masqueraded(client: u16, protocol: Protocol, used: Tick) -> Flow {
    let mut flow = flow(client, protocol, used, seen::PACKET, seen::PACKET);
    flow.to.node_addr = 1;
    flow.to.node_port = Port::new(client);
    flow
}

fn collect(conntrack: &Conntrack, foreign: &[FlowKey]) -> Census {
    collect_listed(conntrack, foreign, None)
}

fn collect_listed(conntrack: &Conntrack, foreign: &[FlowKey], listed: Option<&Listed>) -> Census {
    let mut collector = Collector::new(conntrack, listed);
    loop {
        let known = || Some(foreign.iter().copied().collect::<HashSet<_>>());
        if let Some(census) = collector.step(known) {
            assert_eq!(census.total(), conntrack.count());
            return census;
        }
    }
}

#[test]
fn a_flow_is_found_from_both_ends() {
    let Some(conntrack) = conntrack() else { return };
    conntrack.node_addrs.set(1, NODE);
    let plain = flow(1000, Protocol::UDP, now(), seen::PACKET, seen::PACKET);
    let masqueraded = masqueraded(1001, Protocol::TCP, now());
    for flow in [&plain, &masqueraded] {
        assert!(conntrack.add(flow));
        assert_eq!(conntrack.find(&flow.key), Some(*flow));
    }
    assert_eq!(conntrack.find_by_reply(&plain.reply_key()), Some(plain));
    let to_node = FlowKey {
        dst: NODE,
        ..masqueraded.reply_key()
    };
    assert_eq!(conntrack.find_by_reply(&to_node), Some(masqueraded));
    // The endpoint has not seen the client's own address, or any of the node's other ones.
    for dst in [masqueraded.key.src, VIP] {
        let reply = FlowKey { dst, ..to_node };
        assert_eq!(conntrack.find_by_reply(&reply), None);
    }
    let usage = conntrack.usage(conntrack.count());
    assert_eq!((usage.table, usage.used), ("CONNTRACK", 2));

    let mut all = Vec::new();
    let mut flows = conntrack.flows();
    let mut batch = Vec::new();
    while flows.read(&mut batch) {
        all.extend_from_slice(&batch);
    }
    assert_eq!(all.len(), 2);
    assert!(all.contains(&plain) && all.contains(&masqueraded));

    assert!(conntrack.remove_if(&plain, |_| true));
    assert!(conntrack.remove_if(&masqueraded, |_| true));
    assert!(!conntrack.remove_if(&plain, |_| true));
    assert_eq!(conntrack.find_by_reply(&plain.reply_key()), None);
    assert_eq!(conntrack.find_by_reply(&to_node), None);
    assert_eq!(conntrack.count(), 0);
}

/// Two flows with different VIPs, but the same endpoint and client port, have the same reply key. Only one of them gets
/// the replies.
#[test]
fn replies_are_one_flows() {
    let Some(conntrack) = conntrack() else { return };
    let first = flow(1000, Protocol::UDP, now(), seen::PACKET, seen::PACKET);
    let mut second = first;
    second.key.dst = Addr::from_v4([10, 96, 0, 11]);
    assert!(conntrack.add(&first));
    assert!(!conntrack.add(&second));
    assert_eq!(conntrack.find(&second.key), None);
    assert_eq!(conntrack.find_by_reply(&first.reply_key()), Some(first));
    assert!(conntrack.remove_if(&first, |_| true));
    assert!(conntrack.add(&second));
    assert_eq!(conntrack.find_by_reply(&first.reply_key()), Some(second));
}

#[test]
fn states_tell_what_was_seen() {
    let (one, fin) = (seen::PACKET, seen::PACKET | seen::FIN);
    for (protocol, requests, replies, state) in [
        (Protocol::TCP, one, 0, State::SynSent),
        (Protocol::TCP, one, one, State::SynReceived),
        (Protocol::TCP, fin, one, State::FinWait),
        (Protocol::TCP, one, fin, State::FinWait),
        (Protocol::TCP, fin, fin, State::LastAck),
        (Protocol::TCP, one | seen::RST, one, State::Close),
        (Protocol::UDP, one, 0, State::Unanswered),
        (Protocol::UDP, one, one, State::Answered),
        (Protocol::UDP, one | seen::FOREIGN, 0, State::Foreign),
    ] {
        let flow = flow(1, protocol, now(), requests, replies);
        assert_eq!(flow.state(), state, "{flow:?}");
    }
}

#[test]
fn what_is_over_is_removed_and_nothing_else() {
    let both = seen::PACKET;
    let assured = |mut flow: Flow| {
        flow.to.seen |= seen::ASSURED;
        flow
    };
    // Every second port, as clients choose them: each flow has a cell of its own, and none evicts another.
    let kept = [
        assured(flow(2, Protocol::TCP, ago(7200), both, both)),
        flow(16, Protocol::TCP, ago(50), both, both),
        flow(4, Protocol::TCP, ago(60), both, 0),
        assured(flow(6, Protocol::UDP, ago(100), both, both)),
        flow(18, Protocol::UDP, ago(20), both, both),
        flow(
            8,
            Protocol::TCP,
            ago(3000),
            both | seen::FIN | seen::FOLLOWED,
            both,
        ),
        assured(masqueraded(10, Protocol::TCP, ago(7200))),
        // While no other flow needs its room.
        flow(
            12,
            Protocol::TCP,
            ago(60),
            both | seen::FIN | seen::FOLLOWED,
            both | seen::FIN,
        ),
    ];
    let over = [
        assured(flow(22, Protocol::TCP, ago(86_410), both, both)),
        flow(36, Protocol::TCP, ago(70), both, both),
        flow(24, Protocol::TCP, ago(130), both, 0),
        assured(flow(26, Protocol::UDP, ago(130), both, both)),
        flow(38, Protocol::UDP, ago(40), both, both),
        flow(28, Protocol::UDP, ago(40), both, 0),
        flow(30, Protocol::TCP, ago(20), both | seen::RST, both),
        flow(
            32,
            Protocol::TCP,
            ago(130),
            both | seen::FIN,
            both | seen::FIN,
        ),
        masqueraded(34, Protocol::UDP, ago(130)),
    ];
    // With some secrets, which are random, two flows share the slot of their replies, and the table has no place for one of them.
    let conntrack = loop {
        let Some(conntrack) = conntrack() else { return };
        for flow in kept.iter().chain(&over) {
            conntrack.add(flow);
        }
        if conntrack.count() == (kept.len() + over.len()) as u64 {
            break conntrack;
        }
    };
    let census = collect(&conntrack, &[]);
    assert_eq!(census.removed, over.len() as u64);
    assert_eq!(census.total(), kept.len() as u64);
    assert_eq!(
        census.flows[&(Protocol::TCP, State::Established)],
        2,
        "{census:?}"
    );
    for flow in kept {
        assert_eq!(conntrack.find(&flow.key), Some(flow));
    }
    for flow in over {
        assert_eq!(conntrack.find(&flow.key), None);
    }
}

#[test]
fn a_flow_that_was_used_meanwhile_stays() {
    let Some(conntrack) = conntrack() else { return };
    let old = flow(1, Protocol::UDP, ago(200), seen::PACKET, seen::PACKET);
    let mut revived = old;
    revived.to.used = now();
    assert!(conntrack.add(&revived));
    assert!(!conntrack.remove_if(&old, |f| f.is_over(now(), &Timeouts::DEFAULT)));
    assert_eq!(conntrack.find(&old.key), Some(revived));

    // The packet comes after the last look: `still` is asked again of the removed flow.
    let asked = std::cell::Cell::new(0);
    let still = |_: &Flow| {
        asked.set(asked.get() + 1);
        asked.get() == 1
    };
    assert!(!conntrack.remove_if(&revived, still));
    assert_eq!(asked.get(), 2);
    assert_eq!(conntrack.find(&old.key), Some(revived));
    assert_eq!(conntrack.find_by_reply(&old.reply_key()), Some(revived));
    assert_eq!(conntrack.count(), 1);
}

/// Foreign flows live as long as the kernel's own conntrack has them.
#[test]
fn foreign_flows_live_elsewhere() {
    let Some(conntrack) = conntrack() else { return };
    let [there, gone] =
        [1, 2].map(|n| flow(n, Protocol::UDP, ago(600), seen::PACKET | seen::FOREIGN, 0));
    for flow in [&there, &gone] {
        assert!(conntrack.add(flow));
        // Its replies do not belong to a flow of ours.
        assert_eq!(conntrack.find_by_reply(&flow.reply_key()), None);
    }
    // The collector does not treat an unreadable flow as gone.
    let mut unreadable = Collector::new(&conntrack, None);
    let census = std::iter::repeat_with(|| unreadable.step(|| None)).find_map(|census| census);
    assert_eq!(census.unwrap().removed, 0);
    let census = collect(&conntrack, &[there.key]);
    assert_eq!(census.removed, 1);
    assert_eq!(conntrack.find(&there.key), Some(there));
    assert_eq!(conntrack.find(&gone.key), None);
    // No existing flow is overwritten.
    let endpoint = (VIP, Port::new(1));
    assert!(!conntrack.add_foreign(there.key, endpoint));
    assert_eq!(conntrack.find(&there.key), Some(there));
    assert!(conntrack.add_foreign(gone.key, endpoint));
    let found = conntrack.find(&gone.key).unwrap();
    assert_eq!((found.to.endpoint, found.state()), (VIP, State::Foreign));
}

#[test]
fn flows_through_the_stack_are_counted_while_the_path_is_left() {
    let Some(conntrack) = conntrack() else { return };
    let [through, over, past] = [(1000, 0), (1001, 6000), (1002, 0)]
        .map(|(n, age)| flow(n, Protocol::UDP, ago(age), seen::PACKET, seen::PACKET));
    // Its cell was another flow's before.
    let foreign = flow(1003, Protocol::UDP, now(), 0, 0).key;
    assert!(conntrack.add_foreign(foreign, (ENDPOINT, Port::new(53))));
    // The last: the cell of a flow that is over goes to the next one.
    for flow in [&through, &past, &over] {
        assert!(conntrack.add(flow));
    }
    for key in [&through.key, &over.key, &foreign] {
        assert!(conntrack.table.set_through(key), "{key:?}");
    }
    let census = |flags| {
        let config = PacketConfig {
            flags,
            ..PacketConfig::default()
        };
        conntrack.table.config.set(0, config);
        collect(&conntrack, &[foreign]).through
    };
    assert_eq!(census(0), None);
    assert_eq!(census(PacketConfig::STACK), None);
    assert_eq!(census(PacketConfig::STACK_OUT), Some(1));
    assert!(conntrack.remove_if(&through, |_| true));
    assert_eq!(census(PacketConfig::STACK_OUT), Some(0));
}

/// A port that the kernel's own conntrack has assigned goes to no other flow, until the kernel lists it no longer.
#[test]
fn ports_of_the_kernels_own_are_held() {
    let Some(conntrack) = conntrack() else { return };
    let port = |n, protocol| {
        let endpoint = (ENDPOINT, Port::new(5353));
        FlowKey::new(NODE, Port::new(n), endpoint.0, endpoint.1, protocol)
    };
    let at = |ticks: u16| Tick::from_number(now().number().wrapping_add(ticks));
    let [there, gone] = [2000, 2002].map(|n| port(n, Protocol::TCP));
    for key in [there, gone] {
        assert!(conntrack.hold_port(key) && conntrack.holds_port(&key));
        assert!(conntrack.hold_port(key), "again");
        let found = conntrack.find(&key).unwrap();
        assert_eq!((found.state(), found.our_vip()), (State::Foreign, None));
        assert!(!found.is_direct());
        assert_eq!(conntrack.find_by_reply(&found.reply_key()), None);
    }
    assert_eq!(conntrack.count(), 2);
    // With the other protocol, the port is a different one.
    assert!(!conntrack.add(&masqueraded(2000, Protocol::TCP, now())));
    assert!(conntrack.add(&masqueraded(2000, Protocol::UDP, now())));
    assert!(
        !conntrack.hold_port(port(2000, Protocol::UDP)),
        "a flow of ours has it"
    );

    let listed = |asked| Listed {
        ports: [there].into(),
        asked,
    };
    let removed = |listed: Option<&Listed>| {
        let census = collect_listed(&conntrack, &[], listed);
        census.removed
    };
    assert_eq!(removed(None), 0, "nobody asked");
    assert_eq!(removed(Some(&listed(at(0)))), 0, "added since");
    assert_eq!(removed(Some(&listed(at(2)))), 1);
    assert!(conntrack.holds_port(&there) && !conntrack.holds_port(&gone));
    // Its slot is free, too.
    assert!(conntrack.add(&masqueraded(2002, Protocol::TCP, now())));
}

/// A writer that adds a flow dies before the flow can be found.
#[test]
fn a_held_cell_that_nobody_gives_back_is_freed() {
    let Some(conntrack) = conntrack() else { return };
    let [dead, lives, later] =
        [1, 3, 5].map(|port| flow(port, Protocol::TCP, now(), seen::PACKET, 0));
    let table = &conntrack.table;
    assert_ne!(cells::hold(&table, &dead.key, ago(5)), NOWHERE);
    assert!(conntrack.add(&lives));
    assert!(!conntrack.add(&dead), "somebody may be making it");
    let first = collect(&conntrack, &[]);
    assert_eq!((first.freed, first.total()), (0, 1));
    assert_ne!(cells::hold(&table, &later.key, ago(20)), NOWHERE);
    let second = collect(&conntrack, &[]);
    assert_eq!((second.freed, second.total()), (1, 1));
    assert!(conntrack.add(&later));
    assert_eq!(conntrack.find(&lives.key), Some(lives));
}

#[test]
fn tables_are_as_large_as_the_agent_is_told() {
    for (flows, room, slots) in [(1024, 1024, 4096), (1025, 2048, 8192), (1, 1, 16)] {
        let Some(conntrack) = conntrack_for(flows) else {
            return;
        };
        assert_eq!(conntrack.capacity(), room);
        let usage = conntrack.usage(0);
        assert_eq!((usage.capacity, usage.limit), (room, room));
        assert_eq!(usage.bytes, u64::from(2 * room * (64 + 16) + slots * 4));
    }
}

/// Measures a walk through a million flows: `cargo test --release -p dataplane-user --lib -- --ignored --nocapture
/// a_million`.
#[test]
#[ignore = "a measurement, of some 150 MiB of the kernel's memory"]
fn a_million_flows() {
    const FLOWS: u32 = 1_000_000;
    let Ok(conntrack) = Conntrack::unpinned(1 << 20) else {
        return;
    };
    let timed = |what: &str, work: &mut dyn FnMut()| {
        let start = std::time::Instant::now();
        work();
        println!("{what}: {:?}", start.elapsed());
    };
    let fill = |used: Tick| {
        for number in 0..FLOWS {
            let mut flow = if number % 2 == 0 {
                flow(1, Protocol::TCP, used, seen::PACKET, seen::PACKET)
            } else {
                masqueraded(1, Protocol::UDP, used)
            };
            // Each flow has a client of its own.
            let [a, b, c, d] = number.to_be_bytes();
            flow.key.src = Addr::from_v4([10 + a, b, c, d]);
            if flow.is_masqueraded() {
                flow.to.endpoint = Addr::from_v4([11 + a, b, c, d]);
            }
            // Like the programs, takes the next port if the slot of a port is taken.
            while !conntrack.add(&flow) && flow.is_masqueraded() {
                flow.to.node_port = Port::new(flow.to.node_port.host() + 1);
            }
        }
    };
    timed("made", &mut || fill(now()));
    timed("walked, none over", &mut || {
        let census = collect(&conntrack, &[]);
        println!("{} flows, {} removed", census.total(), census.removed);
    });
    timed("counted", &mut || println!("{}", conntrack.count()));
    timed("searched for an endpoint", &mut || {
        let (mut flows, mut batch, mut found) = (conntrack.flows(), Vec::new(), 0);
        while flows.read(&mut batch) {
            found += batch.iter().filter(|f| f.to.endpoint == ENDPOINT).count();
        }
        println!("{found} found");
    });
    timed("removed all", &mut || {
        let (mut flows, mut batch) = (conntrack.flows(), Vec::new());
        while flows.read(&mut batch) {
            for flow in &batch {
                conntrack.remove_if(flow, |_| true);
            }
        }
    });
    println!("left: {}", conntrack.count());
}

/// Every port to an endpoint has an established connection: of one client, or of as many clients.
#[test]
fn free_ports_are_foretold() {
    let endpoint = masqueraded(0, Protocol::TCP, ago(0)).port_key();
    for of_one in [true, false] {
        let Some(conntrack) = conntrack_for(1 << 17) else {
            return;
        };
        let add = |port: u16| {
            let mut flow = masqueraded(port, Protocol::TCP, ago(0));
            flow.to.seen |= seen::ASSURED;
            if !of_one {
                let [high, low] = port.to_be_bytes();
                flow.key.src = Addr::from_v4([10, 0, high, low]);
            }
            assert!(conntrack.add(&flow), "{port}");
        };
        (1024..u16::MAX).for_each(add);
        assert!(conntrack.has_free_port(&endpoint, |_| false));
        assert!(!conntrack.has_free_port(&endpoint, |port| port == Port::new(u16::MAX)));
        add(u16::MAX);
        assert!(!conntrack.has_free_port(&endpoint, |_| false));
        let probability = conntrack.evicts_port(&endpoint);
        let is_right = if of_one {
            probability > 0.9
        } else {
            probability <= 0.0
        };
        assert!(is_right, "{of_one}: {probability}");
    }
}

#[test]
fn a_clients_port_is_foretold() {
    let Some(conntrack) = conntrack() else {
        return;
    };
    let of = |port| flow(port, Protocol::TCP, ago(0), seen::PACKET, seen::PACKET);
    let reply = of(100).reply_key();
    assert_eq!(conntrack.client_port(&reply), Some(Port::new(100)));
    assert!(conntrack.add(&of(100)));
    assert_eq!(conntrack.client_port(&reply), Some(Port::new(1)));
    for port in (1..512).filter(|port| *port != 100) {
        assert!(conntrack.add(&of(port)), "{port}");
    }
    assert_eq!(conntrack.client_port(&reply), None);
    assert!(conntrack.remove_if(&of(77), |_| true));
    assert_eq!(conntrack.client_port(&reply), Some(Port::new(77)));
}
