//! The tables of conntrack: `dataplane_common::cells` says how they work.

use core::ptr::{read_volatile, write_volatile};

use dataplane_common::{
    cells::{Cell, CellKey, Head},
    packet::{FlowKey, Forward, Masqueraded, PortKey, Reply},
};

use crate::{
    atomic,
    tables::{self, Cells, More, PACKET_CONFIG},
};

/// `BPF_NOEXIST`.
const NOEXIST: u64 = 1;

/// How often an exchange is tried: it fails only if another CPU did something with the cell meanwhile.
const TRIES: u32 = 3;

/// Client to VIP.
pub const FORWARD: Table<FlowKey, Forward> = Table {
    cells: &tables::FORWARD,
    more: &tables::MORE_FORWARD,
};
/// Endpoint to client.
pub const REPLY: Table<FlowKey, Reply> = Table {
    cells: &tables::REPLY,
    more: &tables::MORE_REPLY,
};
/// Endpoint to a masqueraded client.
pub const MASQUERADE: Table<PortKey, Masqueraded> = Table {
    cells: &tables::MASQUERADE,
    more: &tables::MORE_MASQUERADE,
};

/// Entries in cells, and those whose cell another entry has.
pub struct Table<K: 'static, V: 'static> {
    cells: &'static Cells,
    more: &'static More<K, V>,
}

/// A key's cell.
#[derive(Clone, Copy)]
struct Place(*mut u64);

impl Place {
    #[inline(always)]
    fn head_at<K: CellKey>(self) -> *mut u64 {
        // SAFETY: within the cell.
        unsafe { self.0.add(K::HEAD) }
    }

    #[inline(always)]
    fn head<K: CellKey>(self) -> Head {
        // SAFETY: an aligned word of the array's element, which stays.
        Head(unsafe { read_volatile(self.head_at::<K>()) })
    }

    /// Whether the cell, whose head was read, has the key's entry.
    #[inline(always)]
    fn has<K: CellKey>(self, head: Head, key: &K) -> bool {
        let mut differ = 0;
        let mut index = 0;
        while index < K::HEAD {
            // SAFETY: within the cell.
            differ |= unsafe { read_volatile(self.0.add(index)) } ^ key.word(index);
            index += 1;
        }
        head.has(key.word(K::HEAD)) && differ == 0
    }

    #[inline(always)]
    fn value<K: CellKey, V>(self) -> *mut V {
        const { assert!((K::HEAD + 1) * 8 + size_of::<V>() == size_of::<Cell>()) };
        // SAFETY: within the cell: the assertion.
        unsafe { self.0.add(K::HEAD + 1).cast() }
    }

    /// Frees the cell, if it has the key's entry; whether it had.
    #[inline(always)]
    fn remove<K: CellKey>(self, key: &K) -> bool {
        let word = self.head_at::<K>();
        let mut tries = 0;
        while tries < TRIES {
            let head = self.head::<K>();
            if !self.has(head, key) {
                return tries != 0;
            }
            if exchange(word, head, head.freed()) {
                return true;
            }
            tries += 1;
        }
        true
    }
}

/// Stores `new` if the word still holds what was read of it.
#[inline(always)]
fn exchange(word: *mut u64, before: Head, new: Head) -> bool {
    // SAFETY: an aligned word of an array's element.
    unsafe { atomic::compare_exchange(word, before.0, new.0) == before.0 }
}

/// An entry of one of the cell's keys has left the hash.
#[inline(never)]
fn one_less(word: *mut u64) {
    let mut tries = 0;
    while tries < TRIES {
        // SAFETY: an aligned word of an array's element.
        let head = Head(unsafe { read_volatile(word) });
        // With one too many, a search in vain takes longer.
        if !head.has_more() || !head.counts() || exchange(word, head, head.one_less()) {
            return;
        }
        tries += 1;
    }
}

impl<K: CellKey, V: Copy> Table<K, V> {
    #[inline(always)]
    fn place(&self, key: &K) -> Option<Place> {
        let mask = PACKET_CONFIG.get(0)?.cells;
        let cell = self.cells.get_ptr_mut(key.place() & mask)?;
        Some(Place(cell.cast()))
    }

    /// The entry's value. It may become another entry's while it is read: what is translated by that has a wrong
    /// checksum or finds no socket.
    #[inline(always)]
    pub fn get_ptr_mut(&self, key: &K) -> Option<*mut V> {
        let place = self.place(key)?;
        let head = place.head::<K>();
        if place.has(head, key) {
            return Some(place.value::<K, V>());
        }
        if head.has_more() {
            return self.more.get_ptr_mut(key);
        }
        None
    }

    /// Makes an entry; `false` if there is one, or there is no memory, or another CPU makes one of that key.
    #[inline(always)]
    pub fn insert(&self, key: &K, value: &V) -> bool {
        let Some(place) = self.place(key) else {
            return false;
        };
        let word = place.head_at::<K>();
        let head = place.head::<K>();
        if place.has(head, key) || (head.has_more() && self.more.get_ptr(key).is_some()) {
            return false;
        }
        if !head.is_free() || !exchange(word, head, head.taken()) {
            return self.insert_beside(place, key, value);
        }
        let mut index = 0;
        while index < K::HEAD {
            // SAFETY: within the cell, which is ours.
            unsafe { write_volatile(place.0.add(index), key.word(index)) };
            index += 1;
        }
        // SAFETY: likewise.
        unsafe { place.value::<K, V>().write(*value) };
        // SAFETY: an aligned word of an array's element. A full barrier: what was written is seen first.
        let before = Head(unsafe { atomic::fetch_add(word, Head::written(key.word(K::HEAD))) });
        // Another CPU that found the cell taken may have made an entry of this key. It looks here after that, as
        // we look there after this: at least one of the two sees the other, and gives way. (If both do, the key
        // has no entry, and the next packet tries again.)
        if before.has_more() && self.more.get_ptr(key).is_some() {
            place.remove(key);
            return false;
        }
        true
    }

    /// The same, where another entry has the cell.
    #[inline(always)]
    fn insert_beside(&self, place: Place, key: &K, value: &V) -> bool {
        let word = place.head_at::<K>();
        if place.head::<K>().counts() {
            // SAFETY: an aligned word of an array's element. A full barrier: it is counted before it is there.
            unsafe { atomic::fetch_add(word, Head::ONE_MORE) };
        }
        if self.more.insert(key, value, NOEXIST).is_err() {
            one_less(word);
            return false;
        }
        if place.has(place.head::<K>(), key) {
            // Unless somebody else has removed it already, and counted that.
            if self.more.remove(key).is_ok() {
                one_less(word);
            }
            return false;
        }
        true
    }

    /// Removes the entry, if there is one.
    #[inline(always)]
    pub fn remove(&self, key: &K) {
        let Some(place) = self.place(key) else {
            return;
        };
        if !place.remove(key) && place.head::<K>().has_more() && self.more.remove(key).is_ok() {
            one_less(place.head_at::<K>());
        }
    }
}
