//! The connections that Istio's policies refused, counted by policy.
//!
//! A series expires some time after its last refusal. If there are very many series, a policy that would need a new series
//! is counted in a common series, so that its namespace leaves room for the series of others.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use model::{WorkloadName, authorization::Reason};

/// How long a series stays after its last refusal.
const QUIET: Duration = Duration::from_mins(15);
/// The maximum number of series, besides the common ones.
const ROOM: usize = 1000;
/// The policies of a namespace have at most this many times as many series as are free.
const SHARE: usize = 4;

/// What a refusal is counted by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Denial {
    /// The namespace of the policy. If no single policy decides, that of the workload; empty in the common series.
    pub namespace: Arc<str>,
    /// The policy's kind and name, such as `AuthorizationPolicy web`; `no ALLOW matches`; or `others`.
    pub policy: Arc<str>,
    /// Whether the policy is only tried, so that the connection was not refused because of it.
    pub dry_run: bool,
}

/// The refusals by policy.
#[derive(Debug, Default)]
pub struct Denials(Mutex<BTreeMap<Denial, (u64, Instant)>>);

impl Denials {
    /// Counts a refusal, and logs the first one of each policy. Policies that are not read are no policy's refusal.
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
        if self.add(denial, Instant::now()) {
            let text = if dry_run { "would be" } else { "is" };
            tracing::info!("a connection to {workload} {text} {reason}; further ones are counted");
        }
    }

    /// Adds a refusal. Returns whether it is the first one of its series.
    fn add(&self, denial: Denial, now: Instant) -> bool {
        let mut series = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((count, last)) = series.get_mut(&denial)
            && now - *last < QUIET
        {
            (*count, *last) = (*count + 1, now);
            return false;
        }
        series.retain(|_, (_, last)| now - *last < QUIET);
        let of_namespace = series.keys().filter(|of| of.namespace == denial.namespace);
        let free = ROOM.saturating_sub(series.len());
        let has_room = of_namespace.count() < free.saturating_mul(SHARE);
        let denial = if has_room {
            denial
        } else {
            Denial {
                namespace: "".into(),
                policy: "others".into(),
                ..denial
            }
        };
        let (count, last) = series.entry(denial).or_insert((0, now));
        (*count, *last) = (*count + 1, now);
        has_room
    }

    /// Returns the refusals of each series.
    pub fn totals(&self) -> Vec<(Denial, u64)> {
        let mut series = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        series.retain(|_, (_, last)| now - *last < QUIET);
        let all = series.iter();
        all.map(|(denial, (count, _))| (denial.clone(), *count))
            .collect()
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
            denials.add(denial("hog", number), now);
        }
        assert!((0..20).all(|number| denials.add(denial("other", number), now)));
        assert!(!denials.add(denial("other", 0), now), "it is known");
        let totals = denials.totals();
        assert!(totals.len() <= ROOM + 1, "{}", totals.len());
        // Nothing is lost.
        assert_eq!(totals.iter().map(|(_, count)| count).sum::<u64>(), 2021);
        let rest = totals.iter().find(|(of, _)| &*of.policy == "others");
        assert!(rest.is_some_and(|(of, count)| of.namespace.is_empty() && *count > 1000));
        assert!(denials.add(denial("hog", 0), now + QUIET));
        assert_eq!(denials.totals().len(), 1, "the others have expired");
    }
}
