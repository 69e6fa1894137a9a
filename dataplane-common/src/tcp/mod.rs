//! TCP flows: how far each direction has got, so that only the connection's own segments can end its flow.
//!
//! `SEQUENCES` has two words for each cell of `CONNTRACK`. The first holds a position for each direction: a sequence
//! number that lies at most [`NEAR`] bytes before the end of the latest segment. A program writes a position only
//! when a segment lies farther ahead than that, so a packet of a known flow costs a look at one more word and no store.
//! The second word holds the sequence number of the last SYN, and whether the endpoint owes an answer to it ([`Opening`]).
//! Of a UDP flow, the first word holds the time at which it began.
//!
//! # Which segments count
//!
//! * A **RST** ends the flow if its sequence number is within [`NEAR`] bytes of its direction's position, or if it
//!   acknowledges the last SYN (RFC 9293, section 3.10.7.3). An attacker that knows the addresses and ports hits a
//!   window of 64 KiB, one in 65 536 of all sequence numbers. Any other RST is translated and forwarded, and changes
//!   nothing: the receiver judges it by its exact number (RFC 5961). If the connection goes on, a RST that counted was
//!   forged: the next segment of either side takes the RST back ([`GOES_ON`]). A receiver that finds a RST in its
//!   window, but not at its exact number, sends such a segment at once.
//! * A **FIN**, and any segment that moves a position, must be plausible in two numbers: its end lies less than [`FAR`]
//!   bytes ahead of its direction's position, and its acknowledgement at most [`UNACKNOWLEDGED`] bytes behind the other
//!   direction's and [`AHEAD`] bytes before it. This holds for one in 2^15 of all pairs of numbers. Without this check
//!   an attacker would move the position first, and then reset.
//! * A **FIN** of the client does not count before the endpoint has answered the client's SYN.
//! * The first segment of the endpoint that counts has a **SYN**, if the client's was seen. Before it, an endpoint that
//!   still has an earlier connection from the same port only says that it has one (RFC 5961, section 4.2).
//! * A **SYN** with an ACK begins both directions anew if it acknowledges the last SYN: the endpoint has forgotten the
//!   connection and accepts a new connection from the same port. The earlier connection's FINs then no longer count
//!   ([`ANEW`]).
//!
//! A direction whose position is not known (0: nothing was seen of it since the flow was made or taken over from an
//! older agent) takes the first segment that comes.
//!
//! A connection that loses more than [`FAR`] bytes in a row before they reach this node, and never sends them again one
//! by one, is no longer followed. Its packets are translated as before, and its flow ends by being idle.

#![expect(
    clippy::cast_possible_truncation,
    reason = "words are taken apart: what is cut off is another field"
)]

use crate::{
    cells::Line,
    packet::{STREAM_AFTER, Tick},
    seen,
};

/// The element of `SEQUENCES` that belongs to a cell: [`Positions`], then [`Opening`].
pub type Sequences = [u64; 2];

/// The word that holds the [`Positions`].
pub const POSITIONS: usize = 0;
/// The word that holds the [`Opening`].
pub const OPENING: usize = 1;

/// How many bytes a position may lie behind: half the window in which a RST counts.
pub const NEAR: u32 = 1 << 15;
/// How many bytes a plausible segment may lie ahead of its direction's position: as many may be lost in a row.
pub const FAR: u32 = 1 << 24;
/// How many bytes of the other direction a plausible segment may leave unacknowledged: at least the window that Linux
/// opens by default (`net.ipv4.tcp_rmem`, 32 MiB since Linux 6.16).
pub const UNACKNOWLEDGED: u32 = 1 << 25;
/// How many bytes it may acknowledge beyond the other direction's position, which lags behind by [`NEAR`], or by a packet
/// of BIG TCP whose position was not written.
pub const AHEAD: u32 = 1 << 20;

/// The flag that [`judge`] adds to [`seen`] if the flow begins anew: earlier flags belong to another connection.
pub const ANEW: u8 = 1 << 7;
/// The flag that [`judge`] adds for a segment near the position of its direction: the connection goes on, so a RST that
/// was seen before was not its own. Otherwise its receiver would be silent.
pub const GOES_ON: u8 = 1 << 6;

/// For how many ticks an endpoint may owe an answer, twice ([`ask`]): 4.3 to 8.6 s each.
const OWES: u32 = 2;

/// TCP's flags (RFC 9293, section 3.1), in its 14th byte.
pub mod flags {
    /// The sender has no more data.
    pub const FIN: u8 = 1;
    /// The sender begins a connection.
    pub const SYN: u8 = 2;
    /// The sender knows no such connection, or gives it up.
    pub const RST: u8 = 4;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 16;
}

/// The fields of a packet that say how far its connection is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The sequence number behind its last byte, SYN and FIN not counted.
    pub end: u32,
    /// The acknowledgement number.
    pub ack: u32,
    /// Its [`flags`]; 0 for datagrams, which carry none.
    pub flags: u32,
}

impl Segment {
    /// A packet that an ICMP error quotes: it was sent some time ago. No packet has this flag on the wire. Forged
    /// packets get the flag, too. So does every fragment except the first, because the flow has learnt everything from
    /// the first fragment.
    pub const QUOTED: Self = Self {
        end: 0,
        ack: 0,
        flags: 1 << 8,
    };

    /// Whether it is such a packet, which proves nothing about its flow.
    #[inline(always)]
    pub const fn is_quoted(&self) -> bool {
        self.flags & Self::QUOTED.flags != 0
    }

    /// Whether it has one of these [`flags`].
    #[inline(always)]
    pub const fn has(&self, flags: u8) -> bool {
        self.flags & flags as u32 != 0
    }
}

/// The positions of both directions: requests in the lower half, replies in the upper one. 0 stands for unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[must_use]
pub struct Positions(pub u64);

impl Positions {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self(0);

    #[inline(always)]
    const fn of(self, replies: bool) -> u32 {
        if replies {
            (self.0 >> 32) as u32
        } else {
            self.0 as u32
        }
    }

    #[inline(always)]
    const fn with(self, replies: bool, position: u32) -> Self {
        // Never "unknown".
        let position = if position == 0 { 1 } else { position } as u64;
        if replies {
            Self(self.0 & 0xffff_ffff | position << 32)
        } else {
            Self(self.0 & !0xffff_ffff | position)
        }
    }

    /// Whether a segment without SYN, FIN and RST changes nothing: it is near the position of its direction.
    #[inline(always)]
    pub const fn is_near(self, replies: bool, end: u32) -> bool {
        let position = self.of(replies);
        position != 0 && is_within(end, position, NEAR, NEAR)
    }

    /// Whether a segment from the client acknowledges the endpoint's answer: only its receiver knows the number.
    #[inline(always)]
    pub const fn are_acknowledged_by(self, segment: &Segment) -> bool {
        let position = self.of(true);
        segment.has(flags::ACK)
            && !segment.has(flags::SYN | flags::RST)
            && position != 0
            && is_within(segment.ack, position, NEAR, NEAR)
    }

    /// Whether a segment that carries data or a FIN is one of the connection's own.
    #[inline(always)]
    const fn is_plausible(self, replies: bool, segment: &Segment) -> bool {
        let (own, other) = (self.of(replies), self.of(!replies));
        (own == 0 || is_within(segment.end, own, NEAR, FAR))
            && (other == 0
                || segment.has(flags::ACK) && is_within(segment.ack, other, UNACKNOWLEDGED, AHEAD))
    }
}

/// Whether a sequence number lies at most `before` bytes before or `behind` bytes behind the number `of`. Sequence
/// numbers wrap.
#[inline(always)]
const fn is_within(number: u32, of: u32, before: u32, behind: u32) -> bool {
    number.wrapping_sub(of).wrapping_add(before) <= before + behind
}

/// The number of the last SYN, in the lower half; 0 stands for unknown. Above it are 18 bits that are 0 unless the endpoint owes
/// an answer ([`ask`]): since which tick (16 bits), and how often it was asked (2 bits). The next bit says that the endpoint is
/// no longer the service's ([`depart`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[must_use]
pub struct Opening(pub u64);

impl Opening {
    /// The word after a SYN.
    #[inline(always)]
    const fn of(self, syn: &Segment) -> Self {
        let number = if syn.end == 0 { 1 } else { syn.end };
        Self(self.0 & !0xffff_ffff | number as u64)
    }

    /// Whether the endpoint owes an answer.
    #[inline(always)]
    pub const fn is_asked(self) -> bool {
        self.0 >> 32 & 0x3_ffff != 0
    }

    /// Since when, and how often it was asked.
    #[inline(always)]
    const fn asked(self) -> (Tick, u32) {
        (
            Tick::from_number((self.0 >> 32) as u16),
            (self.0 >> 48) as u32 & 3,
        )
    }

    /// The word when the endpoint is asked for the `nth` time; 0: it owes nothing.
    #[inline(always)]
    const fn with_asked(self, now: Tick, nth: u32) -> Self {
        let others = self.0 & (0xffff_ffff | DEPARTED);
        if nth == 0 {
            return Self(others);
        }
        Self(others | (now.number() as u64) << 32 | (nth as u64) << 48)
    }

    /// Whether the segment answers the last SYN. (The SYN itself counts as one byte, and its data may be acknowledged
    /// or not: TCP Fast Open.)
    #[inline(always)]
    const fn is_answered_by(self, segment: &Segment) -> bool {
        let number = self.0 as u32;
        number != 0 && segment.has(flags::ACK) && is_within(segment.ack, number, NEAR, 1)
    }
}

/// The words of `SEQUENCES` after the first packet of a flow. For a datagram, the time (CLOCK_MONOTONIC, nanoseconds).
#[inline(always)]
pub const fn begin(first: &Segment, now: u64) -> Sequences {
    if first.flags == 0 || first.is_quoted() {
        return [now, 0];
    }
    if !first.has(flags::SYN) {
        return [0, 0];
    }
    let positions = Positions::UNKNOWN.with(false, first.end);
    [positions.0, Opening(0).of(first).0]
}

/// In [`Opening`]: the endpoint is no longer among the service's.
pub const DEPARTED: u64 = 1 << 50;

/// Whether a UDP flow that was answered is a stream: in use, `now`, for longer than [`STREAM_AFTER`].
#[inline(always)]
pub fn is_stream<L: Line>(sequences: L, now: u64) -> bool {
    now.wrapping_sub(sequences.load(POSITIONS)) > STREAM_AFTER
}

/// Records that the service of a flow no longer lists its endpoint. The address may belong to another pod by now, so no
/// SYN goes there any more.
#[inline(always)]
pub fn depart<L: Line>(sequences: L) {
    let mut tries = 0;
    while tries < TRIES {
        let before = sequences.load(OPENING);
        if sequences.exchange(OPENING, before, before | DEPARTED) {
            return;
        }
        tries += 1;
    }
}

/// How often a position is tried to be written: it fails only if another CPU wrote the other direction's meanwhile.
const TRIES: u32 = 3;

/// Decides about a client's SYN on a live connection whose endpoint takes no new ones. A live endpoint answers any SYN,
/// even a forged one: it takes the SYN, refuses it, or challenges it (RFC 5961, section 4.2). So the SYN goes there,
/// until the endpoint has been silent for some seconds, twice. Returns whether it has, or is no longer the service's.
///
/// Twice, because Linux challenges only once in half a second (`net.ipv4.tcp_invalid_ratelimit`): an attacker's first
/// SYN would use that up, and the second would find the endpoint silent.
#[inline(always)]
pub fn ask<L: Line>(sequences: L, now: Tick) -> bool {
    let opening = Opening(sequences.load(OPENING));
    if opening.0 & DEPARTED != 0 {
        return true;
    }
    let (since, nth) = opening.asked();
    if nth != 0 && since.ticks_before(now) < OWES {
        return false;
    }
    if nth >= 2 {
        return true;
    }
    sequences.exchange(OPENING, opening.0, opening.with_asked(now, nth + 1).0);
    false
}

/// Judges a segment that is not near its direction's position ([`Positions::is_near`]), and writes the positions that
/// the segment changes. Returns the bits that the segment adds to [`seen`], together with [`ANEW`] and [`GOES_ON`] if
/// they apply; 0 if the segment does not count at all.
#[inline(always)]
pub fn judge<L: Line>(sequences: L, replies: bool, segment: &Segment) -> u8 {
    let opening = Opening(sequences.load(OPENING));
    if segment.has(flags::SYN) && !segment.has(flags::ACK | flags::RST) {
        if !replies && opening.of(segment) != opening {
            sequences.exchange(OPENING, opening.0, opening.of(segment).0);
        }
        return seen::PACKET;
    }
    let mut counts = seen::PACKET;
    let mut tries = 0;
    while tries < TRIES {
        let before = Positions(sequences.load(POSITIONS));
        let own = before.of(replies);
        if segment.has(flags::RST) {
            let answers = replies && opening.is_answered_by(segment);
            // No position is known to compare it with.
            let anything = own == 0 && (!replies || opening.0 as u32 == 0);
            return if answers || anything || before.is_near(replies, segment.end) {
                seen::PACKET | seen::RST
            } else {
                0
            };
        }
        let anew = replies && segment.has(flags::SYN) && opening.is_answered_by(segment);
        if replies && own == 0 && opening.0 as u32 != 0 && !segment.has(flags::SYN) {
            return 0;
        }
        // Before the endpoint's answer, no number shows whether the client has sent the FIN.
        let is_early =
            !replies && segment.has(flags::FIN) && before.of(true) == 0 && opening.0 as u32 != 0;
        if is_early || !anew && !before.is_plausible(replies, segment) {
            return seen::PACKET;
        }
        let mut after = before;
        counts = seen::PACKET | GOES_ON;
        if replies && opening.is_asked() {
            let answered = opening.with_asked(Tick::default(), 0);
            sequences.exchange(OPENING, opening.0, answered.0);
        }
        if !before.is_near(replies, segment.end) {
            after = before.with(replies, segment.end);
            // A repeated answer changes nothing.
            if anew {
                counts |= ANEW;
            }
        }
        if anew && !after.is_near(false, segment.ack) {
            after = after.with(false, segment.ack);
        }
        if after == before || sequences.exchange(POSITIONS, before.0, after.0) {
            break;
        }
        tries += 1;
    }
    if segment.has(flags::FIN) {
        counts | seen::FIN
    } else {
        counts
    }
}

const _: () = assert!(size_of::<Segment>() == 12 && size_of::<Sequences>() == 16);

#[cfg(test)]
mod tests;
