//! Handles the first packet of a flow: decides whether it is for a service, which endpoint gets it, and which address
//! and port the endpoint sees as the client's.

use dataplane_common::{
    Port, Reason,
    packet::{FlowKey, Tick, Translation},
    seen,
    tables::{Affinity, AffinityKey, Block, Endpoint, Kind},
};

use super::{
    Answer, DROP, Drawn, Input, Model, Moment, NEXT, Output,
    deliver::{Fit, is_nobody},
    flows::{Flow, Known},
    read::{Fragment, Headers},
    sequences::Numbers,
};
use crate::world::{Pool, To, is_own};

impl Model<'_> {
    /// Handles a packet without a known flow or, with `again`, a SYN on a known flow.
    pub(super) fn begin(
        &mut self,
        input: &Input,
        headers: &Headers,
        again: Option<Flow>,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Answer {
        let Some((index, kind)) = self.world.frontend(headers) else {
            return Ok(match again {
                Some(flow) => self.without_frontend(input, headers, &flow, at.tick),
                None => NEXT,
            });
        };
        // Such an address never belongs to a single host (RFC 1122 section 3.2.1.3). The stack drops packets from it,
        // and an ICMP error must not be sent to it.
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
        let of_node = input.leaves;
        if !of_node && !self.world.is_right(input.ifindex, headers, true) {
            return Ok(self.refuse(input, headers, Reason::SourceForged));
        }
        let Some(pool) = self.world.pools.get(&index) else {
            self.count(Reason::Dangling);
            return Ok(DROP);
        };
        let interface = &self.world.interfaces[&input.ifindex];
        let inside = of_node || self.world.is_from_pod(interface, headers.src);
        let (mut index, mut pool) = (index, pool);
        let masquerade;
        if [Kind::NODE_PORT, Kind::EXTERNAL_IP, Kind::LOAD_BALANCER].contains(&kind) {
            if kind == Kind::LOAD_BALANCER
                && pool.ranged
                && !self.world.contains(index, headers.src)
            {
                return Ok(self.refuse(input, headers, Reason::SourceDenied));
            }
            masquerade = of_node || pool.external == 0;
            if pool.external != 0 && !inside {
                index = pool.external;
                pool = &self.world.pools[&index];
            }
        } else {
            masquerade =
                of_node || self.world.masquerade_all() || (self.world.knows_pods() && !inside);
        }
        if pool.endpoints.is_empty() {
            let reason = match pool.flags & (Block::NO_SUCH_PORT | Block::NO_LOCAL) {
                Block::NO_SUCH_PORT => Reason::PortNotServed,
                Block::NO_LOCAL => Reason::NoLocalEndpoint,
                _ => Reason::NoEndpoints,
            };
            return Ok(self.refuse(input, headers, reason));
        }
        // The stack does not accept a packet of the node itself that arrives on an interface. So endpoints at the
        // node's own addresses are left out, except those that an IPsec policy refuses below.
        let mut elsewhere = pool.clone();
        if of_node {
            elsewhere
                .endpoints
                .retain(|endpoint| !is_own(endpoint.addr) || self.protects_flow(headers, endpoint));
            if elsewhere.endpoints.is_empty() && kind == Kind::LOAD_BALANCER {
                return Ok(NEXT);
            }
            if elsewhere.endpoints.is_empty() {
                return Ok(self.refuse(input, headers, Reason::NoRoute));
            }
        }
        let mut choice = self.choose(&elsewhere, headers, again.as_ref(), at, drawn)?;
        if choice.0.is_none() {
            return Ok(self.refuse(input, headers, Reason::NoEndpoints));
        }
        if let Some(flow) = &again
            && choice.1 != Reason::Kept
            && !flow.is_ended()
            && seen::of_replies(flow.to.seen) & seen::PACKET != 0
        {
            // The known endpoint takes no new connections: it is left out of the pool, and so was not chosen.
            if !self.is_silent(flow, at.tick) {
                choice = (endpoint_of(&flow.to), Reason::Kept, None);
            }
        }
        self.enter(input, headers, again, choice, masquerade, at, drawn)
    }

    /// Whether a flow's endpoint has owed an answer for too long. If not, the SYN probes the endpoint, which is
    /// recorded.
    fn is_silent(&mut self, flow: &Flow, now: Tick) -> bool {
        let mut numbers = self.state.flows.numbers(&flow.key);
        let silent = numbers.ask(now);
        self.state.flows.set_numbers(&flow.key, numbers);
        silent
    }

    /// Handles a SYN on a flow whose service is gone. If the connection is alive, the SYN goes to the endpoint.
    /// Otherwise the SYN opens a new connection that belongs to no service, so the flow is removed.
    fn without_frontend(
        &mut self,
        input: &Input,
        headers: &Headers,
        flow: &Flow,
        now: Tick,
    ) -> Output {
        if !self.world.is_right(input.ifindex, headers, true) {
            return NEXT;
        }
        let is_answered = seen::of_replies(flow.to.seen) & seen::PACKET != 0;
        if !flow.is_ended() && is_answered && !self.is_silent(flow, now) {
            let ends = self.toward_endpoint(flow);
            return self.onward(input, headers, &ends);
        }
        self.state.flows.remove(&flow.key);
        NEXT
    }

    /// Handles a connection to an address that is not a service. It passes unchanged, unless its replies would match
    /// another flow. Then the endpoint sees another port. `again`: the flow of the connection, if it already has
    /// another port.
    pub(super) fn pass(
        &mut self,
        input: &Input,
        headers: &Headers,
        again: Option<Flow>,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Answer {
        let itself = Flow::direct(headers.key());
        if again.is_none() {
            self.forget_answered(&headers.key(), at.tick);
        }
        if again.is_none() && !self.replies_taken(&itself, at.tick) {
            return Ok(NEXT);
        }
        if !self.world.is_right(input.ifindex, headers, true) {
            return Ok(self.refuse(input, headers, Reason::SourceForged));
        }
        let choice = (endpoint_of(&itself.to), Reason::Translated, None);
        self.enter(input, headers, again, choice, false, at, drawn)
    }

    /// Adds a flow to the chosen endpoint. `chosen` is the reason of the choice, `client` the key under which session
    /// affinity remembers it.
    #[expect(clippy::too_many_arguments, reason = "all that is known of the packet")]
    fn enter(
        &mut self,
        input: &Input,
        headers: &Headers,
        again: Option<Flow>,
        (endpoint, chosen, client): (Endpoint, Reason, Option<AffinityKey>),
        mut masquerade: bool,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Answer {
        let world = self.world;
        if self.protects_flow(headers, &endpoint) {
            return Ok(self.refuse(input, headers, Reason::IpsecPolicy));
        }
        let (to, iface) = world.way(headers.src, endpoint.addr, input.ifindex);
        if to == To::Nowhere || (input.leaves && to == To::Here) {
            return Ok(self.refuse(input, headers, Reason::NoRoute));
        }
        if !headers.may_be_fragmented
            && let Some(Fit::Told(output)) = self.too_big(input, headers, &to, false)
        {
            return Ok(output);
        }
        if let Some(flow) = again {
            if endpoint_of(&flow.to) == endpoint {
                if flow.is_ended() {
                    self.begin_anew(&flow, headers, at.tick);
                }
                let ends = self.toward_endpoint(&flow);
                return Ok(self.deliver(input, headers, &ends, &to));
            }
            self.state.flows.remove(&flow.key);
        }
        let translation = Translation {
            endpoint: endpoint.addr,
            endpoint_port: endpoint.port,
            node_port: Port::ANY,
            used: at.tick,
            seen: seen::PACKET,
            node_addr: 0,
        };
        let mut flow = Flow {
            key: headers.key(),
            to: translation,
        };
        masquerade |= headers.src == endpoint.addr;
        masquerade &= to != To::Here;
        if masquerade && let Some(Fit::Told(output)) = self.too_big(input, headers, &to, false) {
            return Ok(output);
        }
        let mut reason = chosen;
        if masquerade {
            reason = Reason::Masqueraded;
            let index = self.world.interfaces[&iface].masquerade[usize::from(!headers.v4)];
            if index == 0 {
                return Ok(self.refuse(input, headers, Reason::NoNodeAddress));
            }
            flow.to.node_addr = index;
        }
        if masquerade {
            match self.port(&flow, at.tick, drawn)? {
                Some(port) => flow.to.node_port = port,
                None => return Ok(self.refuse(input, headers, Reason::PortsExhausted)),
            }
        } else if self.replies_taken(&flow, at.tick) {
            match self.another_port(&flow, at.tick, drawn)? {
                Some(port) => flow.to.node_port = port,
                None => return Ok(self.refuse(input, headers, Reason::PortsExhausted)),
            }
        }
        let cell = self.state.flows.cell_for(&flow.key, at.tick)?;
        let numbers = Numbers::begun(headers);
        self.state.flows.enter(cell, &flow, numbers, at.tick)?;
        if let Some(client) = client {
            let used_at = at.ns;
            let entry = Affinity { endpoint, used_at };
            self.state.affinity.set(client, entry);
        }
        self.count(reason);
        let ends = self.toward_endpoint(&flow);
        Ok(self.deliver(input, headers, &ends, &to))
    }

    /// Whether an IPsec policy forbids a flow to an endpoint.
    fn protects_flow(&self, headers: &Headers, endpoint: &Endpoint) -> bool {
        let world = self.world;
        world.protects(headers.src, headers.dst)
            || world.protects(headers.src, endpoint.addr)
            || world.protects(headers.dst, headers.src)
            || world.protects(endpoint.addr, headers.src)
    }

    /// Restarts a flow to the same endpoint, for a new connection.
    fn begin_anew(&mut self, flow: &Flow, syn: &Headers, now: Tick) {
        let flows = &mut self.state.flows;
        flows.change(&flow.key, |to| {
            to.seen = seen::PACKET;
            to.used = now;
        });
        flows.set_numbers(&flow.key, Numbers::begun(syn));
    }

    /// Chooses the endpoint. Returns also the reason, and the key under which session affinity remembers the choice.
    fn choose(
        &mut self,
        pool: &Pool,
        headers: &Headers,
        again: Option<&Flow>,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Result<(Endpoint, Reason, Option<AffinityKey>), String> {
        let client = AffinityKey {
            client: headers.src,
            group: pool.affinity_group,
        };
        let affine = pool.affinity_seconds != 0;
        let entry = self.state.affinity.get(&client).filter(|_| affine);
        let timeout = u64::from(pool.affinity_seconds) * 1_000_000_000;
        let used = again.map(|flow| endpoint_of(&flow.to));
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
            return Ok((earlier, Reason::Kept, None));
        }
        // The program chose at random. The new flow shows the choice. If the packet was refused, any endpoint is
        // possible.
        let entered = drawn.flow(&headers.key()).map(|to| endpoint_of(&to));
        let before = self.state.flows.get(&headers.key());
        let before = before.map(|to| endpoint_of(&to));
        let endpoint = if let Some(now) = entered.filter(|now| before != Some(*now)) {
            now
        } else {
            self.guesses = pool.endpoints.len();
            pool.endpoints[self.guess % self.guesses]
        };
        if !pool.endpoints.contains(&endpoint) {
            return Err(format!("{endpoint:?} is not one of {:?}", pool.endpoints));
        }
        Ok((endpoint, Reason::Translated, affine.then_some(client)))
    }

    /// Handles a packet of the node itself to a VIP, for example from a raw socket. The packet is masqueraded. Returns
    /// `None` if this is not such a packet.
    pub(super) fn of_node(
        &mut self,
        input: &Input,
        headers: &Headers,
        at: Moment,
        drawn: &dyn Drawn,
    ) -> Result<Option<Output>, String> {
        if self.world.interfaces[&input.ifindex].pod || !self.world.is_vip(headers.dst) {
            return Ok(None);
        }
        let again = match self.request(&headers.key(), Some(headers), at.tick) {
            Known::Request(flow) if !headers.is_syn() => {
                let ends = self.toward_endpoint(&flow);
                let (to, _) = self.world.way(headers.src, ends.dst, input.ifindex);
                return Ok(Some(self.deliver(input, headers, &ends, &to)));
            }
            Known::Request(flow) => Some(flow),
            Known::No if !headers.is_tcp() || headers.is_syn() => None,
            _ => return Ok(None),
        };
        let kind = self.world.frontend(headers).map(|(_, kind)| kind);
        let begins = kind.is_some_and(|kind| kind != Kind::EXTERNAL_IP);
        if !begins || is_nobody(headers.src) || !is_own(headers.src) {
            // The SYN opens a new connection that belongs to no service, so the old flow is removed.
            if let Some(flow) = again.filter(|_| is_own(headers.src)) {
                self.state.flows.remove(&flow.key);
            }
            return Ok(None);
        }
        self.begin(input, headers, again, at, drawn).map(Some)
    }

    /// Handles an outgoing datagram. If it comes from a service's address and port, the model remembers that replies to
    /// it are for the node itself.
    pub(super) fn asks(&mut self, headers: &Headers, now: Tick) -> Result<(), String> {
        let key = headers.key();
        if headers.is_tcp() || !self.world.comes_from_service(headers) {
            return Ok(());
        }
        if !matches!(self.request(&key, Some(headers), now), Known::No) {
            return Ok(());
        }
        let mut flow = Flow::direct(key);
        if self.replies_taken(&flow, now) {
            return Ok(());
        }
        (flow.to.used, flow.to.seen) = (now, seen::PACKET);
        let cell = self.state.flows.cell_for(&key, now)?;
        self.state
            .flows
            .enter(cell, &flow, Numbers::begun(headers), now)
    }

    /// Finds the flow of a datagram to a service that answers an earlier datagram of the node.
    pub(super) fn asked(&mut self, key: &FlowKey, packet: Option<&Headers>, now: Tick) -> Known {
        match self.state.flows.by_client(key) {
            Some(flow) if flow.is_asked() => self.answer(key, packet, now, false),
            _ => Known::No,
        }
    }

    /// Whether another live flow has the same reply key as this flow, which is not masqueraded. Removes the other flow
    /// if it is over.
    pub(super) fn replies_taken(&mut self, flow: &Flow, now: Tick) -> bool {
        self.forget_answered(&flow.reply_key(), now)
    }

    /// Returns whether a flow with this reply key is alive, among those that are not masqueraded. Removes the flow if
    /// it is over.
    pub(super) fn forget_answered(&mut self, reply: &FlowKey, now: Tick) -> bool {
        let Some(other) = self.state.flows.by_client(reply) else {
            return false;
        };
        let over = other.is_ended() || other.is_timed_out(now);
        if over {
            self.state.flows.remove(&other.key);
        }
        !over
    }
}

pub(super) fn endpoint_of(to: &Translation) -> Endpoint {
    Endpoint::new(to.endpoint, to.endpoint_port)
}
