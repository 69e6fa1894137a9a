//! Foretells whether a new flow gets a port, a cell and a slot, by the programs' rules and without any change.

use std::iter;

use dataplane_common::{
    Port,
    cells::{self, CellKey as _, Choice, Memory as _, PORTS_LOOKED_AT},
    packet::{FlowKey, PacketConfig, PortKey, client_ports, need},
};

use super::{Conntrack, now};

impl Conntrack {
    /// Returns whether a new flow finds a cell.
    pub fn has_room(&self, key: &FlowKey) -> bool {
        cells::has_room(&&self.table, key, now())
    }

    /// Returns whether the replies of a new flow that is not masqueraded find a slot. `reply`: the endpoint's packet.
    pub fn has_slot(&self, reply: &FlowKey) -> bool {
        let table = &self.table;
        cells::has_slot(&table, reply.place(table.secret()), now())
    }

    /// Returns the port that an endpoint sees of a client whose flow is not masqueraded: the client's own or, if a live
    /// flow has the replies to it, the first free one of its range. (The programs try sixteen at random.) `reply`: the
    /// endpoint's packet to the client's own port.
    pub fn client_port(&self, reply: &FlowKey) -> Option<Port> {
        let (first, last) = client_ports(reply.dst_port);
        let others = (first..=last).map(Port::new);
        iter::once(reply.dst_port).chain(others).find(|port| {
            let dst_port = *port;
            !self.has_replies(&FlowKey { dst_port, ..*reply })
        })
    }

    /// Returns whether a live flow that is not masqueraded has these replies.
    fn has_replies(&self, reply: &FlowKey) -> bool {
        let key = self.table.by_client(reply);
        let flow = key.and_then(|key| self.find(&key));
        flow.is_some_and(|flow| !flow.is_ended() && !flow.is_over(now(), &self.timeouts()))
    }

    /// Returns whether a port of the node's is free for another masqueraded flow to an endpoint. (The programs try 1 024 at
    /// random.) `is_in_use`: whether something else than a flow has a port.
    pub fn has_free_port(&self, endpoint: &PortKey, is_in_use: impl Fn(Port) -> bool) -> bool {
        let (table, config, now) = (&self.table, self.table.config(), now());
        (PacketConfig::FIRST_PORT..=u16::MAX).any(|port| {
            let key = PortKey {
                node_port: Port::new(port),
                ..*endpoint
            };
            !config.avoids(port, key.protocol, need::ALL)
                && !cells::is_home_taken(&table, key.place(table.secret()), now)
                && !is_in_use(key.node_port)
        })
    }

    /// Returns the probability that the programs can evict a flow to an endpoint for its port, in one of their attempts: each
    /// looks at the flows of seventeen ports after a random number.
    pub fn evicts_port(&self, endpoint: &PortKey) -> f64 {
        let (table, now) = (&self.table, now());
        let evicts = |random: &u16| {
            let mut choice = Choice::default();
            for second in [false, true] {
                for nth in 0..PORTS_LOOKED_AT {
                    let port = cells::port_looked_at(u32::from(*random), nth);
                    let key = PortKey {
                        node_port: Port::new(port),
                        ..*endpoint
                    };
                    cells::look_at_port(&table, &mut choice, &key, second, now);
                }
            }
            cells::may_evict(&choice)
        };
        let count = (0..=u16::MAX).filter(evicts).count();
        f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / 65_536.0
    }
}
