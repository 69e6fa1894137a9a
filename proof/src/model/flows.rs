//! Flows that are known: which one a packet belongs to, and how long it is remembered.

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, Forward, Masqueraded, PortKey, Reply, Tick, seen, timeout},
};

use super::{Model, write::Ends};

/// A flow, from both its entries.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Client to VIP.
    pub key: FlowKey,
    pub endpoint: Addr,
    pub endpoint_port: Port,
    /// Which of the node's addresses, and which port, the endpoint sees the client come from;
    /// index 0: the client's own.
    pub node_addr: u8,
    pub node_port: Port,
    /// What had been seen of its requests.
    pub seen: u8,
}

/// What is known of a packet's flow.
#[derive(Clone, Copy, Debug)]
pub enum Known {
    No,
    Request(Flow),
    Answer(Flow),
    /// The kernel's own conntrack translates it.
    Foreign,
}

impl Flow {
    /// A connection to an endpoint itself, as if that were its own VIP.
    pub fn direct(key: FlowKey) -> Self {
        Self {
            key,
            endpoint: key.dst,
            endpoint_port: key.dst_port,
            node_addr: 0,
            node_port: Port::ANY,
            seen: 0,
        }
    }

    pub fn reply_key(&self) -> FlowKey {
        FlowKey::new(
            self.endpoint,
            self.endpoint_port,
            self.key.src,
            self.key.src_port,
            self.key.protocol,
        )
    }

    pub fn port_key(&self) -> PortKey {
        PortKey::new(
            self.endpoint,
            self.endpoint_port,
            self.node_port,
            self.key.protocol,
        )
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

/// For how many seconds a flow is remembered, by what was seen of both directions.
pub fn keep_seconds(protocol: Protocol, requests: u8, replies: u8) -> u32 {
    let either = requests | replies;
    let both = requests & replies;
    if protocol == Protocol::TCP {
        if either & seen::RST != 0 {
            return timeout::TCP_RESET;
        }
        if both & seen::FIN != 0 {
            return timeout::TCP_CLOSED;
        }
        if either & seen::FIN != 0 {
            return timeout::TCP_HALF_CLOSED;
        }
    }
    match (protocol == Protocol::TCP, replies & seen::PACKET != 0) {
        (true, true) => timeout::TCP_ESTABLISHED,
        (true, false) => timeout::TCP_SYN,
        (false, true) => timeout::UDP_ANSWERED,
        (false, false) => timeout::UDP_UNANSWERED,
    }
}

impl Model<'_> {
    pub(super) fn toward_endpoint(&self, flow: &Flow) -> Ends {
        let masqueraded = flow.node_addr != 0;
        Ends {
            src: if masqueraded {
                self.world.node_addr(flow.node_addr)
            } else {
                flow.key.src
            },
            src_port: if masqueraded {
                flow.node_port
            } else {
                flow.key.src_port
            },
            dst: flow.endpoint,
            dst_port: flow.endpoint_port,
        }
    }

    /// What was seen of a flow's replies, whose entry is then used; `None` if it is gone, or another
    /// flow's.
    pub(super) fn seen_of_replies(&mut self, flow: &Flow, now: Tick) -> Option<u8> {
        let (client, vip) = (
            (flow.key.src, flow.key.src_port),
            (flow.key.dst, flow.key.dst_port),
        );
        if flow.node_addr == 0 {
            let entry = self.state.reply.get(&flow.reply_key())?;
            if (entry.vip, entry.vip_port) != vip {
                return None;
            }
            let used = |entry: &mut Reply| entry.used = now;
            self.state.reply.change(&flow.reply_key(), used);
            Some(entry.seen)
        } else {
            let entry = self.state.masquerade.get(&flow.port_key())?;
            let ours =
                (entry.vip, entry.vip_port) == vip && (entry.client, entry.client_port) == client;
            if !ours {
                return None;
            }
            let used = |entry: &mut Masqueraded| entry.used = now;
            self.state.masquerade.change(&flow.port_key(), used);
            Some(entry.seen)
        }
    }

    /// Makes the entry for replies; `false` if the key is taken.
    pub(super) fn add_replies(&mut self, flow: &Flow, now: Tick) -> bool {
        if flow.node_addr == 0 {
            let free = !self.state.reply.has(&flow.reply_key());
            if free {
                let entry = Reply {
                    vip: flow.key.dst,
                    vip_port: flow.key.dst_port,
                    used: now,
                    seen: 0,
                    padding: 0,
                    reserved: 0,
                };
                self.state.reply.set(flow.reply_key(), entry);
            }
            return free;
        }
        let free = !self.state.masquerade.has(&flow.port_key());
        if free {
            let entry = Masqueraded {
                vip: flow.key.dst,
                client: flow.key.src,
                vip_port: flow.key.dst_port,
                client_port: flow.key.src_port,
                used: now,
                seen: 0,
                node_addr: flow.node_addr,
            };
            self.state.masquerade.set(flow.port_key(), entry);
        }
        free
    }

    /// Makes the entry for requests.
    pub(super) fn add_requests(&mut self, flow: &Flow, now: Tick, seen: u8) {
        let entry = Forward {
            endpoint: flow.endpoint,
            endpoint_port: flow.endpoint_port,
            node_port: flow.node_port,
            used: now,
            seen,
            node_addr: flow.node_addr,
        };
        self.state.forward.set(flow.key, entry);
    }

    /// Removes both entries of a flow.
    pub(super) fn remove(&mut self, flow: &Flow) {
        if flow.node_addr == 0 {
            self.state.reply.remove(&flow.reply_key());
        } else {
            self.state.masquerade.remove(&flow.port_key());
        }
        self.state.forward.remove(&flow.key);
    }

    /// The flow of a packet from a client to a VIP.
    ///
    /// With the first packet in a tick, the other direction's entry is looked after: used, too, or made
    /// anew if it was pushed out; and a UDP flow that was over is forgotten.
    pub(super) fn request(&mut self, key: &FlowKey, packet: u8, now: Tick) -> Known {
        let Some(entry) = self.state.forward.get(key) else {
            return Known::No;
        };
        if entry.seen & seen::FOREIGN != 0 {
            self.state.forward.change(key, |entry| entry.used = now);
            return Known::Foreign;
        }
        let flow = Flow {
            key: *key,
            endpoint: entry.endpoint,
            endpoint_port: entry.endpoint_port,
            node_addr: entry.node_addr,
            node_port: entry.node_port,
            seen: entry.seen,
        };
        self.state.forward.change(key, |entry| {
            entry.seen |= packet;
            entry.used = now;
        });
        if entry.used == now {
            return Known::Request(flow);
        }
        match self.seen_of_replies(&flow, now) {
            None if !self.add_replies(&flow, now) => {
                self.state.forward.remove(key);
                Known::No
            }
            Some(replies)
                if key.protocol == Protocol::UDP
                    && entry.used.age_seconds(now)
                        > keep_seconds(key.protocol, entry.seen, replies) =>
            {
                self.remove(&flow);
                Known::No
            }
            _ => Known::Request(flow),
        }
    }

    /// Whether a packet may be a request of one flow and, from an endpoint, an answer of another that is masqueraded.
    pub(super) fn is_either(&self, key: &FlowKey) -> bool {
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        let masqueraded = self.state.masquerade.get(&port);
        self.state.forward.has(key)
            && masqueraded.is_some_and(|entry| self.world.node_addr(entry.node_addr) == key.dst)
    }

    /// The flow of a packet from an endpoint to an address of the node's, or to the client itself.
    pub(super) fn answer(
        &mut self,
        key: &FlowKey,
        packet: u8,
        now: Tick,
        masqueraded: bool,
    ) -> Known {
        let mut flow = Flow {
            key: *key,
            endpoint: key.src,
            endpoint_port: key.src_port,
            node_addr: 0,
            node_port: Port::ANY,
            seen: seen::PACKET,
        };
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        let used = if masqueraded {
            let Some(entry) = self.state.masquerade.get(&port) else {
                return Known::No;
            };
            if self.world.node_addr(entry.node_addr) != key.dst {
                return Known::No;
            }
            flow.node_addr = entry.node_addr;
            flow.node_port = key.dst_port;
            flow.key = FlowKey::new(
                entry.client,
                entry.client_port,
                entry.vip,
                entry.vip_port,
                key.protocol,
            );
            self.state.masquerade.change(&port, |entry| {
                entry.seen |= packet;
                entry.used = now;
            });
            entry.used
        } else {
            let Some(entry) = self.state.reply.get(key) else {
                return Known::No;
            };
            flow.key = FlowKey::new(
                key.dst,
                key.dst_port,
                entry.vip,
                entry.vip_port,
                key.protocol,
            );
            self.state.reply.change(key, |entry| {
                entry.seen |= packet;
                entry.used = now;
            });
            entry.used
        };
        if used != now {
            if self.state.forward.has(&flow.key) {
                let used = |entry: &mut Forward| entry.used = now;
                self.state.forward.change(&flow.key, used);
            } else {
                self.add_requests(&flow, now, seen::PACKET);
            }
        }
        Known::Answer(flow)
    }
}
