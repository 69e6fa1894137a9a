//! Limits for those who ask the agent's ports: how many at the same time, and how long a connection may
//! say nothing.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// Connections of a port at the same time. More wait in the kernel.
const CONNECTIONS: usize = 64;
/// The same of a port that load balancers ask.
const CHECKS: usize = 256;
/// How long a connection may stand still: before a request, within one, or with an answer that nobody
/// reads.
const IDLE: Duration = Duration::from_mins(1);

/// A listener whose connections are limited.
#[derive(Debug)]
pub struct Limited<L> {
    listener: L,
    free: Arc<Semaphore>,
    idle: Duration,
}

impl<L> Limited<L> {
    /// With the usual limits.
    pub fn new(listener: L) -> Self {
        Self::with(listener, CONNECTIONS, IDLE)
    }

    /// For load balancers' health checks, of which many may keep their connections.
    pub fn for_checks(listener: L) -> Self {
        Self::with(listener, CHECKS, IDLE)
    }

    fn with(listener: L, connections: usize, idle: Duration) -> Self {
        Self {
            listener,
            free: Arc::new(Semaphore::new(connections)),
            idle,
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
        let connection = Connection {
            io,
            _place: place,
            idle: self.idle,
            ends: Box::pin(sleep(self.idle)),
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
    _place: Option<OwnedSemaphorePermit>,
    idle: Duration,
    /// When it ends if nothing happens.
    ends: Pin<Box<Sleep>>,
}

impl<I> Connection<I> {
    /// Looks at the clock: whether something has happened, or the time is up.
    fn in_time<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.ends.as_mut().reset(Instant::now() + self.idle);
            return result;
        }
        self.ends
            .as_mut()
            .poll(context)
            .map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Connection<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_read(context, buffer);
        self.in_time(context, result)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Connection<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(context, bytes);
        self.in_time(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
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
        let limited = Limited::with(listener, 2, idle);
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
}
