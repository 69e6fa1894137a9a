//! Cells: where a flow is found by one look, from either end.
//!
//! `CONNTRACK` is an array of cells of 64 bytes, one line of a cache: a flow's key and what its packets are turned
//! into, for both directions. Requests carry the key: a key has one cell that is its home ([`CellKey::place`]), and
//! sixteen others, the one beside it and then any, of which the first free one has the flow if another flow has its
//! home. The home says whether flows of its keys are elsewhere: where none is, which is nearly always, a search in vain
//! has read one line.
//!
//! Replies carry something else: `ANSWERS` has for each cell two slots of 32 bits, and what a reply carries
//! has a slot that is its home, which says which cell its flow is in. Sixteen slots are in one line; and of those that
//! a flow may have, one is nearly always free even if no cell is.
//!
//! Ports that follow each other have cells and slots that follow each other: a client counts its ports up, so the
//! next flow's are near the last one's. What takes long is memory that was not used lately (`docs/measurements/flow-cells.md`).
//!
//! # Room
//!
//! There are twice as many cells as flows were asked for, so that with half of them taken one flow in 130 000 finds
//! all its seventeen taken. A flow that is over gives way to a new one that would have its cell or its slot
//! ([`State::gives_way`]). If none does, of the seventeen one goes that nobody has answered, and if all were answered,
//! that which was used longest ago; it is counted ([`Memory::pushed_out`]).
//!
//! # Who may do what
//!
//! The word behind the addresses, the [`Head`], says whether a cell is free. Who makes a flow takes a free cell by
//! compare-and-exchange, writes the rest, has a slot lead to it, and then writes the head again, now with ports and
//! protocol. Who removes one takes the cell from its flow likewise: then it is nobody's, and the slot and the counts
//! can be given back before it is free. A cell that somebody holds is held for a microsecond. Whoever meets
//! one where the flow might be is told so ([`BUSY`]): who holds it may be making the same flow, and the entry that it makes
//! is the one to use.
//!
//! # Reading while others write
//!
//! A cell may become another flow's while it is read. So a reader takes a [`Snapshot`]: it reads the head, then the other words, then
//! the head again, whose number is another one if a flow was made in between. On processors that exchange loads
//! (arm64, riscv64) each step must be kept behind the one before it, and so must the writer's stores:
//!
//! | who | what | kept in order by |
//! |---|---|---|
//! | writer | holds the cell, then writes its words | the exchange that holds it, a full barrier |
//! | writer | writes the words, then the head | the addition that publishes it, a full barrier |
//! | reader | reads the head, then the words | [`Line::load_after`] |
//! | reader | reads the words, then the head again | [`Line::load_after`] |
//! | whoever wants room | reads the head, then whether that flow gives way | [`Line::load_after`] |
//!
//! What then writes to the cell does so by compare-and-exchange with what was read: of the head, to remove the flow; of the
//! state, to say that it was used ([`mark`]). So it fails if another flow has come in between.
//!
//! In user space loads acquire, and what follows an acquiring load stays behind it. BPF has no such load, and its full barriers are
//! read-modify-writes, which would take the line from the other CPUs for each packet. There the address of the
//! second load depends on what the first one found: every processor keeps these in order, at the cost of an addition.
//! `cells/model.rs` has loom try all orders that the memory model admits, by both ways.
//!
//! (The number has 16 bits: 65 536 flows made in one cell while somebody reads eight words would pass for none.)
//!
//! The programs and the agent run what is here ([`Memory`] is where they differ), and so do the tests, on threads.

#![expect(
    clippy::cast_possible_truncation,
    reason = "words are taken apart: what is cut off is another field"
)]

use crate::{
    Addr, Port, Protocol,
    packet::{FlowKey, PortKey, Tick, Translation, keep_seconds, seen},
    tcp::{self, Sequences},
};

/// A cell: the flow's addresses (client, VIP), the [`Head`], the value ([`Translation`]).
pub type Cell = [u64; 8];
/// Sixteen slots.
pub type Slots = [u32; 16];

/// Which word of a cell is the head.
pub const HEAD: usize = 4;
/// Which words are the value.
const VALUE: usize = HEAD + 1;
/// The word that changes while the flow is there.
pub const STATE: usize = 7;

/// How many other cells a flow may have whose home is taken, and how many other slots.
pub const OTHERS: u32 = 16;

/// A flow's cell or slot, among those it may have: its home, the one beside it, which is read with it, and others anywhere.
#[inline(always)]
pub const fn candidate(place: u32, nth: u32) -> u32 {
    if nth < 2 {
        return place ^ nth;
    }
    // Any odd numbers.
    let mixed = (place ^ nth.wrapping_mul(0x9e37_79b9)) as u64;
    (mixed.wrapping_mul(0x6a09_e667_f3bc_c909) >> 29) as u32
}

/// Cells for so many flows.
pub const fn cells_for(flows: u32) -> u32 {
    // A slot's number has room for no more.
    let cells = flows.next_power_of_two() << 1;
    if cells > Slot::CELLS {
        Slot::CELLS
    } else {
        cells
    }
}

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
    /// A cell's element of `SEQUENCES` ([`tcp`]).
    type Sequences: Line;
    /// Which bits of a place count: how many cells there are, a power of two, less one.
    fn mask(&self) -> u32;
    /// A cell, of those that there are.
    fn cell(&self, index: u32) -> Option<Self::Line>;
    /// A slot, of twice as many.
    fn slot(&self, index: u32) -> Option<Self::Entry>;
    /// What is known of the sequence numbers of the flow in a cell.
    fn sequences(&self, index: u32) -> Option<Self::Sequences>;

    /// Which bits of a place count among slots.
    #[inline(always)]
    fn slots(&self) -> u32 {
        self.mask() << 1 | 1
    }

    /// [`remove`]: programs have it once, with a stack of its own, as they have those below.
    #[inline(always)]
    fn remove(&self, index: u32, head: Head) -> bool
    where
        Self: Sized,
    {
        remove(self, index, head)
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

    /// A flow that is not over has gone for want of room.
    #[inline(always)]
    fn pushed_out(&self) {}
}

/// A key that has a home: addresses, then a word of ports and protocol.
pub trait CellKey: Copy {
    /// How many words the addresses are.
    const WORDS: usize;

    /// A word of the addresses, as it lies in memory; and the last, as a head has it.
    fn word(&self, index: usize) -> u64;

    /// Which cell or slot is its home, of 2^32.
    #[inline(always)]
    fn place(&self) -> u32 {
        // Odd numbers of which nothing else is asked (fractions of square roots).
        const FACTORS: [u64; 5] = [
            0x6a09_e667_f3bc_c909,
            0xbb67_ae85_84ca_a73b,
            0x3c6e_f372_fe94_f82b,
            0xa54f_f53a_5f1d_36f1,
            0x9e37_79b9_7f4a_7c15,
        ];
        let head = self.word(Self::WORDS);
        let mut mixed = (head >> 32).wrapping_mul(FACTORS[4]);
        let mut index = 0;
        while index < Self::WORDS {
            mixed ^= self.word(index).wrapping_mul(FACTORS[index]);
            index += 1;
        }
        mixed ^= mixed >> 29;
        let base = (mixed.wrapping_mul(FACTORS[4]) >> 32) as u32;
        // One of the two is the client's, and the other the same for many. Clients take every second port
        // (`__inet_hash_connect` in `net/ipv4/inet_hashtables.c`): these follow each other, too.
        let [first, second] = [head as u16, (head >> 16) as u16].map(Port::from_be);
        let ports = first.host().wrapping_add(second.host());
        base.wrapping_add(u32::from(ports.rotate_right(1)))
    }
}

#[inline(always)]
const fn half(addr: Addr, index: usize) -> u64 {
    let words = addr.words();
    words[index * 2] as u64 | (words[index * 2 + 1] as u64) << 32
}

#[inline(always)]
const fn addr(first: u64, second: u64) -> Addr {
    Addr::from_words([
        first as u32,
        (first >> 32) as u32,
        second as u32,
        (second >> 32) as u32,
    ])
}

#[inline(always)]
const fn head(first: Port, second: Port, protocol: u8) -> u64 {
    first.be() as u64 | (second.be() as u64) << 16 | (protocol as u64) << 32
}

impl CellKey for FlowKey {
    const WORDS: usize = HEAD;

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        match index {
            0 | 1 => half(self.src, index),
            2 | 3 => half(self.dst, index - 2),
            _ => head(self.src_port, self.dst_port, self.protocol.number()),
        }
    }
}

impl CellKey for PortKey {
    const WORDS: usize = 2;

    #[inline(always)]
    fn word(&self, index: usize) -> u64 {
        match index {
            0 | 1 => half(self.endpoint, index),
            _ => head(self.endpoint_port, self.node_port, self.protocol.number()),
        }
    }
}

/// The word of a cell that says what it is: ports and protocol as the key has them (40 bits, 0: free), how many
/// flows whose home this is are elsewhere (8 bits), and a number (16 bits), another for each flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Head(pub u64);

impl Head {
    const KEY: u64 = (1 << 40) - 1;
    /// No protocol of ours: somebody holds the cell.
    const HELD: u64 = 0xff << 32;
    const ONE_MORE: u64 = 1 << 40;
    const MORE: u64 = 0xff << 40;
    /// With so many or more nobody counts any longer: flows are looked for elsewhere for good.
    const MANY: u64 = 1 << 47;
    const NUMBER: u64 = 1 << 48;

    /// Whether nobody has the cell.
    #[inline(always)]
    pub const fn is_free(self) -> bool {
        self.0 & Self::KEY == 0
    }

    /// Whether somebody is making or removing its flow.
    #[inline(always)]
    pub const fn is_held(self) -> bool {
        self.0 & Self::KEY == Self::HELD
    }

    /// Whether its flow has these ports and this protocol ([`CellKey::word`]).
    #[inline(always)]
    pub const fn has(self, ports_and_protocol: u64) -> bool {
        self.0 & Self::KEY == ports_and_protocol
    }

    /// Its flow's ports and protocol; `None` if it has no flow.
    #[inline(always)]
    pub const fn key(self) -> Option<u64> {
        if self.is_free() || self.is_held() {
            None
        } else {
            Some(self.0 & Self::KEY)
        }
    }

    /// Its flow's protocol, if it has one.
    #[inline(always)]
    const fn protocol(self) -> Protocol {
        Protocol::from_number((self.0 >> 32) as u8)
    }

    /// Whether flows whose home this is are elsewhere.
    #[inline(always)]
    pub const fn has_more(self) -> bool {
        self.0 & Self::MORE != 0
    }

    const fn counts(self) -> bool {
        self.0 & Self::MANY == 0
    }

    /// That once somebody holds the cell.
    const fn held(self) -> Self {
        Self(self.0 & !Self::KEY | Self::HELD)
    }

    /// What is added to a held cell's when its flow is there.
    const fn made(ports_and_protocol: u64) -> u64 {
        ports_and_protocol
            .wrapping_sub(Self::HELD)
            .wrapping_add(Self::NUMBER)
    }

    /// What is added to a held cell's when it has none.
    const FREED: u64 = Self::HELD.wrapping_neg();

    /// Whether another is of the same flow, whatever is elsewhere.
    pub const fn is_same(self, other: Self) -> bool {
        (self.0 ^ other.0) & !Self::MORE == 0
    }
}

/// A slot: which cell (25 bits, 0: none, else the cell's index and one), and how many whose home this is are
/// in other slots (7 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Slot(pub u32);

impl Slot {
    const NUMBER: u32 = (1 << 25) - 1;
    const ONE_MORE: u32 = 1 << 25;
    const MANY: u32 = 1 << 31;
    /// So many cells have numbers.
    const CELLS: u32 = 1 << 24;

    /// Which cell it leads to.
    #[inline(always)]
    pub const fn cell(self) -> Option<u32> {
        (self.0 & Self::NUMBER).checked_sub(1)
    }

    #[inline(always)]
    const fn leads_to(self, cell: u32) -> bool {
        self.0 & Self::NUMBER == cell + 1
    }

    /// Whether some whose home this is are in other slots.
    #[inline(always)]
    pub const fn has_more(self) -> bool {
        self.0 & !Self::NUMBER != 0
    }

    const fn leading_to(self, cell: u32) -> Self {
        Self(self.0 & !Self::NUMBER | (cell + 1))
    }

    const fn counts(self) -> bool {
        self.0 & Self::MANY == 0
    }
}

/// The last word of a cell: ports, when last used, what was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct State(pub u64);

impl State {
    /// What adds flags of [`seen`].
    #[inline(always)]
    pub const fn bits(flags: u8) -> u64 {
        (flags as u64) << 48
    }

    /// That, used at another time.
    #[inline(always)]
    pub const fn used_at(self, now: Tick) -> Self {
        Self(self.0 & !(0xffff << 32) | (now.number() as u64) << 32)
    }

    /// That, after a packet which adds flags of [`seen`]. `anew`: the flow begins anew with it, and the packets of an earlier
    /// connection's count no longer, but that there was a request.
    #[inline(always)]
    pub const fn with_packet(self, flags: u8, anew: bool, now: Tick) -> Self {
        let mut state = self.used_at(now).0;
        if anew {
            state &= !Self::bits(!seen::PACKET);
        }
        Self(state | Self::bits(flags))
    }

    /// That, of a flow that begins anew: of requests a packet was seen, and nothing else.
    #[inline(always)]
    pub const fn anew(self, now: Tick) -> Self {
        Self(self.used_at(now).0 & !Self::bits(0xff) | Self::bits(seen::PACKET))
    }

    #[inline(always)]
    const fn used(self) -> Tick {
        Tick::from_number((self.0 >> 32) as u16)
    }

    #[inline(always)]
    const fn seen(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// Whether the flow has been over for so long that a new one may have its room: reset or closed by both sides,
    /// and quiet for 4 to 9 seconds, in which the last packets were sent again if they were lost; or idle for longer
    /// than it is kept. How long the kernel's own conntrack keeps what is its, only the agent can ask.
    #[inline(always)]
    pub const fn gives_way(self, protocol: Protocol, now: Tick) -> bool {
        let (requests, replies) = (
            seen::of_requests(self.seen()),
            seen::of_replies(self.seen()),
        );
        if requests & seen::FOREIGN != 0 {
            return false;
        }
        if seen::is_ended(requests, replies) && self.used().ticks_before(now) >= 2 {
            return true;
        }
        self.used().age_seconds(now) > keep_seconds(protocol, requests, replies)
    }

    /// The rank of a flow that gives way.
    const GIVES_WAY: u32 = u32::MAX;

    /// Which of several flows goes if one must: that of the highest rank, never 0. First one that gives way; then those
    /// that nobody has answered, so that a flood of SYNs pushes out hardly any that lives; then those used longest ago.
    #[inline(always)]
    const fn rank(self, protocol: Protocol, now: Tick) -> u32 {
        if self.gives_way(protocol, now) {
            return Self::GIVES_WAY;
        }
        let rank = self.used().ticks_before(now) + 1;
        // What the kernel's conntrack translates was answered before we came.
        if self.seen() & (seen::in_replies(seen::PACKET) | seen::FOREIGN) == 0 {
            rank + (1 << 16)
        } else {
            rank
        }
    }
}

/// A flow's value, as the words of a cell.
#[inline(always)]
fn words(value: &Translation) -> [u64; 3] {
    [
        half(value.endpoint, 0),
        half(value.endpoint, 1),
        u64::from(value.endpoint_port.be())
            | u64::from(value.node_port.be()) << 16
            | u64::from(value.used.number()) << 32
            | State::bits(value.seen)
            | u64::from(value.node_addr) << 56,
    ]
}

/// What a cell holds: the value of the flow that it has, or had.
#[inline(always)]
pub fn value<L: Line>(line: L) -> Translation {
    value_of([VALUE, VALUE + 1, STATE].map(|word| line.load(word)))
}

#[inline(always)]
const fn value_of([first, second, state]: [u64; 3]) -> Translation {
    Translation {
        endpoint: addr(first, second),
        endpoint_port: Port::from_be(state as u16),
        node_port: Port::from_be((state >> 16) as u16),
        used: State(state).used(),
        seen: State(state).seen(),
        node_addr: (state >> 56) as u8,
    }
}

/// What a cell holds: the key, given the head's part of it ([`Head::key`]).
#[inline(always)]
pub fn key<L: Line>(line: L, ports_and_protocol: u64) -> FlowKey {
    key_of([0, 1, 2, 3].map(|word| line.load(word)), ports_and_protocol)
}

#[inline(always)]
const fn key_of(words: [u64; 4], ports_and_protocol: u64) -> FlowKey {
    FlowKey::new(
        addr(words[0], words[1]),
        Port::from_be(ports_and_protocol as u16),
        addr(words[2], words[3]),
        Port::from_be((ports_and_protocol >> 16) as u16),
        Protocol::from_number((ports_and_protocol >> 32) as u8),
    )
}

/// A flow as its cell had it at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Snapshot {
    words: Cell,
}

/// Reads a cell; `None` if it has no flow, or becomes another's meanwhile ("Reading while others write", above).
#[inline(always)]
pub fn read<L: Line>(line: L) -> Option<Snapshot> {
    let head = Head(line.load(HEAD));
    head.key()?;
    let mut words = [0; 8];
    let mut seen = head.0;
    let mut index = 0;
    while index < words.len() {
        if index != HEAD {
            words[index] = line.load_after(index, head.0);
            seen = L::both(seen, words[index]);
        }
        index += 1;
    }
    let after = Head(line.load_after(HEAD, seen));
    words[HEAD] = after.0;
    head.is_same(after).then_some(Snapshot { words })
}

impl Snapshot {
    /// The head.
    #[inline(always)]
    pub const fn head(&self) -> Head {
        Head(self.words[HEAD])
    }

    /// The state.
    #[inline(always)]
    pub const fn state(&self) -> State {
        State(self.words[STATE])
    }

    /// The flow's key.
    #[inline(always)]
    pub const fn key(&self) -> FlowKey {
        let [a, b, c, d, head, ..] = self.words;
        key_of([a, b, c, d], head & Head::KEY)
    }

    /// The flow's value.
    #[inline(always)]
    pub const fn value(&self) -> Translation {
        let [.., first, second, state] = self.words;
        value_of([first, second, state])
    }

    /// Whether it is the key's flow.
    #[inline(always)]
    pub fn is_of(&self, key: &FlowKey) -> bool {
        let mut differ = 0;
        let mut index = 0;
        while index < HEAD {
            differ |= self.words[index] ^ key.word(index);
            index += 1;
        }
        self.head().has(key.word(HEAD)) && differ == 0
    }
}

/// Says what a packet of the flow that was found in a cell adds to it ([`State::with_packet`]); `before` is the state that
/// was found, `head` the head.
///
/// Nothing is written, and `false` answered, if the cell has become another flow's. (Unless that one's state is, bit by bit, the one that was found:
/// then it was made in the same tick, to the same ports, and nothing more was seen of either.)
#[inline(always)]
pub fn mark<L: Line>(line: L, head: Head, before: State, flags: u8, anew: bool, now: Tick) -> bool {
    let mut before = before;
    let mut tries = 0;
    while tries < TRIES {
        let after = before.with_packet(flags, anew, now);
        if after.0 == before.0 || line.exchange(STATE, before.0, after.0) {
            return true;
        }
        // Another packet of the flow's, or of another flow.
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
/// No cell yet: somebody else has just made the flow, or holds a cell that it might have.
pub const BUSY: u32 = NOWHERE - 1;
/// Added to a cell's index: somebody else has made the flow there.
pub const MADE: u32 = 1 << 30;

/// The cell of the key's flow, and what it holds.
#[inline(always)]
pub fn find<M: Memory>(memory: &M, key: &FlowKey) -> Option<(u32, Snapshot)> {
    let home = key.place() & memory.mask();
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

/// Which cell has the key's flow, other than its home; [`NOWHERE`] if none has.
#[inline(always)]
pub fn find_elsewhere<M: Memory>(memory: &M, key: &FlowKey) -> u32 {
    let place = key.place();
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

/// Takes a cell for the key, which has no flow: then it is held. [`BUSY`] if somebody else has just made the same
/// flow, or does something at this moment with a cell that it might have. [`NOWHERE`] if there is no room at all.
///
/// If no cell is free, a flow goes ("Room", above).
#[inline(always)]
pub fn hold<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    let place = key.place();
    let mask = memory.mask();
    let mut goes = NOWHERE;
    // The head of the flow that goes: by the time it does, another one may have its cell.
    let mut going = Head(0);
    let mut first = 0;
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
            return take(memory, key, index, head);
        }
        let rank = State(line.load_after(STATE, head.0)).rank(head.protocol(), now);
        if rank > first {
            first = rank;
            goes = index;
            going = head;
        }
        if rank == State::GIVES_WAY {
            break;
        }
        nth += 1;
    }
    let Some(line) = memory.cell(goes) else {
        return NOWHERE;
    };
    if !memory.remove(goes, going) {
        return BUSY;
    }
    if first != State::GIVES_WAY {
        memory.pushed_out();
    }
    take(memory, key, goes, Head(line.load(HEAD)))
}

/// How often a cell is tried to be held while somebody else holds it: some microseconds, where making a flow takes one.
const PATIENCE: u32 = 256;

/// Takes a cell for a flow that was not found: then it is held. If another CPU makes the same flow meanwhile, that
/// one's cell, and [`MADE`]. [`BUSY`] if it has not come to an end for too long; [`NOWHERE`] if there is no room.
#[inline(always)]
pub fn hold_or_find<M: Memory>(memory: &M, key: &FlowKey, now: Tick) -> u32 {
    let mut tries = 0;
    while tries < PATIENCE {
        let index = memory.hold(key, now);
        if index != BUSY {
            return index;
        }
        if let Some((index, _)) = find(memory, key) {
            return index | MADE;
        }
        tries += 1;
    }
    BUSY
}

/// Takes a free cell, and counts it at the key's home if it is not that.
#[inline(always)]
fn take<M: Memory>(memory: &M, key: &FlowKey, index: u32, head: Head) -> u32 {
    let place = key.place();
    let Some(line) = memory.cell(index) else {
        return NOWHERE;
    };
    if !head.is_free() || !line.exchange(HEAD, head.0, head.held().0) {
        return BUSY;
    }
    let home = place & memory.mask();
    let Some(line) = memory.cell(home) else {
        return NOWHERE;
    };
    // Counted before the flow is there: who sees the count without it looks in vain, who saw it without the count would
    // not look.
    let before = if index == home {
        head
    } else if Head(line.load(HEAD)).counts() {
        Head(line.add(HEAD, Head::ONE_MORE))
    } else {
        Head(line.load(HEAD))
    };
    // Of two that make the same flow in different cells, as one of those that the other passed has become free, at least
    // one sees the other here, and gives up. Both count at the home, or one has it: whoever comes second sees
    // that, as it was in the same instruction.
    let second = before.has_more() && is_wanted(memory, place, index, key);
    let has_home = index != home && (before.is_held() || has(line, before, key));
    if second || has_home {
        give_back(memory, index, key);
        return BUSY;
    }
    index
}

/// Whether another of the key's cells has its flow, or is held, perhaps for it.
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

/// Writes what a held cell is to have.
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

/// Writes how far a held cell's flow has got ([`tcp::begin`]; zeros if nothing is known).
#[inline(always)]
pub fn write_sequences<M: Memory>(memory: &M, index: u32, sequences: &Sequences) {
    if let Some(line) = memory.sequences(index) {
        line.store(tcp::POSITIONS, sequences[tcp::POSITIONS]);
        line.store(tcp::OPENING, sequences[tcp::OPENING]);
    }
}

/// The flow of a held cell is there.
#[inline(always)]
pub fn publish<L: Line>(line: L, key: &FlowKey) {
    line.add(HEAD, Head::made(key.word(HEAD)));
}

/// Gives back a held cell that no slot leads to.
#[inline(always)]
pub fn give_back<M: Memory>(memory: &M, index: u32, key: &FlowKey) {
    if let Some(line) = memory.cell(index) {
        let home = key.place() & memory.mask();
        if index != home
            && let Some(home) = memory.cell(home)
        {
            one_less(home);
        }
        line.add(HEAD, Head::FREED);
    }
}

/// How often an exchange is tried: it fails only if another CPU did something with the word meanwhile.
const TRIES: u32 = 3;

/// A flow whose home this is has left where it was.
#[inline(always)]
fn one_less<L: Line>(home: L) {
    let mut tries = 0;
    while tries < TRIES {
        let head = Head(home.load(HEAD));
        // With one too many, a search in vain takes longer.
        if !head.has_more()
            || !head.counts()
            || home.exchange(HEAD, head.0, head.0.wrapping_sub(Head::ONE_MORE))
        {
            return;
        }
        tries += 1;
    }
}

/// Which slot is the home of a flow's replies.
#[inline(always)]
pub fn place_of_replies(key: &FlowKey, value: &Translation) -> u32 {
    if value.node_addr == 0 {
        FlowKey::new(
            value.endpoint,
            value.endpoint_port,
            key.src,
            value.seen_port(key),
            key.protocol,
        )
        .place()
    } else {
        PortKey::new(
            value.endpoint,
            value.endpoint_port,
            value.node_port,
            key.protocol,
        )
        .place()
    }
}

/// Whether the flow of a cell whose head was read gives way. The state is read after the head: otherwise it could be an
/// earlier flow's.
#[inline(always)]
fn gives_way<L: Line>(line: L, head: Head, now: Tick) -> bool {
    State(line.load_after(STATE, head.0)).gives_way(head.protocol(), now)
}

/// Whether the home slot of replies leads to a flow that does not give way.
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
    head.key().is_none() || !gives_way(line, head, now)
}

/// Has a slot lead to a held cell; `false` if there is none, or, with `only_home`, if the home leads elsewhere.
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
        if head.key().is_some() && gives_way(line, head, now) {
            memory.remove(other, head);
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

/// No slot leads to a held cell any longer.
#[inline(always)]
fn mislead<M: Memory>(memory: &M, place: u32, index: u32) {
    let mask = memory.slots();
    let mut nth = 0;
    while nth <= OTHERS {
        if let Some(entry) = memory.slot(candidate(place, nth) & mask)
            && entry.load().leads_to(index)
        {
            // Nobody else frees it; others may be counted in it.
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

/// Removes the flow of a cell whose head was read; `false` if somebody else did something with it.
#[inline(always)]
pub fn remove<M: Memory>(memory: &M, index: u32, head: Head) -> bool {
    let Some(line) = memory.cell(index) else {
        return false;
    };
    let Some(ports_and_protocol) = head.key() else {
        return false;
    };
    if !hold_flow(line, head) {
        return false;
    }
    forget(memory, index, ports_and_protocol);
    true
}

/// Takes a cell from its flow, whose head was read: then it is held. `false` if somebody else did something with it.
///
/// Who holds it may [`forget`] the flow, or [`publish`] it again.
#[inline(always)]
pub fn hold_flow<L: Line>(line: L, head: Head) -> bool {
    head.key().is_some() && line.exchange(HEAD, head.0, head.held().0)
}

/// Frees a cell that was held when its head was read and that nobody will give back, as whoever held it is dead; and
/// what slot leads to it. `false` if it is not held like that any longer.
///
/// Whose flow it was to be is not known: where it was counted, it stays so, and searches in vain take longer.
pub fn free_held<M: Memory>(memory: &M, index: u32, head: Head) -> bool {
    let Some(line) = memory.cell(index) else {
        return false;
    };
    let now = Head(line.load(HEAD));
    if !head.is_held() || !now.is_same(head) {
        return false;
    }
    for place in 0..=memory.slots() {
        if let Some(entry) = memory.slot(place)
            && entry.load().leads_to(index)
        {
            entry.add((index + 1).wrapping_neg());
        }
    }
    line.add(HEAD, Head::FREED);
    true
}

/// Gives back a held cell that has a flow, and its slot.
#[inline(always)]
pub fn forget<M: Memory>(memory: &M, index: u32, ports_and_protocol: u64) {
    let Some(line) = memory.cell(index) else {
        return;
    };
    let (key, value) = (key(line, ports_and_protocol), value(line));
    if value.seen & seen::FOREIGN == 0 {
        mislead(memory, place_of_replies(&key, &value), index);
    }
    give_back(memory, index, &key);
}

impl Snapshot {
    /// Whether it is the flow of a reply to a client, which is not masqueraded.
    #[inline(always)]
    pub fn is_answered_by(&self, reply: &FlowKey) -> bool {
        let [first, second, .., head, _, _, state] = self.words;
        // `Translation::seen_port`, without a branch: the client's own port counts if no other is given.
        let given = state >> 16 & 0xffff;
        let port = given | ((head & 0xffff) * (given.wrapping_sub(1) >> 63));
        let differ = (first ^ reply.word(2))
            | (second ^ reply.word(3))
            | (self.words[VALUE] ^ reply.word(0))
            | (self.words[VALUE + 1] ^ reply.word(1))
            | port ^ u64::from(reply.dst_port.be())
            | (head >> 32 ^ u64::from(reply.protocol.number())) & 0xff
            | (state ^ u64::from(reply.src_port.be())) & 0xffff
            // Masqueraded.
            | state >> 56;
        differ == 0
    }

    /// Whether it is the flow of a reply to one of the node's ports: at whatever address of the node's.
    #[inline(always)]
    pub fn is_answered_by_port(&self, reply: &PortKey) -> bool {
        let [.., head, _, _, state] = self.words;
        let ports = u64::from(reply.endpoint_port.be()) | u64::from(reply.node_port.be()) << 16;
        let differ = (self.words[VALUE] ^ reply.word(0))
            | (self.words[VALUE + 1] ^ reply.word(1))
            | (head >> 32 ^ u64::from(reply.protocol.number())) & 0xff
            | (state ^ ports) & 0xffff_ffff;
        differ == 0 && state >> 56 != 0
    }
}

/// The cell that a slot leads to, if it has a flow, and what it holds.
#[inline(always)]
fn led_to<M: Memory>(memory: &M, slot: Slot) -> Option<(u32, Snapshot)> {
    let index = slot.cell()? & memory.mask();
    Some((index, read(memory.cell(index)?)?))
}

/// The cell of the flow of a reply to a client, which is not masqueraded, and what it holds.
#[inline(always)]
pub fn find_by_client<M: Memory>(memory: &M, reply: &FlowKey) -> Option<(u32, Snapshot)> {
    let slot = memory.slot(reply.place() & memory.slots())?.load();
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

/// The cell of the flow of a reply to one of the node's ports, at whatever address, and what it holds.
#[inline(always)]
pub fn find_by_node<M: Memory>(memory: &M, reply: &PortKey) -> Option<(u32, Snapshot)> {
    let slot = memory.slot(reply.place() & memory.slots())?.load();
    led_to(memory, slot).filter(|(_, found)| found.is_answered_by_port(reply))
}

/// Which cell has the flow of a reply to a client, if its home slot does not lead there; or [`NOWHERE`].
#[inline(always)]
pub fn find_led_elsewhere<M: Memory>(memory: &M, reply: &FlowKey) -> u32 {
    let place = reply.place();
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

const _: () = assert!(size_of::<Cell>() == 64);

#[cfg(any(test, feature = "user"))]
mod atomics;
#[cfg(any(test, feature = "user"))]
pub use atomics::AtomicSlot;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
