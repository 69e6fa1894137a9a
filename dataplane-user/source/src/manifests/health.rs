//! How reading manifests goes.

use std::{
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::clock::now;

/// How reading manifests goes: written by the feed, read by other threads. Times are in seconds since the epoch.
#[derive(Debug, Default)]
pub struct Health {
    pub(crate) paths: Vec<PathBuf>,
    read: AtomicU64,
    failures: AtomicU64,
    /// When they could not be read, and why; none: they were read since.
    failure: Mutex<Option<(u64, String)>>,
}

impl Health {
    /// Of files and directories that were not read yet.
    pub(crate) fn of(paths: &[PathBuf]) -> Self {
        Self {
            paths: paths.to_vec(),
            ..Self::default()
        }
    }

    /// Files and directories, as they were given.
    pub fn paths(&self) -> Vec<String> {
        let text = |path: &PathBuf| path.display().to_string();
        self.paths.iter().map(text).collect()
    }

    /// When they were last read without an error; 0: never.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// How often they could not be read.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// When they could not be read, and why; none if they were read since.
    pub fn failure(&self) -> Option<(u64, String)> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// They were read; or could not be, and why.
    pub(crate) fn set(&self, failure: Option<String>) {
        if failure.is_some() {
            self.failures.fetch_add(1, Ordering::Relaxed);
        } else {
            self.read.store(now(), Ordering::Relaxed);
        }
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) =
            failure.map(|text| (now(), text));
    }
}
