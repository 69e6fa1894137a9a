//! On real maps, which no program knows.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use dataplane_common::{
    Addr, Port, Protocol,
    cells::{self, CellKey as _, HEAD, Head, Line as _, Memory as _, NOWHERE, Slot},
    packet::{FlowKey, PortKey, Tick, Translation},
    seen,
};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::{ENTRIES, Table};
use crate::conntrack::{Flow, now, tests::conntrack_for};

fn table_for(flows: u32) -> Option<Table> {
    Some(conntrack_for(flows)?.table)
}

/// Different for each number.
fn flow_key(number: u32) -> FlowKey {
    FlowKey::new(
        Addr::from_v4(number.to_be_bytes()),
        Port::new(1000),
        Addr::from_v4([10, 96, 0, 10]),
        Port::new(443),
        Protocol::TCP,
    )
}

/// A translation that identifies its flow; not expired.
fn to(key: &FlowKey) -> Translation {
    Translation {
        endpoint: key.src,
        endpoint_port: Port::new(8443),
        node_port: Port::ANY,
        used: now(),
        seen: seen::PACKET,
        node_addr: 0,
    }
}

/// Returns a flow that is masqueraded to this port of the node.
fn masqueraded(key: &FlowKey, node_port: u16) -> Translation {
    Translation {
        endpoint: Addr::from_v4([10, 244, 1, 5]),
        node_port: Port::new(node_port),
        node_addr: 3,
        ..to(key)
    }
}

fn reply_key(key: &FlowKey, to: &Translation) -> FlowKey {
    Flow { key: *key, to: *to }.reply_key()
}

fn port_key(key: &FlowKey, to: &Translation) -> PortKey {
    Flow { key: *key, to: *to }.port_key()
}

fn home(table: &Table, key: &FlowKey) -> u32 {
    key.place(table.secret()) & table.mask()
}

fn head(table: &Table, index: u32) -> Head {
    Head(table.cell(index).unwrap().load(HEAD))
}

fn slot(table: &Table, index: u32) -> Slot {
    cells::Entry::load(table.slot(index).unwrap())
}

/// Keys that have one home.
fn neighbours<const N: usize>(table: &Table) -> [FlowKey; N] {
    let place = home(table, &flow_key(0));
    let mut keys = (0..).map(flow_key).filter(|key| home(table, key) == place);
    std::array::from_fn(|_| keys.next().expect("there is no end of keys"))
}

/// The table has exactly these flows, found from both ends; all other cells and slots are free, and the counts include
/// no absent flow.
fn is_left(table: &Table, flows: &[(FlowKey, Translation)]) {
    let entries = table.entries();
    assert_eq!(entries.len(), flows.len());
    for (key, to) in flows {
        assert!(entries.contains(&(*key, *to)), "{key:?}");
        assert_eq!(table.get(key), Some(*to));
        let by_reply = if to.node_addr == 0 {
            table.by_client(&reply_key(key, to))
        } else {
            table.by_node(&port_key(key, to))
        };
        assert_eq!(by_reply, Some(*key));
    }
    let taken = (0..=table.mask()).filter(|index| !head(table, *index).is_free());
    assert_eq!(taken.count(), flows.len());
    let led = (0..=table.slots()).filter(|index| slot(table, *index).cell().is_some());
    assert_eq!(led.count(), flows.len());
}

/// The table has no flows, and counts none.
fn is_empty(table: &Table) {
    is_left(table, &[]);
    assert!((0..=table.mask()).all(|index| !head(table, index).has_more()));
    assert!((0..=table.slots()).all(|index| !slot(table, index).has_more()));
}

/// The first has its home, the second finds it taken.
#[test]
fn two_flows_have_one_home() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let keys: [_; 2] = neighbours(table);
    let flows = keys.map(|key| (key, to(&key)));
    let [first, second] = flows;
    let place = home(table, &keys[0]);
    let has = |key: &FlowKey| head(table, place).has(key.word(HEAD));
    let add = |(key, to): &(FlowKey, Translation)| assert!(table.add(key, to), "{key:?}");
    add(&first);
    assert!(has(&first.0) && !head(table, place).has_more());
    add(&second);
    assert!(has(&first.0) && head(table, place).has_more());
    is_left(table, &flows);

    assert_eq!(table.take(&second.0), Some(second.1));
    assert!(!head(table, place).has_more());
    is_left(table, &[first]);
    add(&second);

    // The reverse: a flow in a cell other than its home stays there.
    assert_eq!(table.take(&first.0), Some(first.1));
    assert!(head(table, place).is_free() && head(table, place).has_more());
    is_left(table, &[second]);
    assert!(!table.add(&second.0, &first.1), "it is elsewhere");
    is_left(table, &[second]);

    // And the first is at home again.
    add(&first);
    assert!(has(&first.0));
    is_left(table, &flows);
    for key in keys {
        assert!(table.remove(&key));
        assert!(!table.remove(&key));
    }
    is_empty(table);
}

#[test]
fn what_is_there_is_not_added() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let flows = neighbours::<3>(table).map(|key| (key, to(&key)));
    for (key, to) in &flows {
        assert!(table.add(key, to));
    }
    let before = head(table, home(table, &flows[0].0));
    for (key, _) in &flows {
        assert!(!table.add(key, &to(&flow_key(99))));
    }
    assert_eq!(head(table, home(table, &flows[0].0)), before);
    is_left(table, &flows);
}

/// An endpoint's answers to one port of the node's, or of a client's, belong to one flow.
#[test]
fn what_replies_carry_is_one_flows() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let [first, second, ..] = [1, 2].map(flow_key);
    let node = masqueraded(&first, 40_000);
    assert!(table.add(&first, &node));
    assert!(!table.add(&second, &masqueraded(&second, 40_000)));
    is_left(table, &[(first, node)]);
    // Another port, and another endpoint.
    let other = masqueraded(&second, 40_001);
    assert!(table.add(&second, &other));
    let third = flow_key(3);
    let far = Translation {
        endpoint: second.src,
        ..masqueraded(&third, 40_000)
    };
    assert!(table.add(&third, &far));
    is_left(table, &[(first, node), (second, other), (third, far)]);
    for key in [first, second, third] {
        assert!(table.remove(&key));
    }

    // One client by way of two VIPs.
    let vip = |d| FlowKey {
        dst: Addr::from_v4([10, 96, 0, d]),
        ..first
    };
    assert!(table.add(&vip(1), &to(&first)));
    assert!(!table.add(&vip(2), &to(&first)));
    is_left(table, &[(vip(1), to(&first))]);
    assert!(table.remove(&vip(1)));
    is_empty(table);
}

/// A flow whose replies the kernel's own conntrack translates has no slot.
#[test]
fn nothing_leads_to_foreign_flows() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let key = flow_key(1);
    let foreign = Translation {
        seen: seen::PACKET | seen::FOREIGN,
        ..to(&key)
    };
    assert!(table.add(&key, &foreign));
    assert_eq!(table.get(&key), Some(foreign));
    assert_eq!(table.by_client(&reply_key(&key, &foreign)), None);
    assert!((0..=table.slots()).all(|index| slot(table, index).cell().is_none()));
    assert!(table.remove(&key));
    is_empty(table);
    // The exception is a port that a flow holds.
    let holds = Translation {
        node_port: key.src_port,
        node_addr: 1,
        ..foreign
    };
    assert!(table.add(&key, &holds) && table.touch(&key));
    let port = PortKey::new(
        holds.endpoint,
        holds.endpoint_port,
        holds.node_port,
        key.protocol,
    );
    assert_eq!(table.by_node(&port), Some(key));
    assert!(table.remove(&key) && !table.touch(&key));
    is_empty(table);
}

#[test]
fn a_value_is_set_where_it_is() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let keys: [_; 2] = neighbours(table);
    let older = |key: &FlowKey| Translation {
        used: Tick::from_number(now().number().wrapping_sub(2)),
        seen: seen::PACKET | seen::in_replies(seen::PACKET),
        ..to(key)
    };
    for key in &keys {
        assert!(table.set(key, &to(key)));
    }
    let place = home(table, &keys[0]);
    // The second stays where it is, whether its home is another's or free.
    for left in [&keys[..], &keys[1..]] {
        let before = head(table, place);
        for value in [older, to] {
            let flows: Vec<_> = left.iter().map(|key| (*key, value(key))).collect();
            for (key, to) in &flows {
                assert!(table.set(key, to));
            }
            is_left(table, &flows);
        }
        assert_eq!(head(table, place), before);
        table.remove(&keys[0]);
    }
    // Another endpoint's replies lead to it then.
    let moved = to(&flow_key(99));
    assert!(table.set(&keys[1], &moved));
    is_left(table, &[(keys[1], moved)]);
    let before = reply_key(&keys[1], &to(&keys[1]));
    assert_eq!(table.by_client(&before), None);
}

/// The state that a program leaves if it stops while it adds or removes its flow.
#[test]
fn a_cell_that_somebody_holds_has_no_flow() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let key = flow_key(1);
    let flow = (key, to(&key));
    let at = now();
    let index = cells::hold(&table, &key, at);
    let line = table.cell(index).unwrap();
    cells::write(line, &key, &flow.1);
    let is_nowhere = || {
        assert_eq!(table.get(&key), None);
        assert_eq!(table.by_client(&reply_key(&key, &flow.1)), None);
        assert_eq!(table.entries(), []);
        assert!(!table.remove(&key));
        assert!(!table.add(&key, &flow.1), "somebody may be making it");
    };
    is_nowhere();
    let place = cells::place_of_replies(&key, &flow.1, table.secret);
    assert!(cells::lead(&table, place, index, false, now()));
    is_nowhere();
    assert!(cells::publish(line, &key, table.holder(at)));
    is_left(table, &[flow]);

    assert!(cells::hold_flow(line, head(table, index), table.holder(at)));
    is_nowhere();
    cells::forget(&table, index, key.word(HEAD), at);
    is_empty(table);
}

#[test]
fn what_is_not_to_go_is_put_back() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let flows = neighbours::<2>(table).map(|key| (key, to(&key)));
    for (key, to) in &flows {
        assert!(table.add(key, to));
    }
    for (key, value) in &flows {
        let stays = |found: &Translation| {
            assert_eq!(found, value);
            // Meanwhile no lookup finds it, and no writer can add it.
            assert_eq!(table.get(key), None);
            assert!(!table.add(key, value));
            false
        };
        assert_eq!(table.take_if(key, stays), None);
        is_left(table, &flows);
    }
    let [(first, value), second] = flows;
    assert_eq!(table.take_if(&first, |found| *found == value), Some(value));
    is_left(table, &[second]);
    assert_eq!(table.take_if(&first, |_| panic!("it is gone")), None);
}

/// Cells that a writer held long ago are freed, with the slots that lead to them; cells that a writer holds now are
/// not.
#[test]
fn what_the_dead_held_is_freed() {
    let Some(table) = &table_for(1024) else {
        return;
    };
    let long_ago = Tick::from_number(now().number().wrapping_sub(4));
    let free = || {
        let mut walk = table.walk();
        while walk.read(&mut Vec::new()) {}
        walk.free_held()
    };
    // At its home, and its slot leads to it.
    let key = flow_key(1);
    let index = cells::hold(&table, &key, long_ago);
    let line = table.cell(index).unwrap();
    cells::write(line, &key, &to(&key));
    let place = cells::place_of_replies(&key, &to(&key), table.secret);
    assert!(cells::lead(&table, place, index, false, now()));
    assert_eq!(free(), 1);
    is_empty(table);
    assert_eq!(free(), 0);
    // The former holder comes too late, and changes nothing.
    let before = head(table, index);
    assert!(!cells::publish(line, &key, table.holder(long_ago)));
    cells::give_back(&table, index, &key, long_ago);
    assert_eq!(head(table, index), before);

    // Held, released, and held again by another writer.
    assert_eq!(cells::hold(&table, &key, long_ago), index);
    cells::give_back(&table, index, &key, long_ago);
    assert_eq!(cells::hold(&table, &key, now()), index);
    assert_eq!(free(), 0);
    assert!(head(table, index).is_held());
    cells::give_back(&table, index, &key, now());

    // Two at once, of which one lives; and a flow whose home is the other's goes meanwhile.
    let [dead, elsewhere] = neighbours(table);
    assert!(table.add(&dead, &to(&dead)) && table.add(&elsewhere, &to(&elsewhere)));
    assert!(table.remove(&dead));
    let [died, lives] =
        [(dead, long_ago), (key, now())].map(|(key, at)| cells::hold(&table, &key, at));
    assert!(died != NOWHERE && lives != NOWHERE);
    assert!(table.remove(&elsewhere));
    assert_eq!(free(), 1);
    cells::give_back(&table, lives, &key, now());
    is_empty(table);
}

#[test]
fn every_cell_is_read() {
    let Some(table) = &table_for(8) else { return };
    let mut flows = Vec::new();
    for place in 0..=table.mask() {
        let mut keys = (0..).map(flow_key);
        let key = keys.find(|key| home(table, key) == place).unwrap();
        assert!(table.add(&key, &to(&key)));
        flows.push((key, to(&key)));
    }
    assert_eq!(flows.len(), 16);
    is_left(table, &flows);
}

/// As many flows as there is to be room for, and a walk through them.
#[test]
fn half_full_everything_is_found() {
    const FLOWS: u32 = 1 << 15;
    let Some(table) = &table_for(FLOWS) else {
        return;
    };
    let mut random = SmallRng::seed_from_u64(76);
    let mut flows = HashMap::new();
    while flows.len() < FLOWS as usize {
        let [c, d]: [u8; 2] = random.random();
        let key = FlowKey::new(
            Addr::from_v4(random.random()),
            Port::new(random.random()),
            Addr::from_v4([10, 96, c, d]),
            Port::new(443),
            Protocol::TCP,
        );
        flows.insert(key, to(&key));
    }
    for (key, to) in &flows {
        assert!(table.add(key, to));
    }
    // Of all, by chance: 1 - (1 - e^-0.5) / 0.5 would be elsewhere if those elsewhere took no homes.
    let at_home = flows
        .keys()
        .filter(|key| head(table, home(table, key)).has(key.word(HEAD)));
    let share = at_home.count() * 100 / flows.len();
    assert!((70..80).contains(&share), "{share} of 100");

    let (mut walk, mut step, mut all) = (table.walk(), Vec::new(), HashMap::new());
    while walk.read(&mut step) {
        assert!(step.len() <= ENTRIES, "{} at once", step.len());
        for (key, value) in step.drain(..) {
            assert_eq!(all.insert(key, value), None, "twice");
        }
    }
    // A flow in 130 000 finds all its cells taken, and then another goes.
    assert!(all.len() + 4 > flows.len(), "{}", flows.len() - all.len());
    for (key, value) in &all {
        assert_eq!(flows[key], *value);
        assert_eq!(table.get(key), Some(*value));
        assert_eq!(table.by_client(&reply_key(key, value)), Some(*key));
    }
    for key in all.keys() {
        assert!(table.remove(key));
    }
    is_empty(table);
}

/// All have one home. Some keys are a thread's own; one is several threads'.
#[test]
fn threads_share_a_home() {
    const ROUNDS: u32 = 20_000;
    let Some(table) = &table_for(1024) else {
        return;
    };
    let [common, own @ ..]: [_; 4] = neighbours(table);
    let value = to(&common);
    // The part that is equal for all flows.
    let to = move |key: &FlowKey| Translation {
        used: value.used,
        ..to(key)
    };
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let owners = own.map(|key| {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // `add` fails while another thread holds a cell that it needs.
                    while !table.add(&key, &to(&key)) {
                        std::hint::spin_loop();
                    }
                    assert_eq!(table.get(&key), Some(to(&key)), "{round}");
                    let by_reply = table.by_client(&reply_key(&key, &to(&key)));
                    assert_eq!(by_reply, Some(key), "{round}");
                    assert_eq!(table.take_if(&key, |_| false), None);
                    assert_eq!(table.take(&key), Some(to(&key)), "{round}");
                }
            })
        });
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    table.add(&common, &to(&common));
                    if let Some(taken) = table.take(&common) {
                        assert_eq!(taken, to(&common));
                    }
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for (key, value) in table.entries() {
                    assert_eq!(value, to(&key));
                }
            }
        });
        let ended = owners.map(thread::ScopedJoinHandle::join);
        done.store(true, Ordering::Relaxed);
        for owner in ended {
            owner.unwrap();
        }
    });
    table.remove(&common);
    // A count may stay too high where several threads change it at once (`one_less` tries a few times): a lookup of a
    // missing flow then reads more cells.
    is_left(table, &[]);
}
