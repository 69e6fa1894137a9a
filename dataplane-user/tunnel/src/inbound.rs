//! The side that accepts: serves the tunnels of peers, and connects their streams to applications.

use std::{
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use bytes::Bytes;
use h2::{
    Reason, RecvStream,
    server::{self, SendResponse},
};
use http::{HeaderMap, Method, Response, StatusCode};
use identity::Identities;
use model::Identity;
use relay::{Client, Exceeded, socket};
use tokio::{
    io::BufReader,
    net::TcpStream,
    sync::watch,
    time::{Duration, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    Core, PAUSE, READ,
    bounds::{Admission, Place, Socket},
    budget::Account,
    copy::{CloseReason, Flow, Stream},
    error::{Error, Phase},
    guard::{Bucket, Guard, PeerState},
    headers::Statements,
    outbound::{other, tls_failed},
    request::{Refusal, Request},
    tls::{self, Check},
    tunnel::{self, Keepalive, Lease},
    wire::Wire,
    workers::{Worker, least},
};

/// Streams that a peer may reset before their answer, in a burst and in each second: each costs a connection to the
/// application (rapid reset).
const GIVEN_UP: (u32, u32) = (1000, 200);
/// A tunnel that waits tries to take the place of another one each time that it has paused so often.
const TRIES: u64 = 10;
/// The time for which a failed handshake keeps its place. This limits the rate of handshakes, and so their CPU time, because
/// places are limited.
pub const FAILED: Duration = Duration::from_secs(1);

/// A connection that the application has accepted.
pub struct Accepted {
    /// The connection.
    pub socket: TcpStream,
    /// The connection's counters: bytes from the application, and bytes to the application.
    pub flow: Arc<Flow>,
    /// Called when the connection has ended.
    pub done: Box<dyn FnOnce(CloseReason) + Send>,
}

/// Chooses the destinations of peers' streams, and connects to them.
pub trait Inbound: Send + Sync + 'static {
    /// Connects to the application. The peer gets the answer when the future is ready. If the peer resets the stream before,
    /// the future is dropped.
    ///
    /// # Errors
    /// The reason for refusing the stream.
    fn connect(&self, request: Request) -> impl Future<Output = Result<Accepted, Refusal>> + Send;

    /// Returns the headers of the answer 200, which describe the workload.
    fn headers(&self) -> HeaderMap;

    /// Returns the client with this address, which has a share of the tunnels.
    fn client(&self, ip: IpAddr) -> Client;

    /// Reports that a stream is refused whose application has not accepted the connection: the peer has sent much meanwhile, and
    /// the budget is exceeded.
    fn stalled(&self);

    /// Reports that a tunnel waits in the backlog.
    fn waits(&self, exceeded: Exceeded);

    /// Reports that a tunnel could not be established, or was cut.
    fn failed(&self, client: SocketAddr, error: &Error);
}

/// A listening socket that is served. Dropping it closes the socket and ends its tunnels.
pub struct Listening {
    /// Starts the drain. The accept loop and each tunnel of the socket have a receiver.
    drain: watch::Sender<()>,
}

impl Listening {
    /// Closes the socket, and sends GOAWAY to the peers: they begin no more streams. Handshakes that have begun go on, with the
    /// streams that the peers make them for. Returns at once.
    pub fn begin_drain(&self) {
        self.drain.send_replace(());
    }

    /// Returns whether all streams have ended after [`Listening::begin_drain`].
    pub fn is_drained(&self) -> bool {
        self.drain.is_closed()
    }
}

/// The state that the tunnels of a listening socket share.
struct Served<I, A> {
    core: Arc<Core<I>>,
    attachment: u64,
    own: Identity,
    account: Arc<Account>,
    inbound: Arc<A>,
}

pub(super) fn listen<I: Identities + 'static>(
    core: &Arc<Core<I>>,
    workers: &Arc<[Worker]>,
    listener: TcpListener,
    (attachment, own): (u64, Identity),
    inbound: Arc<impl Inbound>,
) -> io::Result<Listening> {
    socket::prepare(&listener)?;
    let (drain, drains) = watch::channel(());
    let served = Arc::new(Served {
        core: Arc::clone(core),
        attachment,
        account: core.budget.account(own.namespace()),
        own,
        inbound,
    });
    let all = Arc::clone(workers);
    least(workers).spawn(async move {
        // The runtime of this thread must register the socket.
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
    let own = served.core.bounds.socket(served.own.namespace());
    loop {
        let accepted = tokio::select! {
            biased;
            _ = drains.changed() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((socket, client)) = accepted.and_then(|(socket, client)| {
            // The runtime of another thread may serve the connection.
            Ok((socket.into_std()?, socket::plain(client)))
        }) else {
            sleep(PAUSE).await;
            continue;
        };
        // A drain goes on with the tunnel that is accepted already, unless it has no place.
        let placed = tokio::select! {
            () = until_dropped(drains.clone()) => return,
            placed = place(served, &own, client.ip(), &drains) => placed,
        };
        let place = match placed {
            Ok(place) => place,
            Err(refused) => {
                socket::reset_on_close(&socket);
                let Some((has, kind)) = refused else {
                    return;
                };
                let to = client;
                let error = Error::TooMany { to, has, kind };
                served.inbound.failed(client, &error);
                continue;
            }
        };
        let (served, drains, worker) = (Arc::clone(served), drains.clone(), least(workers));
        let spawner = worker.clone();
        worker.spawn(async move {
            let ended = tokio::select! {
                ended = serve(&served, &spawner, socket, client, drains, &place) => ended,
                kind = place.until_lost() => Err(Error::Displaced { to: client, kind }),
            };
            let Err(error) = ended else {
                return;
            };
            served.inbound.failed(client, &error);
            // A handshake that reached its time limit has kept its place for longer.
            if place.is_unfinished() && !matches!(error, Error::Timeout { .. }) {
                sleep(FAILED).await;
            }
        });
    }
}

/// Waits until the [`Listening`] is dropped.
async fn until_dropped(mut drains: watch::Receiver<()>) {
    while drains.changed().await.is_ok() {}
}

/// Waits until the listening socket has a place for a tunnel of this client. Tries every second to take the place of another tunnel.
///
/// # Errors
/// The number and the kind of tunnels that the client has, if this is its share. `None`: the tunnel waits, and the socket is drained.
async fn place<I, A: Inbound>(
    served: &Served<I, A>,
    own: &Socket,
    client: IpAddr,
    drains: &watch::Receiver<()>,
) -> Result<Place, Option<(usize, &'static str)>> {
    let client = served.inbound.client(client);
    let mut tries = 0_u64;
    loop {
        let has_waited = !tries.is_multiple_of(TRIES);
        match served.core.bounds.admit(own, &client, has_waited) {
            Admission::Admitted(place) => return Ok(place),
            Admission::Refused(has, kind) => return Err(Some((has, kind))),
            Admission::Wait(exceeded) => {
                if drains.has_changed().unwrap_or(true) {
                    return Err(None);
                }
                if tries == 0 {
                    served.inbound.waits(exceeded);
                }
                sleep(PAUSE).await;
                tries += 1;
            }
        }
    }
}

type Tls = tokio_rustls::server::TlsStream<BufReader<Wire>>;
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
    let socket = Wire::new(socket, core.settings.patience());
    let socket = BufReader::with_capacity(READ, socket);
    let mut stream = TlsAcceptor::from(config)
        .accept(socket)
        .await
        .map_err(failed)?;
    let peer = check.complete(stream.get_mut().1, client)?;
    let peer_state = Arc::new(PeerState::default());
    let stream = Guard::new(stream, true, Arc::clone(&peer_state));
    let connection = limited!(server::Builder::new())
        .handshake(stream)
        .await
        .map_err(|cause| super::outbound::broken(client, Arc::new(cause), &peer_state))?;
    let ends = (served.attachment, None);
    let entry = core.registry.add(peer, client, ends, peer_state);
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
    place: &Place,
) -> Result<(), Error> {
    let settings = &served.core.settings;
    let socket = TcpStream::from_std(socket).map_err(|cause| Error::Tls {
        to: client,
        cause: Arc::new(cause),
    })?;
    let handshake = timeout(settings.handshake, handshake(served, socket, client));
    // A drain lets the handshake finish: a connection of the peer's workload waits for it.
    let (mut connection, entry) = tokio::select! {
        made = handshake => made.map_err(|_| Error::Timeout {
            to: client,
            phase: Phase::Handshake,
        })??,
        () = until_dropped(drains.clone()) => return Ok(()),
    };
    place.finish(&entry.tunnel);
    let (tunnel, mut keepalive) = (&entry.tunnel, Keepalive::new(connection.ping_pong()));
    let given_up = Arc::new(Mutex::new(Bucket::new(GIVEN_UP.0, GIVEN_UP.1)));
    let mut tick = interval(settings.ping.min(settings.idle) / 2);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_draining = false;
    loop {
        if !is_draining && tunnel.peer.until <= SystemTime::now() {
            is_draining = true;
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
                    // In memory of its own, which an established stream does not hold.
                    let answering = Box::pin(asked.answer(request, respond));
                    worker.spawn(relay(answering));
                }
                Some(Err(cause)) => {
                    let is_io = cause.is_io();
                    return match tunnel.broken(cause) {
                        error @ (Error::Flood { .. } | Error::Alert { .. } | Error::Stuck { .. }) => Err(error),
                        error if !is_io => Err(error),
                        // The peer has closed its socket, which resets open streams.
                        _ => Ok(()),
                    };
                }
                None => return Ok(()),
            },
            () = tunnel.until_end() => {
                let Some(what) = tunnel.peer_state.flood() else {
                    return Ok(());
                };
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                // Sends GOAWAY if the socket takes it in time.
                let _ = timeout(PAUSE, poll_fn(|cx| connection.poll_closed(cx))).await;
                return Err(Error::Flood { to: client, what });
            }
            drain = drains.changed() => {
                if drain.is_err() {
                    return Ok(());
                }
                is_draining = true;
                connection.graceful_shutdown();
            }
            _ = tick.tick() => {
                let (silent, idle) = keepalive.tick(tunnel);
                if silent >= settings.patience() {
                    return Err(Error::Silent { to: client });
                }
                // Twice the time, because normally the side that connects ends an idle tunnel.
                if idle >= settings.idle * 2 && !is_draining {
                    is_draining = true;
                    connection.graceful_shutdown();
                }
            }
        }
    }
}

/// Waits for a stream and its connection, and relays the connection.
async fn relay(answering: Pin<Box<impl Future<Output = Option<(Stream, Accepted)>>>>) {
    if let Some((stream, accepted)) = answering.await {
        let ended = stream.copy(accepted.socket, &accepted.flow).await;
        (accepted.done)(ended);
    }
}

/// A stream that a peer has requested.
struct Asked<I, A> {
    served: Arc<Served<I, A>>,
    lease: Lease,
    given_up: Arc<Mutex<Bucket>>,
    client: SocketAddr,
}

impl<I: Identities + 'static, A: Inbound> Asked<I, A> {
    /// Answers the request. Returns the stream with its connection to the application, if the answer is 200.
    async fn answer(
        self,
        request: http::Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
    ) -> Option<(Stream, Accepted)> {
        let (head, mut recv) = request.into_parts();
        let answer = |status: StatusCode| {
            let mut response = Response::new(());
            *response.status_mut() = status;
            response
        };
        let refuse = |respond: &mut SendResponse<Bytes>, refusal: Refusal| {
            // Fails if the peer has ended the stream or the tunnel.
            let _ = respond.send_response(answer(refusal.status()), true);
        };
        let authority = head.uri.authority().cloned();
        let Some(authority) = authority.filter(|_| head.method == Method::CONNECT) else {
            refuse(&mut respond, Refusal::BadRequest);
            return None;
        };
        let tunnel = &self.lease.0;
        tunnel.read_baggage(&head.headers);
        let request = Request {
            peer: tunnel.peer.identity.clone(),
            client: self.client,
            authority,
            statements: Statements::read(&head.headers, tunnel.baggage()),
        };
        // Its headers would stay for as long as the stream.
        drop(head);
        if self.lease.0.peer.until <= SystemTime::now() {
            refuse(&mut respond, Refusal::Unavailable);
            return None;
        }
        let connected = tokio::select! {
            connected = self.served.inbound.connect(request) => connected,
            _ = poll_fn(|cx| respond.poll_reset(cx)) => {
                self.note_given_up();
                return None;
            }
            // Drops the attempt: the peer has sent too much before the answer.
            () = self.served.account.count_unanswered(&mut recv) => {
                self.served.inbound.stalled();
                Err(Refusal::Unavailable)
            }
        };
        let accepted = match connected {
            Ok(accepted) => accepted,
            Err(refusal) => {
                refuse(&mut respond, refusal);
                return None;
            }
        };
        let mut response = answer(StatusCode::OK);
        *response.headers_mut() = self.served.inbound.headers();
        let Ok(send) = respond.send_response(response, false) else {
            self.note_given_up();
            socket::reset_on_close(&accepted.socket);
            (accepted.done)(CloseReason::StreamReset);
            return None;
        };
        let stream = Stream {
            send,
            recv,
            account: Arc::clone(&self.served.account),
            lease: self.lease,
        };
        Some((stream, accepted))
    }

    /// Counts a stream that the peer has given up. Cuts the tunnel if the peer gives up too many streams.
    fn note_given_up(&self) {
        let mut given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        if !given_up.take() {
            let tunnel = &self.lease.0;
            (tunnel.peer_state).set_flood("RST_STREAM before the answer");
            tunnel.end();
        }
    }
}

#[test]
fn an_established_stream_holds_little_memory() {
    let size = size_of_val(&relay(Box::pin(async { None })));
    assert!(size <= 656, "{size} bytes");
}
