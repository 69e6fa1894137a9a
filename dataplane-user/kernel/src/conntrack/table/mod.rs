//! The table of flows in this process's memory: [`dataplane_common::cells`] says how it works.

use std::{
    io,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use dataplane_common::{
    cells::{
        self, AtomicSlot, Cell, CellKey as _, HEAD, Head, Holder, Line as _, Memory, Slots,
        Snapshot,
    },
    packet::{FlowKey, PacketConfig, PortKey, Tick, Translation, came_by::THROUGH},
    seen,
    states::{State, Timeouts},
    tcp::{self, OPENING, POSITIONS, Sequences},
};

use super::{flow::Flow, now};
use crate::{
    error::{Doing, Error},
    map::Mapped,
    pins::{Pins, new_secret, spec},
};

/// How often a cell is looked at again that changes while it is looked at. Each time another flow has come in
/// between, or has been counted.
const TRIES: u32 = 16;

/// How many cells a walk looks at in one step: a megabyte, which is read in less than a millisecond.
const CELLS: u32 = 16_384;

/// After how many flows a step ends.
const ENTRIES: usize = 4096;

/// Cells and slots. Programs may find, make and remove flows at the same time.
#[derive(Debug)]
pub struct Table {
    cells: Mapped<Cell>,
    slots: Mapped<Slots>,
    sequences: Mapped<Sequences>,
    came_by: Mapped<[u32; 2]>,
    /// [`PacketConfig::secret`].
    secret: u64,
    pub(super) config: Mapped<PacketConfig>,
}

impl<'a> Memory for &'a Table {
    type Line = &'a [AtomicU64; 8];
    type Entry = AtomicSlot<'a>;
    type Sequences = &'a [AtomicU64; 2];

    fn mask(&self) -> u32 {
        self.cells.capacity() - 1
    }

    fn secret(&self) -> u64 {
        self.secret
    }

    fn cell(&self, index: u32) -> Option<Self::Line> {
        self.cells.words(index)
    }

    fn holder(&self, now: Tick) -> Holder {
        Holder::new(Holder::USER, now)
    }

    fn keep(&self, state: State) -> u32 {
        self.timeouts().of(state)
    }

    fn slot(&self, index: u32) -> Option<Self::Entry> {
        let slots = self.slots.words(index / 16)?;
        Some(AtomicSlot(&slots[index as usize % 16]))
    }

    fn sequences(&self, index: u32) -> Option<Self::Sequences> {
        self.sequences.words(index)
    }
}

impl Table {
    /// Opens the pinned table; `None` if there is none.
    ///
    /// # Errors
    /// If the pins are not ours, or may not be opened.
    pub(crate) fn open(pins: &Pins) -> Result<Option<Self>, Error> {
        let Some((config, _)) = pins.open_map(spec("PACKET_CONFIG"))? else {
            return Ok(None);
        };
        let (
            Some((cells, of_cells)),
            Some((slots, of_slots)),
            Some((sequences, of_sequences)),
            Some((came_by, of_came_by)),
        ) = (
            pins.open_map(spec("CONNTRACK"))?,
            pins.open_map(spec("ANSWERS"))?,
            pins.open_map(spec("SEQUENCES"))?,
            pins.open_map(spec("CAME_BY"))?,
        )
        else {
            return Ok(None);
        };
        Ok(Some(Self {
            cells: Mapped::map(cells, of_cells.max_entries, true)
                .doing(|| "cannot map table CONNTRACK".to_owned())?,
            slots: Mapped::map(slots, of_slots.max_entries, true)
                .doing(|| "cannot map table ANSWERS".to_owned())?,
            sequences: Mapped::map(sequences, of_sequences.max_entries, true)
                .doing(|| "cannot map table SEQUENCES".to_owned())?,
            came_by: Mapped::map(came_by, of_came_by.max_entries, cfg!(feature = "testing"))
                .doing(|| "cannot map table CAME_BY".to_owned())?,
            secret: pins.flow_secret()?,
            config: Mapped::map(config, 1, false)
                .doing(|| "cannot map table PACKET_CONFIG".to_owned())?,
        }))
    }

    /// Creates a table with room for this many flows, which is not pinned.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(super) fn unpinned(flows: u32) -> io::Result<Self> {
        let elements = |name| spec(name).entries(flows).unwrap_or(flows);
        Ok(Self {
            cells: Mapped::create("CONNTRACK", elements("CONNTRACK"))?,
            slots: Mapped::create("ANSWERS", elements("ANSWERS"))?,
            sequences: Mapped::create("SEQUENCES", elements("SEQUENCES"))?,
            came_by: Mapped::create("CAME_BY", elements("CAME_BY"))?,
            secret: new_secret(),
            config: Mapped::create("PACKET_CONFIG", 1)?,
        })
    }

    /// Returns the timeouts of flows: those that the agent has written for the programs, or the defaults before that.
    pub fn timeouts(&self) -> Timeouts {
        let config = self.config();
        match config.timeouts.of(State::SynSent) {
            0 => Timeouts::DEFAULT,
            _ => config.timeouts,
        }
    }

    /// Returns how many masqueraded flows of a protocol an endpoint can have.
    pub fn ports(&self) -> u32 {
        self.config().ports()
    }

    /// Returns the programs' configuration.
    pub(super) fn config(&self) -> PacketConfig {
        self.config.get(0).unwrap_or_default()
    }

    /// Its name: that of the cells.
    pub fn name(&self) -> &'static str {
        "CONNTRACK"
    }

    /// How many flows there is room for: half as many as there are cells, so that each finds one that is free. With
    /// more than that, some push others out.
    pub fn capacity(&self) -> u32 {
        self.cells.capacity() / 2
    }

    /// The memory of the kernel that it takes, in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.cells.capacity()) * size_of::<Cell>() as u64
            + u64::from(self.slots.capacity()) * size_of::<Slots>() as u64
            + u64::from(self.sequences.capacity()) * size_of::<Sequences>() as u64
    }

    /// Returns the translation of a flow, or `None` if the flow is absent.
    pub fn get(&self, key: &FlowKey) -> Option<Translation> {
        self.find(key).map(|(_, found)| found.value())
    }

    /// Returns how far each direction of a flow has advanced, or `None` if the flow is absent.
    pub fn sequences(&self, key: &FlowKey) -> Option<Sequences> {
        let words = self.sequences.words(self.find(key)?.0)?;
        Some([POSITIONS, OPENING].map(|word| words.load(word)))
    }

    /// Whether a flow began on the path through the stack.
    pub(super) fn is_through(&self, key: &FlowKey) -> bool {
        let word = self.came_by(key);
        word.is_some_and(|word| word.load(Ordering::Relaxed) & THROUGH != 0)
    }

    /// Says of a flow that it began on the path through the stack; `false` if it is not there, or did already.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_through(&self, key: &FlowKey) -> bool {
        let word = self.came_by(key);
        word.is_some_and(|word| word.fetch_or(THROUGH, Ordering::Relaxed) & THROUGH == 0)
    }

    fn came_by(&self, key: &FlowKey) -> Option<&AtomicU32> {
        let (index, _) = self.find(key)?;
        let pair = self.came_by.words(index / 2)?;
        Some(&pair[index as usize % 2])
    }

    /// Says of a flow that it is in use; `false` if it is not there.
    pub fn touch(&self, key: &FlowKey) -> bool {
        let Some((index, found)) = self.find(key) else {
            return false;
        };
        self.cell(index)
            .is_some_and(|line| cells::mark(line, found.head(), found.state(), 0, 0, now()))
    }

    /// Says of a flow that its service no longer lists its endpoint.
    pub fn depart(&self, key: &FlowKey) {
        let found = self.find(key);
        if let Some(sequences) = found.and_then(|(index, _)| self.sequences.words(index)) {
            tcp::depart(sequences);
        }
    }

    /// Says how far a flow's directions have got; `false` if it is not there.
    #[cfg(feature = "testing")]
    pub fn set_sequences(&self, key: &FlowKey, sequences: Sequences) -> bool {
        let found = self.find(key);
        if let Some((index, _)) = found {
            cells::write_sequences(&self, index, &sequences);
        }
        found.is_some()
    }

    /// The flow, not masqueraded, whose replies carry this.
    pub fn by_client(&self, reply: &FlowKey) -> Option<FlowKey> {
        Some(cells::find_by_client(&self, reply)?.1.key())
    }

    /// Finds the masqueraded flow by the key of its replies, at any address of the node.
    pub fn by_node(&self, reply: &PortKey) -> Option<FlowKey> {
        Some(cells::find_by_node(&self, reply)?.1.key())
    }

    /// Adds a flow; `false` if it is there, if its replies lead to another, if it is masqueraded and the slot of its
    /// port is another's, or if another writer holds its cells at this moment. If there is no room, the table evicts
    /// another flow.
    pub fn add(&self, key: &FlowKey, to: &Translation) -> bool {
        let flow = Flow { key: *key, to: *to };
        if self.find(key).is_some() {
            return false;
        }
        let has_replies = !flow.is_foreign() || flow.is_masqueraded();
        if has_replies && !flow.is_masqueraded() && self.by_client(&flow.reply_key()).is_some() {
            return false;
        }
        let now = now();
        let index = cells::hold(&self, key, now);
        let Some(line) = self.cell(index) else {
            return false;
        };
        cells::write(line, key, to);
        cells::write_sequences(&self, index, &Sequences::default());
        let home = cells::place_of_replies(key, to, self.secret);
        if has_replies && !cells::lead(&self, home, index, flow.is_masqueraded(), now) {
            cells::give_back(&self, index, key, now);
            return false;
        }
        cells::publish(line, key, self.holder(now))
    }

    /// Replaces a flow's value, or adds the flow if it is not there: only while no other writer changes any flow.
    /// `false` if it is not there afterwards.
    pub fn set(&self, key: &FlowKey, to: &Translation) -> bool {
        if let Some((index, found)) = self.find(key)
            && let Some(line) = self.cell(index)
        {
            let found = found.value();
            let same = Translation {
                used: to.used,
                seen: to.seen,
                ..found
            };
            if same == *to && (found.seen ^ to.seen) & seen::FOREIGN == 0 {
                cells::write(line, key, to);
                return true;
            }
            // Its replies carry something else now.
            self.remove(key);
        }
        self.add(key, to)
    }

    /// Removes a flow; `false` if it was not there.
    pub fn remove(&self, key: &FlowKey) -> bool {
        self.take(key).is_some()
    }

    /// Removes a flow and returns its last value.
    pub fn take(&self, key: &FlowKey) -> Option<Translation> {
        self.take_if(key, |_| true)
    }

    /// Removes a flow if `still` returns true for its last value, and returns that value.
    ///
    /// Meanwhile the flow's cell is held: a packet that arrives finds no flow, and does not begin one.
    pub fn take_if(
        &self,
        key: &FlowKey,
        still: impl Fn(&Translation) -> bool,
    ) -> Option<Translation> {
        for _ in 0..TRIES {
            let (index, found) = self.find(key)?;
            let line = self.cell(index)?;
            let now = now();
            let holder = self.holder(now);
            if !cells::hold_flow(line, found.head(), holder) {
                continue;
            }
            // Only a packet that had found the flow before may use it still.
            let to = cells::value(line);
            if still(&to) {
                cells::forget(&self, index, key.word(HEAD), now);
                return Some(to);
            }
            cells::publish(line, key, holder);
            return None;
        }
        None
    }

    /// Every flow, in no order.
    pub fn entries(&self) -> Vec<(FlowKey, Translation)> {
        let mut entries = Vec::new();
        let mut walk = self.walk();
        while walk.read(&mut entries) {}
        entries
    }

    /// Returns a reader of all flows, a few thousand at a time.
    ///
    /// A flow that is added or removed meanwhile may be missed, and a flow that is removed and added again may appear
    /// twice. A flow that exists all the time appears once. Reading a flow does not count as use.
    pub fn walk(&self) -> Walk<'_> {
        Walk {
            table: self,
            next: 0,
            held: Vec::new(),
        }
    }

    /// A flow, and where it is.
    fn find(&self, key: &FlowKey) -> Option<(u32, Snapshot)> {
        cells::find(&self, key)
    }

    /// The flow of a cell, all of it as it was at one moment.
    fn read(&self, index: u32) -> Option<Snapshot> {
        let line = self.cell(index)?;
        for _ in 0..TRIES {
            let found = cells::read(line);
            if found.is_some() || Head(line.load(HEAD)).key().is_none() {
                return found;
            }
        }
        None
    }
}

/// A reader of a whole table.
#[derive(Debug)]
pub struct Walk<'a> {
    table: &'a Table,
    /// The cell that is to be read next.
    next: u32,
    /// Cells whose holders are dead.
    held: Vec<u32>,
}

impl Walk<'_> {
    /// Adds the next flows to `entries`, perhaps none. Returns `false` at the end of the table.
    pub fn read(&mut self, entries: &mut Vec<(FlowKey, Translation)>) -> bool {
        let table = self.table;
        let cells = table.cells.capacity();
        if self.next == cells {
            return false;
        }
        let end = cells.min(self.next + CELLS);
        let full = entries.len() + ENTRIES;
        while self.next < end && entries.len() < full {
            match table.read(self.next) {
                Some(found) => entries.push((found.key(), found.value())),
                None => self.note_if_held(),
            }
            self.next += 1;
        }
        true
    }

    /// Frees the cells whose holders have died meanwhile; returns how many.
    pub fn free_held(&self) -> u64 {
        let table = self.table;
        let freed = self
            .held
            .iter()
            .filter(|index| cells::free_held(&table, **index, now()));
        freed.count() as u64
    }

    fn note_if_held(&mut self) {
        if let Some(line) = self.table.cell(self.next) {
            let holder = Head(line.load(HEAD)).holder();
            if holder.is_some_and(|holder| holder.is_dead(now())) {
                self.held.push(self.next);
            }
        }
    }
}

#[cfg(test)]
mod tests;
