//! Assigns addresses to hosts of ServiceEntries: one of 240.240.0.0/16 and one of 2001:2::/48 each.
//!
//! Both addresses follow from the host's number. The number is the first free one of a sequence that the host's
//! namespace and name determine. Of several new hosts, the older chooses first. So nodes that know the same objects
//! assign the same numbers without talking to each other, in whatever order they heard of the objects.
//!
//! A host keeps its number as long as it exists. The number of a removed host stays reserved for ten minutes, because
//! clients may still know the address. Both hold over restarts: the caller stores [`Record`]s.
//!
//! The numbers depend on a node's history in two cases. If a host was removed, another host may have a later number of
//! its sequence because of it. If a host was added to an entry that is older than others, it does not displace a host
//! that has a number: otherwise the author of an old entry could choose hosts that move the hosts of others, and get
//! their connections.

mod number;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use model::EntryName;

pub use self::number::{HostName, Number};
use self::number::{NUMBERS, sequence};
use super::shares::Shares;

/// Maximum number of hosts with a number. The remaining numbers are for removed hosts, and shorten the searches.
const CAPACITY: u64 = (NUMBERS - NUMBERS / 8) as u64;
/// Time for which the number of a removed host stays reserved, in seconds.
pub(super) const KEPT: u64 = 600;
/// Time to wait for a control plane that assigns addresses, in seconds. It writes the address of a new host a moment
/// after the host.
const PATIENCE: u64 = 5;
/// Age of an entry, in seconds, from which on a control plane is not expected to assign it an address.
const SETTLED: i64 = 60;

/// Precedence of hosts: first the older entry, then the first name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Age {
    has_none: bool,
    created: Option<i64>,
    entry: EntryName,
}

impl Age {
    /// Returns the precedence of an entry's hosts.
    pub fn of(entry: EntryName, created: Option<i64>) -> Self {
        Self {
            has_none: created.is_none(),
            created,
            entry,
        }
    }

    /// Returns the precedence before all others.
    pub(super) fn first() -> Self {
        Self::of(EntryName::new("", ""), Some(i64::MIN))
    }

    /// Returns the entry of this precedence.
    pub(super) const fn entry(&self) -> &EntryName {
        &self.entry
    }
}

/// The stored state of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The host.
    pub host: HostName,
    /// Its number.
    pub number: Number,
    /// Time of the removal, in seconds since the epoch. `None`: the host exists.
    pub gone: Option<u64>,
}

/// Removed hosts whose numbers are still reserved.
#[derive(Debug, Default)]
struct Gone {
    numbers: HashMap<HostName, (Number, u64)>,
    hosts: HashMap<Number, HostName>,
    /// The numbers by the time of removal.
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

    /// Forgets the hosts whose reservation has ended. Returns their numbers.
    fn pass(&mut self, now: u64) -> Vec<Number> {
        let mut free = Vec::new();
        while let Some((at, number)) = self.times.first().copied() {
            if at + KEPT > now {
                break;
            }
            self.times.pop_first();
            if let Some(host) = self.hosts.remove(&number) {
                self.numbers.remove(&host);
            }
            free.push(number);
        }
        free
    }
}

/// Assigns numbers to hosts.
#[derive(Debug)]
pub struct Vips {
    /// The hosts that want a number, each with the entries that name it. The first entry counts.
    wanted: BTreeMap<HostName, BTreeSet<Age>>,
    numbers: HashMap<HostName, Number>,
    /// The host of each number.
    holders: HashMap<Number, HostName>,
    /// Removed hosts by number and by name, with the time of removal.
    gone: Gone,
    /// Maximum number of hosts of each namespace.
    shares: Shares<1>,
    /// Hosts beyond that limit.
    over: BTreeSet<HostName>,
    /// Hosts for which no number was free.
    waiting: BTreeSet<HostName>,
    /// Numbers whose addresses a control plane has assigned, and how often.
    foreign: HashMap<Number, u32>,
    /// Hosts added or removed since the last call.
    touched: BTreeSet<HostName>,
    /// Numbers that other hosts may have from now on.
    free: Vec<Number>,
    /// Whether a control plane assigns addresses, too.
    defers: bool,
    /// Hosts that wait for the control plane, and since when.
    deferred: BTreeMap<HostName, u64>,
}

impl Vips {
    /// Starts with stored records. The first [`Vips::assign`] treats hosts that are not wanted by then as removed.
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
            free: Vec::new(),
            defers: false,
            deferred: BTreeMap::new(),
        };
        for Record { host, number, gone } in records {
            // The last record of a host counts. If two hosts have one number, the first keeps it.
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

    /// Records that an entry names a host that wants a number.
    pub fn want(&mut self, host: &HostName, age: Age) {
        let entries = self.wanted.entry(host.clone()).or_default();
        if entries.is_empty() {
            self.shares.change(&host.namespace, &[0], &[1]);
            self.touched.insert(host.clone());
        }
        entries.insert(age);
    }

    /// Records that an entry no longer names a host.
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

    /// Records that a control plane has assigned an address, or has withdrawn it.
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

    /// Sets whether new hosts wait five seconds for a control plane that assigns addresses.
    pub fn defer(&mut self, does: bool) {
        self.defers = does;
    }

    /// Returns whether a host waits for the control plane.
    pub fn is_deferred(&self, host: &HostName) -> bool {
        self.deferred.contains_key(host)
    }

    /// Returns whether any host waits for the control plane.
    pub fn defers(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Returns the host that has an address, or had it so recently that clients may still know it.
    pub fn holder(&self, address: IpAddr) -> Option<&HostName> {
        let number = Number::of(address)?;
        let gone = || self.gone.hosts.get(&number);
        self.holders.get(&number).or_else(gone)
    }

    /// Returns the numbers that have become free since the last call.
    pub fn take_free(&mut self) -> Vec<Number> {
        std::mem::take(&mut self.free)
    }

    /// Returns whether the number of an address is reserved and will be free later.
    pub fn is_gone(&self, address: IpAddr) -> bool {
        Number::of(address).is_some_and(|number| self.gone.hosts.contains_key(&number))
    }

    /// Returns the former number of a host, and the time after which another host may have it.
    pub fn former(&self, host: &HostName) -> Option<(Number, u64)> {
        let (number, at) = self.gone.numbers.get(host)?;
        Some((*number, at + KEPT))
    }

    /// Returns the number of a host. `None` if the host does not want one, or if none is free.
    pub fn number(&self, host: &HostName) -> Option<Number> {
        self.numbers.get(host).copied()
    }

    /// Returns the entries that name a host.
    pub fn entries(&self, host: &HostName) -> impl Iterator<Item = &EntryName> {
        let ages = self.wanted.get(host).into_iter().flatten();
        ages.map(|age| &age.entry)
    }

    /// Returns all records to store.
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

    /// Returns whether a host exceeds the limit of its namespace.
    pub fn is_over(&self, host: &HostName) -> bool {
        self.over.contains(host)
    }

    /// Returns whether hosts wait for free numbers.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Assigns numbers to the hosts that want one, and takes back the numbers of others. `now`: in seconds since the
    /// epoch. Returns the changed records, which the caller stores before it publishes the addresses.
    pub fn assign(&mut self, now: u64) -> Vec<Record> {
        let mut records = Vec::new();
        self.free.extend(self.gone.pass(now));
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
        let earlier = std::mem::take(&mut self.deferred);
        let mut left = self.left();
        for (age, host) in fresh {
            let since = earlier.get(&host).copied().unwrap_or(now);
            let is_new = age.created.is_none_or(|at| {
                i64::try_from(now).is_ok_and(|now| now < at.saturating_add(SETTLED))
            });
            let is_known = self.gone.numbers.contains_key(&host);
            if self.defers && is_new && !is_known && now < since + PATIENCE {
                self.deferred.insert(host.clone(), since);
                self.waiting.insert(host);
                continue;
            }
            let Some(number) = self.free(&host, &mut left) else {
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

    /// Decides which hosts exceed the limits of their namespaces. Returns the hosts whose case may have changed.
    fn bounds(&mut self, touched: &BTreeSet<HostName>) -> BTreeSet<HostName> {
        let changed = self.shares.divide();
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

    /// Returns how many numbers are free.
    fn left(&self) -> usize {
        let is_other = |number: &&Number| {
            !self.holders.contains_key(number) && !self.gone.hosts.contains_key(number)
        };
        let foreign = self.foreign.keys().filter(is_other).count();
        let taken = self.holders.len() + self.gone.hosts.len() + foreign;
        (NUMBERS as usize).saturating_sub(taken)
    }

    /// Returns a number for a host that has none: its former number if it is still reserved, else the first free one of
    /// its sequence. If none of all numbers is `left`, nothing is searched: each of many hosts would look at all numbers.
    fn free(&self, host: &HostName, left: &mut usize) -> Option<Number> {
        let is_free = |number: &Number| {
            !self.holders.contains_key(number) && !self.foreign.contains_key(number)
        };
        let own = self.gone.numbers.get(host).map(|(number, _)| *number);
        let own = own.filter(is_free);
        if own.is_some() || *left == 0 {
            return own;
        }
        *left -= 1;
        let is_gone = |number: &Number| self.gone.hosts.contains_key(number);
        sequence(host).find(|number| is_free(number) && !is_gone(number))
    }
}

/// Returns the hosts of a namespace.
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

#[cfg(test)]
mod tests;
