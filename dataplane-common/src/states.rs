//! The states of flows, and the timeout of each: those of netfilter (`net/netfilter/nf_conntrack_proto_tcp.c` and
//! `nf_conntrack_proto_udp.c`).
//!
//! A flow's state follows from the bits of [`seen`]. netfilter's table of transitions has a state for each row;
//! here each bit stands for a transition, and is written once:
//!
//! | netfilter | bits |
//! |---|---|
//! | `SYN_SENT` | no packet of the endpoint |
//! | `SYN_RECV` | a packet of the endpoint |
//! | `ESTABLISHED` | the client has acknowledged it ([`seen::ASSURED`]) |
//! | `FIN_WAIT`, then `CLOSE_WAIT` | a FIN of one side, then a segment that follows it ([`seen::FOLLOWED`]) |
//! | `LAST_ACK`, then `TIME_WAIT` | a FIN of each side, then a segment that follows |
//! | `CLOSE` | a RST |
//!
//! netfilter does not record which side sent a FIN, so a repeated FIN counts there as closing both sides. Here, a FIN
//! that one side repeats counts once.

use core::fmt;

use crate::{Protocol, seen};

/// The state of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum State {
    /// TCP: a SYN without an answer.
    SynSent,
    /// TCP: the endpoint has answered, and the client has not acknowledged the answer.
    SynReceived,
    /// TCP: the client has acknowledged the answer.
    Established,
    /// TCP: one side has closed its direction.
    FinWait,
    /// TCP: one side has closed its direction, and another segment has followed.
    CloseWait,
    /// TCP: both sides have closed.
    LastAck,
    /// TCP: both sides have closed, and another segment has followed.
    TimeWait,
    /// TCP: one side has reset the connection.
    Close,
    /// UDP: without an answer.
    Unanswered,
    /// UDP: answered, and quiet after two seconds.
    Answered,
    /// UDP: in use two seconds after it began, and answered before.
    Stream,
    /// The kernel's own conntrack translates it.
    Foreign,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 12] = [
        Self::SynSent,
        Self::SynReceived,
        Self::Established,
        Self::FinWait,
        Self::CloseWait,
        Self::LastAck,
        Self::TimeWait,
        Self::Close,
        Self::Unanswered,
        Self::Answered,
        Self::Stream,
        Self::Foreign,
    ];

    /// The word that a person reads.
    pub const fn word(self) -> &'static str {
        match self {
            Self::SynSent => "syn-sent",
            Self::SynReceived => "syn-received",
            Self::Established => "established",
            Self::FinWait => "fin-wait",
            Self::CloseWait => "close-wait",
            Self::LastAck => "last-ack",
            Self::TimeWait => "time-wait",
            Self::Close => "close",
            Self::Unanswered => "unanswered",
            Self::Answered => "answered",
            Self::Stream => "stream",
            Self::Foreign => "foreign",
        }
    }

    /// The inverse of [`State::word`].
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }

    /// Returns the state of a flow by its packets so far: bits of [`seen`].
    #[inline(always)]
    pub const fn of(protocol: Protocol, seen: u8) -> Self {
        if seen & seen::FOREIGN != 0 {
            return Self::Foreign;
        }
        let (requests, replies) = (seen::of_requests(seen), seen::of_replies(seen));
        let answered = replies & seen::PACKET != 0;
        let assured = seen & seen::ASSURED != 0;
        if protocol.number() != Protocol::TCP.number() {
            return match (answered, assured) {
                (false, _) => Self::Unanswered,
                (true, false) => Self::Answered,
                (true, true) => Self::Stream,
            };
        }
        let followed = seen & seen::FOLLOWED != 0;
        if seen & seen::RST != 0 {
            Self::Close
        } else if requests & replies & seen::FIN != 0 {
            if followed {
                Self::TimeWait
            } else {
                Self::LastAck
            }
        } else if (requests | replies) & seen::FIN != 0 {
            if followed {
                Self::CloseWait
            } else {
                Self::FinWait
            }
        } else if !answered {
            Self::SynSent
        } else if assured {
            Self::Established
        } else {
            Self::SynReceived
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

layout! {
    /// The lifetime of a flow after its last packet, in seconds, by its [`State`].
    #[repr(transparent)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Timeouts(pub [u32; 12]);
}

impl Timeouts {
    /// The kernel's defaults, except for `ESTABLISHED` and `CLOSE_WAIT`, which are kube-proxy's
    /// (`conntrack.tcpEstablishedTimeout`, `.tcpCloseWaitTimeout`).
    pub const DEFAULT: Self = Self([120, 60, 86_400, 120, 3_600, 30, 120, 10, 30, 30, 120, 120]);
    /// The longest timeout: three days. The time of a flow's last packet is known modulo three days and a quarter
    /// ([`Tick`](crate::packet::Tick)).
    pub const LONGEST: u32 = 259_200;

    /// Returns the timeout of a state.
    #[inline(always)]
    pub const fn of(&self, state: State) -> u32 {
        let index = state as usize;
        if index < self.0.len() {
            self.0[index]
        } else {
            0
        }
    }

    /// Sets the timeout of a state, in seconds.
    pub const fn set(&mut self, state: State, seconds: u32) {
        self.0[state as usize] = seconds;
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    /// Rows and columns of netfilter's table that flows of ours can have.
    #[test]
    fn states_are_netfilters() {
        use seen::{ASSURED, FIN, FOLLOWED, FOREIGN, PACKET, RST, in_replies};
        let both = PACKET | in_replies(PACKET);
        let closing = both | ASSURED | FIN;
        for (seen, state, seconds) in [
            (PACKET, State::SynSent, 120),
            (both, State::SynReceived, 60),
            (both | ASSURED, State::Established, 86_400),
            (closing, State::FinWait, 120),
            (both | in_replies(FIN), State::FinWait, 120),
            (closing | FOLLOWED, State::CloseWait, 3_600),
            (closing | in_replies(FIN), State::LastAck, 30),
            (closing | in_replies(FIN) | FOLLOWED, State::TimeWait, 120),
            (closing | RST, State::Close, 10),
            (PACKET | RST, State::Close, 10),
        ] {
            assert_eq!(State::of(Protocol::TCP, seen), state, "{seen:#b}");
            assert_eq!(Timeouts::DEFAULT.of(state), seconds, "{state:?}");
        }
        for (seen, state, seconds) in [
            (PACKET, State::Unanswered, 30),
            (both, State::Answered, 30),
            (both | ASSURED, State::Stream, 120),
        ] {
            assert_eq!(State::of(Protocol::UDP, seen), state);
            assert_eq!(Timeouts::DEFAULT.of(state), seconds);
        }
        for protocol in [Protocol::TCP, Protocol::UDP] {
            assert_eq!(State::of(protocol, closing | RST | FOREIGN), State::Foreign);
        }
    }

    #[test]
    fn states_have_words_and_timeouts_of_their_own() {
        let mut timeouts = Timeouts::default();
        for (seconds, state) in (1000..).zip(State::ALL) {
            timeouts.set(state, seconds);
            assert_eq!(State::from_word(state.word()), Some(state));
            assert_eq!(
                std::format!("{state:>13}|"),
                std::format!("{:>13}|", state.word())
            );
        }
        let read = State::ALL.map(|state| timeouts.of(state));
        assert!(read.into_iter().eq(1000..1012));
        assert_eq!(State::SynReceived.word(), "syn-received");
        assert_eq!(State::from_word("established "), None);
    }
}
