//! The packet path's flows, read and removed from user space.
//!
//! A flow has an entry for each direction (see [`dataplane_common::packet`]); here they are one
//! [`Flow`]. Only the programs make flows. The agent removes those that have ended or must end, and
//! adds those that the kernel's own conntrack translates already.

mod collect;
mod flow;
mod table;
#[cfg(test)]
mod tests;

use std::path::Path;

use dataplane_common::{
    Addr,
    cells::CellKey,
    packet::{FlowKey, Forward, Masqueraded, NODE_ADDRS, PortKey, Reply, Tick, seen},
};
use nix::time::{ClockId, clock_gettime};

pub use collect::{Census, Collector};
pub use flow::{Back, Flow, State};
pub use table::{Table, Walk};

use super::{
    error::{Doing, Error},
    map::{Mapped, Plain},
    pins::{Pins, spec},
    tables::Usage,
};

/// Each table's cells, and the hash beside them.
pub(super) const FORWARD: [&str; 2] = ["FORWARD", "MORE_FORWARD"];
pub(super) const REPLY: [&str; 2] = ["REPLY", "MORE_REPLY"];
pub(super) const MASQUERADE: [&str; 2] = ["MASQUERADE", "MORE_MASQUERADE"];

/// How many entries the tables have: FORWARD, REPLY, MASQUERADE.
pub type Entries = [u64; 3];

/// The flows of one node.
#[derive(Debug)]
pub struct Conntrack {
    forward: Table<FlowKey, Forward>,
    reply: Table<FlowKey, Reply>,
    masquerade: Table<PortKey, Masqueraded>,
    /// What [`Forward::node_addr`] refers to.
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
    /// If what is there is not ours, or may not be opened.
    pub fn open(bpffs: &Path) -> Result<Option<Self>, Error> {
        let pins = Pins::new(bpffs);
        let (Some(forward), Some(reply), Some(masquerade), Some(addresses)) = (
            Table::open(&pins, FORWARD)?,
            Table::open(&pins, REPLY)?,
            Table::open(&pins, MASQUERADE)?,
            pins.open_map(spec("NODE_ADDRS"))?,
        ) else {
            return Ok(None);
        };
        let node_addrs = Mapped::map(addresses.0, NODE_ADDRS, false)
            .doing(|| "cannot map table NODE_ADDRS".to_owned())?;
        Ok(Some(Self {
            forward,
            reply,
            masquerade,
            node_addrs,
        }))
    }

    /// Tables that are pinned nowhere and that no program knows, with room for so many flows, for tests and
    /// measurements.
    ///
    /// # Errors
    /// If the kernel does not make them.
    pub fn unpinned(flows: u32) -> Result<Self, Error> {
        let doing = || "cannot make tables for flows".to_owned();
        Ok(Self {
            forward: Table::unpinned(FORWARD, flows).doing(doing)?,
            reply: Table::unpinned(REPLY, flows).doing(doing)?,
            masquerade: Table::unpinned(MASQUERADE, flows).doing(doing)?,
            node_addrs: Mapped::create("NODE_ADDRS", NODE_ADDRS).doing(doing)?,
        })
    }

    /// How many flows there is room for: the number that the agent was told, rounded up to a power of two.
    pub fn capacity(&self) -> u32 {
        self.forward.capacity()
    }

    /// The address that an endpoint sees the client of a masqueraded flow come from.
    pub fn node_addr(&self, index: u8) -> Option<Addr> {
        self.node_addrs
            .get(index.into())
            .filter(|addr| *addr != Addr::UNSPECIFIED)
    }

    /// Every flow, a few thousand at a time. What comes and goes meanwhile may or may not be among
    /// them.
    pub fn flows(&self) -> Flows<'_> {
        Flows {
            conntrack: self,
            walk: self.forward.walk(),
            forward: Vec::new(),
        }
    }

    /// The flow from a client to a VIP.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn find(&self, key: &FlowKey) -> Result<Option<Flow>, Error> {
        let forward = self.forward.get(key).doing(reading(&self.forward))?;
        forward.map(|forward| self.join(*key, forward)).transpose()
    }

    /// The flow that an endpoint's packet belongs to: what it carries is `key`.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn find_by_reply(&self, key: &FlowKey) -> Result<Option<Flow>, Error> {
        if let Some(reply) = self.reply.get(key).doing(reading(&self.reply))? {
            return self.find(&flow::of_reply(key, &reply));
        }
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        match self
            .masquerade
            .get(&port)
            .doing(reading(&self.masquerade))?
        {
            Some(masqueraded) if self.node_addr(masqueraded.node_addr) == Some(key.dst) => {
                self.find(&flow::of_masqueraded(&port, &masqueraded))
            }
            _ => Ok(None),
        }
    }

    fn join(&self, key: FlowKey, forward: Forward) -> Result<Flow, Error> {
        let mut flow = Flow {
            key,
            forward,
            back: Back::Missing,
        };
        if flow.is_foreign() {
            return Ok(flow);
        }
        // An entry may belong to another flow that shares the endpoint and the client's port.
        if flow.is_masqueraded() {
            let back = self.masquerade.get(&flow.port_key());
            if let Some(back) = back.doing(reading(&self.masquerade))?
                && flow::of_masqueraded(&flow.port_key(), &back) == key
            {
                flow.back = Back::Masqueraded(back);
            }
        } else {
            let back = self.reply.get(&flow.reply_key());
            if let Some(back) = back.doing(reading(&self.reply))?
                && flow::of_reply(&flow.reply_key(), &back) == key
            {
                flow.back = Back::Reply(back);
            }
        }
        Ok(flow)
    }

    /// Removes both entries of a flow, if `still` holds of the flow as it is now. Answers whether
    /// it was removed.
    ///
    /// A packet may come at any moment, so what is taken out is looked at once more, and put back if
    /// a packet has used it since. What remains is this: a packet that comes in the microsecond
    /// between taking out and putting back finds no flow and begins one, as it would have a moment
    /// later had the flow been removed; nothing that is there already is overwritten.
    ///
    /// # Errors
    /// If the kernel does not let it be read or removed.
    pub fn remove_if(&self, flow: &Flow, still: impl Fn(&Flow) -> bool) -> Result<bool, Error> {
        let Some(mut found) = self.find(&flow.key)? else {
            return Ok(false);
        };
        if !still(&found) {
            return Ok(false);
        }
        // The client's direction first: without it, the other leads to no new packets.
        match self.forward.take(&flow.key).doing(removing)? {
            Some(forward) => found.forward = forward,
            None => return Ok(false),
        }
        let (port_key, reply_key) = (found.port_key(), found.reply_key());
        found.back = match found.back {
            Back::Missing => Back::Missing,
            Back::Reply(_) => self
                .reply
                .take(&reply_key)
                .doing(removing)?
                .map_or(Back::Missing, Back::Reply),
            Back::Masqueraded(_) => self
                .masquerade
                .take(&port_key)
                .doing(removing)?
                .map_or(Back::Missing, Back::Masqueraded),
        };
        if still(&found) {
            return Ok(true);
        }
        self.add(&found)?;
        Ok(false)
    }

    /// Adds a flow, leaving alone what is there already.
    ///
    /// # Errors
    /// If the kernel does not take it.
    pub fn add(&self, flow: &Flow) -> Result<(), Error> {
        let adding = || "cannot add a flow".to_owned();
        match &flow.back {
            Back::Missing => {}
            Back::Reply(back) => {
                self.reply.add(&flow.reply_key(), back).doing(adding)?;
            }
            Back::Masqueraded(back) => {
                self.masquerade.add(&flow.port_key(), back).doing(adding)?;
            }
        }
        // Last: who finds it finds the other.
        self.forward.add(&flow.key, &flow.forward).doing(adding)?;
        Ok(())
    }

    /// Adds a flow that the kernel's own conntrack translates, so that its packets are left alone.
    ///
    /// # Errors
    /// If the kernel does not take it.
    pub fn add_foreign(
        &self,
        key: FlowKey,
        endpoint: (Addr, dataplane_common::Port),
    ) -> Result<(), Error> {
        self.add(&Flow {
            key,
            forward: Forward {
                endpoint: endpoint.0,
                endpoint_port: endpoint.1,
                node_port: dataplane_common::Port::ANY,
                used: now(),
                seen: seen::PACKET | seen::FOREIGN,
                node_addr: 0,
            },
            back: Back::Missing,
        })
    }

    /// Counts all entries, by reading them: about a second for a million flows. The agent does so all
    /// the time, in steps ([`Census::entries`]).
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn count(&self) -> Result<Entries, Error> {
        Ok([
            count(&self.forward)?,
            count(&self.reply)?,
            count(&self.masquerade)?,
        ])
    }

    /// How full the tables are, with so many entries.
    pub fn usage(&self, entries: Entries) -> [Usage; 3] {
        let [forward, reply, masquerade] = entries;
        [
            usage(&self.forward, forward),
            usage(&self.reply, reply),
            usage(&self.masquerade, masquerade),
        ]
    }
}

fn count<K: CellKey + Plain, V: Plain>(table: &Table<K, V>) -> Result<u64, Error> {
    let mut count = 0;
    let mut entries = Vec::new();
    let mut walk = table.walk();
    while walk.read(&mut entries).doing(reading(table))? {
        count += entries.len() as u64;
        entries.clear();
    }
    Ok(count)
}

fn usage<K: CellKey + Plain, V: Plain>(table: &Table<K, V>, used: u64) -> Usage {
    Usage {
        table: table.name(),
        used: u32::try_from(used).unwrap_or(u32::MAX),
        capacity: table.capacity(),
        limit: table.capacity(),
        bytes: table.bytes(),
    }
}

fn reading<K: CellKey + Plain, V: Plain>(
    table: &Table<K, V>,
) -> impl FnOnce() -> String + use<K, V> {
    let name = table.name();
    move || format!("cannot read table {name}")
}

fn removing() -> String {
    "cannot remove a flow".to_owned()
}

/// A reader of every flow.
#[derive(Debug)]
pub struct Flows<'a> {
    conntrack: &'a Conntrack,
    walk: Walk<'a, FlowKey, Forward>,
    forward: Vec<(FlowKey, Forward)>,
}

impl Flows<'_> {
    /// The next flows, in no order and perhaps none, instead of what is in `flows`; `false` if there were no more.
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn read(&mut self, flows: &mut Vec<Flow>) -> Result<bool, Error> {
        self.forward.clear();
        flows.clear();
        let reading = reading(&self.conntrack.forward);
        if !self.walk.read(&mut self.forward).doing(reading)? {
            return Ok(false);
        }
        for (key, forward) in &self.forward {
            flows.push(self.conntrack.join(*key, *forward)?);
        }
        Ok(true)
    }
}
