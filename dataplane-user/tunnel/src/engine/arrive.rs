//! Inbound streams, which the engine connects to the application of a workload.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use model::Identity;
use relay::{
    Attached, Client, Direction, Exceeded, Flag, Permit, Session,
    socket::{self, From, Manner},
};
use tokio::{net::TcpStream, time::timeout};

use super::{
    super::{
        copy::{CloseReason, Flow},
        error::Error,
        inbound::{Accepted, Inbound, Refusal, Request},
    },
    Shared,
    dial::dial,
};

/// Connects inbound streams to one workload.
pub struct Arrive {
    shared: Arc<Shared>,
    attached: Arc<Attached>,
    /// The identity of the workload.
    own: Identity,
}

impl Arrive {
    /// Connects streams to the workload of `attached`, which has the identity `own`.
    pub fn new(shared: &Arc<Shared>, attached: &Arc<Attached>, own: Identity) -> Self {
        Self {
            shared: Arc::clone(shared),
            attached: Arc::clone(attached),
            own,
        }
    }

    /// Begins the session of a stream. Refuses the stream if policies or limits forbid it.
    fn begin(&self, request: Request) -> Result<(Session, SocketAddr), Refusal> {
        let destination = request.destination().ok_or(Refusal::BadRequest)?;
        let destination = socket::plain(destination);
        let inbound = Direction::Inbound;
        let permit = Permit::acquire(&self.attached, inbound).ok_or(Refusal::Unavailable)?;
        let (client, now) = (request.client, Instant::now());
        let mut session = Session::begin(permit, inbound, client, destination, 1, now);
        session.prove(self.own.clone(), request.peer);
        if !self.attached.workload.addresses.contains(&destination.ip()) {
            let text = "the peer asks for an address that the workload does not have";
            session.failed(io::Error::other(text));
            session.end(Flag::NoRoute);
            return Err(Refusal::BadRequest);
        }
        let (_, index) = self.shared.relay.index();
        if let Err(refusal) = session.route(&index) {
            session.end(refusal.flag);
            return Err(match refusal.flag {
                // Policies that have not been read yet may allow the stream.
                Flag::Denied if refusal.is_unknown => Refusal::Unavailable,
                Flag::Denied => Refusal::Denied,
                Flag::Recursive => Refusal::BadRequest,
                _ => Refusal::Unavailable,
            });
        }
        Ok((session, destination))
    }

    /// Connects to the application, as the proxy does for plain connections.
    async fn connect_to(&self, client: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
        let manner = &self.shared.manner;
        let plain = Manner {
            mark: manner.transparent_mark.or(manner.mark),
            from: manner.transparent_mark.map(|_| From {
                ip: client.ip(),
                port: None,
                by_loopback: self.attached.namespace.is_some(),
            }),
            speaks: false,
        };
        let dialled = timeout(manner.connect_timeout, dial(&self.attached, to, plain)).await;
        let socket = dialled.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        socket::send_at_once(&socket);
        manner.patience.apply(&socket);
        Ok(socket)
    }
}

impl Inbound for Arrive {
    async fn connect(&self, request: Request) -> Result<Accepted, Refusal> {
        let client = request.client;
        let (mut session, destination) = self.begin(request)?;
        let entry = self.shared.live.add(&self.attached, Direction::Inbound);
        // Returns the one destination, because no attempt was made before.
        session.next_endpoint();
        let connected = tokio::select! {
            connected = self.connect_to(client, destination) => connected,
            () = entry.flow().until_end() => {
                session.end(entry.cause());
                return Err(Refusal::Unavailable);
            }
        };
        let socket = match connected {
            Ok(socket) => socket,
            Err(error) => {
                session.failed(error);
                session.end(Flag::ConnectFailure);
                return Err(Refusal::Unavailable);
            }
        };
        let (_, index) = self.shared.relay.index();
        session.reached(&index);
        entry.reached(session);
        // The engine judged policies that arrived during the attempt without this connection.
        let (_, index) = self.shared.relay.index();
        if entry.judge(&index) {
            socket::reset_on_close(&socket);
            entry.end(CloseReason::Aborted);
            return Err(Refusal::Denied);
        }
        let flow: Arc<Flow> = Arc::clone(entry.flow());
        Ok(Accepted {
            socket,
            flow,
            done: Box::new(move |ended: CloseReason| entry.end(ended)),
        })
    }

    fn client(&self, ip: IpAddr) -> Client {
        self.shared.relay.index().1.client(ip)
    }

    fn stalled(&self) {
        self.attached.count_stalled(Instant::now());
    }

    fn waits(&self, exceeded: Exceeded) {
        self.attached.count_bounded(exceeded, false);
    }

    fn failed(&self, client: SocketAddr, error: &Error) {
        let what = match error {
            Error::TooMany { kind, .. } | Error::Displaced { kind, .. } => Some(*kind),
            _ => None,
        };
        if let Some(what) = what {
            let holder = "one client";
            self.attached.count_bounded(Exceeded { holder, what }, true);
        }
        let name = &self.attached.workload.name;
        tracing::debug!("{name}: tunnel from {client}: {error}");
    }
}
