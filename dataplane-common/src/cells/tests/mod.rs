#![expect(clippy::cast_possible_truncation, reason = "small numbers")]

extern crate std;

mod keys;
mod ports;
mod tries;

use std::{
    boxed::Box,
    cell::{Cell, RefCell},
    collections::HashSet,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread,
    vec::Vec,
};

use super::*;
use crate::{Addr, Port, Protocol};

/// Any even number.
const SECRET: u64 = 0x5851_f42d_4c95_7f2e;

/// Cells and slots, as every CPU and the agent see them.
struct Shared {
    cells: Vec<[AtomicU64; 8]>,
    slots: Vec<AtomicU32>,
    sequences: Vec<[AtomicU64; 2]>,
    pushed_out: AtomicU32,
}

impl<'a> Memory for &'a Shared {
    type Line = &'a [AtomicU64; 8];
    type Entry = AtomicSlot<'a>;
    type Sequences = &'a [AtomicU64; 2];

    fn mask(&self) -> u32 {
        self.cells.len() as u32 - 1
    }

    fn secret(&self) -> u64 {
        SECRET
    }

    fn sequences(&self, index: u32) -> Option<Self::Sequences> {
        self.sequences.get(index as usize)
    }

    fn cell(&self, index: u32) -> Option<Self::Line> {
        self.cells.get(index as usize)
    }

    fn slot(&self, index: u32) -> Option<Self::Entry> {
        self.slots.get(index as usize).map(AtomicSlot)
    }

    fn holder(&self, now: Tick) -> Holder {
        Holder::new(1, now)
    }

    fn keep(&self, state: states::State) -> u32 {
        states::Timeouts::DEFAULT.of(state)
    }

    fn pushed_out(&self) {
        self.pushed_out.fetch_add(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn new(cells: usize) -> Self {
        Self {
            cells: (0..cells).map(|_| Default::default()).collect(),
            slots: (0..cells * 2).map(|_| AtomicU32::default()).collect(),
            sequences: (0..cells).map(|_| Default::default()).collect(),
            pushed_out: AtomicU32::new(0),
        }
    }

    fn find(&self, key: &FlowKey) -> Option<u32> {
        Some(find(&self, key)?.0)
    }

    fn find_reply(&self, key: &FlowKey, value: &Translation) -> Option<u32> {
        let found = if value.node_addr == 0 {
            find_by_client(&self, &reply(key, value))
        } else {
            find_by_node(&self, &port(key, value))
        };
        Some(found?.0)
    }

    /// Makes a flow, as a program does; `false` if there is no room, or another CPU makes it.
    fn make(&self, key: &FlowKey, value: &Translation, now: Tick) -> bool {
        let index = hold(&self, key, now);
        index < BUSY && self.make_in(index, key, value, now)
    }

    fn make_in(&self, index: u32, key: &FlowKey, value: &Translation, now: Tick) -> bool {
        let memory = self;
        let line = memory.cell(index).unwrap();
        write(line, key, value);
        let masqueraded = value.node_addr != 0;
        if !lead(
            &memory,
            place_of_replies(key, value, SECRET),
            index,
            masqueraded,
            now,
        ) {
            give_back(&memory, index, key, now);
            return false;
        }
        publish(line, key, self.holder(now))
    }

    /// As [`Shared::make`]. There is room if and only if [`has_room`] says so.
    fn make_as_foretold(&self, key: &FlowKey, value: &Translation, now: Tick) -> bool {
        let foretold = has_room(&self, key, now);
        let index = hold(&self, key, now);
        assert_eq!(index < BUSY, foretold, "{key:?}");
        foretold && self.make_in(index, key, value, now)
    }

    fn unmake(&self, key: &FlowKey) -> bool {
        let Some(index) = self.find(key) else {
            return false;
        };
        let line = (&self).cell(index).unwrap();
        let head = Head(line.load(HEAD));
        // Otherwise another flow has the cell by now.
        has(line, head, key) && remove(&self, index, head, at(0))
    }

    /// Every flow.
    fn flows(&self) -> Vec<(FlowKey, Translation)> {
        let cells = self.cells.iter();
        let flow = |line: &[AtomicU64; 8]| {
            Some((super::key(line, Head(line.load(HEAD)).key()?), value(line)))
        };
        cells.filter_map(flow).collect()
    }

    /// Checks that every flow is there once, found from both ends, and that no other cell or slot is taken.
    fn is_sound(&self) -> usize {
        let flows = self.flows();
        let mut seen = HashSet::new();
        for (key, value) in &flows {
            assert!(seen.insert(*key), "{key:?} is there twice");
            let at = self.find(key);
            assert!(at.is_some(), "{key:?} is not found");
            assert_eq!(self.find_reply(key, value), at, "{key:?} {value:?}");
        }
        let taken = self
            .cells
            .iter()
            .filter(|cell| !Head(Line::load(*cell, HEAD)).is_free());
        assert_eq!(taken.count(), flows.len(), "cells");
        let led = self
            .slots
            .iter()
            .filter(|slot| AtomicSlot(slot).load().cell().is_some());
        assert_eq!(led.count(), flows.len(), "slots");
        flows.len()
    }

    /// Checks that no cell or slot is taken, and none counted.
    fn is_empty(&self) {
        for cell in &self.cells {
            let head = Head(Line::load(cell, HEAD));
            assert!(head.is_free() && !head.has_more(), "{head:?}");
        }
        for slot in &self.slots {
            assert_eq!(slot.load(Ordering::Relaxed), 0);
        }
    }
}

fn key(client: u16) -> FlowKey {
    FlowKey::new(
        Addr::from_v4([192, 0, 2, 7]),
        Port::new(client),
        Addr::from_v4([10, 96, 0, 10]),
        Port::new(443),
        Protocol::TCP,
    )
}

fn to(key: &FlowKey, node_addr: u8) -> Translation {
    Translation {
        endpoint: Addr::from_v4([10, 244, 1, 2]),
        endpoint_port: Port::new(8443),
        node_port: if node_addr == 0 {
            Port::ANY
        } else {
            key.src_port
        },
        used: Tick::default(),
        seen: seen::PACKET,
        node_addr,
    }
}

fn reply(key: &FlowKey, to: &Translation) -> FlowKey {
    FlowKey::new(
        to.endpoint,
        to.endpoint_port,
        key.src,
        key.src_port,
        key.protocol,
    )
}

fn port(key: &FlowKey, to: &Translation) -> PortKey {
    PortKey::new(to.endpoint, to.endpoint_port, to.node_port, key.protocol)
}

fn at(seconds: u64) -> Tick {
    Tick::from_ns(seconds * 1_000_000_000)
}

#[test]
fn ports_that_a_client_takes_one_after_the_other_have_cells_one_after_the_other() {
    let first = key(32_768 - 443).place(SECRET);
    for step in 0..1000_u16 {
        let next = key(32_768 - 443 + 2 * step).place(SECRET);
        assert_eq!(next, first.wrapping_add(u32::from(step)));
    }
    let back = |port| PortKey::new(key(1).dst, Port::new(80), Port::new(port), Protocol::UDP);
    let first = back(40_000).place(SECRET);
    assert_eq!(back(40_002).place(SECRET), first.wrapping_add(1));
}

/// The cells outlive the agent: another version finds flows in the same cells.
#[test]
fn places_are_fixed() {
    let v6 = |text: &str| Addr::from(text.parse::<std::net::IpAddr>().unwrap());
    let (client, vip) = (v6("fd00::1:2:3"), v6("fd00:10:96::a"));
    let (from, to) = (Port::new(65_535), Port::new(53));
    let endpoint = Addr::from_v4([10, 244, 1, 2]);
    let port = PortKey::new(endpoint, Port::new(8443), Port::new(50_000), Protocol::TCP);
    // Computed independently, in another language, for a processor that is little-endian.
    if cfg!(target_endian = "little") {
        assert_eq!(key(40_000).place(SECRET), 0x10a4_1448);
        let key = FlowKey::new(client, from, vip, to, Protocol::UDP);
        assert_eq!(key.place(SECRET), 0x89e1_ea99);
        assert_eq!(port.place(SECRET), 0x7363_82fc);
    }
}

#[test]
fn all_ports_have_cells_of_their_own() {
    let mut places: Vec<u32> = (0..=u16::MAX).map(|port| key(port).place(SECRET)).collect();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 1 << 16);
}

#[test]
fn every_part_of_an_address_tells() {
    let bases: HashSet<u32> = (0..=255_u8)
        .flat_map(|n| {
            [[n, 0, 2, 7], [192, n, 2, 7], [192, 0, n, 7], [192, 0, 2, n]].map(|src| {
                let src = Addr::from_v4(src);
                FlowKey { src, ..key(1) }.place(SECRET) & 0xffff
            })
        })
        .collect();
    // Of 1021 different ones; by chance 8 meet.
    assert!(bases.len() > 980, "{}", bases.len());
}

/// The distance of two flows' cells depends on the secret, also if the flows' addresses differ in one bit, or in the topmost
/// bits of two words. These bits change the products in a way that depends on no factor.
#[test]
fn how_far_apart_cells_are_is_a_secret() {
    let secrets: Vec<u64> = (1..=64_u64)
        .map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !1)
        .collect();
    let one: Vec<Vec<usize>> = (0..256).map(|bit| Vec::from([bit])).collect();
    let topmost: Vec<usize> = (0..4)
        .flat_map(|word| (60..64).map(move |bit| word * 64 + bit))
        .collect();
    let two = topmost
        .iter()
        .flat_map(|a| topmost.iter().map(|b| Vec::from([*a, *b])));
    for bits in one.into_iter().chain(two.filter(|bits| bits[0] < bits[1])) {
        let first = key(40_000);
        let mut words: [u64; 4] = core::array::from_fn(|index| first.word(index));
        for bit in &bits {
            words[bit / 64] ^= 1 << (bit % 64);
        }
        let addr = |at: usize| {
            let bytes = [words[at].to_ne_bytes(), words[at + 1].to_ne_bytes()].concat();
            let word = |n: usize| u32::from_ne_bytes(bytes[4 * n..4 * n + 4].try_into().unwrap());
            Addr::from_words([word(0), word(1), word(2), word(3)])
        };
        let second = FlowKey {
            src: addr(0),
            dst: addr(2),
            ..first
        };
        let distances: HashSet<u32> = secrets
            .iter()
            .map(|secret| first.place(*secret).wrapping_sub(second.place(*secret)))
            .collect();
        assert!(distances.len() > 48, "bits {bits:?}: {}", distances.len());
    }
}

#[test]
fn others_of_neighbours_are_scattered() {
    let mut seen = HashSet::new();
    for place in 1000..2000 {
        for nth in 2..=OTHERS {
            seen.insert(candidate(place, nth) & 0xf_ffff);
        }
    }
    // Of 15 000, by chance 107 meet.
    assert!(seen.len() > 14_700, "{}", seen.len());
}

#[test]
fn the_first_of_the_others_is_beside_the_home() {
    for place in [6, 7, u32::MAX] {
        assert_eq!([0, 1].map(|nth| candidate(place, nth)), [place, place ^ 1]);
        let mut others = 2..=OTHERS;
        assert!(others.all(|nth| candidate(place, nth).abs_diff(place) > 16));
    }
}

#[test]
fn a_head_goes_round() {
    let ports = key(1000).word(HEAD);
    let free = Head(7 * Head::ONE_MORE + 3 * Head::NUMBER);
    assert!(free.is_free() && free.has_more() && free.key().is_none() && free.holder().is_none());
    let holder = Holder::new(9, at(100));
    let held = free.held(holder);
    assert!(!held.is_free() && held.key().is_none() && held.holder() == Some(holder));
    assert!(!holder.is_dead(at(104)) && holder.is_dead(at(113)));
    // Another CPU counts one more meanwhile.
    let counted = Head(held.0 + Head::ONE_MORE);
    let made = counted.given_back(ports);
    assert!(made.has(ports) && made.key() == Some(ports) && !made.is_held());
    let freed = made.held(holder).given_back(0);
    assert_eq!(freed, Head(8 * Head::ONE_MORE + 5 * Head::NUMBER));
    let last = Head(u64::MAX << 48);
    let made = last.held(holder).given_back(ports);
    assert_eq!(made, Head(ports), "the number begins anew");
}

#[test]
fn what_is_written_is_read() {
    let shared = Shared::new(16);
    let key = FlowKey {
        src: Addr::from_v6(core::array::from_fn(|n| n as u8 + 1)),
        ..key(40_000)
    };
    let value = Translation {
        endpoint: Addr::from_v6([9; 16]),
        endpoint_port: Port::new(0x1234),
        node_port: Port::new(0x5678),
        used: Tick::from_number(0x9abc),
        seen: 0x35,
        node_addr: 0xef,
    };
    let line = &shared.cells[3];
    write(line, &key, &value);
    assert_eq!(super::key(line, key.word(HEAD)), key);
    assert_eq!(super::value(line), value);
    let state = State(line.load(STATE));
    assert_eq!(state.used(), value.used);
    assert_eq!(
        State(state.used_at(at(100)).0 | State::bits(0x42)).seen(),
        0x77
    );
}

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
fn established(client: u16, port: u16, protocol: Protocol, used: Tick) -> (FlowKey, Translation) {
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

/// A port of the node's that a masqueraded flow has to an endpoint is free for another flow only when the first is
/// gone.
#[test]
fn a_port_of_the_nodes_is_one_flows() {
    let shared = Shared::new(64);
    let (first, second) = (
        key(40_000),
        FlowKey {
            src: Addr::from_v4([1, 2, 3, 4]),
            ..key(40_000)
        },
    );
    assert!(shared.make(&first, &to(&first, 1), at(0)));
    assert!(!shared.make(&second, &to(&second, 1), at(0)));
    assert_eq!(shared.is_sound(), 1);
    assert!(shared.unmake(&first));
    shared.is_empty();
    assert!(shared.make(&second, &to(&second, 1), at(0)));
}

/// Another flow with the same home.
fn rival(key: &FlowKey, mask: u32) -> FlowKey {
    (0..=u8::MAX)
        .flat_map(|n| (0..=u16::MAX).map(move |port| (n, port)))
        .map(|(n, port)| FlowKey {
            src: Addr::from_v4([198, 51, 100, n]),
            src_port: Port::new(port),
            ..*key
        })
        .find(|rival| (rival.place(SECRET) ^ key.place(SECRET)) & mask == 0)
        .unwrap()
}

/// The home of a flow becomes free while one CPU makes the flow elsewhere: no other CPU makes it in the home, too.
#[test]
fn a_flow_is_not_made_twice() {
    let shared = Shared::new(1024);
    let memory = &shared;
    let key = key(40_000);
    let rival = rival(&key, memory.mask());
    assert!(shared.make(&rival, &to(&rival, 0), at(0)));
    let elsewhere = hold(&memory, &key, at(0));
    assert_eq!(elsewhere, key.place(SECRET) & memory.mask() ^ 1);
    assert!(shared.unmake(&rival));
    assert_eq!(hold(&memory, &key, at(0)), BUSY, "held elsewhere");
    let line = memory.cell(elsewhere).unwrap();
    write(line, &key, &to(&key, 0));
    assert!(publish(line, &key, memory.holder(at(0))));
    assert_eq!(hold(&memory, &key, at(0)), BUSY, "there elsewhere");
    assert_eq!(shared.find(&key), Some(elsewhere));
    assert!(shared.unmake(&key));
    shared.is_empty();
}

/// A held cell that a flow might have may get this flow: no other cell is taken meanwhile.
#[test]
fn a_held_cell_beside_the_home_makes_wait() {
    let shared = Shared::new(64);
    let memory = &shared;
    let first = (0..2)
        .map(|step| key(40_000 + 2 * step))
        .find(|key| key.place(SECRET) % 2 == 0)
        .unwrap();
    let second = key(first.src_port.host() + 2);
    let held = hold(&memory, &first, at(0));
    assert_eq!(held, candidate(second.place(SECRET), 1) & memory.mask());
    let rival = rival(&second, memory.mask());
    assert!(shared.make(&rival, &to(&rival, 0), at(0)));
    assert_eq!(hold(&memory, &second, at(0)), BUSY);
    give_back(&memory, held, &first, at(0));
    assert_eq!(hold(&memory, &second, at(0)), held);
}

/// Memory that lets another CPU act when a cell is looked at once more than so many times.
struct Hooked<'a> {
    memory: &'a Shared,
    at: u32,
    before: Cell<u32>,
    hook: RefCell<Option<Box<dyn FnOnce() + 'a>>>,
}

impl<'a> Memory for Hooked<'a> {
    type Line = &'a [AtomicU64; 8];
    type Entry = AtomicSlot<'a>;
    type Sequences = &'a [AtomicU64; 2];

    fn mask(&self) -> u32 {
        self.memory.mask()
    }

    fn secret(&self) -> u64 {
        SECRET
    }

    fn holder(&self, now: Tick) -> Holder {
        Holder::new(1, now)
    }

    fn keep(&self, state: states::State) -> u32 {
        states::Timeouts::DEFAULT.of(state)
    }

    fn sequences(&self, index: u32) -> Option<Self::Sequences> {
        self.memory.sequences(index)
    }

    fn cell(&self, index: u32) -> Option<Self::Line> {
        if index == self.at {
            if let Some(before) = self.before.get().checked_sub(1) {
                self.before.set(before);
            } else if let Some(hook) = self.hook.take() {
                hook();
            }
        }
        self.memory.cell(index)
    }

    fn slot(&self, index: u32) -> Option<Self::Entry> {
        self.memory.slot(index)
    }
}

/// A flow that is over can be evicted. Between the look at it and its removal, another CPU has removed it and made
/// another flow there: the new flow stays.
#[test]
fn what_came_since_gives_no_way() {
    let shared = Shared::new(1);
    let (first, mut second, mut third) = (key(40_000), key(40_001), key(40_002));
    (second.dst_port, third.dst_port) = (Port::new(80), Port::new(81));
    let over = Translation {
        seen: seen::PACKET | seen::RST,
        ..to(&first, 0)
    };
    assert!(shared.make(&first, &over, at(0)));
    let late = Hooked {
        memory: &shared,
        at: 0,
        before: Cell::new(1),
        hook: RefCell::new(Some(Box::new(|| {
            assert!(shared.unmake(&first));
            let fresh = Translation {
                used: at(20),
                ..to(&second, 0)
            };
            assert!(shared.make(&second, &fresh, at(20)));
        }))),
    };
    assert_eq!(hold(&late, &third, at(20)), BUSY);
    assert_eq!(shared.find(&second), Some(0));
    assert_eq!(shared.is_sound(), 1);
}

/// A packet marks only its own flow, and not a flow that has the cell by then. Marks of one flow that happen at once
/// all count.
#[test]
fn a_packet_marks_its_own_flow() {
    let shared = Shared::new(1);
    let (first, mut second) = (key(40_000), key(40_001));
    second.dst_port = Port::new(80);
    let line = (&&shared).cell(0).unwrap();
    let state = || State(line.load(STATE));
    assert!(shared.make(&first, &to(&first, 0), at(0)));
    let found = read(line).unwrap();
    let (fin, answered) = (seen::FIN, seen::in_replies(seen::PACKET));
    assert!(mark(line, found.head(), found.state(), fin, 0, at(20)));
    assert!(mark(line, found.head(), found.state(), answered, 0, at(20)));
    assert_eq!(state().seen(), seen::PACKET | fin | answered);
    assert_eq!(state().used(), at(20));
    let (head, before) = (found.head(), state());
    let anew = seen::EARLIER;
    assert!(mark(line, head, before, answered, anew, at(30)));
    assert_eq!(state().seen(), seen::PACKET | answered, "anew");
    let (fin, reset) = (fin | seen::RST, seen::RST);
    assert!(mark(line, head, state(), fin, 0, at(30)));
    assert!(mark(line, head, state(), seen::PACKET, reset, at(30)));
    let closed = seen::PACKET | answered | seen::FIN;
    assert_eq!(state().seen(), closed, "it was no RST of its own");

    assert!(shared.unmake(&first));
    let fresh = Translation {
        used: at(40),
        ..to(&second, 0)
    };
    assert!(shared.make(&second, &fresh, at(40)));
    let made = state();
    for before in [found.state(), before] {
        assert!(!mark(line, head, before, seen::RST, 0, at(40)));
        assert_eq!(state(), made);
    }
}

/// The home becomes free, and another CPU makes the flow there, between the look at the home and at the next cell.
#[test]
fn a_flow_is_not_made_twice_beside_its_home() {
    for published in [false, true] {
        let shared = Shared::new(1024);
        let memory = &shared;
        let key = key(40_000);
        let rival = rival(&key, memory.mask());
        assert!(shared.make(&rival, &to(&rival, 0), at(0)));
        let home = key.place(SECRET) & memory.mask();
        let late = Hooked {
            memory,
            at: home ^ 1,
            before: Cell::new(0),
            hook: RefCell::new(Some(Box::new(|| {
                assert!(shared.unmake(&rival));
                if published {
                    assert!(shared.make(&key, &to(&key, 0), at(0)));
                } else {
                    assert_eq!(hold(&memory, &key, at(0)), home);
                }
            }))),
        };
        assert_eq!(hold(&late, &key, at(0)), BUSY);
        if !published {
            give_back(&memory, home, &key, at(0));
        }
        assert_eq!(shared.unmake(&key), published);
        shared.is_empty();
    }
}

/// Threads make and remove the same flows in few cells: no flow is ever there twice or half, and nothing is left
/// behind.
#[test]
fn many_at_once_leave_whole_flows() {
    for round in 0..20_u64 {
        let shared = Shared::new(128);
        thread::scope(|scope| {
            for number in 0..4_u64 {
                let shared = &shared;
                scope.spawn(move || {
                    // Marsaglia's xorshift.
                    let mut random = 1 + number + round * 7919;
                    for _ in 0..20_000 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let key = key(40_000 + (random >> 20) as u16 % 96);
                        let node_addr = key.src_port.host() as u8 & 1;
                        if random >> 40 & 1 == 0 {
                            shared.unmake(&key);
                        } else if shared.find(&key).is_none() {
                            shared.make(&key, &to(&key, node_addr), Tick::default());
                        }
                    }
                });
            }
        });
        assert!(shared.is_sound() > 16);
        for (key, _) in shared.flows() {
            assert!(shared.unmake(&key));
        }
        shared.is_empty();
    }
}

/// Several CPUs have the first packets of one flow at once: one makes the flow, and all use it.
#[test]
fn whoever_comes_second_finds_the_first_ones_flow() {
    const CPUS: u16 = 3;
    let shared = Shared::new(1024);
    let memory = &shared;
    let start = std::sync::Barrier::new(CPUS.into());
    let chosen: Vec<Vec<_>> = thread::scope(|scope| {
        let cpus: Vec<_> = (0..CPUS)
            .map(|cpu| {
                let start = &start;
                scope.spawn(move || {
                    let flow = |client| {
                        let key = key(client);
                        start.wait();
                        // Each would make it lead to another port.
                        let value = Translation {
                            endpoint_port: Port::new(cpu),
                            ..to(&key, 0)
                        };
                        // A thread that holds the cell may be preempted, unlike a program.
                        let index = loop {
                            match hold_or_find(&memory, &key, at(0)) {
                                BUSY => thread::yield_now(),
                                index => break index,
                            }
                        };
                        assert!(index < BUSY, "{client}");
                        if index & MADE == 0 {
                            assert!(memory.make_in(index, &key, &value, at(0)));
                        }
                        let (_, found) = find(&memory, &key).unwrap();
                        found.value().endpoint_port.host()
                    };
                    (0..300).map(|client| flow(2 * client)).collect()
                })
            })
            .collect();
        cpus.into_iter().map(|cpu| cpu.join().unwrap()).collect()
    });
    for others in &chosen[1..] {
        assert_eq!(chosen[0], *others);
    }
    assert_eq!(shared.is_sound(), 300);
}
