//! Flows that are known: which one a packet belongs to, and how long it is remembered.

use dataplane_common::{
    Port, Protocol,
    packet::{FlowKey, PortKey, Tick, Translation},
    seen,
    tcp::{ANEW, GOES_ON},
};

use super::{
    Model,
    read::{Fragment, Headers},
    write::Ends,
};
use crate::wire::flags;

/// A flow, as it was before the packet.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Client to VIP.
    pub key: FlowKey,
    /// The endpoint; and which of the node's addresses, and which port, that sees the client come from (index 0: the
    /// client's own). When it was used, and what was seen of it.
    pub to: Translation,
}

/// What is known of a packet's flow.
#[derive(Clone, Copy, Debug)]
pub enum Known {
    No,
    Request(Flow),
    Answer(Flow),
    /// The kernel's own conntrack translates it; or nobody, as it is the node's own question.
    Foreign,
}

impl Flow {
    /// A connection to an endpoint itself, as if that were its own VIP.
    pub fn direct(key: FlowKey) -> Self {
        let to = Translation {
            endpoint: key.dst,
            endpoint_port: key.dst_port,
            node_port: Port::ANY,
            used: Tick::default(),
            seen: 0,
            node_addr: 0,
        };
        Self { key, to }
    }

    /// Whether it is one, of which the endpoint sees another port.
    pub fn is_direct(&self) -> bool {
        (self.key.dst, self.key.dst_port) == (self.to.endpoint, self.to.endpoint_port)
    }

    /// Whether the node has asked by it, from a port that a service has, too: its endpoint sees the port.
    pub fn is_asked(&self) -> bool {
        self.is_direct() && self.to.node_port == Port::ANY
    }

    /// Whether the kernel's own conntrack translates it. Masqueraded, it only keeps others from having its port.
    pub fn is_foreign(&self) -> bool {
        self.to.seen & seen::FOREIGN != 0
    }

    /// The port that the endpoint sees the client come from.
    pub fn seen_port(&self) -> Port {
        match self.to.node_port {
            Port::ANY => self.key.src_port,
            given => given,
        }
    }

    /// What its replies carry, if it is not masqueraded.
    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.key.src,
            self.seen_port(),
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

    /// Whether both sides have closed it, or one has broken it off.
    pub fn is_ended(&self) -> bool {
        let closed = seen::FIN | seen::in_replies(seen::FIN);
        self.to.seen & seen::RST != 0 || self.to.seen & closed == closed
    }

    /// Whether nothing was heard of it for longer than it is remembered.
    pub fn is_timed_out(&self, now: Tick) -> bool {
        self.to.used.age_seconds(now) > keep_seconds(self.key.protocol, self.to.seen)
    }

    pub fn toward_client(&self) -> Ends {
        Ends {
            src: self.key.dst,
            src_port: self.key.dst_port,
            dst: self.key.src,
            dst_port: self.key.src_port,
        }
    }
}

/// Whether a new flow may have the room of this one: it has ended, at least one whole tick ago; or it has timed out,
/// which of the kernel's own nobody knows here.
pub fn gives_way(flow: &Flow, now: Tick) -> bool {
    let foreign = flow.is_foreign();
    let ended = flow.is_ended() && flow.to.used.ticks_before(now) >= 2;
    !foreign && (ended || flow.is_timed_out(now))
}

/// For how many seconds a flow is remembered, by what was seen of it: the kernel's defaults (`nf_conntrack_proto_tcp.c`,
/// `nf_conntrack_proto_udp.c`), and kube-proxy's.
pub fn keep_seconds(protocol: Protocol, seen: u8) -> u32 {
    let has = |bit: u8| seen & bit != 0;
    let (closed, answered) = (
        [seen::FIN, seen::in_replies(seen::FIN)].map(has),
        has(seen::in_replies(seen::PACKET)),
    );
    if protocol != Protocol::TCP {
        return if answered && has(seen::ASSURED) {
            120
        } else {
            30
        };
    }
    match (has(seen::RST), closed, has(seen::FOLLOWED)) {
        (true, ..) => 10,
        (_, [true, true], followed) => {
            if followed {
                120
            } else {
                30
            }
        }
        (_, [false, false], _) if !answered => 120,
        (_, [false, false], _) if has(seen::ASSURED) => 86_400,
        (_, [false, false], _) => 60,
        (_, _, followed) => {
            if followed {
                3600
            } else {
                120
            }
        }
    }
}

impl Model<'_> {
    pub(super) fn toward_endpoint(&self, flow: &Flow) -> Ends {
        let Flow { key, to } = flow;
        let masqueraded = to.node_addr != 0;
        Ends {
            src: if masqueraded {
                self.world.node_addr(to.node_addr)
            } else {
                key.src
            },
            src_port: flow.seen_port(),
            dst: to.endpoint,
            dst_port: to.endpoint_port,
        }
    }

    /// The flow is used by a packet, which adds to what was seen of it, if it counts; by one that an ICMP error quotes,
    /// if there is none.
    fn seen_now(&mut self, key: &FlowKey, packet: Option<&Headers>, replies: bool, now: Tick) {
        // The first fragment has said what the packet says.
        let packet = packet.filter(|headers| headers.fragment != Fragment::Later);
        let Some(to) = self.state.flows.get(key) else {
            return;
        };
        let (mut added, mut forgotten) = (0, 0);
        if let Some(packet) = packet {
            let mut numbers = self.state.flows.numbers(key);
            let counted = numbers.see(packet, replies);
            if counted == 0 {
                return;
            }
            self.state.flows.set_numbers(key, numbers);
            added = seen::of_packet(counted & !(ANEW | GOES_ON), replies);
            if counted & ANEW != 0 {
                forgotten = !seen::PACKET;
            } else if counted & GOES_ON != 0 {
                forgotten = seen::RST;
                let has = |flag| packet.flags.is_some_and(|flags| flags & flag != 0);
                let closed = seen::FIN | seen::in_replies(seen::FIN);
                if has(flags::FIN) && added & closed & !to.seen != 0 {
                    // The first FIN of a side: nothing has followed it.
                    forgotten |= seen::FOLLOWED;
                } else if to.seen & closed != 0 && has(flags::ACK) && !has(flags::SYN | flags::FIN)
                {
                    added |= seen::FOLLOWED;
                }
            }
            let answered = seen::in_replies(seen::PACKET);
            // Whether a datagram comes late enough only the program's clock knows (`compare.rs`).
            if key.protocol == Protocol::TCP
                && !replies
                && to.seen & (answered | seen::ASSURED) == answered
                && numbers.are_acknowledged_by(packet)
            {
                added |= seen::ASSURED;
            }
        }
        self.state.flows.change(key, |to| {
            to.seen = to.seen & !forgotten | added;
            to.used = now;
        });
    }

    /// The flow of a packet from a client to a VIP. One by UDP that has timed out is forgotten.
    pub(super) fn request(&mut self, key: &FlowKey, packet: Option<&Headers>, now: Tick) -> Known {
        let Some(to) = self.state.flows.get(key) else {
            return Known::No;
        };
        if to.seen & seen::FOREIGN != 0 {
            if to.node_addr != 0 {
                return Known::No;
            }
            self.seen_now(key, None, false, now);
            return Known::Foreign;
        }
        let flow = Flow { key: *key, to };
        if key.protocol == Protocol::UDP && flow.is_timed_out(now) {
            self.state.flows.remove(key);
            return Known::No;
        }
        self.seen_now(key, packet, false, now);
        if flow.is_asked() {
            return Known::Foreign;
        }
        Known::Request(flow)
    }

    /// The masqueraded flow of a packet from an endpoint to an address of the node's.
    fn masqueraded(&self, key: &FlowKey) -> Option<Flow> {
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        let flow = self.state.flows.by_node(&port);
        flow.filter(|flow| !flow.is_foreign() && self.world.node_addr(flow.to.node_addr) == key.dst)
    }

    /// Whether a packet that leaves has the ends of an assured masqueraded flow that lives. Any other flow is forgotten.
    pub(super) fn is_port_taken(&mut self, key: &FlowKey, now: Tick) -> bool {
        let back = FlowKey::new(key.dst, key.dst_port, key.src, key.src_port, key.protocol);
        if key.src_port.host() < 1024 {
            return false;
        }
        let Some(other) = self.masqueraded(&back) else {
            return false;
        };
        let gives_way =
            other.is_ended() || other.is_timed_out(now) || other.to.seen & seen::ASSURED == 0;
        if gives_way {
            self.state.flows.remove(&other.key);
        }
        !gives_way
    }

    /// Whether a packet may be a request of one flow and, from an endpoint, an answer of another that is masqueraded.
    pub(super) fn is_either(&self, key: &FlowKey) -> bool {
        self.state.flows.has(key) && self.masqueraded(key).is_some()
    }

    /// The flow of a packet from an endpoint to an address of the node's, or to the client itself.
    pub(super) fn answer(
        &mut self,
        key: &FlowKey,
        packet: Option<&Headers>,
        now: Tick,
        masqueraded: bool,
    ) -> Known {
        let flow = if masqueraded {
            self.masqueraded(key)
        } else {
            self.state.flows.by_client(key)
        };
        let Some(flow) = flow else {
            return Known::No;
        };
        if !masqueraded && flow.is_asked() {
            if flow.is_ended() || flow.is_timed_out(now) {
                self.state.flows.remove(&flow.key);
                return Known::No;
            }
            self.seen_now(&flow.key, packet, true, now);
            return Known::Foreign;
        }
        self.seen_now(&flow.key, packet, true, now);
        Known::Answer(flow)
    }
}
