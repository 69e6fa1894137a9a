//! Finds the endpoints that a service lost. Flows and sockets that lead to them must end.
//!
//! The rules are kube-proxy's (`CleanStaleEntries` in its `conntrack` package): a flow from a service's address to an
//! address that is not a *serving* endpoint of the service ends. If a service has no serving endpoint, its flows stay
//! until it has one. Flows of a removed service or address stay until another service has the address.
//!
//! TCP connections continue as long as their endpoint answers. But when a service no longer lists an endpoint, serving
//! or not, the endpoint's address may belong to another pod: a SYN of such a connection must not go there.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use dataplane_common::{
    Addr, Port, Protocol,
    tables::{FrontendKey, Kind},
};
use imbl::ordmap::DiffItem;
use model::{Endpoint, Service, ServiceName, ServicePort, Snapshot};

use super::{Planner, wanted};

/// The endpoints that remain valid behind some VIPs. A flow or socket through one of these VIPs to any other endpoint
/// is stale.
#[derive(Clone, Debug, Default)]
pub struct Departed {
    /// The serving endpoints.
    serving: Endpoints,
    /// All listed endpoints of TCP services, whether they serve or not.
    listed: Endpoints,
}

/// Sorted endpoints by VIP and port.
type Endpoints = HashMap<FrontendKey, Arc<[(Addr, Port)]>>;

impl Departed {
    /// Returns whether no endpoint has left.
    pub fn is_empty(&self) -> bool {
        self.serving.is_empty() && self.listed.is_empty()
    }

    /// Returns whether a flow or socket may be stale.
    pub fn has_stale(&self) -> bool {
        !self.serving.is_empty()
    }

    /// Adds newer departures; they replace older ones of the same key.
    pub fn extend(&mut self, newer: Self) {
        self.serving.extend(newer.serving);
        self.listed.extend(newer.listed);
    }

    /// Returns whether a flow or a socket from `vip` to `endpoint` must end.
    ///
    /// `is_frontend` reports whether a key has an entry of its own. An address of this node may be the external IP of
    /// another service, and its ports are then not node ports.
    pub fn is_stale(
        &self,
        vip: (Addr, Port),
        protocol: Protocol,
        endpoint: (Addr, Port),
        is_frontend: impl Fn(&FrontendKey) -> bool,
    ) -> bool {
        is_missing(&self.serving, vip, protocol, endpoint, is_frontend)
    }

    /// Returns whether the TCP service at `vip` no longer lists `endpoint`, whether it serves or not. `is_frontend`:
    /// see [`Departed::is_stale`].
    pub fn is_unlisted(
        &self,
        vip: (Addr, Port),
        endpoint: (Addr, Port),
        is_frontend: impl Fn(&FrontendKey) -> bool,
    ) -> bool {
        is_missing(&self.listed, vip, Protocol::TCP, endpoint, is_frontend)
    }
}

fn is_missing(
    known: &Endpoints,
    vip: (Addr, Port),
    protocol: Protocol,
    endpoint: (Addr, Port),
    is_frontend: impl Fn(&FrontendKey) -> bool,
) -> bool {
    let exact = FrontendKey::new(vip.0, vip.1, protocol);
    let endpoints = known.get(&exact).or_else(|| {
        let node_port = FrontendKey::node_port(vip.0.is_v4(), vip.1, protocol);
        let endpoints = known.get(&node_port)?;
        (!is_frontend(&exact)).then_some(endpoints)
    });
    endpoints.is_some_and(|endpoints| endpoints.binary_search(&endpoint).is_err())
}

/// Compares consecutive plans to find endpoints that left.
#[derive(Debug)]
pub struct Departures {
    protocols: Vec<Protocol>,
    last: Snapshot,
}

impl Departures {
    /// Watches services of these protocols. The first plan has no predecessor: every flow to another endpoint is stale.
    pub fn new(protocols: &[Protocol]) -> Self {
        Self {
            protocols: protocols.to_vec(),
            last: Snapshot::default(),
        }
    }

    /// Returns the endpoints that left with the last written plan.
    pub fn after(&mut self, planner: &Planner) -> Departed {
        let mut departed = Departed::default();
        let last = std::mem::replace(&mut self.last, planner.snapshot().clone());
        let mut heirs = BTreeSet::new();
        for change in last.services.diff(&self.last.services) {
            let (old, new) = match change {
                DiffItem::Add(_, new) => (None, Some(new)),
                DiffItem::Update {
                    old: (_, old),
                    new: (_, new),
                } => (Some(old), Some(new)),
                DiffItem::Remove(_, old) => (Some(old), None),
            };
            if let Some(old) = old {
                heirs.extend(heirs_of(old, planner));
            }
            if let Some(new) = new {
                self.compare(old.map(|old| &**old), new, planner, &mut departed);
            }
        }
        for heir in heirs {
            if let Some(service) = self.last.services.get(&heir) {
                self.compare(None, service, planner, &mut departed);
            }
        }
        departed
    }

    fn compare(
        &self,
        old: Option<&Service>,
        new: &Service,
        planner: &Planner,
        departed: &mut Departed,
    ) {
        // A map, because a service may have every port.
        let id = |port: &ServicePort| (port.port, port.protocol);
        let old = old.map_or(&[][..], |old| &old.ports[..]);
        let before: HashMap<_, _> = old.iter().map(|port| (id(port), port)).collect();
        let [mut serving, mut listed] = [HashMap::new(), HashMap::new()];
        for port in &new.ports {
            let protocol = wanted::protocol(port.protocol);
            let before = before.get(&id(port)).copied();
            for v4 in [true, false] {
                let key = |is_node_port| (v4, protocol, is_node_port);
                if self.protocols.contains(&protocol) {
                    note(&mut serving, key, [before, Some(port)], |e| {
                        e.serving && e.addr.is_ipv4() == v4
                    });
                }
                if protocol == Protocol::TCP {
                    note(&mut listed, key, [before, Some(port)], |e| {
                        e.addr.is_ipv4() == v4
                    });
                }
            }
        }
        if serving.is_empty() && listed.is_empty() {
            return;
        }
        for (key, frontend) in planner.service_keys(&new.name) {
            let is_node_port = frontend.kind() == Kind::NODE_PORT;
            let id = (
                (key.addr.is_v4(), key.protocol, is_node_port),
                key.port.host(),
            );
            for (left, departed) in [
                (&serving, &mut departed.serving),
                (&listed, &mut departed.listed),
            ] {
                if let Some(endpoints) = left.get(&id) {
                    departed.insert(key, Arc::clone(endpoints));
                }
            }
        }
    }
}

/// Returns the other services that now own keys of `old`: flows to the endpoints of `old` do not belong to them.
fn heirs_of(old: &Service, planner: &Planner) -> BTreeSet<ServiceName> {
    let mut keys = Vec::new();
    wanted::keys(old, &mut keys);
    let owner = |key: &FrontendKey| planner.pool_owner(planner.frontend(key)?.pool());
    let owners = keys.iter().filter_map(|wanted| owner(&wanted.key));
    let others = owners.filter(|owner| owner.service != old.name);
    others.map(|owner| owner.service.clone()).collect()
}

/// Identifies a port: (IPv4, protocol, node port), and the number.
type PortId = ((bool, Protocol, bool), u16);

/// Records the present endpoints of a port that `wanted` selects, for each number of the port, if an endpoint has left.
/// `before` and `now` are the port in the former and in the present plan.
fn note(
    left: &mut HashMap<PortId, Arc<[(Addr, Port)]>>,
    key: impl Fn(bool) -> (bool, Protocol, bool),
    [before, now]: [Option<&ServicePort>; 2],
    wanted: impl Fn(&Endpoint) -> bool,
) {
    let Some(port) = now else { return };
    let id = |endpoint: &Endpoint| (Addr::from(endpoint.addr), Port::new(endpoint.port));
    let selected = port.endpoints.iter().filter(|endpoint| wanted(endpoint));
    let mut now: Vec<_> = selected.map(id).collect();
    now.sort_unstable();
    if now.is_empty() {
        return;
    }
    let earlier = before.map_or(&[][..], |port| &port.endpoints);
    let mut earlier = earlier
        .iter()
        .filter(|endpoint| wanted(endpoint))
        .map(id)
        .peekable();
    // Without a former state, flows may lead to endpoints that left earlier.
    let mut has_left = earlier.peek().is_none();
    let mut next = 0;
    for endpoint in earlier {
        // Nearly all stay where they were; a search for each would hold up changes of others.
        if now.get(next) != Some(&endpoint) {
            let Ok(found) = now.binary_search(&endpoint) else {
                has_left = true;
                break;
            };
            next = found;
        }
        next += 1;
    }
    if !has_left {
        return;
    }
    let now: Arc<[_]> = now.into();
    for (is_node_port, number) in [(false, Some(port.port)), (true, port.node_port)] {
        let Some(number) = number else { continue };
        left.entry((key(is_node_port), number))
            .or_insert_with(|| Arc::clone(&now));
    }
}
