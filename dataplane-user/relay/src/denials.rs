//! The connections that Istio's policies refused, counted by policy.
//!
//! A series expires some time after its last refusal. If a namespace has very many series, refusals by its further policies
//! are counted in a common series, so that other namespaces keep room for their series.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use model::{
    WorkloadName,
    authorization::{PolicyName, Reason},
};

/// Time for which a series stays after its last refusal.
const QUIET: Duration = Duration::from_mins(15);
/// The minimum time between two searches for expired series. A full namespace has a refusal for the common series at each
/// connection, and a search looks at all series.
const SWEEP: Duration = Duration::from_secs(1);
/// The maximum number of series, besides the common ones.
const ROOM: usize = 1000;
/// The maximum number of a namespace's series, in multiples of the number of free series.
const SHARE: usize = 4;

/// The labels by which a refusal is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Denial {
    /// The namespace of the policy, or of the workload if no single policy decides. Empty in the common series.
    pub namespace: Arc<str>,
    /// The policy's kind and name, such as `AuthorizationPolicy web`; `no ALLOW matches`; or `others`.
    pub policy: Arc<str>,
    /// Whether the policy is a dry run, which does not refuse the connection.
    pub dry_run: bool,
}

/// The refusals by policy.
#[derive(Debug, Default)]
pub struct Denials(Mutex<Series>);

#[derive(Debug, Default)]
struct Series {
    /// The number of refusals of each series, and the time of the last one.
    refusals: BTreeMap<Denial, (u64, Instant)>,
    /// The number of series of each namespace.
    in_namespace: BTreeMap<Arc<str>, usize>,
    /// The time at which expired series were last removed.
    swept: Option<Instant>,
}

impl Series {
    /// Removes expired series.
    fn sweep(&mut self, now: Instant) {
        self.refusals.retain(|_, (_, last)| now - *last < QUIET);
        self.in_namespace.clear();
        for denial in self.refusals.keys() {
            let namespace = Arc::clone(&denial.namespace);
            *self.in_namespace.entry(namespace).or_default() += 1;
        }
        self.swept = Some(now);
    }

    fn has_room(&self, namespace: &str) -> bool {
        let of_namespace = self.in_namespace.get(namespace).copied().unwrap_or(0);
        let free = ROOM.saturating_sub(self.refusals.len());
        of_namespace < free.saturating_mul(SHARE)
    }
}

impl Denials {
    /// Counts a refusal, and logs the first refusal of each policy. A refusal because policies have not been read is not
    /// counted.
    pub(crate) fn count(&self, workload: &WorkloadName, reason: Reason<'_>, dry_run: bool) {
        let denial = match (reason.by().0, reason) {
            (Some(name), _) => Denial {
                namespace: Arc::clone(&name.namespace),
                policy: Arc::clone(&name.object),
                dry_run,
            },
            (None, Reason::NotAllowed) => Denial {
                namespace: workload.namespace().into(),
                policy: "no ALLOW matches".into(),
                dry_run,
            },
            (None, _) => return,
        };
        if self.add(denial, 1, Instant::now()) {
            let text = if dry_run { "would be" } else { "is" };
            tracing::info!(
                "a connection to {workload} {text} {reason}; dataplane_policy_denied_total counts further refusals"
            );
        }
    }

    /// Counts refusals in the kernel, and logs the first refusal of each policy. `by`: the policy. `None`: no policy with ALLOW
    /// matches.
    pub fn count_in_kernel(&self, workload: &WorkloadName, by: Option<&PolicyName>, count: u64) {
        let nobody = || (workload.namespace().into(), "no ALLOW matches".into());
        let (namespace, policy) = by.map_or_else(nobody, |name| {
            (Arc::clone(&name.namespace), Arc::clone(&name.object))
        });
        let denial = Denial {
            namespace,
            policy,
            dry_run: false,
        };
        if self.add(denial, count, Instant::now()) {
            let reason = by.map_or_else(
                || "no policy with ALLOW matches".to_owned(),
                |name| format!("by {name}"),
            );
            tracing::info!(
                "a connection to {workload} is denied in the kernel: {reason}; dataplane_policy_denied_total counts further refusals"
            );
        }
    }

    /// Adds refusals. Returns whether they are the first ones of their series.
    fn add(&self, denial: Denial, refusals: u64, now: Instant) -> bool {
        let series = &mut *self.lock();
        match series.refusals.get_mut(&denial) {
            Some((count, last)) if now - *last < QUIET => {
                (*count, *last) = (*count + refusals, now);
                return false;
            }
            Some(_) => series.sweep(now),
            None if series.swept.is_none_or(|at| now - at >= SWEEP) => series.sweep(now),
            None => {}
        }
        let has_room = series.has_room(&denial.namespace);
        let denial = if has_room {
            denial
        } else {
            Denial {
                namespace: "".into(),
                policy: "others".into(),
                ..denial
            }
        };
        let in_namespace = &mut series.in_namespace;
        let (count, last) = series.refusals.entry(denial).or_insert_with_key(|denial| {
            *in_namespace
                .entry(Arc::clone(&denial.namespace))
                .or_default() += 1;
            (0, now)
        });
        (*count, *last) = (*count + refusals, now);
        has_room
    }

    /// Returns the refusals of each series.
    pub fn totals(&self) -> Vec<(Denial, u64)> {
        let mut series = self.lock();
        series.sweep(Instant::now());
        let all = series.refusals.iter();
        all.map(|(denial, (count, _))| (denial.clone(), *count))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Series> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denial(namespace: &str, number: usize) -> Denial {
        Denial {
            namespace: namespace.into(),
            policy: format!("AuthorizationPolicy p{number}").into(),
            dry_run: false,
        }
    }

    #[test]
    fn a_namespace_with_very_many_policies_leaves_others_their_series() {
        let (denials, now) = (Denials::default(), Instant::now());
        for number in 0..2 * ROOM {
            denials.add(denial("hog", number), 1, now);
        }
        assert!((0..20).all(|number| denials.add(denial("other", number), 1, now)));
        assert!(!denials.add(denial("other", 0), 1, now), "it is known");
        let totals = denials.totals();
        assert!(totals.len() <= ROOM + 1, "{}", totals.len());
        // Nothing is lost.
        assert_eq!(totals.iter().map(|(_, count)| count).sum::<u64>(), 2021);
        let rest = totals.iter().find(|(of, _)| &*of.policy == "others");
        assert!(rest.is_some_and(|(of, count)| of.namespace.is_empty() && *count > 1000));
        assert!(denials.add(denial("hog", 0), 1, now + QUIET));
        assert_eq!(denials.totals().len(), 1, "the others have expired");
    }
}
