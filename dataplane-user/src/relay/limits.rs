//! Limits on the number of connections.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// File descriptors of the process itself: tables, links, the API, clients of the HTTP endpoints.
const CONTROL: usize = 256;
/// File descriptors of a workload: four listening sockets, for both directions and families; a copy of
/// each for the agent's successor, and another one during the handover; the network namespace three
/// times; one to spare.
const WORKLOAD: usize = 16;
/// File descriptors of a connection: the client's socket and the endpoint's.
const EACH: usize = 2;
/// A workload among others has at most this many times as many connections as are free, so one workload alone gets four
/// fifths of all, two get four ninths each, and there is room for each further one (dynamic thresholds: Choudhury and
/// Hahne, 1998).
const SHARE: usize = 4;

/// Raises the limit of open files as far as this process may, and returns it.
///
/// # Errors
/// If the limit cannot be read.
pub fn raise_open_files() -> io::Result<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let reached = if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() {
        hard
    } else {
        soft
    };
    Ok(usize::try_from(reached).unwrap_or(usize::MAX))
}

/// The number of open files that are kept from connections.
fn reserved(workloads: usize) -> usize {
    CONTROL.saturating_add(workloads.saturating_mul(WORKLOAD))
}

/// The number of connections, and its limits.
#[derive(Debug)]
pub struct Limits {
    open: AtomicUsize,
    max: AtomicUsize,
    per_workload: Option<usize>,
    /// Workloads that share the connections.
    workloads: AtomicUsize,
    /// The configured limit.
    wanted: Option<usize>,
    open_files: usize,
}

impl Limits {
    /// The number of connections that `open_files` allow beside `workloads`.
    pub fn connections(open_files: usize, workloads: usize) -> usize {
        (open_files.saturating_sub(reserved(workloads)) / EACH).max(1)
    }

    /// The number of open files that `connections` take beside one workload.
    pub fn files(connections: usize) -> usize {
        connections.saturating_mul(EACH).saturating_add(reserved(1))
    }

    /// Allows as many connections as are `wanted`, or else as `open_files` allow, and of these at most
    /// `per_workload` for one workload.
    pub fn new(wanted: Option<usize>, per_workload: Option<usize>, open_files: usize) -> Self {
        let limits = Self {
            open: AtomicUsize::new(0),
            max: AtomicUsize::new(0),
            per_workload,
            workloads: AtomicUsize::new(0),
            wanted,
            open_files,
        };
        limits.reserve(0);
        limits
    }

    /// Keeps open files for so many workloads. Existing connections go on: if there are more than the
    /// new limit, no further one is accepted until enough have ended.
    pub fn reserve(&self, workloads: usize) {
        let possible = Self::connections(self.open_files, workloads);
        let max = self.wanted.map_or(possible, |wanted| wanted.min(possible));
        self.max.store(max, Ordering::Relaxed);
        self.workloads.store(workloads, Ordering::Relaxed);
    }

    /// Says how many open files are missing for so many workloads; `None` if none are.
    pub fn shortage(&self, workloads: usize) -> Option<String> {
        let (files, reserved) = (self.open_files, reserved(workloads));
        let max = self.max();
        let wanted = self.wanted.unwrap_or(1);
        if files > reserved && max >= wanted {
            return None;
        }
        let needed = reserved.saturating_add(wanted.saturating_mul(EACH));
        Some(format!(
            "open files are short: the proxy takes {max} connections at the same time, because {workloads} \
             workloads and the agent itself take {reserved} of the {files} files that it may have open; \
             raise its limit to at least {needed} (LimitNOFILE=, `ulimit -Hn`)"
        ))
    }

    /// Counts another connection of a workload. `workload`: how many it has. Returns whether the limits
    /// allow the connection; if they do not, it is not counted.
    pub fn acquire(&self, workload: &AtomicUsize) -> bool {
        // Counted first, so that workers that accept at the same time do not exceed it together.
        let free = (self.max()).saturating_sub(self.open.fetch_add(1, Ordering::Relaxed));
        if free > 0 {
            if workload.fetch_add(1, Ordering::Relaxed) < self.share(free) {
                return true;
            }
            workload.fetch_sub(1, Ordering::Relaxed);
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
        false
    }

    /// Counts a connection no more.
    pub fn release(&self, workload: &AtomicUsize) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        workload.fetch_sub(1, Ordering::Release);
    }

    /// The number of connections now.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// The maximum number of connections.
    pub fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// The maximum number of connections of one workload while so many are free.
    fn share(&self, free: usize) -> usize {
        let own = self.per_workload();
        match self.workloads.load(Ordering::Relaxed) {
            0 | 1 => own,
            _ => own.min(free.saturating_mul(SHARE)),
        }
    }

    /// Whether a workload with this many connections gets no further one for now.
    pub fn is_reached(&self, connections: usize) -> bool {
        let free = self.max().saturating_sub(self.open());
        connections > 0 && connections >= self.share(free)
    }

    /// The maximum number of connections of one workload.
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
        assert!(limits.acquire(&a) && limits.acquire(&a));
        assert!(!limits.acquire(&a), "two of one workload");
        assert!(limits.acquire(&b));
        assert!(!limits.acquire(&b), "three in all");
        limits.release(&a);
        assert!(limits.acquire(&b));
        assert_eq!((limits.open(), a.into_inner(), b.into_inner()), (3, 1, 2));
    }

    #[test]
    fn one_workload_leaves_room_for_others() {
        let limits = Limits::new(Some(1000), None, 10_000);
        let (hog, other, third) = (
            AtomicUsize::new(0),
            AtomicUsize::new(0),
            AtomicUsize::new(0),
        );
        let fill = |workload: &AtomicUsize| while limits.acquire(workload) {};
        let now = |workload: &AtomicUsize| workload.load(Ordering::Relaxed);
        // With nobody to share with, all.
        limits.reserve(1);
        fill(&hog);
        assert_eq!(now(&hog), 1000);
        while now(&hog) > 0 {
            limits.release(&hog);
        }
        limits.reserve(3);
        fill(&hog);
        assert_eq!(now(&hog), 800);
        assert!(limits.is_reached(800) && !limits.is_reached(1));
        // Who comes later gets connections at once, and the first one's share shrinks as its connections end.
        fill(&other);
        assert_eq!(now(&other), 160);
        fill(&third);
        assert_eq!(now(&third), 32);
        while now(&hog) > 0 {
            limits.release(&hog);
            assert!(!limits.acquire(&hog) || now(&hog) < 800);
            fill(&other);
            fill(&third);
            if now(&hog) <= now(&other) {
                break;
            }
        }
        let shares = [now(&hog), now(&other), now(&third)];
        assert!(
            shares.iter().all(|share| (290..=320).contains(share)),
            "{shares:?}"
        );
    }

    #[test]
    fn open_files_allow_half_as_many_connections_beside_workloads() {
        assert_eq!(Limits::connections(1024, 0), 384);
        assert_eq!(Limits::connections(1024, 40), 64);
        assert_eq!(Limits::connections(10, 0), 1);
        // What is asked for is what is had when there is one workload.
        assert_eq!(Limits::connections(Limits::files(144), 1), 144);
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
