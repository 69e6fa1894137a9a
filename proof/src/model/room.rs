//! What room flows have in the tables: which of them have to give it up for a new one, and which ports of the node's
//! cannot be had for want of it.
//!
//! Each flow has a cell, and a slot which leads there from what its replies carry. Which ones it may have is
//! `dataplane_common::cells`' business ([`cells_of`], [`slots_of`]); here they are looked at in that order, in maps.

use dataplane_common::{
    cells::{CellKey as _, OTHERS, candidate},
    packet::{FlowKey, PortKey, Tick, Translation},
};

use super::{
    flows::{Flow, gives_way},
    sequences::Numbers,
    table::Table,
};

/// The flows, by their keys, and where they are.
#[derive(Clone, Debug)]
pub struct Flows {
    table: Table<FlowKey, Translation>,
    numbers: Table<FlowKey, Numbers>,
    cells: Table<u32, FlowKey>,
    slots: Table<u32, FlowKey>,
    /// How many cells there are, less one.
    mask: u32,
    secret: u64,
    /// How many flows gave way, and how many of them to what happened last.
    gave_way: [u64; 2],
}

impl Flows {
    /// None, in so many cells.
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

    /// The flow, not masqueraded, whose replies carry this.
    pub fn by_client(&self, reply: &FlowKey) -> Option<Flow> {
        self.find(|flow| !flow.is_foreign() && flow.to.node_addr == 0 && flow.reply_key() == *reply)
    }

    /// The masqueraded flow whose replies carry this, at whatever address of the node's; also one of the kernel's own.
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

    /// A flow was used, or seen: nothing by which it is found changes.
    pub fn change(&mut self, key: &FlowKey, change: impl FnOnce(&mut Translation)) {
        self.table.change(key, change);
    }

    /// What only the kernel's table knows of a flow that the model has changed.
    pub fn adopt(&mut self, key: &FlowKey, change: impl FnOnce(&mut Translation)) {
        if let Some(mut to) = self.get(key) {
            change(&mut to);
            self.table.adopt(key, to);
        }
    }

    /// How far a flow's directions have got.
    pub fn numbers(&self, key: &FlowKey) -> Numbers {
        self.numbers.get(key).unwrap_or_default()
    }

    /// A segment was seen.
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

    /// The cell that a new flow is given. If another flow has it, that gives way.
    ///
    /// # Errors
    /// None is free, and no flow that has one gives way: somebody is pushed out who lives.
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

    /// Whether what the replies of a masqueraded flow carry can lead to it: it has one slot.
    pub fn has_slot(&self, flow: &Flow, now: Tick) -> bool {
        let home = self.slots_of(flow)[0];
        self.slots
            .get(&home)
            .is_none_or(|other| self.gives_way(&other, now))
    }

    /// The flow that has the first of the slots that a flow may have.
    pub fn with_slot(&self, flow: &Flow) -> Option<Flow> {
        let key = self.slots.get(&self.slots_of(flow)[0])?;
        Some(Flow {
            key,
            to: self.get(&key)?,
        })
    }

    /// Enters a flow that was given a cell, and a port of the node's if it is masqueraded.
    ///
    /// # Errors
    /// There is no slot.
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

    /// Enters a flow that no packet began; not if another would give way, now or in the next tick: who enters it in the
    /// kernel's table looks at another clock.
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

    /// Removes the flow that is somewhere if it gives way; whether nobody is there then.
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

    /// How many flows gave way to others.
    pub fn gave_way(&self) -> u64 {
        self.gave_way[0]
    }

    /// How many flows are in other cells than their homes, and how many are led to by other slots than theirs.
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

    /// The cells that a flow may have, its home first.
    fn cells_of(&self, key: &FlowKey) -> Vec<u32> {
        let place = key.place(self.secret);
        let nth = |nth| candidate(place, nth) & self.mask;
        (0..=OTHERS).map(nth).collect()
    }

    /// The slots that may lead to a flow, their home first. A masqueraded one has no other.
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
