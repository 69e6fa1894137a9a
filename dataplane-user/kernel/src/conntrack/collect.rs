//! Removes expired flows, a few thousand at a time: the caller decides how fast.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
};

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{FlowKey, Tick},
};

use super::{Conntrack, Flow, Flows, State, now};

/// The result of a walk through all flows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Number of flows by protocol and state, without the removed flows.
    pub flows: BTreeMap<(Protocol, State), u64>,
    /// Flows that were over, and removed.
    pub removed: u64,
    /// Cells whose holders had died meanwhile, and that were freed.
    pub freed: u64,
    /// The services' addresses that the flows go to ([`Flow::our_vip`]).
    pub vips: HashSet<Addr>,
    /// How many flows do not belong to a service ([`Flow::is_direct`]).
    pub direct: u64,
    /// How many flows began on the path through the stack; `None`: flows begin there, or no program looks for them.
    pub through: Option<u64>,
    /// The endpoints with the most ports of the node, in descending order: at most `BUSIEST`.
    pub ports: Vec<Ports>,
    /// How many ports an endpoint can have.
    pub most_ports: u32,
}

/// Number of endpoints whose ports a census reports.
const BUSIEST: usize = 10;

/// How many of the node's ports masqueraded flows to an endpoint have, of [`Census::most_ports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// How many ports.
    pub used: u32,
}

impl Census {
    /// How many flows there are.
    pub fn total(&self) -> u64 {
        self.flows.values().sum()
    }
}

/// The flows that the kernel's own conntrack translates. A walk reads them once, and only if it needs them.
#[derive(Debug)]
enum Foreign {
    Unasked,
    Known(HashSet<FlowKey>),
    /// They cannot be read, so none of them is known to be over.
    Unknown,
}

/// The ports that the kernel's own conntrack has assigned to connections to our endpoints.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Ports of the node that endpoints see ([`Conntrack::hold_port`]).
    pub ports: HashSet<FlowKey>,
    /// When the ports were read.
    pub asked: Tick,
}

/// One walk through all flows.
#[derive(Debug)]
pub struct Collector<'a> {
    conntrack: &'a Conntrack,
    flows: Flows<'a>,
    batch: Vec<Flow>,
    census: Census,
    /// How many ports masqueraded flows to each endpoint have.
    ports: HashMap<(Protocol, Addr, Port), u32>,
    /// The flows that the kernel's own conntrack translates.
    foreign: Foreign,
    /// The ports that it has assigned.
    listed: Option<&'a Listed>,
}

impl<'a> Collector<'a> {
    /// Begins a walk. `listed`: the ports that the kernel's own conntrack has assigned; other ports that were held
    /// before become free. `None` if the caller did not ask for them, or they cannot be read.
    pub fn new(conntrack: &'a Conntrack, listed: Option<&'a Listed>) -> Self {
        Self {
            conntrack,
            flows: conntrack.flows(),
            batch: Vec::new(),
            census: Census {
                through: conntrack.leaves_stack().then_some(0),
                ..Census::default()
            },
            ports: HashMap::new(),
            foreign: Foreign::Unasked,
            listed,
        }
    }

    /// Examines the next few thousand flows, and removes those that are over. Returns the result at the end of the
    /// walk.
    ///
    /// `foreign` reads the flows of the kernel's own conntrack. If it returns `None`, they cannot be read, and stay
    /// until a later walk.
    pub fn step(&mut self, foreign: impl FnOnce() -> Option<HashSet<FlowKey>>) -> Option<Census> {
        if self.flows.read(&mut self.batch) {
            self.remove(now(), foreign);
            return None;
        }
        Some(Census {
            freed: self.flows.free_held(),
            ports: busiest(&self.ports),
            most_ports: self.conntrack.table.ports(),
            ..std::mem::take(&mut self.census)
        })
    }

    fn remove(&mut self, now: Tick, ask_foreign: impl FnOnce() -> Option<HashSet<FlowKey>>) {
        let timeouts = self.conntrack.timeouts();
        let over = |flow: &Flow| flow.is_over(now, &timeouts);
        if matches!(self.foreign, Foreign::Unasked)
            && self
                .batch
                .iter()
                .any(|f| f.is_foreign() && !f.holds_port() && over(f))
        {
            self.foreign = ask_foreign().map_or(Foreign::Unknown, Foreign::Known);
        }
        for flow in &self.batch {
            let lives_elsewhere = flow.is_foreign()
                && match &self.foreign {
                    Foreign::Known(flows) => flows.contains(&flow.key),
                    Foreign::Unasked | Foreign::Unknown => true,
                };
            let is_over = if flow.holds_port() {
                self.listed.is_some_and(|listed| {
                    // Not one that was added since.
                    !listed.ports.contains(&flow.key) && flow.to.used.ticks_before(listed.asked) > 0
                }) && self.conntrack.remove_if(flow, Flow::holds_port)
            } else {
                over(flow) && !lives_elsewhere && self.conntrack.remove_if(flow, over)
            };
            if is_over {
                self.census.removed += 1;
            } else {
                let kind = (flow.protocol(), flow.state());
                *self.census.flows.entry(kind).or_default() += 1;
                self.census.vips.extend(flow.our_vip());
                self.census.direct += u64::from(flow.is_direct());
                // A cell of a foreign flow has the path of the flow that was there before.
                if let Some(through) = &mut self.census.through
                    && !flow.is_foreign()
                {
                    *through += u64::from(self.conntrack.table.is_through(&flow.key));
                }
                if flow.is_masqueraded() {
                    let endpoint = (flow.protocol(), flow.to.endpoint, flow.to.endpoint_port);
                    *self.ports.entry(endpoint).or_default() += 1;
                }
            }
        }
    }
}

fn busiest(ports: &HashMap<(Protocol, Addr, Port), u32>) -> Vec<Ports> {
    let mut all: Vec<Ports> = ports
        .iter()
        .map(|(&(protocol, addr, port), &used)| Ports {
            protocol,
            endpoint: SocketAddr::new(addr.ip(), port.host()),
            used,
        })
        .collect();
    all.sort_unstable_by_key(|ports| (u32::MAX - ports.used, ports.endpoint, ports.protocol));
    all.truncate(BUSIEST);
    all
}
