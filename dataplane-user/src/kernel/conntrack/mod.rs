//! The packet path's flows, read and removed from user space.
//!
//! A flow has an entry for each direction (see [`dataplane_common::packet`]); here they are one
//! [`Flow`]. Only the programs make flows. The agent removes those that have ended or must end, and
//! adds those that the kernel's own conntrack translates already.

mod collect;
mod flow;
#[cfg(test)]
mod tests;

use std::{os::fd::OwnedFd, path::Path};

use aya_obj::generated::bpf_map_type::{BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_LRU_HASH};
use dataplane_common::{
    Addr,
    packet::{FlowKey, Forward, Masqueraded, NODE_ADDRS, PortKey, Reply, Tick, seen},
};
use nix::time::{ClockId, clock_gettime};

pub use collect::{Census, Collector};
pub use flow::{Back, Flow, State};

use super::{
    error::{Doing, Error},
    map::{Batches, Hash, Mapped, Plain},
    pins::{MapSpec, Pins},
    sys::Shape,
    tables::Usage,
};

const FORWARD: MapSpec = MapSpec::of_any_size(
    "FORWARD",
    Hash::<FlowKey, Forward>::shape(BPF_MAP_TYPE_LRU_HASH),
);
const REPLY: MapSpec = MapSpec::of_any_size(
    "REPLY",
    Hash::<FlowKey, Reply>::shape(BPF_MAP_TYPE_LRU_HASH),
);
const MASQUERADE: MapSpec = MapSpec::of_any_size(
    "MASQUERADE",
    Hash::<PortKey, Masqueraded>::shape(BPF_MAP_TYPE_LRU_HASH),
);
const ADDRESSES: MapSpec = MapSpec::of_any_size(
    "NODE_ADDRS",
    Shape {
        kind: BPF_MAP_TYPE_ARRAY,
        ..Mapped::<Addr>::shape(false)
    },
);

/// How many entries the tables have: FORWARD, REPLY, MASQUERADE.
pub type Entries = [u64; 3];

/// The flows of one node.
#[derive(Debug)]
pub struct Conntrack {
    forward: Hash<FlowKey, Forward>,
    reply: Hash<FlowKey, Reply>,
    masquerade: Hash<PortKey, Masqueraded>,
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
        let open = |spec: &MapSpec| pins.open_map(spec);
        let (Some(forward), Some(reply), Some(masquerade), Some(addresses)) = (
            open(&FORWARD)?,
            open(&REPLY)?,
            open(&MASQUERADE)?,
            open(&ADDRESSES)?,
        ) else {
            return Ok(None);
        };
        let addresses = Mapped::map(addresses.0, NODE_ADDRS.min(addresses.1.max_entries), false)
            .doing(|| "cannot map table NODE_ADDRS".to_owned())?;
        Ok(Some(Self {
            forward: Hash::from_fd(forward.0, forward.1.max_entries),
            reply: Hash::from_fd(reply.0, reply.1.max_entries),
            masquerade: Hash::from_fd(masquerade.0, masquerade.1.max_entries),
            node_addrs: addresses,
        }))
    }

    /// Tables that are pinned nowhere and that no program knows, for tests and measurements.
    ///
    /// # Errors
    /// If the kernel does not make them.
    pub fn unpinned(capacity: u32) -> Result<Self, Error> {
        let doing = || "cannot make tables for flows".to_owned();
        let kind = BPF_MAP_TYPE_LRU_HASH;
        Ok(Self {
            forward: Hash::create("FORWARD", kind, capacity).doing(doing)?,
            reply: Hash::create("REPLY", kind, capacity).doing(doing)?,
            masquerade: Hash::create("MASQUERADE", kind, capacity).doing(doing)?,
            node_addrs: Mapped::create("NODE_ADDRS", NODE_ADDRS).doing(doing)?,
        })
    }

    /// How many flows there is room for.
    pub fn capacity(&self) -> u32 {
        self.forward.capacity()
    }

    /// The tables' descriptors, with their names.
    pub fn descriptors(&self) -> [(&'static str, &OwnedFd); 3] {
        [
            (FORWARD.name, self.forward.fd()),
            (REPLY.name, self.reply.fd()),
            (MASQUERADE.name, self.masquerade.fd()),
        ]
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
            batches: self.forward.batches(),
            forward: Vec::new(),
        }
    }

    /// The flow from a client to a VIP.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn find(&self, key: &FlowKey) -> Result<Option<Flow>, Error> {
        let forward = self.forward.get(key).doing(reading(&FORWARD))?;
        forward.map(|forward| self.join(*key, forward)).transpose()
    }

    /// The flow that an endpoint's packet belongs to: what it carries is `key`.
    ///
    /// # Errors
    /// If the kernel does not let it be read.
    pub fn find_by_reply(&self, key: &FlowKey) -> Result<Option<Flow>, Error> {
        if let Some(reply) = self.reply.get(key).doing(reading(&REPLY))? {
            return self.find(&flow::of_reply(key, &reply));
        }
        let port = PortKey::new(key.src, key.src_port, key.dst_port, key.protocol);
        match self.masquerade.get(&port).doing(reading(&MASQUERADE))? {
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
            if let Some(back) = back.doing(reading(&MASQUERADE))?
                && flow::of_masqueraded(&flow.port_key(), &back) == key
            {
                flow.back = Back::Masqueraded(back);
            }
        } else {
            let back = self.reply.get(&flow.reply_key());
            if let Some(back) = back.doing(reading(&REPLY))?
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
            Back::Reply(back) => self.reply.add(&flow.reply_key(), back).doing(adding)?,
            Back::Masqueraded(back) => {
                self.masquerade.add(&flow.port_key(), back).doing(adding)?;
            }
        }
        // Last: who finds it finds the other.
        self.forward.add(&flow.key, &flow.forward).doing(adding)
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
            count(&FORWARD, &self.forward)?,
            count(&REPLY, &self.reply)?,
            count(&MASQUERADE, &self.masquerade)?,
        ])
    }

    /// How full the tables are, with so many entries.
    pub fn usage(&self, entries: Entries) -> [Usage; 3] {
        let [forward, reply, masquerade] = entries;
        [
            usage(&FORWARD, &self.forward, forward),
            usage(&REPLY, &self.reply, reply),
            usage(&MASQUERADE, &self.masquerade, masquerade),
        ]
    }
}

fn count<K: Plain, V: Plain>(spec: &MapSpec, hash: &Hash<K, V>) -> Result<u64, Error> {
    let mut count = 0;
    let mut entries = Vec::new();
    let mut batches = hash.batches();
    while batches.read(&mut entries).doing(reading(spec))? {
        count += entries.len() as u64;
        entries.clear();
    }
    Ok(count)
}

fn usage<K: Plain, V: Plain>(spec: &MapSpec, hash: &Hash<K, V>, used: u64) -> Usage {
    // An element: 48 bytes of `struct htab_elem` and a node of the LRU list of 24, then key and
    // value, each rounded up to eight; and a bucket of 16 for each.
    let element = 48 + size_of::<K>().next_multiple_of(8) + size_of::<V>().next_multiple_of(8) + 16;
    Usage {
        table: spec.name,
        used: u32::try_from(used).unwrap_or(u32::MAX),
        capacity: hash.capacity(),
        limit: hash.capacity(),
        bytes: u64::from(hash.capacity()) * element as u64,
    }
}

fn reading(spec: &MapSpec) -> impl FnOnce() -> String {
    let name = spec.name;
    move || format!("cannot read table {name}")
}

fn removing() -> String {
    "cannot remove a flow".to_owned()
}

/// A reader of every flow.
#[derive(Debug)]
pub struct Flows<'a> {
    conntrack: &'a Conntrack,
    batches: Batches<'a, FlowKey, Forward>,
    forward: Vec<(FlowKey, Forward)>,
}

impl Flows<'_> {
    /// The next flows, in no order, instead of what is in `flows`; `false` if there were no more.
    ///
    /// # Errors
    /// If the kernel does not let them be read.
    pub fn read(&mut self, flows: &mut Vec<Flow>) -> Result<bool, Error> {
        self.forward.clear();
        flows.clear();
        if !self
            .batches
            .read(&mut self.forward)
            .doing(reading(&FORWARD))?
        {
            return Ok(false);
        }
        for (key, forward) in &self.forward {
            flows.push(self.conntrack.join(*key, *forward)?);
        }
        Ok(true)
    }
}
