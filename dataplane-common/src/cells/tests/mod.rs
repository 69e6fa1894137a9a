#![expect(clippy::cast_possible_truncation, reason = "small numbers")]

extern crate std;

mod keys;
mod ports;
mod pressure;
mod races;
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
