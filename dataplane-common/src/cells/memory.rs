//! Where cells and slots are, and what is done to one of their words.

use super::{
    Choice, find_elsewhere, find_led_elsewhere, hold, look, make_room, remove,
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
    /// Reads a word after others were read, from which `seen` was made ([`Line::both`]).
    fn load_after(self, word: usize, seen: u64) -> u64;
    /// Something made from two numbers that were read.
    fn both(one: u64, other: u64) -> u64;
    /// Writes a word.
    fn store(self, word: usize, value: u64);
    /// Writes a word if it is `before`; whether it was. If so, a full barrier.
    fn exchange(self, word: usize, before: u64, new: u64) -> bool;
    /// Adds to a word; what it was before. A full barrier.
    fn add(self, word: usize, amount: u64) -> u64;
}

/// One slot, likewise.
pub trait Entry: Copy {
    /// Reads it.
    fn load(self) -> Slot;
    /// Writes it if it is `before`; whether it was. If so, a full barrier.
    fn exchange(self, before: Slot, new: Slot) -> bool;
    /// Adds to it.
    fn add(self, amount: u32);
}

/// Where cells and slots are.
pub trait Memory {
    /// A cell.
    type Line: Line;
    /// A slot.
    type Entry: Entry;
    /// A cell's element of `SEQUENCES` ([`crate::tcp`]).
    type Sequences: Line;
    /// Which bits of a place count: how many cells there are, a power of two, less one.
    fn mask(&self) -> u32;
    /// Returns the secret by which keys have their homes ([`crate::packet::PacketConfig::secret`]).
    fn secret(&self) -> u64;
    /// A cell, of those that there are.
    fn cell(&self, index: u32) -> Option<Self::Line>;
    /// A slot, of twice as many.
    fn slot(&self, index: u32) -> Option<Self::Entry>;
    /// The sequence numbers seen of the flow in a cell.
    fn sequences(&self, index: u32) -> Option<Self::Sequences>;

    /// Returns who holds cells here.
    fn holder(&self, now: Tick) -> Holder;

    /// Returns for how many seconds a flow is kept in a state.
    fn keep(&self, state: State) -> u32;

    /// Which bits of a place count among slots.
    #[inline(always)]
    fn slots(&self) -> u32 {
        self.mask() << 1 | 1
    }

    /// [`remove`]: programs have it once, with a stack of its own, as they have those below.
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

    /// [`hold`].
    #[inline(always)]
    fn hold(&self, key: &FlowKey, now: Tick) -> u32
    where
        Self: Sized,
    {
        hold(self, key, now)
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
