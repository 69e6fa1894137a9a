//! Holding a cell: a program takes it, writes and publishes a flow, and gives the cell back.

use super::{
    BUSY, CellKey as _, Entry as _, HEAD, Head, Holder, Line, Memory, NOWHERE, OTHERS, TRIES,
    candidate, gives_way, has,
};
use crate::packet::{FlowKey, Tick};

/// Takes a cell for the key, which has no flow, and holds it. [`BUSY`] if another CPU has just made the same flow, or
/// holds a cell that the flow might have. [`NOWHERE`] if there is no room at all.
///
/// If no cell is free, a flow is evicted: one that is over, or one that `room.rs` chooses ("Room" in [`cells`](super)).
#[inline(always)]
pub fn hold<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    let place = key.place(memory.secret());
    let mask = memory.mask();
    let mut goes = NOWHERE;
    let mut nth = 0;
    while nth <= OTHERS {
        let index = candidate(place, nth) & mask;
        let Some(line) = memory.cell(index) else {
            return NOWHERE;
        };
        let head = Head(line.load(HEAD));
        if head.is_held() || has(line, head, key) {
            return BUSY;
        }
        if head.is_free() {
            return take(memory, key, index, head, now);
        }
        if gives_way(memory, line, head, now) {
            if !memory.remove(index, head, now) {
                return BUSY;
            }
            goes = index;
            break;
        }
        nth += 1;
    }
    if goes == NOWHERE {
        goes = memory.make_room(key, now);
        if goes == BUSY {
            return BUSY;
        }
    }
    let Some(line) = memory.cell(goes) else {
        return NOWHERE;
    };
    take(memory, key, goes, Head(line.load(HEAD)), now)
}

/// How often a program tries to hold a cell while another CPU holds it: some microseconds. To make a flow takes one.
const PATIENCE: u32 = 256;

/// Takes a cell for a flow that was not found, and holds it. If another CPU makes the same flow meanwhile, returns that
/// flow's cell and [`MADE`](super::MADE). [`BUSY`] if the other CPU takes too long; [`NOWHERE`] if there is no room.
#[inline(always)]
pub fn hold_or_find<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    let mut tries = 0;
    while tries < PATIENCE {
        let index = memory.try_hold_or_find(key, now);
        if index != BUSY {
            return index;
        }
        tries += 1;
    }
    BUSY
}

/// Takes a free cell, and counts it at the key's home if it is another cell.
#[inline(always)]
fn take<M: Memory>(memory: &M, key: &FlowKey, index: u32, head: Head, now: Tick) -> u32 {
    let place = key.place(memory.secret());
    let Some(line) = memory.cell(index) else {
        return NOWHERE;
    };
    let holder = memory.holder(now);
    if !head.is_free() || !line.exchange(HEAD, head.0, head.held(holder).0) {
        return BUSY;
    }
    let home = place & memory.mask();
    let Some(line) = memory.cell(home) else {
        return NOWHERE;
    };
    // The count grows before the flow is written. A reader that sees the count without the flow makes one needless
    // search, but a reader that saw the flow without the count would not search.
    let before = if index == home {
        head
    } else if Head(line.load(HEAD)).counts() {
        Head(line.add(HEAD, Head::ONE_MORE))
    } else {
        Head(line.load(HEAD))
    };
    // Two CPUs may make the same flow in different cells, if a cell that one of them has passed becomes free. At least
    // one sees the other here, and gives up. Both count at the home, or one of them has the home: the second sees this,
    // because the exchange returns the word as it was.
    let second = before.has_more() && is_wanted(memory, place, index, key);
    let has_home = index != home && (before.is_held() || has(line, before, key));
    if second || has_home {
        give_back(memory, index, key, now);
        return BUSY;
    }
    index
}

/// Whether another of the key's cells has its flow, or is held and may get it.
#[inline(always)]
fn is_wanted<M: Memory>(memory: &M, place: u32, except: u32, key: &FlowKey) -> bool {
    let mut nth = 0;
    while nth <= OTHERS {
        let index = candidate(place, nth) & memory.mask();
        if index != except
            && let Some(line) = memory.cell(index)
        {
            let head = Head(line.load(HEAD));
            if head.is_held() || has(line, head, key) {
                return true;
            }
        }
        nth += 1;
    }
    false
}

/// Publishes the flow of a held cell; `false` if the holder no longer has the cell.
#[inline(always)]
pub fn publish<L: Line>(line: L, key: &FlowKey, holder: Holder) -> bool {
    release(line, holder, key.word(HEAD))
}

/// How often the holder tries to exchange a head: other CPUs may count flows elsewhere in it meanwhile.
const PERSISTENCE: u32 = 16;

/// Gives a cell back, with a flow's ports and protocol or free; `false` if the holder no longer has it.
#[inline(always)]
pub(super) fn release<L: Line>(line: L, holder: Holder, ports_and_protocol: u64) -> bool {
    let mut tries = 0;
    while tries < PERSISTENCE {
        let head = Head(line.load(HEAD));
        if head.holder() != Some(holder) {
            return false;
        }
        if line.exchange(HEAD, head.0, head.given_back(ports_and_protocol).0) {
            return true;
        }
        tries += 1;
    }
    false
}

/// Gives back a held cell that no slot leads to.
#[inline(always)]
pub fn give_back<M: Memory>(memory: &M, index: u32, key: &FlowKey, now: Tick) {
    if let Some(line) = memory.cell(index) {
        let home = key.place(memory.secret()) & memory.mask();
        if index != home
            && let Some(home) = memory.cell(home)
        {
            one_less(home);
        }
        release(line, memory.holder(now), 0);
    }
}

/// Counts one flow less elsewhere, in the head of its home.
#[inline(always)]
fn one_less<L: Line>(home: L) {
    let mut tries = 0;
    while tries < TRIES {
        let head = Head(home.load(HEAD));
        // If the count stays one too high, lookups of missing flows read more cells.
        if !head.has_more()
            || !head.counts()
            || home.exchange(HEAD, head.0, head.0.wrapping_sub(Head::ONE_MORE))
        {
            return;
        }
        tries += 1;
    }
}

/// Takes a cell from its flow, whose head was read, and holds it. `false` if another CPU has changed the cell.
///
/// The holder may [`forget`](super::forget) the flow, or [`publish`] it again.
#[inline(always)]
pub fn hold_flow<L: Line>(line: L, head: Head, holder: Holder) -> bool {
    head.key().is_some() && line.exchange(HEAD, head.0, head.held(holder).0)
}

/// Frees a cell whose holder is dead ([`Holder::is_dead`]), and the slot that leads to it; `false` if the cell has no
/// dead holder, or another CPU has taken it.
///
/// The key of the unfinished flow is unknown. If the flow was counted, the count stays, and lookups of missing flows
/// read more cells.
pub fn free_held<M: Memory>(memory: &M, index: u32, now: Tick) -> bool {
    let Some(line) = memory.cell(index) else {
        return false;
    };
    let head = Head(line.load(HEAD));
    let holder = memory.holder(now);
    if !head.holder().is_some_and(|holder| holder.is_dead(now))
        || !line.exchange(HEAD, head.0, head.held(holder).0)
    {
        return false;
    }
    for place in 0..=memory.slots() {
        if let Some(entry) = memory.slot(place)
            && entry.load().leads_to(index)
        {
            entry.add((index + 1).wrapping_neg());
        }
    }
    release(line, holder, 0)
}
