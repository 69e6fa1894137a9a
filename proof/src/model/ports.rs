//! The port that the endpoint sees: for masqueraded flows, and for clients whose own port is taken.

use dataplane_common::{Port, Protocol, Reason, packet::Tick, seen};

use super::{Drawn, Model, begin::endpoint_of, flows::Flow};

impl Model<'_> {
    /// Returns the port of the node for a masqueraded flow, or `None` if no port was found.
    pub(super) fn port(
        &mut self,
        flow: &Flow,
        now: Tick,
        drawn: &dyn Drawn,
    ) -> Result<Option<Port>, String> {
        // A datagram from an endpoint to a service belongs to the service, so the node's port must not be a service's.
        // TCP replies cannot be mistaken for requests.
        let (addr, protocol) = (self.world.node_addr(flow.to.node_addr), flow.key.protocol);
        let served =
            |port: Port| protocol != Protocol::TCP && self.world.is_served(addr, port, protocol);
        // Flows to one endpoint from the same node port share one slot. A flow to another endpoint may hash to the same
        // slot.
        let free = |port: u16| {
            let mut flow = *flow;
            flow.to.node_port = Port::new(port);
            !served(flow.to.node_port) && self.state.flows.has_slot(&flow, now)
        };
        // The programs try a limited number of ports. All of them may be taken, but only if few ports are free.
        let are_few = || {
            let left = (1024..=u16::MAX).filter(|port| free(*port)).count();
            if left > 64_512 / 4 {
                return Err(format!("no port was found, of {left} that were free"));
            }
            Ok(())
        };
        let own = flow.key.src_port.host();
        if self.world.is_nobodys(own, protocol) && free(own) {
            return Ok(Some(flow.key.src_port));
        }
        let entered = drawn.flow(&flow.key).filter(|to| {
            endpoint_of(to) == endpoint_of(&flow.to) && to.node_addr == flow.to.node_addr
        });
        let Some(entered) = entered else {
            are_few()?;
            return Ok(None);
        };
        let port = entered.node_port.host();
        if port < 1024 {
            return Err(format!("port {port} may not be given to a flow"));
        }
        if !free(port) {
            are_few()?;
            let mut given = *flow;
            given.to.node_port = entered.node_port;
            let other = self.state.flows.with_slot(&given);
            let other = other.filter(|other| {
                let is_protected = other.key.protocol == Protocol::TCP
                    && other.to.seen & seen::ASSURED != 0
                    && !other.is_ended();
                !other.is_foreign() && !is_protected && !served(entered.node_port)
            });
            let Some(other) = other else {
                return Err(format!(
                    "port {port} has another flow's slot, or is a service's"
                ));
            };
            // The new flow evicts the other flow and takes its port.
            self.state.flows.remove(&other.key);
            self.count(Reason::FlowPushedOut);
        }
        Ok(Some(entered.node_port))
    }

    /// Returns another port for the endpoint to see, for a client whose own port is taken. No other flow of the client
    /// to the endpoint has this port. It is privileged if the client's own port is privileged.
    ///
    /// # Errors
    /// If the program chose no port, or a port that does not fit.
    pub(super) fn another_port(
        &mut self,
        flow: &Flow,
        now: Tick,
        drawn: &dyn Drawn,
    ) -> Result<Option<Port>, String> {
        let Some(entered) = drawn
            .flow(&flow.key)
            .filter(|to| endpoint_of(to) == endpoint_of(&flow.to) && to.node_addr == 0)
        else {
            return Err(format!("no other port was found for {flow:?}"));
        };
        let (port, own) = (entered.node_port.host(), flow.key.src_port.host());
        let range = match own {
            ..512 => 1..=511,
            512..1024 => 600..=1023,
            1024.. => 1024..=u16::MAX,
        };
        if port == own || !range.contains(&port) {
            return Err(format!("port {port} is given to a client at port {own}"));
        }
        let mut given = *flow;
        given.to.node_port = entered.node_port;
        if self.replies_taken(&given, now) {
            return Err(format!("port {port} is another flow's"));
        }
        Ok(Some(entered.node_port))
    }
}
