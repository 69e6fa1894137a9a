//! Limits for clients of the agent's ports: how many connections there are at the same time, how long a connection may
//! be silent, how long a request may take to arrive, and how long a client may take to read the answer.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::places::{Phase, Place, Places, Share, Shared};

/// Connections of a port at the same time. For a further one, [another ends](super::places).
const CONNECTIONS: usize = 64;
/// Connections of a port for load balancers at the same time.
const CHECKS: usize = 256;
/// Connections of all services' ports for health checks together. Authors of services decide how many ports there are.
const ALL_CHECKS: usize = 1024;
/// How long a connection may stay without a request.
const IDLE: Duration = Duration::from_mins(1);
/// How long a request may take from its first byte to the first byte of its answer, whatever arrives meanwhile. The
/// agent makes an answer in milliseconds, but only a few answers at the same time.
const REQUEST: Duration = Duration::from_secs(20);
/// How long a client may take to read an answer, from its first byte on, however little it reads at a time. Metrics
/// of 10 000 services are a megabyte.
const ANSWER: Duration = Duration::from_mins(1);

/// A listener whose connections are limited.
#[derive(Debug)]
pub struct Limited<L> {
    listener: L,
    places: Arc<Places>,
    shared: Option<Arc<Shared>>,
    times: Times,
}

/// The places of all services' ports for health checks.
pub fn all_checks() -> Arc<Shared> {
    Arc::new(Shared::new(ALL_CHECKS))
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
    /// Applies the usual limits.
    pub fn new(listener: L) -> Self {
        Self::with(listener, CONNECTIONS, Times::default())
    }

    /// Applies the limits for load balancers' health checks, because many load balancers may keep their connections.
    pub fn for_checks(listener: L) -> Self {
        Self::with(listener, CHECKS, Times::default())
    }

    /// As [`Limited::for_checks`], for a port that shares connections with others.
    pub fn sharing(self, shared: &Arc<Shared>) -> Self {
        shared.add(&self.places);
        Self {
            shared: Some(Arc::clone(shared)),
            ..self
        }
    }

    fn with(listener: L, connections: usize, times: Times) -> Self {
        Self {
            listener,
            places: Places::new(connections),
            shared: None,
            times,
        }
    }
}

impl<L: Listener<Addr = SocketAddr>> Listener for Limited<L> {
    type Io = Connection<L::Io>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, addr) = self.listener.accept().await;
        let place = self.places.take(addr.ip()).await;
        let share = match &self.shared {
            Some(shared) => Some(Arc::clone(shared).take(&place).await),
            None => None,
        };
        let connection = Connection {
            io,
            place,
            _share: share,
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

/// A connection that keeps its place until it is closed.
#[derive(Debug)]
pub struct Connection<I> {
    io: I,
    place: Place,
    _share: Option<Share>,
    times: Times,
    phase: Phase,
    /// When the phase ends, and with it the connection.
    ends: Pin<Box<Sleep>>,
}

impl<I> Connection<I> {
    /// Begins a phase, if the connection is not in it already.
    fn begin(&mut self, phase: Phase) {
        if self.phase == phase {
            return;
        }
        let now = Instant::now();
        let ends = match phase {
            Phase::Idle => now + self.times.idle,
            // A request may arrive while the client reads the answer to the one before: that answer keeps its time.
            Phase::Request if self.phase == Phase::Answer => {
                self.ends.deadline().max(now + self.times.request)
            }
            Phase::Request => now + self.times.request,
            Phase::Answer => now + self.times.answer,
        };
        self.phase = phase;
        self.ends.as_mut().reset(ends);
        self.place.begin(phase);
    }

    /// Waits no longer than the phase lasts, and only until another connection needs the place.
    fn in_time<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            return result;
        }
        if Pin::new(&mut self.place.ends).poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
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

    // Makes the server send an answer from where it lies: otherwise it copies each answer for each client.
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
        net::{TcpListener, TcpSocket, TcpStream},
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

    /// Connects from an address of loopback.
    async fn from(client: [u8; 4], at: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((client, 0).into()).unwrap();
        socket.connect(at).await.unwrap()
    }

    /// Returns how many of these connections the server has not closed.
    async fn are_open(clients: &mut [TcpStream]) -> usize {
        let mut open = 0;
        for client in clients {
            let mut rest = [0; 4096];
            loop {
                match timeout(SOON / 6, client.read(&mut rest)).await {
                    Ok(Ok(1..)) => {}
                    Ok(_) => break,
                    Err(_) => {
                        open += 1;
                        break;
                    }
                }
            }
        }
        open
    }

    const HOG: [u8; 4] = [127, 0, 0, 2];
    const OTHER: [u8; 4] = [127, 0, 0, 3];
    const THIRD: [u8; 4] = [127, 0, 0, 4];

    #[tokio::test]
    async fn a_client_that_takes_all_places_keeps_nobody_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let limited = Limited::with(listener, 8, Times::default());
        let router = Router::new().route("/", get(async || "hello"));
        let server = tokio::spawn(async { axum::serve(limited, router).await });
        let mut other = from(OTHER, at).await;
        assert!(asks(&mut other).await);
        // Some are silent, others send requests and keep the connection.
        let mut hogs = Vec::new();
        for n in 0..20 {
            let mut hog = from(HOG, at).await;
            assert!(n % 3 != 0 || asks(&mut hog).await, "{n}");
            hogs.push(hog);
        }
        let mut third = from(THIRD, at).await;
        assert!(asks(&mut third).await);
        // A client with few connections keeps them.
        let mut few = [other, third];
        assert_eq!(are_open(&mut few).await, 2);
        assert_eq!(are_open(&mut hogs).await, 6);
        for client in &mut few {
            assert!(asks(client).await);
        }
        server.abort();
    }

    #[tokio::test]
    async fn a_connection_that_says_nothing_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let idle = SOON * 4;
        let times = Times {
            idle,
            ..Times::default()
        };
        let limited = Limited::with(listener, 8, times);
        let router = Router::new().route("/", get(async || "hello"));
        let server = tokio::spawn(async { axum::serve(limited, router).await });
        let mut clients = [from(HOG, at).await, from(HOG, at).await];
        assert!(asks(&mut clients[0]).await);
        assert_eq!(are_open(&mut clients).await, 2);
        sleep(idle).await;
        assert_eq!(are_open(&mut clients).await, 0);
        server.abort();
    }

    #[tokio::test]
    async fn of_ports_that_share_the_one_with_most_connections_loses_one() {
        const PORTS: usize = 20;
        let shared = Arc::new(Shared::new(PORTS + 4));
        let mut ports = Vec::new();
        for _ in 0..PORTS {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let limited = Limited::with(listener, 100, Times::default()).sharing(&shared);
            let router = Router::new().route("/", get(async || "hello"));
            let server = tokio::spawn(async { axum::serve(limited, router).await });
            ports.push((at, server));
        }
        // The clients of all ports but one try to take all places, one port after the other.
        let mut hogs = Vec::new();
        for (at, _) in &ports[1..] {
            for _ in 0..PORTS + 10 {
                let mut hog = from(HOG, *at).await;
                assert!(
                    asks(&mut hog).await,
                    "a client's newest connection is its own"
                );
                hogs.push(hog);
            }
        }
        let mut other = [from(OTHER, ports[0].0).await];
        assert!(asks(&mut other[0]).await);
        for (at, _) in &ports[1..] {
            let mut hog = from(HOG, *at).await;
            assert!(asks(&mut hog).await);
            hogs.push(hog);
        }
        assert_eq!(are_open(&mut other).await, 1);
        let open = are_open(&mut hogs).await;
        assert!((PORTS..PORTS + 4).contains(&open), "{open}");
        for (_, server) in ports {
            server.abort();
        }
    }

    /// More bytes than the sockets' buffers hold, that a client may still read within a test.
    const MUCH: usize = 32 << 20;

    /// A client that sends a request a byte at a time, and a client that reads its answer a byte at a time.
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
