//! The side that connects: makes tunnels, and streams in them.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    time::SystemTime,
};

use bytes::Bytes;
use h2::{
    Reason,
    client::{self, SendRequest},
};
use http::{HeaderMap, Method, StatusCode, Uri, Version};
use identity::{Identities, IdentityError};
use rustls::pki_types::ServerName;
use tokio::{
    io::BufReader,
    net::TcpStream,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use tokio_rustls::TlsConnector;

use super::{
    Core, READ,
    copy::Stream,
    error::{Error, Phase},
    guard::{Guard, PeerState},
    pool::{Found, Key, Pool, Pooled, Progress},
    tls::{self, Check},
    tunnel::{Entry, Keepalive, Lease, Tunnel},
    wire::Wire,
    workers::Worker,
};

/// A function that connects by TCP, from the network namespace of the workload that connects. Called in the thread's
/// runtime.
pub type Dial = Arc<
    dyn Fn(SocketAddr) -> Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>> + Send + Sync,
>;

/// The maximum number of tunnels that a stream tries: a tunnel may end while the stream waits for its place.
const TRIES: usize = 3;

/// The parameters of an outbound stream.
#[derive(Clone)]
pub struct Connect {
    /// The key of its tunnel.
    pub key: Key,
    /// Connects a new tunnel.
    pub dial: Dial,
    /// The destination of the stream: address and port.
    pub authority: Uri,
    /// The headers of the request.
    pub headers: HeaderMap,
}

/// Makes streams on one thread.
pub struct Outbound<I> {
    core: Arc<Core<I>>,
    worker: Worker,
}

impl<I> Clone for Outbound<I> {
    fn clone(&self) -> Self {
        Self::new(&self.core, &self.worker)
    }
}

impl<I> Outbound<I> {
    pub(super) fn new(core: &Arc<Core<I>>, worker: &Worker) -> Self {
        Self {
            core: Arc::clone(core),
            worker: worker.clone(),
        }
    }

    fn pool(&self) -> &Pool {
        &self.core.pools[self.worker.number]
    }
}

impl<I: Identities + 'static> Outbound<I> {
    /// Makes a stream, in an established tunnel or a new one. Dropping the future gives the stream up.
    ///
    /// # Errors
    /// The side that failed, and the cause. The text contains nothing that a log must not contain.
    pub async fn connect(&self, connect: &Connect) -> Result<Stream, Error> {
        let to = connect.key.to;
        let deadline = Instant::now() + self.core.settings.connect;
        let mut tries = TRIES;
        loop {
            let (requests, lease, is_new) = match self.place(connect, deadline).await {
                Err(Error::Broken { cause, .. }) if tries > 1 && is_drain(&cause) => {
                    tries -= 1;
                    continue;
                }
                placed => placed?,
            };
            let tunnel = Arc::clone(&lease.0);
            let asked = self.ask(connect, requests, lease);
            let failed = match timeout_at(deadline, asked).await {
                Err(_) => {
                    let phase = Phase::Answer;
                    return Err(Error::Timeout { to, phase });
                }
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(Error::Broken { cause, .. })) => cause,
                Ok(Err(error)) => return Err(error),
            };
            // The peer has ended or is ending the tunnel. No byte of the stream was sent, so the stream may try another
            // tunnel.
            let is_gone = failed.is_go_away() || failed.is_io();
            if is_gone {
                self.pool().remove(&connect.key, &tunnel);
            }
            tries -= 1;
            let is_refused = failed.reason() == Some(Reason::REFUSED_STREAM);
            if tries > 0 && (is_gone && !is_new || is_drain(&failed) || is_refused) {
                continue;
            }
            return Err(broken(to, failed, &tunnel.peer_state));
        }
    }

    /// Waits for a place in a tunnel. Returns also whether the tunnel is new.
    async fn place(
        &self,
        connect: &Connect,
        deadline: Instant,
    ) -> Result<(SendRequest<Bytes>, Lease, bool), Error> {
        let (key, mut is_new) = (&connect.key, false);
        loop {
            let mut progress = match self.pool().find(key, self.core.settings.streams) {
                Found::Up(requests, lease) => return Ok((requests, lease, is_new)),
                Found::Wait(progress) => progress,
                Found::Make(report, progress) => {
                    // Runs as its own task, because other streams wait for the tunnel, too.
                    let (making, key) = (self.clone(), key.clone());
                    let dial = Arc::clone(&connect.dial);
                    self.worker.spawn(async move {
                        making.make(key, dial, report, deadline).await;
                    });
                    progress
                }
            };
            let is_done = |progress: &Progress| matches!(progress, Progress::Done(_));
            // The pending tunnel may have the same deadline. Its own error says more than a timeout of this wait.
            let done = timeout_at(deadline, progress.wait_for(is_done)).await;
            match done.map(|done| done.map(|progress| progress.clone())) {
                Ok(Ok(Progress::Done(Ok(tunnel)))) => {
                    // Another new tunnel would probably fail for the same cause.
                    if let Some(error) = tunnel.failure() {
                        return Err(error.clone());
                    }
                    is_new = true;
                }
                Ok(Ok(Progress::Done(Err(error)))) => return Err(error),
                Ok(Ok(Progress::Waiting(_)) | Err(_)) => return Err(Error::Ended { to: key.to }),
                Err(_) => {
                    let waiting = progress.borrow().clone();
                    return Err(match waiting {
                        Progress::Waiting(phase) => Error::Timeout { to: key.to, phase },
                        Progress::Done(Err(error)) => error,
                        Progress::Done(Ok(_)) => Error::Timeout {
                            to: key.to,
                            phase: Phase::Answer,
                        },
                    });
                }
            }
        }
    }

    /// Sends CONNECT, and waits for the answer.
    async fn ask(
        &self,
        connect: &Connect,
        requests: SendRequest<Bytes>,
        lease: Lease,
    ) -> Result<Stream, Error> {
        let to = connect.key.to;
        let broken = |cause| Error::Broken {
            to,
            cause: Arc::new(cause),
        };
        let mut request = http::Request::new(());
        *request.method_mut() = Method::CONNECT;
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = connect.authority.clone();
        request.headers_mut().clone_from(&connect.headers);
        let mut requests = requests.ready().await.map_err(broken)?;
        let (response, send) = requests.send_request(request, false).map_err(broken)?;
        drop(requests);
        let response = response.await.map_err(broken)?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(Error::Refused { to, status });
        }
        lease.0.read_baggage(response.headers());
        Ok(Stream {
            send,
            recv: response.into_body(),
            account: self.core.budget.account(connect.key.source.namespace()),
            lease,
        })
    }

    /// Makes a tunnel, puts it into the pool, and drives it to its end.
    async fn make(self, key: Key, dial: Dial, report: watch::Sender<Progress>, deadline: Instant) {
        let handshake = self.handshake(&key, &dial, &report);
        let made = timeout_at(deadline, handshake).await.unwrap_or_else(|_| {
            let waiting = report.borrow().clone();
            let phase = match waiting {
                Progress::Waiting(phase) => phase,
                Progress::Done(_) => Phase::Handshake,
            };
            Err(Error::Timeout { to: key.to, phase })
        });
        let (pooled, connection, entry) = match made {
            Ok(made) => made,
            Err(error) => {
                self.pool().made(&key, &report, Err(error));
                return;
            }
        };
        if self.pool().made(&key, &report, Ok(pooled)) {
            drop(report);
            self.drive(&key, connection, &entry).await;
            self.pool().remove(&key, &entry.tunnel);
        }
    }

    async fn handshake(
        &self,
        key: &Key,
        dial: &Dial,
        report: &watch::Sender<Progress>,
    ) -> Result<(Pooled, Connection, Entry), Error> {
        let to = key.to;
        let own = self.core.identities.credential(&key.source).await?;
        if own.not_after <= SystemTime::now() {
            return Err(Error::Identity(IdentityError {
                identity: key.source.clone(),
                cause: "the certificate has expired, and its source has not renewed it".into(),
            }));
        }
        let verifier = self.core.trust.verifier().map_err(Error::Roots)?;
        report.send_replace(Progress::Waiting(Phase::Connecting));
        let socket = dial(to).await.map_err(|cause| {
            // The peer accepted the connection and then reset it. Whether this ends `connect()` or the handshake is chance.
            let is_reset = cause.kind() == io::ErrorKind::ConnectionReset;
            let cause = Arc::new(cause);
            if is_reset {
                Error::Tls { to, cause }
            } else {
                Error::Connect { to, cause }
            }
        })?;
        relay::socket::send_at_once(&socket);
        report.send_replace(Progress::Waiting(Phase::Handshake));
        let check = Check::new(verifier, Some(Arc::clone(&key.expected)));
        let tls_failed = |cause: io::Error| tls_failed(to, &check, cause);
        let config =
            tls::client(&own, Arc::clone(&check)).map_err(|error| tls_failed(other(error)))?;
        let connector = TlsConnector::from(config);
        // rustls requires a name, but the configuration disables SNI, so the client does not send it.
        let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        let socket = Wire::new(socket, self.core.settings.patience());
        let socket = BufReader::with_capacity(READ, socket);
        let mut stream = connector.connect(name, socket).await.map_err(tls_failed)?;
        let peer = check.complete(stream.get_mut().1, to)?;
        let peer_state = Arc::new(PeerState::default());
        let stream = Guard::new(stream, false, Arc::clone(&peer_state));
        let handshake = limited!(client::Builder::new())
            .enable_push(false)
            .handshake(stream);
        let (requests, connection) = handshake
            .await
            .map_err(|cause| broken(to, cause.into(), &peer_state))?;
        let outbound = (Arc::clone(&key.workload), key.source.namespace());
        let ends = (key.attachment, Some(outbound));
        let entry = self.core.registry.add(peer, to, ends, peer_state);
        check.renew(&self.core.trust, to)?;
        let pooled = Pooled {
            requests,
            tunnel: Arc::clone(&entry.tunnel),
            until: own.not_after.min(entry.tunnel.peer.until),
        };
        Ok((pooled, connection, entry))
    }

    /// Drives a tunnel until it ends. Dropping the connection resets its streams.
    async fn drive(&self, key: &Key, mut connection: Connection, entry: &Entry) {
        let settings = &self.core.settings;
        let (tunnel, mut keepalive) = (&entry.tunnel, Keepalive::new(connection.ping_pong()));
        let mut tick = interval(settings.ping.min(settings.idle) / 2);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ended = &mut connection => {
                    let cause = ended.err().unwrap_or(Reason::NO_ERROR.into());
                    tunnel.fail(tunnel.broken(cause));
                    return;
                }
                () = tunnel.until_end() => return,
                _ = tick.tick() => {
                    let (silent, idle) = keepalive.tick(tunnel);
                    if silent >= settings.patience() {
                        tunnel.fail(Error::Silent { to: key.to });
                        return;
                    }
                    // Idle tunnels end early while the process has too many.
                    let namespace = key.source.namespace();
                    let is_crowded = self.core.registry.is_crowded(namespace, self.core.most);
                    let most = if is_crowded { settings.ping } else { settings.idle };
                    if idle >= most.min(settings.idle) {
                        self.pool().retire_if_idle(key, tunnel);
                    }
                }
            }
        }
    }
}

type Connection =
    client::Connection<Guard<tokio_rustls::client::TlsStream<BufReader<Wire>>>, Bytes>;

/// Returns whether the peer ended the tunnel because it drains. This may also end a new tunnel, which the peer accepted just before.
/// The peer's successor accepts the next one.
fn is_drain(cause: &h2::Error) -> bool {
    cause.reason() == Some(Reason::NO_ERROR) && !cause.is_reset()
}

/// Converts an error of rustls.
pub fn other(error: rustls::Error) -> io::Error {
    io::Error::other(error)
}

/// Returns the error for a TLS handshake that failed, by the side that refuses.
pub fn tls_failed(to: SocketAddr, check: &Check, cause: io::Error) -> Error {
    if let Some(Err(cause)) = check.result() {
        let cause = cause.clone();
        return Error::Peer { to, cause };
    }
    let inner = cause.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(rustls::Error::AlertReceived(alert)) => Error::Alert { to, alert: *alert },
        _ => Error::Tls {
            to,
            cause: Arc::new(cause),
        },
    }
}

/// Returns the error for a tunnel that broke. With TLS 1.3, the handshake of the client ends before the server verifies the
/// client's certificate, so a refusal breaks the new tunnel.
pub fn broken(to: SocketAddr, cause: Arc<h2::Error>, peer_state: &PeerState) -> Error {
    if let Some(what) = peer_state.flood() {
        return Error::Flood { to, what };
    }
    if let Some(alert) = peer_state.alert() {
        return Error::Alert { to, alert };
    }
    // The error of `Wire`, or the kernel's if the peer acknowledges no retransmission.
    let is_timeout = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
    if cause.get_io().is_some_and(is_timeout) {
        return Error::Stuck { to };
    }
    if peer_state.bytes() == 0 && cause.is_io() {
        let text = format!(
            "the peer closed the connection before it sent HTTP/2, and may refuse this side's certificate: {cause}"
        );
        let cause = Arc::new(io::Error::other(text));
        return Error::Tls { to, cause };
    }
    if !peer_state.speaks() {
        let cause = cause.to_string().into();
        return Error::NotH2 { to, cause };
    }
    Error::Broken { to, cause }
}

impl Tunnel {
    /// Returns the error for this tunnel, which broke.
    pub(super) fn broken(&self, cause: h2::Error) -> Error {
        broken(self.address, Arc::new(cause), &self.peer_state)
    }
}
