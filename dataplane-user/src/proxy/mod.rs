//! The L4 proxy: takes connections whose original destination the capture kept, decides where they
//! go by the [`Snapshot`], and relays them.
//!
//! It opens no listening socket itself: whoever attaches a workload gives it some
//! ([`Attachment`]), which may be in any network namespace.
//!
//! A connection is accepted before it is connected further, so that the client's `connect()` always
//! succeeds; a refusal is a reset right after it. Where that matters, the decision belongs to the
//! kernel, at connect time.

mod access;
pub mod admin;
mod attachment;
mod buffers;
mod connection;
mod dump;
pub mod handover;
mod index;
mod ledger;
mod limits;
mod metrics;
mod namespace;
mod outcome;
mod pump;
mod route;
mod socket;
mod table;
#[cfg(test)]
mod tests;
mod worker;

pub use access::AccessLog;
pub use attachment::{Acceleration, Attachment, Direction};
pub use dump::Dump;
pub use index::{Found, Index, Target};
pub use ledger::Ledger;
pub use limits::raise_open_files;
pub use metrics::{Connections, CountersKey, Labels, Party, Totals, encode_connections};
pub use outcome::Flag;

use std::{
    collections::HashSet,
    fmt,
    io::{self, Write},
    net::IpAddr,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use prometheus_client::{encoding::DescriptorEncoder, registry::Registry};
use rustix::event::{EventfdFlags, eventfd};

use self::{
    access::Log,
    attachment::{Attached, Listener},
    limits::Limits,
    worker::{Command, Worker},
};
use crate::model::{Snapshot, WorkloadName};

/// How the proxy works.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Threads that relay; 0: one for each CPU.
    pub workers: usize,
    /// A mark on every socket that connects further (`SO_MARK`), by which the capture knows its own
    /// connections and leaves them alone. Takes `CAP_NET_ADMIN`.
    pub mark: Option<u32>,
    /// The mark of those that connect from a client's address, by which answers find their way back;
    /// `None`: the same.
    pub transparent_mark: Option<u32>,
    /// Whether inbound connections are made from the client's address (`IP_TRANSPARENT`). Takes
    /// `CAP_NET_ADMIN`, and routes by which the answers come back.
    pub transparent: bool,
    /// Endpoints of a service that are tried before the client is refused.
    pub attempts: usize,
    /// How long each of them has to answer.
    pub connect_timeout: Duration,
    /// After how long without a byte a connection is reset; `None`: never.
    pub idle_timeout: Option<Duration>,
    /// After how long without a byte the kernel asks whether the peer is still there.
    pub keepalive: Option<Duration>,
    /// Connections at the same time; `None`: as many as the limit of open files allows.
    pub max_connections: Option<usize>,
    /// Connections of one workload at the same time; `None`: no limit of its own.
    pub max_per_workload: Option<usize>,
    /// The access log.
    pub access_log: AccessLog,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            workers: 0,
            mark: None,
            transparent_mark: None,
            transparent: false,
            attempts: 3,
            connect_timeout: Duration::from_secs(5),
            idle_timeout: None,
            keepalive: Some(Duration::from_mins(3)),
            max_connections: None,
            max_per_workload: None,
            access_log: AccessLog::Text,
        }
    }
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A worker cannot be started.
    #[error("cannot start the proxy's workers: {0}")]
    Start(io::Error),
    /// A limit cannot be had.
    #[error(
        "{wanted} connections take {needed} open files, and this process may have {allowed}: raise its limit (`ulimit -Hn`, LimitNOFILE=), or ask for fewer"
    )]
    Files {
        /// Connections that were asked for.
        wanted: usize,
        /// Files that they take.
        needed: usize,
        /// Files that there may be.
        allowed: usize,
    },
    /// The workload is attached already.
    #[error("{0} is attached to the proxy already")]
    Attached(WorkloadName),
    /// A listening socket cannot be used.
    #[error("a listening socket of {workload} cannot be used: {cause}")]
    Listener {
        /// Whose.
        workload: WorkloadName,
        /// Why.
        cause: io::Error,
    },
}

/// The proxy. Dropped, it cuts all connections; [`Proxy::drain`] is gentler.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    writer: Option<JoinHandle<()>>,
    next_id: AtomicU64,
}

impl Proxy {
    /// Starts the workers, with nothing to do. The access log goes to standard output.
    ///
    /// # Errors
    /// If they cannot be started, or more connections are asked for than there can be.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        Self::start_logging_to(settings, io::stdout())
    }

    /// Likewise, with the access log elsewhere.
    ///
    /// # Errors
    /// As for [`Proxy::start`].
    pub fn start_logging_to(
        settings: Settings,
        log: impl Write + Send + 'static,
    ) -> Result<Self, Error> {
        let files = raise_open_files().map_err(Error::Start)?;
        if let Some(wanted) = settings.max_connections
            && wanted > limits::connections(files, 1)
        {
            return Err(Error::Files {
                wanted,
                needed: limits::files(wanted),
                allowed: files,
            });
        }
        let count = match settings.workers {
            0 => thread::available_parallelism().map_or(1, Into::into),
            count => count,
        };
        let (log, writer) = Log::start(settings.access_log, log).map_err(Error::Start)?;
        let (mut mailboxes, mut receivers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
            let wake = eventfd(0, flags).map_err(|error| Error::Start(error.into()))?;
            let (sender, receiver) = mpsc::channel();
            mailboxes.push(Mailbox { sender, wake });
            receivers.push(receiver);
        }
        let shared = Arc::new(Shared {
            limits: Limits::new(settings.max_connections, settings.max_per_workload, files),
            log,
            index: Mutex::default(),
            version: AtomicU64::new(0),
            loads: (0..count).map(|_| Load::default()).collect(),
            mailboxes: mailboxes.into(),
            attachments: Mutex::default(),
            ledger: Mutex::default(),
            complained: AtomicBool::new(false),
            settings,
        });
        let workers = receivers.into_iter().enumerate().map(|(number, receiver)| {
            let wake = &shared.mailboxes[number].wake;
            let worker = Worker::new(number, Arc::clone(&shared), receiver, wake)?;
            thread::Builder::new()
                .name(format!("relay-{number}"))
                .spawn(move || worker.run())
        });
        let workers = workers.collect::<io::Result<_>>().map_err(Error::Start)?;
        Ok(Self {
            shared,
            workers,
            writer,
            next_id: AtomicU64::new(0),
        })
    }

    /// What to decide by from now on. Connections that exist stay where they are.
    pub fn set_snapshot(&self, snapshot: Snapshot) {
        self.shared.forget(&snapshot);
        let mut current = self.shared.lock_index();
        *current = Arc::new(current.updated(snapshot));
        self.shared.version.fetch_add(1, Ordering::Release);
    }

    /// Accepts connections of a workload.
    ///
    /// # Errors
    /// If it is attached already, or a socket cannot be used.
    pub fn add(&self, attachment: Attachment) -> Result<(), Error> {
        let workload = attachment.workload.name.clone();
        let failed = |cause| Error::Listener {
            workload: workload.clone(),
            cause,
        };
        for listener in attachment.outbound.iter().chain(&attachment.inbound) {
            socket::prepare(listener).map_err(failed)?;
        }
        // In other namespaces than this one, the workload's own addresses tell.
        let here = match attachment.namespace {
            None => local_addresses(),
            Some(_) => Box::default(),
        };
        let mut attachments = self.shared.lock_attachments();
        if attachments
            .iter()
            .any(|a| a.listeners.is_some() && a.attached.workload.name == workload)
        {
            return Err(Error::Attached(workload));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (attached, listeners) = Attached::new(id, attachment, here).map_err(failed)?;
        attachments.push(Entry {
            attached: Arc::clone(&attached),
            listeners: Some(Arc::clone(&listeners)),
        });
        self.shared.limits.reserve(attachments.len());
        drop(attachments);
        self.shared
            .tell_all(|| Command::Open(Arc::clone(&attached), Arc::clone(&listeners)));
        Ok(())
    }

    /// Accepts no more connections of a workload, and cuts those that are left when the time is up.
    /// Returns at once; a workload that is not attached is none.
    pub fn remove(&self, workload: &WorkloadName, deadline: Duration) {
        let mut attachments = self.shared.lock_attachments();
        let found = attachments
            .iter_mut()
            .find(|entry| entry.listeners.is_some() && entry.attached.workload.name == *workload);
        if let Some(entry) = found {
            entry.listeners = None;
            let (id, at) = (entry.attached.id, Instant::now() + deadline);
            drop(attachments);
            self.shared.tell_all(|| Command::Shut(id, at));
        }
    }

    /// Accepts no more connections, waits until those that there are have ended, and cuts the ones
    /// that are left when the time is up.
    pub fn drain(mut self, deadline: Duration) {
        self.stop(deadline);
    }

    /// Whether it has connections of a workload by an attachment that was removed.
    pub fn drains(&self, workload: &WorkloadName) -> bool {
        self.shared.lock_attachments().iter().any(|entry| {
            entry.listeners.is_none()
                && entry.attached.workload.name == *workload
                && entry.attached.open() > 0
        })
    }

    /// What is missing for as many connections as were asked for.
    pub fn shortage(&self) -> Option<String> {
        let workloads = self.shared.lock_attachments().len();
        self.shared.limits.shortage(workloads)
    }

    /// For those who only look.
    pub fn observer(&self) -> Observer {
        Observer(Arc::clone(&self.shared))
    }

    /// Connections that it has now.
    pub fn connections(&self) -> usize {
        self.shared.limits.open()
    }

    fn stop(&mut self, deadline: Duration) {
        for entry in self.shared.lock_attachments().iter_mut() {
            entry.listeners = None;
        }
        let at = Instant::now() + deadline;
        self.shared.tell_all(|| Command::Drain(at));
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                tracing::error!("a worker of the proxy panicked");
            }
        }
        self.shared.log.close();
        if let Some(writer) = self.writer.take() {
            // Its panic has been told on standard error.
            let _ = writer.join();
        }
    }
}

/// Looks at a proxy.
#[derive(Clone, Debug)]
pub struct Observer(Arc<Shared>);

impl Observer {
    /// Adds what the proxy counts to a registry.
    pub fn register(&self, registry: &mut Registry) {
        metrics::register(registry, &self.0);
    }

    /// What its connections have come to.
    pub fn connections(&self) -> Connections {
        metrics::connections(&self.0)
    }

    /// Writes what else it counts.
    ///
    /// # Errors
    /// The encoder's.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        metrics::encode_proxy(&self.0, encoder)
    }

    /// What it knows and does now.
    pub fn dump(&self) -> Dump {
        Dump::of(&self.0)
    }

    /// Whether it has a snapshot, and somebody's connections to accept.
    pub fn is_ready(&self) -> bool {
        let attachments = self.0.lock_attachments();
        self.0.version.load(Ordering::Acquire) > 0
            && attachments.iter().any(|entry| entry.listeners.is_some())
    }

    /// Connections that it has at most.
    pub fn max_connections(&self) -> usize {
        self.0.limits.max()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// What workers share.
struct Shared {
    settings: Settings,
    limits: Limits,
    log: Log,
    index: Mutex<Arc<Index>>,
    /// Counts the snapshots, so that a worker need not take the lock to see that there is none.
    version: AtomicU64,
    loads: Box<[Load]>,
    mailboxes: Box<[Mailbox]>,
    attachments: Mutex<Vec<Entry>>,
    /// What was counted, by attachments that there are and that there were.
    ledger: Mutex<Ledger>,
    /// Whether the want of files was told.
    complained: AtomicBool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// An attachment, with its sockets until it is removed.
#[derive(Debug)]
struct Entry {
    attached: Arc<Attached>,
    listeners: Option<Arc<[Listener]>>,
}

impl Entry {
    /// Whether it has connections, or may have some.
    fn is_in_use(&self) -> bool {
        self.listeners.is_some() || self.attached.open() > 0
    }
}

/// How busy a worker is. Each in a cache line of its own, since each is written to by another CPU.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Load {
    connections: AtomicUsize,
    held: AtomicUsize,
}

impl Load {
    fn add(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    fn sub(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn get(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Where a worker finds what it is told.
#[derive(Debug)]
struct Mailbox {
    sender: Sender<Command>,
    wake: OwnedFd,
}

impl Shared {
    fn lock_index(&self) -> MutexGuard<'_, Arc<Index>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_attachments(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.attachments
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The current index and its number.
    fn index(&self) -> (u64, Arc<Index>) {
        let index = self.lock_index();
        (self.version.load(Ordering::Acquire), Arc::clone(&index))
    }

    /// Attachments that are served, or have connections still.
    fn attachments(&self) -> Vec<Arc<Attached>> {
        let attachments = self.lock_attachments();
        attachments
            .iter()
            .filter(|entry| entry.is_in_use())
            .map(|entry| Arc::clone(&entry.attached))
            .collect()
    }

    /// Brings the ledger up to date, and forgets attachments that are over.
    fn count(&self) -> MutexGuard<'_, Ledger> {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let mut attachments = self.lock_attachments();
        attachments.retain(|entry| {
            // What is counted after that, of one that is over, there is not.
            let in_use = entry.is_in_use();
            entry.attached.count(&mut ledger, now);
            in_use
        });
        self.limits.reserve(attachments.len());
        ledger
    }

    /// Forgets what was counted for workloads that there are no more.
    fn forget(&self, snapshot: &Snapshot) {
        let now = Instant::now();
        let mut ledger = self.count();
        if !ledger.is_due(now) {
            return;
        }
        let attached = self.attachments();
        let mut there: HashSet<Party> = snapshot.workloads.values().map(Party::of).collect();
        there.extend(
            attached
                .iter()
                .map(|attached| Party::of(&attached.workload)),
        );
        ledger.prune(|party| there.contains(party), now);
    }

    /// Bytes that are held for readers that do not keep up.
    fn held(&self) -> usize {
        self.loads.iter().map(Load::held).sum()
    }

    /// A worker that has fewer connections than `number` by more than `lead`.
    fn less_busy(&self, number: usize, lead: usize) -> Option<usize> {
        if self.loads.len() < 2 {
            return None;
        }
        let own = self.loads[number].get();
        let others = self.loads.iter().enumerate();
        let (other, least) = others.min_by_key(|(_, load)| load.get())?;
        (own > least.get() + lead).then_some(other)
    }

    /// Tells a worker something; gives it back if that worker is gone.
    fn tell(&self, number: usize, command: Command) -> Result<(), Command> {
        let mailbox = &self.mailboxes[number];
        mailbox.sender.send(command).map_err(|error| error.0)?;
        // It fails only if the counter is full, and then the worker is awake.
        let _ = rustix::io::write(&mailbox.wake, &1_u64.to_ne_bytes());
        Ok(())
    }

    fn tell_all(&self, command: impl Fn() -> Command) {
        for number in 0..self.mailboxes.len() {
            // A worker that is gone has nothing to do any more.
            let _ = self.tell(number, command());
        }
    }

    /// A worker has been woken.
    fn calm(&self, number: usize) {
        let _ = rustix::io::read(&self.mailboxes[number].wake, &mut [0; 8]);
    }

    /// Tells, once, that connections are waiting for want of something.
    fn complain(&self, error: rustix::io::Errno) {
        if !self.complained.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "connections are not accepted for now: {error}; they wait until others have ended"
            );
        }
    }
}

/// The addresses of this network namespace's interfaces.
fn local_addresses() -> Box<[IpAddr]> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    addresses.collect()
}
