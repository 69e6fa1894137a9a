//! Limits for clients of the agent's ports: how many connections there are at the same time, how long a connection may
//! say nothing, how long a request may take to arrive, and how long a client may take to read the answer.

use std::{
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// Connections of a port at the same time. More wait in the kernel.
const CONNECTIONS: usize = 64;
/// The same of a port that load balancers ask.
const CHECKS: usize = 256;
/// The same of all services' ports for health checks together. Authors of services decide how many ports there are.
const ALL_CHECKS: usize = 1024;
/// How long a connection may stay without a request.
const IDLE: Duration = Duration::from_mins(1);
/// How long a request may take from its first byte to its answer's first, whatever arrives meanwhile. The agent makes
/// an answer in milliseconds; several wait for each other.
const REQUEST: Duration = Duration::from_secs(20);
/// How long a client may take to read an answer, from its first byte on, however little it reads at a time. Metrics
/// of 10 000 services are a megabyte.
const ANSWER: Duration = Duration::from_mins(1);

/// A listener whose connections are limited.
#[derive(Debug)]
pub struct Limited<L> {
    listener: L,
    connections: usize,
    free: Arc<Semaphore>,
    shared: Option<Arc<Shared>>,
    times: Times,
}

/// Connections that several ports have together. A port has at most as many as are free, so a port whose clients take
/// all that they can get leaves some for each other port.
#[derive(Debug)]
pub struct Shared {
    max: usize,
    open: AtomicUsize,
    closed: Notify,
}

impl Default for Shared {
    fn default() -> Self {
        Self::new(ALL_CHECKS)
    }
}

impl Shared {
    fn new(max: usize) -> Self {
        Self {
            max,
            open: AtomicUsize::new(0),
            closed: Notify::new(),
        }
    }

    /// Waits until a port may have another connection. `own`: how many it has with that one.
    async fn take(self: Arc<Self>, own: impl Fn() -> usize) -> Share {
        loop {
            let mut closed = pin!(self.closed.notified());
            closed.as_mut().enable();
            let open = self.open.load(Ordering::Relaxed);
            if own() <= self.max.saturating_sub(open) {
                self.open.fetch_add(1, Ordering::Relaxed);
                return Share(Arc::clone(&self));
            }
            closed.await;
        }
    }
}

/// A connection's place among those of several ports.
#[derive(Debug)]
struct Share(Arc<Shared>);

impl Drop for Share {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.0.closed.notify_waiters();
    }
}

/// How long a connection may be in each phase.
#[derive(Clone, Copy, Debug)]
struct Times {
    idle: Duration,
    request: Duration,
    answer: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            idle: IDLE,
            request: REQUEST,
            answer: ANSWER,
        }
    }
}

impl<L> Limited<L> {
    /// With the usual limits.
    pub fn new(listener: L) -> Self {
        Self::with(listener, CONNECTIONS, Times::default())
    }

    /// For load balancers' health checks, of which many may keep their connections.
    pub fn for_checks(listener: L) -> Self {
        Self::with(listener, CHECKS, Times::default())
    }

    /// Likewise, for a port that shares connections with others.
    pub fn sharing(self, shared: &Arc<Shared>) -> Self {
        Self {
            shared: Some(Arc::clone(shared)),
            ..self
        }
    }

    fn with(listener: L, connections: usize, times: Times) -> Self {
        Self {
            listener,
            connections,
            free: Arc::new(Semaphore::new(connections)),
            shared: None,
            times,
        }
    }
}

impl<L: Listener> Listener for Limited<L> {
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // It is never closed, so this never fails.
        let place = Arc::clone(&self.free).acquire_owned().await.ok();
        let (io, addr) = self.listener.accept().await;
        // Only with a client: an idle port has none of what ports share.
        let share = match &self.shared {
            Some(shared) => {
                let own = || self.connections - self.free.available_permits();
                Some(Arc::clone(shared).take(own).await)
            }
            None => None,
        };
        let connection = Connection {
            io,
            _place: (place, share),
            times: self.times,
            phase: Phase::Idle,
            ends: Box::pin(sleep(self.times.idle)),
        };
        (connection, addr)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that has its place until it is closed.
#[derive(Debug)]
pub struct Connection<I> {
    io: I,
    _place: (Option<OwnedSemaphorePermit>, Option<Share>),
    times: Times,
    phase: Phase,
    /// When the phase ends, and with it the connection.
    ends: Pin<Box<Sleep>>,
}

/// What a connection is waiting for. Bytes that arrive or leave within a phase do not extend it: a client that sends or
/// reads a byte at a time would keep its connection for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// For a request: the connection is new, or its last answer has been sent.
    Idle,
    /// For the rest of a request, and for its answer.
    Request,
    /// For the client to read its answer.
    Answer,
}

impl<I> Connection<I> {
    /// Begins a phase, unless the connection is in it.
    fn begin(&mut self, phase: Phase) {
        if self.phase == phase {
            return;
        }
        let now = Instant::now();
        let ends = match phase {
            Phase::Idle => now + self.times.idle,
            // A request may arrive while the answer to the one before it is read: that one keeps its time.
            Phase::Request if self.phase == Phase::Answer => {
                self.ends.deadline().max(now + self.times.request)
            }
            Phase::Request => now + self.times.request,
            Phase::Answer => now + self.times.answer,
        };
        self.phase = phase;
        self.ends.as_mut().reset(ends);
    }

    /// Waits no longer than the phase lasts.
    fn in_time<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            return result;
        }
        let ended = self.ends.as_mut().poll(context);
        ended.map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Connection<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.io).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.begin(Phase::Request);
        }
        self.in_time(context, result)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Connection<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.begin(Phase::Answer);
        let result = Pin::new(&mut self.io).poll_write(context, bytes);
        self.in_time(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(context);
        // Called when the HTTP server has nothing left to write.
        if result.is_ready() && self.phase == Phase::Answer {
            self.begin(Phase::Idle);
        }
        self.in_time(context, result)
    }

    // So that the server sends an answer from where it lies: else it copies each for each client.
    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.begin(Phase::Answer);
        let result = Pin::new(&mut self.io).poll_write_vectored(context, buffers);
        self.in_time(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, routing::get};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    use super::*;

    const SOON: Duration = Duration::from_millis(300);

    async fn asks(stream: &mut TcpStream) -> bool {
        let request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut answer = [0; 12];
        let answered = timeout(SOON, stream.read_exact(&mut answer)).await;
        answered.is_ok_and(|read| read.is_ok()) && &answer == b"HTTP/1.1 200"
    }

    #[tokio::test]
    async fn more_connections_wait_until_others_end_or_have_said_nothing_for_too_long() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let idle = SOON * 4;
        let times = Times {
            idle,
            ..Times::default()
        };
        let limited = Limited::with(listener, 2, times);
        let router = Router::new().route("/", get(async || "hello"));
        let server = tokio::spawn(async { axum::serve(limited, router).await });
        let connect = async || TcpStream::connect(at).await.unwrap();
        let (mut first, mut second) = (connect().await, connect().await);
        assert!(asks(&mut first).await && asks(&mut second).await);
        let mut third = connect().await;
        assert!(!asks(&mut third).await, "a third one at the same time");
        drop(first);
        // What it has asked is answered now.
        let mut answer = [0; 12];
        let read = timeout(idle, third.read_exact(&mut answer)).await;
        assert!(read.is_ok_and(|read| read.is_ok()));
        // The two that there are say nothing more.
        let mut fourth = connect().await;
        assert!(!asks(&mut fourth).await);
        let read = timeout(idle * 3, fourth.read_exact(&mut answer)).await;
        assert!(read.is_ok_and(|read| read.is_ok()));
        server.abort();
    }

    #[tokio::test]
    async fn ports_that_share_leave_each_other_some() {
        let shared = Arc::new(Shared::new(6));
        let mut ports = Vec::new();
        for _ in 0..3 {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let limited = Limited::with(listener, 100, Times::default()).sharing(&shared);
            let router = Router::new().route("/", get(async || "hello"));
            let server = tokio::spawn(async { axum::serve(limited, router).await });
            ports.push((at, server));
        }
        let fill = async |at| {
            let mut answered = Vec::new();
            loop {
                let mut client = TcpStream::connect(at).await.unwrap();
                if !asks(&mut client).await {
                    return answered;
                }
                answered.push(client);
            }
        };
        let first = fill(ports[0].0).await;
        let second = fill(ports[1].0).await;
        let third = fill(ports[2].0).await;
        let have = [first.len(), second.len(), third.len()];
        assert!(have.iter().all(|count| *count >= 1), "{have:?}");
        assert!(have.iter().sum::<usize>() <= 6, "{have:?}");
        drop(first);
        assert!(
            !fill(ports[2].0).await.is_empty(),
            "places that are free again"
        );
        for (_, server) in ports {
            server.abort();
        }
    }

    /// Bytes that a client may read within a test, which are more than the sockets' buffers hold.
    const MUCH: usize = 32 << 20;

    /// A client that sends a request a byte at a time, and one that reads its answer so.
    #[tokio::test]
    async fn a_byte_at_a_time_gains_no_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let times = Times {
            idle: SOON * 20,
            request: SOON,
            answer: SOON * 2,
        };
        let limited = Limited::with(listener, 8, times);
        let router = Router::new()
            .route("/", get(async || "hello"))
            .route("/much", get(async || vec![b'x'; MUCH]));
        let server = tokio::spawn(async { axum::serve(limited, router).await });

        let mut slow = TcpStream::connect(at).await.unwrap();
        let mut ended = false;
        for byte in b"GET / HTTP/1.1\r\nhost: x\r\nx-long: xxxxxxxxxxxxxxxxxxxx" {
            let sent = slow.write_all(&[*byte]).await;
            sleep(SOON / 10).await;
            let closed = timeout(Duration::from_millis(1), slow.read(&mut [0])).await;
            ended |= sent.is_err() || closed.is_ok();
        }
        assert!(ended, "a request may take for ever");

        let mut slow = TcpStream::connect(at).await.unwrap();
        let request = b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n";
        slow.write_all(request).await.unwrap();
        let mut read = 0;
        let all = timeout(times.answer * 10, async {
            let mut buffer = vec![0; MUCH / 200];
            while let Ok(more @ 1..) = slow.read(&mut buffer).await {
                read += more;
                sleep(SOON / 10).await;
            }
        });
        assert!(all.await.is_ok() && read < MUCH, "{read} of {MUCH} bytes");

        // A connection that asks again and again outlives all of these times.
        let mut steady = TcpStream::connect(at).await.unwrap();
        for _ in 0..4 {
            assert!(asks(&mut steady).await);
            let rest = timeout(SOON, async {
                let mut rest = [0; 256];
                while steady.read(&mut rest).await.is_ok() {}
            });
            assert!(rest.await.is_err(), "closed while in use");
        }
        server.abort();
    }
}
