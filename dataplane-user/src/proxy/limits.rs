//! How many connections there may be.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// File descriptors for everything but workloads and connections: tables, links, the API, whoever asks
/// the endpoints.
const CONTROL: usize = 256;
/// A workload's: four listening sockets, for both directions and families; a copy of each for the agent
/// that comes next, and another while that agent takes them; its network namespace three times; one to
/// spare.
const WORKLOAD: usize = 16;
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

/// How many connections so many open files allow, beside so many workloads.
pub fn connections(open_files: usize, workloads: usize) -> usize {
    (open_files.saturating_sub(reserved(workloads)) / EACH).max(1)
}

/// How many open files so many connections take, beside one workload.
pub fn files(connections: usize) -> usize {
    connections.saturating_mul(EACH).saturating_add(reserved(1))
}

/// Open files that connections cannot have.
fn reserved(workloads: usize) -> usize {
    CONTROL.saturating_add(workloads.saturating_mul(WORKLOAD))
}

/// Connections of all workers.
#[derive(Debug)]
pub struct Limits {
    open: AtomicUsize,
    max: AtomicUsize,
    per_workload: Option<usize>,
    /// Connections that were asked for.
    wanted: Option<usize>,
    open_files: usize,
}

impl Limits {
    /// At most so many connections as were asked for, or as so many open files allow; and
    /// `per_workload` of one workload's.
    pub fn new(wanted: Option<usize>, per_workload: Option<usize>, open_files: usize) -> Self {
        let limits = Self {
            open: AtomicUsize::new(0),
            max: AtomicUsize::new(0),
            per_workload,
            wanted,
            open_files,
        };
        limits.reserve(0);
        limits
    }

    /// Keeps open files for so many workloads. Connections that there are go on: if there are more of
    /// them than that leaves room for, no other is taken until some have ended.
    pub fn reserve(&self, workloads: usize) {
        let possible = connections(self.open_files, workloads);
        let max = self.wanted.map_or(possible, |wanted| wanted.min(possible));
        self.max.store(max, Ordering::Relaxed);
    }

    /// What so many workloads lack.
    pub fn shortage(&self, workloads: usize) -> Option<String> {
        let (files, reserved) = (self.open_files, reserved(workloads));
        let max = self.max();
        let wanted = self.wanted.unwrap_or(1);
        if files > reserved && max >= wanted {
            return None;
        }
        let needed = reserved.saturating_add(wanted.saturating_mul(EACH));
        Some(format!(
            "open files are short: the proxy takes {max} connections at the same time, since {workloads} \
             workloads and the agent itself take {reserved} of the {files} files that it may have open; \
             raise its limit to at least {needed} (LimitNOFILE=, `ulimit -Hn`)"
        ))
    }

    /// Whether another connection of a workload that has so many may be accepted; counts it if so.
    pub fn take(&self, workload: &AtomicUsize) -> bool {
        // Counted first, so that workers that accept at the same time do not exceed it together.
        if self.open.fetch_add(1, Ordering::Relaxed) < self.max() {
            if workload.fetch_add(1, Ordering::Relaxed) < self.per_workload() {
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
        workload.fetch_sub(1, Ordering::Release);
    }

    /// Connections now.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Connections at most.
    pub fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// Connections at most of one workload.
    pub fn per_workload(&self) -> usize {
        self.per_workload.unwrap_or(usize::MAX).min(self.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_in_all_and_for_each_workload() {
        let limits = Limits::new(Some(3), Some(2), 1024);
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
    fn open_files_allow_half_as_many_connections_beside_workloads() {
        assert_eq!(connections(1024, 0), 384);
        assert_eq!(connections(1024, 40), 64);
        assert_eq!(connections(10, 0), 1);
        // What is asked for is what is had when there is one workload.
        assert_eq!(connections(files(144), 1), 144);
    }

    #[test]
    fn what_workloads_need_connections_do_not_get() {
        let limits = Limits::new(None, None, 20_000);
        limits.reserve(250);
        assert_eq!((limits.max(), limits.per_workload()), (7872, 7872));
        assert_eq!(limits.shortage(250), None);
        limits.reserve(0);
        assert_eq!(limits.max(), 9872);
        // More than there are files for: said, whether connections were asked for or not.
        let short = Limits::new(None, None, 1024);
        short.reserve(64);
        assert_eq!(short.max(), 1);
        assert!(short.shortage(64).unwrap().contains("at least 1282"));
        let asked = Limits::new(Some(300), None, 1024);
        asked.reserve(1);
        assert_eq!((asked.max(), asked.shortage(1)), (300, None));
        asked.reserve(40);
        assert_eq!(asked.max(), 64);
        assert!(asked.shortage(40).unwrap().contains("at least 1496"));
    }
}
