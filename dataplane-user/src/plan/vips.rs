//! The addresses that hosts of ServiceEntries are given: one of 240.240.0.0/16 and one of 2001:2::/48 each.
//!
//! A host's number, from which both addresses follow, is the first free one of a sequence that its namespace and name
//! determine. Of several hosts that are new at once, the older chooses first. So nodes that know the same objects come
//! to the same numbers without talking to each other, in whatever order they heard of the objects.
//!
//! A host keeps its number for as long as it is there. A host that is gone keeps its number for ten minutes, since
//! clients may still know the address. Both hold over restarts: the caller keeps [`Record`]s.
//!
//! So numbers depend on what a node has seen in two cases. If a host was removed, another one may have been given a
//! later number of its sequence because of it. If a host was added to an entry that is older than others, it does not
//! take the number of a host that has one: otherwise the author of an old entry could choose hosts that move those of
//! others, and get their connections.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::shares::Shares;
use crate::model::EntryName;

/// Numbers are 1 to this: a prime, so that every step comes by all of them.
const NUMBERS: u32 = 65_521;
/// Hosts that may have a number at the same time. The rest is for hosts that are gone, and keeps sequences short.
const CAPACITY: u64 = (NUMBERS - NUMBERS / 8) as u64;
/// How long the number of a host that is gone is not another's, in seconds.
const KEPT: u64 = 600;

/// A number that leads to a host's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Number(u16);

impl Number {
    /// From 1 to 65521.
    pub fn new(number: u16) -> Option<Self> {
        (1..=NUMBERS)
            .contains(&number.into())
            .then_some(Self(number))
    }

    /// As a number.
    pub fn get(self) -> u16 {
        self.0
    }

    /// Both addresses: 240.240.1.2 and 2001:2::f0f0:102 of 258.
    pub fn addresses(self) -> [IpAddr; 2] {
        let [high, low] = self.0.to_be_bytes();
        [
            IpAddr::V4(Ipv4Addr::new(240, 240, high, low)),
            IpAddr::V6(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0xf0f0, self.0)),
        ]
    }

    /// The number that leads to an address; none if none does.
    fn of(address: IpAddr) -> Option<Self> {
        let number = match address {
            IpAddr::V4(v4) => {
                let [_, _, high, low] = v4.octets();
                u16::from_be_bytes([high, low])
            }
            IpAddr::V6(v6) => v6.segments()[7],
        };
        Self::new(number).filter(|number| number.addresses().contains(&address))
    }
}

/// A host as a namespace has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName {
    /// The namespace.
    pub namespace: Box<str>,
    /// The host.
    pub host: Box<str>,
}

/// By what one host precedes another: the older entry, and then the first by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Age {
    has_none: bool,
    created: Option<i64>,
    entry: EntryName,
}

impl Age {
    /// That of an entry's hosts.
    pub fn of(entry: EntryName, created: Option<i64>) -> Self {
        Self {
            has_none: created.is_none(),
            created,
            entry,
        }
    }
}

/// What is to be remembered of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Which.
    pub host: HostName,
    /// Its number.
    pub number: Number,
    /// When the host went, in seconds since the epoch; none: it is there.
    pub gone: Option<u64>,
}

/// Hosts that are gone, whose numbers are not another's yet.
#[derive(Debug, Default)]
struct Gone {
    numbers: HashMap<HostName, (Number, u64)>,
    hosts: HashMap<Number, HostName>,
    /// The same by time.
    times: BTreeSet<(u64, Number)>,
}

impl Gone {
    fn insert(&mut self, number: Number, host: HostName, at: u64) {
        self.remove(&host);
        if let Some(other) = self.hosts.get(&number).cloned() {
            self.remove(&other);
        }
        self.times.insert((at, number));
        self.hosts.insert(number, host.clone());
        self.numbers.insert(host, (number, at));
    }

    fn remove(&mut self, host: &HostName) {
        if let Some((number, at)) = self.numbers.remove(host) {
            self.hosts.remove(&number);
            self.times.remove(&(at, number));
        }
    }

    /// Forgets those that have been gone for long enough.
    fn pass(&mut self, now: u64) {
        while let Some((at, number)) = self.times.first().copied() {
            if at + KEPT > now {
                break;
            }
            self.times.pop_first();
            if let Some(host) = self.hosts.remove(&number) {
                self.numbers.remove(&host);
            }
        }
    }
}

/// Gives numbers to hosts.
#[derive(Debug)]
pub struct Vips {
    /// The hosts that want a number, each with the entries that name it: the first of them counts.
    wanted: BTreeMap<HostName, BTreeSet<Age>>,
    numbers: HashMap<HostName, Number>,
    /// Whose each number is.
    holders: HashMap<Number, HostName>,
    /// Hosts that are gone, by number and by name, and when they went.
    gone: Gone,
    /// How many hosts each namespace may have.
    shares: Shares<1>,
    /// Hosts beyond that.
    over: BTreeSet<HostName>,
    /// Hosts that found no number that is free.
    waiting: BTreeSet<HostName>,
    /// Numbers whose addresses a control plane has given, and how often.
    foreign: HashMap<Number, u32>,
    /// Hosts that came or went since the last time.
    touched: BTreeSet<HostName>,
}

impl Vips {
    /// With what was remembered. The hosts that are not wanted by the first [`Vips::settle`] are gone then.
    pub fn new(records: impl IntoIterator<Item = Record>) -> Self {
        let mut vips = Self {
            wanted: BTreeMap::new(),
            numbers: HashMap::new(),
            holders: HashMap::new(),
            gone: Gone::default(),
            shares: Shares::of([CAPACITY]),
            over: BTreeSet::new(),
            waiting: BTreeSet::new(),
            foreign: HashMap::new(),
            touched: BTreeSet::new(),
        };
        for Record { host, number, gone } in records {
            // The last word counts; a number that two have is the first one's.
            if let Some(before) = vips.numbers.remove(&host) {
                vips.holders.remove(&before);
            }
            vips.gone.remove(&host);
            if vips.holders.contains_key(&number) {
                continue;
            }
            match gone {
                None => {
                    if let Some(other) = vips.gone.hosts.get(&number).cloned() {
                        vips.gone.remove(&other);
                    }
                    vips.holders.insert(number, host.clone());
                    vips.numbers.insert(host.clone(), number);
                    vips.touched.insert(host);
                }
                Some(at) => vips.gone.insert(number, host, at),
            }
        }
        vips
    }

    /// An entry names a host that wants a number.
    pub fn want(&mut self, host: &HostName, age: Age) {
        let entries = self.wanted.entry(host.clone()).or_default();
        if entries.is_empty() {
            self.shares.change(&host.namespace, &[0], &[1]);
            self.touched.insert(host.clone());
        }
        entries.insert(age);
    }

    /// An entry does not name it any more.
    pub fn unwant(&mut self, host: &HostName, age: &Age) {
        let Some(entries) = self.wanted.get_mut(host) else {
            return;
        };
        entries.remove(age);
        if entries.is_empty() {
            self.wanted.remove(host);
            self.shares.change(&host.namespace, &[1], &[0]);
            self.touched.insert(host.clone());
        }
    }

    /// A control plane has given an address, or not any more.
    pub fn foreign(&mut self, address: IpAddr, given: bool) {
        let Some(number) = Number::of(address) else {
            return;
        };
        let count = self.foreign.entry(number).or_default();
        if given {
            *count += 1;
        } else {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.foreign.remove(&number);
            }
        }
    }

    /// The number of a host; none if it is not wanted, or there is none for it.
    pub fn number(&self, host: &HostName) -> Option<Number> {
        self.numbers.get(host).copied()
    }

    /// The entries that name a host.
    pub fn entries(&self, host: &HostName) -> impl Iterator<Item = &EntryName> {
        let ages = self.wanted.get(host).into_iter().flatten();
        ages.map(|age| &age.entry)
    }

    /// All that is to be remembered.
    pub fn records(&self) -> Vec<Record> {
        let there = self
            .numbers
            .iter()
            .map(|(host, number)| (host, *number, None));
        let gone = self.gone.numbers.iter();
        let gone = gone.map(|(host, (number, at))| (host, *number, Some(*at)));
        let mut records: Vec<Record> = there
            .chain(gone)
            .map(|(host, number, gone)| Record {
                host: host.clone(),
                number,
                gone,
            })
            .collect();
        records.sort_unstable_by(|a, b| a.host.cmp(&b.host));
        records
    }

    /// Whether a host is one of too many in its namespace.
    pub fn is_over(&self, host: &HostName) -> bool {
        self.over.contains(host)
    }

    /// Whether hosts wait for numbers to be free.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Gives numbers to the hosts that want one, and takes those of others. `now`: in seconds since the epoch. Returns
    /// what has changed, to be remembered before it is told.
    pub fn settle(&mut self, now: u64) -> Vec<Record> {
        let mut records = Vec::new();
        self.gone.pass(now);
        let touched = std::mem::take(&mut self.touched);
        let mut fresh = std::mem::take(&mut self.waiting);
        fresh.extend(self.bounds(&touched));
        fresh.extend(touched);
        for host in &fresh {
            let is_served = self.wanted.contains_key(host) && !self.over.contains(host);
            if !is_served && let Some(number) = self.numbers.remove(host) {
                self.holders.remove(&number);
                self.gone.insert(number, host.clone(), now);
                records.push(Record {
                    host: host.clone(),
                    number,
                    gone: Some(now),
                });
            }
        }
        let mut fresh: Vec<_> = fresh
            .into_iter()
            .filter(|host| !self.numbers.contains_key(host) && !self.over.contains(host))
            .filter_map(|host| Some((self.wanted.get(&host)?.first()?.clone(), host)))
            .collect();
        fresh.sort_unstable();
        for (_, host) in fresh {
            let Some(number) = self.free(&host) else {
                self.waiting.insert(host);
                continue;
            };
            self.gone.remove(&host);
            self.holders.insert(number, host.clone());
            self.numbers.insert(host.clone(), number);
            records.push(Record {
                host,
                number,
                gone: None,
            });
        }
        records
    }

    /// Decides which hosts are beyond what their namespaces may have. Returns the hosts whose case may be another one.
    fn bounds(&mut self, touched: &BTreeSet<HostName>) -> BTreeSet<HostName> {
        let changed = self.shares.settle();
        let mut namespaces: BTreeSet<Box<str>> = BTreeSet::new();
        if changed {
            namespaces.extend(self.shares.over().map(Box::from));
            namespaces.extend(self.over.iter().map(|host| host.namespace.clone()));
        }
        let is_bounded = |of: &HostName| {
            self.shares.is_over(&of.namespace)
                || of_namespace(&self.over, &of.namespace).next().is_some()
        };
        let of = touched.iter().filter(|host| is_bounded(host));
        namespaces.extend(of.map(|host| host.namespace.clone()));
        let mut others = BTreeSet::new();
        for namespace in namespaces {
            let before: BTreeSet<HostName> =
                of_namespace(&self.over, &namespace).cloned().collect();
            let mut after = BTreeSet::new();
            if self.shares.is_over(&namespace) {
                let [budget] = self.shares.budget();
                let start = HostName {
                    namespace: namespace.clone(),
                    host: "".into(),
                };
                let all = self.wanted.range(start..);
                let all = all.take_while(|(host, _)| host.namespace == namespace);
                let mut all: Vec<_> = all.map(|(host, ages)| (ages.first(), host)).collect();
                all.sort_unstable();
                let budget = usize::try_from(budget).unwrap_or(usize::MAX);
                after.extend(all.into_iter().skip(budget).map(|(_, host)| host.clone()));
            }
            for host in before.symmetric_difference(&after) {
                if after.contains(host) {
                    self.over.insert(host.clone());
                } else {
                    self.over.remove(host);
                }
                others.insert(host.clone());
            }
        }
        others
    }

    /// The number for a host that has none: its own if it was gone for a moment, else the first free one of its
    /// sequence.
    fn free(&self, host: &HostName) -> Option<Number> {
        let is_free = |number: &Number| {
            !self.holders.contains_key(number) && !self.foreign.contains_key(number)
        };
        let own = self.gone.numbers.get(host).map(|(number, _)| *number);
        own.filter(is_free).or_else(|| {
            let is_gone = |number: &Number| self.gone.hosts.contains_key(number);
            sequence(host).find(|number| is_free(number) && !is_gone(number))
        })
    }
}

/// Those of a namespace.
fn of_namespace<'a>(
    hosts: &'a BTreeSet<HostName>,
    namespace: &'a str,
) -> impl Iterator<Item = &'a HostName> {
    let start = HostName {
        namespace: namespace.into(),
        host: "".into(),
    };
    let all = hosts.range(start..);
    all.take_while(move |host| *host.namespace == *namespace)
}

/// All numbers, in an order that a namespace and host determine. It must stay what it is: nodes of different versions
/// agree by it.
fn sequence(host: &HostName) -> impl Iterator<Item = Number> + use<> {
    // FNV-1a, and the finisher of SplitMix64.
    let bytes = host
        .namespace
        .bytes()
        .chain([b'/'])
        .chain(host.host.bytes());
    let mut hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash >> 31;
    let numbers = u64::from(NUMBERS);
    let first = (hash & 0xffff_ffff) % numbers;
    let step = 1 + (hash >> 32) % (numbers - 1);
    (0..numbers).filter_map(move |turn| {
        let number = (first + turn * step) % numbers + 1;
        Number::new(u16::try_from(number).ok()?)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn host(namespace: &str, host: &str) -> HostName {
        HostName {
            namespace: namespace.into(),
            host: host.into(),
        }
    }

    /// An entry of one host, by number: the number is its age.
    fn entry(number: u32) -> (HostName, Age) {
        let name = format!("e{number}");
        let namespace = format!("ns{}", number % 7);
        let age = Age::of(EntryName::new(&namespace, &name), Some(number.into()));
        (host(&namespace, &format!("{name}.example.com")), age)
    }

    fn want(vips: &mut Vips, numbers: impl IntoIterator<Item = u32>) {
        for number in numbers {
            let (host, age) = entry(number);
            vips.want(&host, age);
        }
    }

    fn all(vips: &Vips) -> BTreeMap<HostName, Number> {
        let numbers = vips.numbers.iter();
        numbers
            .map(|(host, number)| (host.clone(), *number))
            .collect()
    }

    /// Shuffles by a fixed rule.
    fn order(of: u32, turn: u32) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..of).collect();
        numbers.sort_by_key(|number| number.wrapping_mul(0x9e37_79b1).rotate_left(turn * 7) ^ turn);
        numbers
    }

    #[test]
    fn sixteen_thousand_hosts_have_as_many_addresses_on_three_agents() {
        const HOSTS: u32 = 16_000;
        let agents = [1, 2, 3].map(|turn| {
            let mut vips = Vips::new([]);
            want(&mut vips, order(HOSTS, turn));
            vips.settle(NOW);
            all(&vips)
        });
        assert_eq!(agents[0].len(), HOSTS as usize);
        let distinct: HashSet<_> = agents[0]
            .values()
            .map(|number| number.addresses())
            .collect();
        assert_eq!(distinct.len(), HOSTS as usize);
        assert!(agents[0] == agents[1] && agents[1] == agents[2]);
        // And one that heard of them one after the other, as they were made.
        let mut vips = Vips::new([]);
        for number in 0..HOSTS {
            want(&mut vips, [number]);
            vips.settle(NOW);
        }
        assert!(all(&vips) == agents[0]);
    }

    #[test]
    fn addresses_are_those_of_the_two_ranges() {
        let [first, last] = [1, NUMBERS].map(|n| Number::new(u16::try_from(n).unwrap()).unwrap());
        assert_eq!(
            first.addresses().map(|ip| ip.to_string()),
            ["240.240.0.1", "2001:2::f0f0:1"]
        );
        assert_eq!(
            last.addresses().map(|ip| ip.to_string()),
            ["240.240.255.241", "2001:2::f0f0:fff1"]
        );
        assert_eq!(Number::new(0), None);
        assert_eq!(Number::of("240.240.1.2".parse().unwrap()), Number::new(258));
        assert_eq!(
            Number::of("2001:2::f0f0:102".parse().unwrap()),
            Number::new(258)
        );
        assert_eq!(Number::of("240.241.1.2".parse().unwrap()), None);
    }

    #[test]
    fn the_sequence_stays_what_it_is() {
        let numbers: Vec<u16> = sequence(&host("shop", "db.example.com"))
            .take(3)
            .map(Number::get)
            .collect();
        assert_eq!(numbers, [20_549, 55_860, 25_650]);
        let all: HashSet<_> = sequence(&host("shop", "db.example.com")).collect();
        assert_eq!(all.len(), NUMBERS as usize);
    }

    #[test]
    fn the_older_of_two_that_want_one_number_has_it_and_the_younger_never_moves_it() {
        let rivals = rivals();
        for names in [rivals.clone(), rivals.iter().rev().cloned().collect()] {
            let mut vips = Vips::new([]);
            let ages = [5, 6].map(|at| Age::of(EntryName::new("ns", "e"), Some(at)));
            for (host, age) in names.iter().zip(&ages) {
                vips.want(host, age.clone());
            }
            vips.settle(NOW);
            let first = |host| sequence(host).next();
            assert_eq!(vips.number(&names[0]), first(&names[0]));
            assert_ne!(vips.number(&names[1]), first(&names[1]));
            // When the older is gone, the younger stays where it is.
            let before = vips.number(&names[1]);
            vips.unwant(&names[0], &ages[0]);
            vips.settle(NOW + 1);
            vips.settle(NOW + 2 * KEPT);
            assert_eq!(vips.number(&names[1]), before);
        }
    }

    /// Two hosts whose sequences begin with the same number.
    fn rivals() -> Vec<HostName> {
        let mut known = HashMap::new();
        (0..)
            .find_map(|n| {
                let new = host("ns", &format!("h{n}.example.com"));
                let other = known.insert(sequence(&new).next()?, new.clone())?;
                Some(vec![other, new])
            })
            .unwrap()
    }

    #[test]
    fn a_tenant_with_too_many_hosts_loses_its_youngest_and_the_others_lose_nothing() {
        let mut vips = Vips::new([]);
        let named = |namespace: &str, n: u32| {
            let age = Age::of(EntryName::new(namespace, "e"), Some(n.into()));
            (host(namespace, &format!("h{n}.example.com")), age)
        };
        for n in 0..70_000 {
            let (host, age) = named("greedy", n);
            vips.want(&host, age);
        }
        vips.settle(NOW);
        assert!(vips.is_over(&named("greedy", 69_999).0));
        assert!(!vips.is_over(&named("greedy", 0).0));
        for n in 0..1000 {
            let (host, age) = named("shop", n);
            vips.want(&host, age);
        }
        // Those of the greedy that make room are given to nobody for a while; there is room beside them.
        vips.settle(NOW + 1);
        for n in 0..1000 {
            assert!(vips.number(&named("shop", n).0).is_some(), "{n}");
        }
    }

    proptest! {
        /// Whatever comes and goes: nobody moves, no number is two hosts', none is another's within ten minutes, and
        /// what was remembered is what there is, at whatever moment the agent starts anew.
        #[test]
        fn nobody_moves_and_no_number_is_anothers_too_early(
            steps in prop::collection::vec((0u32..60, any::<bool>(), 0u64..400, prop::bool::weighted(0.1)), 1..80),
            foreign in prop::collection::vec(1u16..=200, 0..20),
        ) {
            let mut vips = Vips::new([]);
            for number in &foreign {
                for address in Number::new(*number).unwrap().addresses() {
                    vips.foreign(address, true);
                }
            }
            let mut kept: Vec<Record> = Vec::new();
            let mut now = NOW;
            let mut last: HashMap<Number, (HostName, u64)> = HashMap::new();
            let mut there: BTreeSet<u32> = BTreeSet::new();
            for (number, comes, later, restarts) in steps {
                now += later;
                if restarts {
                    vips = Vips::new(kept.clone());
                    for number in &foreign {
                        for address in Number::new(*number).unwrap().addresses() {
                            vips.foreign(address, true);
                        }
                    }
                    want(&mut vips, there.iter().copied());
                }
                let before = all(&vips);
                if comes {
                    want(&mut vips, [number]);
                    there.insert(number);
                } else {
                    let (host, age) = entry(number);
                    vips.unwant(&host, &age);
                    there.remove(&number);
                }
                kept.extend(vips.settle(now));
                let after = all(&vips);
                prop_assert_eq!(after.len(), there.len());
                let distinct: HashSet<_> = after.values().collect();
                prop_assert_eq!(distinct.len(), after.len());
                for (host, number) in &after {
                    prop_assert!(before.get(host).is_none_or(|before| before == number));
                    prop_assert!(!foreign.contains(&number.get()));
                    if let Some((other, at)) = last.get(number) {
                        prop_assert!(other == host || now - at >= KEPT);
                    }
                }
                for (host, number) in after {
                    last.insert(number, (host, now));
                }
            }
        }
    }
}
