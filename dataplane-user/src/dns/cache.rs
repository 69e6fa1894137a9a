//! Answers of resolvers, kept for others who ask the same: bounded by bytes.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{name::LowerName, wire::Stored};

/// How many parts there are, each with a lock of its own.
const SHARDS: usize = 16;
/// What an entry takes besides its key and answer: the map's slot and the queue's.
const OVERHEAD: usize = 160;
/// How long an answer that is over may still be served if resolvers are away (RFC 8767).
const STALE: Duration = Duration::from_hours(24);
/// How long any answer is kept at most.
const LONGEST: u32 = 86_400;

/// What answers differ by: the resolvers, the type, the query's bits, the name.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Arc<[u8]>);

impl Key {
    /// The key of a question to a set of resolvers.
    pub fn new(resolvers: u32, name: &LowerName, of_type: u16, bits: u8) -> Self {
        let name = name.bytes();
        let mut key = Vec::with_capacity(name.len() + 7);
        key.extend_from_slice(&resolvers.to_ne_bytes());
        key.extend_from_slice(&of_type.to_ne_bytes());
        key.push(bits);
        key.extend_from_slice(name);
        Self(key.into())
    }
}

/// An answer in the cache.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The answer.
    pub stored: Arc<Stored>,
    /// Seconds since resolvers gave it.
    pub age: u32,
    /// How good it still is.
    pub state: State,
}

/// How good an answer still is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It can be given.
    Fresh,
    /// Likewise; it is asked for often, and nearly over, so resolvers should be asked again.
    Fading,
    /// It is over.
    Stale,
}

struct Entry {
    stored: Arc<Stored>,
    since: Instant,
    /// Whether it was asked for since it was last considered for eviction.
    used: AtomicBool,
    /// How often it was asked for.
    hits: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<Key, Entry>,
    /// Keys in the order in which they are considered for eviction.
    queue: VecDeque<Key>,
    bytes: usize,
}

/// A cache that several threads share.
pub struct Cache {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    /// How many bytes each shard may have.
    room: usize,
    evictions: AtomicU64,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cache")
    }
}

impl Cache {
    /// An empty cache of at most this many bytes.
    pub fn new(bytes: usize) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            room: bytes / SHARDS,
            evictions: AtomicU64::new(0),
        }
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        let hash = usize::try_from(self.hasher.hash_one(key) % SHARDS as u64);
        let shard = &self.shards[hash.unwrap_or_default()];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a question, if it is there.
    pub fn get(&self, key: &Key, now: Instant) -> Option<Hit> {
        let shard = self.shard(key);
        let entry = shard.entries.get(key)?;
        let age = now.saturating_duration_since(entry.since);
        let seconds = u32::try_from(age.as_secs()).unwrap_or(u32::MAX);
        let ttl = entry.stored.ttl.min(LONGEST);
        if age > Duration::from_secs(ttl.into()) + STALE {
            return None;
        }
        entry.used.store(true, Ordering::Relaxed);
        let hits = entry.hits.fetch_add(1, Ordering::Relaxed);
        let state = match ttl.checked_sub(seconds) {
            None | Some(0) => State::Stale,
            // Two askers in a row for the last tenth of its life.
            Some(left) if hits >= 2 && left <= ttl / 10 => State::Fading,
            Some(_) => State::Fresh,
        };
        Some(Hit {
            stored: Arc::clone(&entry.stored),
            age: seconds,
            state,
        })
    }

    /// Keeps an answer, unless it may not be kept.
    pub fn put(&self, key: &Key, stored: &Arc<Stored>, now: Instant) {
        if stored.ttl == 0 || stored.is_truncated() {
            return;
        }
        let size = |stored: &Stored| key.0.len() + stored.size() + OVERHEAD;
        let mut shard = self.shard(key);
        let shard = &mut *shard;
        let entry = Entry {
            stored: Arc::clone(stored),
            since: now,
            used: AtomicBool::new(false),
            hits: AtomicUsize::new(0),
        };
        shard.bytes += size(stored);
        match shard.entries.insert(key.clone(), entry) {
            Some(old) => shard.bytes -= size(&old.stored),
            None => shard.queue.push_back(key.clone()),
        }
        // An entry that was used gets another round. Two rounds end it.
        let mut rounds = shard.queue.len() * 2;
        while shard.bytes > self.room && rounds > 0 {
            rounds -= 1;
            let Some(key) = shard.queue.pop_front() else {
                break;
            };
            let Some(entry) = shard.entries.get(&key) else {
                continue;
            };
            if entry.used.swap(false, Ordering::Relaxed) {
                shard.queue.push_back(key);
                continue;
            }
            let size = key.0.len() + entry.stored.size() + OVERHEAD;
            shard.bytes -= size;
            shard.entries.remove(&key);
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

    /// How many answers went before their time, for want of room.
    pub fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
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
        let cache = Cache::new(1 << 20);
        let start = Instant::now();
        cache.put(&key(1), &stored(1, 60), start);
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
        // Another set of resolvers, type or bits.
        for other in [
            Key::new(2, &name(1), 1, 1),
            Key::new(1, &name(1), 28, 1),
            Key::new(1, &name(1), 1, 9),
        ] {
            assert!(cache.get(&other, start).is_none());
        }
    }

    #[test]
    fn what_nobody_asks_for_goes_first() {
        let cache = Cache::new(200_000);
        let now = Instant::now();
        for number in 0..2000 {
            cache.put(&key(number), &stored(number, 60), now);
            assert!(cache.get(&key(0), now).is_some(), "at {number}");
        }
        let (count, bytes) = cache.size();
        assert!(
            bytes <= 200_000 && count > 300,
            "{count} answers, {bytes} bytes"
        );
        assert!(cache.evictions() > 1000);
    }

    proptest! {
        #[test]
        fn its_bytes_are_those_of_its_entries(puts in prop::collection::vec((0..40_usize, 0..3_u32), 0..200)) {
            let cache = Cache::new(SHARDS * 900);
            let now = Instant::now();
            for (number, ttl) in puts {
                cache.put(&key(number), &stored(number, ttl), now);
                for shard in &cache.shards {
                    let shard = shard.lock().unwrap();
                    let sizes = shard.entries.iter();
                    let sizes = sizes.map(|(key, entry)| key.0.len() + entry.stored.size() + OVERHEAD);
                    prop_assert_eq!(sizes.sum::<usize>(), shard.bytes);
                    prop_assert!(shard.bytes <= 900);
                    prop_assert_eq!(shard.queue.len(), shard.entries.len());
                }
            }
        }
    }
}
