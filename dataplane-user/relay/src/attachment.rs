//! Workloads whose connections are relayed.

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering, fence},
    },
    time::{Duration, Instant},
};

use model::{Egress, ServiceName, Workload, WorkloadName};
use smallvec::SmallVec;

use super::{
    access::Log,
    counters::Counters,
    direction::Direction,
    index::Target,
    labels::{CountersKey, Labels, Party, Principals},
    ledger::Ledger,
    limits::{Holders, Limits},
    outcome::Flag,
    socket,
};

/// Opens non-blocking TCP sockets in a workload's network namespace: one, or up to this number. The flag selects their
/// family: IPv4 if true, else IPv6.
pub type Open = dyn Fn(bool, usize) -> io::Result<Vec<OwnedFd>> + Send + Sync;

/// The network namespace from which a workload's connections are made. Its applications' sockets take packets of
/// connections from a client's address from the loopback interface only.
#[derive(Clone)]
pub struct Namespace {
    /// Opens sockets there.
    pub open: Arc<Open>,
    /// The interface by which all packets come that come from elsewhere, if there is one for all.
    pub interface: Option<String>,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespace")
            .field("interface", &self.interface)
            .finish_non_exhaustive()
    }
}

/// A workload, and the sockets at which its connections arrive.
#[derive(Debug)]
pub struct Attachment {
    /// The workload: its name in logs and metrics.
    pub workload: Arc<Workload>,
    /// The network namespace to connect from; `None`: the process's own.
    pub namespace: Option<Namespace>,
    /// Bound sockets at which connections arrive that the workload makes.
    pub outbound: Vec<TcpListener>,
    /// Bound sockets at which connections arrive that are made to the workload.
    pub inbound: Vec<TcpListener>,
    /// Bound sockets at which tunnels to the workload arrive.
    pub tunnels: Vec<TcpListener>,
    /// Whether the workload may connect to destinations that are not in the snapshot.
    pub egress: Egress,
}

/// Why a workload cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The workload is attached already.
    #[error("{0} is attached to the proxy already")]
    Attached(WorkloadName),
    /// A listening socket cannot be used.
    #[error("a listening socket of {workload} cannot be used: {cause}")]
    Listener {
        /// The workload.
        workload: WorkloadName,
        /// Why.
        cause: io::Error,
    },
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    /// The socket.
    pub socket: OwnedFd,
    /// The direction of its connections.
    pub direction: Direction,
    /// Whether its connections are tunnels, in which peers' connections arrive.
    pub is_tunnel: bool,
    /// The address that the socket is bound to.
    pub address: SocketAddr,
}

/// Connections that were ended because their readers had stalled.
#[derive(Clone, Copy, Debug, Default)]
struct Stalled {
    count: u64,
    last: Option<Instant>,
}

/// The reason for which a tunnel to a workload is refused or waits: the share that a holder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// The holder, such as `one client`.
    pub holder: &'static str,
    /// The shared limit, such as `tunnels to this node`.
    pub what: &'static str,
}

/// The tunnels to a workload that were refused, and those that had to wait, since the workload was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounded {
    /// Tunnels that were refused.
    pub refused: u64,
    /// Times that a tunnel waited, and with it the listener's backlog.
    pub deferred: u64,
    /// When this happened last, and why.
    last: Option<(Instant, Exceeded)>,
}

impl Bounded {
    /// Returns the last reason, if a tunnel was refused or waited lately.
    pub fn lately(&self) -> Option<Exceeded> {
        let last = self.last.filter(|(last, _)| last.elapsed() < LATELY);
        last.map(|(_, exceeded)| exceeded)
    }
}

/// How long `status` shows that connections of a workload were ended because their readers had stalled, and that tunnels to it
/// were refused or waited.
const LATELY: Duration = Duration::from_mins(10);

/// The maximum number of kinds of connections with counters of their own, between two times at which they go to the ledger:
/// peers choose what they say about themselves.
pub(super) const KINDS: usize = 4096;

/// An attachment while its connections are relayed. Its listening sockets are closed with the last
/// reference to them.
#[derive(Debug)]
pub struct Attached {
    /// Distinguishes the attachment from others, and from an earlier one of the same workload.
    pub id: u64,
    /// The workload.
    pub workload: Arc<Workload>,
    /// The network namespace to connect from.
    pub namespace: Option<Namespace>,
    /// Whether destinations that are not in the snapshot are allowed.
    pub egress: Egress,
    /// The addresses of the listening sockets.
    own: SmallVec<[SocketAddr; 4]>,
    /// Addresses of the network namespace, besides the workload's.
    here: Box<[IpAddr]>,
    /// Connections now.
    pub(super) holders: Holders,
    /// Times that a connection was left in the backlog, because a limit was reached.
    pub(super) deferred: AtomicU64,
    /// Connections that waited because their destination was not known.
    unknown: AtomicU64,
    stalled: Mutex<Stalled>,
    bounded: Mutex<Bounded>,
    counters: Mutex<HashMap<CountersKey, Arc<Counters>>>,
    /// The limits of all attachments. A session finds them here, and needs no counted reference of its own.
    pub(super) limits: Arc<Limits>,
    pub(super) log: Arc<Log>,
}

impl Attached {
    /// Splits an attachment into the state that connections need, and the listening sockets. `here`: the known
    /// addresses of the network namespace. `shared`: the limits, the counts that the workload's connections add to, and
    /// the access log.
    ///
    /// # Errors
    /// If the address of a socket cannot be read.
    pub fn new(
        id: u64,
        attachment: Attachment,
        here: Box<[IpAddr]>,
        (limits, holders, log): (Arc<Limits>, Holders, Arc<Log>),
    ) -> io::Result<(Arc<Self>, Arc<[Listener]>)> {
        let outbound = attachment.outbound.into_iter();
        let inbound = attachment.inbound.into_iter();
        let tunnels = attachment.tunnels.into_iter();
        let listeners = outbound
            .map(|socket| (socket, Direction::Outbound, false))
            .chain(inbound.map(|socket| (socket, Direction::Inbound, false)))
            .chain(tunnels.map(|socket| (socket, Direction::Inbound, true)));
        let listeners = listeners.map(|(socket, direction, is_tunnel)| {
            Ok(Listener {
                address: socket::plain(socket.local_addr()?),
                socket: socket.into(),
                direction,
                is_tunnel,
            })
        });
        let listeners: Arc<[Listener]> = listeners.collect::<io::Result<_>>()?;
        let attached = Self {
            id,
            workload: attachment.workload,
            namespace: attachment.namespace,
            egress: attachment.egress,
            here,
            own: listeners.iter().map(|listener| listener.address).collect(),
            holders,
            deferred: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            stalled: Mutex::default(),
            bounded: Mutex::default(),
            counters: Mutex::default(),
            limits,
            log,
        };
        Ok((Arc::new(attached), listeners))
    }

    /// Whether a connection that arrived at this address was not redirected to it, because no
    /// listening socket has its port.
    pub fn is_elsewhere(&self, address: SocketAddr) -> bool {
        self.own.iter().all(|own| own.port() != address.port())
    }

    /// Whether a connection to this address would come back to the proxy.
    pub fn is_own(&self, destination: SocketAddr) -> bool {
        let ip = destination.ip();
        let here = ip.is_loopback()
            || ip.is_unspecified()
            || self.workload.addresses.contains(&ip)
            || self.here.contains(&ip);
        self.own.iter().any(|own| {
            own.port() == destination.port()
                && (own.ip() == ip
                    // Captured connections come to a listener at 127.0.0.1 by any address of loopback.
                    || own.ip().is_loopback() && ip.is_loopback() && own.is_ipv4() == ip.is_ipv4()
                    || (here && (own.ip().is_unspecified() || ip.is_unspecified())))
        })
    }

    /// Returns the number of the attachment and its workload, by which an index finds the workload's policies.
    pub fn own(&self) -> (u64, &Arc<Workload>) {
        (self.id, &self.workload)
    }

    /// Whether a service's source ranges admit the connections of the workload. `client`: the address of the
    /// connection's client, which counts only if the workload's addresses are unknown.
    pub fn is_admitted(&self, target: &Target, client: IpAddr) -> bool {
        let known = &self.workload.addresses;
        known.iter().any(|addr| target.admits(*addr)) || known.is_empty() && target.admits(client)
    }

    /// The address by which a service knows a client that it gives the same endpoint again.
    pub fn source(&self, direction: Direction, client: IpAddr) -> IpAddr {
        let mut known = self.workload.addresses.iter().copied();
        let own = known.find(|addr| addr.is_ipv4() == client.is_ipv4());
        match direction {
            Direction::Outbound => own.unwrap_or(client),
            Direction::Inbound => client,
        }
    }

    /// Returns the counters of a kind of connection: its direction, the identities that both sides have proven in a tunnel, and
    /// its outcome.
    pub fn counters(
        &self,
        (direction, principals, flag): (Direction, Option<&Principals>, Flag),
        service: Option<&ServiceName>,
        peer: Option<&Arc<Workload>>,
    ) -> Arc<Counters> {
        let mut key = CountersKey {
            direction,
            principals: principals.cloned(),
            service: service.cloned(),
            peer: peer.map_or_else(Party::nobody, Party::of),
            flag,
        };
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        if counters.len() >= KINDS && !counters.contains_key(&key) {
            key = key.rest();
        }
        Arc::clone(counters.entry(key).or_default())
    }

    /// Moves the counts to the ledger, and drops counters that no connection has any more.
    pub fn collect(&self, ledger: &mut Ledger, now: Instant) {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        counters.retain(|key, counters| {
            // Read before the counters are: a connection that has dropped them has counted before, and no connection
            // gets them while the lock is held.
            let in_use = Arc::strong_count(counters) > 1;
            fence(Ordering::Acquire);
            let labels = Labels {
                workload: Party::of(&self.workload),
                key: key.clone(),
            };
            ledger.add(&labels, counters.take(), 0, now);
            in_use
        });
    }

    /// Times that a connection was left in the backlog, because a limit was reached. An engine tries again every few
    /// milliseconds, and counts each time.
    pub fn deferred(&self) -> u64 {
        self.deferred.load(Ordering::Relaxed)
    }

    /// Counts a connection that waits because its destination is not known.
    pub fn count_unknown(&self) {
        self.unknown.fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that waited because their destination was not known.
    pub fn unknown(&self) -> u64 {
        self.unknown.load(Ordering::Relaxed)
    }

    /// Counts a connection that is ended because its reader has stalled and the engine's buffers are full.
    pub fn count_stalled(&self, now: Instant) {
        let mut stalled = self.lock_stalled();
        stalled.count += 1;
        stalled.last = Some(now);
    }

    /// Connections that were ended because their readers had stalled, and whether one of them was ended lately.
    pub fn stalled(&self) -> (u64, bool) {
        let stalled = self.lock_stalled();
        let lately = stalled.last.is_some_and(|last| last.elapsed() < LATELY);
        (stalled.count, lately)
    }

    fn lock_stalled(&self) -> MutexGuard<'_, Stalled> {
        self.stalled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a tunnel that is refused, or else waits.
    pub fn count_bounded(&self, exceeded: Exceeded, is_refused: bool) {
        let mut bounded = self.lock_bounded();
        if is_refused {
            bounded.refused += 1;
        } else {
            bounded.deferred += 1;
        }
        bounded.last = Some((Instant::now(), exceeded));
    }

    /// Returns the tunnels that were refused or had to wait.
    pub fn bounded(&self) -> Bounded {
        *self.lock_bounded()
    }

    fn lock_bounded(&self) -> MutexGuard<'_, Bounded> {
        self.bounded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of connections now. If it is 0, all connections that there were have counted
    /// everything.
    pub fn connections(&self) -> usize {
        self.holders.connections()
    }
}
