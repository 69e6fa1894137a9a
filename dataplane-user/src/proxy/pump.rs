//! One direction of a connection: from one socket to the other.

use std::os::fd::OwnedFd;

use rustix::{
    io::Errno,
    net::{self, RecvFlags, SendFlags, Shutdown},
};

use super::{
    buffers::{Buffers, Held, LARGE, SMALL},
    socket,
};

/// Reads for one connection in a row, before others have their turn.
const TURNS: usize = 8;

/// One of the two sockets of a connection, and what is known of it. Readiness is edge-triggered:
/// the kernel tells once, so it is remembered here until a system call finds otherwise.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts of a socket"
)]
pub struct End {
    /// The socket.
    pub socket: OwnedFd,
    /// There may be something to read.
    pub readable: bool,
    /// There may be space to write.
    pub writable: bool,
    /// Whether the kernel tells when there is: it need not before there was none for once, and to be
    /// told of all that there is from the start would be a wait in vain.
    pub asks_for_space: bool,
    /// The peer has sent its last byte, which may be unread still. No edge will tell of it again,
    /// so that it must be read to the end.
    pub closing: bool,
    /// The connection was reset, or has broken.
    pub broken: bool,
    /// Whether little is sent at once.
    pub haste: Haste,
    /// Whether it was looked at how much may be on its way to the peer ([`socket::bound_if_near`]).
    pub weighed: bool,
    /// What comes past the TCP stack and what comes by TCP are two queues, and one read takes of one
    /// of them: that it was not filled does not mean that there is no more.
    pub two_queues: bool,
}

/// Whether the kernel holds back little until the peer has acknowledged what was sent before
/// (Nagle's algorithm). The first little never waits: many connections have ended before it would
/// matter, and save a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haste {
    /// It would, and nothing was sent yet.
    Unsent,
    /// It would.
    Sent,
    /// It does not (`TCP_NODELAY`).
    Ensured,
}

/// So much fits a segment of any connection: nothing of it is left to be held back.
const SEGMENT: usize = 512;

impl End {
    /// A socket of which nothing is known yet.
    pub fn new(socket: OwnedFd, haste: Haste, two_queues: bool) -> Self {
        Self {
            socket,
            readable: false,
            writable: false,
            asks_for_space: false,
            closing: false,
            broken: false,
            haste,
            weighed: false,
            two_queues,
        }
    }
}

/// What one direction has carried, and where it is.
#[derive(Debug)]
pub struct Flow {
    held: Option<Held>,
    /// Bytes that the receiver's socket has taken.
    pub bytes: u64,
    /// What the next read may take.
    size: u32,
    /// The sender has sent its last byte, and it was read.
    ended: bool,
    /// The receiver was told.
    passed_on: bool,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            held: None,
            bytes: 0,
            #[expect(clippy::cast_possible_truncation, reason = "16 KiB")]
            size: SMALL as u32,
            ended: false,
            passed_on: false,
        }
    }
}

/// Which of the two sockets broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The one that is read from.
    Sender,
    /// The one that is written to.
    Receiver,
}

/// How far a direction got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The kernel will tell when there is more to do.
    Waiting,
    /// There is more to do, and others should have their turn first.
    More,
    /// Everything was passed on, the end included.
    Done,
}

impl Flow {
    /// Reads what the sender has said already, before there is anybody to say it to, into the shared
    /// buffer: how much of that is [`Flow::begin`]'s.
    ///
    /// # Errors
    /// If the sender's socket broke.
    pub fn first_words(from: &mut End, buffers: &mut Buffers) -> Result<usize, Broken> {
        loop {
            match net::recv(
                &from.socket,
                &mut buffers.shared()[..SMALL],
                RecvFlags::empty(),
            ) {
                Ok((read, _)) => {
                    // That it has ended is found out once more.
                    from.readable = read == SMALL || read == 0 || from.two_queues;
                    return Ok(read);
                }
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Broken::Sender),
            }
        }
    }

    /// Writes the first `count` bytes of the shared buffer to a socket that may be connecting still;
    /// what it does not take is held. Whether it is connected.
    ///
    /// # Errors
    /// Why it is not.
    pub fn begin(
        &mut self,
        to: &mut End,
        buffers: &mut Buffers,
        count: usize,
    ) -> Result<bool, Errno> {
        let sent = send(to, &buffers.shared()[..count]);
        let written = *sent.as_ref().unwrap_or(&0);
        self.bytes += written as u64;
        if written < count {
            self.held = Some(buffers.hold(written, count));
        }
        sent.map(|written| written > 0)
    }

    /// Whether there is something that the receiver has not taken.
    pub fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Carries what there is.
    ///
    /// # Errors
    /// Which of the sockets broke.
    pub fn pump(
        &mut self,
        from: &mut End,
        to: &mut End,
        buffers: &mut Buffers,
    ) -> Result<Step, Broken> {
        for _ in 0..TURNS {
            if let Some(held) = &mut self.held {
                if !to.writable {
                    // Who reads nothing gets nothing of a connection that has broken.
                    return if from.broken {
                        Err(Broken::Sender)
                    } else {
                        Ok(Step::Waiting)
                    };
                }
                let count = held.bytes().len();
                let written = write(to, held.bytes())?;
                self.bytes += written as u64;
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
                    // A socket that is closed already has no need to be told.
                    let _ = net::shutdown(&to.socket, Shutdown::Write);
                }
                return Ok(Step::Done);
            }
            if !from.readable {
                return Ok(Step::Waiting);
            }
            let size = self.size as usize;
            let read = match net::recv(
                &from.socket,
                &mut buffers.shared()[..size],
                RecvFlags::empty(),
            ) {
                // Nothing more comes from a connection that has broken; that it was reset was told
                // before, or a socket in a sockmap does not say it.
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
            // What comes from now on will be told.
            from.readable = read == size || from.closing || from.two_queues;
            to.writable = true;
            let written = write(to, &buffers.shared()[..read])?;
            self.bytes += written as u64;
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

    /// Gives back what will not be written any more.
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

/// Writes what the socket takes.
fn write(to: &mut End, bytes: &[u8]) -> Result<usize, Broken> {
    send(to, bytes).map_err(|_| Broken::Receiver)
}

/// The same, with the kernel's word for it if it takes nothing any more.
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
