//! One table of the programs' state, with a record of the entries that a packet changed.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, DefaultHasher, Hash},
};

/// A table that can undo all changes since the last [`Table::keep`].
#[derive(Clone, Debug)]
pub struct Table<K, V> {
    /// The hash function is the same in each run, so that a seed always generates the same packets.
    entries: HashMap<K, V, BuildHasherDefault<DefaultHasher>>,
    before: Vec<(K, Option<V>)>,
}

impl<K: Copy + Eq + Hash, V: Copy> Table<K, V> {
    pub fn new() -> Self {
        Self {
            entries: HashMap::default(),
            before: Vec::new(),
        }
    }

    pub fn get(&self, key: &K) -> Option<V> {
        self.entries.get(key).copied()
    }

    pub fn has(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    pub fn set(&mut self, key: K, value: V) {
        let before = self.entries.insert(key, value);
        self.before.push((key, before));
    }

    pub fn remove(&mut self, key: &K) {
        let before = self.entries.remove(key);
        self.before.push((*key, before));
    }

    /// Changes an entry. Does nothing if the key has no entry.
    pub fn change(&mut self, key: &K, change: impl FnOnce(&mut V)) {
        if let Some(mut value) = self.get(key) {
            change(&mut value);
            self.set(*key, value);
        }
    }

    /// Takes over a value that the program was free to choose. [`Table::take_back`] does not undo it.
    pub fn adopt(&mut self, key: &K, value: V) {
        self.entries.insert(*key, value);
    }

    /// Returns the keys that were written or removed since the last `keep`, each with its value before the change.
    pub fn touched(&self) -> impl Iterator<Item = (&K, Option<V>)> {
        self.before.iter().map(|(key, before)| (key, *before))
    }

    pub fn keep(&mut self) {
        self.before.clear();
    }

    pub fn take_back(&mut self) {
        for (key, before) in self.before.drain(..).rev() {
            match before {
                Some(value) => self.entries.insert(key, value),
                None => self.entries.remove(&key),
            };
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }
}
