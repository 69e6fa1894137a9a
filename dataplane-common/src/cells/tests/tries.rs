//! How often a word is tried to be exchanged that other CPUs change each time.

use super::*;

/// Memory in which every exchange fails, and all cells and slots are alike.
#[derive(Clone, Copy)]
struct Contended<'a> {
    head: Head,
    slot: Slot,
    tries: &'a Cell<u32>,
}

impl Contended<'_> {
    fn fail(self) -> bool {
        self.tries.set(self.tries.get() + 1);
        false
    }
}

impl Line for Contended<'_> {
    fn load(self, word: usize) -> u64 {
        if word == HEAD { self.head.0 } else { 0 }
    }

    fn load_after(self, word: usize, _: u64) -> u64 {
        Line::load(self, word)
    }

    fn both(one: u64, other: u64) -> u64 {
        one | other
    }

    fn store(self, _: usize, _: u64) {}

    fn exchange(self, _: usize, _: u64, _: u64) -> bool {
        self.fail()
    }

    fn add(self, word: usize, _: u64) -> u64 {
        Line::load(self, word)
    }
}

impl Entry for Contended<'_> {
    fn load(self) -> Slot {
        self.slot
    }

    fn exchange(self, _: Slot, _: Slot) -> bool {
        self.fail()
    }

    fn add(self, _: u32) {}
}

impl Memory for Contended<'_> {
    type Line = Self;
    type Entry = Self;
    type Sequences = Self;

    fn mask(&self) -> u32 {
        1023
    }

    fn secret(&self) -> u64 {
        SECRET
    }

    fn cell(&self, _: u32) -> Option<Self> {
        Some(*self)
    }

    fn slot(&self, _: u32) -> Option<Self> {
        Some(*self)
    }

    fn sequences(&self, _: u32) -> Option<Self> {
        Some(*self)
    }

    fn holder(&self, now: Tick) -> Holder {
        Holder::new(1, now)
    }

    fn keep(&self, state: states::State) -> u32 {
        states::Timeouts::DEFAULT.of(state)
    }

    fn try_hold_or_find(&self, _: &FlowKey, _: Tick) -> u32 {
        self.fail();
        BUSY
    }
}

#[test]
fn no_program_tries_for_ever() {
    let (now, key) = (at(0), key(40_000));
    let counted = Head(Head::ONE_MORE);
    let held = counted.held(Holder::new(1, now));
    let of = |head, count: u32, act: &dyn Fn(&Contended)| {
        let memory = Contended {
            head,
            slot: Slot(count * Slot::ONE_MORE).leading_to(3),
            tries: &Cell::new(0),
        };
        act(&memory);
        memory.tries.get()
    };
    let elsewhere = key.place(SECRET) & 1023 ^ 1;
    let marks = |memory: &Contended| assert!(!mark(*memory, counted, State(0), 1, 0, now));
    let gives_back = |memory: &Contended| give_back(memory, elsewhere, &key, now);
    let publishes = |memory: &Contended| assert!(!publish(*memory, &key, memory.holder(now)));
    let leads = |memory: &Contended| assert!(!lead(memory, 5, 4, false, now));
    let holds = |memory: &Contended| assert_eq!(hold_or_find(memory, &key, now), BUSY);
    assert_eq!(of(counted, 1, &marks), 3);
    assert_eq!(of(held, 1, &publishes), 16);
    assert_eq!(of(counted, 1, &holds), 256);
    // The count at the home, and then the cell. A count that is 0, or so high that it stays, is left alone.
    assert_eq!(of(held, 1, &gives_back), 3 + 16);
    for (head, tries) in [(counted, 3), (Head(0), 0), (Head(Head::MANY), 0)] {
        assert_eq!(of(head, 1, &gives_back), tries, "{head:?}");
    }
    for (count, tries) in [(1, 3), (0, 0), (64, 0)] {
        assert_eq!(of(counted, count, &leads), tries, "{count}");
    }
}
