//! The ledger: what connections have come to, by the labels that metrics show.
//!
//! All pods with the same labels are one series, which keeps the counts of pods that have gone. The
//! ledger removes a series some time after the last pod with its labels has gone. So the number of
//! series depends on what runs now, and not on what has run before.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{
    counters::Totals,
    labels::{Labels, Party},
};

/// How long a series stays after its workload or its peer has gone: several scrapes.
const QUIET: Duration = Duration::from_mins(10);
/// The maximum number of such series. The ledger removes those first that changed longest ago.
const GONE: usize = 1000;
/// The minimum time between two searches for series to remove.
const EVERY: Duration = Duration::from_secs(10);

/// Totals since the proxy, or the agent, started.
#[derive(Debug, Default)]
pub struct Ledger {
    series: BTreeMap<Labels, Series>,
    pruned: Option<Instant>,
}

/// The totals of connections with the same labels.
#[derive(Clone, Copy, Debug)]
pub struct Series {
    /// Connections and bytes.
    pub totals: Totals,
    /// How long closed connections were open. Only direct connections are measured.
    pub nanoseconds: u64,
    changed: Instant,
}

impl Ledger {
    /// Adds to a series.
    pub fn add(&mut self, labels: &Labels, totals: Totals, nanoseconds: u64, now: Instant) {
        if totals == Totals::default() {
            return;
        }
        let Some(series) = self.series.get_mut(labels) else {
            let series = Series {
                totals,
                nanoseconds,
                changed: now,
            };
            self.series.insert(labels.alone(), series);
            return;
        };
        series.totals += totals;
        series.nanoseconds += nanoseconds;
        series.changed = now;
    }

    /// All series.
    pub fn iter(&self) -> impl Iterator<Item = (&Labels, &Series)> {
        self.series.iter()
    }

    /// Whether it is time for [`Ledger::prune`].
    pub fn is_due(&self, now: Instant) -> bool {
        self.pruned.is_none_or(|at| now - at >= EVERY)
    }

    /// Removes series whose workload or peer has gone. `is_there`: whether a workload with these labels
    /// is known.
    pub fn prune(&mut self, is_there: impl Fn(&Party) -> bool, now: Instant) {
        self.pruned = Some(now);
        let has_gone = |labels: &Labels| {
            let sides = [&labels.workload, &labels.key.peer];
            sides
                .iter()
                .any(|party| !party.is_nobody() && !is_there(party))
        };
        self.series
            .retain(|labels, series| now - series.changed < QUIET || !has_gone(labels));
        let gone = self.series.iter().filter(|(labels, _)| has_gone(labels));
        let mut gone: Vec<(Instant, Labels)> = gone
            .map(|(labels, series)| (series.changed, labels.clone()))
            .collect();
        let excess = gone.len().saturating_sub(GONE);
        gone.sort_unstable_by_key(|(changed, _)| *changed);
        for (_, labels) in &gone[..excess] {
            self.series.remove(labels);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        model::{Place, Telemetry, Workload, WorkloadName},
        relay::{CountersKey, Direction, Flag},
    };

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
    fn pods_with_the_same_labels_are_one_series_for_as_long_as_one_is_there() {
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
        let web = party("web-9", "web");
        let (nearly, later) = (now + Duration::from_secs(QUIET.as_secs() - 1), now + QUIET);
        ledger.prune(|party| *party == web || *party == unknown, later);
        assert_eq!(ledger.iter().count(), 2);
        ledger.prune(|_| false, nearly);
        assert_eq!(ledger.iter().count(), 2, "it may not have been scraped");
        ledger.prune(|_| false, later);
        assert_eq!(ledger.iter().count(), 0);
    }

    #[test]
    fn of_those_that_have_gone_only_so_many_are_kept() {
        let mut ledger = Ledger::default();
        let start = Instant::now();
        let web = party("web", "web");
        ledger.add(&labels(web.clone(), Party::nobody()), ONE, 0, start);
        for number in 0..3 * GONE {
            let job = party("job", &format!("job-{number}"));
            let now = start + Duration::from_millis(number as u64);
            ledger.add(&labels(web.clone(), job), ONE, 0, now);
        }
        let now = start + Duration::from_secs(10);
        ledger.prune(|party| *party == web, now);
        assert_eq!(ledger.iter().count(), GONE + 1);
        let last = party("other", &format!("job-{}", 3 * GONE - 1));
        assert!(ledger.iter().any(|(labels, _)| labels.key.peer == last));
    }
}
