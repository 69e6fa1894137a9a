//! One flow: both directions, and what state it is in.

use std::{fmt, net::SocketAddr};

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, Forward, Masqueraded, PortKey, Reply, Tick, keep_seconds, seen, timeout},
};

/// A flow of a client through a VIP to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Client and VIP.
    pub key: FlowKey,
    /// The entry for what the client sends.
    pub forward: Forward,
    /// The entry for what the endpoint sends.
    pub back: Back,
}

/// The entry for what the endpoint sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Back {
    /// There is none: the flow is foreign, or half of it was pushed out of a full table.
    Missing,
    /// The endpoint sees the client's own address.
    Reply(Reply),
    /// The endpoint sees an address of the node's.
    Masqueraded(Masqueraded),
}

/// What state a flow is in, by what was seen of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// TCP: a SYN that nobody has answered yet.
    Syn,
    /// TCP: answered, and nobody has ended it.
    Established,
    /// TCP: one side has ended its direction.
    HalfClosed,
    /// TCP: both have.
    Closed,
    /// TCP: somebody sent a RST.
    Reset,
    /// UDP: nobody has answered yet.
    Unanswered,
    /// UDP: answered.
    Answered,
    /// The kernel's own conntrack translates it, since before the takeover.
    Foreign,
    /// One of its entries was pushed out of a full table.
    Half,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 9] = [
        Self::Syn,
        Self::Established,
        Self::HalfClosed,
        Self::Closed,
        Self::Reset,
        Self::Unanswered,
        Self::Answered,
        Self::Foreign,
        Self::Half,
    ];

    /// The word that a person reads.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Syn => "syn",
            Self::Established => "established",
            Self::HalfClosed => "half-closed",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Unanswered => "unanswered",
            Self::Answered => "answered",
            Self::Foreign => "foreign",
            Self::Half => "half",
        }
    }

    /// The inverse of [`State::word`].
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// How long a half flow is kept, in seconds: the programs make the two entries one after the other.
const HALF: u32 = 10;

impl Flow {
    /// TCP or UDP.
    pub fn protocol(&self) -> Protocol {
        self.key.protocol
    }

    /// The client.
    pub fn client(&self) -> SocketAddr {
        socket(self.key.src, self.key.src_port)
    }

    /// What the client talks to.
    pub fn vip(&self) -> SocketAddr {
        socket(self.key.dst, self.key.dst_port)
    }

    /// Who answers.
    pub fn endpoint(&self) -> SocketAddr {
        socket(self.forward.endpoint, self.forward.endpoint_port)
    }

    /// Whether the kernel's own conntrack translates it.
    pub fn is_foreign(&self) -> bool {
        self.forward.seen & seen::FOREIGN != 0
    }

    /// Whether the endpoint sees an address of the node's in place of the client's.
    pub fn is_masqueraded(&self) -> bool {
        self.forward.node_addr != 0
    }

    /// What state it is in.
    pub fn state(&self) -> State {
        if self.is_foreign() {
            return State::Foreign;
        }
        if self.back == Back::Missing {
            return State::Half;
        }
        let (forward, back) = (self.forward.seen, self.back.seen());
        let answered = back & seen::PACKET != 0;
        if self.protocol() != Protocol::TCP {
            return if answered {
                State::Answered
            } else {
                State::Unanswered
            };
        }
        if (forward | back) & seen::RST != 0 {
            State::Reset
        } else if forward & back & seen::FIN != 0 {
            State::Closed
        } else if (forward | back) & seen::FIN != 0 {
            State::HalfClosed
        } else if answered {
            State::Established
        } else {
            State::Syn
        }
    }

    /// How many seconds ago the last packet of either direction was seen, to 4.3 s.
    pub fn idle(&self, now: Tick) -> u32 {
        let forward = self.forward.used.age_seconds(now);
        self.back
            .used()
            .map_or(forward, |used| forward.min(used.age_seconds(now)))
    }

    /// How many seconds it is kept after its last packet.
    pub fn keep(&self) -> u32 {
        match self.state() {
            State::Half => HALF,
            State::Foreign => timeout::UDP_ANSWERED,
            _ => keep_seconds(self.protocol(), self.forward.seen, self.back.seen()),
        }
    }

    /// Whether it has been idle for longer than it is kept.
    pub fn is_over(&self, now: Tick) -> bool {
        self.idle(now) > self.keep()
    }

    /// Whether others may have its room where that is short: both sides have closed it, and their last packets have
    /// had time to arrive.
    pub fn gives_way(&self, now: Tick) -> bool {
        self.state() == State::Closed && self.idle(now) > timeout::TCP_RESET
    }

    /// Where its entry in `REPLY` is, if it is not masqueraded.
    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.forward.endpoint,
            self.forward.endpoint_port,
            self.key.src,
            self.key.src_port,
            self.key.protocol,
        )
    }

    /// Where its entry in `MASQUERADE` is, if it is masqueraded.
    pub fn port_key(&self) -> PortKey {
        PortKey::new(
            self.forward.endpoint,
            self.forward.endpoint_port,
            self.forward.node_port,
            self.key.protocol,
        )
    }
}

impl Back {
    /// What was seen from the endpoint: bits of [`seen`].
    pub fn seen(&self) -> u8 {
        match self {
            Self::Missing => 0,
            Self::Reply(reply) => reply.seen,
            Self::Masqueraded(masqueraded) => masqueraded.seen,
        }
    }

    /// When something was last seen from the endpoint.
    pub fn used(&self) -> Option<Tick> {
        match self {
            Self::Missing => None,
            Self::Reply(reply) => Some(reply.used),
            Self::Masqueraded(masqueraded) => Some(masqueraded.used),
        }
    }
}

/// Where the other entry of a flow is.
pub(super) fn of_reply(key: &FlowKey, reply: &Reply) -> FlowKey {
    FlowKey::new(
        key.dst,
        key.dst_port,
        reply.vip,
        reply.vip_port,
        key.protocol,
    )
}

/// Where the other entry of a masqueraded flow is.
pub(super) fn of_masqueraded(key: &PortKey, masqueraded: &Masqueraded) -> FlowKey {
    FlowKey::new(
        masqueraded.client,
        masqueraded.client_port,
        masqueraded.vip,
        masqueraded.vip_port,
        key.protocol,
    )
}

fn socket(addr: Addr, port: Port) -> SocketAddr {
    SocketAddr::new(addr.ip(), port.host())
}
