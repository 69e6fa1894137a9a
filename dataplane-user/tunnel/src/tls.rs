//! TLS of tunnels: version 1.3, both sides with a certificate, no name of the server, no resumption.
//!
//! Each handshake has its own configuration, because the configuration holds the expected identities of the peer and the
//! result of the verification.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use identity::{Credential, PeerError, Roots, Verifier};
use model::Identity;
use rustls::{
    CipherSuite, ClientConfig, ConnectionCommon, DigitallySignedStruct, DistinguishedName,
    ServerConfig, SignatureScheme,
    client::{
        ResolvesClientCert, Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ClientHello, NoServerSessionStorage, ResolvesServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    version::TLS13,
};
use tokio::sync::watch;

use super::{LARGE, error::Error};

/// The protocol that both sides must choose.
const H2: &[u8] = b"h2";

/// The cryptography of all tunnels: AES-GCM only, the cheaper suite first, and each key exchange that the provider has. No
/// other place names the provider.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    let mut provider = rustls::crypto::ring::default_provider();
    let suites = [
        CipherSuite::TLS13_AES_128_GCM_SHA256,
        CipherSuite::TLS13_AES_256_GCM_SHA384,
    ];
    let all = std::mem::take(&mut provider.cipher_suites);
    let find = |suite| all.iter().find(|known| known.suite() == suite).copied();
    provider.cipher_suites = suites.into_iter().filter_map(find).collect();
    Arc::new(provider)
});

/// Returns the cryptography of all tunnels, for the source of certificates.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::clone(&PROVIDER)
}

/// The current roots, parsed once for each change.
#[derive(Debug)]
pub struct Trust {
    roots: watch::Receiver<Arc<Roots>>,
    read: Mutex<Option<(Arc<Roots>, Arc<Verifier>)>>,
}

impl Trust {
    /// Follows these roots.
    pub fn new(roots: watch::Receiver<Arc<Roots>>) -> Self {
        Self {
            roots,
            read: Mutex::default(),
        }
    }

    /// Returns the verifier for the current roots.
    ///
    /// # Errors
    /// If the roots cannot be read: then no peer is trusted.
    pub fn verifier(&self) -> Result<Arc<Verifier>, Box<str>> {
        let roots = Arc::clone(&self.roots.borrow());
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, verifier)) = &*read
            && Arc::ptr_eq(of, &roots)
        {
            return Ok(Arc::clone(verifier));
        }
        let verifier = Verifier::new(&roots).map_err(|error| error.to_string())?;
        let verifier = Arc::new(verifier);
        *read = Some((roots, Arc::clone(&verifier)));
        Ok(verifier)
    }
}

/// A peer whose certificate the handshake has verified.
#[derive(Clone, Debug)]
pub struct VerifiedPeer {
    /// The identity in the certificate.
    pub identity: Identity,
    /// The certificate chain, which is verified again when the roots change.
    pub chain: Arc<[CertificateDer<'static>]>,
    /// The time of the handshake.
    pub at: SystemTime,
    /// The time at which the certificate expires: no stream begins later.
    pub until: SystemTime,
}

/// The verifier of the peer of one handshake. Keeps the result.
#[derive(Debug)]
pub struct Check {
    verifier: Arc<Verifier>,
    /// The identities that the peer may have; `None`: any identity of a trusted domain.
    expected: Option<Arc<[Identity]>>,
    result: OnceLock<Result<VerifiedPeer, PeerError>>,
}

impl Check {
    /// Makes a check for one handshake. `expected`: the identities that the peer may have; `None`: any identity of a trusted
    /// domain.
    pub fn new(verifier: Arc<Verifier>, expected: Option<Arc<[Identity]>>) -> Arc<Self> {
        Arc::new(Self {
            verifier,
            expected,
            result: OnceLock::new(),
        })
    }

    /// Returns the result; `None` before the peer has presented a certificate.
    pub fn result(&self) -> Option<&Result<VerifiedPeer, PeerError>> {
        self.result.get()
    }

    /// Prepares a session with the peer at `to` after its handshake, and returns the verified peer.
    ///
    /// # Errors
    /// If the peer presented no certificate, or did not choose HTTP/2.
    pub fn complete<D>(
        &self,
        session: &mut ConnectionCommon<D>,
        to: SocketAddr,
    ) -> Result<VerifiedPeer, Error> {
        let Some(Ok(peer)) = self.result() else {
            let cause = Arc::new(io::Error::other("the peer presented no certificate"));
            return Err(Error::Tls { to, cause });
        };
        if session.alpn_protocol() != Some(H2) {
            let cause = "the peer did not negotiate `h2` by ALPN".into();
            return Err(Error::NotH2 { to, cause });
        }
        session.set_buffer_limit(Some(LARGE));
        Ok(peer.clone())
    }

    /// Verifies the peer again if the roots have changed since the check was made. The caller has added the tunnel to the
    /// registry before: a later change of the roots finds the tunnel there.
    ///
    /// # Errors
    /// If the current roots cannot be read, or do not allow the peer.
    pub fn renew(&self, trust: &Trust, to: SocketAddr) -> Result<(), Error> {
        let verifier = trust.verifier().map_err(Error::Roots)?;
        let Some(Ok(peer)) = self.result() else {
            return Ok(());
        };
        if Arc::ptr_eq(&verifier, &self.verifier) {
            return Ok(());
        }
        let result = verifier.verify(&peer.chain, peer.at).map(drop);
        result.map_err(|cause| Error::Peer { to, cause })
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let chain = std::iter::once(leaf).chain(rest);
        let chain: Arc<[_]> = chain.map(|one| one.clone().into_owned()).collect();
        let at = UNIX_EPOCH + Duration::from_secs(now.as_secs());
        let found = self.verifier.verify(&chain, at).and_then(|identity| {
            let identity = match &self.expected {
                Some(expected) => identity::expect(identity, expected)?,
                None => identity,
            };
            let until = identity::end(leaf)?;
            Ok(VerifiedPeer {
                identity,
                chain,
                at,
                until,
            })
        });
        let result = found
            .as_ref()
            .map(drop)
            .map_err(|error| error.clone().into());
        // Cannot fail: rustls verifies one certificate in a handshake.
        let _ = self.result.set(found);
        result
    }
}

/// Implements the methods that both verifier traits of rustls have: signatures by the provider, of TLS 1.3 only.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(rustls::Error::General(
                "tunnels do not support TLS 1.2".to_owned(),
            ))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            let algorithms = &PROVIDER.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            PROVIDER
                .signature_verification_algorithms
                .supported_schemes()
        }
    };
}

impl ServerCertVerifier for Check {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(end_entity, intermediates, now)?;
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for Check {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.verify(end_entity, intermediates, now)?;
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}

/// The certificate of this side, which is presented to every peer.
#[derive(Debug)]
struct Own(Arc<CertifiedKey>);

impl Own {
    fn new(credential: &Credential) -> Arc<Self> {
        let (chain, key) = (credential.chain.clone(), Arc::clone(&credential.key));
        Arc::new(Self(Arc::new(CertifiedKey::new(chain, key))))
    }
}

impl ResolvesClientCert for Own {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ResolvesServerCert for Own {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// Returns the configuration of the side that connects.
///
/// # Errors
/// If the provider has no TLS 1.3.
pub fn client(own: &Credential, check: Arc<Check>) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(check)
        .with_client_cert_resolver(Own::new(own));
    config.alpn_protocols = vec![H2.to_vec()];
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Returns the configuration of the side that accepts.
///
/// # Errors
/// If the provider has no TLS 1.3.
pub fn server(own: &Credential, check: Arc<Check>) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(check)
        .with_cert_resolver(Own::new(own));
    config.alpn_protocols = vec![H2.to_vec()];
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}
