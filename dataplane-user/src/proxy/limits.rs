//! How many connections there may be.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// File descriptors for everything but connections.
const RESERVE: usize = 256;
/// A connection's: the client's and the endpoint's.
const EACH: usize = 2;

/// Raises the limit of open files as far as this process may, and returns it.
///
/// # Errors
/// If it cannot be read.
pub fn raise_open_files() -> io::Result<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let reached = if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        hard
    } else {
        soft
    };
    Ok(usize::try_from(reached).unwrap_or(usize::MAX))
}

/// How many connections so many open files allow.
pub fn connections(open_files: usize) -> usize {
    (open_files.saturating_sub(RESERVE) / EACH).max(1)
}

/// How many open files so many connections take.
pub fn files(connections: usize) -> usize {
    connections.saturating_mul(EACH).saturating_add(RESERVE)
}

/// Connections of all workers.
#[derive(Debug)]
pub struct Limits {
    open: AtomicUsize,
    max: usize,
    per_workload: usize,
}

impl Limits {
    /// At most `max` connections, and `per_workload` of one workload's.
    pub fn new(max: usize, per_workload: usize) -> Self {
        Self {
            open: AtomicUsize::new(0),
            max,
            per_workload,
        }
    }

    /// Whether another connection of a workload that has so many may be accepted; counts it if so.
    pub fn take(&self, workload: &AtomicUsize) -> bool {
        // Counted first, so that workers that accept at the same time do not exceed it together.
        if self.open.fetch_add(1, Ordering::Relaxed) < self.max {
            if workload.fetch_add(1, Ordering::Relaxed) < self.per_workload {
                return true;
            }
            workload.fetch_sub(1, Ordering::Relaxed);
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
        false
    }

    /// One that was counted is gone.
    pub fn give_back(&self, workload: &AtomicUsize) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        workload.fetch_sub(1, Ordering::Relaxed);
    }

    /// Connections now.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Connections at most.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Connections at most of one workload.
    pub fn per_workload(&self) -> usize {
        self.per_workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_in_all_and_for_each_workload() {
        let limits = Limits::new(3, 2);
        let (a, b) = (AtomicUsize::new(0), AtomicUsize::new(0));
        assert!(limits.take(&a) && limits.take(&a));
        assert!(!limits.take(&a), "two of one workload");
        assert!(limits.take(&b));
        assert!(!limits.take(&b), "three in all");
        limits.give_back(&a);
        assert!(limits.take(&b));
        assert_eq!((limits.open(), a.into_inner(), b.into_inner()), (3, 1, 2));
    }

    #[test]
    fn open_files_allow_half_as_many_connections() {
        assert_eq!(connections(1024), 384);
        assert_eq!(connections(10), 1);
    }
}
