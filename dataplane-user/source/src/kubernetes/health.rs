//! How old what we know is, and why it is not newer.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{Kind, WantedKinds};
use crate::clock::now;

/// How reading the API goes: written by those who read, read by whoever asks.
#[derive(Debug, Default)]
pub struct Health {
    kinds: [KindHealth; Kind::ALL.len()],
}

/// How reading one kind goes. Times are seconds since the epoch.
#[derive(Debug, Default)]
pub struct KindHealth {
    /// Whether it is read at all.
    wanted: AtomicBool,
    /// Whether the API server does not let it be read, and the rest is served without it.
    refused: AtomicBool,
    /// Whether the cluster has no such kind.
    missing: AtomicBool,
    /// When the server last said something about it, if only that there is nothing new.
    heard: AtomicU64,
    /// Whether it was ever listed to its end.
    listed: AtomicBool,
    /// Whether it is being watched.
    watching: AtomicBool,
    lists: AtomicU64,
    watches: AtomicU64,
    events: AtomicU64,
    failures: AtomicU64,
    failing: Mutex<Option<Failing>>,
}

/// Reading a kind does not work.
#[derive(Debug)]
struct Failing {
    /// Since when, in seconds since the epoch.
    since: u64,
    /// What last went wrong.
    text: String,
    /// What of that was last logged, if anything.
    told: Option<String>,
}

impl Health {
    /// That of one kind.
    pub fn of(&self, kind: Kind) -> &KindHealth {
        &self.kinds[kind as usize]
    }

    /// These kinds are read from now on.
    pub(super) fn want(&self, wanted: WantedKinds) {
        for kind in Kind::ALL.into_iter().filter(|kind| wanted.includes(*kind)) {
            self.of(kind).wanted.store(true, Ordering::Relaxed);
        }
    }

    /// Those that are read, but for those that we may not read and those that the cluster does not have.
    fn read(&self) -> impl Iterator<Item = &KindHealth> {
        self.kinds.iter().filter(|kind| {
            kind.wanted.load(Ordering::Relaxed) && !kind.is_refused() && !kind.is_missing()
        })
    }

    /// When everything that we know was last known to be so: the server sends word of each kind
    /// at least every minute or so. 0: not everything was listed yet.
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

    /// Whether every kind is being watched.
    pub fn is_watching(&self) -> bool {
        let mut kinds = self.read().peekable();
        kinds.peek().is_some() && kinds.all(|kind| kind.watching.load(Ordering::Relaxed))
    }

    /// Since when something does not work, in seconds since the epoch, and what: the oldest.
    pub fn failure(&self) -> Option<(u64, String)> {
        self.read().filter_map(KindHealth::failure).min()
    }

    /// Since when Services or EndpointSlices cannot be read, in seconds since the epoch.
    pub fn behind_since(&self) -> Option<u64> {
        let kinds = [Kind::Service, Kind::Slice].into_iter();
        kinds
            .filter_map(|kind| Some(self.of(kind).failure()?.0))
            .min()
    }
}

impl KindHealth {
    /// Times that all of it was listed to the end.
    pub fn lists(&self) -> u64 {
        self.lists.load(Ordering::Relaxed)
    }

    /// Watches that were begun.
    pub fn watches(&self) -> u64 {
        self.watches.load(Ordering::Relaxed)
    }

    /// Changes that watches told of, bookmarks not counted.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Lists and watches that did not work.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Whether the API server does not let it be read, and the rest is served without it.
    pub fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Whether the cluster has no such kind.
    pub fn is_missing(&self) -> bool {
        self.missing.load(Ordering::Relaxed)
    }

    /// The cluster has no such kind, or has it now; what was so before. That it could not be read is over.
    pub(super) fn miss(&self, missing: bool) -> bool {
        if missing {
            self.failing().take();
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

    /// The server said something.
    pub(super) fn hear(&self) {
        self.heard.store(now(), Ordering::Relaxed);
    }

    /// It was listed to its end.
    pub(super) fn list(&self) {
        self.hear();
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.listed.store(true, Ordering::Release);
    }

    /// A watch begins. If something did not work before, and that was logged: for how many seconds.
    pub(super) fn watch(&self) -> Option<u64> {
        self.hear();
        self.watches.fetch_add(1, Ordering::Relaxed);
        self.watching.store(true, Ordering::Relaxed);
        let failed = self.failing().take()?;
        let is_known = failed.told.is_some();
        is_known.then(|| now().saturating_sub(failed.since))
    }

    /// The rest is served without it, or not any more; what it was before.
    pub(super) fn refuse(&self, refused: bool) -> bool {
        self.refused.swap(refused, Ordering::Relaxed)
    }

    /// A watch has ended.
    pub(super) fn unwatch(&self) {
        self.watching.store(false, Ordering::Relaxed);
    }

    /// A watch told of a change.
    pub(super) fn event(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    /// Something did not work. `lasting`: whether that is worth a line in the log. Answers whether to write one.
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
