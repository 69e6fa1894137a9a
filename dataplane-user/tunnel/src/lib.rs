//! HBONE: connections between workloads in streams of HTTP/2 CONNECT, over TLS that authenticates both by identity.
//!
//! [`Tunnels`] has the threads. A connection of a workload is given to one of them ([`Tunnels::outbound`]), which makes a
//! stream of a pooled tunnel to the destination. A listening socket of port 15008 is given to all of them
//! ([`Tunnels::listen`]); an [`Inbound`] decides where each stream goes.
//!
//! The crate connects and listens nowhere by itself: the callers bring sockets, which may be of any network namespace.

#![forbid(unsafe_code)]

/// Sets the limits of a tunnel in a builder of an HTTP/2 connection: the library's builders of both sides have no trait in
/// common.
macro_rules! limited {
    ($builder:expr) => {
        $builder
            .initial_window_size(crate::copy::WINDOW)
            .initial_connection_window_size(crate::TUNNEL_WINDOW)
            .max_frame_size(crate::FRAME)
            .max_header_list_size(crate::HEADERS)
            .max_send_buffer_size(crate::copy::LARGE)
            .data_frame_budget(crate::SMALL_FRAMES)
            .max_concurrent_streams(crate::STREAMS)
    };
}

mod copy;
mod engine;
mod error;
mod guard;
mod inbound;
mod outbound;
mod pool;
#[cfg(test)]
mod tests;
mod tls;
mod tunnel;
mod workers;

use std::{
    io, net::TcpListener, panic::resume_unwind, sync::Arc, thread::available_parallelism,
    time::Duration,
};

pub use engine::{Engine, Manner};
use identity::Identities;
use model::Identity;
use threads::Deaths;
pub use tls::provider;
use tokio::task::spawn_blocking;

use self::{
    copy::{Held, WINDOW},
    inbound::{Inbound, Listening},
    outbound::Outbound,
    pool::Pool,
    tls::Trust,
    tunnel::{Registry, Tunnel},
    workers::{Workers, least},
};

/// The port of HBONE.
const PORT: u16 = 15008;

/// The settings of tunnels.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The number of threads; 0: one for each CPU.
    pub threads: usize,
    /// The time for a stream: the TCP connection, TLS, and the answer to CONNECT.
    pub connect: Duration,
    /// The time that a peer that connects has for TLS.
    pub handshake: Duration,
    /// Streams of a tunnel, at most. Further streams take a further tunnel.
    pub streams: usize,
    /// Tunnels of a listening socket, at most. Further ones wait to be accepted.
    pub tunnels: usize,
    /// Tunnels of a listening socket that come from one address, at most. Further ones are refused.
    pub tunnels_of_address: usize,
    /// The time without a stream after which a tunnel ends.
    pub idle: Duration,
    /// The time without a byte after which PING is sent.
    pub ping: Duration,
    /// The time that the peer has to answer PING.
    pub pong: Duration,
    /// Bytes that all streams together may hold for sockets that take nothing.
    pub held: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: 0,
            connect: Duration::from_secs(10),
            handshake: Duration::from_secs(10),
            streams: 100,
            tunnels: 4096,
            tunnels_of_address: 256,
            idle: Duration::from_mins(5),
            ping: Duration::from_secs(10),
            pong: Duration::from_secs(20),
            held: 128 << 20,
        }
    }
}

/// The number of streams that a peer may have in one tunnel. Peers of ours and ztunnels have up to 100.
const STREAMS: u32 = 256;
/// The window of a tunnel: that of all its streams, so that streams whose readers stall take nothing from others.
const TUNNEL_WINDOW: u32 = WINDOW * STREAMS;
/// The largest frame: with its header it fills four records of TLS. Larger ones would make other streams wait longer.
const FRAME: u32 = (64 << 10) - 9;
/// What is read from a tunnel's socket at a time; TLS alone asks for 4 KiB. The memory is only used as far as it was
/// needed.
const READ: usize = 64 << 10;
/// The headers of a request, at most.
const HEADERS: u32 = 16 << 10;
/// What the library may spend on keeping small frames that were not read.
const SMALL_FRAMES: usize = 16 << 20;

/// What all threads share.
struct Core<I> {
    settings: Settings,
    identities: Arc<I>,
    trust: Trust,
    registry: Arc<Registry>,
    held: Arc<Held>,
    /// One for each thread.
    pools: Box<[Pool]>,
}

/// The tunnels of the process. Dropping it ends them.
pub struct Tunnels<I> {
    core: Arc<Core<I>>,
    workers: Workers,
}

impl<I: Identities + 'static> Tunnels<I> {
    /// Starts the threads. A thread that dies reports to `deaths`. Tunnels whose peers the roots do not allow any more end
    /// when the roots change.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(settings: Settings, identities: Arc<I>, deaths: &Deaths) -> io::Result<Self> {
        let threads = match settings.threads {
            0 => available_parallelism().map_or(1, Into::into),
            count => count,
        };
        let workers = Workers::start(threads, deaths)?;
        let mut roots = identities.roots();
        let core = Arc::new(Core {
            trust: Trust::new(roots.clone()),
            registry: Arc::default(),
            held: Arc::new(Held::new(settings.held)),
            pools: (0..threads).map(|_| Pool::default()).collect(),
            settings,
            identities,
        });
        let follower = Arc::downgrade(&core);
        workers.all()[0].spawn(async move {
            while roots.changed().await.is_ok() {
                let Some(core) = follower.upgrade() else {
                    return;
                };
                // A thread of its own: with many tunnels it takes long, and this one carries data.
                let ended = spawn_blocking(move || {
                    // Roots that cannot be read allow no new tunnel. The ones that are up were allowed.
                    if let Ok(verifier) = core.trust.verifier() {
                        core.registry.end_untrusted(&verifier);
                    }
                });
                if let Err(error) = ended.await {
                    resume_unwind(error.into_panic());
                }
            }
        });
        Ok(Self { core, workers })
    }

    /// Runs work on the thread that has the least: an outbound connection, from the client's socket to its end.
    fn outbound<F: Future<Output = ()> + Send + 'static>(
        &self,
        work: impl FnOnce(Outbound<I>) -> F,
    ) {
        let worker = least(self.workers.all());
        worker.spawn(work(Outbound::new(&self.core, worker)));
    }

    /// Accepts the tunnels to a workload, of this identity, until the result is dropped.
    ///
    /// # Errors
    /// If the socket cannot be used.
    fn listen(
        &self,
        listener: TcpListener,
        own: Identity,
        inbound: Arc<impl Inbound>,
    ) -> io::Result<Listening> {
        inbound::listen(&self.core, self.workers.all(), listener, own, inbound)
    }

    /// Ends the outbound tunnels that belong to this workload (its UID), also those that are being made.
    fn end_workload(&self, uid: &str) {
        for pool in &self.core.pools {
            pool.forget(uid);
        }
        let is_its = |tunnel: &Tunnel| tunnel.workload.as_deref() == Some(uid);
        self.core.registry.end_if(is_its);
    }

    /// The tunnels that are up, of both directions.
    fn tunnels(&self) -> Vec<Arc<Tunnel>> {
        self.core.registry.all()
    }
}
