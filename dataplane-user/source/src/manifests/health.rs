//! The state of reading manifests.

use std::{
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::clock::now;

/// The state of reading manifests. The feed writes it, and other threads read it. Times are in seconds since the epoch.
#[derive(Debug, Default)]
pub struct Health {
    pub(crate) paths: Vec<PathBuf>,
    read: AtomicU64,
    failures: AtomicU64,
    /// Time and reason of a failed read. `None` if a later read succeeded.
    failure: Mutex<Option<(u64, String)>>,
}

impl Health {
    /// Returns the state of files and directories that were not read yet.
    pub(crate) fn of(paths: &[PathBuf]) -> Self {
        Self {
            paths: paths.to_vec(),
            ..Self::default()
        }
    }

    /// Returns the configured files and directories.
    pub fn paths(&self) -> Vec<String> {
        let text = |path: &PathBuf| path.display().to_string();
        self.paths.iter().map(text).collect()
    }

    /// Returns the time of the last read without an error. 0: never.
    pub fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Returns the number of failed reads.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns time and reason of a failed read. `None` if a later read succeeded.
    pub fn failure(&self) -> Option<(u64, String)> {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records a read, or the reason of its failure.
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
