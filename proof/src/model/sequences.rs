//! Tracks how far each direction of a TCP flow has advanced, and decides which segments count.

use dataplane_common::{
    packet::Tick,
    seen,
    tcp::{AHEAD, ANEW, DEPARTED, FAR, GOES_ON, NEAR, Sequences, UNACKNOWLEDGED},
};

use super::read::Headers;
use crate::wire::flags;

/// The sequence numbers of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// The positions of the requests and of the replies.
    pub positions: [Option<u32>; 2],
    /// The sequence number of the last SYN.
    pub syn: Option<u32>,
    /// How many SYNs have probed whether the endpoint is alive, and when the last one did. 0: the endpoint owes no
    /// answer.
    pub asked: (u8, Tick),
    /// Whether the service no longer lists the endpoint.
    pub departed: bool,
}

/// The fields of a TCP segment that matter here.
#[derive(Clone, Copy, Debug)]
struct Segment {
    flags: u8,
    end: u32,
    /// The acknowledgement number, if the segment has the ACK flag.
    ack: Option<u32>,
}

impl Segment {
    fn of(headers: &Headers) -> Option<Self> {
        let (flags, [end, ack]) = (headers.flags?, headers.numbers?);
        (flags != 0).then_some(Self {
            flags,
            end,
            ack: (flags & flags::ACK != 0).then_some(ack),
        })
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// By how many bytes a number is ahead of another number, by the shorter way around the circle of sequence numbers.
fn ahead(number: u32, of: u32) -> i64 {
    i64::from(number.wrapping_sub(of).cast_signed())
}

fn near(number: u32, position: Option<u32>) -> bool {
    position.is_some_and(|position| ahead(number, position).unsigned_abs() <= u64::from(NEAR))
}

/// The number as the table stores it: 0 means "unknown" there, so 0 becomes 1.
fn stored(number: u32) -> u32 {
    number.max(1)
}

impl Numbers {
    /// Returns the state after the first packet of a flow.
    pub fn begun(first: &Headers) -> Self {
        match Segment::of(first) {
            Some(segment) if segment.has(flags::SYN) => Self {
                positions: [Some(stored(segment.end)), None],
                syn: Some(stored(segment.end)),
                ..Self::default()
            },
            _ => Self::default(),
        }
    }

    /// Decodes the words of the kernel's table.
    pub fn read([positions, opening]: Sequences) -> Self {
        let number = |word: u64| u32::try_from(word & 0xffff_ffff).ok().filter(|n| *n != 0);
        Self {
            positions: [number(positions), number(positions >> 32)],
            syn: number(opening),
            asked: (
                u8::try_from(opening >> 48 & 3).unwrap_or_default(),
                Tick::from_number(u16::try_from(opening >> 32 & 0xffff).unwrap_or_default()),
            ),
            departed: opening & DEPARTED != 0,
        }
    }

    /// Encodes the words of the kernel's table.
    pub fn write(self) -> Sequences {
        let number = |number: Option<u32>| u64::from(number.unwrap_or_default());
        let [requests, replies] = self.positions.map(number);
        let (times, since) = self.asked;
        [
            requests | replies << 32,
            number(self.syn)
                | u64::from(since.number()) << 32
                | u64::from(times) << 48
                | if self.departed { DEPARTED } else { 0 },
        ]
    }

    /// Records that a SYN probes an endpoint which takes no new connections. Returns whether the endpoint has departed,
    /// or has left two probes unanswered for some seconds each.
    pub fn ask(&mut self, now: Tick) -> bool {
        if self.departed {
            return true;
        }
        let (times, since) = self.asked;
        if times > 0 && since.ticks_before(now) < 2 {
            return false;
        }
        if times == 2 {
            return true;
        }
        self.asked = (times + 1, now);
        false
    }

    /// Whether a packet from the client acknowledges the endpoint's data.
    pub fn are_acknowledged_by(self, headers: &Headers) -> bool {
        Segment::of(headers).is_some_and(|segment| {
            let acknowledges = segment.ack.is_some_and(|ack| near(ack, self.positions[1]));
            acknowledges && !segment.has(flags::SYN | flags::RST)
        })
    }

    /// Updates the positions, and returns the bits that a packet adds to the `seen` bits of its direction. 0: the
    /// packet does not count. [`ANEW`]: the earlier bits no longer count. [`GOES_ON`]: earlier RSTs no longer count.
    pub fn see(&mut self, headers: &Headers, replies: bool) -> u8 {
        let Some(segment) = Segment::of(headers) else {
            return seen::PACKET;
        };
        let (own, other) = (usize::from(replies), usize::from(!replies));
        let answered = self.syn.zip(segment.ack).is_some_and(|(syn, ack)| {
            let ahead = ahead(ack, syn);
            replies && ahead <= 1 && ahead >= -i64::from(NEAR)
        });
        if segment.has(flags::RST) {
            let anything = self.positions[own].is_none() && (!replies || self.syn.is_none());
            let counts = answered || anything || near(segment.end, self.positions[own]);
            return if counts { seen::PACKET | seen::RST } else { 0 };
        }
        if segment.has(flags::SYN) && segment.ack.is_none() {
            if !replies {
                self.syn = Some(stored(segment.end));
            }
            return seen::PACKET;
        }
        // An endpoint that still has an earlier connection sends a challenge ACK before it answers the SYN.
        if replies && self.positions[1].is_none() && self.syn.is_some() && !segment.has(flags::SYN)
        {
            return 0;
        }
        let anew = answered && segment.has(flags::SYN);
        let far = i64::from(FAR);
        let placed = self.positions[own].is_none_or(|position| {
            let ahead = ahead(segment.end, position);
            ahead >= -i64::from(NEAR) && ahead <= far
        });
        let acknowledges = self.positions[other].is_none_or(|position| {
            let ack = segment.ack;
            let limits = -i64::from(UNACKNOWLEDGED)..=i64::from(AHEAD);
            ack.is_some_and(|ack| limits.contains(&ahead(ack, position)))
        });
        // Most segments lie near their direction's position. For such a segment the programs do not check the
        // acknowledgement.
        let plain = near(segment.end, self.positions[own]) && !segment.has(flags::SYN | flags::FIN);
        let own_segment = anew || placed && acknowledges;
        // But if the endpoint owes a reply, the programs check the acknowledgement of the reply.
        let plain = plain && (own_segment || !replies || self.asked.0 == 0);
        if replies && own_segment {
            self.asked = Default::default();
        }
        if plain {
            return seen::PACKET | GOES_ON;
        }
        // Linux's conntrack takes a FIN in the state SYN_SENT for invalid.
        let unanswered = self.syn.is_some() && self.positions[1].is_none();
        let early = unanswered && !replies && segment.has(flags::FIN);
        if early || !own_segment {
            return seen::PACKET;
        }
        let mut counts = seen::PACKET | GOES_ON;
        if !near(segment.end, self.positions[own]) {
            self.positions[own] = Some(stored(segment.end));
            if anew {
                counts |= ANEW;
            }
        }
        if let Some(ack) = segment.ack
            && anew
            && !near(ack, self.positions[other])
        {
            self.positions[other] = Some(stored(ack));
        }
        if segment.has(flags::FIN) {
            counts | seen::FIN
        } else {
            counts
        }
    }
}
