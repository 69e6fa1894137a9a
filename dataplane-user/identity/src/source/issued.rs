//! A certificate, before it is verified.

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

/// A certificate that a source gave. It has no `Debug`: a log must not have the key.
pub struct Issued {
    /// The certificate, and those between it and a root.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: Zeroizing<PrivateKeyDer<'static>>,
    /// The roots of the identity's trust domain, as the source says.
    pub roots: Vec<CertificateDer<'static>>,
}
