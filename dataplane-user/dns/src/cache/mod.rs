//! A cache of resolvers' answers for clients with the same question, bounded by bytes, which namespaces share.
//!
//! An answer belongs to the namespace whose query caused it. If a new answer does not fit, the namespace with the most
//! bytes loses an answer. So a namespace that asks for many names evicts its own answers, once it has more than any
//! other.
//!
//! The bytes of keys and answers are in the cache's own [cells]. As separate allocations they took several times their
//! size: the allocator put them between the futures of waiting queries, and did not fill the holes that these left.

mod cells;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    hash::{BuildHasher, RandomState},
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hashbrown::HashTable;
use slab::Slab;

use self::cells::Cells;
use super::{
    name::LowerName,
    wire::{Shape, Stored},
};

/// How many parts there are, each with a lock of its own.
const SHARDS: usize = 16;
/// The bytes of an entry besides the cells of its key and answer. Tables and queues are at least half full.
const OVERHEAD: usize = size_of::<Entry>() + 4 * size_of::<usize>();
/// Bytes of a key before the name.
const BEFORE_NAME: usize = 7;

/// The key of an answer: the resolvers, the type, the query's bits, the name.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Arc<[u8]>);

impl Key {
    /// The key of a question to a set of resolvers.
    pub fn new(resolvers: u32, name: &LowerName, of_type: u16, bits: u8) -> Self {
        let name = name.bytes();
        let mut key = Vec::with_capacity(BEFORE_NAME + name.len());
        key.extend_from_slice(&resolvers.to_ne_bytes());
        key.extend_from_slice(&of_type.to_ne_bytes());
        key.push(bits);
        key.extend_from_slice(name);
        Self(key.into())
    }

    fn length(&self) -> u16 {
        // A name has at most 255 bytes.
        u16::try_from(self.0.len()).unwrap_or(u16::MAX)
    }
}

/// An answer in the cache.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The answer.
    pub stored: Arc<Stored>,
    /// Seconds since resolvers gave it.
    pub age: u32,
    /// Whether the answer is still fresh.
    pub state: State,
}

/// The freshness of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Clients may get it.
    Fresh,
    /// Fresh, but popular and close to its end, so resolvers should be asked again.
    Fading,
    /// It is over.
    Stale,
}

struct Entry {
    /// The hash of its key.
    hash: u64,
    /// The first cell of the key and the answer; then the number of the key's bytes.
    first: u32,
    key: u16,
    shape: Shape,
    owner: Arc<str>,
    since: Instant,
    /// Whether a query used the answer since it was last considered for eviction.
    used: bool,
    /// Number of queries that used the answer.
    hits: u32,
}

#[derive(Default)]
struct Shard {
    /// Numbers of entries, by their keys.
    table: HashTable<usize>,
    entries: Slab<Entry>,
    cells: Cells,
    /// Each has at least one entry.
    owners: HashMap<Arc<str>, Owner>,
    bytes: usize,
}

/// The answers of a namespace.
#[derive(Default)]
struct Owner {
    /// Numbers of entries in the order in which they are considered for eviction.
    queue: VecDeque<usize>,
    bytes: usize,
}

/// A cache that several threads share.
pub struct Cache {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    /// How many bytes each shard may have.
    room: usize,
    /// How long an answer that is over may still be served if resolvers are away (RFC 8767).
    stale: Duration,
    evictions: AtomicU64,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cache")
    }
}

impl Cache {
    /// An empty cache of at most this many bytes. `stale`: how long an answer that is over may still be served.
    pub fn new(bytes: usize, stale: Duration) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            room: bytes / SHARDS,
            stale,
            evictions: AtomicU64::new(0),
        }
    }

    /// The shard of a key, and the key's hash.
    fn shard(&self, key: &Key) -> (MutexGuard<'_, Shard>, u64) {
        let hash = self.hasher.hash_one(key);
        // The shard's table looks at other bits: the first and the last.
        let number = usize::try_from(hash >> 32).unwrap_or_default() % SHARDS;
        let shard = self.shards[number].lock();
        (shard.unwrap_or_else(PoisonError::into_inner), hash)
    }

    /// Returns the answer to a question, if the cache has it.
    pub fn get(&self, key: &Key, now: Instant) -> Option<Hit> {
        self.find(key, now, true)
    }

    /// Returns the answer to a question, without marking it as used.
    pub fn look(&self, key: &Key, now: Instant) -> Option<Hit> {
        self.find(key, now, false)
    }

    fn find(&self, key: &Key, now: Instant, uses: bool) -> Option<Hit> {
        let (mut shard, hash) = self.shard(key);
        let at = shard.find(hash, key)?;
        let Shard { entries, cells, .. } = &mut *shard;
        let entry = entries.get_mut(at)?;
        let age = now.saturating_duration_since(entry.since);
        let seconds = u32::try_from(age.as_secs()).unwrap_or(u32::MAX);
        let ttl = entry.shape.ttl;
        if age > Duration::from_secs(ttl.into()) + self.stale {
            return None;
        }
        let mut hits = 0;
        if uses {
            entry.used = true;
            hits = entry.hits;
            entry.hits = hits.saturating_add(1);
        }
        let state = match ttl.checked_sub(seconds) {
            None | Some(0) => State::Stale,
            // Two askers in a row for the last tenth of its life.
            Some(left) if hits >= 2 && left <= ttl / 10 => State::Fading,
            Some(_) => State::Fresh,
        };
        Some(Hit {
            stored: Arc::new(entry.stored(cells)),
            age: seconds,
            state,
        })
    }

    /// Keeps an answer if its TTL allows it and it is whole. `owner`: the namespace that has asked.
    pub fn put(&self, key: &Key, owner: &Arc<str>, stored: &Stored, now: Instant) {
        if stored.shape().ttl == 0 || stored.is_truncated() {
            return;
        }
        let (mut shard, hash) = self.shard(key);
        shard.put((hash, key), owner, stored, now);
        while shard.bytes > self.room && shard.evict() {
            self.evictions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many answers there are, and their bytes.
    pub fn size(&self) -> (usize, usize) {
        let shards = self.shards.iter();
        let shards = shards.map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner));
        shards.fold((0, 0), |(count, bytes), shard| {
            (count + shard.entries.len(), bytes + shard.bytes)
        })
    }

    /// How many answers each namespace has, and their bytes.
    pub fn shares(&self) -> BTreeMap<Arc<str>, (usize, usize)> {
        let mut all = BTreeMap::<_, (usize, usize)>::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for (name, of) in &shard.owners {
                let own: &mut (usize, usize) = all.entry(Arc::clone(name)).or_default();
                own.0 += of.queue.len();
                own.1 += of.bytes;
            }
        }
        all
    }

    /// Forgets the answers for a name, or all. Returns how many there were.
    pub fn flush(&self, name: Option<&LowerName>) -> usize {
        let mut flushed = 0;
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let before = shard.entries.len();
            match name {
                None => *shard = Shard::default(),
                Some(name) => shard.forget(name),
            }
            flushed += before - shard.entries.len();
        }
        flushed
    }

    /// How many bytes it has room for.
    pub fn room(&self) -> usize {
        self.room * SHARDS
    }

    /// Returns how many answers the cache evicted to make room.
    pub fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }
}

impl Entry {
    /// Its bytes: the key's and the answer's.
    fn length(&self) -> usize {
        usize::from(self.key) + self.shape.packed
    }

    /// Its size in bytes, as it counts for the limit.
    fn size(&self) -> usize {
        Cells::size(self.length()) + OVERHEAD
    }

    fn stored(&self, cells: &Cells) -> Stored {
        let packed = cells.read(self.first, self.key.into()..self.length());
        Stored::new(packed.into(), self.shape)
    }
}

impl Shard {
    /// The number of the entry with this key.
    fn find(&self, hash: u64, key: &Key) -> Option<usize> {
        let is_it = |at: &usize| {
            let entry = &self.entries[*at];
            entry.key == key.length() && self.cells.starts_with(entry.first, &key.0)
        };
        self.table.find(hash, is_it).copied()
    }

    fn put(&mut self, (hash, key): (u64, &Key), owner: &Arc<str>, stored: &Stored, now: Instant) {
        let found = self.find(hash, key);
        // A fresh answer belongs to the namespace that the old one belonged to: no other namespace pays for it.
        let owner = Arc::clone(found.map_or(owner, |at| &self.entries[at].owner));
        let bytes = [&*key.0, stored.packed()].concat();
        let entry = Entry {
            hash,
            first: self.cells.put(&bytes),
            key: key.length(),
            shape: stored.shape(),
            owner: Arc::clone(&owner),
            since: now,
            used: false,
            hits: 0,
        };
        let of_owner = self.owners.entry(owner).or_default();
        self.bytes += entry.size();
        of_owner.bytes += entry.size();
        if let Some(at) = found {
            let old = mem::replace(&mut self.entries[at], entry);
            self.cells.free(old.first);
            self.bytes -= old.size();
            of_owner.bytes -= old.size();
        } else {
            let at = self.entries.insert(entry);
            of_owner.queue.push_back(at);
            let hash_of = |at: &usize| self.entries[*at].hash;
            self.table.insert_unique(hash, at, hash_of);
        }
    }

    /// Forgets the answers for a name.
    fn forget(&mut self, name: &LowerName) {
        let is_of = |entry: &Entry| {
            let range = BEFORE_NAME..entry.key.into();
            self.cells.read(entry.first, range) == name.bytes()
        };
        let entries = self.entries.iter();
        let gone: Vec<usize> = entries
            .filter_map(|(at, entry)| is_of(entry).then_some(at))
            .collect();
        for at in gone {
            if let Some(of_owner) = self.owners.get_mut(&self.entries[at].owner) {
                of_owner.queue.retain(|queued| *queued != at);
            }
            self.remove(at);
        }
    }

    /// Evicts an answer of the namespace with the most bytes. Returns whether there was one.
    fn evict(&mut self) -> bool {
        let Some(of_owner) = self.owners.values_mut().max_by_key(|of| of.bytes) else {
            return false;
        };
        while let Some(at) = of_owner.queue.pop_front() {
            // An answer that was used gets another round.
            if mem::take(&mut self.entries[at].used) {
                of_owner.queue.push_back(at);
                continue;
            }
            self.remove(at);
            return true;
        }
        false
    }

    /// Removes an entry that is in no queue any more.
    fn remove(&mut self, at: usize) {
        let entry = self.entries.remove(at);
        if let Ok(found) = self.table.find_entry(entry.hash, |other| *other == at) {
            found.remove();
        }
        self.cells.free(entry.first);
        self.bytes -= entry.size();
        if let Some(of_owner) = self.owners.get_mut(&entry.owner) {
            of_owner.bytes -= entry.size();
            if of_owner.queue.is_empty() {
                self.owners.remove(&entry.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests;
