//! A connection, with the facts that the programs look up about it.

use dataplane_common::{
    Addr, Port, Protocol, Reason,
    capture::{self, Circumstances as _, Enrolled, HBONE, ListenerKey, RuleKey, SHARED, WAYPOINT},
    decide, first,
    tables::{Block, Endpoint, Frontend, FrontendKey},
};
use kernel::tables::Tables;

use super::{Client, Mesh};

/// A connection, with the data that the decision needs.
pub struct Call<'a> {
    pub mesh: &'a Mesh,
    pub tables: &'a Tables,
    pub client: &'a Client<'a>,
    pub enrolled: &'a Enrolled,
    pub to: (Addr, Port),
    pub protocol: Protocol,
}

impl Call<'_> {
    fn frontend(&self) -> Frontend {
        let (addr, port) = self.to;
        decide::find_frontend(self.tables, addr, port, self.protocol, self.client.own)
    }
}

impl capture::Rules for Call<'_> {
    fn rule(&self, key: &RuleKey) -> u32 {
        self.mesh.rule(key)
    }

    fn range(&self, policy: u32, addr: Addr) -> u32 {
        self.mesh.range(policy, addr)
    }
}

impl capture::Circumstances for Call<'_> {
    fn is_own(&self) -> bool {
        self.has(self.to.0)
    }

    fn is_itself(&self) -> bool {
        if self.is_by_packets() {
            return false;
        }
        let (addr, _) = self.to;
        let endpoint = decide::only_endpoint(self.tables, self.frontend());
        self.has(addr) || !endpoint.is_none() && self.has(endpoint.addr)
    }

    fn is_known(&self) -> bool {
        let (addr, port) = self.to;
        let frontend = self.frontend();
        if !frontend.is_none() {
            return decide::is_reachable(self.tables, frontend);
        }
        let key = FrontendKey::new(addr, port, self.protocol);
        first::is_known(self.mesh, &key)
    }

    fn is_refused(&self) -> bool {
        decide::is_refused(self.tables, self.frontend())
    }

    fn speaks_hbone(&self) -> bool {
        let frontend = self.frontend();
        if !frontend.is_none() {
            return decide::may_speak_hbone(self.tables, frontend);
        }
        self.known() & HBONE != 0
    }

    fn listens(&self) -> bool {
        if self.is_by_packets() {
            let key = ListenerKey::of_packets(self.enrolled.workload, self.to.0.is_v4());
            return self.mesh.listeners.contains(&key);
        }
        self.listens_at(self.mesh.config.outbound)
    }
}

impl Call<'_> {
    /// Returns whether a process listens at a port of loopback in the client's network namespace.
    pub fn listens_at(&self, port: Port) -> bool {
        let (port, v4) = (port.host(), self.to.0.is_v4());
        self.client.namespace.is_some_and(|namespace| {
            let found = namespace.inside(move || kernel::listening::listening(port));
            found.is_ok_and(|all| all.iter().any(|socket| socket.takes_loopback(v4)))
        })
    }

    /// Returns whether the proxy refuses a connection to this address, because several Pods have it and one speaks HBONE.
    pub fn is_unclear(&self) -> bool {
        self.frontend().is_none() && self.known() & (HBONE | SHARED) == HBONE | SHARED
    }

    /// Returns the value of the destination's address in `KNOWN`; 0: none.
    fn known(&self) -> u32 {
        let key = FrontendKey::address(self.to.0);
        self.mesh.held.known.get(&key).copied().unwrap_or(0)
    }

    /// Says whether the destination has a waypoint or speaks HBONE, if this decides.
    pub fn about_hbone(&self, reason: Reason) -> Option<String> {
        let has = |flag| self.enrolled.flags & flag != 0;
        let decides = match reason {
            Reason::Captured | Reason::Direct => has(Enrolled::ONLY_HBONE),
            Reason::ProxyDown => has(Enrolled::ENCRYPTS) && self.speaks_hbone(),
            _ => false,
        };
        let frontend = self.frontend();
        let block = decide::Tables::pool(self.tables, frontend.pool()).map(|pool| pool.block);
        let flags = block.map_or(0, Block::flags);
        let has_waypoint = if frontend.is_none() {
            self.known() & WAYPOINT != 0
        } else {
            flags & Block::WAYPOINT != 0
        };
        let is_encrypted = has(Enrolled::ENCRYPTS) && reason != Reason::Direct;
        if has_waypoint && is_encrypted && (decides || reason == Reason::Captured) {
            let text = "the destination has a waypoint, so only the proxy may connect: it sends the connection there, or refuses it";
            return Some(text.to_owned());
        }
        let text = match (frontend.is_none(), self.speaks_hbone()) {
            (true, true) if self.is_unclear() => {
                "several Pods have this address, and one of them speaks HBONE: the proxy refuses the connection"
            }
            (true, true) => "the Pod at this address speaks HBONE, so only the proxy may connect",
            (true, false) => "no Pod at this address is known to speak HBONE",
            (false, true) => {
                "an endpoint of the service speaks HBONE, so only the proxy may connect"
            }
            (false, false) => "no endpoint of the service speaks HBONE",
        };
        decides.then(|| text.to_owned())
    }

    /// Returns the number of slots of a service's endpoints that the egress policy denies, and the number of all slots.
    pub fn denied(&self) -> (usize, usize) {
        let pool = decide::Tables::pool(self.tables, self.frontend().pool());
        let Some(block) = pool.map(|pool| pool.block) else {
            return (0, 0);
        };
        if self.frontend().is_none() || block.flags() & Block::REACHABLE != 0 {
            return (0, 0);
        }
        let slots = (0..u32::from(block.len())).map(|offset| block.base() + offset);
        let endpoints = slots.filter_map(|slot| decide::Tables::endpoint(self.tables, slot));
        let all: Vec<_> = endpoints.filter(|endpoint| !endpoint.is_none()).collect();
        let is_denied = |endpoint: &&Endpoint| {
            let is_own = !self.is_by_packets() && self.has(endpoint.addr);
            !is_own && !capture::exempts(self, self.enrolled, endpoint.addr, endpoint.port)
        };
        (all.iter().filter(is_denied).count(), all.len())
    }

    /// Returns whether the proxy has an address. With capture by sockets, its addresses are the workload's own.
    fn has(&self, addr: Addr) -> bool {
        let local = self.mesh.held.locals.get(&addr);
        let own = if self.is_by_packets() {
            // The proxy is in the node's network namespace.
            Some(self.mesh.host_netns)
        } else {
            self.client.namespace.map(|namespace| namespace.cookie)
        };
        local.is_some_and(|local| Some(local.netns) == own)
    }

    /// Returns whether the workload is captured by its packets.
    pub fn is_by_packets(&self) -> bool {
        self.enrolled.flags & Enrolled::PACKETS != 0
    }
}
