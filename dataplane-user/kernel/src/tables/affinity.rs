//! Clients whose endpoints are remembered: the programs add them, and the agent removes each client that was idle for
//! longer than its service remembers it. If there is little room left, the agent also removes clients of the namespaces
//! that have most.

use std::collections::{BTreeMap, HashMap};

use dataplane_common::{
    decide,
    tables::{Affinity, AffinityKey},
};

use super::{
    super::error::{Doing, Error},
    Tables,
};

/// The content of AFFINITY after the agent has looked at all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// Number of remembered clients.
    pub clients: u32,
    /// Clients that were removed.
    pub expired: u32,
}

/// Clients that were removed to make room for others', by the namespace of their service.
pub type Removed = BTreeMap<Box<str>, u32>;

/// How many quarters of AFFINITY clients may have if several namespaces have services with session affinity. The rest is
/// for clients that come before the agent looks again.
const QUARTERS: u64 = 3;

impl Tables {
    /// Removes the clients whose time is over. `now`: the programs' clock, in nanoseconds.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn expire_affinity(&self, now: u64) -> Result<Remembered, Error> {
        let doing = || "cannot remove what is over from table AFFINITY".to_owned();
        let mut batches = self.affinity.batches();
        let mut batch = Vec::new();
        let mut seen = Remembered::default();
        while batches.read(&mut batch).doing(doing)? {
            for (key, entry) in batch.drain(..) {
                let seconds = decide::Tables::pool(self, key.group)
                    .map_or(0, |pool| u64::from(pool.affinity_seconds));
                if is_over(&entry, seconds, now) && self.forget(&key, &entry).doing(doing)? {
                    seen.expired += 1;
                } else {
                    seen.clients += 1;
                }
            }
        }
        Ok(seen)
    }

    /// Removes the clients that were not heard of for longest of namespaces that have most, if there is little room left.
    /// `namespace`: of the service that remembers the clients of a group.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn share_affinity(
        &self,
        namespace: impl Fn(u32) -> Option<Box<str>>,
    ) -> Result<Removed, Error> {
        let doing = || "cannot share the room of table AFFINITY".to_owned();
        let mut groups: HashMap<u32, Vec<(u64, AffinityKey, Affinity)>> = HashMap::new();
        let (mut batches, mut batch) = (self.affinity.batches(), Vec::new());
        while batches.read(&mut batch).doing(doing)? {
            for (key, entry) in batch.drain(..) {
                let group = groups.entry(key.group).or_default();
                group.push((entry.used_at, key, entry));
            }
        }
        let mut namespaces: BTreeMap<Box<str>, Vec<_>> = BTreeMap::new();
        for (group, clients) in groups {
            let name = namespace(group).unwrap_or_default();
            namespaces.entry(name).or_default().extend(clients);
        }
        let counts = namespaces.values().map(|clients| clients.len() as u64);
        let room = u64::from(self.affinity.capacity()) * QUARTERS / 4;
        let share = share(counts.collect(), room);
        let mut removed = Removed::new();
        for (name, mut clients) in namespaces {
            let excess = clients
                .len()
                .saturating_sub(usize::try_from(share).unwrap_or(usize::MAX));
            if excess == 0 {
                continue;
            }
            clients.sort_unstable_by_key(|(used_at, ..)| *used_at);
            let mut count = 0;
            for (_, key, entry) in &clients[..excess] {
                count += u32::from(self.forget(key, entry).doing(doing)?);
            }
            removed.insert(name, count);
        }
        Ok(removed)
    }

    /// Removes a client, unless a program has used the entry since it was read.
    fn forget(&self, key: &AffinityKey, entry: &Affinity) -> std::io::Result<bool> {
        Ok(self.affinity.get(key)? == Some(*entry) && self.affinity.remove(key)?)
    }
}

/// Whether a service with an affinity timeout of `seconds` has forgotten the client.
fn is_over(entry: &Affinity, seconds: u64, now: u64) -> bool {
    now.saturating_sub(entry.used_at) > seconds * 1_000_000_000
}

/// Returns the maximum for each namespace, so that all together fit into `room`. A namespace with fewer clients keeps
/// all of them.
fn share(mut counts: Vec<u64>, room: u64) -> u64 {
    counts.sort_unstable();
    let (mut left, mut others) = (room, counts.len() as u64);
    for count in counts {
        let even = left / others;
        if count > even {
            return even;
        }
        left -= count;
        others -= 1;
    }
    u64::MAX
}

/// Returns the approximate kernel memory of AFFINITY: a bucket of 16 bytes for each client that there is room for, and
/// 128 bytes for each remembered client (`struct htab_elem`, key and value, rounded up as `kernel/bpf/memalloc.c`
/// does).
pub(super) fn bytes(capacity: u32, clients: u32) -> u64 {
    u64::from(capacity.next_power_of_two()) * 16 + u64::from(clients) * 128
}

#[cfg(test)]
mod tests {
    use dataplane_common::tables::Endpoint;

    use super::*;

    #[test]
    fn a_namespace_with_few_clients_keeps_all_and_the_others_have_equal_shares() {
        for (counts, room, wanted) in [
            (vec![], 8, u64::MAX),
            (vec![3, 5], 8, u64::MAX),
            (vec![1000, 10], 100, 90),
            (vec![1000, 10, 1000], 100, 45),
            (vec![1000; 7], 3, 0),
        ] {
            assert_eq!(share(counts.clone(), room), wanted, "{counts:?} in {room}");
        }
    }

    #[test]
    fn a_client_is_over_after_its_services_time() {
        let entry = Affinity {
            endpoint: Endpoint::NONE,
            used_at: 5_000_000_000,
        };
        for (seconds, now, over) in [
            (10, 15_000_000_000, false),
            (10, 15_000_000_001, true),
            // A program has used the entry since the clock was read.
            (10, 4_000_000_000, false),
            // The service has no affinity any longer.
            (0, 5_000_000_001, true),
        ] {
            assert_eq!(is_over(&entry, seconds, now), over, "{seconds} s at {now}");
        }
    }
}
