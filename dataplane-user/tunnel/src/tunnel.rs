//! Established tunnels, of both directions.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, Instant},
};

use h2::{Ping, PingPong};
use http::HeaderMap;
use identity::Verifier;
use relay::Baggage;
use tokio::sync::Notify;

use super::{error::Error, guard::PeerState, headers, tls::VerifiedPeer};

/// An established tunnel.
#[derive(Debug)]
pub struct Tunnel {
    /// The peer, as the handshake verified it.
    pub peer: VerifiedPeer,
    /// The peer's address.
    pub address: SocketAddr,
    /// The attachment of this side's workload.
    pub attachment: u64,
    /// The UID of the destination workload; `None`: the tunnel is inbound.
    pub workload: Option<Arc<str>>,
    /// The observed state of the peer.
    pub peer_state: Arc<PeerState>,
    streams: AtomicUsize,
    opened: AtomicU64,
    ended: AtomicBool,
    end: Notify,
    failure: OnceLock<Error>,
    baggage: OnceLock<Option<Arc<Baggage>>>,
}

impl Tunnel {
    /// Returns the number of open streams.
    pub fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Returns the number of streams that were opened, including closed ones.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Resets the tunnel's streams, and ends it.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.end.notify_one();
    }

    /// Lets no further stream begin. Open streams continue.
    pub fn retire(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Returns the cause of the tunnel's failure.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Records the cause of the tunnel's failure.
    pub fn fail(&self, error: Error) {
        // Keeps the first error, which is the cause of later ones.
        let _ = self.failure.set(error);
    }

    /// Reads the peer's description of its workload in the headers of the tunnel's first stream, and ignores those of later streams:
    /// a tunnel leads to or from one workload.
    pub fn read_baggage(&self, headers: &HeaderMap) {
        self.baggage.get_or_init(|| headers::baggage(headers));
    }

    /// Returns the peer's description of its workload.
    pub fn baggage(&self) -> Option<Arc<Baggage>> {
        self.baggage.get().cloned().flatten()
    }

    /// Returns whether the tunnel takes no further streams.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Waits for [`Tunnel::end`].
    pub async fn until_end(&self) {
        self.end.notified().await;
    }

    /// Counts a stream until the lease is dropped.
    pub fn lease(self: &Arc<Self>) -> Lease {
        self.streams.fetch_add(1, Ordering::Relaxed);
        self.opened.fetch_add(1, Ordering::Relaxed);
        Lease(Arc::clone(self))
    }
}

/// A stream's place in a tunnel.
#[derive(Debug)]
pub struct Lease(pub Arc<Tunnel>);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All established tunnels of the process.
#[derive(Debug, Default)]
pub struct Registry {
    tunnels: Mutex<HashMap<u64, Arc<Tunnel>>>,
    next: AtomicU64,
    /// The number of outbound tunnels of each namespace that has some.
    outbound: Mutex<HashMap<Box<str>, usize>>,
}

/// A tunnel's entry in the registry. Dropping it removes the tunnel.
#[derive(Debug)]
pub struct Entry {
    /// The tunnel.
    pub tunnel: Arc<Tunnel>,
    registry: Arc<Registry>,
    id: u64,
    /// The namespace that an outbound tunnel comes from.
    namespace: Option<Box<str>>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.tunnel.retire();
        self.registry.lock().remove(&self.id);
        let Some(namespace) = &self.namespace else {
            return;
        };
        let mut outbound = self.registry.lock_outbound();
        if let Some(has) = outbound.get_mut(namespace) {
            *has -= 1;
            if *has == 0 {
                outbound.remove(namespace);
            }
        }
    }
}

impl Registry {
    /// Adds an established tunnel. `attachment`: of this side's workload. `outbound`: the UID of the destination workload of an
    /// outbound tunnel, and the namespace that the tunnel comes from.
    pub fn add(
        self: &Arc<Self>,
        peer: VerifiedPeer,
        address: SocketAddr,
        (attachment, outbound): (u64, Option<(Arc<str>, &str)>),
        peer_state: Arc<PeerState>,
    ) -> Entry {
        let (workload, namespace) = outbound.unzip();
        let tunnel = Arc::new(Tunnel {
            peer,
            address,
            attachment,
            workload,
            peer_state,
            streams: AtomicUsize::new(0),
            opened: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            end: Notify::new(),
            failure: OnceLock::new(),
            baggage: OnceLock::new(),
        });
        let namespace = namespace.map(Box::<str>::from);
        if let Some(namespace) = namespace.clone() {
            *self.lock_outbound().entry(namespace).or_default() += 1;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(id, Arc::clone(&tunnel));
        Entry {
            tunnel,
            registry: Arc::clone(self),
            id,
            namespace,
        }
    }

    /// Returns whether there are more than `most` outbound tunnels, and more from this namespace than its part: `most`,
    /// divided by the number of namespaces that have some.
    pub fn is_crowded(&self, namespace: &str, most: usize) -> bool {
        let outbound = self.lock_outbound();
        let has = outbound.get(namespace).copied().unwrap_or_default();
        outbound.values().sum::<usize>() > most && has > most / outbound.len().max(1)
    }

    fn lock_outbound(&self) -> MutexGuard<'_, HashMap<Box<str>, usize>> {
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tunnels.
    pub fn all(&self) -> Vec<Arc<Tunnel>> {
        self.lock().values().cloned().collect()
    }

    /// Ends the tunnels for which `is_meant` returns `true`.
    pub fn end_if(&self, is_meant: impl Fn(&Tunnel) -> bool) {
        let meant = self.all().into_iter().filter(|tunnel| is_meant(tunnel));
        meant.for_each(|tunnel| tunnel.end());
    }

    /// Ends the tunnels whose peers the roots do not allow any more. The certificates are verified for the time of the
    /// handshake, so a certificate that has expired since then ends no tunnel.
    pub fn end_untrusted(&self, verifier: &Verifier) {
        self.end_if(|tunnel| {
            let peer = &tunnel.peer;
            verifier.verify(&peer.chain, peer.at).is_err()
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Tunnel>>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The keepalive of a tunnel: sends PING, and measures how long the peer has been silent and the tunnel idle.
pub struct Keepalive {
    ping: Option<PingPong>,
    /// The number of bytes that the peer had sent at the last tick.
    bytes: u64,
    /// The time of the last tick that found more bytes.
    heard: Instant,
    /// The number of streams that had been opened at the last tick.
    opened: u64,
    /// The time of the last tick that found a stream.
    used: Instant,
}

impl Keepalive {
    /// Starts the keepalive of a new tunnel.
    pub fn new(ping: Option<PingPong>) -> Self {
        let now = Instant::now();
        Self {
            ping,
            bytes: 0,
            heard: now,
            opened: 0,
            used: now,
        }
    }

    /// Sends PING if the peer has sent nothing since the last tick. Returns the time since the peer's last byte, and the
    /// time since the last stream.
    pub fn tick(&mut self, tunnel: &Tunnel) -> (Duration, Duration) {
        let now = Instant::now();
        let bytes = tunnel.peer_state.bytes();
        if bytes != self.bytes {
            (self.bytes, self.heard) = (bytes, now);
        } else if let Some(ping) = &mut self.ping {
            // Sending fails while the last PING has no answer.
            let _ = ping.poll_pong(&mut Context::from_waker(Waker::noop()));
            let _ = ping.send_ping(Ping::opaque());
        }
        if tunnel.streams() > 0 || tunnel.opened() != self.opened {
            (self.opened, self.used) = (tunnel.opened(), now);
        }
        (now - self.heard, now - self.used)
    }
}
