//! The ledger: the totals of connections, by the labels that metrics show.
//!
//! All pods with the same labels are one series, which keeps the counts of pods that have gone. A series expires some time after
//! its last use. If there are very many series, a workload that would need a new series is counted in a common series, so
//! that its namespace leaves room for the series of others.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use super::{counters::Totals, labels::Labels};

/// How long a series stays after its last use: several scrapes.
const QUIET: Duration = Duration::from_mins(15);
/// The maximum number of series, besides those for the rest of each workload's connections: one by direction and flag.
const ROOM: usize = 20_000;
/// The workloads of a namespace have at most this many times as many series as are free, as with
/// [connections](super::limits).
const SHARE: usize = 4;
/// The minimum time between two searches for expired series.
const EVERY: Duration = Duration::from_secs(10);

/// Totals since the proxy, or the agent, started.
#[derive(Debug, Default)]
pub struct Ledger {
    series: BTreeMap<Labels, Series>,
    /// How many series the workloads of a namespace have.
    namespaces: HashMap<Box<str>, usize>,
    pruned: Option<Instant>,
}

/// The totals of connections with the same labels.
#[derive(Clone, Copy, Debug)]
pub struct Series {
    /// Connections and bytes.
    pub totals: Totals,
    /// How long closed connections were open. Only direct connections are measured.
    pub nanoseconds: u64,
    used: Instant,
}

impl Ledger {
    /// Adds to a series. A connection that is open uses its series, too: with totals of 0, a series that exists stays, and none
    /// begins.
    pub fn add(&mut self, labels: &Labels, totals: Totals, nanoseconds: u64, now: Instant) {
        if totals == Totals::default() {
            if let Some(series) = self.series.get_mut(labels) {
                series.used = now;
            }
            return;
        }
        let series = match self.series.get_mut(labels) {
            Some(series) => series,
            None => self.begin(labels, now),
        };
        series.totals += totals;
        series.nanoseconds += nanoseconds;
        series.used = now;
    }

    /// Begins a series, or finds that of the rest.
    fn begin(&mut self, labels: &Labels, now: Instant) -> &mut Series {
        let namespace = labels.workload.namespace();
        let free = ROOM.saturating_sub(self.series.len());
        let has = self.namespaces.get(namespace).copied().unwrap_or_default();
        let labels = if has < free.saturating_mul(SHARE) {
            labels.alone()
        } else {
            labels.rest()
        };
        if !self.series.contains_key(&labels) {
            let namespace = labels.workload.namespace().into();
            *self.namespaces.entry(namespace).or_default() += 1;
        }
        self.series.entry(labels).or_insert(Series {
            totals: Totals::default(),
            nanoseconds: 0,
            used: now,
        })
    }

    /// All series.
    pub fn iter(&self) -> impl Iterator<Item = (&Labels, &Series)> {
        self.series.iter()
    }

    /// Whether it is time for [`Ledger::prune`].
    pub fn is_due(&self, now: Instant) -> bool {
        self.pruned.is_none_or(|at| now - at >= EVERY)
    }

    /// Removes expired series.
    pub fn prune(&mut self, now: Instant) {
        self.pruned = Some(now);
        self.series.retain(|_, series| now - series.used < QUIET);
        self.namespaces.clear();
        for labels in self.series.keys() {
            let namespace = labels.workload.namespace().into();
            *self.namespaces.entry(namespace).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use model::{Place, ServiceName, Telemetry, Workload, WorkloadName};

    use super::*;
    use crate::{CountersKey, Direction, Flag, Party};

    fn party(pod: &str, deployment: &str) -> Party {
        Party::of(&Arc::new(Workload {
            telemetry: Telemetry::new(deployment, None),
            ..Workload::new(WorkloadName::new("default", pod), Place::Address)
        }))
    }

    fn labels(workload: Party, peer: Party) -> Labels {
        Labels {
            workload,
            key: CountersKey {
                direction: Direction::Outbound,
                principals: None,
                service: None,
                peer,
                flag: Flag::None,
            },
        }
    }

    const ONE: Totals = Totals {
        opened: 1,
        closed: 0,
        failed: 0,
        received: 0,
        sent: 0,
    };

    #[test]
    fn pods_with_the_same_labels_are_one_series_for_some_time_after_its_last_use() {
        let mut ledger = Ledger::default();
        let now = Instant::now();
        for pod in ["web-1", "web-2", "web-3"] {
            ledger.add(&labels(party(pod, "web"), Party::nobody()), ONE, 5, now);
        }
        let unknown = party("unknown", "unknown");
        ledger.add(&labels(party("web-1", "web"), unknown.clone()), ONE, 0, now);
        let seen: Vec<_> = ledger
            .iter()
            .map(|(_, s)| (s.totals.opened, s.nanoseconds))
            .collect();
        assert_eq!(seen, [(1, 0), (3, 15)]);
        // A connection of `web` is open.
        let later = now + Duration::from_mins(14);
        ledger.add(
            &labels(party("web-9", "web"), Party::nobody()),
            Totals::default(),
            0,
            later,
        );
        ledger.add(
            &labels(party("api-1", "api"), Party::nobody()),
            Totals::default(),
            0,
            later,
        );
        ledger.prune(later);
        assert_eq!(ledger.iter().count(), 2, "it may not have been scraped");
        ledger.prune(now + QUIET);
        assert_eq!(ledger.iter().count(), 1);
        ledger.prune(later + QUIET);
        assert_eq!(ledger.iter().count(), 0);
    }

    #[test]
    fn a_namespace_with_very_many_series_leaves_others_theirs() {
        let mut ledger = Ledger::default();
        let now = Instant::now();
        let of = |namespace: &str, service: usize| {
            let workload = Workload::new(WorkloadName::new(namespace, "web"), Place::Address);
            let mut labels = labels(Party::of(&Arc::new(workload)), Party::nobody());
            labels.key.service = Some(ServiceName::new(namespace, &format!("s{service}")));
            labels
        };
        let count = |ledger: &Ledger, namespace: &str| {
            let all = ledger.iter();
            all.filter(|(labels, _)| labels.workload.namespace() == namespace)
                .count()
        };
        for service in 0..2 * ROOM {
            ledger.add(&of("hog", service), ONE, 0, now);
        }
        for service in 0..1000 {
            ledger.add(&of("other", service), ONE, 0, now);
        }
        assert_eq!(count(&ledger, "hog"), ROOM / 5 * 4 + 1);
        assert_eq!(count(&ledger, "other"), 1000);
        // Nothing is lost.
        let rest = of("hog", 0).rest();
        let rest = ledger.iter().find(|(labels, _)| **labels == rest);
        assert_eq!(rest.unwrap().1.totals.opened, ROOM as u64 * 6 / 5);
        ledger.prune(now + QUIET);
        ledger.add(&of("hog", 1), ONE, 0, now + QUIET);
        assert_eq!(count(&ledger, "hog"), 1);
    }
}
