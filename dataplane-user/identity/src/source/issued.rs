//! A certificate, before it is verified.

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

/// A certificate from a source, with its key. It has no `Debug`, because a log must not have the key.
pub struct Issued {
    /// The certificate, then the intermediate certificates.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: Zeroizing<PrivateKeyDer<'static>>,
    /// The roots of the identity's trust domain that the source sent.
    pub roots: Vec<CertificateDer<'static>>,
}
