//! Known flows: finds the flow of a packet, and decides how long a flow is remembered.

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

/// A flow in its state before the packet.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// The key: from the client to the VIP.
    pub key: FlowKey,
    /// The endpoint; the node's address and port that the endpoint sees as the client's (address index 0: the client's
    /// own address); the time of the last packet; and the `seen` bits.
    pub to: Translation,
}

/// The role of a packet in a known flow.
#[derive(Clone, Copy, Debug)]
pub enum Known {
    No,
    Request(Flow),
    Answer(Flow),
    /// The programs leave the packet alone: either the kernel's own conntrack translates the flow, or the node itself
    /// began it.
    Foreign,
}

impl Flow {
    /// A connection to the endpoint itself: the endpoint's address takes the place of the VIP.
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

    /// Whether the client connects to the endpoint itself. In the tables, such a flow has another port for the endpoint
    /// to see.
    pub fn is_direct(&self) -> bool {
        (self.key.dst, self.key.dst_port) == (self.to.endpoint, self.to.endpoint_port)
    }

    /// Whether the node itself began the flow, from a port that a service also has. The endpoint sees this port.
    pub fn is_asked(&self) -> bool {
        self.is_direct() && self.to.node_port == Port::ANY
    }

    /// Whether the kernel's own conntrack translates the flow. A masqueraded one only reserves its port.
    pub fn is_foreign(&self) -> bool {
        self.to.seen & seen::FOREIGN != 0
    }

    /// The port that the endpoint sees as the client's.
    pub fn seen_port(&self) -> Port {
        match self.to.node_port {
            Port::ANY => self.key.src_port,
            given => given,
        }
    }

    /// The key of the flow's replies, if the flow is not masqueraded.
    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.key.src,
            self.seen_port(),
            self.key.protocol,
        )
    }

    /// The key of the flow's replies, if the flow is masqueraded.
    pub fn port_key(&self) -> PortKey {
        PortKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.to.node_port,
            self.key.protocol,
        )
    }

    /// Whether both sides have closed the flow, or one side has reset it.
    pub fn is_ended(&self) -> bool {
        let closed = seen::FIN | seen::in_replies(seen::FIN);
        self.to.seen & seen::RST != 0 || self.to.seen & closed == closed
    }

    /// Whether the flow has been idle for longer than its timeout.
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

/// Whether a new flow may take the place of this flow: it ended at least one whole tick ago, or it has timed out. A
/// flow of the kernel's own conntrack keeps its place, because the programs do not know whether it has timed out.
pub fn gives_way(flow: &Flow, now: Tick) -> bool {
    let foreign = flow.is_foreign();
    let ended = flow.is_ended() && flow.to.used.ticks_before(now) >= 2;
    !foreign && (ended || flow.is_timed_out(now))
}

/// Returns for how many seconds an idle flow with these `seen` bits is remembered. The values are the kernel's defaults
/// (`nf_conntrack_proto_tcp.c`, `nf_conntrack_proto_udp.c`) and kube-proxy's.
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

    /// Records that a packet used the flow: updates the time and, if the packet counts, the `seen` bits. `None` changes
    /// only the time: an ICMP error quotes the packet, or the packet may be forged.
    fn seen_now(&mut self, key: &FlowKey, packet: Option<&Headers>, replies: bool, now: Tick) {
        // The first fragment has already added the datagram's bits.
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
                    // The first FIN of this side: no segment has followed it yet.
                    forgotten |= seen::FOLLOWED;
                } else if to.seen & closed != 0 && has(flags::ACK) && !has(flags::SYN | flags::FIN)
                {
                    added |= seen::FOLLOWED;
                }
            }
            let answered = seen::in_replies(seen::PACKET);
            // For UDP the bit depends on the exact time, which only the program's clock knows (`compare.rs`).
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

    /// Finds the flow of a packet from a client to a VIP. Removes a UDP flow that has timed out.
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

    /// Finds the masqueraded flow of a packet from an endpoint to an address of the node.
    fn masqueraded(&self, key: &FlowKey) -> Option<Flow> {
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        let flow = self.state.flows.by_node(&port);
        flow.filter(|flow| !flow.is_foreign() && self.world.node_addr(flow.to.node_addr) == key.dst)
    }

    /// Whether an outgoing packet has the same ends as a live and assured masqueraded flow. Removes the flow if it is
    /// not both.
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

    /// Whether a packet matches two flows: as a request of one flow, and as an endpoint's reply of a masqueraded flow.
    pub(super) fn is_either(&self, key: &FlowKey) -> bool {
        self.state.flows.has(key) && self.masqueraded(key).is_some()
    }

    /// Finds the flow of a packet from an endpoint: to an address of the node if `masqueraded`, else to the client
    /// itself.
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
