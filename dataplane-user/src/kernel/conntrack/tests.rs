//! On real maps, which no program knows.

use std::collections::HashSet;

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, Forward, Masqueraded, Reply, Tick, seen},
};

use zerocopy::FromZeros as _;

use super::{Back, Census, Collector, Conntrack, Flow, State, now};

fn conntrack() -> Option<Conntrack> {
    conntrack_for(1024)
}

/// With room for so many flows; `None`, and why is printed, where this process may not make maps.
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

/// The tick of so many seconds ago.
fn ago(seconds: u64) -> Tick {
    let now = std::time::Duration::from(
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap(),
    );
    // Machines that just booted: the clock's beginning is far in the past all the same.
    Tick::from_ns(
        u64::try_from(now.as_nanos())
            .unwrap()
            .wrapping_sub(seconds * 1_000_000_000),
    )
}

fn flow(client: u16, protocol: Protocol, used: Tick, forward: u8, back: u8) -> Flow {
    let client_port = Port::new(client);
    Flow {
        key: FlowKey::new(
            Addr::from_v4([192, 0, 2, 7]),
            client_port,
            VIP,
            Port::new(53),
            protocol,
        ),
        forward: Forward {
            endpoint: ENDPOINT,
            endpoint_port: Port::new(5353),
            node_port: Port::ANY,
            used,
            seen: forward,
            node_addr: 0,
        },
        back: Back::Reply(Reply {
            vip: VIP,
            vip_port: Port::new(53),
            used,
            seen: back,
            ..Reply::new_zeroed()
        }),
    }
}

fn masqueraded(client: u16, protocol: Protocol, used: Tick) -> Flow {
    let mut flow = flow(client, protocol, used, seen::PACKET, seen::PACKET);
    flow.forward.node_addr = 1;
    flow.forward.node_port = Port::new(client);
    flow.back = Back::Masqueraded(Masqueraded {
        vip: VIP,
        client: flow.key.src,
        vip_port: flow.key.dst_port,
        client_port: flow.key.src_port,
        used,
        seen: seen::PACKET,
        node_addr: 1,
    });
    flow
}

fn collect(conntrack: &Conntrack, foreign: &[FlowKey]) -> Census {
    collect_in(conntrack, foreign, false)
}

fn collect_in(conntrack: &Conntrack, foreign: &[FlowKey], crowded: bool) -> Census {
    let mut collector = Collector::new(conntrack, crowded);
    loop {
        let known = || foreign.iter().copied().collect::<HashSet<_>>();
        if let Some(census) = collector.step(known).unwrap() {
            assert_eq!(census.entries, conntrack.count().unwrap());
            return census;
        }
    }
}

fn used(conntrack: &Conntrack) -> [u32; 3] {
    let counted = conntrack.count().unwrap();
    conntrack.usage(counted).map(|table| table.used)
}

#[test]
fn both_directions_are_one_flow() {
    let Some(conntrack) = conntrack() else { return };
    let plain = flow(1000, Protocol::UDP, now(), seen::PACKET, seen::PACKET);
    let masqueraded = masqueraded(1001, Protocol::TCP, now());
    conntrack.add(&plain).unwrap();
    conntrack.add(&masqueraded).unwrap();
    assert_eq!(conntrack.find(&plain.key).unwrap(), Some(plain));
    assert_eq!(conntrack.find(&masqueraded.key).unwrap(), Some(masqueraded));
    assert_eq!(plain.state(), State::Answered);
    assert_eq!(masqueraded.state(), State::Established);
    assert_eq!(
        conntrack.find_by_reply(&plain.reply_key()).unwrap(),
        Some(plain)
    );
    assert_eq!(used(&conntrack), [2, 1, 1]);

    let mut all = Vec::new();
    let mut flows = conntrack.flows();
    let mut batch = Vec::new();
    while flows.read(&mut batch).unwrap() {
        all.extend_from_slice(&batch);
    }
    assert_eq!(all.len(), 2);
    assert!(all.contains(&plain) && all.contains(&masqueraded));

    assert!(conntrack.remove_if(&plain, |_| true).unwrap());
    assert!(conntrack.remove_if(&masqueraded, |_| true).unwrap());
    assert!(!conntrack.remove_if(&plain, |_| true).unwrap());
    assert_eq!(used(&conntrack), [0, 0, 0]);
}

/// Two VIPs with one endpoint, one client port: the entry for replies belongs to one of the flows.
#[test]
fn an_entry_for_replies_belongs_to_one_flow() {
    let Some(conntrack) = conntrack() else { return };
    let first = flow(1000, Protocol::UDP, now(), seen::PACKET, seen::PACKET);
    let mut second = first;
    second.key.dst = Addr::from_v4([10, 96, 0, 11]);
    conntrack.add(&first).unwrap();
    conntrack.add(&second).unwrap();
    let second = conntrack.find(&second.key).unwrap().unwrap();
    assert_eq!(second.state(), State::Half);
    assert!(conntrack.remove_if(&second, |_| true).unwrap());
    assert_eq!(conntrack.find(&first.key).unwrap(), Some(first));
}

#[test]
fn what_is_over_is_removed_and_nothing_else() {
    let Some(conntrack) = conntrack() else { return };
    let both = seen::PACKET;
    let kept = [
        flow(1, Protocol::TCP, ago(7200), both, both),
        flow(2, Protocol::TCP, ago(60), both, 0),
        flow(3, Protocol::UDP, ago(100), both, both),
        flow(4, Protocol::TCP, ago(3000), both | seen::FIN, both),
        masqueraded(5, Protocol::TCP, ago(7200)),
    ];
    let over = [
        flow(11, Protocol::TCP, ago(86_410), both, both),
        flow(12, Protocol::TCP, ago(130), both, 0),
        flow(13, Protocol::UDP, ago(130), both, both),
        flow(14, Protocol::UDP, ago(40), both, 0),
        flow(15, Protocol::TCP, ago(20), both, both | seen::RST),
        flow(
            16,
            Protocol::TCP,
            ago(130),
            both | seen::FIN,
            both | seen::FIN,
        ),
        masqueraded(17, Protocol::UDP, ago(130)),
    ];
    for flow in kept.iter().chain(&over) {
        conntrack.add(flow).unwrap();
    }
    // Only one direction is in use.
    let mut streaming = flow(6, Protocol::UDP, ago(600), both, both);
    if let Back::Reply(reply) = &mut streaming.back {
        reply.used = now();
    }
    conntrack.add(&streaming).unwrap();
    let census = collect(&conntrack, &[]);
    assert_eq!(census.removed, over.len() as u64);
    assert_eq!(census.total(), kept.len() as u64 + 1);
    assert_eq!(
        census.flows[&(Protocol::TCP, State::Established)],
        2,
        "{census:?}"
    );
    for flow in kept {
        assert_eq!(conntrack.find(&flow.key).unwrap(), Some(flow));
    }
    assert_eq!(used(&conntrack), [6, 5, 1]);
}

/// Where room is short, what both sides have closed goes sooner; what one of them may still use does not.
#[test]
fn closed_flows_give_way_to_others() {
    let Some(conntrack) = conntrack() else { return };
    let (both, fin) = (seen::PACKET, seen::PACKET | seen::FIN);
    let closed = flow(1, Protocol::TCP, ago(20), fin, fin);
    let kept = [
        flow(2, Protocol::TCP, now(), fin, fin),
        flow(3, Protocol::TCP, ago(60), fin, both),
        flow(4, Protocol::TCP, ago(60), both, both),
        flow(5, Protocol::TCP, ago(60), both, 0),
        flow(6, Protocol::UDP, ago(20), both, 0),
    ];
    for flow in kept.iter().chain([&closed]) {
        conntrack.add(flow).unwrap();
    }
    assert_eq!(collect_in(&conntrack, &[], false).removed, 0);
    assert_eq!(collect_in(&conntrack, &[], true).removed, 1);
    assert_eq!(conntrack.find(&closed.key).unwrap(), None);
    for flow in kept {
        assert_eq!(conntrack.find(&flow.key).unwrap(), Some(flow));
    }
}

#[test]
fn halves_are_removed() {
    let Some(conntrack) = conntrack() else { return };
    let whole = flow(1, Protocol::UDP, ago(200), seen::PACKET, seen::PACKET);
    let young = flow(2, Protocol::UDP, now(), seen::PACKET, 0);
    // The client's direction without the other, and the other way round.
    for flow in [
        Flow {
            back: Back::Missing,
            ..flow(3, Protocol::TCP, ago(20), seen::PACKET, 0)
        },
        Flow {
            back: Back::Missing,
            ..young
        },
    ] {
        conntrack.add(&flow).unwrap();
    }
    for flow in [whole, masqueraded(4, Protocol::TCP, ago(4000))] {
        conntrack.add(&flow).unwrap();
        assert!(conntrack.forward.remove(&flow.key).unwrap());
    }
    let census = collect(&conntrack, &[]);
    assert_eq!((census.removed, census.halves), (1, 2));
    assert_eq!(census.flows[&(Protocol::UDP, State::Half)], 1);
    assert_eq!(used(&conntrack), [1, 0, 0]);
}

#[test]
fn a_flow_that_was_used_meanwhile_stays() {
    let Some(conntrack) = conntrack() else { return };
    let old = flow(1, Protocol::UDP, ago(200), seen::PACKET, seen::PACKET);
    let mut revived = old;
    revived.forward.used = now();
    conntrack.add(&revived).unwrap();
    assert!(!conntrack.remove_if(&old, |f| f.is_over(now())).unwrap());
    assert_eq!(conntrack.find(&old.key).unwrap(), Some(revived));

    // The packet comes after the last look: `still` is asked again of what was taken out.
    let asked = std::cell::Cell::new(0);
    let still = |_: &Flow| {
        asked.set(asked.get() + 1);
        asked.get() == 1
    };
    assert!(!conntrack.remove_if(&revived, still).unwrap());
    assert_eq!(conntrack.find(&old.key).unwrap(), Some(revived));
    assert_eq!(used(&conntrack), [1, 1, 0]);
}

/// Foreign flows live as long as the kernel's own conntrack has them.
#[test]
fn foreign_flows_live_elsewhere() {
    let Some(conntrack) = conntrack() else { return };
    let [mut there, mut gone] =
        [1, 2].map(|n| flow(n, Protocol::UDP, ago(600), seen::PACKET | seen::FOREIGN, 0));
    for flow in [&mut there, &mut gone] {
        flow.back = Back::Missing;
        conntrack.add(flow).unwrap();
    }
    let census = collect(&conntrack, &[there.key]);
    assert_eq!(census.removed, 1);
    assert_eq!(conntrack.find(&there.key).unwrap(), Some(there));
    assert_eq!(conntrack.find(&gone.key).unwrap(), None);
    // Nothing that is there is overwritten.
    conntrack
        .add_foreign(there.key, (VIP, Port::new(1)))
        .unwrap();
    assert_eq!(conntrack.find(&there.key).unwrap(), Some(there));
}

#[test]
fn tables_are_as_large_as_the_agent_is_told() {
    for (flows, cells, beside) in [(1024, 1024, 512), (1025, 2048, 512), (1, 1, 1)] {
        let Some(conntrack) = conntrack_for(flows) else {
            return;
        };
        assert_eq!(conntrack.capacity(), cells);
        for table in conntrack.usage([0; 3]) {
            assert_eq!((table.capacity, table.limit), (cells, cells));
            assert_eq!(table.bytes, u64::from(cells * 64 + beside * 128));
        }
    }
}

/// `cargo test --release -p dataplane-user --lib -- --ignored --nocapture a_million`: what a walk
/// through a million flows costs.
#[test]
#[ignore = "a measurement, of some 500 MiB of the kernel's memory"]
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
            // Each from a client of its own.
            let [a, b, c, d] = number.to_be_bytes();
            flow.key.src = Addr::from_v4([10 + a, b, c, d]);
            flow.forward.node_port = if number % 2 == 0 {
                Port::ANY
            } else {
                Port::new(1)
            };
            if let Back::Masqueraded(back) = &mut flow.back {
                back.client = flow.key.src;
                flow.forward.endpoint = Addr::from_v4([11 + a, b, c, d]);
            }
            conntrack.add(&flow).unwrap();
        }
    };
    timed("made", &mut || fill(now()));
    timed("walked, none over", &mut || {
        let census = collect(&conntrack, &[]);
        println!("{} flows, {} removed", census.total(), census.removed);
    });
    timed("counted entries", &mut || {
        println!("{:?}", used(&conntrack));
    });
    timed("searched for an endpoint", &mut || {
        let (mut flows, mut batch, mut found) = (conntrack.flows(), Vec::new(), 0);
        while flows.read(&mut batch).unwrap() {
            found += batch
                .iter()
                .filter(|f| f.forward.endpoint == ENDPOINT)
                .count();
        }
        println!("{found} found");
    });
    timed("removed all", &mut || {
        let (mut flows, mut batch) = (conntrack.flows(), Vec::new());
        while flows.read(&mut batch).unwrap() {
            for flow in &batch {
                conntrack.remove_if(flow, |_| true).unwrap();
            }
        }
    });
    println!("left: {:?}", used(&conntrack));
}
