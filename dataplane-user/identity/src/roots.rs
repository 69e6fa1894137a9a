//! Roots and revocations against which peers are verified.

use std::{collections::BTreeMap, sync::Arc};

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};

/// Roots by trust domain, and the certificates that were revoked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roots {
    /// The certificates that may sign identities of a trust domain. A trust domain without an entry is not trusted.
    pub by_domain: BTreeMap<Arc<str>, Vec<CertificateDer<'static>>>,
    /// Lists of revoked certificates of these authorities.
    pub revoked: Vec<CertificateRevocationListDer<'static>>,
}
