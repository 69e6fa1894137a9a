//! The first packet of a flow: is it for a service, which endpoint answers, and what does that see of
//! the client.

use dataplane_common::{
    Addr, Port, Protocol, Reason,
    packet::{FlowKey, PacketConfig, PortKey, Tick, seen},
    tables::{Affinity, AffinityKey, Block, Endpoint, Kind},
};

use super::{
    Answer, DROP, Drawn, Input, Model, Moment, NEXT,
    flows::{Flow, keep_seconds},
    read::{Fragment, Headers},
    seen_in,
};
use crate::world::{Pool, To};

impl Model<'_> {
    /// A packet of a flow that is not known; or, with `again`, a SYN on one that is.
    pub(super) fn begin(
        &mut self,
        input: &Input,
        headers: &Headers,
        again: Option<Flow>,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Answer {
        let Some((index, kind)) = self.world.frontend(headers) else {
            return Ok(NEXT);
        };
        // No single host has such an address (RFC 1122 section 3.2.1.3): the stack drops what comes
        // from it, and nobody may be told anything.
        if is_nobody(headers.src) {
            return Ok(NEXT);
        }
        if headers.fragment == Fragment::Later && headers.ports[1] == Port::ANY {
            if kind != Kind::CLUSTER_ADDRESS {
                return Ok(NEXT);
            }
            self.count(Reason::UnknownFragment);
            return Ok(DROP);
        }
        let Some(pool) = self.world.pools.get(&index) else {
            self.count(Reason::Dangling);
            return Ok(DROP);
        };
        let interface = &self.world.interfaces[&input.ifindex];
        let inside = self.world.is_from_pod(interface, headers.src);
        let (mut index, mut pool) = (index, pool);
        let mut masquerade;
        if [Kind::NODE_PORT, Kind::EXTERNAL_IP, Kind::LOAD_BALANCER].contains(&kind) {
            if kind == Kind::LOAD_BALANCER
                && pool.ranged
                && !self.world.contains(index, headers.src)
            {
                return Ok(self.refuse(input, headers, Reason::SourceDenied));
            }
            masquerade = pool.external == 0;
            if pool.external != 0 && !inside {
                index = pool.external;
                pool = &self.world.pools[&index];
            }
        } else {
            masquerade = self.world.masquerade_all() || (self.world.knows_pods() && !inside);
        }
        if pool.endpoints.is_empty() {
            let reason = match pool.flags {
                Block::NO_SUCH_PORT => Reason::PortNotServed,
                Block::NO_LOCAL => Reason::NoLocalEndpoint,
                _ => Reason::NoEndpoints,
            };
            return Ok(self.refuse(input, headers, reason));
        }
        let (endpoint, chosen) = self.choose(pool, headers, again.as_ref(), at, drawn)?;

        let (to, iface) = self.world.way(headers.src, endpoint.addr, input.ifindex);
        if to == To::Nowhere {
            return Ok(self.refuse(input, headers, Reason::NoRoute));
        }
        if let Some(output) = self.too_big(input, headers, &to) {
            return Ok(output);
        }
        if let Some(flow) = again {
            if (flow.endpoint, flow.endpoint_port) == (endpoint.addr, endpoint.port) {
                let ends = self.toward_endpoint(&flow);
                return Ok(self.deliver(input, headers, &ends, &to));
            }
            self.remove(&flow);
        }
        let mut flow = Flow {
            key: headers.key(),
            endpoint: endpoint.addr,
            endpoint_port: endpoint.port,
            node_addr: 0,
            node_port: Port::ANY,
            seen: 0,
        };
        masquerade |= headers.src == endpoint.addr;
        masquerade &= to != To::Here;
        masquerade = masquerade || self.replies_taken(&flow, at.tick);
        let mut reason = chosen;
        if masquerade {
            reason = Reason::Masqueraded;
            let index = self.world.interfaces[&iface].masquerade[usize::from(!headers.v4)];
            if index == 0 {
                return Ok(self.refuse(input, headers, Reason::NoNodeAddress));
            }
            flow.node_addr = index;
            match self.port(&flow, drawn)? {
                Some(port) => flow.node_port = port,
                None => return Ok(self.refuse(input, headers, Reason::PortsExhausted)),
            }
        }
        if !self.add_replies(&flow, at.tick) {
            return Err(format!("the entry for replies of {flow:?} was taken"));
        }
        self.add_requests(&flow, at.tick, seen_in(headers));
        self.count(reason);
        let ends = self.toward_endpoint(&flow);
        Ok(self.deliver(input, headers, &ends, &to))
    }

    /// Which endpoint it is, and why.
    fn choose(
        &mut self,
        pool: &Pool,
        headers: &Headers,
        again: Option<&Flow>,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Result<(Endpoint, Reason), String> {
        let client = AffinityKey {
            client: headers.src,
            group: pool.affinity_group,
        };
        let affine = pool.affinity_seconds != 0;
        let entry = self.state.affinity.get(&client).filter(|_| affine);
        let timeout = u64::from(pool.affinity_seconds) * 1_000_000_000;
        let used = again.map(|flow| Endpoint::new(flow.endpoint, flow.endpoint_port));
        let earlier = used.or(entry
            .filter(|entry| at.ns.saturating_sub(entry.used_at) <= timeout)
            .map(|entry| entry.endpoint));
        if let Some(earlier) = earlier
            && pool.endpoints.contains(&earlier)
        {
            if affine {
                self.state
                    .affinity
                    .change(&client, |entry| entry.used_at = at.ns);
            }
            return Ok((earlier, Reason::Kept));
        }
        // Drawn by lot. The flow's entry says which; if it was refused, the client's; else it is
        // one of them.
        let entered = drawn.forward(&headers.key());
        let before = self.state.forward.get(&headers.key());
        let fresh = entered.filter(|now| {
            before.is_none_or(|before| {
                (before.endpoint, before.endpoint_port) != (now.endpoint, now.endpoint_port)
            })
        });
        let endpoint = if let Some(now) = fresh {
            Endpoint::new(now.endpoint, now.endpoint_port)
        } else if let (true, Some(now)) = (affine, drawn.affinity(&client)) {
            now.endpoint
        } else {
            self.guesses = pool.endpoints.len();
            pool.endpoints[self.guess % self.guesses]
        };
        if !pool.endpoints.contains(&endpoint) {
            return Err(format!("{endpoint:?} is not one of {:?}", pool.endpoints));
        }
        if affine {
            let entry = Affinity {
                endpoint,
                used_at: at.ns,
            };
            self.state.affinity.set(client, entry);
        }
        Ok((endpoint, Reason::Translated))
    }

    /// Which port of the node's it is, or `None` if there is none left.
    fn port(&self, flow: &Flow, drawn: &dyn Drawn) -> Result<Option<Port>, String> {
        // What an endpoint's socket sends to a service is that one's; TCP's answers are no calls.
        let (to, protocol) = (self.world.node_addr(flow.node_addr), flow.key.protocol);
        let served = |port: Port| {
            protocol != Protocol::TCP
                && (PacketConfig::NODE_PORTS.contains(&port.host())
                    || self.world.is_served(to, port, protocol))
        };
        let free = |port: u16| {
            let port = Port::new(port);
            if served(port) {
                return false;
            }
            let key = PortKey::new(flow.endpoint, flow.endpoint_port, port, flow.key.protocol);
            !self.state.masquerade.has(&key)
        };
        let own = flow.key.src_port.host();
        if self.world.may_be_given(own) && free(own) {
            return Ok(Some(flow.key.src_port));
        }
        let entered = drawn.forward(&flow.key).filter(|now| {
            (now.endpoint, now.endpoint_port) == (flow.endpoint, flow.endpoint_port)
                && now.node_addr == flow.node_addr
        });
        let Some(entered) = entered else {
            // Thirty-two attempts may all fail where few ports are free, and only there.
            let ports = self.world.ports();
            let left = ports.iter().filter(|port| free(**port)).count();
            if left * 2 > ports.len() {
                return Err(format!("no port was found, of {left} that were free"));
            }
            return Ok(None);
        };
        let port = entered.node_port.host();
        if !self.world.may_be_given(port) {
            return Err(format!("port {port} may not be given to a flow"));
        }
        if !free(port) {
            return Err(format!("port {port} is another flow's, or a service's"));
        }
        Ok(Some(entered.node_port))
    }

    /// Whether another flow that lives has the key that this one's replies would be known by; one
    /// that does not live loses it.
    pub(super) fn replies_taken(&mut self, flow: &Flow, now: Tick) -> bool {
        let back = flow.reply_key();
        let Some(replies) = self.state.reply.get(&back) else {
            return false;
        };
        let client = (flow.key.src, flow.key.src_port);
        let vip = (replies.vip, replies.vip_port);
        let other = FlowKey::new(client.0, client.1, vip.0, vip.1, flow.key.protocol);
        let requests = self.state.forward.get(&other);
        let elsewhere = requests.as_ref().is_some_and(|entry| {
            (entry.endpoint, entry.endpoint_port) != (flow.endpoint, flow.endpoint_port)
                || entry.node_addr != 0
        });
        if elsewhere || other == flow.key {
            self.state.reply.remove(&back);
            return false;
        }
        let seen = requests.map_or(seen::PACKET, |entry| entry.seen);
        let closed = (seen | replies.seen) & seen::RST != 0 || seen & replies.seen & seen::FIN != 0;
        let keep = keep_seconds(flow.key.protocol, seen, replies.seen);
        if closed || replies.used.age_seconds(now) > keep {
            self.state.reply.remove(&back);
            self.state.forward.remove(&other);
            return false;
        }
        true
    }
}

/// Whether an address is never a single host's on a network: "this host", loopback, multicast and
/// what is reserved.
pub fn is_nobody(addr: Addr) -> bool {
    let octets = addr.octets();
    if addr.is_v4() {
        matches!(octets[12], 0 | 127 | 224..)
    } else {
        octets[0] == 0xff || (octets[..15] == [0; 15] && octets[15] <= 1)
    }
}
