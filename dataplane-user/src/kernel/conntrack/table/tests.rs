//! On real maps, which no program knows.

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use dataplane_common::{
    Addr, Port, Protocol,
    cells::{Cell, CellKey, Head},
    packet::{FlowKey, Forward, Masqueraded, PortKey, Tick, seen},
};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::{COUNT, ENTRIES, Plain, Table, cell, entry};
use crate::kernel::conntrack::{Conntrack, tests::conntrack_for};

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

fn port_key(number: u32) -> PortKey {
    let client = flow_key(number).src;
    PortKey::new(client, Port::new(8080), Port::new(33_000), Protocol::UDP)
}

/// What tells whose it is.
fn forward(key: &FlowKey) -> Forward {
    Forward {
        endpoint: key.src,
        endpoint_port: key.src_port,
        node_port: key.dst_port,
        used: Tick::from_ns(7 << 32),
        seen: seen::PACKET,
        node_addr: 3,
    }
}

fn masqueraded(key: &PortKey) -> Masqueraded {
    Masqueraded {
        vip: Addr::from_v4([10, 96, 0, 10]),
        client: key.endpoint,
        vip_port: key.endpoint_port,
        client_port: key.node_port,
        used: Tick::from_ns(7 << 32),
        seen: seen::PACKET,
        node_addr: 3,
    }
}

/// Keys that have one cell.
fn neighbours<K: CellKey + Plain, V: Plain, const N: usize>(
    table: &Table<K, V>,
    key: impl Fn(u32) -> K,
) -> [K; N] {
    let place = table.place(&key(0));
    let mut keys = (0..).map(key).filter(|key| table.place(key) == place);
    std::array::from_fn(|_| keys.next().expect("there is no end of keys"))
}

fn head<K: CellKey + Plain, V: Plain>(table: &Table<K, V>, key: &K) -> Head {
    Head(table.head(table.place(key)).load(Ordering::Acquire))
}

/// How many entries of a cell's keys are in the hash, by the cell.
fn counted<K: CellKey + Plain, V: Plain>(table: &Table<K, V>, key: &K) -> u64 {
    (head(table, key).0 & COUNT) / Head::ONE_MORE
}

/// How many entries are in the hash.
fn beside<K: CellKey + Plain, V: Plain>(table: &Table<K, V>) -> usize {
    table.more.entries().unwrap().len()
}

#[test]
fn a_cell_is_key_and_value() {
    let v6 = |last| Addr::from(std::net::IpAddr::from([0x2001, 0xdb8, 1, 2, 3, 4, 5, last]));
    let key = FlowKey {
        src: v6(6),
        dst: v6(7),
        src_port: Port::new(0x1234),
        ..flow_key(1)
    };
    let made: Cell = cell(&key, &forward(&key));
    for (index, word) in made.iter().take(5).enumerate() {
        assert_eq!(*word, CellKey::word(&key, index), "{index}");
    }
    assert_eq!(entry(&made), Some((key, forward(&key))));

    let key = PortKey {
        endpoint: v6(6),
        ..port_key(1)
    };
    let made = cell(&key, &masqueraded(&key));
    for (index, word) in made.iter().take(3).enumerate() {
        assert_eq!(*word, CellKey::word(&key, index), "{index}");
    }
    assert_eq!(entry(&made), Some((key, masqueraded(&key))));
}

/// The first has the cell.
fn share<K, V>(table: &Table<K, V>, keys: [K; 2], value: fn(&K) -> V)
where
    K: CellKey + Plain + PartialEq + Debug,
    V: Plain + PartialEq + Debug,
{
    let [first, second] = keys;
    let of = |key: &K| (*key, value(key));
    let found = |key: &K| table.get(key).unwrap();
    let add = |key: &K| assert!(table.add(key, &value(key)).unwrap(), "{key:?}");
    let left = |left: &[K]| {
        let entries = table.entries().unwrap();
        assert_eq!(entries.len(), left.len());
        for key in keys {
            let is_there = left.contains(&key);
            assert_eq!(found(&key), is_there.then(|| value(&key)));
            assert_eq!(entries.contains(&of(&key)), is_there);
        }
    };
    add(&first);
    assert_eq!((beside(table), counted(table, &first)), (0, 0));
    add(&second);
    assert_eq!((beside(table), counted(table, &first)), (1, 1));
    left(&[first, second]);

    assert_eq!(table.take(&second).unwrap(), Some(value(&second)));
    assert_eq!((beside(table), counted(table, &first)), (0, 0));
    left(&[first]);
    add(&second);

    // The other way round: what is in the hash stays there.
    assert_eq!(table.take(&first).unwrap(), Some(value(&first)));
    assert!(head(table, &first).is_free());
    assert_eq!((beside(table), counted(table, &first)), (1, 1));
    left(&[second]);
    let other = value(&first);
    let before = head(table, &first);
    assert!(!table.add(&second, &other).unwrap(), "it is in the hash");
    assert_eq!(head(table, &first), before);
    left(&[second]);

    // And the first back into its cell.
    add(&first);
    assert!(head(table, &first).has(CellKey::word(&first, K::HEAD)));
    left(&[first, second]);
    for key in keys {
        assert!(table.remove(&key).unwrap());
        assert!(!table.remove(&key).unwrap());
    }
    assert!(head(table, &first).is_free());
    assert_eq!((beside(table), counted(table, &first)), (0, 0));
    left(&[]);
}

#[test]
fn two_keys_share_a_cell() {
    let Some(Conntrack {
        forward: table,
        masquerade,
        ..
    }) = conntrack_for(1024)
    else {
        return;
    };
    share(&table, neighbours(&table, flow_key), forward);
    share(&masquerade, neighbours(&masquerade, port_key), masqueraded);
}

#[test]
fn what_is_there_is_not_added() {
    let Some(conntrack) = conntrack_for(1024) else {
        return;
    };
    let table = &conntrack.forward;
    let keys: [_; 3] = neighbours(table, flow_key);
    for key in &keys {
        assert!(table.add(key, &forward(key)).unwrap());
    }
    let before = head(table, &keys[0]);
    assert_eq!((beside(table), counted(table, &keys[0])), (2, 2));
    for key in &keys {
        assert!(!table.add(key, &forward(&flow_key(99))).unwrap());
        assert_eq!(table.get(key).unwrap(), Some(forward(key)));
    }
    assert_eq!(head(table, &keys[0]), before);
    assert_eq!(table.entries().unwrap().len(), 3);
}

#[test]
fn a_value_is_set_where_it_is() {
    let Some(conntrack) = conntrack_for(1024) else {
        return;
    };
    let table = &conntrack.forward;
    let keys: [_; 2] = neighbours(table, flow_key);
    let older = |key| Forward {
        used: Tick::from_ns(5 << 32),
        ..forward(key)
    };
    for key in &keys {
        table.set(key, &forward(key)).unwrap();
    }
    // The second stays in the hash, whether the cell is another's or free.
    for left in [2, 1] {
        let before = head(table, &keys[0]);
        for value in [older, forward] {
            for key in &keys[2 - left..] {
                table.set(key, &value(key)).unwrap();
                assert_eq!(table.get(key).unwrap(), Some(value(key)));
            }
        }
        assert_eq!(head(table, &keys[0]), before);
        assert_eq!((table.entries().unwrap().len(), beside(table)), (left, 1));
        table.remove(&keys[0]).unwrap();
    }
}

/// As a program leaves it in the middle of taking it.
#[test]
fn a_cell_that_is_being_written_has_no_entry() {
    let Some(conntrack) = conntrack_for(1024) else {
        return;
    };
    let table = &conntrack.forward;
    let key = flow_key(1);
    let place = table.place(&key);
    let free = head(table, &key);
    assert!(table.exchange(place, free, free.taken()));
    table.write(place, &key, &forward(&flow_key(2)));
    assert_eq!(table.get(&key).unwrap(), None);
    assert_eq!(table.entries().unwrap(), []);
    assert!(!table.remove(&key).unwrap());

    assert!(table.add(&key, &forward(&key)).unwrap());
    assert_eq!((beside(table), counted(table, &key)), (1, 1));
    assert_eq!(table.get(&key).unwrap(), Some(forward(&key)));
    // Its entry is there, and then gone.
    let other = flow_key(2);
    let written = Head::written(CellKey::word(&other, FlowKey::HEAD));
    table.write(place, &other, &forward(&other));
    table.head(place).fetch_add(written, Ordering::AcqRel);
    assert_eq!(
        table.entries().unwrap(),
        [(other, forward(&other)), (key, forward(&key))]
    );
    assert!(table.exchange(place, head(table, &key), head(table, &key).freed()));
    assert_eq!(table.get(&key).unwrap(), Some(forward(&key)));
    assert!(table.remove(&key).unwrap());
    assert_eq!(counted(table, &key), 0);
}

/// So many entries of one cell's keys that nobody counts them any longer.
#[test]
fn what_is_not_counted_is_found() {
    let Some(conntrack) = conntrack_for(1024) else {
        return;
    };
    let table = &conntrack.forward;
    let keys: [_; 200] = neighbours(table, flow_key);
    for key in &keys {
        assert!(table.add(key, &forward(key)).unwrap());
    }
    assert_eq!(counted(table, &keys[0]), 128);
    for key in &keys {
        assert_eq!(table.take(key).unwrap(), Some(forward(key)));
        assert_eq!(table.get(key).unwrap(), None);
    }
    assert_eq!(table.entries().unwrap(), []);
    assert_eq!(counted(table, &keys[0]), 128, "for good");
    assert!(table.add(&keys[1], &forward(&keys[1])).unwrap());
    assert_eq!(table.get(&keys[1]).unwrap(), Some(forward(&keys[1])));
}

#[test]
fn every_cell_is_read() {
    let Some(conntrack) = conntrack_for(4) else {
        return;
    };
    let table = &conntrack.forward;
    for place in 0..4 {
        let mut keys = (0..).map(flow_key);
        let key = keys.find(|key| table.place(key) == place).unwrap();
        assert!(table.add(&key, &forward(&key)).unwrap());
    }
    assert_eq!((table.entries().unwrap().len(), beside(table)), (4, 0));
}

#[test]
fn three_quarters_full_everything_is_found() {
    const CAPACITY: u32 = 1 << 15;
    let Some(conntrack) = conntrack_for(CAPACITY) else {
        return;
    };
    let table = &conntrack.forward;
    let mut random = SmallRng::seed_from_u64(76);
    let mut keys = HashSet::new();
    while keys.len() < CAPACITY as usize * 76 / 100 {
        let [c, d]: [u8; 2] = random.random();
        keys.insert(FlowKey::new(
            Addr::from_v4(random.random()),
            Port::new(random.random()),
            Addr::from_v4([10, 96, c, d]),
            Port::new(443),
            Protocol::TCP,
        ));
    }
    for key in &keys {
        assert!(table.add(key, &forward(key)).unwrap());
    }
    for key in &keys {
        assert_eq!(table.get(key).unwrap(), Some(forward(key)));
    }
    // Of all, 1 - (1 - e^-0.76) / 0.76: 30 of 100.
    let beside = beside(table);
    let share = beside * 100 / keys.len();
    assert!((27..33).contains(&share), "{beside} of {}", keys.len());

    let (mut walk, mut step, mut all) = (table.walk(), Vec::new(), HashMap::new());
    while walk.read(&mut step).unwrap() {
        assert!(step.len() <= ENTRIES, "{} at once", step.len());
        for (key, value) in step.drain(..) {
            assert_eq!(value, forward(&key));
            assert_eq!(all.insert(key, value), None, "twice");
        }
    }
    assert_eq!(all.len(), keys.len());
    for key in &keys {
        assert!(table.remove(key).unwrap());
    }
    for place in 0..table.capacity() {
        let head = Head(table.head(place).load(Ordering::Acquire));
        assert!(head.is_free() && !head.has_more(), "{place}: {head:?}");
    }
    assert_eq!(table.entries().unwrap(), []);
}

/// All have one cell. Some keys are a thread's own; one is several threads'.
#[test]
fn threads_share_a_cell() {
    const ROUNDS: u32 = 20_000;
    let Some(conntrack) = conntrack_for(1024) else {
        return;
    };
    let table = &conntrack.forward;
    let [common, own @ ..]: [_; 4] = neighbours(table, flow_key);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let owners = own.map(|key| {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    assert!(table.add(&key, &forward(&key)).unwrap(), "{round}");
                    let found = table.get(&key).unwrap();
                    assert_eq!(found, Some(forward(&key)), "{round}");
                    let taken = table.take(&key).unwrap();
                    assert_eq!(taken, Some(forward(&key)), "{round}");
                }
            })
        });
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    table.add(&common, &forward(&common)).unwrap();
                    if let Some(taken) = table.take(&common).unwrap() {
                        assert_eq!(taken, forward(&common));
                    }
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if let (_, Some(cell)) = table.read(table.place(&common)) {
                    let (key, value) = entry::<FlowKey, Forward>(&cell).unwrap();
                    assert_eq!(value, forward(&key));
                }
            }
        });
        let ended = owners.map(thread::ScopedJoinHandle::join);
        done.store(true, Ordering::Relaxed);
        for owner in ended {
            owner.unwrap();
        }
    });
    table.remove(&common).unwrap();
    assert_eq!(table.entries().unwrap(), []);
    assert!(head(table, &common).is_free());
}
