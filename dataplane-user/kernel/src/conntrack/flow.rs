//! One flow, and its state.

use std::net::SocketAddr;

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, PortKey, Tick, Translation},
    seen,
    states::{State, Timeouts},
};

/// A flow of a client through a VIP to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Client and VIP.
    pub key: FlowKey,
    /// The addresses and ports of its translated packets, and which packets the programs have seen.
    pub to: Translation,
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

    /// Returns the address and port that the client connects to.
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

    /// Whether it does not belong to a service: a connection to the endpoint itself, which sees another port of the
    /// client's because the client already had a flow to it from its own.
    pub fn is_direct(&self) -> bool {
        !self.is_foreign() && self.is_to_destination() && !self.is_asked()
    }

    /// Returns the endpoint, which answers.
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

    /// Returns its state.
    pub fn state(&self) -> State {
        State::of(self.protocol(), self.to.seen)
    }

    /// Whether both sides have closed the connection, or one has reset it.
    pub fn is_ended(&self) -> bool {
        self.protocol() == Protocol::TCP && !self.is_foreign() && seen::is_ended(self.to.seen)
    }

    /// How many seconds ago the last packet of either direction was seen, to 4.3 s.
    pub fn idle(&self, now: Tick) -> u32 {
        self.to.used.age_seconds(now)
    }

    /// Returns its timeout: how many seconds after its last packet it expires.
    pub fn keep(&self, timeouts: &Timeouts) -> u32 {
        timeouts.of(self.state())
    }

    /// Whether it has been idle for longer than its timeout.
    pub fn is_over(&self, now: Tick, timeouts: &Timeouts) -> bool {
        self.idle(now) > self.keep(timeouts)
    }

    /// Returns the key of its replies, if it is not masqueraded.
    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.key.src,
            self.to.seen_port(&self.key),
            self.key.protocol,
        )
    }

    /// Returns the key of its replies, if it is masqueraded.
    pub fn port_key(&self) -> PortKey {
        PortKey::new(
            self.to.endpoint,
            self.to.endpoint_port,
            self.to.node_port,
            self.key.protocol,
        )
    }
}

fn socket(addr: Addr, port: Port) -> SocketAddr {
    SocketAddr::new(addr.ip(), port.host())
}
