//! The pump of one direction of a connection: it reads from one socket and writes to the other.

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;

use relay::socket;
use rustix::{
    io::Errno,
    net::{self, RecvFlags, SendFlags, Shutdown},
};

use super::buffers::{Buffers, Held, LARGE, SMALL};

/// The maximum number of reads for one direction before the worker serves other connections.
const TURNS: usize = 8;

/// One of the two sockets of a connection, and its readiness. Readiness is edge-triggered: the kernel reports it once,
/// so this struct records it until a system call finds otherwise.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts of a socket"
)]
pub struct End {
    /// The socket.
    pub socket: OwnedFd,
    /// There may be bytes to read.
    pub readable: bool,
    /// There may be space to write.
    pub writable: bool,
    /// Whether the kernel reports space to write. It need not before the socket was full for the first
    /// time: the first report would only wake the worker for nothing.
    pub asks_for_space: bool,
    /// The peer has sent its last byte, which may be unread still. The kernel does not report it again,
    /// so the socket must be read to the end.
    pub closing: bool,
    /// The connection was reset, or has broken.
    pub broken: bool,
    /// Whether the kernel sends short writes at once.
    pub haste: Haste,
    /// Whether [`socket::bound_if_near`] has been called.
    pub weighed: bool,
}

/// Whether the kernel holds a short write back until the peer has acknowledged the bytes before it
/// (Nagle's algorithm). The first short write never waits, so connections that end after it save the
/// system call that turns the algorithm off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haste {
    /// It does, and nothing was sent yet.
    Unsent,
    /// It does.
    Sent,
    /// It does not (`TCP_NODELAY`).
    Ensured,
}

/// The longest write that fits one segment of any connection, so that no rest of it is held back.
const SEGMENT: usize = 512;

impl End {
    /// A socket whose readiness is not known yet.
    pub fn new(socket: OwnedFd, haste: Haste) -> Self {
        Self {
            socket,
            readable: false,
            writable: false,
            asks_for_space: false,
            closing: false,
            broken: false,
            haste,
            weighed: false,
        }
    }
}

/// One direction of a connection.
#[derive(Debug)]
pub struct Pump {
    /// Bytes that were read and that the receiver's socket has not taken.
    held: Option<Held>,
    /// The size of the next read.
    size: u32,
    /// The sender has ended this direction, and everything was read.
    ended: bool,
    /// The end was passed on to the receiver.
    passed_on: bool,
}

impl Default for Pump {
    fn default() -> Self {
        Self {
            held: None,
            #[expect(clippy::cast_possible_truncation, reason = "16 KiB")]
            size: SMALL as u32,
            ended: false,
            passed_on: false,
        }
    }
}

/// The socket that broke, of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The one that is read from.
    Sender,
    /// The one that is written to.
    Receiver,
}

/// The progress of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The kernel will report when there is more to do.
    Waiting,
    /// There is more to do, after the turns of other connections.
    More,
    /// Everything was passed on, including the end.
    Done,
}

impl Pump {
    /// Reads the data that the sender has already sent into the shared buffer, before a receiver exists. Returns the
    /// count for [`Pump::write_first`].
    ///
    /// # Errors
    /// If the sender's socket broke.
    pub fn read_first(from: &mut End, buffers: &mut Buffers) -> Result<usize, Broken> {
        loop {
            match net::recv(
                &from.socket,
                &mut buffers.shared()[..SMALL],
                RecvFlags::empty(),
            ) {
                Ok((read, _)) => {
                    // An end is found again by the next read.
                    from.readable = read == SMALL || read == 0;
                    return Ok(read);
                }
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Broken::Sender),
            }
        }
    }

    /// Writes the first `count` bytes of the shared buffer to a socket that may still be connecting. Holds the bytes
    /// that do not fit into the socket, and adds the written bytes to `bytes`. Returns whether the socket is connected.
    ///
    /// # Errors
    /// If the socket cannot be connected: the reason.
    pub fn write_first(
        &mut self,
        to: &mut End,
        buffers: &mut Buffers,
        count: usize,
        bytes: &mut u64,
    ) -> Result<bool, Errno> {
        let sent = send(to, &buffers.shared()[..count]);
        let written = *sent.as_ref().unwrap_or(&0);
        *bytes += written as u64;
        if written < count {
            self.held = Some(buffers.hold(written, count));
        }
        sent.map(|written| written > 0)
    }

    /// The memory of the bytes that the receiver's socket has not taken.
    pub fn held(&self) -> usize {
        self.held.as_ref().map_or(0, Held::size)
    }

    /// The bytes that the receiver's socket has not taken.
    pub fn held_bytes(&self) -> &[u8] {
        self.held.as_ref().map_or(&[], Held::bytes)
    }

    /// Transfers all available data, and adds the bytes that the receiver's socket has taken to `bytes`.
    ///
    /// # Errors
    /// If a socket broke: which of the two.
    pub fn run(
        &mut self,
        from: &mut End,
        to: &mut End,
        buffers: &mut Buffers,
        bytes: &mut u64,
    ) -> Result<Step, Broken> {
        for _ in 0..TURNS {
            if let Some(held) = &mut self.held {
                if !to.writable {
                    // If the connection has broken, a receiver that does not read gets no more bytes.
                    return if from.broken {
                        Err(Broken::Sender)
                    } else {
                        Ok(Step::Waiting)
                    };
                }
                let count = held.bytes().len();
                let written = write(to, held.bytes())?;
                *bytes += written as u64;
                if written < count {
                    held.consume(written);
                    continue;
                }
                if let Some(held) = self.held.take() {
                    buffers.release(held);
                }
            }
            if self.ended {
                if !self.passed_on {
                    self.passed_on = true;
                    // Fails if the receiver has closed the connection.
                    let _ = net::shutdown(&to.socket, Shutdown::Write);
                }
                return Ok(Step::Done);
            }
            if !from.readable {
                return Ok(Step::Waiting);
            }
            let size = buffers.reading(self.size as usize);
            let read = match net::recv(
                &from.socket,
                &mut buffers.shared()[..size],
                RecvFlags::empty(),
            ) {
                // Nothing more comes from a connection that has broken. The kernel has reported the
                // reset before.
                Ok((0, _)) | Err(Errno::AGAIN) if from.broken => return Err(Broken::Sender),
                Ok((0, _)) => {
                    self.ended = true;
                    continue;
                }
                Ok((read, _)) => read,
                Err(Errno::AGAIN) => {
                    from.readable = false;
                    return Ok(Step::Waiting);
                }
                Err(Errno::INTR) => continue,
                Err(_) => return Err(Broken::Sender),
            };
            // From now on, the kernel reports new data by an event.
            from.readable = read == size || from.closing;
            to.writable = true;
            let written = write(to, &buffers.shared()[..read])?;
            *bytes += written as u64;
            if written < read {
                self.held = Some(buffers.hold(written, read));
                self.resize((size / 2).max(SMALL));
            } else if read == size {
                self.resize((size * 2).min(LARGE));
                if size == LARGE && !to.weighed {
                    to.weighed = true;
                    socket::bound_if_near(&to.socket);
                }
            } else if read < size / 4 {
                self.resize((size / 2).max(SMALL));
            }
        }
        Ok(Step::More)
    }

    /// Gives the buffer that is held back.
    pub fn abandon(&mut self, buffers: &mut Buffers) {
        if let Some(held) = self.held.take() {
            buffers.release(held);
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 256 KiB")]
    fn resize(&mut self, size: usize) {
        self.size = size as u32;
    }
}

/// Writes as much as the socket takes.
fn write(to: &mut End, bytes: &[u8]) -> Result<usize, Broken> {
    send(to, bytes).map_err(|_| Broken::Receiver)
}

/// Writes as much as the socket takes, and returns the kernel's error if the socket has broken.
fn send(to: &mut End, bytes: &[u8]) -> Result<usize, Errno> {
    let little = to.haste == Haste::Unsent && bytes.len() <= SEGMENT;
    if !little && to.haste != Haste::Ensured {
        socket::send_at_once(&to.socket);
        to.haste = Haste::Ensured;
    }
    loop {
        match net::send(&to.socket, bytes, SendFlags::NOSIGNAL) {
            Ok(written) => {
                if little {
                    to.haste = Haste::Sent;
                }
                to.writable = written == bytes.len();
                return Ok(written);
            }
            Err(Errno::AGAIN) => {
                to.writable = false;
                return Ok(0);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}
