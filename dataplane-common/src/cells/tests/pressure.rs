//! A full table: which flows go, and who is refused.

use super::*;

#[test]
fn a_full_table_keeps_what_was_used_last() {
    let shared = Shared::new(1024);
    for client in 0..=u16::MAX {
        let key = key(client);
        let used = at(u64::from(client));
        let value = Translation {
            used,
            // Assured, so that none is over.
            seen: seen::PACKET | seen::in_replies(1) | seen::ASSURED,
            ..to(&key, 0)
        };
        let _ = shared.make(&key, &value, used);
    }
    let left = shared.is_sound();
    assert!(left > 1000, "{left}");
    // One for each flow except the first thousand; one in 130 000 finds no slot.
    let pushed_out = shared.pushed_out.load(Ordering::Relaxed) as usize;
    assert!(pushed_out.abs_diff((1 << 16) - left) < 10, "{pushed_out}");
    let oldest = shared
        .flows()
        .iter()
        .map(|(key, _)| key.src_port.host())
        .min()
        .unwrap();
    // A thousand seconds a table: the oldest of seventeen goes each time.
    assert!(oldest > u16::MAX - 4000, "{oldest}");
    for (key, _) in shared.flows() {
        assert!(shared.unmake(&key));
    }
    shared.is_empty();
}

#[test]
fn half_of_the_cells_are_enough_for_all() {
    // Eight clients, as many flows as were asked for.
    let flows: u16 = 8192;
    let shared = Shared::new(cells_for(flows.into()) as usize);
    for client in 0..8_u8 {
        for port in 0..flows / 8 {
            let src = Addr::from_v4([192, 0, 2, client]);
            let key = FlowKey {
                src,
                ..key(32_768 + 2 * port)
            };
            assert!(shared.make(&key, &to(&key, 0), Tick::default()));
        }
    }
    assert_eq!(shared.is_sound(), usize::from(flows));
    assert_eq!(shared.pushed_out.load(Ordering::Relaxed), 0);
}

#[test]
fn a_flow_that_is_over_gives_way() {
    let (first, mut second) = (key(40_000), key(40_001));
    let shared = Shared::new(1);
    // The home of both; there is no other cell.
    let over = Translation {
        seen: seen::PACKET | seen::RST,
        ..to(&first, 0)
    };
    assert!(shared.make(&first, &over, at(0)));
    second.dst_port = Port::new(80);
    assert!(shared.make(&second, &to(&second, 0), at(9)));
    assert_eq!(shared.is_sound(), 1);
    assert_eq!(shared.pushed_out.load(Ordering::Relaxed), 0, "it was over");
    assert!(shared.find(&first).is_none() && shared.find(&second).is_some());

    let gives_way = |requests, replies, after| {
        let seen = requests | seen::in_replies(replies);
        let shared = Shared::new(1);
        let value = Translation { seen, ..over };
        assert!(shared.make(&first, &value, at(0)));
        let line = (&shared).cell(0).unwrap();
        gives_way(&&shared, line, Head(line.load(HEAD)), at(after))
    };
    let (packet, fin, rst) = (seen::PACKET, seen::FIN, seen::RST);
    assert!(gives_way(rst, packet, 9) && !gives_way(rst, packet, 4));
    assert!(gives_way(fin, fin, 9) && !gives_way(fin, fin, 4) && !gives_way(fin, packet, 9));
    assert!(!gives_way(packet, 0, 110) && gives_way(packet, 0, 130));
    assert!(!gives_way(packet | seen::FOREIGN, 0, 100_000));
}

/// A flood of SYNs without answers evicts no answered flow before the flow's timeout.
#[test]
fn what_nobody_answered_goes_first() {
    let shared = Shared::new(256);
    let answered = |port| {
        let key = key(port);
        let seen = seen::PACKET | seen::in_replies(seen::PACKET);
        (
            key,
            Translation {
                seen,
                ..to(&key, 0)
            },
        )
    };
    for port in 0..128 {
        let (key, value) = answered(port);
        assert!(shared.make(&key, &value, at(0)));
    }
    for port in 1000..20_000 {
        let key = key(port);
        let used = at(50);
        let _ = shared.make(
            &key,
            &Translation {
                used,
                ..to(&key, 0)
            },
            used,
        );
    }
    assert!(shared.is_sound() > 250);
    for port in 0..128 {
        assert!(shared.find(&answered(port).0).is_some(), "{port}");
    }
}

/// A flow of a client, established at `used`.
pub(super) fn established(
    client: u16,
    port: u16,
    protocol: Protocol,
    used: Tick,
) -> (FlowKey, Translation) {
    let [high, low] = client.to_be_bytes();
    let key = FlowKey {
        src: Addr::from_v4([10, 0, high, low]),
        protocol,
        ..key(port)
    };
    let seen = seen::PACKET | seen::in_replies(seen::PACKET) | seen::ASSURED;
    let to = Translation {
        used,
        seen,
        ..to(&key, 0)
    };
    (key, to)
}

/// Answered datagrams, from one client or from many, evict no TCP connection, however quiet the connection and however
/// many the datagrams.
#[test]
fn answered_datagrams_push_out_no_connection() {
    for clients in [1, 1 << 15] {
        let shared = Shared::new(1 << 12);
        let live: Vec<_> = (0..200)
            .map(|client| established(client, 40_000, Protocol::TCP, at(0)))
            .collect();
        for (key, value) in &live {
            assert!(shared.make(key, value, at(0)));
        }
        let flood = 100_000_u32;
        let mut refused = 0;
        for nth in 0..flood {
            let (client, port) = (1000 + nth % clients, nth / clients.min(10));
            let (key, mut value) = established(client as u16, port as u16, Protocol::UDP, at(100));
            // Every fourth client sends again.
            if nth % 4 != 0 {
                value.seen &= !seen::ASSURED;
            }
            if shared.find(&key).is_none() {
                refused += u32::from(!shared.make(&key, &value, at(100)));
            }
        }
        assert!(refused < flood / 1000, "{refused}");
        assert!(shared.is_sound() > 4000);
        for (key, _) in &live {
            assert!(shared.find(key).is_some(), "{clients} clients: {key:?}");
        }
    }
}

/// A client that fills the table with connections takes no other client's room, and the others can still make
/// connections.
#[test]
fn a_client_with_most_of_the_room_pays_for_it() {
    for theirs in [Protocol::TCP, Protocol::UDP] {
        let others = [Protocol::TCP, Protocol::UDP];
        for others in others {
            pays(theirs, others);
        }
    }
}

/// A client with flows of one protocol, and other clients with flows of one.
fn pays(theirs: Protocol, others: Protocol) {
    let shared = Shared::new(1 << 12);
    let live: Vec<_> = (0..200)
        .map(|client| established(client, 40_000, others, at(0)))
        .collect();
    for (key, value) in &live {
        assert!(shared.make(key, value, at(0)));
    }
    let lost = |live: &[(FlowKey, Translation)]| {
        let keys = live.iter().map(|(key, _)| key);
        keys.filter(|key| shared.find(key).is_none()).count()
    };
    for port in 0..20_000 {
        let (key, value) = established(999, port, theirs, at(50));
        let _ = shared.make_as_foretold(&key, &value, at(50));
    }
    assert!(shared.is_sound() > 4090);
    assert_eq!(lost(&live), 0);
    let more: Vec<_> = (300..900)
        .map(|client| established(client, 40_000, others, at(60)))
        .collect();
    let (made, refused): (Vec<_>, Vec<_>) = more
        .into_iter()
        .partition(|(key, value)| shared.make_as_foretold(key, value, at(60)));
    // The cells of a flow are a sample of all: sometimes the client has fewer of them.
    assert!(refused.len() < 6, "{} of 600", refused.len());
    // Then other clients' datagrams are evicted, but no connections.
    let lost = lost(&live) + lost(&made);
    let may_be_lost = if others == Protocol::TCP { 0 } else { 6 };
    assert!(lost <= may_be_lost, "{lost} of 800");
}

/// If no client has most of the room, and all flows are live connections, none is evicted: the new flow is refused.
#[test]
fn a_table_full_of_connections_refuses_others() {
    let shared = Shared::new(1 << 10);
    let enter = |client| {
        let (key, value) = established(client, 40_000, Protocol::TCP, at(0));
        let made = shared.make_as_foretold(&key, &value, at(0));
        made.then_some(key)
    };
    let made: Vec<FlowKey> = (0..60_000).filter_map(enter).collect();
    assert!((1020..=1024).contains(&made.len()), "{}", made.len());
    assert!(made.iter().all(|key| shared.find(key).is_some()));
    assert_eq!(shared.pushed_out.load(Ordering::Relaxed), 0);
}

/// In a table full of connections, a flow that was not answered is evicted in whichever of the seventeen cells it is.
#[test]
fn all_seventeen_cells_are_looked_at() {
    let shared = Shared::new(64);
    let memory = &shared;
    for client in 0..60_000 {
        let (key, value) = established(client, 40_000, Protocol::TCP, at(0));
        let _ = shared.make(&key, &value, at(0));
    }
    assert_eq!(shared.is_sound(), 64);
    let new = key(40_000);
    let place = new.place(SECRET);
    for nth in 0..=OTHERS {
        let index = candidate(place, nth) & memory.mask();
        let line = memory.cell(index).unwrap();
        let state = line.load(STATE);
        line.store(STATE, State(state).anew(at(0)).0);
        assert!(has_room(&memory, &new, at(0)));
        assert_eq!(hold(&memory, &new, at(0)), index, "{nth}");
        // Another connection has the cell from now on.
        let (key, value) = established(nth as u16, 7, Protocol::TCP, at(0));
        write(line, &key, &value);
        assert!(publish(line, &key, memory.holder(at(0))));
        assert!(!has_room(&memory, &new, at(0)));
    }
}
