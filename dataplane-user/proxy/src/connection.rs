//! A connection through the proxy.

use std::{io, os::fd::OwnedFd};

use relay::{
    Flag, Handed, Session,
    socket::{self, Patience},
};

use super::{
    buffers::Buffers,
    pump::{Broken, End, Haste, Pump, Step},
};

/// A connection: a client's socket and, once there is an attempt to connect, an endpoint's.
#[derive(Debug)]
pub struct Connection {
    /// Its session.
    pub session: Session,
    /// When it last carried something, by the worker's clock.
    pub active: u32,
    /// Whether keepalive is on. The proxy does not turn it on at the start, because most connections
    /// have ended before it would matter.
    pub kept_alive: bool,
    /// Whether the endpoint's socket may have the client's port, too, because the client's socket takes no packets from the
    /// loopback interface.
    pub shares_port: bool,
    /// Whether it waits for its next turn.
    pub queued: bool,
    client: End,
    endpoint: Option<End>,
    up: Pump,
    down: Pump,
}

/// One of the two sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The client's.
    Client,
    /// The endpoint's.
    Endpoint,
}

impl Connection {
    /// A connection that was accepted and is not connected further yet.
    pub fn new(session: Session, socket: OwnedFd) -> Self {
        Self {
            session,
            active: 0,
            kept_alive: false,
            shares_port: false,
            queued: false,
            client: End {
                writable: true,
                // Inherited from the listening socket.
                ..End::new(socket, Haste::Ensured)
            },
            endpoint: None,
            up: Pump::default(),
            down: Pump::default(),
        }
    }

    /// The endpoint's socket, which may be connecting still.
    pub fn endpoint_socket(&self) -> Option<&OwnedFd> {
        self.endpoint.as_ref().map(|end| &end.socket)
    }

    /// Replaces the endpoint's socket. The previous one is closed.
    pub fn set_endpoint_socket(&mut self, socket: Option<OwnedFd>) {
        self.endpoint = socket.map(|socket| End::new(socket, Haste::Unsent));
    }

    /// Binds the client's socket to the interface on which its packets arrive, if that is known.
    pub fn share_port(&mut self) {
        let namespace = self.session.attached().namespace.as_ref();
        let interface = namespace.and_then(|namespace| namespace.interface.as_deref());
        self.shares_port = interface.is_some_and(|name| socket::bind_to(&self.client.socket, name));
    }

    /// Reads the data that the client has already sent into the shared buffer, and returns the number of bytes.
    ///
    /// # Errors
    /// If the client is gone.
    pub fn read_first(&mut self, buffers: &mut Buffers) -> Result<usize, Flag> {
        Pump::read_first(&mut self.client, buffers).map_err(|_| {
            // The kernel says so once.
            self.client.broken = true;
            Flag::ClientReset
        })
    }

    /// Writes the bytes that [`Connection::read_first`] has read to the endpoint, and holds the bytes that do not fit
    /// into the endpoint's socket yet. Returns whether the endpoint is connected.
    ///
    /// # Errors
    /// If the endpoint cannot be connected: the reason.
    pub fn write_first(&mut self, buffers: &mut Buffers, count: usize) -> io::Result<bool> {
        let received = &mut self.session.bytes[0];
        match &mut self.endpoint {
            Some(endpoint) if count > 0 => {
                Ok(self.up.write_first(endpoint, buffers, count, received)?)
            }
            _ => Ok(false),
        }
    }

    /// Whether bytes are held for the endpoint.
    pub fn holds_first(&self) -> bool {
        self.up.held() > 0
    }

    /// The memory of the bytes that its readers have not taken.
    pub fn held(&self) -> usize {
        self.up.held() + self.down.held()
    }

    /// One of the sockets, and its readiness.
    pub fn end_mut(&mut self, side: Side) -> Option<&mut End> {
        match side {
            Side::Client => Some(&mut self.client),
            Side::Endpoint => self.endpoint.as_mut(),
        }
    }

    /// Both sockets, as far as there are two.
    fn ends(&self) -> impl Iterator<Item = &End> {
        std::iter::once(&self.client).chain(&self.endpoint)
    }

    /// Carries the bytes that wait in both directions.
    ///
    /// # Errors
    /// How the connection ended, if one side broke. Bytes that could still be read from that side were passed on.
    pub fn pump(&mut self, buffers: &mut Buffers) -> Result<Step, Flag> {
        let Some(endpoint) = &mut self.endpoint else {
            return Ok(Step::Waiting);
        };
        let client = &mut self.client;
        let [received, sent] = &mut self.session.bytes;
        let up = self.up.run(client, endpoint, buffers, received);
        let down = self.down.run(endpoint, client, buffers, sent);
        match (up, down) {
            (Ok(Step::Done), Ok(Step::Done)) => Ok(Step::Done),
            (Ok(Step::More), Ok(_)) | (Ok(_), Ok(Step::More)) => Ok(Step::More),
            // After its last byte: nothing reaches it any more, and the other side need not say anything for long.
            (Ok(_), Ok(_)) if endpoint.broken => Err(Flag::EndpointReset),
            (Ok(_), Ok(_)) if client.broken => Err(Flag::ClientReset),
            (Ok(_), Ok(_)) => Ok(Step::Waiting),
            // The other direction has passed on the bytes that the endpoint sent before it broke.
            (Err(Broken::Receiver), _) | (Ok(_), Err(Broken::Sender)) => Err(Flag::EndpointReset),
            (Err(Broken::Sender), _) => Err(Flag::ClientReset),
            (Ok(_), Err(Broken::Receiver)) => {
                // The client is gone. Bytes that it sent before may still be unread.
                client.readable = true;
                let _ = self.up.run(client, endpoint, buffers, received);
                Err(Flag::ClientReset)
            }
        }
    }

    /// Makes both sides see a reset when the sockets are closed.
    pub fn reset(&self) {
        // A side that has sent a reset gets none.
        for end in self.ends().filter(|end| !end.broken) {
            socket::reset_on_close(&end.socket);
        }
    }

    /// Turns on keepalive, and the time limit for acknowledgements.
    pub fn keep_alive(&mut self, patience: Patience) {
        self.kept_alive = true;
        for end in self.ends() {
            patience.apply(&end.socket);
        }
    }

    /// Takes the connection apart for another engine. The client has sent the first `count` bytes of the shared buffer, or the
    /// bytes that the connection holds.
    pub fn hand_over(mut self, buffers: &mut Buffers, count: usize) -> Handed {
        let mut first = self.up.held_bytes().to_vec();
        first.extend_from_slice(&buffers.shared()[..count]);
        self.abandon(buffers);
        Handed {
            session: self.session,
            client: self.client.socket,
            first,
        }
    }

    /// Gives the buffers that it holds back.
    pub fn abandon(&mut self, buffers: &mut Buffers) {
        self.up.abandon(buffers);
        self.down.abandon(buffers);
    }
}
