//! The state that workers share: the relay, the settings, and each worker's load and mailbox.

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering, fence},
        mpsc::{self, Receiver, Sender},
    },
    time::Instant,
};

use model::Snapshot;
use relay::{
    Attached, Direction, Index, Listener, Neighbour, Permit, Relay, TunnelView, Tunnelling,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};

use super::Settings;

/// The state that workers share.
pub struct Shared {
    /// The relay: the decision, the limits and the counters of connections.
    pub relay: Arc<Relay>,
    /// The proxy's settings.
    pub settings: Settings,
    /// The engine of tunnels. Without it, all connections are relayed in plaintext.
    pub tunnels: OnceLock<Arc<dyn Tunnelling>>,
    /// Each worker's load.
    pub loads: Box<[Load]>,
    mailboxes: Box<[Mailbox]>,
    /// Whether the shortage of files or memory was logged.
    warned: AtomicBool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// A command to a worker.
#[derive(Debug)]
pub enum Command {
    /// Accept connections at these sockets.
    Take(Arc<Attached>, Arc<[Listener]>),
    /// Stop accepting connections of this attachment, and reset the remaining ones at the deadline.
    Shut(u64, Instant),
    /// Relay a connection that another worker accepted.
    Relay(Accepted),
    /// Stop accepting connections, end when all have ended, and reset the remaining ones at the deadline.
    Drain(Instant),
}

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted {
    /// The socket.
    pub socket: OwnedFd,
    /// The client's address.
    pub client: SocketAddr,
    /// The direction of the listening socket.
    pub direction: Direction,
    /// The connection's permit.
    pub permit: Permit,
}

/// The load of a worker. Each load has its own cache line, because a different CPU writes it.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Load {
    connections: AtomicUsize,
    held: AtomicUsize,
    /// Connections that wait for a snapshot that has their destination.
    waiting: AtomicUsize,
}

impl Load {
    /// The number of connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts another connection.
    pub fn add(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Subtracts a connection.
    pub fn sub(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Bytes held for readers that do not keep up.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Sets the number of connections that wait for another snapshot.
    pub fn set_waiting(&self, count: usize) {
        self.waiting.store(count, Ordering::Relaxed);
    }

    /// Sets the bytes held.
    pub fn set_held(&self, bytes: usize) {
        self.held.store(bytes, Ordering::Relaxed);
    }
}

/// The receiving end of a worker's commands.
#[derive(Debug)]
struct Mailbox {
    sender: Sender<Command>,
    wake: OwnedFd,
}

impl Shared {
    /// Returns the established tunnels by their attachments.
    pub fn tunnels(&self) -> HashMap<u64, Vec<TunnelView>> {
        let mut all: HashMap<_, Vec<_>> = HashMap::new();
        for tunnel in self.tunnels.get().iter().flat_map(|of| of.tunnels()) {
            all.entry(tunnel.attachment).or_default().push(tunnel);
        }
        all
    }

    /// Returns the workload of this node at which the connections of a workload to the address `to` arrive without a tunnel.
    pub fn neighbour(&self, from: &Attached, to: IpAddr, index: &Index) -> Option<Neighbour> {
        let domain = self.settings.attests.as_ref()?;
        self.relay.neighbour(from, to, index, domain)
    }

    /// Creates the shared state of `count` workers, and the receiving end of each worker's mailbox.
    ///
    /// # Errors
    /// If the process has no file descriptors left.
    pub fn new(
        relay: Arc<Relay>,
        settings: Settings,
        count: usize,
    ) -> io::Result<(Self, Vec<Receiver<Command>>)> {
        let (mut mailboxes, mut receivers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
            let (sender, receiver) = mpsc::channel();
            mailboxes.push(Mailbox { sender, wake });
            receivers.push(receiver);
        }
        let shared = Self {
            relay,
            settings,
            tunnels: OnceLock::new(),
            loads: (0..count).map(|_| Load::default()).collect(),
            mailboxes: mailboxes.into(),
            warned: AtomicBool::new(false),
        };
        Ok((shared, receivers))
    }

    /// Bytes that all workers hold for readers that do not keep up.
    pub fn held(&self) -> usize {
        self.loads.iter().map(Load::held).sum()
    }

    /// The least loaded worker, if it has fewer connections than worker `number` by more than `lead`.
    pub fn less_loaded(&self, number: usize, lead: usize) -> Option<usize> {
        if self.loads.len() < 2 {
            return None;
        }
        let own = self.loads[number].connections();
        let others = self.loads.iter().enumerate();
        let (other, least) = others.min_by_key(|(_, load)| load.connections())?;
        (own > least.connections() + lead).then_some(other)
    }

    /// The eventfd that wakes a worker for its commands.
    pub fn wake(&self, number: usize) -> &OwnedFd {
        &self.mailboxes[number].wake
    }

    /// Routes new connections by this snapshot, and wakes the workers whose connections wait for a snapshot. If policies have
    /// changed, wakes all workers, because connections may have to end.
    pub fn set_snapshot(&self, snapshot: Snapshot) {
        let judged_anew = self.relay.set_snapshot(snapshot);
        // With the fence in `wake_if_newer`: this thread sees the connection, or the worker sees the snapshot.
        fence(Ordering::SeqCst);
        for (number, load) in self.loads.iter().enumerate() {
            if judged_anew || load.waiting.load(Ordering::Relaxed) > 0 {
                self.wake_up(number);
            }
        }
    }

    /// Wakes a worker that has just begun to wait for a snapshot later than `version`, if it is there by now.
    pub fn wake_if_newer(&self, number: usize, version: u64) {
        fence(Ordering::SeqCst);
        if self.relay.version() != version {
            self.wake_up(number);
        }
    }

    fn wake_up(&self, number: usize) {
        // Fails only if the counter is full, and then the worker is awake.
        let _ = rustix::io::write(&self.mailboxes[number].wake, &1_u64.to_ne_bytes());
    }

    /// Sends a worker a command, and wakes the worker. Returns the command if the worker has ended.
    pub fn send(&self, number: usize, command: Command) -> Result<(), Command> {
        let mailbox = &self.mailboxes[number];
        mailbox.sender.send(command).map_err(|error| error.0)?;
        self.wake_up(number);
        Ok(())
    }

    /// Sends each worker a command.
    pub fn send_all(&self, command: impl Fn() -> Command) {
        for number in 0..self.mailboxes.len() {
            // A worker that has ended needs no command.
            let _ = self.send(number, command());
        }
    }

    /// Takes note that a worker is awake.
    pub fn clear_wake(&self, number: usize) {
        let _ = rustix::io::read(&self.mailboxes[number].wake, &mut [0; 8]);
    }

    /// Logs, once, that connections wait because the kernel is out of files or memory.
    pub fn warn(&self, error: Errno) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "connections are not accepted for now: {error}; they wait until others have ended"
            );
        }
    }
}
