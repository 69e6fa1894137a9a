//! A table of flows' entries: an array of cells, and a hash beside it for what finds its cell taken. What is
//! where, and who may do what, is in [`dataplane_common::cells`].

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_LRU_HASH;
use dataplane_common::cells::{Cell, CellKey, Head};
use zerocopy::IntoBytes as _;

use crate::kernel::{
    error::{Doing, Error},
    map::{Batches, Hash, Mapped, Plain},
    pins::{Pins, spec},
};

/// How often a cell is looked at again that changes while it is looked at. Each time a packet of another flow has
/// come in between.
const TRIES: u32 = 16;

/// How many cells a walk looks at in one step: a megabyte, which is read in less than a millisecond.
const CELLS: u32 = 16_384;

/// After how many entries a step ends.
const ENTRIES: usize = 4096;

/// Which bits of a head say how many entries are in the hash: they change while the cell's entry stays.
const COUNT: u64 = 0xff * Head::ONE_MORE;

/// Cells, and the hash beside them. Programs may read, add and remove at the same time.
#[derive(Debug)]
pub struct Table<K, V> {
    name: &'static str,
    cells: Mapped<Cell>,
    more: Hash<K, V>,
}

impl<K: CellKey + Plain, V: Plain> Table<K, V> {
    /// A cell is key and value: only its head is not the key's last word.
    const FITS: () = assert!(
        size_of::<K>() == (K::HEAD + 1) * 8 && size_of::<K>() + size_of::<V>() == size_of::<Cell>()
    );

    /// Opens the pinned maps of these names, cells and hash; `None` if one of them is not there.
    ///
    /// # Errors
    /// If what is there is not ours, or may not be opened.
    pub(in crate::kernel) fn open(
        pins: &Pins,
        [name, more]: [&'static str; 2],
    ) -> Result<Option<Self>, Error> {
        let (Some((cells, of_cells)), Some((more, of_more))) =
            (pins.open_map(spec(name))?, pins.open_map(spec(more))?)
        else {
            return Ok(None);
        };
        let cells = Mapped::map(cells, of_cells.max_entries, true)
            .doing(|| format!("cannot map table {name}"))?;
        Ok(Some(Self::new(
            name,
            cells,
            Hash::from_fd(more, of_more.max_entries),
        )))
    }

    /// Makes one that is pinned nowhere, with room for so many flows.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn unpinned([name, more]: [&'static str; 2], flows: u32) -> io::Result<Self> {
        let entries = |name| spec(name).entries(flows).unwrap_or(flows);
        let cells = Mapped::create(name, entries(name))?;
        let hash = Hash::create(more, BPF_MAP_TYPE_LRU_HASH, entries(more))?;
        Ok(Self::new(name, cells, hash))
    }

    fn new(name: &'static str, cells: Mapped<Cell>, more: Hash<K, V>) -> Self {
        let () = Self::FITS;
        Self { name, cells, more }
    }

    /// Its name: that of the cells.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How many cells it has. There is room for more entries than that, but then most of them push others out.
    pub fn capacity(&self) -> u32 {
        self.cells.capacity()
    }

    /// The memory of the kernel that it takes, in bytes.
    pub fn bytes(&self) -> u64 {
        // An element: 48 bytes of `struct htab_elem` and a node of the LRU list of 24, then key and
        // value, each rounded up to eight; and a bucket of 16 for each.
        let element =
            48 + size_of::<K>().next_multiple_of(8) + size_of::<V>().next_multiple_of(8) + 16;
        u64::from(self.cells.capacity()) * size_of::<Cell>() as u64
            + u64::from(self.more.capacity()) * element as u64
    }

    /// The value of a key, if it is there.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn get(&self, key: &K) -> io::Result<Option<V>> {
        let (head, value) = self.look(key);
        if value.is_none() && head.has_more() {
            return self.more.get(key);
        }
        Ok(value)
    }

    /// Adds a key unless it is there; `false` if it was.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add(&self, key: &K, value: &V) -> io::Result<bool> {
        let place = self.place(key);
        for _ in 0..TRIES {
            let (head, found) = self.look(key);
            if found.is_some() {
                return Ok(false);
            }
            if !head.is_free() {
                break;
            }
            if head.has_more() && self.more.get(key)?.is_some() {
                return Ok(false);
            }
            if !self.exchange(place, head, head.taken()) {
                continue;
            }
            // Who reads one of these words sees that the cell is taken.
            fence(Ordering::Release);
            self.write(place, key, value);
            let written = Head::written(key.word(K::HEAD));
            let before = self.head(place).fetch_add(written, Ordering::AcqRel);
            // Somebody may have found the cell taken, by us, and added the same key to the hash: of the two, we
            // leave.
            if Head(before).has_more() && self.more.get(key)?.is_some() {
                self.free(key);
                return Ok(false);
            }
            return Ok(true);
        }
        self.add_beside(key, value)
    }

    /// Adds a key whose cell is another's to the hash, unless it is there; `false` if it was.
    fn add_beside(&self, key: &K, value: &V) -> io::Result<bool> {
        let place = self.place(key);
        let head = self.head(place);
        // Before it is there: who sees the count without it looks in vain, who sees it without the count would not
        // look.
        if Head(head.load(Ordering::Acquire)).counts() {
            head.fetch_add(Head::ONE_MORE, Ordering::AcqRel);
        }
        let added = self.more.add(key, value);
        if !matches!(added, Ok(true)) {
            self.count_back(place);
            return added;
        }
        // The cell may have become free meanwhile, and somebody have added the same key there.
        if self.look(key).1.is_some() {
            if self.more.remove(key)? {
                self.count_back(place);
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// Adds a key, or gives it another value where it is: only while nobody else removes or adds any.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set(&self, key: &K, value: &V) -> io::Result<()> {
        let (head, found) = self.look(key);
        if found.is_some() {
            self.write(self.place(key), key, value);
        } else if head.has_more() && self.more.get(key)?.is_some() {
            self.more.set(key, value)?;
        } else {
            self.add(key, value)?;
        }
        Ok(())
    }

    /// Removes a key; `false` if it was not there.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn remove(&self, key: &K) -> io::Result<bool> {
        Ok(self.take(key)?.is_some())
    }

    /// Removes a key; answers what it was.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take(&self, key: &K) -> io::Result<Option<V>> {
        if let Some(value) = self.free(key) {
            return Ok(Some(value));
        }
        let place = self.place(key);
        if !Head(self.head(place).load(Ordering::Acquire)).has_more() {
            return Ok(None);
        }
        let taken = self.more.take(key)?;
        if taken.is_some() {
            self.count_back(place);
        }
        Ok(taken)
    }

    /// Everything, in no order.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn entries(&self) -> io::Result<Vec<(K, V)>> {
        let mut entries = Vec::new();
        let mut walk = self.walk();
        while walk.read(&mut entries)? {}
        Ok(entries)
    }

    /// Everything, a few thousand entries at a time.
    ///
    /// What is added or removed meanwhile may or may not be among them, or, if it is removed and added again, twice;
    /// what is there all the time is, and once. To be read is not to be used.
    pub fn walk(&self) -> Walk<'_, K, V> {
        Walk {
            table: self,
            next: 0,
            more: self.more.batches(),
        }
    }

    fn place(&self, key: &K) -> u32 {
        key.place() & (self.cells.capacity() - 1)
    }

    fn word(&self, place: u32, index: usize) -> &AtomicU64 {
        self.cells
            .word(place, index)
            .expect("a key's place is among the cells")
    }

    fn head(&self, place: u32) -> &AtomicU64 {
        self.word(place, K::HEAD)
    }

    /// Whether a cell's head was `from`: it is `to` now.
    fn exchange(&self, place: u32, from: Head, to: Head) -> bool {
        self.head(place)
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// A cell's head; and all of it, with the key's last word in the place of the head, if it has an entry.
    fn read(&self, place: u32) -> (Head, Option<Cell>) {
        let load = |head: &AtomicU64| Head(head.load(Ordering::Acquire));
        let mut head = load(self.head(place));
        for _ in 0..TRIES {
            let Some(ports_and_protocol) = head.key() else {
                break;
            };
            let (mut cell, after) = self.read_all(place);
            if is_one_entry(head, after) {
                cell[K::HEAD] = ports_and_protocol;
                return (after, Some(cell));
            }
            head = load(self.head(place));
        }
        (head, None)
    }

    /// The words of a cell, and what its head is after they were read.
    fn read_all(&self, place: u32) -> (Cell, Head) {
        let cell = std::array::from_fn(|index| self.word(place, index).load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (cell, Head(self.head(place).load(Ordering::Relaxed)))
    }

    /// The head of a key's cell, and the key's value if it is there.
    fn look(&self, key: &K) -> (Head, Option<V>) {
        let (head, cell) = self.read(self.place(key));
        let is_here =
            |cell: &Cell| (0..=K::HEAD).all(|index| cell[index] == CellKey::word(key, index));
        let found = cell.filter(is_here).and_then(|cell| entry::<K, V>(&cell));
        (head, found.map(|(_, value)| value))
    }

    /// Writes what is before and behind the head.
    fn write(&self, place: u32, key: &K, value: &V) {
        for (index, word) in cell(key, value).into_iter().enumerate() {
            if index != K::HEAD {
                self.word(place, index).store(word, Ordering::Relaxed);
            }
        }
    }

    /// Frees a key's cell if it has the key; answers the value.
    fn free(&self, key: &K) -> Option<V> {
        let place = self.place(key);
        for _ in 0..TRIES {
            let (head, found) = self.look(key);
            let value = found?;
            if self.exchange(place, head, head.freed()) {
                // A packet may have used the entry since it was read. What is in a cell that nobody has taken
                // since is what the entry was in the end.
                let (cell, after) = self.read_all(place);
                let last = is_one_entry(head.freed(), after).then(|| entry::<K, V>(&cell));
                return Some(last.flatten().map_or(value, |(_, value)| value));
            }
        }
        None
    }

    /// One entry less is in the hash beside a cell.
    fn count_back(&self, place: u32) {
        for _ in 0..TRIES {
            let head = Head(self.head(place).load(Ordering::Acquire));
            // If it is never taken back, entries are looked for in vain.
            if !head.has_more() || !head.counts() || self.exchange(place, head, head.one_less()) {
                return;
            }
        }
    }
}

/// Whether a head is that of the same entry still, or of the same cell without one.
fn is_one_entry(before: Head, after: Head) -> bool {
    (before.0 ^ after.0) & !COUNT == 0
}

/// Key and value as they are in a cell; the head is the key's last word.
fn cell<K: Plain, V: Plain>(key: &K, value: &V) -> Cell {
    let mut cell = Cell::default();
    let (first, second) = cell.as_mut_bytes().split_at_mut(size_of::<K>());
    first.copy_from_slice(key.as_bytes());
    second.copy_from_slice(value.as_bytes());
    cell
}

/// The inverse of [`cell`].
fn entry<K: Plain, V: Plain>(cell: &Cell) -> Option<(K, V)> {
    let (key, value) = K::read_from_prefix(cell.as_bytes()).ok()?;
    Some((key, V::read_from_bytes(value).ok()?))
}

/// A reader of a whole table.
#[derive(Debug)]
pub struct Walk<'a, K, V> {
    table: &'a Table<K, V>,
    /// The cell that is to be read next.
    next: u32,
    more: Batches<'a, K, V>,
}

impl<K: CellKey + Plain, V: Plain> Walk<'_, K, V> {
    /// Adds the next entries to `entries`, which may be none; `false` if there were no more.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn read(&mut self, entries: &mut Vec<(K, V)>) -> io::Result<bool> {
        let cells = self.table.cells.capacity();
        if self.next == cells {
            return self.more.read(entries);
        }
        let end = cells.min(self.next + CELLS);
        let full = entries.len() + ENTRIES;
        while self.next < end && entries.len() < full {
            let (_, cell) = self.table.read(self.next);
            entries.extend(cell.and_then(|cell| entry::<K, V>(&cell)));
            self.next += 1;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
