//! A certificate of a workload, with its key.

use std::{fmt, sync::Arc, time::SystemTime};

use model::Identity;
use rustls::{pki_types::CertificateDer, sign::SigningKey};

/// The certificate of an identity and its key, which never leaves memory.
pub struct Credential {
    /// Whose it is.
    pub identity: Identity,
    /// The certificate, and those between it and a root.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: Arc<dyn SigningKey>,
    /// The certificate's serial number, as hexadecimal digits.
    pub serial: Box<str>,
    /// From when on the certificate is valid.
    pub not_before: SystemTime,
    /// Until when the certificate is valid.
    pub not_after: SystemTime,
}

/// Without the key: a log must not have it.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("identity", &self.identity)
            .field("serial", &self.serial)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}
