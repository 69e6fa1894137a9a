//! Cells: where a flow is found by one look, from either end.
//!
//! `CONNTRACK` is an array of cells of 64 bytes, one line of a cache. A cell has a flow's key and the translation of
//! its packets, for both directions. Requests carry the key. A key has one cell that is its home ([`CellKey::place`])
//! and sixteen others: the one beside the home, and then any. If another flow has the home, the flow is in the first
//! free one of the others. The home records whether flows of its keys are elsewhere. Nearly always none is, and then the
//! lookup of a missing flow reads one line.
//!
//! Replies carry other addresses: `ANSWERS` has for each cell two slots of 32 bits. The addresses and ports of a reply
//! lead to a home slot, which says which cell has the flow. Sixteen slots are in one line, and one of the slots that a
//! flow may have is nearly always free even if no cell is.
//!
//! Consecutive ports have consecutive cells and slots: a client counts its ports up, so the next flow's cell and slot
//! are near those of the last flow. Access to memory that was not used lately is slow
//! (`docs/measurements/flow-cells.md`).
//!
//! # Room
//!
//! There are twice as many cells as flows were asked for, so that with half of them taken one flow in 130 000 finds all
//! its seventeen taken. A new flow replaces a flow that is over if it needs the cell or the slot
//! ([`State::gives_way`]). If none of the flows is over, one of the seventeen is evicted and counted
//! ([`Memory::pushed_out`]), or the new flow is refused: `room.rs` decides.
//!
//! # Who may do what
//!
//! The word behind the addresses, the [`Head`], says whether a cell is free. A program that makes a flow takes a free
//! cell by compare-and-exchange, writes the rest, makes a slot lead to the cell, and then writes the head again, now
//! with ports and protocol. A program that removes a flow takes the cell from the flow likewise: the cell then has no
//! flow, and the program gives back the slot and the counts before it frees the cell. A cell is held for a microsecond:
//! a program that needs a port of the node's for the flow searches for the port before. A program that finds a held
//! cell where its flow might be gets
//! [`BUSY`]: the holder may be making the same flow, and the program has to use the holder's entry.
//!
//! A held head says who holds it, and since when ([`Holder`]). The holder gives it back by an exchange, which fails if
//! the cell has another holder by then: after some seconds the agent takes a cell from its holder, which must be dead
//! ([`free_held`]).
//!
//! # Reading while others write
//!
//! A cell may be reused for another flow while it is read. So a reader takes a [`Snapshot`]: it reads the head, then
//! the other words, then the head again. The head's number differs if a flow was made in between. On processors that
//! reorder loads (arm64, riscv64) each step must be ordered after the one before it, and so must the writer's stores:
//!
//! | actor | steps | ordered by |
//! |---|---|---|
//! | writer | holds the cell, then writes its words | the exchange that holds it, a full barrier |
//! | writer | writes the words, then the head | the exchange that publishes it, a full barrier |
//! | reader | reads the head, then the words | [`Line::load_after`] |
//! | reader | reads the words, then the head again | [`Line::load_after`] |
//! | writer that needs room | reads the head, then checks if that flow may be evicted | [`Line::load_after`] |
//!
//! Later writes to the cell are compare-and-exchange operations with the value that was read: of the head, to remove the
//! flow; of the state, to mark the flow as used ([`mark`]). So a write fails if another flow has taken the cell.
//!
//! In user space loads acquire, so later operations stay behind them. BPF has no acquiring load, and its full barriers
//! are read-modify-writes, which would take the line from the other CPUs for each packet. So in BPF the address of the
//! second load depends on the value of the first: every processor keeps such loads in order, at the cost of an
//! addition. `cells/model.rs` has loom try all orders that the memory model admits, with both methods.
//!
//! (The number has 16 bits: a reader misses a change only if 65 536 flows are made in one cell while it reads eight
//! words.)
//!
//! The programs, the agent and the tests, on threads, run this code. They differ in their [`Memory`].

#![expect(
    clippy::cast_possible_truncation,
    reason = "words are taken apart: what is cut off is another field"
)]

mod choice;
mod holders;
mod keys;
mod memory;
mod read;
mod room;
mod slots;
mod words;

#[cfg(any(test, feature = "user"))]
mod atomics;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

#[cfg(any(test, feature = "user"))]
pub use atomics::AtomicSlot;
pub use choice::Choice;
pub use holders::{free_held, give_back, hold, hold_flow, hold_or_find, publish};
pub use keys::CellKey;
pub use memory::{Entry, Line, Memory};
pub use read::{Snapshot, key, read, value};
#[cfg(any(test, feature = "user"))]
pub use room::{has_room, may_evict};
#[cfg(any(test, feature = "user"))]
pub use slots::has_slot;
pub use slots::{find_by_client, find_by_node, is_home_taken, lead, place_of_replies};
pub use words::{Cell, HEAD, Head, Holder, STATE, Slot, Slots, State, cells_for};

use crate::{
    Port,
    packet::{FlowKey, PortKey, Tick, Translation},
    seen, states,
    tcp::{self, Sequences},
};
use slots::{led_to, mislead};
use words::{VALUE, words};

/// How many other cells a flow whose home is taken may have, and how many other slots.
pub const OTHERS: u32 = 16;

/// The nth cell or slot that a flow may have: its home, the one beside it, which is read with it, and others anywhere.
#[inline(always)]
pub const fn candidate(place: u32, nth: u32) -> u32 {
    if nth < 2 {
        return place ^ nth;
    }
    // Any odd numbers.
    let mixed = (place ^ nth.wrapping_mul(0x9e37_79b9)) as u64;
    (mixed.wrapping_mul(0x6a09_e667_f3bc_c909) >> 29) as u32
}

/// Marks the flow that was found in a cell with the bits and the time of a packet ([`State::with_packet`]). `before` is
/// the state that was found, and `head` is the head that was found.
///
/// Writes nothing and returns `false` if the cell has become another flow's. The exception is a flow whose state is the
/// same bit by bit: it was made in the same tick, to the same ports, and neither flow had any further packet.
#[inline(always)]
pub fn mark<L: Line>(
    line: L,
    head: Head,
    before: State,
    flags: u8,
    forgotten: u8,
    now: Tick,
) -> bool {
    let mut before = before;
    let mut tries = 0;
    while tries < TRIES {
        let after = before.with_packet(flags, forgotten, now);
        if after.0 == before.0 || line.exchange(STATE, before.0, after.0) {
            return true;
        }
        // The state was changed by another packet of this flow, or belongs to another flow.
        before = State(line.load(STATE));
        if !Head(line.load_after(HEAD, before.0)).is_same(head) {
            return false;
        }
        tries += 1;
    }
    false
}

/// Whether the cell, whose head was read, has the key's flow.
#[inline(always)]
pub fn has<L: Line>(line: L, head: Head, key: &FlowKey) -> bool {
    let mut differ = 0;
    let mut index = 0;
    while index < HEAD {
        differ |= line.load(index) ^ key.word(index);
        index += 1;
    }
    head.has(key.word(HEAD)) && differ == 0
}

/// No cell.
pub const NOWHERE: u32 = u32::MAX;
/// No cell yet: another CPU has just made the flow, or holds a cell that the flow might have.
pub const BUSY: u32 = NOWHERE - 1;
/// Added to a cell's index: another CPU has made the flow there.
pub const MADE: u32 = 1 << 30;

/// Returns the cell of the key's flow, and its contents.
#[inline(always)]
pub fn find<M: Memory>(memory: &M, key: &FlowKey) -> Option<(u32, Snapshot)> {
    let home = key.place(memory.secret()) & memory.mask();
    let line = memory.cell(home)?;
    if let Some(found) = read(line)
        && found.is_of(key)
    {
        return Some((home, found));
    }
    if !Head(line.load(HEAD)).has_more() {
        return None;
    }
    let index = memory.find_elsewhere(key);
    let found = read(memory.cell(index)?)?;
    found.is_of(key).then_some((index, found))
}

/// Returns the cell that has the key's flow, other than its home; [`NOWHERE`] if there is none.
#[inline(always)]
pub fn find_elsewhere<M: Memory>(memory: &M, key: &FlowKey) -> u32 {
    let place = key.place(memory.secret());
    let mut nth = 1;
    while nth <= OTHERS {
        let index = candidate(place, nth) & memory.mask();
        if let Some(line) = memory.cell(index)
            && has(line, Head(line.load(HEAD)), key)
        {
            return index;
        }
        nth += 1;
    }
    NOWHERE
}

/// Evicts a flow for a key whose cells all have live flows (`room.rs`): returns the cell, which is free then.
/// [`NOWHERE`] if no flow may be evicted, [`BUSY`] if a cell has changed meanwhile.
#[inline(always)]
pub fn make_room<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    room::make_room(memory, key, now)
}

/// Looks at a port of the node's, in the first round of `room.rs` or in the second.
#[inline(always)]
pub fn look_at_port<M: Memory>(
    memory: &M,
    choice: &mut Choice,
    key: &PortKey,
    second: bool,
    now: Tick,
) {
    room::look_at_port(memory, choice, key, second, now);
}

/// Evicts a flow among those whose ports were looked at: returns the port, which is free then, or [`Port::ANY`].
#[inline(always)]
pub fn evict_port<M: Memory>(memory: &M, choice: &Choice, now: Tick) -> Port {
    let index = room::evict(memory, choice, now);
    match memory.cell(index & memory.mask()) {
        // If another flow has the cell by now, that flow has the port, too, and the port will turn out to be taken.
        Some(line) if index < BUSY => Port::from_be((line.load(STATE) >> 16) as u16),
        _ => Port::ANY,
    }
}

/// How many ports are looked at.
pub const PORTS_LOOKED_AT: u32 = OTHERS + 1;

/// Returns the nth of the ports that are looked at, in host byte order, after a random number. The ports are far apart.
#[inline(always)]
pub const fn port_looked_at(random: u32, nth: u32) -> u16 {
    /// An odd number without any other requirement.
    const APART: u32 = 23_669;
    random.wrapping_add(nth.wrapping_mul(APART)) as u16
}

/// Looks at one of a key's cells, in the first round of `room.rs` or in the second.
#[inline(always)]
pub fn look<M: Memory>(memory: &M, choice: &mut Choice, index: u32, second: bool, now: Tick) {
    room::look(memory, choice, index, second, now);
}

/// One try of [`hold_or_find`].
#[inline(always)]
pub fn try_hold_or_find<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    let index = hold(memory, key, now);
    if index != BUSY {
        return index;
    }
    find(memory, key).map_or(BUSY, |(index, _)| index | MADE)
}

/// Writes the key and the translation to a held cell.
#[inline(always)]
pub fn write<L: Line>(line: L, key: &FlowKey, value: &Translation) {
    let mut index = 0;
    while index < HEAD {
        line.store(index, key.word(index));
        index += 1;
    }
    let words = words(value);
    line.store(VALUE, words[0]);
    line.store(VALUE + 1, words[1]);
    line.store(STATE, words[2]);
}

/// Writes the positions of a held cell's flow ([`tcp::begin`]; zeros if nothing is known).
#[inline(always)]
pub fn write_sequences<M: Memory>(memory: &M, index: u32, sequences: &Sequences) {
    if let Some(line) = memory.sequences(index) {
        line.store(tcp::POSITIONS, sequences[tcp::POSITIONS]);
        line.store(tcp::OPENING, sequences[tcp::OPENING]);
    }
}

/// How often an exchange is tried: it fails only if another CPU changed the word meanwhile.
const TRIES: u32 = 3;

/// Returns whether the flow of a cell is over, so that a new one may replace it. The head was read before. The state is
/// read after it, because otherwise it could be an earlier flow's.
#[inline(always)]
fn gives_way<M: Memory>(memory: &M, line: M::Line, head: Head, now: Tick) -> bool {
    let state = State(line.load_after(STATE, head.0));
    let keep = memory.keep(states::State::of(head.protocol(), state.seen()));
    state.gives_way(keep, now)
}

/// Removes the flow of a cell whose head was read; `false` if another CPU has changed the cell.
#[inline(always)]
pub fn remove<M: Memory>(memory: &M, index: u32, head: Head, now: Tick) -> bool {
    let Some(line) = memory.cell(index) else {
        return false;
    };
    let Some(ports_and_protocol) = head.key() else {
        return false;
    };
    if !hold_flow(line, head, memory.holder(now)) {
        return false;
    }
    forget(memory, index, ports_and_protocol, now);
    true
}

/// Gives back a held cell that has a flow, and its slot.
#[inline(always)]
pub fn forget<M: Memory>(memory: &M, index: u32, ports_and_protocol: u64, now: Tick) {
    let Some(line) = memory.cell(index) else {
        return;
    };
    let (key, value) = (key(line, ports_and_protocol), value(line));
    if value.seen & seen::FOREIGN == 0 || value.node_addr != 0 {
        mislead(
            memory,
            place_of_replies(&key, &value, memory.secret()),
            index,
        );
    }
    give_back(memory, index, &key, now);
}

/// Returns the cell that has the flow of a reply to a client, if the home slot does not lead there; or [`NOWHERE`].
#[inline(always)]
pub fn find_led_elsewhere<M: Memory>(memory: &M, reply: &FlowKey) -> u32 {
    let place = reply.place(memory.secret());
    let mut nth = 1;
    while nth <= OTHERS {
        if let Some(entry) = memory.slot(candidate(place, nth) & memory.slots())
            && let Some((index, found)) = led_to(memory, entry.load())
            && found.is_answered_by(reply)
        {
            return index;
        }
        nth += 1;
    }
    NOWHERE
}
