//! Access to cells and slots, and the operations on one of their words.

use super::{
    Choice, find_elsewhere, find_led_elsewhere, look, make_room, remove, try_hold_or_find,
    words::{Head, Holder, Slot},
};
use crate::{
    packet::{FlowKey, Tick},
    states::State,
};

/// One cell, in memory that others change meanwhile.
pub trait Line: Copy {
    /// Reads a word.
    fn load(self, word: usize) -> u64;
    /// Reads a word after the words from which `seen` was made ([`Line::both`]).
    fn load_after(self, word: usize, seen: u64) -> u64;
    /// Something made from two numbers that were read.
    fn both(one: u64, other: u64) -> u64;
    /// Writes a word.
    fn store(self, word: usize, value: u64);
    /// Writes a word if it is `before`; returns whether it was. If so, this is a full barrier.
    fn exchange(self, word: usize, before: u64, new: u64) -> bool;
    /// Adds to a word and returns its earlier value. A full barrier.
    fn add(self, word: usize, amount: u64) -> u64;
}

/// One slot, in memory that others change meanwhile.
pub trait Entry: Copy {
    /// Reads it.
    fn load(self) -> Slot;
    /// Writes it if it is `before`; returns whether it was. If so, this is a full barrier.
    fn exchange(self, before: Slot, new: Slot) -> bool;
    /// Adds to it.
    fn add(self, amount: u32);
}

/// The memory that holds the cells and slots.
pub trait Memory {
    /// A cell.
    type Line: Line;
    /// A slot.
    type Entry: Entry;
    /// A cell's element of `SEQUENCES` ([`crate::tcp`]).
    type Sequences: Line;
    /// The bits of a place that count: the number of cells, a power of two, minus one.
    fn mask(&self) -> u32;
    /// Returns the secret by which keys have their homes ([`crate::packet::PacketConfig::secret`]).
    fn secret(&self) -> u64;
    /// A cell; `None` if there is no such cell.
    fn cell(&self, index: u32) -> Option<Self::Line>;
    /// A slot; there are twice as many slots as cells.
    fn slot(&self, index: u32) -> Option<Self::Entry>;
    /// The sequence numbers seen of the flow in a cell.
    fn sequences(&self, index: u32) -> Option<Self::Sequences>;

    /// Returns the holder that this code is.
    fn holder(&self, now: Tick) -> Holder;

    /// Returns the timeout of a flow in a state, in seconds.
    fn keep(&self, state: State) -> u32;

    /// The bits of a place that count among slots.
    #[inline(always)]
    fn slots(&self) -> u32 {
        self.mask() << 1 | 1
    }

    /// [`remove`]: programs have it once, with a stack of its own, like the functions below.
    #[inline(always)]
    fn remove(&self, index: u32, head: Head, now: Tick) -> bool
    where
        Self: Sized,
    {
        remove(self, index, head, now)
    }

    /// [`find_elsewhere`].
    #[inline(always)]
    fn find_elsewhere(&self, key: &FlowKey) -> u32
    where
        Self: Sized,
    {
        find_elsewhere(self, key)
    }

    /// [`find_led_elsewhere`].
    #[inline(always)]
    fn find_led_elsewhere(&self, reply: &FlowKey) -> u32
    where
        Self: Sized,
    {
        find_led_elsewhere(self, reply)
    }

    /// [`try_hold_or_find`].
    #[inline(always)]
    fn try_hold_or_find(&self, key: &FlowKey, now: Tick) -> u32
    where
        Self: Sized,
    {
        try_hold_or_find(self, key, now)
    }

    /// [`make_room`].
    #[inline(always)]
    fn make_room(&self, key: &FlowKey, now: Tick) -> u32
    where
        Self: Sized,
    {
        make_room(self, key, now)
    }

    /// [`look`].
    #[inline(always)]
    fn look(&self, choice: &mut Choice, index: u32, second: bool, now: Tick)
    where
        Self: Sized,
    {
        look(self, choice, index, second, now);
    }

    /// Counts an eviction of a flow that was not over.
    #[inline(always)]
    fn pushed_out(&self) {}
}
