//! The table of conntrack in the programs' memory: `dataplane_common::cells` describes it.
//!
//! Functions that look at more than one cell have external linkage: the verifier checks such a function once, by
//! itself, and not at every call (`do_check_subprogs` in `kernel/bpf/verifier.c`, Linux 5.6), which would be four times
//! as much work for it. They take numbers, and pointers that may be null to the verifier.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_ktime_get_coarse_ns};
use dataplane_common::{
    Port, Reason,
    cells::{
        self, CellKey as _, Choice, Entry, Head, Holder, Line, Memory, NOWHERE, PORTS_LOOKED_AT,
        Slot, Snapshot, State,
    },
    packet::{FlowKey, PortKey, Tick, Translation, need},
    states,
    tcp::{self, POSITIONS, Positions, Segment},
};

use crate::{
    atomic,
    select::count,
    tables::{ANSWERS, CONNTRACK, PACKET_CONFIG, SEQUENCES},
};

/// A flow's cell, and its index.
#[derive(Clone, Copy)]
pub struct Place {
    words: Words,
    pub index: u32,
}

/// Words that other CPUs and the agent may change at any time.
#[derive(Clone, Copy)]
pub struct Words(*mut u64);

impl Line for Words {
    #[inline(always)]
    fn load(self, word: usize) -> u64 {
        // SAFETY: an aligned word of the array's element, which stays.
        unsafe { read_volatile(self.0.add(word)) }
    }

    #[inline(always)]
    fn load_after(self, word: usize, seen: u64) -> u64 {
        // SAFETY: as above; the number is 0.
        unsafe { read_volatile(self.0.byte_add(atomic::nothing_of(seen)).add(word)) }
    }

    #[inline(always)]
    fn both(one: u64, other: u64) -> u64 {
        atomic::both(one, other)
    }

    #[inline(always)]
    fn store(self, word: usize, value: u64) {
        // SAFETY: as above.
        unsafe { write_volatile(self.0.add(word), value) };
    }

    #[inline(always)]
    fn exchange(self, word: usize, before: u64, new: u64) -> bool {
        // SAFETY: as above.
        unsafe { atomic::compare_exchange(self.0.add(word), before, new) == before }
    }

    #[inline(always)]
    fn add(self, word: usize, amount: u64) -> u64 {
        // SAFETY: as above.
        unsafe { atomic::fetch_add(self.0.add(word), amount) }
    }
}

impl Line for Place {
    #[inline(always)]
    fn load(self, word: usize) -> u64 {
        self.words.load(word)
    }

    #[inline(always)]
    fn load_after(self, word: usize, seen: u64) -> u64 {
        self.words.load_after(word, seen)
    }

    #[inline(always)]
    fn both(one: u64, other: u64) -> u64 {
        Words::both(one, other)
    }

    #[inline(always)]
    fn store(self, word: usize, value: u64) {
        self.words.store(word, value);
    }

    #[inline(always)]
    fn exchange(self, word: usize, before: u64, new: u64) -> bool {
        self.words.exchange(word, before, new)
    }

    #[inline(always)]
    fn add(self, word: usize, amount: u64) -> u64 {
        self.words.add(word, amount)
    }
}

/// A slot.
#[derive(Clone, Copy)]
struct Word(*mut u32);

impl Entry for Word {
    #[inline(always)]
    fn load(self) -> Slot {
        // SAFETY: an aligned word of the array's element, which stays.
        Slot(unsafe { read_volatile(self.0) })
    }

    #[inline(always)]
    fn exchange(self, before: Slot, new: Slot) -> bool {
        // SAFETY: as above.
        unsafe { atomic::compare_exchange32(self.0, before.0, new.0) == before.0 }
    }

    #[inline(always)]
    fn add(self, amount: u32) {
        // SAFETY: as above.
        unsafe { atomic::add32(self.0, amount) };
    }
}

/// Cells and slots.
struct Maps {
    mask: u32,
}

impl Maps {
    #[inline(always)]
    fn get() -> Self {
        let mask = match PACKET_CONFIG.get(0) {
            Some(config) => config.cells,
            None => 0,
        };
        Self { mask }
    }
}

/// Returns [`PacketConfig::secret`](dataplane_common::packet::PacketConfig::secret). (Read at each use: a copy would
/// take stack that some chains of calls do not have.)
#[inline(always)]
pub fn secret() -> u64 {
    match PACKET_CONFIG.get(0) {
        Some(config) => config.secret,
        None => 0,
    }
}

/// Returns the timeout of a flow in a state, in seconds.
#[inline(always)]
pub fn keep(state: states::State) -> u32 {
    match PACKET_CONFIG.get(0) {
        Some(config) => config.timeouts.of(state),
        None => 0,
    }
}

impl Memory for Maps {
    type Line = Place;
    type Entry = Word;
    type Sequences = Words;

    #[inline(always)]
    fn mask(&self) -> u32 {
        self.mask
    }

    #[inline(always)]
    fn secret(&self) -> u64 {
        secret()
    }

    #[inline(always)]
    fn cell(&self, index: u32) -> Option<Place> {
        let words = Words(CONNTRACK.get_ptr_mut(index)?.cast());
        Some(Place { words, index })
    }

    #[inline(always)]
    fn sequences(&self, index: u32) -> Option<Words> {
        sequences(index)
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<Word> {
        let slots: *mut u32 = ANSWERS.get_ptr_mut(index / 16)?.cast();
        // SAFETY: within the element.
        Some(Word(unsafe { slots.add(index as usize % 16) }))
    }

    #[inline(always)]
    fn holder(&self, now: Tick) -> Holder {
        // SAFETY: the helper has no preconditions.
        let cpu = unsafe { bpf_get_smp_processor_id() };
        Holder::new(cpu as u16, now)
    }

    #[inline(always)]
    fn remove(&self, index: u32, head: Head, now: Tick) -> bool {
        remove_at(index, head, now)
    }

    #[inline(always)]
    fn find_elsewhere(&self, key: &FlowKey) -> u32 {
        conntrack_find_elsewhere(key)
    }

    #[inline(always)]
    fn find_led_elsewhere(&self, reply: &FlowKey) -> u32 {
        conntrack_find_led_elsewhere(reply)
    }

    #[inline(always)]
    fn try_hold_or_find(&self, key: &FlowKey, now: Tick) -> u32 {
        conntrack_try_hold_or_find(key, u32::from(now.number()))
    }

    #[inline(always)]
    fn make_room(&self, key: &FlowKey, now: Tick) -> u32 {
        conntrack_make_room(key, u32::from(now.number()))
    }

    #[inline(always)]
    fn look(&self, choice: &mut Choice, index: u32, second: bool, now: Tick) {
        conntrack_look(choice, index, u32::from(second), u32::from(now.number()));
    }

    #[inline(always)]
    fn keep(&self, state: states::State) -> u32 {
        keep(state)
    }

    #[inline(always)]
    fn pushed_out(&self) {
        count(Reason::FlowPushedOut);
    }
}

/// [`cells::remove`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_remove(index: u32, head: u64, now: u32) -> u32 {
    let now = Tick::from_number(now as u16);
    u32::from(cells::remove(&Maps::get(), index, Head(head), now))
}

#[inline(always)]
fn remove_at(index: u32, head: Head, now: Tick) -> bool {
    conntrack_remove(index, head.0, u32::from(now.number())) != 0
}

/// [`cells::mark`]. `flags`: the flags that the packet adds to `seen`, and in the next eight bits those that it clears.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_mark(index: u32, head: u64, before: u64, flags: u32, now: u32) -> u32 {
    let Some(line) = Maps::get().cell(index) else {
        return 0;
    };
    u32::from(cells::mark(
        line,
        Head(head),
        State(before),
        flags as u8,
        (flags >> 8) as u8,
        Tick::from_number(now as u16),
    ))
}

/// Marks the flow that was found in a cell with the flags of a packet.
#[inline(always)]
pub fn mark(place: Place, found: &Snapshot, flags: u8, forgotten: u8, now: Tick) {
    let all = u32::from(flags) | u32::from(forgotten) << 8;
    let (head, before) = (found.head().0, found.state().0);
    conntrack_mark(place.index, head, before, all, u32::from(now.number()));
}

/// [`cells::find_elsewhere`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_find_elsewhere(key: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    match unsafe { key.as_ref() } {
        Some(key) => cells::find_elsewhere(&Maps::get(), key),
        None => NOWHERE,
    }
}

/// [`cells::find_led_elsewhere`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_find_led_elsewhere(reply: *const FlowKey) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    match unsafe { reply.as_ref() } {
        Some(reply) => cells::find_led_elsewhere(&Maps::get(), reply),
        None => NOWHERE,
    }
}

#[inline(always)]
fn place(found: Option<(u32, Snapshot)>) -> Option<(Place, Snapshot)> {
    let (index, snapshot) = found?;
    Some((Maps::get().cell(index)?, snapshot))
}

/// Returns the cell of the key's flow, and its contents.
#[inline(always)]
pub fn find(key: &FlowKey) -> Option<(Place, Snapshot)> {
    place(cells::find(&Maps::get(), key))
}

/// Returns the cell of the flow of a reply to a client, if the flow is not masqueraded, and its contents.
#[inline(always)]
pub fn find_by_client(reply: &FlowKey) -> Option<(Place, Snapshot)> {
    place(cells::find_by_client(&Maps::get(), reply))
}

/// Returns the cell of the flow of a reply to one of the node's ports, at any of its addresses, and its contents.
#[inline(always)]
pub fn find_by_node(reply: &PortKey) -> Option<(Place, Snapshot)> {
    place(cells::find_by_node(&Maps::get(), reply))
}

/// [`cells::try_hold_or_find`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_try_hold_or_find(key: *const FlowKey, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    match unsafe { key.as_ref() } {
        Some(key) => cells::try_hold_or_find(&Maps::get(), key, Tick::from_number(now as u16)),
        None => NOWHERE,
    }
}

/// [`cells::make_room`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_make_room(key: *const FlowKey, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    match unsafe { key.as_ref() } {
        Some(key) => cells::make_room(&Maps::get(), key, Tick::from_number(now as u16)),
        None => NOWHERE,
    }
}

/// [`cells::look`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_look(choice: *mut Choice, index: u32, second: u32, now: u32) -> u32 {
    // SAFETY: a choice, or null: the verifier sees to it where it is called.
    if let Some(choice) = unsafe { choice.as_mut() } {
        let now = Tick::from_number(now as u16);
        cells::look(&Maps::get(), choice, index, second != 0, now);
    }
    0
}

/// [`cells::hold_or_find`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_hold_or_find(key: *const FlowKey, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    match unsafe { key.as_ref() } {
        Some(key) => cells::hold_or_find(&Maps::get(), key, Tick::from_number(now as u16)),
        None => NOWHERE,
    }
}

/// Takes a cell for a new flow, or finds the one in which another CPU makes it: [`cells::hold_or_find`].
#[inline(always)]
pub fn hold_or_find(key: &FlowKey, now: Tick) -> u32 {
    conntrack_hold_or_find(key, u32::from(now.number()))
}

/// [`cells::lead`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_lead(place: u32, index: u32, only_home: u32, now: u32) -> u32 {
    let now = Tick::from_number(now as u16);
    u32::from(cells::lead(&Maps::get(), place, index, only_home != 0, now))
}

/// Makes a slot lead to a held cell: the home slot of a masqueraded flow's replies, or any if it is not masqueraded;
/// `false` if none is free.
#[inline(always)]
pub fn lead(place: u32, index: u32, only_home: bool, now: Tick) -> bool {
    conntrack_lead(place, index, u32::from(only_home), u32::from(now.number())) != 0
}

/// How many ports are looked at in one go: the slots of every second port are side by side, sixteen in a line.
const NEAR: u32 = 16;

/// Whether a flow to the key's endpoint may have a port: it is not avoided ([`PacketConfig::avoids`]), and no other
/// flow has its slot. A function of its own, because Linux 6.1's verifier would walk each of its paths again for each
/// port.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_is_port_free(from: *const PortKey, port: u32, need: u32, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let (Some(from), Some(config)) = (unsafe { from.as_ref() }, PACKET_CONFIG.get(0)) else {
        return 0;
    };
    let port = port as u16;
    if config.avoids(port, from.protocol, need) {
        return 0;
    }
    let key = PortKey {
        node_port: Port::new(port),
        ..*from
    };
    let now = Tick::from_number(now as u16);
    let place = key.place(secret());
    u32::from(!cells::is_home_taken(&Maps::get(), place, now))
}

/// The first port that a flow to the key's endpoint may have, of those from the key's on, every second one; 0 if there
/// is none.
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_free_port(from: *const PortKey, need: u32, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let (Some(from), Some(config)) = (unsafe { from.as_ref() }, PACKET_CONFIG.get(0)) else {
        return 0;
    };
    let mut port = u32::from(from.node_port.host());
    if config.avoids(port as u16, from.protocol, need) {
        // The search then takes every second one of the other ports.
        port ^= 1;
    }
    for _ in 0..NEAR {
        if port > 0xffff {
            break;
        }
        if conntrack_is_port_free(from, port, need, now) != 0 {
            return port;
        }
        port += 2;
    }
    0
}

/// Whether a flow to the key's endpoint may have the key's port, by the slots.
#[inline(always)]
pub fn is_port_free(key: &PortKey, now: Tick) -> bool {
    let port = u32::from(key.node_port.host());
    conntrack_is_port_free(key, port, need::LITTLE, u32::from(now.number())) != 0
}

/// A port near the key's that no other flow to the endpoint has, or [`Port::ANY`].
#[inline(always)]
pub fn free_port(from: &PortKey, need: u32, now: Tick) -> Port {
    Port::new(conntrack_free_port(from, need, u32::from(now.number())) as u16)
}

/// [`cells::look_at_port`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_look_at_port(
    choice: *mut Choice,
    from: *const PortKey,
    port: u32,
    second: u32,
    now: u32,
) -> u32 {
    // SAFETY: a choice and a key, or null: the verifier sees to it where it is called.
    if let (Some(choice), Some(from)) = (unsafe { choice.as_mut() }, unsafe { from.as_ref() }) {
        let key = PortKey {
            node_port: Port::new(port as u16),
            ..*from
        };
        let now = Tick::from_number(now as u16);
        cells::look_at_port(&Maps::get(), choice, &key, second != 0, now);
    }
    0
}

/// [`evict_port`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_evict_port(from: *const PortKey, random: u32, now: u32) -> u32 {
    let mut choice = Choice::default();
    for nth in 0..2 * PORTS_LOOKED_AT {
        let second = nth >= PORTS_LOOKED_AT;
        let nth = if second { nth - PORTS_LOOKED_AT } else { nth };
        let port = u32::from(cells::port_looked_at(random, nth));
        conntrack_look_at_port(&raw mut choice, from, port, u32::from(second), now);
    }
    let now = Tick::from_number(now as u16);
    u32::from(cells::evict_port(&Maps::get(), &choice, now).host())
}

/// Evicts a flow to the key's endpoint, if one may be evicted: returns its port, or [`Port::ANY`].
#[inline(always)]
pub fn evict_port(from: &PortKey, random: u32, now: Tick) -> Port {
    Port::new(conntrack_evict_port(from, random, u32::from(now.number())) as u16)
}

/// The positions of the flow in a cell.
#[inline(always)]
pub fn sequences(index: u32) -> Option<Words> {
    SEQUENCES
        .get_ptr_mut(index)
        .map(|words| Words(words.cast()))
}

/// [`tcp::judge`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_judge(index: u32, replies: u32, segment: *const Segment) -> u32 {
    // SAFETY: a segment, or null: the verifier sees to it where it is called.
    match (sequences(index), unsafe { segment.as_ref() }) {
        (Some(sequences), Some(segment)) => u32::from(tcp::judge(sequences, replies != 0, segment)),
        _ => 0,
    }
}

/// Judges a segment of the flow in a cell: [`tcp::judge`].
#[inline(always)]
pub fn judge(index: u32, replies: bool, segment: &Segment) -> u8 {
    conntrack_judge(index, u32::from(replies), segment) as u8
}

/// [`tcp::ask`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_ask(key: *const FlowKey, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    let Some((index, _)) = unsafe { key.as_ref() }.and_then(|key| cells::find(&Maps::get(), key))
    else {
        return 0;
    };
    match sequences(index) {
        Some(sequences) => u32::from(tcp::ask(sequences, Tick::from_number(now as u16))),
        None => 0,
    }
}

/// Whether a flow's endpoint has owed an answer for so long that it counts as gone; otherwise asks it: [`tcp::ask`].
#[inline(always)]
pub fn ask(key: &FlowKey, now: Tick) -> bool {
    conntrack_ask(key, u32::from(now.number())) != 0
}

/// [`assures`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_assures(index: u32, segment: *const Segment, is_tcp: u32) -> u32 {
    // SAFETY: a segment, or null: the verifier sees to it where it is called.
    match (sequences(index), unsafe { segment.as_ref() }) {
        (Some(sequences), Some(segment)) if is_tcp != 0 => {
            u32::from(Positions(sequences.load(POSITIONS)).are_acknowledged_by(segment))
        }
        (Some(sequences), _) => u32::from(tcp::is_stream(sequences, coarse_ns())),
        _ => 0,
    }
}

/// Whether a packet confirms the flow in a cell, which was answered, for both ends: a client's segment acknowledges the
/// endpoint's answer; a datagram comes late enough ([`tcp::is_stream`]).
#[inline(always)]
pub fn assures(index: u32, segment: &Segment, is_tcp: bool) -> bool {
    conntrack_assures(index, segment, u32::from(is_tcp)) != 0
}

/// CLOCK_MONOTONIC in nanoseconds, with the precision of a jiffy.
#[inline(always)]
pub fn coarse_ns() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Makes the positions of the flow in a cell begin with a SYN.
#[inline(always)]
pub fn write_sequences(index: u32, syn: &Segment) {
    cells::write_sequences(&Maps::get(), index, &tcp::begin(syn, 0));
}

/// Writes its flow to a held cell, after the flow's first packet.
#[inline(always)]
pub fn publish(index: u32, key: &FlowKey, value: &Translation, first: &Segment, now: Tick) {
    let maps = Maps::get();
    if let Some(line) = maps.cell(index) {
        cells::write(line, key, value);
        cells::write_sequences(&maps, index, &tcp::begin(first, coarse_ns()));
        cells::publish(line, key, maps.holder(now));
    }
}

/// Gives back a held cell that no slot leads to.
#[inline(always)]
pub fn give_back(index: u32, key: &FlowKey, now: Tick) {
    conntrack_give_back(index, key, u32::from(now.number()));
}

/// [`cells::give_back`].
// SAFETY: no other function of the programs has this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn conntrack_give_back(index: u32, key: *const FlowKey, now: u32) -> u32 {
    // SAFETY: a key, or null: the verifier sees to it where it is called.
    if let Some(key) = unsafe { key.as_ref() } {
        cells::give_back(&Maps::get(), index, key, Tick::from_number(now as u16));
    }
    0
}

/// Removes the key's flow, if there is one.
#[inline(never)]
pub fn remove(key: &FlowKey, now: Tick) {
    if let Some((place, found)) = find(key) {
        remove_at(place.index, found.head(), now);
    }
}

/// Removes the flow that was found in a cell.
#[inline(always)]
pub fn remove_found(place: Place, found: &Snapshot, now: Tick) {
    remove_at(place.index, found.head(), now);
}
