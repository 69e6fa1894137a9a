//! Inbound streams, which the engine connects to the application of a workload.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use http::HeaderMap;
use model::{Binding, Identity};
use relay::{
    Attached, Baggage, Client, Direction, Exceeded, Flag, Permit, Session,
    socket::{self, From, Manner},
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::timeout};

use super::{
    super::{
        copy::{CloseReason, Flow},
        error::Error,
        headers,
        inbound::{Accepted, Inbound},
        request::{Refusal, Request},
    },
    Shared,
    dial::dial,
    proxy_header,
};

/// Connects inbound streams to one workload.
pub struct Arrive {
    shared: Arc<Shared>,
    attached: Arc<Attached>,
    /// The identity of the workload.
    own: Identity,
}

/// A connection to the application.
struct To {
    /// The address.
    at: SocketAddr,
    /// The bytes that go before those of the stream.
    header: Option<Vec<u8>>,
}

/// Returns the connection of a stream to a workload with this binding. The stream is for `authority`.
fn to(
    binding: Option<Binding>,
    destination: SocketAddr,
    request: &Request,
    authority: SocketAddr,
) -> Result<To, Refusal> {
    let Some(binding) = binding.filter(|binding| binding.has_header) else {
        return Ok(To {
            at: destination,
            header: None,
        });
    };
    let header = proxy_header::header(request.client, authority, &request.peer);
    // If the application listens only at the loopback interface, no client but the agent can write a header.
    let ip = match (binding.port, destination) {
        (None, _) => destination.ip(),
        (Some(_), SocketAddr::V4(_)) => Ipv4Addr::LOCALHOST.into(),
        (Some(_), SocketAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
    };
    Ok(To {
        at: SocketAddr::new(ip, destination.port()),
        header: Some(header.ok_or(Refusal::BadRequest)?),
    })
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

    /// Begins the session of a stream. Refuses the stream if policies or limits forbid it. If the workload is a Pod of a Gateway
    /// with a binding, the stream goes to the Pod, and policies judge it by the port of the Pod.
    fn begin(&self, request: Request) -> Result<(Session, To), Refusal> {
        let authority = socket::plain(request.destination().ok_or(Refusal::BadRequest)?);
        let (_, index) = self.shared.relay.index();
        let bound = index.bound(&self.attached.workload);
        let binding = bound.as_ref().map(|(_, binding)| *binding);
        let destination = match binding {
            Some(binding) => self.bound_to(binding, request.client, authority)?,
            None => authority,
        };
        let to = to(binding, destination, &request, authority)?;
        let inbound = Direction::Inbound;
        let permit = Permit::acquire(&self.attached, inbound).ok_or(Refusal::Unavailable)?;
        let (client, now) = (request.client, Instant::now());
        let mut session = Session::begin(permit, inbound, client, destination, 1, now);
        if let Some((gateway, _)) = bound {
            session.arrives(gateway, authority);
        }
        session.prove(self.own.clone(), request.peer, request.statements.baggage);
        if let Some(host) = &request.statements.host {
            session.name_service(host, &index);
        }
        if let Some(trace) = request.statements.trace {
            let name = &self.attached.workload.name;
            tracing::debug!("{name}: connection {trace} from {client} to {authority}");
        }
        if !self.attached.workload.addresses.contains(&destination.ip()) {
            let text = "the peer asks for an address that the workload does not have";
            session.failed(io::Error::other(text));
            session.end(Flag::NoRoute);
            return Err(Refusal::BadRequest);
        }
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
        // The route judges the Pod's address. With a header, the connection goes to the loopback interface.
        if self.attached.is_own(to.at) {
            session.end(Flag::Recursive);
            return Err(Refusal::BadRequest);
        }
        Ok((session, to))
    }

    /// Returns the workload's address and the port of its binding, by which policies judge a stream.
    fn bound_to(
        &self,
        binding: Binding,
        client: SocketAddr,
        authority: SocketAddr,
    ) -> Result<SocketAddr, Refusal> {
        let mut own = self.attached.workload.addresses.iter();
        let own = own.find(|ip| ip.is_ipv4() == client.is_ipv4());
        let port = binding.port.unwrap_or(authority.port());
        Ok(SocketAddr::new(*own.ok_or(Refusal::BadRequest)?, port))
    }

    /// Connects to the application, as the proxy does for plain connections. With a header, connects from an own address.
    async fn connect_to(&self, client: SocketAddr, to: &To) -> io::Result<TcpStream> {
        let manner = &self.shared.manner;
        let transparent_mark = manner.transparent_mark.filter(|_| to.header.is_none());
        let plain = Manner {
            mark: transparent_mark.or(manner.mark),
            from: transparent_mark.map(|_| From {
                ip: client.ip(),
                port: None,
                by_loopback: self.attached.namespace.is_some(),
            }),
            speaks: false,
        };
        let dialled = timeout(manner.connect_timeout, async {
            let mut socket = dial(&self.attached, to.at, plain).await?;
            socket::send_at_once(&socket);
            if let Some(header) = &to.header {
                // If the attempt is given up meanwhile, the application must not take the header for a whole connection.
                socket::reset_on_close(&socket);
                socket.write_all(header).await?;
                socket::end_on_close(&socket);
            }
            io::Result::Ok(socket)
        });
        let dialled = dialled.await;
        let socket = dialled.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        manner.patience.apply(&socket);
        Ok(socket)
    }
}

impl Inbound for Arrive {
    async fn connect(&self, request: Request) -> Result<Accepted, Refusal> {
        let client = request.client;
        let (mut session, to) = self.begin(request)?;
        let entry = self.shared.live.add(&self.attached, Direction::Inbound);
        // Returns the one destination, because no attempt was made before.
        session.next_endpoint();
        let connected = tokio::select! {
            connected = self.connect_to(client, &to) => connected,
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

    fn headers(&self) -> HeaderMap {
        let (_, index) = self.shared.relay.index();
        headers::answer(&Baggage::text(&self.attached.workload, index.snapshot()))
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
        let exceeded = match error {
            Error::TooMany { kind, .. } => Some(("one client", *kind)),
            Error::Displaced { kind, .. } => Some(("several clients", *kind)),
            _ => None,
        };
        if let Some((holder, what)) = exceeded {
            self.attached.count_bounded(Exceeded { holder, what }, true);
        }
        let name = &self.attached.workload.name;
        tracing::debug!("{name}: tunnel from {client}: {error}");
    }
}
