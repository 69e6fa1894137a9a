//! The packet path's flows, read and removed from user space.
//!
//! Only the programs make flows (see [`dataplane_common::packet`]). The agent removes those that have ended or must
//! end, and adds those that the kernel's own conntrack translates already.

mod collect;
mod flow;
mod forecast;
pub mod room;
mod table;
#[cfg(test)]
mod tests;

use std::{collections::HashSet, path::Path};

pub use collect::{Census, Collector, Listed, Ports};
pub use dataplane_common::states::State;
use dataplane_common::{
    Addr, Port,
    packet::{FlowKey, NODE_ADDRS, PacketConfig, PortKey, Tick, Translation},
    seen,
    states::Timeouts,
};
pub use flow::Flow;
use nix::time::{ClockId, clock_gettime};
pub use table::{Table, Walk};

use super::{
    error::{Doing, Error},
    map::Mapped,
    pins::{Pins, spec},
    tables::Usage,
};

/// The flows of one node.
#[derive(Debug)]
pub struct Conntrack {
    table: Table,
    /// The addresses that [`Translation::node_addr`] refers to.
    node_addrs: Mapped<Addr>,
}

/// The clock of the programs, now.
pub fn now() -> Tick {
    // This clock is always there.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or_else(|_| std::time::Duration::ZERO, std::time::Duration::from);
    Tick::from_ns(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

impl Conntrack {
    /// Opens the pinned tables; `None` if there are none: the packet path is off, or nothing is
    /// pinned at all.
    ///
    /// # Errors
    /// If the pins are not ours, or may not be opened.
    pub fn open(bpffs: &Path) -> Result<Option<Self>, Error> {
        let pins = Pins::new(bpffs);
        let (Some(table), Some(addresses)) =
            (Table::open(&pins)?, pins.open_map(spec("NODE_ADDRS"))?)
        else {
            return Ok(None);
        };
        let node_addrs = Mapped::map(addresses.0, NODE_ADDRS, false)
            .doing(|| "cannot map table NODE_ADDRS".to_owned())?;
        Ok(Some(Self { table, node_addrs }))
    }

    /// Creates tables with room for this many flows, for tests and measurements. The tables are not pinned, and no
    /// program uses them.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn unpinned(flows: u32) -> Result<Self, Error> {
        let doing = || "cannot make tables for flows".to_owned();
        Ok(Self {
            table: Table::unpinned(flows).doing(doing)?,
            node_addrs: Mapped::create("NODE_ADDRS", NODE_ADDRS).doing(doing)?,
        })
    }

    /// Returns how many flows there is room for: the agent's configured number, rounded up to a power of two.
    pub fn capacity(&self) -> u32 {
        self.table.capacity()
    }

    /// Returns the timeouts of flows.
    pub fn timeouts(&self) -> Timeouts {
        self.table.timeouts()
    }

    /// Whether programs look for flows on the path through the stack, and begin none.
    fn leaves_stack(&self) -> bool {
        self.table.config().flags & PacketConfig::STACK == PacketConfig::STACK_OUT
    }

    /// The address that an endpoint sees the client of a masqueraded flow come from.
    pub fn node_addr(&self, index: u8) -> Option<Addr> {
        self.node_addrs
            .get(index.into())
            .filter(|addr| *addr != Addr::UNSPECIFIED)
    }

    /// Returns a reader of all flows, a few thousand at a time. A flow that is added or removed meanwhile may be
    /// missed.
    pub fn flows(&self) -> Flows<'_> {
        Flows {
            walk: self.table.walk(),
            entries: Vec::new(),
        }
    }

    /// The flow from a client to a VIP.
    pub fn find(&self, key: &FlowKey) -> Option<Flow> {
        let to = self.table.get(key)?;
        Some(Flow { key: *key, to })
    }

    /// Finds the flow of a packet that an endpoint sent. `key`: the packet's addresses, ports and protocol.
    pub fn find_by_reply(&self, key: &FlowKey) -> Option<Flow> {
        if let Some(flow) = self.table.by_client(key) {
            return self.find(&flow);
        }
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        let flow = self.find(&self.table.by_node(&port)?)?;
        if flow.is_foreign() {
            return None;
        }
        (self.node_addr(flow.to.node_addr) == Some(key.dst)).then_some(flow)
    }

    /// Removes a flow if `still` returns true for its present state. Returns whether it was removed.
    ///
    /// A packet may arrive at any time, so `still` is called once more when no packet can find the flow any longer. One
    /// gap remains: a packet that arrives in the microsecond before the flow is restored finds no flow, and begins
    /// none.
    pub fn remove_if(&self, flow: &Flow, still: impl Fn(&Flow) -> bool) -> bool {
        let still = |to: &Translation| {
            still(&Flow {
                key: flow.key,
                to: *to,
            })
        };
        self.table.get(&flow.key).is_some_and(|to| still(&to))
            && self.table.take_if(&flow.key, still).is_some()
    }

    /// Records that a TCP connection's service no longer lists its endpoint: the connection continues, and a new SYN
    /// goes to another endpoint.
    pub fn depart(&self, flow: &Flow) {
        self.table.depart(&flow.key);
    }

    /// Adds a flow and leaves an existing one alone; returns whether it was added.
    pub fn add(&self, flow: &Flow) -> bool {
        self.table.add(&flow.key, &flow.to)
    }

    /// Adds a flow that the kernel's own conntrack translates, so that its packets are left alone; whether it was
    /// added.
    pub fn add_foreign(&self, key: FlowKey, endpoint: (Addr, Port)) -> bool {
        self.add(&Flow {
            key,
            to: Translation {
                endpoint: endpoint.0,
                endpoint_port: endpoint.1,
                node_port: Port::ANY,
                used: now(),
                seen: seen::PACKET | seen::FOREIGN,
                node_addr: 0,
            },
        })
    }

    /// Reserves a port of the node for a connection that the kernel's own conntrack masquerades, so that no other flow
    /// to the endpoint gets it. `key`: the connection as the endpoint sees it, from the node to itself. Returns `false`
    /// if a flow of ours has the port, or if there is no room.
    pub fn hold_port(&self, key: FlowKey) -> bool {
        self.table.touch(&key)
            || self.add(&Flow {
                key,
                to: Translation {
                    endpoint: key.dst,
                    endpoint_port: key.dst_port,
                    node_port: key.src_port,
                    used: now(),
                    seen: seen::PACKET | seen::FOREIGN,
                    node_addr: 1,
                },
            })
    }

    /// Whether a port is held like that.
    pub fn holds_port(&self, key: &FlowKey) -> bool {
        self.find(key).is_some_and(|flow| flow.holds_port())
    }

    /// Counts all flows, by reading them: some 50 ms for a million. The agent does so all the time, in steps
    /// ([`Census::total`]).
    pub fn count(&self) -> u64 {
        let mut count = 0;
        let mut flows = self.flows();
        let mut batch = Vec::new();
        while flows.read(&mut batch) {
            count += batch.len() as u64;
        }
        count
    }

    /// Returns the services' addresses in our flows. Reads all flows ([`Conntrack::count`]).
    pub fn vips(&self) -> HashSet<Addr> {
        let mut vips = HashSet::new();
        let mut flows = self.flows();
        let mut batch = Vec::new();
        while flows.read(&mut batch) {
            vips.extend(batch.iter().filter_map(Flow::our_vip));
        }
        vips
    }

    /// Returns how full the table is with this many flows.
    pub fn usage(&self, flows: u64) -> Usage {
        Usage {
            table: self.table.name(),
            used: u32::try_from(flows).unwrap_or(u32::MAX),
            capacity: self.table.capacity(),
            limit: self.table.capacity(),
            bytes: self.table.bytes(),
        }
    }
}

/// A reader of every flow.
#[derive(Debug)]
pub struct Flows<'a> {
    walk: Walk<'a>,
    entries: Vec<(FlowKey, Translation)>,
}

impl Flows<'_> {
    /// Replaces the content of `flows` by the next flows, in no particular order. The result may be empty. Returns
    /// `false` at the end of the table.
    pub fn read(&mut self, flows: &mut Vec<Flow>) -> bool {
        flows.clear();
        self.entries.clear();
        let more = self.walk.read(&mut self.entries);
        flows.extend(self.entries.iter().map(|&(key, to)| Flow { key, to }));
        more
    }

    /// Frees the cells whose holders have died meanwhile; returns how many.
    pub fn free_held(&self) -> u64 {
        self.walk.free_held()
    }
}
