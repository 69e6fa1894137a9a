//! Conversations: the packets of both sides, one after the other.

use std::fmt;

use dataplane_proof::wire::flags::{ACK, FIN, PSH, RST, SYN};
use rand::{RngExt as _, rngs::SmallRng};

/// A packet of one side.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    pub by_client: bool,
    /// TCP's flags.
    pub flags: u8,
    /// Its sequence number and its acknowledgement number.
    pub numbers: [u32; 2],
    /// How many bytes it carries.
    pub bytes: usize,
    /// Whether it was sent before.
    pub again: bool,
    /// Whether it arrives in two fragments.
    pub in_parts: bool,
}

/// An ICMP error of one side, about the last packet that it received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Complaint {
    pub by_client: bool,
    pub about: About,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    Port,
    Hops,
    Size,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Packet(Sent),
    Complaint(Complaint),
    /// Nothing, for more than two seconds.
    Quiet,
}

/// A disturbance of a conversation, by the network or by a stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A packet overtakes the one before it, which may have been lost and repeated.
    Order,
    /// A packet arrives once more, later.
    Late,
    /// A segment with any numbers.
    Stray,
    /// An ICMP error.
    Complaint,
    /// A datagram comes in fragments.
    Parts,
}

/// A conversation.
#[derive(Clone, Debug)]
pub struct Conversation {
    pub udp: bool,
    pub steps: Vec<Step>,
    pub trouble: Option<Trouble>,
}

impl fmt::Debug for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.by_client { ">" } else { "<" })?;
        for (flag, word) in [(SYN, "SYN "), (FIN, "FIN "), (RST, "RST "), (ACK, "ACK ")] {
            if self.flags & flag != 0 {
                f.write_str(word)?;
            }
        }
        let ([number, ack], bytes) = (self.numbers, self.bytes);
        write!(
            f,
            "{number}+{bytes}/{ack}{}",
            if self.again { " again" } else { "" }
        )
    }
}

/// The next numbers of both sides of a TCP connection, and those that each has seen of the other.
struct Ends {
    steps: Vec<Step>,
    next: [u32; 2],
    seen: [u32; 2],
}

impl Ends {
    fn send(&mut self, by_client: bool, flags: u8, bytes: usize) {
        let own = usize::from(!by_client);
        let ack = if flags & ACK != 0 { self.seen[own] } else { 0 };
        self.steps.push(Step::Packet(Sent {
            by_client,
            flags,
            numbers: [self.next[own], ack],
            bytes,
            again: false,
            in_parts: false,
        }));
        let taken = u32::from(flags & (SYN | FIN) != 0);
        self.next[own] = self.next[own].wrapping_add(taken + u32::try_from(bytes).unwrap_or(0));
        self.seen[1 - own] = self.next[own];
    }

    /// Sends the last packet once more.
    fn again(&mut self) {
        if let Some(Step::Packet(last)) = self.steps.last().copied() {
            self.steps.push(Step::Packet(Sent {
                again: true,
                ..last
            }));
        }
    }

    fn maybe_again(&mut self, rng: &mut SmallRng) {
        if rng.random_ratio(1, 8) {
            self.again();
        }
    }

    /// Sends the bytes of the last packet once more, cut elsewhere: in two segments that overlap, of which the second may go
    /// on with new bytes.
    fn again_in_other_segments(&mut self, rng: &mut SmallRng) {
        let Some(Step::Packet(last)) = self.steps.last().copied() else {
            return;
        };
        let end = rng.random_range(1..=last.bytes);
        let start = rng.random_range(0..end);
        let more = if rng.random() {
            rng.random_range(1..500)
        } else {
            0
        };
        for (from, to) in [(0, end), (start, last.bytes + more)] {
            let from_number = u32::try_from(from).unwrap_or(0);
            self.steps.push(Step::Packet(Sent {
                numbers: [last.numbers[0].wrapping_add(from_number), last.numbers[1]],
                bytes: to - from,
                again: true,
                ..last
            }));
        }
        let own = usize::from(!last.by_client);
        self.next[own] = self.next[own].wrapping_add(u32::try_from(more).unwrap_or(0));
        self.seen[1 - own] = self.next[own];
    }
}

impl Conversation {
    pub fn new(rng: &mut SmallRng) -> Self {
        let mut talk = if rng.random_ratio(1, 3) {
            Self::udp(rng)
        } else {
            Self::tcp(rng)
        };
        if rng.random_ratio(1, 3) {
            talk.disturb(rng);
        }
        talk
    }

    /// Does something to the conversation, not to its first packet.
    fn disturb(&mut self, rng: &mut SmallRng) {
        let later = (1..self.steps.len()).filter(|at| matches!(self.steps[*at], Step::Packet(_)));
        let later: Vec<usize> = later.collect();
        let at = later.get(rng.random_range(0..later.len().max(1))).copied();
        let end = self.steps.len();
        let trouble = match (rng.random_range(0..5), at) {
            (0 | 1, Some(at)) if at >= 2 => {
                self.steps.swap(at, at - 1);
                Trouble::Order
            }
            (2, Some(at)) => {
                if let Step::Packet(sent) = self.steps[at] {
                    let sent = Sent {
                        again: true,
                        ..sent
                    };
                    let to = rng.random_range(at + 1..=end);
                    self.steps.insert(to, Step::Packet(sent));
                }
                Trouble::Late
            }
            (3, _) if !self.udp => {
                let flags = [RST, RST | ACK, ACK, SYN, FIN | ACK, SYN | ACK];
                let stray = Sent {
                    by_client: rng.random(),
                    flags: flags[rng.random_range(0..flags.len())],
                    numbers: [rng.random(), rng.random()],
                    bytes: 0,
                    again: false,
                    in_parts: false,
                };
                self.steps
                    .insert(rng.random_range(1..=end), Step::Packet(stray));
                Trouble::Stray
            }
            (3, _) => {
                for step in &mut self.steps {
                    if let Step::Packet(sent) = step {
                        sent.in_parts = sent.bytes >= 16;
                    }
                }
                Trouble::Parts
            }
            _ => {
                let about = [About::Port, About::Hops, About::Size];
                let complaint = Complaint {
                    by_client: rng.random_ratio(1, 3),
                    about: about[rng.random_range(0..about.len())],
                };
                self.steps
                    .insert(rng.random_range(1..=end), Step::Complaint(complaint));
                Trouble::Complaint
            }
        };
        self.trouble = Some(trouble);
    }

    fn udp(rng: &mut SmallRng) -> Self {
        let mut steps = Vec::new();
        let mut by_client = true;
        for number in 0..rng.random_range(1..7) {
            if number > 0 && rng.random_ratio(1, 4) {
                steps.push(Step::Quiet);
            }
            steps.push(Step::Packet(Sent {
                by_client,
                flags: 0,
                numbers: [0; 2],
                bytes: rng.random_range(0..100),
                again: false,
                in_parts: false,
            }));
            by_client = rng.random_ratio(1, 2);
        }
        Self {
            udp: true,
            steps,
            trouble: None,
        }
    }

    fn tcp(rng: &mut SmallRng) -> Self {
        let mut ends = Ends {
            steps: Vec::new(),
            next: [rng.random(), rng.random()],
            seen: [0; 2],
        };
        Self::connect(&mut ends, rng);
        Self {
            udp: false,
            steps: ends.steps,
            trouble: None,
        }
    }

    fn connect(ends: &mut Ends, rng: &mut SmallRng) {
        ends.send(true, SYN, 0);
        ends.maybe_again(rng);
        if rng.random_ratio(1, 24) {
            // Both open at the same time.
            ends.send(false, SYN, 0);
            ends.send(true, SYN | ACK, 0);
            ends.send(false, SYN | ACK, 0);
            return ends.send(true, ACK, 0);
        }
        match rng.random_range(0..10) {
            // The endpoint does not answer.
            0 => return,
            1 => return ends.send(false, RST | ACK, 0),
            _ => ends.send(false, SYN | ACK, 0),
        }
        ends.maybe_again(rng);
        match rng.random_range(0..8) {
            // Half-open.
            0 | 1 => return,
            2 => return ends.send(true, RST, 0),
            _ => ends.send(true, ACK, 0),
        }
        for _ in 0..rng.random_range(0..4) {
            let by_client: bool = rng.random();
            if rng.random_ratio(1, 4) {
                // A keepalive, and its answer.
                let own = usize::from(!by_client);
                ends.next[own] = ends.next[own].wrapping_sub(1);
                ends.send(by_client, ACK, 0);
                ends.next[own] = ends.next[own].wrapping_add(1);
                ends.seen[1 - own] = ends.next[own];
            } else {
                ends.send(by_client, ACK | PSH, rng.random_range(1..500));
                ends.maybe_again(rng);
                if rng.random_ratio(1, 4) {
                    ends.again_in_other_segments(rng);
                }
            }
            ends.send(!by_client, ACK, 0);
        }
        if rng.random_ratio(1, 8) {
            ends.steps.push(Step::Quiet);
        }
        let first: bool = rng.random();
        match rng.random_range(0..8) {
            0 => return,
            1 => return ends.send(first, RST | ACK, 0),
            // Both at the same time.
            2 => {
                let seen = ends.seen;
                ends.send(first, FIN | ACK, 0);
                let after = std::mem::replace(&mut ends.seen, seen);
                ends.send(!first, FIN | ACK, 0);
                ends.seen[usize::from(first)] = after[usize::from(first)];
                ends.send(first, ACK, 0);
                ends.send(!first, ACK, 0);
            }
            _ => {
                ends.send(first, FIN | ACK, 0);
                ends.maybe_again(rng);
                if rng.random_ratio(3, 4) {
                    ends.send(!first, ACK, 0);
                    if rng.random_ratio(1, 3) {
                        ends.send(!first, ACK | PSH, rng.random_range(1..500));
                        ends.send(first, ACK, 0);
                    }
                }
                if rng.random_ratio(1, 6) {
                    return;
                }
                ends.send(!first, FIN | ACK, 0);
                if rng.random_ratio(1, 6) {
                    return;
                }
                ends.send(first, ACK, 0);
            }
        }
        // The port again.
        if rng.random_ratio(1, 4) {
            for next in &mut ends.next {
                *next = next.wrapping_add(1 << 20);
            }
            ends.send(true, SYN, 0);
            ends.send(false, SYN | ACK, 0);
            ends.send(true, ACK, 0);
        }
    }

    fn packets(&self, until: usize) -> impl Iterator<Item = &Sent> {
        self.steps[..=until].iter().filter_map(|step| match step {
            Step::Packet(sent) => Some(sent),
            Step::Complaint(_) | Step::Quiet => None,
        })
    }

    /// Whether one side has sent a RST so far.
    pub fn has_rst(&self, until: usize) -> bool {
        self.packets(until).any(|sent| sent.flags & RST != 0)
    }

    /// Whether the endpoint has sent a SYN of its own so far.
    pub fn is_opened_by_both(&self, until: usize) -> bool {
        self.packets(until)
            .any(|sent| !sent.by_client && sent.flags & (SYN | ACK) == SYN)
    }

    /// Whether the client has sent a SYN-ACK so far.
    pub fn answers_itself(&self, until: usize) -> bool {
        self.packets(until)
            .any(|sent| sent.by_client && sent.flags & (SYN | ACK) == SYN | ACK)
    }

    /// Whether the client has sent a SYN after FINs.
    pub fn is_begun_again(&self, until: usize) -> bool {
        let mut packets = self.packets(until);
        packets.any(|sent| sent.flags & FIN != 0)
            && packets.any(|sent| sent.by_client && sent.flags & (SYN | ACK) == SYN)
    }

    /// Whether a FIN was sent again.
    pub fn has_fin_again(&self, until: usize) -> bool {
        self.packets(until)
            .any(|sent| sent.again && sent.flags & FIN != 0)
    }
}
