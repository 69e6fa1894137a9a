//! A certificate authority, workloads, and applications.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use identity::{Credential, Identities, IdentityError, Roots};
use model::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SanType, SerialNumber,
};
use relay::{Client, Exceeded};
use rustls::pki_types::PrivateKeyDer;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
};

use crate::{
    Settings, Tunnels,
    copy::{CloseReason, Flow, Stream},
    error::Error,
    headers::{self, Trace},
    inbound::{Accepted, Inbound, Listening},
    outbound::{Connect, Dial},
    pool::Key,
    request::{Refusal, Request},
};

pub const HOUR: Duration = Duration::from_hours(1);

pub fn identity(account: &str) -> Identity {
    identity_in("shop", account)
}

pub fn identity_in(namespace: &str, account: &str) -> Identity {
    Identity::new("cluster.local", namespace, account).unwrap()
}

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn roots(&self, revoked: &[u64]) -> Roots {
        let now = SystemTime::now();
        let revoked = revoked.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: now.into(),
            next_update: (now + HOUR).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Roots {
            by_domain: [("cluster.local".into(), vec![self.0.der().clone()])].into(),
            revoked: vec![list.signed_by(&self.0).unwrap().into()],
        }
    }

    /// Issues a certificate that is valid from `from` to `to`.
    pub fn certify(
        &self,
        of: &Identity,
        serial: u64,
        from: SystemTime,
        to: SystemTime,
    ) -> Credential {
        use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = vec![SanType::URI(of.to_string().try_into().unwrap())];
        params.extended_key_usages = vec![ServerAuth, ClientAuth];
        params.serial_number = Some(SerialNumber::from(serial));
        (params.not_before, params.not_after) = (from.into(), to.into());
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        Credential {
            identity: of.clone(),
            chain: vec![certificate.der().clone()],
            key: rustls::crypto::ring::sign::any_supported_type(&key).unwrap(),
            serial: serial.to_string().into(),
            not_before: from,
            not_after: to,
        }
    }
}

/// A source of certificates.
pub struct Certificates {
    pub authority: Authority,
    pub credentials: Mutex<HashMap<Identity, Arc<Credential>>>,
    pub roots: watch::Sender<Arc<Roots>>,
}

impl Certificates {
    /// Issues certificates for the client, the server and another namespace's server, with the serial numbers 1 to 3.
    pub fn new() -> Arc<Self> {
        Self::of(Authority::new())
    }

    pub fn of(authority: Authority) -> Arc<Self> {
        let roots = watch::Sender::new(Arc::new(authority.roots(&[])));
        let certificates = Self {
            authority,
            credentials: Mutex::default(),
            roots,
        };
        certificates.renew("client", 1);
        certificates.renew("server", 2);
        let now = SystemTime::now();
        certificates.set_of(identity_in("blog", "server"), 3, now - HOUR, now + HOUR);
        Arc::new(certificates)
    }

    pub fn renew(&self, account: &str, serial: u64) {
        let now = SystemTime::now();
        self.set(account, serial, now - HOUR, now + HOUR);
    }

    pub fn set(&self, account: &str, serial: u64, from: SystemTime, to: SystemTime) {
        self.set_of(identity(account), serial, from, to);
    }

    fn set_of(&self, of: Identity, serial: u64, from: SystemTime, to: SystemTime) {
        let credential = self.authority.certify(&of, serial, from, to);
        let mut credentials = self.credentials.lock().unwrap();
        credentials.insert(of, Arc::new(credential));
    }

    /// Lets the credential of an account end earlier than its certificate.
    pub fn expire(&self, account: &str, at: SystemTime) {
        let mut credentials = self.credentials.lock().unwrap();
        let credential = credentials.get_mut(&identity(account)).unwrap();
        Arc::get_mut(credential).unwrap().not_after = at;
    }

    pub fn get(&self, account: &str) -> Arc<Credential> {
        Arc::clone(&self.credentials.lock().unwrap()[&identity(account)])
    }
}

impl Identities for Certificates {
    async fn credential(&self, identity: &Identity) -> Result<Arc<Credential>, IdentityError> {
        let found = self.credentials.lock().unwrap().get(identity).cloned();
        found.ok_or_else(|| IdentityError {
            identity: identity.clone(),
            cause: "the test has no certificate for it".into(),
        })
    }

    fn roots(&self) -> watch::Receiver<Arc<Roots>> {
        self.roots.subscribe()
    }
}

/// A workload that accepts tunnels. It connects their streams to any requested loopback address.
pub struct Server {
    pub answer: Option<Refusal>,
    /// The number of connection attempts to applications.
    pub begun: AtomicUsize,
    /// Whether connection attempts hang.
    pub hangs: bool,
    /// The number of tunnels that had to wait.
    pub waited: AtomicUsize,
    /// The number of streams that were refused because the budget was exceeded.
    pub stalled: AtomicUsize,
    pub requests: mpsc::UnboundedSender<Request>,
    pub ended: mpsc::UnboundedSender<(CloseReason, [u64; 2])>,
    pub failed: mpsc::UnboundedSender<Error>,
}

impl Inbound for Server {
    async fn connect(&self, request: Request) -> Result<Accepted, Refusal> {
        let destination = request.destination();
        let _ = self.requests.send(request);
        if let Some(refusal) = self.answer {
            return Err(refusal);
        }
        let destination = destination.ok_or(Refusal::BadRequest)?;
        if !destination.ip().is_loopback() {
            return Err(Refusal::BadRequest);
        }
        self.begun.fetch_add(1, Ordering::Relaxed);
        if self.hangs {
            std::future::pending::<()>().await;
        }
        let socket = TcpStream::connect(destination).await;
        let socket = socket.map_err(|_| Refusal::Unavailable)?;
        let (flow, ended) = (Arc::new(Flow::default()), self.ended.clone());
        let counted = Arc::clone(&flow);
        Ok(Accepted {
            socket,
            flow,
            done: Box::new(move |how| {
                let _ = ended.send((how, counted.bytes()));
            }),
        })
    }

    fn headers(&self) -> http::HeaderMap {
        http::HeaderMap::new()
    }

    fn client(&self, ip: IpAddr) -> Client {
        Client::Address(ip)
    }

    fn stalled(&self) {
        self.stalled.fetch_add(1, Ordering::Relaxed);
    }

    fn waits(&self, _: Exceeded) {
        self.waited.fetch_add(1, Ordering::Relaxed);
    }

    fn failed(&self, _: SocketAddr, error: &Error) {
        let _ = self.failed.send(error.clone());
    }
}

/// The two sides of tunnels.
pub struct Mesh {
    pub client: Arc<Tunnels<Certificates>>,
    pub server: Tunnels<Certificates>,
    pub certificates: Arc<Certificates>,
    pub inbound: Arc<Server>,
    pub listening: Option<Listening>,
    pub at: SocketAddr,
    pub requests: mpsc::UnboundedReceiver<Request>,
    pub ended: mpsc::UnboundedReceiver<(CloseReason, [u64; 2])>,
    pub failed: mpsc::UnboundedReceiver<Error>,
}

pub fn settings() -> Settings {
    Settings {
        threads: 1,
        ..Settings::default()
    }
}

pub fn mesh() -> Mesh {
    mesh_of(settings(), |_| {})
}

pub fn mesh_of(settings: Settings, change: impl FnOnce(&mut Server)) -> Mesh {
    mesh_with(settings, Certificates::new(), None, change)
}

/// Starts both sides. `others`: the server's source of certificates, if the server has its own.
pub fn mesh_with(
    settings: Settings,
    certificates: Arc<Certificates>,
    others: Option<Arc<Certificates>>,
    change: impl FnOnce(&mut Server),
) -> Mesh {
    let deaths = threads::none_dies();
    let of_server = others.unwrap_or_else(|| Arc::clone(&certificates));
    let client = Tunnels::start(settings.clone(), Arc::clone(&certificates), &deaths).unwrap();
    let server = Tunnels::start(settings, of_server, &deaths).unwrap();
    let (requests, received) = mpsc::unbounded_channel();
    let (ended, ends) = mpsc::unbounded_channel();
    let (failed, failures) = mpsc::unbounded_channel();
    let mut inbound = Server {
        answer: None,
        begun: AtomicUsize::new(0),
        hangs: false,
        waited: AtomicUsize::new(0),
        stalled: AtomicUsize::new(0),
        requests,
        ended,
        failed,
    };
    change(&mut inbound);
    let inbound = Arc::new(inbound);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let listening = server.listen(
        listener,
        (2, identity("server")),
        Arc::clone(&inbound) as Arc<Server>,
    );
    Mesh {
        client: Arc::new(client),
        server,
        certificates,
        inbound,
        listening: Some(listening.unwrap()),
        at,
        requests: received,
        ended: ends,
        failed: failures,
    }
}

pub fn dial() -> Dial {
    Arc::new(|to| Box::pin(TcpStream::connect(to)))
}

pub fn to(at: SocketAddr, application: SocketAddr) -> Connect {
    Connect {
        key: Key {
            attachment: 1,
            source: identity("client"),
            expected: [identity("server")].into(),
            from: at.ip(),
            to: at,
            workload: "uid".into(),
        },
        dial: dial(),
        authority: application.to_string().parse().unwrap(),
        headers: headers::request(
            "10.0.0.1:4000".parse().unwrap(),
            Some("web.shop.svc.cluster.local"),
            Trace::new(),
            "k8s.cluster.name=c",
        ),
    }
}

/// Makes the server accept tunnels to another workload, in this namespace.
pub fn another_workload(mesh: &Mesh, namespace: &str) -> (SocketAddr, Listening) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let inbound = Arc::clone(&mesh.inbound);
    let own = (3, identity_in(namespace, "server"));
    (at, mesh.server.listen(listener, own, inbound).unwrap())
}

impl Mesh {
    /// Makes a stream, which stays open until the result is dropped.
    pub async fn connect(&self, connect: Connect) -> Result<Stream, Error> {
        let (report, made) = tokio::sync::oneshot::channel();
        self.client.outbound(move |outbound| async move {
            let _ = report.send(outbound.connect(&connect).await);
        });
        made.await.unwrap()
    }

    /// Opens a client's connection to an application, through a tunnel. The receiver gets its end.
    pub async fn open(
        &self,
        application: SocketAddr,
    ) -> (TcpStream, mpsc::UnboundedReceiver<(CloseReason, [u64; 2])>) {
        self.open_by(to(self.at, application)).await
    }

    pub async fn open_by(
        &self,
        connect: Connect,
    ) -> (TcpStream, mpsc::UnboundedReceiver<(CloseReason, [u64; 2])>) {
        let (client, captured) = pair().await;
        let captured = captured.into_std().unwrap();
        let (ended, ends) = mpsc::unbounded_channel();
        self.client.outbound(move |outbound| async move {
            let socket = TcpStream::from_std(captured).unwrap();
            let stream = outbound.connect(&connect).await.unwrap();
            let flow = Flow::default();
            let how = stream.copy(socket, &flow).await;
            let _ = ended.send((how, flow.bytes()));
        });
        (client, ends)
    }
}

pub async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let (client, accepted) = tokio::join!(TcpStream::connect(at), listener.accept());
    (client.unwrap(), accepted.unwrap().0)
}

/// Starts an application. The receiver gets its connections.
pub async fn application() -> (SocketAddr, mpsc::UnboundedReceiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let (accepted, connections) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            if accepted.send(socket).is_err() {
                return;
            }
        }
    });
    (at, connections)
}

/// Starts an application that sends back the bytes that it receives.
pub async fn echo() -> SocketAddr {
    let (at, mut connections) = application().await;
    tokio::spawn(async move {
        while let Some(mut socket) = connections.recv().await {
            tokio::spawn(async move {
                let (mut read, mut write) = socket.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
                let _ = write.shutdown().await;
            });
        }
    });
    at
}

pub async fn round_trip(socket: &mut TcpStream) {
    let mut answer = [0; 4];
    socket.write_all(b"ping").await.unwrap();
    socket.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"ping");
}

/// Waits until `is_so` returns `true`. Panics after 10 s.
pub async fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within 10 s: {what}");
}

/// Runs a test with a time limit.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    runtime.block_on(async {
        let limited = tokio::time::timeout(Duration::from_mins(1), test).await;
        limited.expect("the test ends within a minute");
    });
}

/// Returns the resident memory of this process in bytes.
pub fn memory() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
