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
