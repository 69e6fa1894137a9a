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
mod tests {
    use hickory_proto::{
        op::{Message, OpCode, Query},
        rr::{Name, RData, Record, RecordType, rdata::A},
    };
    use proptest::prelude::*;

    use super::*;

    const STALE: Duration = Duration::from_hours(24);

    fn name(number: usize) -> LowerName {
        LowerName::parse(&format!("name-{number}.example.com")).unwrap()
    }

    fn stored(number: usize, ttl: u32) -> Arc<Stored> {
        let name = name(number);
        let mut message = Message::response(0, OpCode::Query);
        let wire: Name = name.to_name();
        message.add_query(Query::query(wire.clone(), RecordType::A));
        message.add_answer(Record::from_rdata(
            wire,
            ttl,
            RData::A(A::new(192, 0, 2, 1)),
        ));
        let bytes = message.to_vec().unwrap();
        Arc::new(Stored::read(&bytes, &name, 1, false).unwrap())
    }

    fn key(number: usize) -> Key {
        Key::new(1, &name(number), 1, 1)
    }

    #[test]
    fn an_answer_ages_fades_and_is_stale_for_a_day() {
        let cache = Cache::new(1 << 20, STALE);
        let start = Instant::now();
        cache.put(&key(1), &"shop".into(), &stored(1, 60), start);
        let at = |seconds| {
            let hit = cache.get(&key(1), start + Duration::from_secs(seconds));
            hit.map(|hit| (hit.age, hit.state))
        };
        assert_eq!(at(0), Some((0, State::Fresh)));
        assert_eq!(at(30), Some((30, State::Fresh)));
        assert_eq!(at(54), Some((54, State::Fading)));
        assert_eq!(at(60), Some((60, State::Stale)));
        assert_eq!(at(60 + 86_400), Some((60 + 86_400, State::Stale)));
        assert_eq!(at(62 + 86_400), None);
        let strict = Cache::new(1 << 20, Duration::ZERO);
        strict.put(&key(1), &"shop".into(), &stored(1, 60), start);
        let hit = |seconds| strict.get(&key(1), start + Duration::from_secs(seconds));
        assert!(hit(59).is_some() && hit(61).is_none());
        // Keys that differ in the set of resolvers, the type or the bits.
        for other in [
            Key::new(2, &name(1), 1, 1),
            Key::new(1, &name(1), 28, 1),
            Key::new(1, &name(1), 1, 9),
        ] {
            assert!(cache.get(&other, start).is_none());
        }
    }

    #[test]
    fn only_the_last_tenth_of_a_popular_answer_fades() {
        let cache = Cache::new(1 << 20, STALE);
        let start = Instant::now();
        cache.put(&key(1), &"shop".into(), &stored(1, 60), start);
        for (seconds, state) in [
            (55, State::Fresh),
            (55, State::Fresh),
            (55, State::Fading),
            (53, State::Fresh),
        ] {
            let hit = cache.get(&key(1), start + Duration::from_secs(seconds));
            assert_eq!(hit.map(|hit| hit.state), Some(state));
        }
    }

    #[test]
    fn only_whole_answers_with_a_ttl_are_kept_as_far_as_there_is_room() {
        let (cache, now) = (Cache::new(1 << 20, STALE), Instant::now());
        let put = |cache: &Cache, number| {
            cache.put(&key(number), &"shop".into(), &stored(number, 60), now);
        };
        cache.put(&key(1), &"shop".into(), &stored(1, 0), now);
        let mut bytes = stored(1, 60).bytes().to_vec();
        bytes[2] |= 0x02;
        let truncated = Stored::read(&bytes, &name(1), 1, false).unwrap();
        cache.put(&key(1), &"shop".into(), &truncated, now);
        assert_eq!(cache.size(), (0, 0));
        put(&cache, 1);
        let (_, bytes) = cache.size();
        assert!(bytes > OVERHEAD);
        // Full to the last byte.
        let full = Cache::new(SHARDS * bytes, STALE);
        put(&full, 1);
        assert_eq!((full.size(), full.evictions()), ((1, bytes), 0));
        put(&cache, 2);
        put(&cache, 3);
        assert_eq!(cache.flush(Some(&name(1))), 1);
        assert_eq!((cache.flush(None), cache.size()), (2, (0, 0)));
    }

    #[test]
    fn what_nobody_asks_for_goes_first() {
        let cache = Cache::new(200_000, STALE);
        let now = Instant::now();
        for number in 0..2000 {
            cache.put(&key(number), &"shop".into(), &stored(number, 60), now);
            assert!(cache.get(&key(0), now).is_some(), "at {number}");
        }
        let (count, bytes) = cache.size();
        assert!(
            bytes <= 200_000 && count > 300,
            "{count} answers, {bytes} bytes"
        );
        assert!(cache.evictions() > 1000);
    }

    /// A tenant asks for more names than the cache has room for, each twice, while others ask for theirs now and then.
    #[test]
    fn a_namespace_that_asks_for_many_names_evicts_its_own() {
        let cache = Cache::new(1_000_000, STALE);
        let now = Instant::now();
        let (hog, shop): (Arc<str>, Arc<str>) = ("hog".into(), "shop".into());
        for number in 0..500 {
            cache.put(&key(number), &shop, &stored(number, 60), now);
        }
        for number in 1000..21_000 {
            cache.put(&key(number), &hog, &stored(number, 60), now);
            cache.get(&key(number), now);
            // An answer that is fetched again stays its namespace's.
            let again = number % 500;
            if number % 7 == 0 && cache.get(&key(again), now).is_some() {
                cache.put(&key(again), &hog, &stored(again, 60), now);
            }
        }
        assert!(cache.evictions() > 15_000);
        let left = (0..500).filter(|number| cache.get(&key(*number), now).is_some());
        assert_eq!(left.count(), 500);
        // The opposite case: if another client asks for as many names, the hog keeps half of the cache.
        for number in 30_000..50_000 {
            cache.put(&key(number), &shop, &stored(number, 60), now);
        }
        let hogs = (1000..21_000).filter(|number| cache.get(&key(*number), now).is_some());
        let (hogs, (all, _)) = (hogs.count(), cache.size());
        assert!(hogs * 100 / all >= 45, "{hogs} of {all}");
    }

    proptest! {
        #[test]
        fn its_bytes_are_those_of_its_entries(puts in prop::collection::vec((0..40_usize, 0..3_u32, 0..3_usize), 0..200)) {
            let cache = Cache::new(SHARDS * 900, STALE);
            let now = Instant::now();
            let owners: [Arc<str>; 3] = ["a", "b", "c"].map(Into::into);
            for (number, ttl, owner) in puts {
                if number == 39 {
                    cache.flush(Some(&name(ttl as usize)));
                    prop_assert!(cache.get(&key(ttl as usize), now).is_none());
                }
                cache.put(&key(number), &owners[owner], &stored(number, ttl), now);
                for shard in &cache.shards {
                    let shard = shard.lock().unwrap();
                    let sizes = shard.entries.iter().map(|(_, entry)| entry.size());
                    prop_assert_eq!(sizes.sum::<usize>(), shard.bytes);
                    prop_assert!(shard.bytes <= 900);
                    let queued = shard.owners.values().map(|of| of.queue.len());
                    prop_assert_eq!(queued.sum::<usize>(), shard.entries.len());
                    for (name, of) in &shard.owners {
                        let own = shard.entries.iter().filter(|(_, entry)| entry.owner == *name);
                        let sizes = own.map(|(_, entry)| entry.size());
                        prop_assert_eq!(sizes.sum::<usize>(), of.bytes);
                        prop_assert!(!of.queue.is_empty());
                    }
                }
            }
        }
    }
}
