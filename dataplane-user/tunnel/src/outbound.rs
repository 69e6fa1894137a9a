//! The side that connects: makes tunnels, and streams of them.

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
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, Version};
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
    guard::{Guard, Seen},
    pool::{Found, Key, Pool, Pooled, Progress},
    tls::{self, Check},
    tunnel::{Entry, Lease, Pulse, Tunnel},
    workers::Worker,
};

/// Connects by TCP, from the network namespace of the workload that connects. Called in the thread's runtime.
pub type Dial = Arc<
    dyn Fn(SocketAddr) -> Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>> + Send + Sync,
>;

/// Pooled tunnels that a stream tries: those that end while it asks for a place are replaced.
const TRIES: usize = 3;

/// A stream to make.
#[derive(Clone)]
pub struct Connect {
    /// The tunnel that it needs.
    pub key: Key,
    /// How that is connected.
    pub dial: Dial,
    /// Where the stream leads: an address and port of the destination, or a service's behind a waypoint.
    pub authority: Uri,
    /// The client's address, for `forwarded`.
    pub client: Option<SocketAddr>,
    /// The header `baggage`.
    pub baggage: Option<HeaderValue>,
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
    /// Makes a stream, in a tunnel that is up or a new one. It is given up if the result is dropped.
    ///
    /// # Errors
    /// Which side failed, and why. The text has no more to say than the log should.
    pub async fn connect(&self, connect: &Connect) -> Result<Stream, Error> {
        let to = connect.key.to;
        let deadline = Instant::now() + self.core.settings.connect;
        let mut tries = TRIES;
        loop {
            let (requests, lease, is_new) = self.place(connect, deadline).await?;
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
            // A tunnel that its peer is ending says so to one that asks for a place. No byte was sent, so that another
            // tunnel may be asked.
            let is_gone = failed.is_go_away() || failed.is_io();
            if is_gone {
                self.pool().remove(&connect.key, &tunnel);
            }
            tries -= 1;
            let is_refused = failed.reason() == Some(Reason::REFUSED_STREAM);
            if tries > 0 && (is_gone && !is_new || is_refused) {
                continue;
            }
            return Err(broken(to, failed, &tunnel.seen));
        }
    }

    /// Waits for a place in a tunnel. Returns also whether that is new.
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
                    // A task of its own: others wait for it, too.
                    let (making, key) = (self.clone(), key.clone());
                    let dial = Arc::clone(&connect.dial);
                    self.worker.spawn(async move {
                        making.make(key, dial, report, deadline).await;
                    });
                    progress
                }
            };
            let is_done = |progress: &Progress| matches!(progress, Progress::Done(_));
            // Not later than its own deadline, which may be the same: then it says more.
            let done = timeout_at(deadline, progress.wait_for(is_done)).await;
            match done.map(|done| done.map(|progress| progress.clone())) {
                Ok(Ok(Progress::Done(Ok(tunnel)))) => {
                    // Another one would likely fail alike.
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
        let headers = request.headers_mut();
        let forwarded = connect.client.map(|client| format!("for=\"{client}\""));
        let forwarded = forwarded.and_then(|text| HeaderValue::try_from(text).ok());
        headers.extend(forwarded.map(|value| (HeaderName::from_static("forwarded"), value)));
        let baggage = connect.baggage.clone();
        headers.extend(baggage.map(|value| (HeaderName::from_static("baggage"), value)));
        let mut requests = requests.ready().await.map_err(broken)?;
        let (response, send) = requests.send_request(request, false).map_err(broken)?;
        drop(requests);
        let response = response.await.map_err(broken)?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(Error::Refused { to, status });
        }
        let held = Arc::clone(&self.core.held);
        Ok(Stream::new(send, response.into_body(), held, lease))
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
                cause: "it has expired, and its source has not renewed it".into(),
            }));
        }
        let verifier = self.core.trust.verifier().map_err(Error::Roots)?;
        report.send_replace(Progress::Waiting(Phase::Connecting));
        let socket = dial(to).await.map_err(|cause| Error::Connect {
            to,
            cause: Arc::new(cause),
        })?;
        relay::socket::send_at_once(&socket);
        report.send_replace(Progress::Waiting(Phase::Handshake));
        let check = Check::new(verifier, Some(Arc::clone(&key.expected)));
        let tls_failed = |cause: io::Error| tls_failed(to, &check, cause);
        let config =
            tls::client(&own, Arc::clone(&check)).map_err(|error| tls_failed(other(error)))?;
        let connector = TlsConnector::from(config);
        // No SNI: the name is not sent.
        let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        let socket = BufReader::with_capacity(READ, socket);
        let mut stream = connector.connect(name, socket).await.map_err(tls_failed)?;
        let proof = check.complete(stream.get_mut().1, to)?;
        let seen = Arc::new(Seen::default());
        let stream = Guard::new(stream, false, Arc::clone(&seen));
        let handshake = limited!(client::Builder::new())
            .enable_push(false)
            .handshake(stream);
        let (requests, connection) = handshake
            .await
            .map_err(|cause| broken(to, cause.into(), &seen))?;
        let workload = Some(Arc::clone(&key.workload));
        let entry = self.core.registry.add(proof, to, workload, seen);
        check.renew(&self.core.trust, to)?;
        let pooled = Pooled {
            requests,
            tunnel: Arc::clone(&entry.tunnel),
            until: own.not_after.min(entry.tunnel.proof.until),
        };
        Ok((pooled, connection, entry))
    }

    /// Drives a tunnel until it ends. Dropping the connection resets its streams.
    async fn drive(&self, key: &Key, mut connection: Connection, entry: &Entry) {
        let settings = &self.core.settings;
        let (tunnel, mut pulse) = (&entry.tunnel, Pulse::new(connection.ping_pong()));
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
                    let (silent, idle) = pulse.tick(tunnel);
                    if silent >= settings.ping + settings.pong {
                        tunnel.fail(Error::Silent { to: key.to });
                        return;
                    }
                    if idle >= settings.idle {
                        self.pool().retire_if_idle(key, tunnel);
                    }
                }
            }
        }
    }
}

type Connection =
    client::Connection<Guard<tokio_rustls::client::TlsStream<BufReader<TcpStream>>>, Bytes>;

/// An error that is not the kernel's.
pub fn other(error: rustls::Error) -> io::Error {
    io::Error::other(error)
}

/// Says why TLS failed: which side refuses.
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

/// Says why a tunnel broke. With TLS 1.3, the side that connects learns only then that the other refuses its certificate.
pub fn broken(to: SocketAddr, cause: Arc<h2::Error>, seen: &Seen) -> Error {
    if let Some(what) = seen.flood() {
        return Error::Flood { to, what };
    }
    if let Some(alert) = seen.alert() {
        return Error::Alert { to, alert };
    }
    if seen.bytes() == 0 && cause.is_io() {
        let text = format!(
            "it closed the connection before it spoke HTTP/2, and may refuse this side's certificate: {cause}"
        );
        let cause = Arc::new(io::Error::other(text));
        return Error::Tls { to, cause };
    }
    if !seen.speaks() {
        let cause = cause.to_string().into();
        return Error::NotH2 { to, cause };
    }
    Error::Broken { to, cause }
}

/// The tunnel of a stream that failed.
impl Tunnel {
    /// Says why the tunnel broke.
    pub(super) fn broken(&self, cause: h2::Error) -> Error {
        broken(self.address, Arc::new(cause), &self.seen)
    }
}
