//! Chooses the flow to evict for a new flow whose seventeen cells all have live flows. For a new masqueraded flow, if
//! no port of the node's is free to its endpoint, one of seventeen ports, drawn at random, is evicted instead.
//!
//! In this order, and in each class first the flow that was idle longest:
//!
//! 1. flows that were not answered: a flood of SYNs or datagrams from spoofed addresses makes these;
//! 2. flows that are not [assured](crate::seen::ASSURED): answered once, or over;
//! 3. assured UDP flows, then established TCP connections, of a client that has more than half of the seventeen cells.
//!    The cells are a sample of the table, so such a client has taken about half of it;
//! 4. assured UDP flows of other clients.
//!
//! If no flow may be evicted, the new flow is refused. So packets of others, answered or not, never evict an
//! established connection. A client that fills the table, or has most of an endpoint's ports, pays for new flows with
//! its own flows. A client with more than half of the cells also goes first within classes 1 and 2.
//!
//! netfilter refuses new flows in the same case: it evicts no assured flow (`early_drop_list` in
//! `net/netfilter/nf_conntrack_core.c`). It has no share for each client.

use super::{
    BUSY, CellKey as _, Choice, Entry as _, HEAD, Head, Line, Memory, NOWHERE, OTHERS, STATE,
    State, VALUE, candidate,
};
use crate::packet::{FlowKey, PortKey, Tick};

/// A look at one of a key's cells, in the first round or in the second.
#[inline(always)]
pub fn look<M: Memory>(memory: &M, choice: &mut Choice, index: u32, second: bool, now: Tick) {
    let Some(line) = memory.cell(index) else {
        return;
    };
    let client = [line.load(0), line.load(1)];
    if !second {
        if choice.ahead == 0 {
            choice.most = client;
        }
        if client == choice.most {
            choice.ahead = choice.ahead.wrapping_add(1);
        } else {
            choice.ahead = choice.ahead.wrapping_sub(1);
        }
        return;
    }
    let rank = rank(line, Head(line.load(HEAD)), now);
    if rank > choice.any {
        (choice.any, choice.any_at) = (rank, index);
    }
    if client == choice.most {
        choice.has = choice.has.wrapping_add(1);
        if rank > choice.of_most {
            (choice.of_most, choice.of_most_at) = (rank, index);
        }
    }
}

/// Ranks the flow in a cell for eviction: the flow with the highest rank is evicted first. 0: there is no flow.
#[inline(always)]
fn rank<L: Line>(line: L, head: Head, now: Tick) -> u32 {
    if head.key().is_none() {
        return 0;
    }
    State(line.load_after(STATE, head.0)).rank(head.protocol(), now)
}

/// Evicts a flow from one of the key's cells, which all have live flows: returns the cell, which is free then.
/// [`NOWHERE`] if no flow may be evicted, [`BUSY`] if a cell has changed meanwhile.
#[inline(always)]
pub fn make_room<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    evict(memory, &survey(memory, key, now), now)
}

/// Looks at all of a key's cells, in both rounds.
#[inline(always)]
fn survey<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> Choice {
    let place = key.place(memory.secret());
    let mut choice = Choice::default();
    let mut nth = 0;
    while nth < 2 * (OTHERS + 1) {
        let second = nth > OTHERS;
        let cell = if second { nth - (OTHERS + 1) } else { nth };
        let index = candidate(place, cell) & memory.mask();
        memory.look(&mut choice, index, second, now);
        nth += 1;
    }
    choice
}

/// Whether [`hold`](super::hold) finds a cell for a key that has no flow. Changes nothing.
#[cfg(any(test, feature = "user"))]
pub fn has_room<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> bool {
    let place = key.place(memory.secret());
    let is_available = |nth| {
        let line = memory.cell(candidate(place, nth) & memory.mask());
        line.is_some_and(|line| {
            let head = Head(line.load(HEAD));
            // A held cell makes the program wait, and does not make the table full.
            head.is_held() || head.is_free() || super::gives_way(memory, line, head, now)
        })
    };
    (0..=OTHERS).any(is_available) || chosen(&survey(memory, key, now)).is_some()
}

/// Whether a flow may be evicted among those that were looked at. Changes nothing.
#[cfg(any(test, feature = "user"))]
pub fn may_evict(choice: &Choice) -> bool {
    chosen(choice).is_some()
}

/// Looks at the flow that has a port of the node's to an endpoint, if there is one, in the first or in the second
/// round.
#[inline(always)]
pub fn look_at_port<M: Memory>(
    memory: &M,
    choice: &mut Choice,
    key: &PortKey,
    second: bool,
    now: Tick,
) {
    let Some(slot) = memory.slot(key.place(memory.secret()) & memory.slots()) else {
        return;
    };
    let Some(index) = slot.load().cell() else {
        return;
    };
    let index = index & memory.mask();
    let Some(line) = memory.cell(index) else {
        return;
    };
    if line.load(VALUE) == key.word(0) && line.load(VALUE + 1) == key.word(1) {
        look(memory, choice, index, second, now);
    }
}

/// Returns the rank and the cell of the flow to evict among those that were looked at. `None` if no flow may be evicted.
#[inline(always)]
fn chosen(choice: &Choice) -> Option<(u32, u32)> {
    let (mut goes, mut at) = (choice.any, choice.any_at);
    let crowded = choice.has > OTHERS / 2;
    if crowded && (goes < State::UNASSURED || choice.of_most | State::CROWD > goes) {
        (goes, at) = (choice.of_most, choice.of_most_at);
    } else if goes <= State::PROTECTED {
        return None;
    }
    Some((goes, at))
}

/// Evicts a flow among those that were looked at: returns its cell, which is free then. [`NOWHERE`] if no flow may be
/// evicted, [`BUSY`] if the cell has changed meanwhile.
#[inline(always)]
pub fn evict<M: Memory>(memory: &M, choice: &Choice, now: Tick) -> u32 {
    let Some((goes, at)) = chosen(choice) else {
        return NOWHERE;
    };
    let Some(line) = memory.cell(at) else {
        return NOWHERE;
    };
    // Evicts the flow that was looked at, or one of equal rank that has replaced it.
    let head = Head(line.load(HEAD));
    if rank(line, head, now) != goes || !memory.remove(at, head, now) {
        return BUSY;
    }
    memory.pushed_out();
    at
}
