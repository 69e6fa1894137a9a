//! What peers are verified against.

use std::{collections::BTreeMap, sync::Arc};

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};

/// Roots by trust domain, and the certificates that were revoked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roots {
    /// The certificates that may sign identities of a trust domain. A trust domain that is not here is not trusted.
    pub by_domain: BTreeMap<Arc<str>, Vec<CertificateDer<'static>>>,
    /// Lists of revoked certificates, of any of these authorities.
    pub revoked: Vec<CertificateRevocationListDer<'static>>,
}
