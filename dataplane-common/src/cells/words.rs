//! The bits of a cell and of a slot.

#![expect(
    clippy::cast_possible_truncation,
    reason = "words are taken apart: what is cut off is another field"
)]

use crate::{
    Addr, Port, Protocol,
    packet::{FlowKey, Tick, Translation},
    seen,
};

/// A cell: the flow's addresses (client, VIP), the [`Head`], the value ([`Translation`]).
pub type Cell = [u64; 8];
/// Sixteen slots.
pub type Slots = [u32; 16];

/// The index of the word of a cell that is its head.
pub const HEAD: usize = 4;
/// The index of the first word of a cell's value.
pub(super) const VALUE: usize = HEAD + 1;
/// The word that changes while the flow is there.
pub const STATE: usize = 7;

const _: () = assert!(size_of::<Cell>() == 64);

/// How many cells so many flows get.
pub const fn cells_for(flows: u32) -> u32 {
    // A slot's number has room for no more cells.
    let cells = flows.next_power_of_two() << 1;
    if cells > Slot::CELLS {
        Slot::CELLS
    } else {
        cells
    }
}

/// The head of a cell: ports and protocol as in the key, or a [`Holder`] (40 bits, 0: free); the number of flows that
/// are elsewhere although this cell is their home (8 bits); and a number (16 bits) that increases each time that a
/// holder gives the cell back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Head(pub u64);

impl Head {
    pub(super) const KEY: u64 = (1 << 40) - 1;
    /// In the protocol's place, no protocol of ours: the cell is held.
    pub(super) const HELD: u64 = 0xff << 32;
    pub(super) const ONE_MORE: u64 = 1 << 40;
    pub(super) const MORE: u64 = 0xff << 40;
    /// At this count or more the count stays as it is: flows are looked for elsewhere from then on.
    pub(super) const MANY: u64 = 1 << 47;
    pub(super) const NUMBER: u64 = 1 << 48;

    /// Whether the cell is free.
    #[inline(always)]
    pub const fn is_free(self) -> bool {
        self.0 & Self::KEY == 0
    }

    /// Whether a holder is making or removing its flow.
    #[inline(always)]
    pub const fn is_held(self) -> bool {
        self.0 & Self::HELD == Self::HELD
    }

    /// Returns its holder, if the cell is held.
    #[inline(always)]
    pub const fn holder(self) -> Option<Holder> {
        if self.is_held() {
            Some(Holder(self.0 & Self::KEY))
        } else {
            None
        }
    }

    /// Whether its flow has these ports and this protocol ([`super::CellKey::word`]).
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
    pub const fn protocol(self) -> Protocol {
        Protocol::from_number((self.0 >> 32) as u8)
    }

    /// Whether flows whose home this is are elsewhere.
    #[inline(always)]
    pub const fn has_more(self) -> bool {
        self.0 & Self::MORE != 0
    }

    pub(super) const fn counts(self) -> bool {
        self.0 & Self::MANY == 0
    }

    /// The head of the same cell once `holder` has it.
    pub(super) const fn held(self, holder: Holder) -> Self {
        Self(self.0 & !Self::KEY | holder.0)
    }

    /// The head of a held cell when its holder releases it: with a flow's ports and protocol, or free (0).
    pub(super) const fn given_back(self, ports_and_protocol: u64) -> Self {
        Self((self.0 & !Self::KEY | ports_and_protocol).wrapping_add(Self::NUMBER))
    }

    /// Whether both heads belong to the same flow, without regard to the count of flows elsewhere.
    pub const fn is_same(self, other: Self) -> bool {
        (self.0 ^ other.0) & !Self::MORE == 0
    }
}

/// The holder of a cell, and since when: a processor, or a process of user space, in 16 bits, and the [`Tick`].
///
/// A program runs for less than a tick, and user space holds a cell for less than a tick. So a cell that has been held
/// for `Holder::DEAD` ticks belongs to a holder that died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder(u64);

impl Holder {
    /// The number of processes in user space.
    pub const USER: u16 = u16::MAX;
    /// A live holder never holds a cell for so many ticks: at least 8.6 s.
    const DEAD: u32 = 3;

    /// A holder, by its number.
    #[inline(always)]
    pub const fn new(number: u16, now: Tick) -> Self {
        Self(Head::HELD | (number as u64) << 16 | now.number() as u64)
    }

    /// Whether the holder must be dead by now.
    pub const fn is_dead(self, now: Tick) -> bool {
        Tick::from_number(self.0 as u16).ticks_before(now) >= Self::DEAD
    }
}

/// A slot: which cell (25 bits, 0: none, else the cell's index plus one), and how many cells whose home slot this is
/// have another slot (7 bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Slot(pub u32);

impl Slot {
    pub(super) const NUMBER: u32 = (1 << 25) - 1;
    pub(super) const ONE_MORE: u32 = 1 << 25;
    pub(super) const MANY: u32 = 1 << 31;
    /// The most cells that a slot can name.
    pub(super) const CELLS: u32 = 1 << 24;

    /// Returns the cell that the slot leads to; `None`: the slot is free.
    #[inline(always)]
    pub const fn cell(self) -> Option<u32> {
        (self.0 & Self::NUMBER).checked_sub(1)
    }

    #[inline(always)]
    pub(super) const fn leads_to(self, cell: u32) -> bool {
        self.0 & Self::NUMBER == cell + 1
    }

    /// Whether some cells whose home slot this is have other slots.
    #[inline(always)]
    pub const fn has_more(self) -> bool {
        self.0 & !Self::NUMBER != 0
    }

    pub(super) const fn leading_to(self, cell: u32) -> Self {
        Self(self.0 & !Self::NUMBER | (cell + 1))
    }

    pub(super) const fn counts(self) -> bool {
        self.0 & Self::MANY == 0
    }
}

/// The last word of a cell: ports, the time of the last use, and the observations of packets ([`crate::seen`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct State(pub u64);

impl State {
    /// The bits of the state for flags of [`seen`].
    #[inline(always)]
    pub const fn bits(flags: u8) -> u64 {
        (flags as u64) << 48
    }

    /// The state, used at another time.
    #[inline(always)]
    pub const fn used_at(self, now: Tick) -> Self {
        Self(self.0 & !(0xffff << 32) | (now.number() as u64) << 32)
    }

    /// The state after a packet that adds flags of [`seen`]. The flags `forgotten`, which were seen before, no longer
    /// count.
    #[inline(always)]
    pub const fn with_packet(self, flags: u8, forgotten: u8, now: Tick) -> Self {
        let state = self.used_at(now).0 & !Self::bits(forgotten);
        Self(state | Self::bits(flags))
    }

    /// The state of a flow that begins anew: one request was seen, and nothing else.
    #[inline(always)]
    pub const fn anew(self, now: Tick) -> Self {
        Self(self.used_at(now).0 & !Self::bits(0xff) | Self::bits(seen::PACKET))
    }

    #[inline(always)]
    pub(super) const fn used(self) -> Tick {
        Tick::from_number((self.0 >> 32) as u16)
    }

    /// The packets that the flow has had: bits of [`seen`].
    #[inline(always)]
    pub const fn seen(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// Whether the flow has been over for so long that a new one may replace it: reset or closed by both sides, and
    /// quiet for 4 to 9 seconds, in which lost last packets were sent again; or idle for longer than its timeout
    /// (`keep` seconds). Only the agent can ask how long the kernel's own conntrack keeps its flows.
    #[inline(always)]
    pub const fn gives_way(self, keep: u32, now: Tick) -> bool {
        if self.seen() & seen::FOREIGN != 0 {
            return false;
        }
        if seen::is_ended(self.seen()) && self.used().ticks_before(now) >= 2 {
            return true;
        }
        self.used().age_seconds(now) > keep
    }

    /// Ranks a live flow for eviction (`room.rs`), never 0. A flow ranked [`Self::PROTECTED`] or less is evicted only
    /// for the excess of its own client.
    #[inline(always)]
    pub(super) const fn rank(self, protocol: Protocol, now: Tick) -> u32 {
        let seen = self.seen();
        // Connections that the kernel's conntrack translated before the agent came: the endpoint has answered them.
        let class = if seen & (seen::in_replies(seen::PACKET) | seen::FOREIGN) == 0 {
            3
        } else if seen & (seen::ASSURED | seen::FOREIGN) == 0 || seen::is_ended(seen) {
            2
        } else if protocol.number() != Protocol::TCP.number() {
            1
        } else {
            0
        };
        class << Self::CLASS | (self.used().ticks_before(now) + 1)
    }

    /// From this bit on a rank tells the class of the flow's packets so far; the bits below [`Self::CROWD`] tell how
    /// long it was idle.
    const CLASS: u32 = 18;
    /// Within a class, a flow of the client that has most of the cells goes first.
    pub(super) const CROWD: u32 = 1 << 17;
    /// The lowest rank of a flow that is not assured.
    pub(super) const UNASSURED: u32 = 2 << Self::CLASS;
    /// The highest rank of an established TCP connection.
    pub(super) const PROTECTED: u32 = (1 << Self::CLASS) - 1;
}

/// A flow's value, as the words of a cell.
#[inline(always)]
pub(super) fn words(value: &Translation) -> [u64; 3] {
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

#[inline(always)]
pub(super) const fn half(addr: Addr, index: usize) -> u64 {
    let words = addr.words();
    words[index * 2] as u64 | (words[index * 2 + 1] as u64) << 32
}

#[inline(always)]
pub(super) const fn addr(first: u64, second: u64) -> Addr {
    Addr::from_words([
        first as u32,
        (first >> 32) as u32,
        second as u32,
        (second >> 32) as u32,
    ])
}

#[inline(always)]
pub(super) const fn value_of([first, second, state]: [u64; 3]) -> Translation {
    Translation {
        endpoint: addr(first, second),
        endpoint_port: Port::from_be(state as u16),
        node_port: Port::from_be((state >> 16) as u16),
        used: State(state).used(),
        seen: State(state).seen(),
        node_addr: (state >> 56) as u8,
    }
}

#[inline(always)]
pub(super) const fn key_of(words: [u64; 4], ports_and_protocol: u64) -> FlowKey {
    FlowKey::new(
        addr(words[0], words[1]),
        Port::from_be(ports_and_protocol as u16),
        addr(words[2], words[3]),
        Port::from_be((ports_and_protocol >> 16) as u16),
        Protocol::from_number((ports_and_protocol >> 32) as u8),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_twice_as_many_cells_as_flows() {
        for (flows, cells) in [
            (0, 2),
            (1, 2),
            (3, 8),
            (65_536, 131_072),
            (65_537, 262_144),
            (1 << 23, 1 << 24),
            (1 << 24, 1 << 24),
            (1 << 30, 1 << 24),
        ] {
            assert_eq!(cells_for(flows), cells, "{flows}");
        }
    }

    #[test]
    fn a_holder_is_dead_after_three_ticks() {
        let holder = Holder::new(Holder::USER, Tick::from_number(u16::MAX));
        let is_dead = |now| holder.is_dead(Tick::from_number(now));
        assert!(!is_dead(u16::MAX) && !is_dead(1) && is_dead(2) && is_dead(1000));
        let head = Head(5 * Head::NUMBER).held(holder);
        assert!(head.is_held() && head.holder() == Some(holder));
        let other = Holder::new(8, Tick::from_number(u16::MAX));
        assert_ne!(other, holder);
        // Half of the bits of a holder belong to a protocol, if to any.
        let flow = Head((0x7f << 32) | 0x50);
        assert!(!flow.is_held() && flow.key().is_some() && flow.holder().is_none());
    }

    #[test]
    fn a_count_stops_at_128() {
        let mut head = Head(Head::NUMBER);
        let mut slot = Slot(9);
        for count in 0..128 {
            assert!(head.counts() && head.has_more() == (count != 0), "{count}");
            head = Head(head.0 + Head::ONE_MORE);
        }
        for count in 0..64 {
            assert!(slot.counts() && slot.has_more() == (count != 0), "{count}");
            slot = Slot(slot.0 + Slot::ONE_MORE);
        }
        assert!(!head.counts() && !slot.counts() && slot.cell() == Some(8));
        assert!(head.is_same(Head(Head::NUMBER)) && !head.is_same(Head(2 * Head::NUMBER)));
    }

    #[test]
    fn slots_name_cells() {
        for cell in [0, 1, 6, Slot::CELLS - 1] {
            let slot = Slot(3 * Slot::ONE_MORE).leading_to(cell);
            assert_eq!((slot.cell(), slot.has_more()), (Some(cell), true));
            assert!(slot.leads_to(cell) && !slot.leads_to(cell + 1) && !slot.leads_to(cell ^ 1));
            assert_eq!(Slot(0).leading_to(cell).0, cell + 1);
        }
        assert!(Slot(0).cell().is_none() && !Slot(0).has_more() && !Slot(0).leads_to(0));
    }

    /// A state with all ports, at tick 7.
    fn state(seen: u8) -> State {
        State(0xab << 56 | State::bits(seen) | 7 << 32 | 0x1234_5678)
    }

    #[test]
    fn packets_change_flags_and_time() {
        let now = Tick::from_number(0x0108);
        let (fin, rst) = (seen::FIN, seen::RST);
        let before = state(seen::PACKET | fin);
        assert_eq!(
            (before.used().number(), before.seen()),
            (7, seen::PACKET | fin)
        );
        let word = |seen: u64| State(0xab00_0108_1234_5678 | seen << 48);
        assert_eq!(before.used_at(now), word(3));
        assert_eq!(before.with_packet(rst, 0, now), word(7));
        assert_eq!(before.with_packet(fin, 0, now), word(3));
        assert_eq!(before.with_packet(rst, fin, now), word(5));
        assert_eq!(before.with_packet(fin, fin, now), word(3));
        assert_eq!(before.anew(now), word(1));
        assert_eq!(state(0xff).anew(now), word(1));
    }

    #[test]
    fn a_flow_is_over_after_its_timeout() {
        let quiet = state(seen::PACKET | seen::in_replies(seen::PACKET));
        for (now, keep, is_over) in [(8, 5, false), (8, 4, true), (7, 0, false), (8, 0, true)] {
            let now = Tick::from_number(now);
            assert_eq!(quiet.gives_way(keep, now), is_over, "{now:?} {keep}");
        }
    }

    /// Flows from the first to be evicted to the last.
    #[test]
    fn flows_are_ranked() {
        use seen::{ASSURED, FIN, FOREIGN, PACKET, RST, in_replies};
        let (tcp, udp) = (Protocol::TCP, Protocol::UDP);
        let answered = PACKET | in_replies(PACKET);
        let assured = answered | ASSURED;
        let closed = assured | FIN | in_replies(FIN);
        let ranks = [
            (tcp, PACKET, 40),
            (udp, PACKET, 30),
            (tcp, PACKET | RST, 20),
            (udp, answered, 45),
            (tcp, answered, 40),
            (tcp, closed, 30),
            (tcp, assured | RST, 20),
            (udp, assured, 50),
            (udp, PACKET | FOREIGN, 40),
            (udp, assured, 7),
            (tcp, assured, 50),
            (tcp, PACKET | FOREIGN, 40),
            (tcp, assured | FIN, 30),
            (tcp, assured, 7),
        ]
        .map(|(protocol, seen, now)| state(seen).rank(protocol, Tick::from_number(now)));
        assert!(ranks.is_sorted_by(|one, next| one > next), "{ranks:?}");
        assert!(ranks[6] >= State::UNASSURED && ranks[7] < State::UNASSURED);
        assert!(ranks[9] > State::PROTECTED && ranks[10] <= State::PROTECTED);
        assert_eq!(ranks[13], 1, "never 0");
        // The time of three days stays below the bit for a crowd, which stays below the classes.
        let oldest = state(PACKET).rank(tcp, Tick::from_number(5));
        assert!(oldest & State::CROWD == 0 && oldest + State::CROWD < 4 * (State::PROTECTED + 1));
    }
}
