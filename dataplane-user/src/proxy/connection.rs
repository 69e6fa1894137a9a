//! A connection through the proxy.

use std::{
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use dataplane_common::{
    Port,
    accelerate::{STEP, WINDOW},
    capture::Tuple,
};

use super::{
    attachment::{Attached, Direction},
    buffers::Buffers,
    index::Target,
    metrics::Counters,
    outcome::Flag,
    pump::{Broken, End, Flow, Haste, Step},
    socket,
};

/// A connection: a client's socket and, once there is one, an endpoint's.
#[derive(Debug)]
pub struct Connection {
    /// Whose it is.
    pub attached: Arc<Attached>,
    /// Out of the workload or into it.
    pub direction: Direction,
    /// The client.
    pub client: SocketAddr,
    /// Where the client wanted to go.
    pub destination: SocketAddr,
    /// Where it goes, or where the last attempt went.
    pub endpoint: SocketAddr,
    /// The service, if it is one's.
    pub target: Option<Arc<Target>>,
    /// Where it is counted.
    pub counters: Arc<Counters>,
    /// When it was accepted.
    pub opened: Instant,
    /// When it last carried something, by the worker's clock.
    pub active: u32,
    /// What the counters know of already: sent by the client, and to it.
    pub counted: [u64; 2],
    /// Up to where senders past the TCP stack were told to go on: from the client, and to it.
    granted: [u64; 2],
    /// Whether its sockets are kept alive: not from the start, since most connections have ended
    /// before that would matter.
    pub kept_alive: bool,
    /// Whether it waits for its next turn.
    pub queued: bool,
    /// While it is being made.
    pub dial: Option<Box<Dial>>,
    near: End,
    far: Option<End>,
    up: Flow,
    down: Flow,
}

/// An attempt to reach an endpoint.
#[derive(Debug)]
pub struct Dial {
    /// Endpoints that were tried in vain.
    pub tried: Vec<SocketAddr>,
    /// What the last of them said.
    pub error: Option<io::Error>,
    /// How many attempts are left.
    pub left: usize,
}

/// Which of the two sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The client's.
    Client,
    /// The endpoint's.
    Endpoint,
}

impl Connection {
    /// One that was accepted, and goes nowhere yet.
    pub fn new(
        socket: OwnedFd,
        attached: Arc<Attached>,
        direction: Direction,
        addresses: [SocketAddr; 2],
        counters: Arc<Counters>,
        now: Instant,
    ) -> Self {
        let [client, destination] = addresses;
        let accelerated = attached.acceleration.is_some();
        Self {
            attached,
            direction,
            client,
            destination,
            endpoint: destination,
            target: None,
            counters,
            opened: now,
            active: 0,
            counted: [0; 2],
            granted: [0; 2],
            kept_alive: false,
            queued: false,
            dial: None,
            // As the listening socket.
            near: End {
                writable: true,
                ..End::new(socket, Haste::Ensured, accelerated)
            },
            far: None,
            up: Flow::default(),
            down: Flow::default(),
        }
    }

    /// The endpoint's, which may be connecting still.
    pub fn endpoint_socket(&self) -> Option<&OwnedFd> {
        self.far.as_ref().map(|end| &end.socket)
    }

    /// Takes another socket for the endpoint's; the one before is closed.
    pub fn set_endpoint_socket(&mut self, socket: Option<OwnedFd>) {
        let accelerated = self.attached.acceleration.is_some();
        self.far = socket.map(|socket| End::new(socket, Haste::Unsent, accelerated));
    }

    /// Reads what the client has said already, into the shared buffer: how much.
    ///
    /// # Errors
    /// If the client is gone.
    pub fn first_words(&mut self, buffers: &mut Buffers) -> Result<usize, Flag> {
        Flow::first_words(&mut self.near, buffers).map_err(|_| {
            // The kernel says so once.
            self.near.broken = true;
            Flag::ClientReset
        })
    }

    /// Passes on what [`Connection::first_words`] has read; what the endpoint does not take yet is
    /// held. Whether the endpoint is connected.
    ///
    /// # Errors
    /// Why it can not be connected.
    pub fn begin(&mut self, buffers: &mut Buffers, count: usize) -> io::Result<bool> {
        match &mut self.far {
            Some(far) if count > 0 => Ok(self.up.begin(far, buffers, count)?),
            _ => Ok(false),
        }
    }

    /// Whether there is something to say to the endpoint.
    pub fn has_words(&self) -> bool {
        self.up.holds()
    }

    /// What is known of one of the sockets.
    pub fn end_mut(&mut self, side: Side) -> Option<&mut End> {
        match side {
            Side::Client => Some(&mut self.near),
            Side::Endpoint => self.far.as_mut(),
        }
    }

    /// Bytes from the client to the endpoint, and back.
    pub fn bytes(&self) -> [u64; 2] {
        [self.up.bytes, self.down.bytes]
    }

    /// Brings the counters up to date.
    pub fn count(&mut self) {
        let bytes = self.bytes();
        let [received, sent] = [0, 1].map(|way| bytes[way] - self.counted[way]);
        self.counters
            .received
            .fetch_add(received, Ordering::Relaxed);
        self.counters.sent.fetch_add(sent, Ordering::Relaxed);
        self.counted = bytes;
    }

    /// Carries what there is in both directions.
    ///
    /// # Errors
    /// How it ended, if one side broke: what could be read of it still was passed on.
    pub fn pump(&mut self, buffers: &mut Buffers) -> Result<Step, Flag> {
        let Some(far) = &mut self.far else {
            return Ok(Step::Waiting);
        };
        let near = &mut self.near;
        let up = self.up.pump(near, far, buffers);
        let down = self.down.pump(far, near, buffers);
        match (up, down) {
            (Ok(Step::Done), Ok(Step::Done)) => Ok(Step::Done),
            (Ok(Step::More), Ok(_)) | (Ok(_), Ok(Step::More)) => Ok(Step::More),
            (Ok(_), Ok(_)) => Ok(Step::Waiting),
            // What the endpoint said before it broke has been passed on by the other direction.
            (Err(Broken::Receiver), _) | (Ok(_), Err(Broken::Sender)) => Err(Flag::EndpointReset),
            (Err(Broken::Sender), _) => Err(Flag::ClientReset),
            (Ok(_), Err(Broken::Receiver)) => {
                // The client is gone. What it sent before may be unread still.
                near.readable = true;
                let _ = self.up.pump(near, far, buffers);
                Err(Flag::ClientReset)
            }
        }
    }

    /// Tells those who send past the TCP stack how far their bytes have come, every so often.
    pub fn grant(&mut self) {
        let Some(acceleration) = &self.attached.acceleration else {
            return;
        };
        for (way, bytes) in self.bytes().into_iter().enumerate() {
            if bytes < self.granted[way] + STEP {
                continue;
            }
            self.granted[way] = bytes;
            let ends = if way == 0 {
                let listener = self.attached.listener(self.client.is_ipv4());
                let proxy = listener.map_or_else(|| socket::own_address(&self.near.socket), Ok);
                proxy.map(|proxy| (self.client, proxy))
            } else {
                match &self.far {
                    Some(far) => socket::own_address(&far.socket).map(|own| (own, self.endpoint)),
                    None => continue,
                }
            };
            // It may be gone.
            let Ok((client, proxy)) = ends else { continue };
            let tuple = Tuple {
                netns: acceleration.netns,
                client: client.ip().into(),
                proxy: proxy.ip().into(),
                client_port: Port::new(client.port()),
                proxy_port: Port::new(proxy.port()),
                reserved: 0,
            };
            (acceleration.grant)(&tuple, bytes + WINDOW);
        }
    }

    /// Makes both sides see a reset when the sockets are closed.
    pub fn reset(&self) {
        // Who has sent one is not told.
        for end in std::iter::once(&self.near)
            .chain(&self.far)
            .filter(|end| !end.broken)
        {
            socket::reset_on_close(&end.socket);
        }
    }

    /// Has the kernel find out whether the peers are still there, when nothing was said for so long.
    pub fn keep_alive(&mut self, after: Duration) {
        self.kept_alive = true;
        for end in std::iter::once(&self.near).chain(&self.far) {
            // It may have ended just now.
            let _ = socket::keep_alive(&end.socket, after);
        }
    }

    /// Gives back what it holds.
    pub fn abandon(&mut self, buffers: &mut Buffers) {
        self.up.abandon(buffers);
        self.down.abandon(buffers);
    }
}
