//! Places of a port: how many connections there are, and which one ends when another client finds all places taken.
//!
//! A client that can reach a port can take all of its places and stay silent. So the next client gets a place at once:
//! the client with the most connections loses the oldest of them, and a client with few loses none. If ports share their
//! places, the port with the most connections loses one.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::{Notify, oneshot};

/// A client: an IPv4 address, or an IPv6 network of 64 bits, because a machine has all of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client(IpAddr);

impl Client {
    fn of(addr: IpAddr) -> Self {
        Self(match addr.to_canonical() {
            IpAddr::V6(addr) => Ipv6Addr::from_bits(addr.to_bits() & !u128::from(u64::MAX)).into(),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

/// The places of a port.
#[derive(Debug)]
pub struct Places {
    max: usize,
    held: Mutex<Held>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Held {
    next: u64,
    /// By number: the oldest is the first.
    connections: BTreeMap<u64, Connection>,
}

#[derive(Debug)]
struct Connection {
    client: Client,
    /// Dropped when the connection has to end.
    end: Option<oneshot::Sender<()>>,
}

impl Places {
    /// Creates so many places.
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            held: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Takes a place for a connection from `addr`, as soon as one is free; if none is free, makes another connection
    /// end.
    pub async fn take(self: &Arc<Self>, addr: IpAddr) -> Place {
        loop {
            let freed = self.freed.notified();
            if let Some(place) = self.try_take(addr) {
                return place;
            }
            freed.await;
        }
    }

    fn try_take(self: &Arc<Self>, addr: IpAddr) -> Option<Place> {
        let client = Client::of(addr);
        let mut held = self.lock();
        if held.connections.len() >= self.max {
            held.end_one(client, None);
            return None;
        }
        let (end, ends) = oneshot::channel();
        let number = held.next;
        held.next += 1;
        let connection = Connection {
            client,
            end: Some(end),
        };
        held.connections.insert(number, connection);
        Some(Place {
            of: Arc::clone(self),
            number,
            client,
            ends,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// Makes a connection end to make room for a new connection of `client`, unless one is ending already. `own`: the
    /// number of the new connection, if it has a place.
    fn end_one(&mut self, client: Client, own: Option<u64>) {
        if self.connections.values().any(|held| held.end.is_none()) {
            return;
        }
        let mut counts = HashMap::from([(client, usize::from(own.is_none()))]);
        for held in self.connections.values() {
            *counts.entry(held.client).or_default() += 1;
        }
        let others = self
            .connections
            .iter_mut()
            .filter(|(number, _)| Some(**number) != own);
        // Of equal ones, this is the first.
        if let Some((_, held)) = others.min_by_key(|(_, held)| Reverse(counts[&held.client])) {
            held.end = None;
        }
    }
}

/// A connection's place, until it is dropped.
#[derive(Debug)]
pub struct Place {
    of: Arc<Places>,
    number: u64,
    client: Client,
    /// Ready when the connection has to end.
    pub ends: oneshot::Receiver<()>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.lock().connections.remove(&self.number);
        self.of.freed.notify_one();
    }
}

/// Places that several ports share.
#[derive(Debug)]
pub struct Shared {
    max: usize,
    taken: AtomicUsize,
    ports: Mutex<Vec<Weak<Places>>>,
    freed: Notify,
}

impl Shared {
    /// Creates so many places.
    pub fn new(max: usize) -> Self {
        Self {
            max,
            taken: AtomicUsize::new(0),
            ports: Mutex::default(),
            freed: Notify::new(),
        }
    }

    /// Adds a port that shares these places.
    pub fn add(&self, port: &Arc<Places>) {
        let mut ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.retain(|port| port.strong_count() > 0);
        ports.push(Arc::downgrade(port));
    }

    /// Takes a place for a connection that has one at its port, as soon as one is free; if none is free, makes a
    /// connection of the port with the most connections end.
    pub async fn take(self: Arc<Self>, own: &Place) -> Share {
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            let more = |taken: usize| (taken < self.max).then_some(taken + 1);
            let taken = (self.taken).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
            if taken.is_ok() {
                return Share(Arc::clone(&self));
            }
            self.end_one(own);
            freed.await;
        }
    }

    fn end_one(&self, own: &Place) {
        let ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        let ports = ports.iter().filter_map(Weak::upgrade);
        let Some(most) = ports.max_by_key(|port| port.lock().connections.len()) else {
            return;
        };
        let number = Arc::ptr_eq(&most, &own.of).then_some(own.number);
        most.lock().end_one(own.client, number);
    }
}

/// A connection's place among those of several ports, until it is dropped.
#[derive(Debug)]
pub struct Share(Arc<Shared>);

impl Drop for Share {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
        self.0.freed.notify_waiters();
    }
}
