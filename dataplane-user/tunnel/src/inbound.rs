//! The side that accepts: serves the tunnels of peers, and leads their streams to applications.

use std::{
    collections::{HashMap, hash_map::Entry},
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use bytes::Bytes;
use h2::{
    Reason, RecvStream,
    server::{self, SendResponse},
};
use http::{Method, Response, StatusCode, uri::Authority};
use identity::Identities;
use model::Identity;
use relay::socket;
use tokio::{
    io::BufReader,
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Duration, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    Core, READ,
    copy::{CloseReason, Flow, Stream},
    error::{Error, Phase},
    guard::{Bucket, Guard, Seen},
    outbound::{other, tls_failed},
    tls::{self, Check},
    tunnel::{self, Lease, Pulse},
    workers::{Worker, least},
};

/// Streams that a peer may give up before they are answered, at once and in each second: each has cost a connection to
/// the application (rapid reset).
const GIVEN_UP: (u32, u32) = (1000, 200);
/// How long accepting pauses if there are no resources.
const PAUSE: Duration = Duration::from_millis(100);

/// A stream that a peer asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Who the peer is.
    pub peer: Identity,
    /// The address that the tunnel comes from: the client's.
    pub client: SocketAddr,
    /// Where the stream leads.
    pub authority: Authority,
}

impl Request {
    /// Where the stream leads, if the authority is an address and a port.
    pub fn destination(&self) -> Option<SocketAddr> {
        self.authority.as_str().parse().ok()
    }
}

/// Why a stream is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The destination is not this workload, or the request is wrong: 400.
    BadRequest,
    /// A policy denies it: 401.
    Denied,
    /// The application does not accept the connection, or the peer's certificate has expired since the handshake: 503.
    Unavailable,
}

impl Refusal {
    fn status(self) -> StatusCode {
        match self {
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::Denied => StatusCode::UNAUTHORIZED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// A connection that the application has accepted.
pub struct Accepted {
    /// The connection.
    pub socket: TcpStream,
    /// What it carries: first what the application has sent, then what it was sent.
    pub flow: Arc<Flow>,
    /// Called at its end.
    pub done: Box<dyn FnOnce(CloseReason) + Send>,
}

/// Decides where the streams of peers go.
pub trait Inbound: Send + Sync + 'static {
    /// Connects to the application. The peer is answered only then. Dropped if the peer gives the stream up.
    ///
    /// # Errors
    /// Why the peer is refused.
    fn connect(&self, request: Request) -> impl Future<Output = Result<Accepted, Refusal>> + Send;

    /// A tunnel could not be made, or was cut.
    fn failed(&self, client: SocketAddr, error: &Error);
}

/// A listening socket that is served. Dropping it closes the socket and ends its tunnels.
pub struct Listening {
    /// Starts the drain. The accept loop and each tunnel of the socket have a receiver.
    drain: watch::Sender<()>,
}

impl Listening {
    /// Closes the socket, and tells the peers to begin no streams (GOAWAY). Returns at once.
    pub fn begin_drain(&self) {
        self.drain.send_replace(());
    }

    /// Returns whether all streams have ended after [`Listening::begin_drain`].
    pub fn is_drained(&self) -> bool {
        self.drain.is_closed()
    }
}

/// How many tunnels come from each address.
#[derive(Default)]
struct Peers(Mutex<HashMap<IpAddr, usize>>);

/// A tunnel of an address.
struct Place {
    peers: Arc<Peers>,
    of: IpAddr,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Peers {
    /// Counts a tunnel; `None` if the address has `most` of them.
    fn admit(
        self: &Arc<Self>,
        of: IpAddr,
        most: usize,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Option<Place> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(of).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Place {
            peers: Arc::clone(self),
            of,
            _permit: permit,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let counts = self.peers.0.lock();
        let mut counts = counts.unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = counts.entry(self.of) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// What the tunnels of a listening socket share.
struct Served<I, A> {
    core: Arc<Core<I>>,
    own: Identity,
    inbound: Arc<A>,
}

pub(super) fn listen<I: Identities + 'static>(
    core: &Arc<Core<I>>,
    workers: &Arc<[Worker]>,
    listener: TcpListener,
    own: Identity,
    inbound: Arc<impl Inbound>,
) -> io::Result<Listening> {
    socket::prepare(&listener)?;
    let (drain, drains) = watch::channel(());
    let served = Arc::new(Served {
        core: Arc::clone(core),
        own,
        inbound,
    });
    let all = Arc::clone(workers);
    least(workers).spawn(async move {
        // The thread's runtime must register it.
        if let Ok(listener) = tokio::net::TcpListener::from_std(listener) {
            accept(&served, &all, &listener, drains).await;
        }
    });
    Ok(Listening { drain })
}

async fn accept<I: Identities + 'static, A: Inbound>(
    served: &Arc<Served<I, A>>,
    workers: &Arc<[Worker]>,
    listener: &tokio::net::TcpListener,
    mut drains: watch::Receiver<()>,
) {
    let settings = &served.core.settings;
    let (permits, peers) = (Arc::new(Semaphore::new(settings.tunnels)), Arc::default());
    loop {
        let accepted = async {
            // Fails only for a semaphore that was closed.
            let permit = Arc::clone(&permits).acquire_owned().await.ok();
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            _ = drains.changed() => return,
            accepted = accepted => accepted,
        };
        let Ok((socket, client)) = accepted.and_then(|(socket, client)| {
            // Another thread's runtime may serve it.
            Ok((socket.into_std()?, socket::plain(client)))
        }) else {
            sleep(PAUSE).await;
            continue;
        };
        let most = settings.tunnels_of_address;
        let Some(place) = Peers::admit(&peers, client.ip(), most, permit) else {
            socket::reset_on_close(&socket);
            let error = Error::TooMany { to: client, most };
            served.inbound.failed(client, &error);
            continue;
        };
        let (served, drains, worker) = (Arc::clone(served), drains.clone(), least(workers));
        let spawner = worker.clone();
        worker.spawn(async move {
            let _place = place;
            if let Err(error) = serve(&served, &spawner, socket, client, drains).await {
                served.inbound.failed(client, &error);
            }
        });
    }
}

type Tls = tokio_rustls::server::TlsStream<BufReader<TcpStream>>;
type Connection = server::Connection<Guard<Tls>, Bytes>;

async fn handshake<I: Identities + 'static, A: Inbound>(
    served: &Served<I, A>,
    socket: TcpStream,
    client: SocketAddr,
) -> Result<(Connection, tunnel::Entry), Error> {
    let core = &served.core;
    let own = core.identities.credential(&served.own).await?;
    let verifier = core.trust.verifier().map_err(Error::Roots)?;
    let check = Check::new(verifier, None);
    let failed = |cause: io::Error| tls_failed(client, &check, cause);
    let config = tls::server(&own, Arc::clone(&check)).map_err(|error| failed(other(error)))?;
    let socket = BufReader::with_capacity(READ, socket);
    let mut stream = TlsAcceptor::from(config)
        .accept(socket)
        .await
        .map_err(failed)?;
    let proof = check.complete(stream.get_mut().1, client)?;
    let seen = Arc::new(Seen::default());
    let stream = Guard::new(stream, true, Arc::clone(&seen));
    let connection = limited!(server::Builder::new())
        .handshake(stream)
        .await
        .map_err(|cause| super::outbound::broken(client, Arc::new(cause), &seen))?;
    let entry = core.registry.add(proof, client, None, seen);
    check.renew(&core.trust, client)?;
    Ok((connection, entry))
}

/// Serves one tunnel until it ends.
async fn serve<I: Identities + 'static, A: Inbound>(
    served: &Arc<Served<I, A>>,
    worker: &Worker,
    socket: std::net::TcpStream,
    client: SocketAddr,
    mut drains: watch::Receiver<()>,
) -> Result<(), Error> {
    let settings = &served.core.settings;
    let socket = TcpStream::from_std(socket).map_err(|cause| Error::Tls {
        to: client,
        cause: Arc::new(cause),
    })?;
    let handshake = timeout(settings.handshake, handshake(served, socket, client));
    let (mut connection, entry) = tokio::select! {
        made = handshake => made.map_err(|_| Error::Timeout {
            to: client,
            phase: Phase::Handshake,
        })??,
        // A peer that has no stream yet loses nothing.
        _ = drains.changed() => return Ok(()),
    };
    let (tunnel, mut pulse) = (&entry.tunnel, Pulse::new(connection.ping_pong()));
    let given_up = Arc::new(Mutex::new(Bucket::new(GIVEN_UP.0, GIVEN_UP.1)));
    let mut tick = interval(settings.ping.min(settings.idle) / 2);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_told = false;
    loop {
        if !is_told && tunnel.proof.until <= SystemTime::now() {
            is_told = true;
            connection.graceful_shutdown();
        }
        tokio::select! {
            stream = connection.accept() => match stream {
                Some(Ok((request, respond))) => {
                    let asked = Asked {
                        served: Arc::clone(served),
                        lease: tunnel.lease(),
                        given_up: Arc::clone(&given_up),
                        client,
                    };
                    worker.spawn(asked.answer(request, respond));
                }
                Some(Err(cause)) if cause.is_io() && tunnel.seen.flood().is_none() && tunnel.seen.alert().is_none() => {
                    // The peer has closed its socket: if a stream was open, it was reset.
                    return Ok(());
                }
                Some(Err(cause)) => return Err(tunnel.broken(cause)),
                None => return Ok(()),
            },
            () = tunnel.until_end() => {
                let Some(what) = tunnel.seen.flood() else {
                    return Ok(());
                };
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                // Sends it, if the socket takes it.
                let _ = timeout(PAUSE, poll_fn(|cx| connection.poll_closed(cx))).await;
                return Err(Error::Flood { to: client, what });
            }
            drain = drains.changed() => {
                if drain.is_err() {
                    return Ok(());
                }
                is_told = true;
                connection.graceful_shutdown();
            }
            _ = tick.tick() => {
                let (silent, idle) = pulse.tick(tunnel);
                if silent >= settings.ping + settings.pong {
                    return Err(Error::Silent { to: client });
                }
                // Twice: the side that connects is to end it.
                if idle >= settings.idle * 2 && !is_told {
                    is_told = true;
                    connection.graceful_shutdown();
                }
            }
        }
    }
}

/// A stream that was asked for.
struct Asked<I, A> {
    served: Arc<Served<I, A>>,
    lease: Lease,
    given_up: Arc<Mutex<Bucket>>,
    client: SocketAddr,
}

impl<I: Identities + 'static, A: Inbound> Asked<I, A> {
    async fn answer(self, request: http::Request<RecvStream>, mut respond: SendResponse<Bytes>) {
        let (head, recv) = request.into_parts();
        let answer = |status: StatusCode| {
            let mut response = Response::new(());
            *response.status_mut() = status;
            response
        };
        let refuse = |respond: &mut SendResponse<Bytes>, refusal: Refusal| {
            // Fails if the peer is gone.
            let _ = respond.send_response(answer(refusal.status()), true);
        };
        let (Method::CONNECT, Some(authority)) = (head.method, head.uri.authority()) else {
            refuse(&mut respond, Refusal::BadRequest);
            return;
        };
        if self.lease.0.proof.until <= SystemTime::now() {
            refuse(&mut respond, Refusal::Unavailable);
            return;
        }
        let connect = self.served.inbound.connect(Request {
            peer: self.lease.0.proof.peer.clone(),
            client: self.client,
            authority: authority.clone(),
        });
        let connected = tokio::select! {
            connected = connect => connected,
            _ = poll_fn(|cx| respond.poll_reset(cx)) => {
                self.note_given_up();
                return;
            }
        };
        let accepted = match connected {
            Ok(accepted) => accepted,
            Err(refusal) => {
                refuse(&mut respond, refusal);
                return;
            }
        };
        let sent = respond.send_response(answer(StatusCode::OK), false);
        drop(respond);
        let ended = if let Ok(send) = sent {
            let all_held = Arc::clone(&self.served.core.held);
            let stream = Stream::new(send, recv, all_held, self.lease);
            stream.copy(accepted.socket, &accepted.flow).await
        } else {
            self.note_given_up();
            socket::reset_on_close(&accepted.socket);
            CloseReason::StreamReset
        };
        (accepted.done)(ended);
    }

    /// Cuts the tunnel of a peer that gives up too many streams.
    fn note_given_up(&self) {
        let mut given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        if !given_up.take() {
            self.lease.0.seen.set_flood("RST_STREAM before the answer");
            self.lease.0.end();
        }
    }
}
