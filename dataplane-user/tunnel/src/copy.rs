//! Copies between a socket and a stream of a tunnel, both ways.
//!
//! An idle stream holds no buffer: a thread reads into one buffer that all of its streams share. What the stream's peer
//! has sent stays in the HTTP/2 library's buffers until the socket takes it; the stream's window bounds it, and
//! [`Held`] bounds the sum.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::{Future, poll_fn},
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use model::Identity;
use relay::socket::reset_on_close;
use rustix::net::{Shutdown, shutdown};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::Notify,
    time::{Sleep, sleep},
};

use super::{FRAME, tunnel::Lease};

/// The most that is read from a socket at a time, and that waits in the library for the tunnel's socket: whole frames.
pub const LARGE: usize = 4 * FRAME as usize;
/// The most that is read at a time from a socket that has not shown yet that it has more.
const SMALL: usize = 16 << 10;
/// Reads up to this size are copied, so that a few bytes do not keep the shared buffer alive.
const COPIED: usize = 4 << 10;
/// Pieces that one write takes.
const PIECES: usize = 64;
/// Reads or writes in a row, before other streams of the thread are served.
const TURNS: usize = 8;
/// The window of a stream: a single stream fills 10 Gbit/s at a round trip of 1.6 ms.
pub const WINDOW: u32 = 2 << 20;
/// The window that a stream still gets while streams hold more than half of what they may.
const NARROW: usize = 128 << 10;
/// How long a socket takes nothing before its stream may be ended, if streams hold too much.
const STALLED: Duration = Duration::from_secs(1);

/// Buffers of a thread. The parts of one are in use while the next one is filled.
const BUFFERS: usize = 4;

thread_local! {
    static SHARED: RefCell<VecDeque<BytesMut>> = RefCell::default();
}

/// Bytes that all streams of the process hold for sockets that do not keep up.
#[derive(Debug)]
pub struct Held {
    bytes: AtomicUsize,
    streams: AtomicUsize,
    most: usize,
}

impl Held {
    /// Streams may hold so many bytes together.
    pub fn new(most: usize) -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
            most,
        }
    }

    /// Whether streams hold more than half of what they may.
    fn is_much(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.most / 2
    }

    /// Whether streams hold too much, and a stream with so many bytes is one of those to end.
    fn ends(&self, own: usize) -> bool {
        let all = self.bytes.load(Ordering::Relaxed);
        let streams = self.streams.load(Ordering::Relaxed).max(1);
        all > self.most && own >= all / streams
    }
}

/// The share of one stream in what is held.
#[derive(Debug)]
struct Share {
    all: Arc<Held>,
    own: usize,
}

impl Share {
    fn set(&mut self, own: usize) {
        let was = std::mem::replace(&mut self.own, own);
        if (own > 0) != (was > 0) {
            // Wraps around to one less.
            let change = if own > 0 { 1 } else { usize::MAX };
            self.all.streams.fetch_add(change, Ordering::Relaxed);
        }
        if own != was {
            let change = own.wrapping_sub(was);
            self.all.bytes.fetch_add(change, Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// A relayed connection, seen from elsewhere: what it has carried, and a way to end it.
#[derive(Debug, Default)]
pub struct Flow {
    bytes: [AtomicU64; 2],
    end: Notify,
}

impl Flow {
    /// Bytes that the socket has sent, and that the socket has taken.
    pub fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|way: usize| self.bytes[way].load(Ordering::Relaxed))
    }

    /// Resets both sides.
    pub fn end(&self) {
        self.end.notify_one();
    }

    /// Waits for [`Flow::end`], before there is a stream.
    pub async fn until_end(&self) {
        self.end.notified().await;
    }

    fn add(&self, way: usize, bytes: usize) {
        // Only one task writes.
        let before = self.bytes[way].load(Ordering::Relaxed);
        self.bytes[way].store(before + bytes as u64, Ordering::Relaxed);
    }
}

/// How a relayed connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// Both sides ended it.
    Closed,
    /// The socket's peer reset it.
    SocketReset,
    /// The tunnel's peer reset it, or the tunnel broke.
    StreamReset,
    /// The socket took nothing, and streams held too much.
    Stalled,
    /// [`Flow::end`] was called.
    Aborted,
}

/// A stream of a tunnel, after the answer 200.
#[derive(Debug)]
pub struct Stream {
    send: SendStream<Bytes>,
    recv: RecvStream,
    held: Arc<Held>,
    /// Last: the tunnel has one stream less.
    lease: Lease,
}

impl Stream {
    /// Joins the two directions of a stream.
    pub fn new(send: SendStream<Bytes>, recv: RecvStream, held: Arc<Held>, lease: Lease) -> Self {
        Self {
            send,
            recv,
            held,
            lease,
        }
    }

    /// The identity that the peer has proven.
    pub fn peer(&self) -> &Identity {
        &self.lease.0.proof.peer
    }

    /// Sends bytes that were read from the socket already, before [`Stream::copy`].
    pub fn send_first(&mut self, bytes: Vec<u8>, flow: &Flow) {
        let count = bytes.len();
        // Fails if the peer has reset the stream, which is seen by what follows.
        if self.send.send_data(bytes.into(), false).is_ok() {
            flow.add(0, count);
        }
    }

    /// Copies both ways until both sides have ended, or one is reset: then the other is reset, too.
    pub async fn copy(self, socket: TcpStream, flow: &Flow) -> CloseReason {
        let mut copy = Copy {
            socket: &socket,
            flow,
            send: self.send,
            up_size: SMALL,
            up_done: false,
            recv: self.recv,
            recv_done: false,
            down_done: false,
            reset: None,
            pending: VecDeque::new(),
            unreleased: 0,
            share: Share {
                all: self.held,
                own: 0,
            },
            blocked: None,
            timer: None,
        };
        let ended = tokio::select! {
            biased;
            ended = poll_fn(|cx| copy.poll(cx)) => ended,
            () = flow.end.notified() => CloseReason::Aborted,
            // A reset is seen also when nothing is read from the socket.
            _ = socket.ready(Interest::ERROR) => CloseReason::SocketReset,
        };
        match ended {
            CloseReason::Closed => return ended,
            CloseReason::StreamReset => {}
            CloseReason::SocketReset => copy.send.send_reset(Reason::CONNECT_ERROR),
            CloseReason::Stalled | CloseReason::Aborted => copy.send.send_reset(Reason::CANCEL),
        }
        reset_on_close(&socket);
        ended
    }
}

struct Copy<'a> {
    socket: &'a TcpStream,
    flow: &'a Flow,
    send: SendStream<Bytes>,
    /// The size of the next read.
    up_size: usize,
    /// The socket's end was passed on.
    up_done: bool,
    recv: RecvStream,
    /// The stream's end was read.
    recv_done: bool,
    /// The stream's end was passed on.
    down_done: bool,
    /// The peer has reset the stream.
    reset: Option<Reason>,
    /// What was read from the stream, and the socket has not taken.
    pending: VecDeque<Bytes>,
    /// Bytes that the socket has taken, and whose part of the window is kept.
    unreleased: usize,
    share: Share,
    /// Since when the socket takes nothing.
    blocked: Option<Instant>,
    /// Runs while the socket takes nothing.
    timer: Option<Pin<Box<Sleep>>>,
}

/// Which side broke.
type Step = Poll<Result<(), CloseReason>>;

impl Copy<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<CloseReason> {
        if self.reset.is_none()
            && !(self.up_done && self.recv_done)
            && let Poll::Ready(reset) = self.send.poll_reset(cx)
        {
            self.reset = Some(reset.unwrap_or(Reason::INTERNAL_ERROR));
        }
        if !self.down_done
            && let Poll::Ready(Err(ended)) = self.poll_down(cx)
        {
            return Poll::Ready(ended);
        }
        if let Some(reason) = self.reset {
            // What the peer sent before it comes first, if the peer has ended it.
            return match (self.down_done, reason) {
                (true, Reason::NO_ERROR) => Poll::Ready(CloseReason::Closed),
                (true, _) => Poll::Ready(CloseReason::StreamReset),
                (false, _) => Poll::Pending,
            };
        }
        if !self.up_done
            && let Poll::Ready(Err(ended)) = self.poll_up(cx)
        {
            return Poll::Ready(ended);
        }
        if self.up_done && self.down_done {
            return Poll::Ready(CloseReason::Closed);
        }
        Poll::Pending
    }

    /// From the socket to the stream.
    fn poll_up(&mut self, cx: &mut Context<'_>) -> Step {
        for _ in 0..TURNS {
            ready!(self.socket.poll_read_ready(cx)).map_err(|_| CloseReason::SocketReset)?;
            self.send.reserve_capacity(self.up_size);
            while self.send.capacity() == 0 {
                match ready!(self.send.poll_capacity(cx)) {
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return Poll::Ready(Err(CloseReason::StreamReset)),
                }
            }
            let most = self.up_size.min(self.send.capacity());
            match read(self.socket, most) {
                Ok(bytes) if bytes.is_empty() => {
                    let sent = self.send.send_data(bytes, true);
                    sent.map_err(|_| CloseReason::StreamReset)?;
                    self.up_done = true;
                    return Poll::Ready(Ok(()));
                }
                Ok(bytes) => {
                    let count = bytes.len();
                    let sent = self.send.send_data(bytes, false);
                    sent.map_err(|_| CloseReason::StreamReset)?;
                    self.flow.add(0, count);
                    if count == self.up_size {
                        self.up_size = (count * 2).min(LARGE);
                    } else if count < self.up_size / 4 {
                        self.up_size = (self.up_size / 2).max(SMALL);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Others may have the capacity.
                    self.send.reserve_capacity(0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Poll::Ready(Err(CloseReason::SocketReset)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// From the stream to the socket.
    fn poll_down(&mut self, cx: &mut Context<'_>) -> Step {
        for _ in 0..TURNS {
            self.receive(cx)?;
            if self.pending.is_empty() {
                if !self.recv_done {
                    return Poll::Pending;
                }
                shutdown(self.socket, Shutdown::Write).map_err(|_| CloseReason::SocketReset)?;
                self.down_done = true;
                return Poll::Ready(Ok(()));
            }
            match self.write() {
                Ok(count) => {
                    self.flow.add(1, count);
                    self.release(count)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.socket.poll_write_ready(cx).is_pending() {
                        return self.wait(cx);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Poll::Ready(Err(CloseReason::SocketReset)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Takes from the library what it has: it holds small frames at many times their size.
    fn receive(&mut self, cx: &mut Context<'_>) -> Result<(), CloseReason> {
        while !self.recv_done {
            match self.recv.poll_data(cx) {
                Poll::Ready(Some(Ok(bytes))) if bytes.is_empty() => {}
                Poll::Ready(Some(Ok(bytes))) => self.pending.push_back(bytes),
                Poll::Ready(Some(Err(_))) => return Err(CloseReason::StreamReset),
                Poll::Ready(None) => self.recv_done = true,
                Poll::Pending => break,
            }
        }
        if self.pending.len() > PIECES {
            // Joins the small ones.
            let mut joined: VecDeque<Bytes> = VecDeque::new();
            let mut piece = BytesMut::new();
            for bytes in self.pending.drain(..) {
                if bytes.len() >= COPIED && !piece.is_empty() {
                    joined.push_back(piece.split().freeze());
                }
                if bytes.len() >= COPIED {
                    joined.push_back(bytes);
                } else {
                    piece.extend_from_slice(&bytes);
                    if piece.len() >= COPIED {
                        joined.push_back(piece.split().freeze());
                    }
                }
            }
            if !piece.is_empty() {
                joined.push_back(piece.freeze());
            }
            self.pending = joined;
        }
        Ok(())
    }

    fn write(&mut self) -> io::Result<usize> {
        let mut count = if let [only] = self.pending.make_contiguous() {
            self.socket.try_write(only)?
        } else {
            let mut pieces = [IoSlice::new(&[]); PIECES];
            let filled = self.pending.iter().zip(&mut pieces);
            let filled = filled.map(|(bytes, piece)| *piece = IoSlice::new(bytes));
            let filled = filled.count();
            self.socket.try_write_vectored(&pieces[..filled])?
        };
        let written = count;
        while let Some(first) = self.pending.front_mut() {
            if first.len() > count {
                first.advance(count);
                break;
            }
            count -= first.len();
            self.pending.pop_front();
        }
        if self.pending.is_empty() {
            self.pending.shrink_to(PIECES);
        }
        Ok(written)
    }

    /// Gives the window back for bytes that the socket has taken: all of them, or fewer while streams hold much.
    fn release(&mut self, count: usize) -> Result<(), CloseReason> {
        self.blocked = None;
        self.timer = None;
        self.unreleased += count;
        let keep = if self.share.all.is_much() {
            WINDOW as usize - NARROW
        } else {
            0
        };
        let release = self.unreleased.saturating_sub(keep);
        self.unreleased -= release;
        let window = self.recv.flow_control();
        if release > 0 {
            let released = window.release_capacity(release);
            released.map_err(|_| CloseReason::StreamReset)?;
        }
        if self.share.own > 0 {
            let held = window.used_capacity() - self.unreleased;
            self.share.set(held);
        }
        Ok(())
    }

    /// Waits for the socket to take more, unless the stream must end.
    fn wait(&mut self, cx: &mut Context<'_>) -> Step {
        let held = self.recv.flow_control().used_capacity() - self.unreleased;
        self.share.set(held);
        // Also while streams hold little: those that stalled first hold the most later.
        let since = *self.blocked.get_or_insert_with(Instant::now);
        loop {
            if since.elapsed() >= STALLED && self.share.all.ends(held) {
                return Poll::Ready(Err(CloseReason::Stalled));
            }
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(STALLED)));
            ready!(timer.as_mut().poll(cx));
            self.timer = None;
        }
    }
}

/// Reads at most `most` bytes; none: the peer has sent its last byte.
fn read(socket: &TcpStream, most: usize) -> io::Result<Bytes> {
    SHARED.with_borrow_mut(|buffers| {
        // Memory can be taken again if nobody has a part of it.
        let has_space =
            |buffer: &mut BytesMut| buffer.capacity() >= most || buffer.try_reclaim(LARGE);
        let place = buffers.iter_mut().position(has_space);
        let place = place.unwrap_or_else(|| {
            buffers.truncate(BUFFERS - 1);
            buffers.push_front(BytesMut::with_capacity(LARGE));
            0
        });
        let buffer = &mut buffers[place];
        let count = socket.try_read_buf(&mut (&mut *buffer).limit(most))?;
        if count < most && count > 0 {
            // Saves a read that would find nothing: the kernel reports what comes from now on.
            let _ = socket.try_io(Interest::READABLE, || -> io::Result<()> {
                Err(io::ErrorKind::WouldBlock.into())
            });
        }
        if count <= COPIED {
            let bytes = Bytes::copy_from_slice(&buffer[..count]);
            buffer.clear();
            return Ok(bytes);
        }
        Ok(buffer.split_to(count).freeze())
    })
}
