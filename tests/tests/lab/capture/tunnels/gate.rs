//! A stand-in for a waypoint: accepts tunnels on a host, and connects all their streams to one application.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    sync::{Arc, mpsc},
    thread::JoinHandle,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use dataplane_tests::Host;
use h2::{RecvStream, SendStream, server};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
    version::TLS13,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::oneshot,
};
use tokio_rustls::TlsAcceptor;

/// A stream: its authority, and the identity of the client.
pub type Seen = (String, String);

/// The stand-in. Dropping it ends its tunnels.
pub struct Gate {
    pub seen: mpsc::Receiver<Seen>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Gate {
    /// Starts it on a host. `certificate`: a directory that `dataplane ca issue` has written.
    pub fn start(host: &Host, certificate: &Path, application: SocketAddr) -> Result<Self> {
        let acceptor = TlsAcceptor::from(Arc::new(config(certificate)?));
        let listener = host.listen((host.addresses()[0], super::HBONE))?;
        listener.set_nonblocking(true)?;
        let (report, seen) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = host.inside(move || {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener)?;
                tokio::select! {
                    ended = serve(listener, acceptor, application, report) => ended,
                    _ = stopped => Ok(()),
                }
            })
        });
        Ok(Self {
            seen,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the waypoint panicked: {panic:?}");
        }
    }
}

fn config(certificate: &Path) -> Result<ServerConfig> {
    let read = |name: &str| -> Result<Vec<CertificateDer<'static>>> {
        let all = CertificateDer::pem_file_iter(certificate.join(name))?;
        let all = all.collect::<Result<_, _>>();
        all.with_context(|| format!("{name} of the waypoint"))
    };
    let mut roots = RootCertStore::empty();
    for root in read("ca.crt")? {
        roots.add(root)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(clients)
        .with_single_cert(
            read("tls.crt")?,
            PrivateKeyDer::from_pem_file(certificate.join("tls.key"))?,
        )?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

async fn serve(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    application: SocketAddr,
    report: mpsc::Sender<Seen>,
) -> io::Result<()> {
    loop {
        let (socket, _) = listener.accept().await?;
        let (acceptor, report) = (acceptor.clone(), report.clone());
        tokio::spawn(async move {
            let ended = tunnel(socket, acceptor, application, report).await;
            if let Err(error) = ended {
                eprintln!("a tunnel of the waypoint: {error:#}");
            }
        });
    }
}

async fn tunnel(
    socket: TcpStream,
    acceptor: TlsAcceptor,
    application: SocketAddr,
    report: mpsc::Sender<Seen>,
) -> Result<()> {
    let stream = acceptor.accept(socket).await?;
    let chain = stream.get_ref().1.peer_certificates();
    let client = chain.and_then(|chain| identity(chain.first()?));
    let client = client.context("a certificate without an identity")?;
    let mut connection = server::handshake(stream).await?;
    while let Some(request) = connection.accept().await {
        let (request, mut respond) = request?;
        let authority = request.uri().authority().map(ToString::to_string);
        // Fails if the scenario has ended.
        let _ = report.send((authority.unwrap_or_default(), client.clone()));
        tokio::spawn(async move {
            let application = TcpStream::connect(application).await?;
            let send = respond.send_response(http::Response::new(()), false)?;
            relay(request.into_body(), send, application).await
        });
    }
    Ok(())
}

/// Returns the identity in a certificate. Its length is the byte before the text.
fn identity(certificate: &CertificateDer<'_>) -> Option<String> {
    let scheme = b"spiffe://";
    let at = certificate
        .windows(scheme.len())
        .position(|part| part == scheme)?;
    let length = usize::from(*certificate.get(at.checked_sub(1)?)?);
    let text = certificate.get(at..at + length)?;
    Some(String::from_utf8_lossy(text).into_owned())
}

async fn relay(
    mut body: RecvStream,
    mut send: SendStream<Bytes>,
    application: TcpStream,
) -> Result<()> {
    let (mut from, mut to) = application.into_split();
    let up = async {
        while let Some(data) = body.data().await {
            let data = data?;
            body.flow_control().release_capacity(data.len())?;
            to.write_all(&data).await?;
        }
        to.shutdown().await?;
        anyhow::Ok(())
    };
    let down = async {
        let mut bytes = vec![0; 16 << 10];
        loop {
            let count = from.read(&mut bytes).await?;
            send.send_data(bytes[..count].to_vec().into(), count == 0)?;
            if count == 0 {
                return anyhow::Ok(());
            }
        }
    };
    tokio::try_join!(up, down)?;
    Ok(())
}
