//! The parts that every relayed connection has, with any engine: the decision where it goes, its counters, and its line
//! in the access log.
//!
//! This room is below the rooms that carry connections: it reads [`model`], and opens no
//! listening socket. A room that carries connections has an [`Engine`], which takes the listening
//! sockets and relays the connections that arrive there. Engines share one [`Relay`], since they share
//! the process's open files.

#![forbid(unsafe_code)]

mod access;
mod arrival;
mod attachment;
mod baggage;
mod counters;
mod denials;
mod direction;
mod engine;
mod index;
mod labels;
mod ledger;
mod limits;
mod metrics;
mod namespace;
mod outcome;
mod permit;
mod proven;
mod route;
mod session;
pub mod socket;
mod via;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

pub use access::{AccessLog, Log, Record};
pub use arrival::Neighbour;
pub use attachment::{AttachError, Attached, Attachment, Bounded, Exceeded, Listener, Namespace};
pub use baggage::Baggage;
pub use counters::{Counters, Totals};
pub use denials::{Denial, Denials};
pub use direction::Direction;
pub use engine::{Engine, Handed, TunnelView, Tunnelling};
pub use index::{Denied, Found, Index, Target, Way};
pub use labels::{CountersKey, Labels, Party, Principals, Shown};
pub use ledger::Ledger;
use limits::Holders;
pub use limits::{Client, DnsFiles, Limits, raise_open_files};
pub use metrics::{Connections, encode_connections};
use model::{Snapshot, WorkloadName};
pub use namespace::{Stock, local_addresses};
pub use outcome::Flag;
pub use permit::Permit;
pub use session::{Refusal, Session};

/// The state that relayed connections share: the snapshot that routes them, the attached workloads,
/// limits, counters and the access log.
#[derive(Debug)]
pub struct Relay {
    /// The limits on the number of connections.
    pub limits: Arc<Limits>,
    /// The access log.
    pub log: Arc<Log>,
    index: Mutex<Arc<Index>>,
    /// Counts the snapshots, so that an engine sees without a lock that there is no new one.
    version: AtomicU64,
    /// The number of changes of attached workloads' policies.
    policies: AtomicU64,
    attachments: Mutex<Vec<Entry>>,
    next_id: AtomicU64,
    /// The totals of present and past attachments.
    ledger: Mutex<Ledger>,
}

/// An attachment, and its listening sockets until it is removed.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The attachment.
    pub attached: Arc<Attached>,
    /// Its listening sockets; `None` once it was removed.
    pub listeners: Option<Arc<[Listener]>>,
}

impl Entry {
    /// Whether connections of this attachment are accepted, or are left.
    pub fn is_in_use(&self) -> bool {
        self.listeners.is_some() || self.attached.connections() > 0
    }

    fn is_served(&self, workload: &WorkloadName) -> bool {
        self.listeners.is_some() && self.attached.workload.name == *workload
    }
}

impl Relay {
    /// A relay without a snapshot and without workloads.
    pub fn new(limits: Limits, log: Log) -> Self {
        Self {
            limits: Arc::new(limits),
            log: Arc::new(log),
            index: Mutex::default(),
            version: AtomicU64::new(0),
            policies: AtomicU64::new(0),
            attachments: Mutex::default(),
            next_id: AtomicU64::new(0),
            ledger: Mutex::default(),
        }
    }

    /// Routes new connections by this snapshot. Existing connections stay with their endpoints. Engines end connections that
    /// policies forbid. Returns whether the policies of an attached workload have changed.
    pub fn set_snapshot(&self, snapshot: Snapshot) -> bool {
        drop(self.collect());
        self.log.set_cluster(&snapshot.cluster);
        let mut current = self.lock_index();
        let new = Arc::new(current.updated(snapshot));
        let before = std::mem::replace(&mut *current, Arc::clone(&new));
        self.version.fetch_add(1, Ordering::Release);
        drop(current);
        // After the new version: an engine begins the connections of later attachments by the new index.
        let entries = self.entries();
        new.keep_policies(&entries.iter().map(|entry| entry.attached.id).collect());
        let mut attached = entries.iter().filter(|entry| entry.is_in_use());
        let has_changed = attached.any(|entry| new.judges_anew(&before, entry.attached.own()));
        if has_changed {
            self.policies.fetch_add(1, Ordering::Release);
        }
        has_changed
    }

    /// Returns the number of changes of attached workloads' policies. When an engine sees a new number, it ends the connections
    /// that [`Index::forbids`] by an index that it gets afterwards.
    pub fn policies_version(&self) -> u64 {
        self.policies.load(Ordering::Acquire)
    }

    /// The number of the current snapshot; 0: there is none yet.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The index of the current snapshot, and the snapshot's number.
    pub fn index(&self) -> (u64, Arc<Index>) {
        let index = self.lock_index();
        (self.version(), Arc::clone(&index))
    }

    /// Makes an engine accept the connections of a workload.
    ///
    /// # Errors
    /// If the workload is attached already, or a socket cannot be used.
    pub fn add(&self, attachment: Attachment, engine: &impl Engine) -> Result<(), AttachError> {
        let workload = attachment.workload.name.clone();
        let failed = |cause| AttachError::Listener {
            workload: workload.clone(),
            cause,
        };
        let plain = attachment.outbound.iter().chain(&attachment.inbound);
        for listener in plain.chain(&attachment.tunnels) {
            socket::prepare(listener).map_err(failed)?;
        }
        // In another namespace the workload's own addresses are enough.
        let here = match attachment.namespace {
            None => local_addresses().unwrap_or_default(),
            Some(_) => Box::default(),
        };
        let mut attachments = self.lock_attachments();
        if attachments.iter().any(|entry| entry.is_served(&workload)) {
            return Err(AttachError::Attached(workload));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // Also of those that are no longer served: their connections are the namespace's.
        let beside = attachments.iter().find(|entry| {
            let known = &entry.attached.workload.name;
            known.namespace() == workload.namespace()
        });
        let holders = beside.map_or_else(Holders::default, |entry| entry.attached.holders.beside());
        let both = !attachment.outbound.is_empty() && !attachment.inbound.is_empty();
        let holders = holders.of_both(both);
        let shared = (Arc::clone(&self.limits), holders, Arc::clone(&self.log));
        let (attached, listeners) = Attached::new(id, attachment, here, shared).map_err(failed)?;
        attachments.push(Entry {
            attached: Arc::clone(&attached),
            listeners: Some(Arc::clone(&listeners)),
        });
        self.reserve(&attachments);
        drop(attachments);
        engine.take(&attached, &listeners);
        Ok(())
    }

    /// Makes the engine stop accepting connections of a workload, and reset its remaining connections at the deadline.
    /// Returns at once. Has no effect if the workload is not attached.
    pub fn remove(&self, workload: &WorkloadName, deadline: Duration, engine: &impl Engine) {
        let mut attachments = self.lock_attachments();
        let found = attachments
            .iter_mut()
            .find(|entry| entry.is_served(workload));
        if let Some(entry) = found {
            entry.listeners = None;
            let attached = Arc::clone(&entry.attached);
            drop(attachments);
            engine.shut(&attached, Instant::now() + deadline);
        }
    }

    /// Makes the engine stop accepting connections, waits until all have ended, and makes it reset the remaining ones
    /// at the deadline.
    pub fn drain(&self, deadline: Duration, engine: &mut impl Engine) {
        for entry in self.lock_attachments().iter_mut() {
            entry.listeners = None;
        }
        engine.drain(Instant::now() + deadline);
    }

    /// Whether connections are left of an attachment of this workload that was removed.
    pub fn drains(&self, workload: &WorkloadName) -> bool {
        self.lock_attachments().iter().any(|entry| {
            entry.listeners.is_none()
                && entry.attached.workload.name == *workload
                && entry.attached.connections() > 0
        })
    }

    /// Forgets attachments that are not in use any more, which hold their network namespaces. Describes the resources
    /// that are missing for as many connections as the settings ask for; `None` if none are.
    pub fn shortage(&self) -> Option<String> {
        drop(self.collect());
        let workloads = self.lock_attachments().len();
        self.limits.shortage(workloads)
    }

    /// Workloads that get no further connection for now, each with the number that it has.
    pub fn at_limit(&self) -> Vec<(WorkloadName, usize)> {
        let attachments = self.lock_attachments();
        let served = attachments.iter().filter(|entry| entry.listeners.is_some());
        served
            .map(|entry| &entry.attached)
            .filter(|attached| self.limits.is_reached(&attached.holders))
            .map(|attached| (attached.workload.name.clone(), attached.connections()))
            .collect()
    }

    /// Workloads some of whose connections were ended lately because their readers had stalled, each with the number of
    /// these connections.
    pub fn stalled(&self) -> Vec<(WorkloadName, u64)> {
        let attachments = self.lock_attachments();
        let stalled = attachments.iter().filter_map(|entry| {
            let (count, lately) = entry.attached.stalled();
            lately.then(|| (entry.attached.workload.name.clone(), count))
        });
        stalled.collect()
    }

    /// Workloads to which tunnels were refused or had to wait lately, each with the numbers and the last reason.
    pub fn bounded(&self) -> Vec<(WorkloadName, Bounded, Exceeded)> {
        let attachments = self.lock_attachments();
        let bounded = attachments.iter().filter_map(|entry| {
            let bounded = entry.attached.bounded();
            let why = bounded.lately()?;
            Some((entry.attached.workload.name.clone(), bounded, why))
        });
        bounded.collect()
    }

    /// Returns whether the relay accepts inbound connections of a workload, and so enforces its policies.
    pub fn takes_inbound(&self, workload: &WorkloadName) -> bool {
        let attachments = self.lock_attachments();
        let mut served = attachments.iter().filter(|entry| entry.is_served(workload));
        served.any(|entry| {
            let mut listeners = entry.listeners.iter().flat_map(|all| all.iter());
            listeners.any(|of| of.direction == Direction::Inbound)
        })
    }

    /// All attachments, including those that were removed and are not forgotten yet.
    pub fn entries(&self) -> Vec<Entry> {
        self.lock_attachments().clone()
    }

    /// Returns the totals of connections.
    pub fn connections(&self) -> Connections {
        let ledger = self.collect();
        let all = ledger.iter();
        all.map(|(labels, series)| (labels.clone(), series.totals))
            .collect()
    }

    fn reserve(&self, attachments: &[Entry]) {
        let names = attachments
            .iter()
            .map(|entry| &entry.attached.workload.name);
        let namespaces: HashSet<_> = names.map(WorkloadName::namespace).collect();
        self.limits.reserve(attachments.len(), namespaces.len());
    }

    fn lock_index(&self) -> MutexGuard<'_, Arc<Index>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_attachments(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.attachments
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings the ledger up to date, and forgets attachments that are not in use any more, and from time to time expired series.
    fn collect(&self) -> MutexGuard<'_, Ledger> {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let mut gone = HashSet::new();
        // Without the lock of the attachments: their counters are many, and workers wait for this lock.
        for entry in self.entries() {
            // Before its counters are read: an attachment that is not in use counts nothing more.
            if !entry.is_in_use() {
                gone.insert(entry.attached.id);
            }
            entry.attached.collect(&mut ledger, now);
        }
        let mut attachments = self.lock_attachments();
        attachments.retain(|entry| !gone.contains(&entry.attached.id));
        self.reserve(&attachments);
        drop(attachments);
        if ledger.is_due(now) {
            ledger.prune(now);
        }
        ledger
    }
}
