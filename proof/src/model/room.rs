//! The places of flows in the tables: which flows a new flow evicts, and which ports of the node have no free slot.
//!
//! Each flow has a cell. A slot leads to the cell from the key of the flow's replies. `dataplane_common::cells` defines
//! the candidates for both ([`cells_of`], [`slots_of`]); the model tries the candidates in the same order, in maps.

use dataplane_common::{
    cells::{CellKey as _, OTHERS, candidate},
    packet::{FlowKey, PortKey, Tick, Translation},
};

use super::{
    flows::{Flow, gives_way},
    sequences::Numbers,
    table::Table,
};

/// The flows by their keys, and their cells and slots.
#[derive(Clone, Debug)]
pub struct Flows {
    table: Table<FlowKey, Translation>,
    numbers: Table<FlowKey, Numbers>,
    cells: Table<u32, FlowKey>,
    slots: Table<u32, FlowKey>,
    /// Number of cells minus one.
    mask: u32,
    secret: u64,
    /// Number of flows evicted before the last operation, and by the last operation.
    gave_way: [u64; 2],
}

impl Flows {
    /// Returns an empty table with this many cells.
    pub fn new(cells: u32, secret: u64) -> Self {
        Self {
            table: Table::new(),
            numbers: Table::new(),
            cells: Table::new(),
            slots: Table::new(),
            mask: cells - 1,
            secret,
            gave_way: [0; 2],
        }
    }

    pub fn table(&self) -> &Table<FlowKey, Translation> {
        &self.table
    }

    pub fn get(&self, key: &FlowKey) -> Option<Translation> {
        self.table.get(key)
    }

    pub fn has(&self, key: &FlowKey) -> bool {
        self.table.has(key)
    }

    /// Finds the flow by the key of its replies, if it is not masqueraded.
    pub fn by_client(&self, reply: &FlowKey) -> Option<Flow> {
        self.find(|flow| !flow.is_foreign() && flow.to.node_addr == 0 && flow.reply_key() == *reply)
    }

    /// Finds the masqueraded flow by the key of its replies, at any address of the node. Also finds flows of the
    /// kernel's own conntrack.
    pub fn by_node(&self, reply: &PortKey) -> Option<Flow> {
        self.find(|flow| flow.to.node_addr != 0 && flow.port_key() == *reply)
    }

    fn find(&self, is_it: impl FnMut(&Flow) -> bool) -> Option<Flow> {
        let flows = self
            .table
            .iter()
            .map(|(key, to)| Flow { key: *key, to: *to });
        let mut found = flows.filter(is_it);
        found.next()
    }

    /// Changes the value of a flow. The change must not affect its key or the key of its replies.
    pub fn change(&mut self, key: &FlowKey, change: impl FnOnce(&mut Translation)) {
        self.table.change(key, change);
    }

    /// Takes over a value of a flow that only the kernel's table shows, after the model has changed the flow.
    pub fn adopt(&mut self, key: &FlowKey, change: impl FnOnce(&mut Translation)) {
        if let Some(mut to) = self.get(key) {
            change(&mut to);
            self.table.adopt(key, to);
        }
    }

    /// The TCP state of a flow: how far each direction has advanced.
    pub fn numbers(&self, key: &FlowKey) -> Numbers {
        self.numbers.get(key).unwrap_or_default()
    }

    /// Stores the TCP state of a flow.
    pub fn set_numbers(&mut self, key: &FlowKey, numbers: Numbers) {
        self.numbers.set(*key, numbers);
    }

    pub fn remove(&mut self, key: &FlowKey) {
        let Some(to) = self.get(key) else {
            return;
        };
        let flow = Flow { key: *key, to };
        let has = |table: &Table<u32, FlowKey>, at: &u32| table.get(at) == Some(*key);
        if let Some(cell) = self
            .cells_of(key)
            .into_iter()
            .find(|at| has(&self.cells, at))
        {
            self.cells.remove(&cell);
        }
        if let Some(slot) = self
            .slots_of(&flow)
            .into_iter()
            .find(|at| has(&self.slots, at))
        {
            self.slots.remove(&slot);
        }
        self.table.remove(key);
        self.numbers.remove(key);
    }

    /// Returns the cell for a new flow. Evicts the flow in the cell if that flow is over.
    ///
    /// # Errors
    /// If every candidate cell has a live flow, which cannot be evicted.
    pub fn cell_for(&mut self, key: &FlowKey, now: Tick) -> Result<u32, String> {
        for cell in self.cells_of(key) {
            if self.make_way(self.cells.get(&cell), now) {
                return Ok(cell);
            }
        }
        Err(format!(
            "{} cells are too few for {} flows",
            self.mask + 1,
            self.table.len()
        ))
    }

    /// Whether the slot for a masqueraded flow's replies is free, or has a flow that is over. A masqueraded flow has
    /// one candidate.
    pub fn has_slot(&self, flow: &Flow, now: Tick) -> bool {
        let home = self.slots_of(flow)[0];
        self.slots
            .get(&home)
            .is_none_or(|other| self.gives_way(&other, now))
    }

    /// Returns the flow in the first candidate slot of another flow.
    pub fn with_slot(&self, flow: &Flow) -> Option<Flow> {
        let key = self.slots.get(&self.slots_of(flow)[0])?;
        Some(Flow {
            key,
            to: self.get(&key)?,
        })
    }

    /// Adds a flow that has a cell and, if it is masqueraded, a port of the node.
    ///
    /// # Errors
    /// If no candidate slot is free.
    pub fn enter(
        &mut self,
        cell: u32,
        flow: &Flow,
        numbers: Numbers,
        now: Tick,
    ) -> Result<(), String> {
        let slots = self.slots_of(flow);
        self.make_way(self.slots.get(&slots[0]), now);
        let free = slots.into_iter().find(|slot| !self.slots.has(slot));
        let slot = free.ok_or_else(|| format!("no slot is left for {flow:?}"))?;
        self.slots.set(slot, flow.key);
        self.cells.set(cell, flow.key);
        self.table.set(flow.key, flow.to);
        self.numbers.set(flow.key, numbers);
        Ok(())
    }

    /// Adds a flow that no packet began. Does nothing if another flow would be evicted, now or in the next tick,
    /// because the kernel's table adds the flow by another clock.
    pub fn enter_quietly(&mut self, flow: &Flow) {
        let now = flow.to.used;
        let next = Tick::from_number(now.number().wrapping_add(1));
        let stays = |flows: &Self, other: &FlowKey| {
            !flows.gives_way(other, now) && !flows.gives_way(other, next)
        };
        let mut slot = None;
        if !flow.is_foreign() || flow.to.node_addr != 0 {
            let slots = self.slots_of(flow);
            let home = self.slots.get(&slots[0]);
            slot = slots.into_iter().find(|slot| !self.slots.has(slot));
            let is_taken = flow.to.node_addr == 0 && self.by_client(&flow.reply_key()).is_some();
            if slot.is_none() || is_taken || !home.is_none_or(|other| stays(self, &other)) {
                return;
            }
        }
        for cell in self.cells_of(&flow.key) {
            let Some(other) = self.cells.get(&cell) else {
                if let Some(slot) = slot {
                    self.slots.set(slot, flow.key);
                }
                self.cells.set(cell, flow.key);
                self.table.set(flow.key, flow.to);
                return;
            };
            if !stays(self, &other) {
                return;
            }
        }
    }

    /// Removes the other flow if it is over. Returns whether its place is free then.
    fn make_way(&mut self, other: Option<FlowKey>, now: Tick) -> bool {
        let Some(other) = other else {
            return true;
        };
        let gives_way = self.gives_way(&other, now);
        if gives_way {
            self.remove(&other);
            self.gave_way[1] += 1;
        }
        gives_way
    }

    fn gives_way(&self, key: &FlowKey, now: Tick) -> bool {
        self.get(key)
            .is_some_and(|to| gives_way(&Flow { key: *key, to }, now))
    }

    pub fn keep(&mut self) {
        self.table.keep();
        self.numbers.keep();
        self.cells.keep();
        self.slots.keep();
        self.gave_way = [self.gave_way.iter().sum(), 0];
    }

    pub fn take_back(&mut self) {
        self.table.take_back();
        self.numbers.take_back();
        self.cells.take_back();
        self.slots.take_back();
        self.gave_way[1] = 0;
    }

    /// Returns the number of evicted flows.
    pub fn gave_way(&self) -> u64 {
        self.gave_way[0]
    }

    /// Returns the number of flows in a cell other than their home, and of flows in a slot other than their home.
    pub fn elsewhere(&self) -> [u64; 2] {
        let cells = self
            .cells
            .iter()
            .filter(|(at, key)| self.cells_of(key)[0] != **at);
        let slots = self.slots.iter().filter(|(at, key)| {
            let flow = self.get(key).map(|to| Flow { key: **key, to });
            flow.is_some_and(|flow| self.slots_of(&flow)[0] != **at)
        });
        [cells.count() as u64, slots.count() as u64]
    }

    /// Returns the candidate cells of a flow, its home first.
    fn cells_of(&self, key: &FlowKey) -> Vec<u32> {
        let place = key.place(self.secret);
        let nth = |nth| candidate(place, nth) & self.mask;
        (0..=OTHERS).map(nth).collect()
    }

    /// Returns the candidate slots of a flow, its home first. A masqueraded flow has only its home.
    fn slots_of(&self, flow: &Flow) -> Vec<u32> {
        let slots = self.mask << 1 | 1;
        if flow.to.node_addr != 0 {
            return vec![flow.port_key().place(self.secret) & slots];
        }
        let place = flow.reply_key().place(self.secret);
        let nth = |nth| candidate(place, nth) & slots;
        (0..=OTHERS).map(nth).collect()
    }
}
