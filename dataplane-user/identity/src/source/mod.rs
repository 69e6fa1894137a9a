//! Sources of certificates.

mod authority;
mod directory;
mod grpc;
mod issued;
mod istio;
mod read;
mod spire;

use std::{
    path::PathBuf,
    time::{Duration, SystemTime},
};

pub use authority::{Authority, AuthorityError};
pub use issued::Issued;
pub use istio::IstioCa;
use model::Identity;
use rcgen::{CertificateParams, KeyPair, SanType};
pub(crate) use read::{certificates, revoked};
use rustls::{
    crypto::CryptoProvider,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use zeroize::Zeroizing;

/// A source of the certificates of this node's workloads.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files that another program keeps: `DIRECTORY/NAMESPACE/ACCOUNT/{tls.crt,tls.key,ca.crt}`.
    Directory(PathBuf),
    /// Istio's certificate authority.
    Istio(IstioCa),
    /// The administration socket of a SPIRE agent, which delegates the identities of the node's workloads.
    Spire(PathBuf),
    /// The project's own authority: [`Authority`].
    Authority {
        /// The directory of the authority's key and certificate.
        directory: PathBuf,
        /// Lifetime of certificates.
        lifetime: Duration,
    },
}

impl Source {
    /// Returns the source as `dataplane certs` shows it.
    pub fn name(&self) -> String {
        match self {
            Self::Directory(path) => format!("directory {}", path.display()),
            Self::Istio(ca) => format!("Istio's CA at {}", ca.address),
            Self::Spire(socket) => format!("SPIRE's agent at {}", socket.display()),
            Self::Authority { directory, .. } => format!("dataplane ca in {}", directory.display()),
        }
    }

    /// Gets a certificate. The caller limits the time, and verifies the certificate.
    pub(crate) async fn issue(
        &self,
        identity: &Identity,
        now: SystemTime,
        provider: &CryptoProvider,
    ) -> Result<Issued, String> {
        let identity = identity.clone();
        match self {
            Self::Istio(ca) => ca.issue(&identity, provider).await,
            Self::Spire(socket) => spire::issue(socket, &identity).await,
            Self::Directory(path) => {
                let path = path.clone();
                blocking(move || directory::read(&path, &identity)).await
            }
            Self::Authority {
                directory,
                lifetime,
            } => {
                let (directory, lifetime) = (directory.clone(), *lifetime);
                let issue = move || {
                    let authority = Authority::open(&directory)?;
                    authority.issue(&identity, lifetime, now)
                };
                blocking(move || issue().map_err(|error| error.to_string())).await
            }
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| error.to_string())?
}

/// Makes a key (ECDSA P-256), and the parameters of a certificate for it with the identity as its only name.
pub(crate) fn request(
    identity: &Identity,
) -> Result<(Zeroizing<KeyPair>, CertificateParams), rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    Ok((Zeroizing::new(KeyPair::generate()?), params))
}

/// Returns the key in the form that rustls reads.
pub(crate) fn private(key: &KeyPair) -> Zeroizing<PrivateKeyDer<'static>> {
    let der = PrivatePkcs8KeyDer::from(key.serialize_der());
    Zeroizing::new(PrivateKeyDer::Pkcs8(der))
}
