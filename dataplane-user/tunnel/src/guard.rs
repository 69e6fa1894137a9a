//! A transport that limits the rate of frames that cost the receiver more than the sender.
//!
//! The HTTP/2 library bounds memory. This transport bounds the CPU time for PING, SETTINGS, RST_STREAM, PRIORITY, GOAWAY,
//! WINDOW_UPDATE, unknown frames, and DATA without bytes.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Instant,
};

use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The preface of a client, before its first frame.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
const HEADER: usize = 9;
/// Frames that a peer may send in a burst, and in each second: they take some 10 ms of a CPU.
const FRAMES: u32 = 10_000;
/// The number of transferred bytes that permit one more frame: receivers send WINDOW_UPDATE in proportion to the bytes.
const BYTES_FOR_FRAME: u32 = 4 << 10;

/// The state of a peer, as the transport of its tunnel observes it.
#[derive(Debug, Default)]
pub struct PeerState {
    /// The number of bytes that the peer has sent.
    bytes: AtomicU64,
    /// Whether the peer's first frame was SETTINGS, as HTTP/2 demands.
    speaks: AtomicBool,
    /// The kind of frames by which the peer exceeded the limit.
    flood: OnceLock<&'static str>,
    /// The alert by which the peer ended TLS.
    alert: OnceLock<AlertDescription>,
}

impl PeerState {
    /// Returns the number of bytes that the peer has sent.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns whether the peer's first frame was SETTINGS, as HTTP/2 demands.
    pub fn speaks(&self) -> bool {
        self.speaks.load(Ordering::Relaxed)
    }

    /// Returns the kind of frames by which the peer exceeded the limit.
    pub fn flood(&self) -> Option<&'static str> {
        self.flood.get().copied()
    }

    /// Records the kind of frames by which the peer exceeded the limit.
    pub fn set_flood(&self, what: &'static str) {
        // Keeps the first kind.
        let _ = self.flood.set(what);
    }

    /// Returns the alert by which the peer ended TLS.
    pub fn alert(&self) -> Option<AlertDescription> {
        self.alert.get().copied()
    }
}

/// A token bucket, which limits the rate of events.
#[derive(Debug)]
pub struct Bucket {
    left: u32,
    most: u32,
    rate: u32,
    at: Instant,
}

impl Bucket {
    /// Makes a full bucket. `most`: events in a burst. `rate`: events in a second.
    pub fn new(most: u32, rate: u32) -> Self {
        Self {
            left: most,
            most,
            rate,
            at: Instant::now(),
        }
    }

    /// Takes a permit. Returns `false` if there is none.
    pub fn take(&mut self) -> bool {
        if self.left == 0 {
            let since = u32::try_from(self.at.elapsed().as_millis()).unwrap_or(u32::MAX);
            self.add(since.saturating_mul(self.rate) / 1000);
            self.at = Instant::now();
        }
        let taken = self.left > 0;
        self.left = self.left.saturating_sub(1);
        taken
    }

    fn add(&mut self, permits: u32) {
        self.left = self.left.saturating_add(permits).min(self.most);
    }
}

/// A transport that limits the peer's frames.
#[derive(Debug)]
pub struct Guard<T> {
    inner: T,
    peer_state: Arc<PeerState>,
    permits: Bucket,
    /// Bytes transferred since they last permitted a frame.
    passed: u32,
    /// Bytes to skip until the next frame.
    skip: usize,
    header: [u8; HEADER],
    is_first: bool,
    /// The number of bytes of the header that were read.
    read: usize,
    /// The error of the write that failed.
    failed: Option<(io::ErrorKind, String)>,
}

impl<T> Guard<T> {
    /// Wraps a transport. `is_client`: the peer begins with the preface.
    pub fn new(inner: T, is_client: bool, peer_state: Arc<PeerState>) -> Self {
        Self {
            inner,
            peer_state,
            permits: Bucket::new(FRAMES, FRAMES),
            passed: 0,
            skip: if is_client { PREFACE } else { 0 },
            header: [0; HEADER],
            is_first: true,
            read: 0,
            failed: None,
        }
    }

    fn pass(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.passed = self.passed.saturating_add(bytes);
        self.permits.add(self.passed / BYTES_FOR_FRAME);
        self.passed %= BYTES_FOR_FRAME;
    }

    fn count(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        self.pass(bytes.len());
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let count = (HEADER - self.read).min(bytes.len());
            self.header[self.read..self.read + count].copy_from_slice(&bytes[..count]);
            self.read += count;
            bytes = &bytes[count..];
            if self.read == HEADER {
                self.read = 0;
                let [high, middle, low, kind, flags, ..] = self.header;
                self.skip = u32::from_be_bytes([0, high, middle, low]) as usize;
                if std::mem::take(&mut self.is_first) && kind == 4 {
                    self.peer_state.speaks.store(true, Ordering::Relaxed);
                }
                let what = match (kind, self.skip) {
                    // END_STREAM comes once for each stream.
                    (0, 0) if flags & 1 == 0 => "DATA without bytes",
                    (0 | 1 | 5 | 9, _) => continue,
                    (2, _) => "PRIORITY",
                    (3, _) => "RST_STREAM",
                    (4, _) => "SETTINGS",
                    (6, _) => "PING",
                    (7, _) => "GOAWAY",
                    (8, _) => "WINDOW_UPDATE",
                    _ => "frames of an unknown kind",
                };
                if !self.permits.take() {
                    return Err(what);
                }
            }
        }
        Ok(())
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Guard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(self.read(cx, buffer))?;
        let bytes = &buffer.filled()[before..];
        self.peer_state
            .bytes
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Poll::Ready(self.count(bytes).map_err(|what| {
            self.peer_state.set_flood(what);
            io::Error::other(format!("flood of {what}"))
        }))
    }
}

impl<T: AsyncRead + Unpin> Guard<T> {
    /// Reads, and records an alert.
    fn read(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        if let Poll::Ready(Err(error)) = &read {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
            if let Some(rustls::Error::AlertReceived(alert)) = inner {
                let _ = self.peer_state.alert.set(*alert);
            }
        }
        read
    }

    /// Returns the result of a write. If the write fails, first reads the bytes that the peer sent before it closed its
    /// socket: they may be an alert, which names the cause. The socket is broken, so these reads end.
    fn written<R>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut T>, &mut Context<'_>) -> Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if self.failed.is_none() {
            match ready!(write(Pin::new(&mut self.inner), cx)) {
                Ok(result) => return Poll::Ready(Ok(result)),
                // The peer has closed nothing, and its bytes may never end.
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    return Poll::Ready(Err(error));
                }
                Err(error) => self.failed = Some((error.kind(), error.to_string())),
            }
        }
        let mut scratch = [0; 256];
        loop {
            let mut buffer = ReadBuf::new(&mut scratch);
            let read = ready!(self.read(cx, &mut buffer));
            let count = buffer.filled().len() as u64;
            self.peer_state.bytes.fetch_add(count, Ordering::Relaxed);
            if read.is_err() || count == 0 {
                let failed = self.failed.clone();
                let (kind, text) = failed.unwrap_or((io::ErrorKind::BrokenPipe, String::new()));
                return Poll::Ready(Err(io::Error::new(kind, text)));
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guard<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.written(cx, |inner, cx| inner.poll_write(cx, bytes)))?;
        self.pass(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = |inner: Pin<&mut T>, cx: &mut Context<'_>| inner.poll_write_vectored(cx, bytes);
        let written = ready!(self.written(cx, write))?;
        self.pass(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.written(cx, AsyncWrite::poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(length: u8, kind: u8, flags: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        frame.resize(HEADER + usize::from(length), 0xff);
        frame
    }

    /// Feeds frames in pieces of this size, and returns the number of permitted frames; `None`: all of them.
    fn permitted(frame: &[u8], piece: usize) -> Option<usize> {
        let mut guard = Guard::new((), true, Arc::default());
        guard.permits = Bucket::new(100, 0);
        guard.count(&[b'x'; PREFACE]).unwrap();
        let all: Vec<u8> = frame.repeat(200);
        let mut fed = 0;
        for bytes in all.chunks(piece) {
            if guard.count(bytes).is_err() {
                return Some(fed / frame.len());
            }
            fed += bytes.len();
        }
        None
    }

    #[test]
    fn frames_that_cost_are_counted_however_they_are_cut() {
        for (frame, counted) in [
            (frame(8, 6, 0), true),
            (frame(0, 4, 0), true),
            (frame(4, 3, 0), true),
            (frame(4, 8, 0), true),
            (frame(5, 2, 0), true),
            (frame(0, 0, 0), true),
            (frame(7, 99, 0), true),
            (frame(0, 0, 1), false),
            (frame(9, 0, 0), false),
            (frame(30, 1, 5), false),
        ] {
            for piece in [1, 2, 8, 9, 10, 13, 500] {
                let permitted = permitted(&frame, piece);
                let least = 99 - piece.min(900) / frame.len();
                let about = permitted.is_some_and(|count| (least..=110).contains(&count));
                assert_eq!(about, counted, "{frame:?} in {piece}: {permitted:?}");
            }
        }
    }

    #[test]
    fn bytes_permit_frames() {
        let mut guard = Guard::new((), false, Arc::default());
        guard.permits = Bucket::new(2, 0);
        for _ in 0..1000 {
            guard.count(&frame(4, 8, 0)).unwrap();
            guard.pass(16 << 10);
        }
    }
}
