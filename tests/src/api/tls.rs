//! The server's certificate, and whom clients must trust to accept it.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::serve::Listener;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// A certificate authority and a certificate by it.
pub struct Identity {
    /// The authority's certificate, PEM.
    pub authority: String,
    config: Arc<ServerConfig>,
}

impl Identity {
    /// For a server with these names and addresses.
    pub fn new(names: &[String]) -> io::Result<Self> {
        let wrong = io::Error::other::<rcgen::Error>;
        let mut authority = CertificateParams::new(Vec::new()).map_err(wrong)?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority =
            CertifiedIssuer::self_signed(authority, KeyPair::generate().map_err(wrong)?)
                .map_err(wrong)?;
        let key = KeyPair::generate().map_err(wrong)?;
        let certificate = CertificateParams::new(names)
            .and_then(|params| params.signed_by(&key, &authority))
            .map_err(wrong)?;
        let config =
            ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(io::Error::other)?
                .with_no_client_auth()
                .with_single_cert(
                    vec![certificate.der().clone()],
                    PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
                )
                .map_err(io::Error::other)?;
        Ok(Self {
            authority: authority.pem(),
            config: Arc::new(config),
        })
    }

    /// Connections with TLS.
    pub fn listener(&self, inner: TcpListener) -> TlsListener {
        TlsListener {
            inner,
            acceptor: TlsAcceptor::from(Arc::clone(&self.config)),
        }
    }
}

/// Accepts connections with TLS.
pub struct TlsListener {
    inner: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, address)) = self.inner.accept().await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            let _ = stream.set_nodelay(true);
            // One at a time: clients here are few, and none is slow in its handshake.
            if let Ok(Ok(stream)) =
                timeout(Duration::from_secs(5), self.acceptor.accept(stream)).await
            {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.inner.local_addr()
    }
}
