//! Tunnels that are up, of both directions.

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
use identity::Verifier;
use tokio::sync::Notify;

use super::{error::Error, guard::Seen, tls::Proof};

/// A tunnel that is up.
#[derive(Debug)]
pub struct Tunnel {
    /// What the handshake proved of the peer.
    pub proof: Proof,
    /// The peer's address.
    pub address: SocketAddr,
    /// The UID of the workload that the tunnel belongs to, its destination; `None`: an inbound one of this node.
    pub workload: Option<Arc<str>>,
    /// What was seen of the peer.
    pub seen: Arc<Seen>,
    streams: AtomicUsize,
    opened: AtomicU64,
    ended: AtomicBool,
    end: Notify,
    failure: OnceLock<Error>,
}

impl Tunnel {
    /// Streams now.
    pub fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Streams so far.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Resets the tunnel's streams, and ends it.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.end.notify_one();
    }

    /// No stream begins any more.
    pub fn retire(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Why it broke.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Notes why it broke.
    pub fn fail(&self, error: Error) {
        // The first one is the cause.
        let _ = self.failure.set(error);
    }

    /// Whether no stream begins any more.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Waits for [`Tunnel::end`].
    pub async fn until_end(&self) {
        self.end.notified().await;
    }

    /// Counts a stream.
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

/// The tunnels of the process.
#[derive(Debug, Default)]
pub struct Registry {
    tunnels: Mutex<HashMap<u64, Arc<Tunnel>>>,
    next: AtomicU64,
}

/// Keeps a tunnel in the registry.
#[derive(Debug)]
pub struct Entry {
    /// The tunnel.
    pub tunnel: Arc<Tunnel>,
    registry: Arc<Registry>,
    id: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.tunnel.retire();
        self.registry.lock().remove(&self.id);
    }
}

impl Registry {
    /// Adds a tunnel that is up.
    pub fn add(
        self: &Arc<Self>,
        proof: Proof,
        address: SocketAddr,
        workload: Option<Arc<str>>,
        seen: Arc<Seen>,
    ) -> Entry {
        let tunnel = Arc::new(Tunnel {
            proof,
            address,
            workload,
            seen,
            streams: AtomicUsize::new(0),
            opened: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            end: Notify::new(),
            failure: OnceLock::new(),
        });
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(id, Arc::clone(&tunnel));
        Entry {
            tunnel,
            registry: Arc::clone(self),
            id,
        }
    }

    /// The tunnels now.
    pub fn all(&self) -> Vec<Arc<Tunnel>> {
        self.lock().values().cloned().collect()
    }

    /// Ends the tunnels for which `is_meant` returns `true`.
    pub fn end_if(&self, is_meant: impl Fn(&Tunnel) -> bool) {
        let meant = self.all().into_iter().filter(|tunnel| is_meant(tunnel));
        meant.for_each(|tunnel| tunnel.end());
    }

    /// Ends the tunnels whose peers the roots do not allow any more. That a certificate has expired since the handshake is
    /// no reason.
    pub fn end_untrusted(&self, verifier: &Verifier) {
        self.end_if(|tunnel| {
            let proof = &tunnel.proof;
            verifier.verify(&proof.chain, proof.at).is_err()
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Tunnel>>> {
        self.tunnels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches whether a tunnel's peer is alive, and whether the tunnel is used.
pub struct Pulse {
    ping: Option<PingPong>,
    /// The peer's bytes at the last tick, and when there last were more.
    bytes: u64,
    heard: Instant,
    /// Streams so far, and since when there has been none.
    opened: u64,
    idle: Instant,
}

impl Pulse {
    /// A tunnel that has just come up.
    pub fn new(ping: Option<PingPong>) -> Self {
        let now = Instant::now();
        Self {
            ping,
            bytes: 0,
            heard: now,
            opened: 0,
            idle: now,
        }
    }

    /// Sends PING if nothing has come since the last tick. Returns how long nothing has come, and how long there has been
    /// no stream.
    pub fn tick(&mut self, tunnel: &Tunnel) -> (Duration, Duration) {
        let now = Instant::now();
        let bytes = tunnel.seen.bytes();
        if bytes != self.bytes {
            (self.bytes, self.heard) = (bytes, now);
        } else if let Some(ping) = &mut self.ping {
            // Takes the answer to the last one. While there is none, sending fails, and the time passes.
            let _ = ping.poll_pong(&mut Context::from_waker(Waker::noop()));
            let _ = ping.send_ping(Ping::opaque());
        }
        if tunnel.streams() > 0 || tunnel.opened() != self.opened {
            (self.opened, self.idle) = (tunnel.opened(), now);
        }
        (now - self.heard, now - self.idle)
    }
}
