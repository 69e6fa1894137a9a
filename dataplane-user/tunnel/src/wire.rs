//! The socket of a tunnel, which gives up a peer that takes no bytes.
//!
//! A peer that sends bytes and takes none is never silent, so without a limit bytes would wait for it for ever. The kernel's limit
//! (`TCP_USER_TIMEOUT`) does not end such a connection: each acknowledgement with a closed window restarts the timer of the window
//! probes (`tcp_ack_probe` in `net/ipv4/tcp_input.c`), so a peer that sends every few milliseconds keeps the timer from expiring.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use relay::socket;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// The part of the limit for which a write waits before the kernel is asked for the acknowledged bytes: most writes wait for less.
const FIRST: u32 = 8;

/// The socket of a tunnel.
#[derive(Debug)]
pub struct Wire {
    socket: TcpStream,
    /// The time without an acknowledged byte after which a write that waits fails.
    limit: Duration,
    /// The state of a write that waits.
    waits: Option<Waits>,
}

/// A write that waits until the socket takes bytes.
#[derive(Clone, Copy, Debug)]
struct Waits {
    since: Instant,
    /// The bytes that the peer had acknowledged at this time; `None`: not asked.
    acknowledged: Option<u64>,
}

impl Wire {
    /// Wraps a socket. A write fails with [`io::ErrorKind::TimedOut`] if it waits and the peer acknowledges no byte for the time
    /// `limit`. The time is checked at each attempt to write.
    pub fn new(socket: TcpStream, limit: Duration) -> Self {
        Self {
            socket,
            limit,
            waits: None,
        }
    }

    /// Returns the result of a write, or the error if the peer takes no bytes.
    fn check(&mut self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.waits = None;
            return written;
        }
        let now = Instant::now();
        let new = |acknowledged| Waits {
            since: now,
            acknowledged,
        };
        let waits = *self.waits.get_or_insert(new(None));
        if now - waits.since < self.limit / FIRST {
            return Poll::Pending;
        }
        let acknowledged = Some(socket::acknowledged(&self.socket)?);
        if waits.acknowledged != acknowledged {
            self.waits = Some(new(acknowledged));
        } else if now - waits.since >= self.limit {
            // The kernel holds bytes, too, and would go on trying.
            socket::reset_on_close(&self.socket);
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Pending
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.check(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, bytes);
        self.check(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
