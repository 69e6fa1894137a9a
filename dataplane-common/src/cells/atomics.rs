//! Cells and slots in user space: mapped, or a test's own.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{Entry, Line, Slot};

impl<const WORDS: usize> Line for &[AtomicU64; WORDS] {
    fn load(self, word: usize) -> u64 {
        self[word].load(Ordering::Acquire)
    }

    // Every load is ordered before the operations that follow it.
    fn load_after(self, word: usize, _: u64) -> u64 {
        self.load(word)
    }

    fn both(one: u64, other: u64) -> u64 {
        one | other
    }

    // A reader that sees the value sees the earlier stores, first of all that the cell is held.
    fn store(self, word: usize, value: u64) {
        self[word].store(value, Ordering::Release);
    }

    fn exchange(self, word: usize, before: u64, new: u64) -> bool {
        let (done, not) = (Ordering::SeqCst, Ordering::SeqCst);
        self[word].compare_exchange(before, new, done, not).is_ok()
    }

    fn add(self, word: usize, amount: u64) -> u64 {
        self[word].fetch_add(amount, Ordering::SeqCst)
    }
}

/// A slot. (The word itself already has operations of these names.)
#[derive(Clone, Copy, Debug)]
pub struct AtomicSlot<'a>(pub &'a AtomicU32);

impl Entry for AtomicSlot<'_> {
    fn load(self) -> Slot {
        Slot(self.0.load(Ordering::Acquire))
    }

    fn exchange(self, before: Slot, new: Slot) -> bool {
        let (done, not) = (Ordering::SeqCst, Ordering::SeqCst);
        self.0.compare_exchange(before.0, new.0, done, not).is_ok()
    }

    fn add(self, amount: u32) {
        self.0.fetch_add(amount, Ordering::SeqCst);
    }
}
