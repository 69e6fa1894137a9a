//! A loom model of a cell: loom tries every order in which processors may see each other's writes. In each order a
//! reader gets the words of one flow only, and a writer evicts or marks the flow that it looked at.

extern crate std;
use std::vec::Vec;

use loom::{
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
    thread,
};

use super::{holders::release, *};
use crate::{Addr, Port, Protocol};

/// How the words of a cell are read and written.
trait Processor: Copy + Send + Sync + 'static {
    /// Orders a load after those before it.
    fn behind() {}
    const LOAD: Ordering;
    const STORE: Ordering;
}

/// By user space: `atomics.rs`.
#[derive(Clone, Copy)]
struct UserSpace;

impl Processor for UserSpace {
    const LOAD: Ordering = Ordering::Acquire;
    const STORE: Ordering = Ordering::Release;
}

/// By the programs. The model knows no addresses that depend on an earlier load: the fence stands for them, and orders
/// no more than two loads.
#[derive(Clone, Copy)]
struct Programs;

impl Processor for Programs {
    fn behind() {
        fence(Ordering::Acquire);
    }
    const LOAD: Ordering = Ordering::Relaxed;
    const STORE: Ordering = Ordering::Relaxed;
}

/// By programs that leave the order to the processor: the model has to find them wrong.
#[derive(Clone, Copy)]
struct Careless;

impl Processor for Careless {
    const LOAD: Ordering = Ordering::Relaxed;
    const STORE: Ordering = Ordering::Relaxed;
}

/// A cell with five of its words, because the model takes long for each. The other words are zero.
struct Shared {
    words: [AtomicU64; 8],
}

#[derive(Clone, Copy)]
struct Place<'a, P>(&'a Shared, P);

/// The words in which this file's flows differ.
const TOLD: [usize; 4] = [0, 2, VALUE, STATE];

impl<P: Processor> Line for Place<'_, P> {
    fn load(self, word: usize) -> u64 {
        if word != HEAD && !TOLD.contains(&word) {
            return 0;
        }
        self.0.words[word].load(P::LOAD)
    }

    fn load_after(self, word: usize, _: u64) -> u64 {
        P::behind();
        self.load(word)
    }

    fn both(one: u64, other: u64) -> u64 {
        one | other
    }

    fn store(self, word: usize, value: u64) {
        if TOLD.contains(&word) {
            self.0.words[word].store(value, P::STORE);
        }
    }

    // Full barriers, both of them (`Documentation/core-api/wrappers/atomic_t.rst`).
    fn exchange(self, word: usize, before: u64, new: u64) -> bool {
        fence(Ordering::SeqCst);
        let (done, not) = (Ordering::SeqCst, Ordering::SeqCst);
        let word = &self.0.words[word];
        let done = word.compare_exchange(before, new, done, not).is_ok();
        fence(Ordering::SeqCst);
        done
    }

    fn add(self, word: usize, amount: u64) -> u64 {
        fence(Ordering::SeqCst);
        let before = self.0.words[word].fetch_add(amount, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        before
    }
}

/// Addresses whose words are zero except the first.
fn addr_of(number: u32) -> Addr {
    Addr::from_words([number, 0, 0, 0])
}

/// A flow in which every word shows which flow it is. All flows have the same ports: the head shows only its number.
fn flow(number: u16) -> (FlowKey, Translation) {
    let addr = addr_of(number.into());
    let key = FlowKey::new(addr, Port::new(7), addr, Port::new(7), Protocol::UDP);
    let value = Translation {
        endpoint: addr,
        endpoint_port: Port::new(number),
        node_port: Port::ANY,
        used: Tick::default(),
        seen: seen::PACKET,
        node_addr: 0,
    };
    (key, value)
}

/// The holder that makes flows here.
const HOLDER: Holder = Holder::new(1, Tick::from_number(0));

/// Makes a flow in a free cell.
fn make<W: Processor>(line: Place<W>, number: u16) {
    let (key, value) = flow(number);
    let head = Head(line.load(HEAD));
    assert!(line.exchange(HEAD, head.0, head.held(HOLDER).0));
    write(line, &key, &value);
    assert!(publish(line, &key, HOLDER));
}

/// One CPU removes the flow of a cell and makes another flow there, while another CPU reads the cell.
fn readers_have_one_flow<R: Processor, W: Processor>(reader: R, writer: W) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let shared = Arc::new(Shared {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
        });
        make(Place(&shared, writer), 1);
        let looked_at = Arc::clone(&shared);
        // The reader is a thread, because in the model the first thread's loads come before other threads' stores.
        let read = thread::spawn(move || {
            if let Some(found) = read(Place(&looked_at, reader)) {
                let both: Vec<_> = [1, 2].map(flow).into();
                let found = (found.key(), found.value());
                assert!(both.contains(&found), "two flows' words: {found:?}");
            }
        });
        let line = Place(&shared, writer);
        assert!(hold_flow(line, Head(line.load(HEAD)), HOLDER));
        assert!(release(line, HOLDER, 0));
        make(line, 2);
        read.join().unwrap();
    });
}

#[test]
fn user_space_reads_what_programs_write() {
    readers_have_one_flow(UserSpace, Programs);
}

#[test]
fn programs_read_what_user_space_writes() {
    readers_have_one_flow(Programs, UserSpace);
}

#[test]
fn programs_read_what_programs_write() {
    readers_have_one_flow(Programs, Programs);
}

/// The model finds the fault of loads in any order, so it would find the fault in the other methods, too.
#[test]
#[should_panic(expected = "two flows' words")]
fn loads_in_any_order_are_not_enough() {
    readers_have_one_flow(Careless, Programs);
}

/// The time at which flows of [`over`] may be replaced.
const LATER: Tick = Tick::from_number(9);

/// A flow that was reset long ago.
fn over() -> (FlowKey, Translation) {
    let (key, value) = flow(1);
    let seen = seen::PACKET | seen::RST;
    (key, Translation { seen, ..value })
}

/// A flow that has just begun.
fn fresh() -> (FlowKey, Translation) {
    let (key, value) = flow(2);
    (
        key,
        Translation {
            used: LATER,
            ..value
        },
    )
}

/// Whether the flow of a cell may be evicted: of these flows, one that is over.
fn over_by_now<L: Line>(line: L, head: Head) -> bool {
    State(line.load_after(STATE, head.0)).gives_way(u32::MAX, LATER)
}

/// One CPU gives a flow's cell to a new flow, while another does something with the cell.
fn beside_a_change<W: Processor>(
    writer: W,
    other: impl Fn(&Shared) + Send + Sync + Copy + 'static,
) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let shared = Arc::new(Shared {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
        });
        let enter = |line: Place<W>, (key, value): (FlowKey, Translation)| {
            write(line, &key, &value);
            publish(line, &key, HOLDER);
        };
        let line = Place(&shared, writer);
        line.add(HEAD, Head(0).held(HOLDER).0);
        enter(line, over());
        let looked_at = Arc::clone(&shared);
        let other = thread::spawn(move || other(&looked_at));
        if hold_flow(line, Head(line.load(HEAD)), HOLDER) {
            enter(line, fresh());
        }
        other.join().unwrap();
    });
}

fn only_what_is_over_gives_way<R: Processor, W: Processor>(reader: R, writer: W) {
    beside_a_change(writer, move |shared| {
        let line = Place(shared, reader);
        let head = Head(line.load(HEAD));
        if head.key().is_some() && over_by_now(line, head) && hold_flow(line, head, HOLDER) {
            assert_eq!(value(line), over().1, "a flow that lives is removed");
        }
    });
}

#[test]
fn only_what_is_over_gives_way_to_programs() {
    only_what_is_over_gives_way(Programs, Programs);
}

#[test]
fn only_what_is_over_gives_way_to_user_space() {
    only_what_is_over_gives_way(UserSpace, Programs);
}

#[test]
#[should_panic(expected = "a flow that lives is removed")]
fn in_any_order_what_lives_gives_way() {
    only_what_is_over_gives_way(Careless, Programs);
}

/// A mark meant for one flow is not put on another flow.
#[test]
fn a_flow_is_marked_by_its_own_packets() {
    beside_a_change(Programs, |shared| {
        let line = Place(shared, Programs);
        if let Some(found) = read(line) {
            let is_over = found.value() == over().1;
            mark(line, found.head(), found.state(), seen::FIN, 0, LATER);
            let (_, new) = fresh();
            if let Some(after) = read(line).filter(|_| is_over)
                && after.value().endpoint_port == new.endpoint_port
            {
                assert_eq!(after.value(), new, "the other flow's");
            }
        }
    });
}

/// Cells of one element, without slots.
#[derive(Clone, Copy)]
struct One<'a>(&'a Shared, u16);

impl<'a> Memory for One<'a> {
    type Line = Place<'a, Programs>;
    type Entry = Nothing;
    type Sequences = Place<'a, Programs>;

    fn mask(&self) -> u32 {
        0
    }
    fn secret(&self) -> u64 {
        0
    }
    fn holder(&self, now: Tick) -> Holder {
        Holder::new(self.1, now)
    }
    fn keep(&self, _: states::State) -> u32 {
        u32::MAX
    }
    fn cell(&self, _: u32) -> Option<Self::Line> {
        Some(Place(self.0, Programs))
    }
    fn slot(&self, _: u32) -> Option<Nothing> {
        None
    }
    fn sequences(&self, _: u32) -> Option<Self::Sequences> {
        None
    }
}

#[derive(Clone, Copy)]
struct Nothing;

impl Entry for Nothing {
    fn load(self) -> Slot {
        Slot(0)
    }
    fn exchange(self, _: Slot, _: Slot) -> bool {
        false
    }
    fn add(self, _: u32) {}
}

/// A program died long ago while it held a cell. Two walks free the cell at once, while a live program holds it, gives
/// it back, and holds it again for a flow. The cell is freed once, and no walk takes it from the live program.
#[test]
fn a_cell_is_freed_once_and_from_the_dead_alone() {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let shared = Arc::new(Shared {
            words: core::array::from_fn(|_| AtomicU64::new(0)),
        });
        let dead = Holder::new(7, Tick::from_number(0));
        Place(&shared, Programs).add(HEAD, Head(0).held(dead).0);
        let walk = |number: u16| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || free_held(&One(&shared, number), 0, LATER))
        };
        let walks = [walk(8), walk(9)];
        let line = Place(&shared, Programs);
        let lives = Holder::new(2, LATER);
        let hold = || {
            let head = Head(line.load(HEAD));
            head.is_free() && line.exchange(HEAD, head.0, head.held(lives).0)
        };
        let mut made = false;
        if hold() {
            assert!(release(line, lives, 0), "given back");
            if hold() {
                let (key, value) = fresh();
                write(line, &key, &value);
                made = publish(line, &key, lives);
                assert!(made, "taken from who lives");
            }
        }
        let freed = walks.map(|walk| u32::from(walk.join().unwrap()));
        assert_eq!(freed.iter().sum::<u32>(), 1, "freed once");
        let head = Head(line.load(HEAD));
        assert!(head.is_free() != made && !head.is_held(), "{head:?}");
    });
}
