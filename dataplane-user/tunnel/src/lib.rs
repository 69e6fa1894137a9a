//! HBONE: connections between workloads in streams of HTTP/2 CONNECT, over TLS that authenticates both by identity.
//!
//! `Tunnels` has the threads. A connection of a workload runs on one of them (`Tunnels::outbound`), which makes a
//! stream in a pooled tunnel to the destination. The tunnels to a workload come in at a listening socket of port 15008, and
//! all threads serve them (`Tunnels::listen`). An `Inbound` chooses the destination of each stream. The [`Engine`] is
//! the interface to the proxy.
//!
//! `Tunnels` opens no sockets: its callers pass sockets, which may be of any network namespace.

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
            .max_send_buffer_size(crate::LARGE)
            .data_frame_budget(crate::SMALL_FRAMES)
            .max_concurrent_streams(crate::STREAMS)
    };
}

mod bounds;
mod budget;
mod copy;
mod engine;
mod error;
mod guard;
mod headers;
mod inbound;
mod outbound;
mod pool;
mod request;
#[cfg(test)]
mod tests;
mod tls;
mod tunnel;
mod wire;
mod workers;

use std::{
    io, net::TcpListener, panic::resume_unwind, sync::Arc, thread::available_parallelism,
    time::Duration,
};

pub use engine::{Engine, Manner};
use identity::Identities;
use model::Identity;
use relay::raise_open_files;
use threads::Deaths;
pub use tls::provider;
use tokio::task::spawn_blocking;

use self::{
    bounds::Bounds,
    budget::Budget,
    copy::WINDOW,
    inbound::{Inbound, Listening},
    outbound::Outbound,
    pool::Pool,
    tls::Trust,
    tunnel::{Registry, Tunnel},
    workers::{Workers, least},
};

/// The maximum number of tunnels of the process in one direction, without a setting: so many, and this part of the open files.
const TUNNELS: (usize, usize) = (16_384, 16);
/// The open files of each workload: two listening sockets, the copy of each for this crate, the copies of each for the agent's
/// successor before and during the handover, and a connection of each that waits for a place.
const FILES_OF_WORKLOAD: usize = 10;

/// The settings of tunnels.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The number of threads. 0: one for each CPU.
    pub threads: usize,
    /// The time limit for a stream: the TCP connection, TLS, and the answer to CONNECT.
    pub connect: Duration,
    /// The time limit for the TLS handshake of a peer that connects.
    pub handshake: Duration,
    /// The maximum number of streams in a tunnel. Further streams take another tunnel. A power of two, because the
    /// HTTP/2 library doubles its table of streams.
    pub streams: usize,
    /// The maximum number of tunnels of a listening socket. Further tunnels wait in the backlog.
    pub tunnels: usize,
    /// The maximum number of tunnels of a listening socket from one client. Further tunnels are refused.
    pub tunnels_of_address: usize,
    /// The maximum number of inbound tunnels of the process whose handshake is not finished.
    pub unfinished: usize,
    /// The maximum number of inbound tunnels of the process. With more outbound tunnels, idle ones end early. `None`: a
    /// sixteenth of the open files that the process may have, but at most 16384.
    pub tunnels_of_process: Option<usize>,
    /// The time without a stream after which a tunnel ends.
    pub idle: Duration,
    /// The time without a byte after which this side sends PING.
    pub ping: Duration,
    /// The time limit for the answer to PING.
    pub pong: Duration,
    /// The maximum number of bytes that all streams together buffer for slow sockets.
    pub buffered: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: 0,
            connect: Duration::from_secs(10),
            handshake: Duration::from_secs(10),
            streams: 128,
            tunnels: 4096,
            tunnels_of_address: 256,
            unfinished: 1024,
            tunnels_of_process: None,
            idle: Duration::from_mins(5),
            ping: Duration::from_secs(10),
            pong: Duration::from_secs(20),
            buffered: 128 << 20,
        }
    }
}

impl Settings {
    /// Returns the time after which a tunnel ends whose peer sends no byte, or takes none of those that wait for it.
    fn patience(&self) -> Duration {
        self.ping + self.pong
    }
}

/// The pause of the accept loop after an error, such as too many open files, and while the socket has its share of the tunnels.
/// Also the time limit for sending GOAWAY to a peer whose tunnel is cut.
const PAUSE: Duration = Duration::from_millis(100);
/// The maximum number of streams of a peer in one tunnel. Agents have up to 128, and ztunnels up to 100.
const STREAMS: u32 = 256;
/// The window of a tunnel: the sum of the windows of all its streams, so that stalled streams do not slow other streams.
const TUNNEL_WINDOW: u32 = WINDOW * STREAMS;
/// The maximum size of a frame in bytes: with its header it fills four TLS records. Larger frames would delay other
/// streams.
const FRAME: u32 = (64 << 10) - 9;
/// The maximum size of a read from a socket, and of the bytes that wait in the library for the tunnel's socket: whole
/// frames.
const LARGE: usize = 4 * FRAME as usize;
/// The size of a read from a tunnel's socket in bytes; TLS alone reads 4 KiB at a time. The kernel provides the buffer's
/// memory as reads fill it.
const READ: usize = 64 << 10;
/// The maximum size of a request's headers in bytes.
const HEADERS: u32 = 16 << 10;
/// The maximum memory that the library spends on small frames that were not read, in bytes.
const SMALL_FRAMES: usize = 16 << 20;

/// The state that all threads share.
struct Core<I> {
    settings: Settings,
    identities: Arc<I>,
    trust: Trust,
    registry: Arc<Registry>,
    budget: Arc<Budget>,
    bounds: Arc<Bounds>,
    /// The maximum number of tunnels of the process in one direction.
    most: usize,
    /// The outbound tunnels of each thread.
    pools: Box<[Pool]>,
}

/// The tunnels of the process. Dropping it ends them.
pub struct Tunnels<I> {
    core: Arc<Core<I>>,
    workers: Workers,
}

impl<I: Identities + 'static> Tunnels<I> {
    /// Starts the threads. A thread that dies reports to `deaths`. When the roots change, tunnels end whose peers the new
    /// roots do not allow.
    ///
    /// # Errors
    /// If a thread cannot be started, or the limit of open files cannot be read.
    pub fn start(settings: Settings, identities: Arc<I>, deaths: &Deaths) -> io::Result<Self> {
        let threads = match settings.threads {
            0 => available_parallelism().map_or(1, Into::into),
            count => count,
        };
        let most = match settings.tunnels_of_process {
            Some(most) => most,
            None => TUNNELS.0.min(raise_open_files()? / TUNNELS.1),
        };
        let workers = Workers::start(threads, deaths)?;
        let mut roots = identities.roots();
        let core = Arc::new(Core {
            trust: Trust::new(roots.clone()),
            registry: Arc::default(),
            budget: Arc::new(Budget::new(settings.buffered)),
            bounds: Arc::new(Bounds::new(&settings, most)),
            most,
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
                // Runs on its own thread: with many tunnels it takes long, and this thread carries data.
                let ended = spawn_blocking(move || {
                    // Roots that cannot be read allow no new tunnel. Established tunnels stay.
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

    /// Runs `work` on the thread with the fewest tasks.
    fn outbound<F: Future<Output = ()> + Send + 'static>(
        &self,
        work: impl FnOnce(Outbound<I>) -> F,
    ) {
        let worker = least(self.workers.all());
        worker.spawn(work(Outbound::new(&self.core, worker)));
    }

    /// Accepts the tunnels to the workload of an attachment, with the identity `own`, until the result is dropped.
    ///
    /// # Errors
    /// If the socket cannot be used.
    fn listen(
        &self,
        listener: TcpListener,
        (attachment, own): (u64, Identity),
        inbound: Arc<impl Inbound>,
    ) -> io::Result<Listening> {
        let of = (attachment, own);
        inbound::listen(&self.core, self.workers.all(), listener, of, inbound)
    }

    /// Ends outbound tunnels by their attachment and the UID of their destination, also pending ones.
    fn end_outbound(&self, is_meant: impl Fn(u64, &str) -> bool) {
        for pool in &self.core.pools {
            pool.forget(&is_meant);
        }
        let is_its = |tunnel: &Tunnel| {
            let uid = tunnel.workload.as_deref();
            uid.is_some_and(|uid| is_meant(tunnel.attachment, uid))
        };
        self.core.registry.end_if(is_its);
    }

    /// Returns the number of open files that tunnels of both directions may take, and each workload's.
    ///
    /// A tunnel with a stream takes none of these: the stream has no socket of its own, and connections count two files.
    fn files(&self) -> (usize, usize) {
        (2 * self.core.most, FILES_OF_WORKLOAD)
    }

    /// Returns the bytes that all streams hold for slow sockets, and their maximum.
    fn held(&self) -> [usize; 2] {
        self.core.budget.held()
    }

    /// Returns the established tunnels of both directions.
    fn tunnels(&self) -> Vec<Arc<Tunnel>> {
        self.core.registry.all()
    }
}
