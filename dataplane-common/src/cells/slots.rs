//! Slots, which lead from the addresses and ports of replies to the cell of their flow.

use super::{
    CellKey as _, Entry, HEAD, Head, Line as _, Memory, OTHERS, Slot, Snapshot, TRIES, candidate,
    gives_way, read,
};
use crate::packet::{FlowKey, PortKey, Tick, Translation};

/// Returns the home slot of a flow's replies.
#[inline(always)]
pub fn place_of_replies(key: &FlowKey, value: &Translation, secret: u64) -> u32 {
    if value.node_addr == 0 {
        FlowKey::new(
            value.endpoint,
            value.endpoint_port,
            key.src,
            value.seen_port(key),
            key.protocol,
        )
        .place(secret)
    } else {
        PortKey::new(
            value.endpoint,
            value.endpoint_port,
            value.node_port,
            key.protocol,
        )
        .place(secret)
    }
}

/// Whether the home slot of replies leads to a flow that is not over.
#[inline(always)]
pub fn is_home_taken<M: Memory>(memory: &M, place: u32, now: Tick) -> bool {
    let Some(home) = memory.slot(place & memory.slots()) else {
        return true;
    };
    let Some(other) = home.load().cell() else {
        return false;
    };
    let Some(line) = memory.cell(other & memory.mask()) else {
        return true;
    };
    let head = Head(line.load(HEAD));
    head.key().is_none() || !gives_way(memory, line, head, now)
}

/// Whether [`lead`] finds a slot for the replies of a flow that is not masqueraded. Changes nothing.
#[cfg(any(test, feature = "user"))]
pub fn has_slot<M: Memory>(memory: &M, place: u32, now: Tick) -> bool {
    let is_empty = |nth| {
        let slot = memory.slot(candidate(place, nth) & memory.slots());
        slot.is_some_and(|slot| slot.load().cell().is_none())
    };
    !is_home_taken(memory, place, now) || (1..=OTHERS).any(is_empty)
}

/// Makes a slot lead to a held cell; `false` if no slot is free, or, with `only_home`, if the home leads elsewhere.
#[inline(always)]
pub fn lead<M: Memory>(memory: &M, place: u32, index: u32, only_home: bool, now: Tick) -> bool {
    let mask = memory.slots();
    let Some(home) = memory.slot(place & mask) else {
        return false;
    };
    if let Some(other) = home.load().cell()
        && let Some(line) = memory.cell(other)
    {
        let head = Head(line.load(HEAD));
        if head.key().is_some() && gives_way(memory, line, head, now) {
            memory.remove(other, head, now);
        }
    }
    let slot = home.load();
    if slot.cell().is_none() && home.exchange(slot, slot.leading_to(index)) {
        return true;
    }
    if only_home {
        return false;
    }
    if slot.counts() {
        home.add(Slot::ONE_MORE);
    }
    let mut nth = 1;
    while nth <= OTHERS {
        if let Some(entry) = memory.slot(candidate(place, nth) & mask) {
            let slot = entry.load();
            if slot.cell().is_none() && entry.exchange(slot, slot.leading_to(index)) {
                return true;
            }
        }
        nth += 1;
    }
    one_slot_less(home);
    false
}

#[inline(always)]
fn one_slot_less<E: Entry>(home: E) {
    let mut tries = 0;
    while tries < TRIES {
        let slot = home.load();
        if !slot.has_more() || !slot.counts() || home.exchange(slot, Slot(slot.0 - Slot::ONE_MORE))
        {
            return;
        }
        tries += 1;
    }
}

/// Removes the slot that leads to a held cell.
#[inline(always)]
pub(super) fn mislead<M: Memory>(memory: &M, place: u32, index: u32) {
    let mask = memory.slots();
    let mut nth = 0;
    while nth <= OTHERS {
        if let Some(entry) = memory.slot(candidate(place, nth) & mask)
            && entry.load().leads_to(index)
        {
            // Only this holder frees it; other CPUs may count in it.
            entry.add((index + 1).wrapping_neg());
            if nth != 0
                && let Some(home) = memory.slot(place & mask)
            {
                one_slot_less(home);
            }
            return;
        }
        nth += 1;
    }
}

/// Returns the cell that a slot leads to, if it has a flow, and its contents.
#[inline(always)]
pub(super) fn led_to<M: Memory>(memory: &M, slot: Slot) -> Option<(u32, Snapshot)> {
    let index = slot.cell()? & memory.mask();
    Some((index, read(memory.cell(index)?)?))
}

/// Returns the cell of the flow of a reply to a client, if the flow is not masqueraded, and its contents.
#[inline(always)]
pub fn find_by_client<M: Memory>(memory: &M, reply: &FlowKey) -> Option<(u32, Snapshot)> {
    let slot = memory
        .slot(reply.place(memory.secret()) & memory.slots())?
        .load();
    if let Some(found) = led_to(memory, slot)
        && found.1.is_answered_by(reply)
    {
        return Some(found);
    }
    if !slot.has_more() {
        return None;
    }
    let index = memory.find_led_elsewhere(reply);
    let found = read(memory.cell(index)?)?;
    found.is_answered_by(reply).then_some((index, found))
}

/// Returns the cell of the flow of a reply to one of the node's ports, at any of its addresses, and its contents.
#[inline(always)]
pub fn find_by_node<M: Memory>(memory: &M, reply: &PortKey) -> Option<(u32, Snapshot)> {
    let slot = memory
        .slot(reply.place(memory.secret()) & memory.slots())?
        .load();
    led_to(memory, slot).filter(|(_, found)| found.is_answered_by_port(reply))
}
