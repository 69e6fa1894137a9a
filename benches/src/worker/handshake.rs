//! A client of tunnels that only makes handshakes.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    sync::Arc,
};

use anyhow::Context as _;
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
    version::TLS13,
};

/// The preface of HTTP/2, and SETTINGS without a setting.
const BEGIN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// The length of a frame's header, in bytes.
const HEADER: usize = 9;
/// The types of frames.
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// The flag of SETTINGS that acknowledges the peer's.
const ACK: u8 = 1;

/// The client's configuration of TLS.
pub struct Client(Arc<ClientConfig>);

impl Client {
    /// Reads a file with a certificate and its key, in PEM.
    ///
    /// # Errors
    /// Fails if the file is none of that.
    pub fn read(file: &Path) -> anyhow::Result<Self> {
        let pem = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>()?;
        let provider = Arc::new(default_provider());
        let schemes = provider
            .signature_verification_algorithms
            .supported_schemes();
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unverified(schemes)))
            .with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(&pem)?)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Self(Arc::new(config)))
    }

    /// Makes a full handshake of TLS and HTTP/2. The server acknowledges SETTINGS only after it has verified the client's
    /// certificate.
    ///
    /// # Errors
    /// Fails if the server refuses it, or does not answer in time.
    pub fn shake_hands(&self, socket: TcpStream) -> io::Result<()> {
        let name = ServerName::from(socket.peer_addr()?.ip());
        let session = ClientConnection::new(Arc::clone(&self.0), name).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(session, socket);
        stream.write_all(BEGIN)?;
        loop {
            let mut header = [0; HEADER];
            stream.read_exact(&mut header)?;
            let [high, middle, low, kind, flags, ..] = header;
            let length = u32::from_be_bytes([0, high, middle, low]);
            io::copy(&mut (&mut stream).take(length.into()), &mut io::sink())?;
            match kind {
                SETTINGS if flags & ACK == ACK => return Ok(()),
                GOAWAY => return Err(io::ErrorKind::ConnectionAborted.into()),
                _ => {}
            }
        }
    }
}

/// Accepts any server, and checks no signature: the client should cost less than the server that is measured.
#[derive(Debug)]
struct Unverified(Vec<SignatureScheme>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.clone()
    }
}
