//! The age of the known objects, and the reason if they are stale.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{Kind, WantedKinds};
use crate::clock::now;

/// The state of reading the API. The followers write it, and any thread may read it.
#[derive(Debug, Default)]
pub struct Health {
    kinds: [KindHealth; Kind::ALL.len()],
}

/// The state of reading one kind. Times are in seconds since the epoch.
#[derive(Debug, Default)]
pub struct KindHealth {
    /// Whether the kind is read at all.
    wanted: AtomicBool,
    /// Whether the API server refuses to let the kind be read, and the agent continues without it.
    refused: AtomicBool,
    /// Whether the cluster does not have the kind.
    missing: AtomicBool,
    /// Time of the last sign of life of the server for this kind, including bookmarks.
    heard: AtomicU64,
    /// Whether a list was ever complete, or the cluster lacked the kind.
    listed: AtomicBool,
    /// Whether a watch is running.
    watching: AtomicBool,
    lists: AtomicU64,
    watches: AtomicU64,
    events: AtomicU64,
    failures: AtomicU64,
    failing: Mutex<Option<Failing>>,
}

/// The present failure of reading a kind.
#[derive(Debug)]
struct Failing {
    /// Beginning, in seconds since the epoch.
    since: u64,
    /// The last failure.
    text: String,
    /// The failure that was last logged, if any.
    told: Option<String>,
}

impl Health {
    /// Returns the state of one kind.
    pub fn of(&self, kind: Kind) -> &KindHealth {
        &self.kinds[kind as usize]
    }

    /// Marks the kinds that are read from now on.
    pub(super) fn want(&self, wanted: WantedKinds) {
        for kind in Kind::ALL.into_iter().filter(|kind| wanted.includes(*kind)) {
            self.of(kind).wanted.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the kinds that are read, without those that the server refuses or that the cluster does not have.
    fn read(&self) -> impl Iterator<Item = &KindHealth> {
        self.kinds.iter().filter(|kind| {
            kind.wanted.load(Ordering::Relaxed) && !kind.is_refused() && !kind.is_missing()
        })
    }

    /// Returns the time at which all known objects were last known to be current. The server sends an event or bookmark
    /// for each kind at least every minute or so. 0: not all kinds have been listed yet.
    pub fn heard(&self) -> u64 {
        let listed = |kind: &KindHealth| {
            if kind.listed.load(Ordering::Acquire) {
                kind.heard.load(Ordering::Relaxed)
            } else {
                0
            }
        };
        self.read().map(listed).min().unwrap_or_default()
    }

    /// Returns whether every kind is being watched.
    pub fn is_watching(&self) -> bool {
        let mut kinds = self.read().peekable();
        kinds.peek().is_some() && kinds.all(KindHealth::is_watching)
    }

    /// Returns the oldest present failure: its beginning, in seconds since the epoch, and its text.
    pub fn failure(&self) -> Option<(u64, String)> {
        self.read().filter_map(KindHealth::failure).min()
    }

    /// Returns the time since which Services or EndpointSlices cannot be read, in seconds since the epoch.
    pub fn behind_since(&self) -> Option<u64> {
        let kinds = [Kind::Service, Kind::Slice].into_iter();
        kinds
            .filter_map(|kind| Some(self.of(kind).failure()?.0))
            .min()
    }
}

impl KindHealth {
    /// Returns the number of complete lists.
    pub fn lists(&self) -> u64 {
        self.lists.load(Ordering::Relaxed)
    }

    /// Returns the number of watches.
    pub fn watches(&self) -> u64 {
        self.watches.load(Ordering::Relaxed)
    }

    /// Returns the number of changes from watches, without bookmarks.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Returns the number of failed lists and watches.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns whether the API server refuses to let the kind be read, and the agent continues without it.
    pub fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns whether the cluster does not have the kind.
    pub fn is_missing(&self) -> bool {
        self.missing.load(Ordering::Relaxed)
    }

    /// Returns whether a watch is running.
    pub(super) fn is_watching(&self) -> bool {
        self.watching.load(Ordering::Relaxed)
    }

    /// Sets whether the cluster lacks the kind, and returns the former value. If it lacks the kind, clears the failure.
    pub(super) fn miss(&self, missing: bool) -> bool {
        if missing {
            self.failing().take();
            self.hear();
            self.listed.store(true, Ordering::Release);
        }
        self.missing.swap(missing, Ordering::Relaxed)
    }

    fn failure(&self) -> Option<(u64, String)> {
        let failing = self.failing();
        failing.as_ref().map(|f| (f.since, f.text.clone()))
    }

    fn failing(&self) -> MutexGuard<'_, Option<Failing>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a sign of life of the server.
    pub(super) fn hear(&self) {
        self.heard.store(now(), Ordering::Relaxed);
    }

    /// Records a complete list.
    pub(super) fn list(&self) {
        self.hear();
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.listed.store(true, Ordering::Release);
    }

    /// Records the beginning of a watch. If a logged failure ends with it, returns its duration in seconds.
    pub(super) fn watch(&self) -> Option<u64> {
        self.hear();
        self.watches.fetch_add(1, Ordering::Relaxed);
        self.watching.store(true, Ordering::Relaxed);
        let failed = self.failing().take()?;
        let is_known = failed.told.is_some();
        is_known.then(|| now().saturating_sub(failed.since))
    }

    /// Sets whether the agent continues without the kind, and returns the former value.
    pub(super) fn refuse(&self, refused: bool) -> bool {
        self.refused.swap(refused, Ordering::Relaxed)
    }

    /// Records the end of a watch.
    pub(super) fn unwatch(&self) {
        self.watching.store(false, Ordering::Relaxed);
    }

    /// Records a change from a watch.
    pub(super) fn event(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a failure. `lasting`: whether the failure deserves a line in the log. Returns whether to write one.
    pub(super) fn fail(&self, text: &str, lasting: bool) -> bool {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let mut failing = self.failing();
        let before = failing.take();
        let since = before.as_ref().map_or_else(now, |before| before.since);
        let mut told = before.and_then(|before| before.told);
        let is_news = lasting && told.as_deref() != Some(text);
        if is_news {
            told = Some(text.to_owned());
        }
        *failing = Some(Failing {
            since,
            text: text.to_owned(),
            told,
        });
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_logged_once_when_it_lasts_and_so_is_its_end() {
        let kind = KindHealth::default();
        assert!(
            !kind.fail("403", false),
            "an API server that has just started"
        );
        assert_eq!(kind.failure().unwrap().1, "403");
        assert_eq!(kind.watch(), None, "its end is none of anybody's business");
        assert!(!kind.fail("403", false));
        assert!(kind.fail("403", true));
        assert!(!kind.fail("403", true), "it was said");
        assert!(kind.fail("refused", true));
        assert!(!kind.fail("403", false));
        assert_eq!(kind.failure().unwrap().1, "403");
        assert!(!kind.fail("refused", true), "it was said");
        assert!(kind.watch().is_some());
        assert_eq!(kind.failure(), None);
        assert_eq!(kind.failures(), 7);
    }
}
