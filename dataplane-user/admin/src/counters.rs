//! Counters of a service's port, from the counters of the pools that answer for it.
//!
//! The kernel counts by pool. A service's port has several pools (families, traffic policies), they come and go with
//! its spec, and a pool that is reused for another service counts from 0 again. The agent keeps the counts of each
//! service's port while the service has the port, so that its counters never go backwards while the agent runs.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
};

use dataplane_common::{Reason, tables::PoolStats};
use model::{Protocol, ServiceName};

/// The subject of counters: a service's port; without a port, connections to ports that the service does not have.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortKey {
    /// The service.
    pub service: ServiceName,
    /// Its port.
    pub port: Option<(u16, Protocol)>,
}

/// Counters of services' ports. Holds only ports with connections, because of very many services most are idle.
#[derive(Debug, Default)]
pub struct Counters {
    /// By pool: the port that it counted for, and its counters at that time.
    seen: HashMap<u32, (PortKey, PoolStats)>,
    totals: HashMap<PortKey, PoolStats>,
}

impl Counters {
    /// Adds the pools' counts since the last update. `pools` has all pools: a service's port without a pool is
    /// forgotten.
    pub fn update(&mut self, pools: impl IntoIterator<Item = (u32, PortKey, PoolStats)>) {
        let before = std::mem::take(&mut self.seen);
        let mut totals = HashMap::with_capacity(self.totals.len());
        for (pool, key, now) in pools {
            if now == PoolStats::default()
                && !self.totals.contains_key(&key)
                && !totals.contains_key(&key)
            {
                continue;
            }
            let last = match before.get(&pool) {
                Some((owner, last)) if *owner == key => *last,
                _ => PoolStats::default(),
            };
            let total: &mut PoolStats = totals
                .entry(key.clone())
                .or_insert_with(|| self.totals.remove(&key).unwrap_or_default());
            add(total, &since(&now, &last));
            self.seen.insert(pool, (key, now));
        }
        self.totals = totals;
    }

    /// Returns the counters of a service's port.
    pub fn get(&self, key: &PortKey) -> PoolStats {
        self.totals.get(key).copied().unwrap_or_default()
    }

    /// Returns every service's port with connections, and its counters.
    pub fn iter(&self) -> impl Iterator<Item = (&PortKey, &PoolStats)> {
        self.totals.iter()
    }
}

/// Returns the ports that have series of their own, of `ports` with their connections, if at most `room` may have some:
/// in each namespace the most used ones. The namespaces share the room, so one with many ports leaves the others their
/// share. `None`: all.
pub fn most_used(ports: &[(PortKey, u64)], room: usize) -> Option<HashSet<&PortKey>> {
    if ports.len() <= room {
        return None;
    }
    let mut namespaces: HashMap<&str, Vec<(Reverse<u64>, &PortKey)>> = HashMap::new();
    for (key, used) in ports {
        let of = namespaces.entry(key.service.namespace()).or_default();
        of.push((Reverse(*used), key));
    }
    let mut namespaces: Vec<_> = namespaces.into_values().collect();
    namespaces.sort_unstable_by_key(Vec::len);
    let (mut left, mut shown) = (room, HashSet::with_capacity(room));
    let count = namespaces.len();
    for (before, mut of) in namespaces.into_iter().enumerate() {
        let part = of.len().min(left / (count - before));
        left -= part;
        of.sort_unstable();
        shown.extend(of[..part].iter().map(|(_, key)| *key));
    }
    Some(shown)
}

/// Returns the refusals of a pool by reason, including reasons that have not occurred.
pub fn refusals(stats: &PoolStats) -> [(Reason, u64); 3] {
    [
        (Reason::NoEndpoints, stats.no_endpoints),
        (Reason::NoLocalEndpoint, stats.no_local),
        (Reason::PortNotServed, stats.no_such_port),
    ]
}

/// Returns the difference between `now` and `last`; a counter that is behind has started again from 0.
fn since(now: &PoolStats, last: &PoolStats) -> PoolStats {
    let since = |now: u64, last: u64| now.checked_sub(last).unwrap_or(now);
    PoolStats {
        translated: since(now.translated, last.translated),
        no_endpoints: since(now.no_endpoints, last.no_endpoints),
        no_local: since(now.no_local, last.no_local),
        no_such_port: since(now.no_such_port, last.no_such_port),
    }
}

fn add(total: &mut PoolStats, more: &PoolStats) {
    total.translated += more.translated;
    total.no_endpoints += more.no_endpoints;
    total.no_local += more.no_local;
    total.no_such_port += more.no_such_port;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> PortKey {
        PortKey {
            service: ServiceName::new("default", name),
            port: Some((80, Protocol::Tcp)),
        }
    }

    fn translated(translated: u64) -> PoolStats {
        PoolStats {
            translated,
            ..PoolStats::default()
        }
    }

    #[test]
    fn a_service_never_counts_backwards() {
        let (web, dns) = (key("web"), key("dns"));
        let mut counters = Counters::default();
        counters.update([
            (1, web.clone(), translated(10)),
            (2, web.clone(), translated(5)),
        ]);
        assert_eq!(counters.get(&web).translated, 15);
        // One of its pools is removed, the other counts on.
        counters.update([(2, web.clone(), translated(6))]);
        assert_eq!(counters.get(&web).translated, 16);
        // The removed pool is reused for another service and starts from 0.
        counters.update([
            (1, dns.clone(), translated(3)),
            (2, web.clone(), translated(6)),
        ]);
        assert_eq!(
            (counters.get(&web).translated, counters.get(&dns).translated),
            (16, 3)
        );
        // The pool is used for the first service again.
        counters.update([
            (1, web.clone(), translated(2)),
            (2, web.clone(), translated(6)),
        ]);
        assert_eq!(counters.get(&web).translated, 18);
    }

    #[test]
    fn idle_ports_are_not_held_but_their_past_is() {
        let (web, dns) = (key("web"), key("dns"));
        let mut counters = Counters::default();
        counters.update([
            (1, web.clone(), translated(10)),
            (2, dns.clone(), translated(0)),
        ]);
        assert_eq!(counters.iter().count(), 1);
        // Its only pool is a new one, which has counted nothing yet.
        counters.update([
            (3, web.clone(), translated(0)),
            (2, dns.clone(), translated(1)),
        ]);
        assert_eq!(
            (counters.get(&web).translated, counters.get(&dns).translated),
            (10, 1)
        );
    }

    #[test]
    fn a_pool_that_starts_again_for_the_same_service_adds_up() {
        let web = key("web");
        let mut counters = Counters::default();
        counters.update([(1, web.clone(), translated(10))]);
        counters.update([(1, web.clone(), translated(4))]);
        assert_eq!(counters.get(&web).translated, 14);
    }

    #[test]
    fn a_namespace_with_many_ports_leaves_others_their_series() {
        let port = |namespace: &str, number: u16| PortKey {
            service: ServiceName::new(namespace, "web"),
            port: Some((number, Protocol::Tcp)),
        };
        let hog = (1..=1000).map(|number| (port("hog", number), u64::from(number)));
        let small = (1..=3).map(|number| (port("small", number), 0));
        let middle = (1..=50).map(|number| (port("middle", number), 7));
        let all: Vec<_> = hog.chain(small).chain(middle).collect();
        assert!(most_used(&all, all.len()).is_none());
        let shown = most_used(&all, 100).unwrap();
        assert_eq!(shown.len(), 100);
        let of = |namespace: &str| {
            let of = shown
                .iter()
                .filter(|key| key.service.namespace() == namespace);
            of.count()
        };
        assert_eq!((of("small"), of("middle"), of("hog")), (3, 48, 49));
        // The most used ports are shown.
        assert!(shown.contains(&port("hog", 1000)) && !shown.contains(&port("hog", 1)));
        assert_eq!(most_used(&all, 0).unwrap().len(), 0);
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let web = key("web");
        let mut counters = Counters::default();
        counters.update([(1, web.clone(), translated(10))]);
        counters.update([]);
        assert_eq!(counters.iter().count(), 0);
        assert_eq!(counters.get(&web).translated, 0);
    }
}
