//! Copies between a socket and a stream of a tunnel, both ways.
//!
//! An idle stream holds no buffer: the streams of a thread share the buffers of reads. Bytes that the stream's peer has
//! sent stay in the HTTP/2 library's buffers until the socket takes them. The stream's window bounds these bytes, and
//! [`Budget`](super::budget::Budget) bounds their sum.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::{Future, poll_fn},
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use model::Identity;
use relay::{Baggage, socket::reset_on_close};
use rustix::net::{Shutdown, shutdown};
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::Notify,
    time::{Sleep, sleep},
};

use super::{
    LARGE,
    budget::{Account, Share},
    tunnel::Lease,
};

/// The size of the first read from a socket. The size doubles while reads fill it.
const SMALL: usize = 16 << 10;
/// Reads up to this size are copied, so that a few bytes do not keep the shared buffer alive.
const COPIED: usize = 4 << 10;
/// The maximum number of pieces in one write.
const PIECES: usize = 64;
/// The maximum number of reads or writes in a row before the thread serves other streams.
const TURNS: usize = 8;
/// The window of a stream: a single stream fills 10 Gbit/s at a round trip of 1.6 ms.
pub const WINDOW: u32 = 2 << 20;
/// The window of a stream while the budget is scarce for its namespace.
pub const NARROW: usize = 128 << 10;
/// The time without progress of a socket after which its stream may be ended, if the budget is exceeded.
const STALLED: Duration = Duration::from_secs(1);

/// The maximum number of buffers of a thread. Parts of one buffer are in use while the next buffer is filled.
const BUFFERS: usize = 4;

thread_local! {
    static SHARED: RefCell<VecDeque<BytesMut>> = RefCell::default();
}

/// The counters of a relayed connection, and the means to end the connection from another task.
#[derive(Debug, Default)]
pub struct Flow {
    bytes: [AtomicU64; 2],
    end: Notify,
}

impl Flow {
    /// Returns the number of bytes read from the socket, and of bytes written to the socket.
    pub fn bytes(&self) -> [u64; 2] {
        [0, 1].map(|way: usize| self.bytes[way].load(Ordering::Relaxed))
    }

    /// Makes [`Stream::copy`] reset both sides.
    pub fn end(&self) {
        self.end.notify_one();
    }

    /// Waits for [`Flow::end`] while the connection has no stream yet.
    pub async fn until_end(&self) {
        self.end.notified().await;
    }

    fn add(&self, way: usize, bytes: usize) {
        // Only one task writes.
        let before = self.bytes[way].load(Ordering::Relaxed);
        self.bytes[way].store(before + bytes as u64, Ordering::Relaxed);
    }
}

/// The reason for which a relayed connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// Both sides ended it.
    Closed,
    /// The socket's peer reset it.
    SocketReset,
    /// The tunnel's peer reset it, or the tunnel broke.
    StreamReset,
    /// The socket was blocked while the budget was exceeded.
    Stalled,
    /// [`Flow::end`] was called.
    Aborted,
}

/// A stream of a tunnel, after the answer 200.
#[derive(Debug)]
pub struct Stream {
    /// The direction to the peer.
    pub send: SendStream<Bytes>,
    /// The direction from the peer.
    pub recv: RecvStream,
    /// The account, in the budget, of bytes that the plain socket has not taken.
    pub account: Arc<Account>,
    /// The stream's place in the tunnel. Dropped last, after the directions have ended.
    pub lease: Lease,
}

impl Stream {
    /// Returns the verified identity of the peer.
    pub fn peer(&self) -> &Identity {
        &self.lease.0.peer.identity
    }

    /// Returns what the peer says about its workload.
    pub fn baggage(&self) -> Option<Arc<Baggage>> {
        self.lease.0.baggage()
    }

    /// Sends bytes that were read from the socket already, before [`Stream::copy`].
    pub fn send_first(&mut self, bytes: Vec<u8>, flow: &Flow) {
        let count = bytes.len();
        // Fails if the peer has reset the stream. `copy` then finds the reset.
        if self.send.send_data(bytes.into(), false).is_ok() {
            flow.add(0, count);
        }
    }

    /// Copies both ways until both sides have ended. Resets the socket and the stream if one of them is reset.
    pub fn copy(self, socket: TcpStream, flow: &Flow) -> impl Future<Output = CloseReason> {
        let mut copy = Copy {
            send: self.send,
            up_size: SMALL,
            up_done: false,
            recv: self.recv,
            recv_done: false,
            down_done: false,
            reset: None,
            pending: VecDeque::new(),
            unreleased: 0,
            share: Share::new(&self.account),
            blocked: None,
            timer: None,
        };
        let lease = self.lease;
        async move {
            let ended = tokio::select! {
                biased;
                ended = poll_fn(|cx| copy.poll(&socket, flow, cx)) => ended,
                () = flow.end.notified() => CloseReason::Aborted,
                // Finds a reset also while `poll` reads nothing from the socket.
                _ = socket.ready(Interest::ERROR) => CloseReason::SocketReset,
            };
            match ended {
                CloseReason::Closed => return ended,
                CloseReason::StreamReset => {}
                CloseReason::SocketReset => copy.send.send_reset(Reason::CONNECT_ERROR),
                CloseReason::Stalled | CloseReason::Aborted => copy.send.send_reset(Reason::CANCEL),
            }
            reset_on_close(&socket);
            drop((copy, lease));
            ended
        }
    }
}

struct Copy {
    send: SendStream<Bytes>,
    /// The size of the next read.
    up_size: usize,
    /// The socket's FIN was passed to the stream.
    up_done: bool,
    recv: RecvStream,
    /// END_STREAM was read from the stream.
    recv_done: bool,
    /// END_STREAM was passed to the socket as FIN.
    down_done: bool,
    /// The reason of the peer's reset of the stream.
    reset: Option<Reason>,
    /// Bytes that were read from the stream, and that the socket has not taken.
    pending: VecDeque<Bytes>,
    /// The number of bytes that the socket has taken, and whose part of the window is not released yet.
    unreleased: usize,
    share: Share,
    /// The time since which the socket is blocked.
    blocked: Option<Instant>,
    /// The timer of a blocked socket.
    timer: Option<Pin<Box<Sleep>>>,
}

/// The progress of one direction.
type Step = Poll<Result<(), CloseReason>>;

impl Copy {
    fn poll(&mut self, socket: &TcpStream, flow: &Flow, cx: &mut Context<'_>) -> Poll<CloseReason> {
        if self.reset.is_none()
            && !(self.up_done && self.recv_done)
            && let Poll::Ready(reset) = self.send.poll_reset(cx)
        {
            self.reset = Some(reset.unwrap_or(Reason::INTERNAL_ERROR));
        }
        if !self.down_done
            && let Poll::Ready(Err(ended)) = self.poll_down(socket, flow, cx)
        {
            return Poll::Ready(ended);
        }
        if let Some(reason) = self.reset {
            // If the peer ended its direction before the reset, the socket still takes the bytes of that direction.
            return match (self.down_done, reason) {
                (true, Reason::NO_ERROR) => Poll::Ready(CloseReason::Closed),
                (true, _) => Poll::Ready(CloseReason::StreamReset),
                (false, _) => Poll::Pending,
            };
        }
        if !self.up_done
            && let Poll::Ready(Err(ended)) = self.poll_up(socket, flow, cx)
        {
            return Poll::Ready(ended);
        }
        if self.up_done && self.down_done {
            return Poll::Ready(CloseReason::Closed);
        }
        Poll::Pending
    }

    /// Copies from the socket to the stream.
    fn poll_up(&mut self, socket: &TcpStream, flow: &Flow, cx: &mut Context<'_>) -> Step {
        for _ in 0..TURNS {
            ready!(socket.poll_read_ready(cx)).map_err(|_| CloseReason::SocketReset)?;
            self.send.reserve_capacity(self.up_size);
            while self.send.capacity() == 0 {
                match ready!(self.send.poll_capacity(cx)) {
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return Poll::Ready(Err(CloseReason::StreamReset)),
                }
            }
            let most = self.up_size.min(self.send.capacity());
            match read(socket, most) {
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
                    flow.add(0, count);
                    if count == self.up_size {
                        self.up_size = (count * 2).min(LARGE);
                    } else if count < self.up_size / 4 {
                        self.up_size = (self.up_size / 2).max(SMALL);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Lets other streams have the capacity.
                    self.send.reserve_capacity(0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Poll::Ready(Err(CloseReason::SocketReset)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Copies from the stream to the socket.
    fn poll_down(&mut self, socket: &TcpStream, flow: &Flow, cx: &mut Context<'_>) -> Step {
        for _ in 0..TURNS {
            self.receive(cx)?;
            if self.pending.is_empty() {
                if !self.recv_done {
                    // An idle stream holds no memory for the next bytes.
                    self.pending = VecDeque::new();
                    return Poll::Pending;
                }
                shutdown(socket, Shutdown::Write).map_err(|_| CloseReason::SocketReset)?;
                self.down_done = true;
                return Poll::Ready(Ok(()));
            }
            match self.write(socket) {
                Ok(count) => {
                    flow.add(1, count);
                    self.release(count)?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if socket.poll_write_ready(cx).is_pending() {
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

    /// Takes all bytes from the library, because the library needs a multiple of the memory for small frames.
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
            // Joins small pieces.
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

    fn write(&mut self, socket: &TcpStream) -> io::Result<usize> {
        let mut count = if let [only] = self.pending.make_contiguous() {
            socket.try_write(only)?
        } else {
            let mut pieces = [IoSlice::new(&[]); PIECES];
            let filled = self.pending.iter().zip(&mut pieces);
            let filled = filled.map(|(bytes, piece)| *piece = IoSlice::new(bytes));
            let filled = filled.count();
            socket.try_write_vectored(&pieces[..filled])?
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
        Ok(written)
    }

    /// Releases the window of bytes that the socket has taken. While the budget is scarce, keeps a part of the window.
    fn release(&mut self, count: usize) -> Result<(), CloseReason> {
        self.blocked = None;
        self.timer = None;
        self.unreleased += count;
        let keep = if self.share.account.is_scarce() {
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

    /// Waits until the socket takes more bytes, or the stream must end.
    fn wait(&mut self, cx: &mut Context<'_>) -> Step {
        let held = self.recv.flow_control().used_capacity() - self.unreleased;
        self.share.set(held);
        // The time counts also while the budget suffices: streams that stall early hold the most bytes later.
        let since = *self.blocked.get_or_insert_with(Instant::now);
        loop {
            if since.elapsed() >= STALLED && self.share.account.ends(held) {
                return Poll::Ready(Err(CloseReason::Stalled));
            }
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(STALLED)));
            ready!(timer.as_mut().poll(cx));
            self.timer = None;
        }
    }
}

/// Reads at most `most` bytes. Returns none after the peer's last byte.
fn read(socket: &TcpStream, most: usize) -> io::Result<Bytes> {
    SHARED.with_borrow_mut(|buffers| {
        // Memory can be reclaimed if no part of it is in use.
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
            // Saves a read that would find nothing: the kernel reports later bytes.
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
