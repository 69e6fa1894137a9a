//! Workloads whose connections the proxy relays.

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering, fence},
    },
    time::Instant,
};

use dataplane_common::capture::Tuple;
use smallvec::SmallVec;

use super::{
    index::Target,
    ledger::Ledger,
    metrics::{Counters, CountersKey, Labels, Party},
    outcome::Flag,
};
use crate::model::{Egress, Workload};

/// A workload, and the sockets at which its connections arrive.
#[derive(Debug)]
pub struct Attachment {
    /// The workload: its name in logs and metrics.
    pub workload: Arc<Workload>,
    /// The network namespace to connect from; `None`: the one in which the proxy was started.
    pub namespace: Option<OwnedFd>,
    /// Bound sockets at which connections arrive that the workload makes.
    pub outbound: Vec<TcpListener>,
    /// Bound sockets at which connections arrive that are made to it.
    pub inbound: Vec<TcpListener>,
    /// What becomes of connections that it makes to destinations that nobody knows.
    pub egress: Egress,
    /// Whether bytes may come past the TCP stack.
    pub acceleration: Option<Acceleration>,
}

/// Whom to tell how far the proxy is with what comes past the TCP stack: without that, it comes by TCP
/// after the first [`dataplane_common::accelerate::WINDOW`] bytes.
#[derive(Clone)]
pub struct Acceleration {
    /// The network namespace's cookie.
    pub netns: u64,
    /// How many bytes may have come by a connection, in all.
    pub grant: Arc<Grant>,
}

/// Says how many bytes may have come by a connection.
pub type Grant = dyn Fn(&Tuple, u64) + Send + Sync;

impl fmt::Debug for Acceleration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceleration")
            .field("netns", &self.netns)
            .finish_non_exhaustive()
    }
}

/// Which way a connection goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Made by the workload.
    Outbound,
    /// Made to the workload.
    Inbound,
}

impl Direction {
    /// As in access logs.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    /// The socket.
    pub socket: OwnedFd,
    /// Which way its connections go.
    pub direction: Direction,
    /// Where it is bound.
    pub address: SocketAddr,
}

/// An attachment while it is served. Listening sockets are closed with the last reference to them.
#[derive(Debug)]
pub struct Attached {
    /// Distinguishes it from others, and from an earlier one of the same workload.
    pub id: u64,
    /// The workload.
    pub workload: Arc<Workload>,
    /// The network namespace to connect from.
    pub namespace: Option<OwnedFd>,
    /// Unknown destinations.
    pub egress: Egress,
    /// Whom to tell how far the proxy is.
    pub acceleration: Option<Acceleration>,
    /// Where the proxy itself listens for this workload.
    pub own: SmallVec<[SocketAddr; 4]>,
    /// Addresses of the machine that it is on, besides the workload's.
    here: Box<[IpAddr]>,
    /// Connections that it has now.
    pub open: AtomicUsize,
    counters: Mutex<HashMap<CountersKey, Arc<Counters>>>,
}

impl Attached {
    /// From an attachment. `here`: addresses of the network namespace, as far as they are known.
    ///
    /// # Errors
    /// If a socket does not say where it is bound.
    pub fn new(
        id: u64,
        attachment: Attachment,
        here: Box<[IpAddr]>,
    ) -> std::io::Result<(Arc<Self>, Arc<[Listener]>)> {
        let outbound = attachment.outbound.into_iter();
        let inbound = attachment.inbound.into_iter();
        let listeners = outbound
            .map(|socket| (socket, Direction::Outbound))
            .chain(inbound.map(|socket| (socket, Direction::Inbound)));
        let listeners = listeners.map(|(socket, direction)| {
            Ok(Listener {
                address: super::socket::plain(socket.local_addr()?),
                socket: socket.into(),
                direction,
            })
        });
        let listeners: Arc<[Listener]> = listeners.collect::<std::io::Result<_>>()?;
        let attached = Self {
            id,
            workload: attachment.workload,
            namespace: attachment.namespace,
            egress: attachment.egress,
            acceleration: attachment.acceleration,
            here,
            own: listeners.iter().map(|listener| listener.address).collect(),
            open: AtomicUsize::new(0),
            counters: Mutex::default(),
        };
        Ok((Arc::new(attached), listeners))
    }

    /// Whether a connection that arrived at this address was not redirected to it: none of the
    /// listening sockets has its port.
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
                && (own.ip() == ip || (here && (own.ip().is_unspecified() || ip.is_unspecified())))
        })
    }

    /// Where the proxy listens for this workload, if that is one address of the family.
    pub fn listener(&self, v4: bool) -> Option<SocketAddr> {
        let own = self.own.iter().filter(|own| own.is_ipv4() == v4);
        own.copied().find(|own| !own.ip().is_unspecified())
    }

    /// The counters of a kind of connection.
    pub fn counters(
        &self,
        direction: Direction,
        target: Option<&Target>,
        peer: Option<&Arc<Workload>>,
        flag: Flag,
    ) -> Arc<Counters> {
        let key = CountersKey {
            direction,
            service: target.map(|target| target.service().clone()),
            peer: peer.map_or_else(Party::nobody, Party::of),
            flag,
        };
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(counters.entry(key).or_default())
    }

    /// Moves what was counted to a ledger. Counters that no connection has any more are forgotten.
    pub fn count(&self, ledger: &mut Ledger, now: Instant) {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        counters.retain(|key, counters| {
            // Asked first: nobody gets them while the lock is held, and who had them has counted.
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

    /// How many connections it has.
    pub fn open(&self) -> usize {
        // What its last connection counted was counted before.
        self.open.load(Ordering::Acquire)
    }
}
