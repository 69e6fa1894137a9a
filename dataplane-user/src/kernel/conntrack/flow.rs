//! One flow, and what state it is in.

use std::{fmt, net::SocketAddr};

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, PortKey, Tick, Translation, keep_seconds, seen, timeout},
};

/// A flow of a client through a VIP to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Client and VIP.
    pub key: FlowKey,
    /// What its packets are turned into, and what was seen of them.
    pub to: Translation,
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
    /// The kernel's own conntrack translates it.
    Foreign,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 8] = [
        Self::Syn,
        Self::Established,
        Self::HalfClosed,
        Self::Closed,
        Self::Reset,
        Self::Unanswered,
        Self::Answered,
        Self::Foreign,
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

    /// Whether it only holds a port of the node's: the kernel's own conntrack masquerades a connection to the endpoint, which
    /// sees it come from [`Flow::client`].
    pub fn holds_port(&self) -> bool {
        self.is_foreign() && self.is_masqueraded()
    }

    /// Returns the service's address, if the packet path translates a service's flow: the filter `VIPS` has to let it through.
    pub fn our_vip(&self) -> Option<Addr> {
        (!self.is_foreign() && !self.is_to_destination()).then_some(self.key.dst)
    }

    /// Whether the destination itself is the endpoint.
    fn is_to_destination(&self) -> bool {
        (self.key.dst, self.key.dst_port) == (self.to.endpoint, self.to.endpoint_port)
    }

    /// Whether this node has asked from a port that a service has, too: nothing is translated, and the answers are not the
    /// service's.
    pub fn is_asked(&self) -> bool {
        !self.is_foreign() && self.is_to_destination() && self.to.node_port == Port::ANY
    }

    /// Whether it is no service's: a connection to the endpoint itself, which sees another port of the client's because
    /// the client already had a flow to it from its own.
    pub fn is_direct(&self) -> bool {
        !self.is_foreign() && self.is_to_destination() && !self.is_asked()
    }

    /// Who answers.
    pub fn endpoint(&self) -> SocketAddr {
        socket(self.to.endpoint, self.to.endpoint_port)
    }

    /// Whether the kernel's own conntrack translates it.
    pub fn is_foreign(&self) -> bool {
        self.to.seen & seen::FOREIGN != 0
    }

    /// Whether the endpoint sees another port of the client's than that from which it sends.
    pub fn has_another_port(&self) -> bool {
        !self.is_masqueraded() && self.to.seen_port(&self.key) != self.key.src_port
    }

    /// Whether the endpoint sees an address of the node's in place of the client's.
    pub fn is_masqueraded(&self) -> bool {
        self.to.node_addr != 0
    }

    /// What state it is in.
    pub fn state(&self) -> State {
        if self.is_foreign() {
            return State::Foreign;
        }
        let (requests, replies) = self.seen();
        let answered = replies & seen::PACKET != 0;
        if self.protocol() != Protocol::TCP {
            return if answered {
                State::Answered
            } else {
                State::Unanswered
            };
        }
        if (requests | replies) & seen::RST != 0 {
            State::Reset
        } else if requests & replies & seen::FIN != 0 {
            State::Closed
        } else if (requests | replies) & seen::FIN != 0 {
            State::HalfClosed
        } else if answered {
            State::Established
        } else {
            State::Syn
        }
    }

    /// How many seconds ago the last packet of either direction was seen, to 4.3 s.
    pub fn idle(&self, now: Tick) -> u32 {
        self.to.used.age_seconds(now)
    }

    /// How many seconds it is kept after its last packet.
    pub fn keep(&self) -> u32 {
        if self.is_foreign() {
            return timeout::UDP_ANSWERED;
        }
        let (requests, replies) = self.seen();
        keep_seconds(self.protocol(), requests, replies)
    }

    /// Whether it has been idle for longer than it is kept.
    pub fn is_over(&self, now: Tick) -> bool {
        self.idle(now) > self.keep()
    }

    /// What its replies carry, if it is not masqueraded.
    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.key.src,
            self.to.seen_port(&self.key),
            self.key.protocol,
        )
    }

    /// What its replies carry, if it is masqueraded.
    pub fn port_key(&self) -> PortKey {
        PortKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.to.node_port,
            self.key.protocol,
        )
    }

    /// What was seen of requests and of replies: bits of [`seen`].
    fn seen(&self) -> (u8, u8) {
        (
            seen::of_requests(self.to.seen),
            seen::of_replies(self.to.seen),
        )
    }
}

fn socket(addr: Addr, port: Port) -> SocketAddr {
    SocketAddr::new(addr.ip(), port.host())
}
