//! A certificate of a workload, with its key.

use std::{fmt, sync::Arc, time::SystemTime};

use model::Identity;
use rustls::{
    crypto::CryptoProvider,
    pki_types::CertificateDer,
    sign::{CertifiedKey, SigningKey},
};
use webpki::EndEntityCert;

use crate::{Roots, Verifier, peer::claimed, source::Issued, validity::Validity};

/// The certificate of an identity and its key, which never leaves memory.
///
/// The key's memory belongs to the crypto provider, which does not clear it. So the process must not dump core
/// (`PR_SET_DUMPABLE`, `RLIMIT_CORE`).
pub struct Credential {
    /// The identity.
    pub identity: Identity,
    /// The certificate, then the intermediate certificates.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key.
    pub key: Arc<dyn SigningKey>,
    /// The certificate's serial number, as hexadecimal digits.
    pub serial: Box<str>,
    /// The start of the certificate's validity.
    pub not_before: SystemTime,
    /// The end of the certificate's validity.
    pub not_after: SystemTime,
}

/// Omits the key, because a log must not have it.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("identity", &self.identity)
            .field("serial", &self.serial)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

impl Credential {
    /// Returns whether the certificate is valid at a time.
    pub fn is_valid(&self, time: SystemTime) -> bool {
        (self.not_before..self.not_after).contains(&time)
    }

    /// Verifies a certificate from a source: it has exactly one URI, the identity's; its key is `issued.key`; it is valid now;
    /// and one of `issued.roots` has signed its chain.
    ///
    /// # Errors
    /// If one of these conditions does not hold. The text is a clause about the source.
    pub(crate) fn verify(
        identity: &Identity,
        issued: Issued,
        now: SystemTime,
        provider: &CryptoProvider,
    ) -> Result<Self, String> {
        let of_source = |error: &dyn fmt::Display| error.to_string().replacen("peer", "source", 1);
        let leaf = issued.chain.first().ok_or("source sent no certificate")?;
        let validity = Validity::of(leaf)?;
        let presented = EndEntityCert::try_from(leaf)
            .map_err(|error| format!("source sent a certificate that cannot be read: {error}"))
            .and_then(|leaf| claimed(&leaf).map_err(|error| of_source(&error)))?;
        if presented != *identity {
            return Err(format!("source presented {presented}, expected {identity}"));
        }
        let domain = identity.trust_domain().into();
        let roots = Roots {
            by_domain: [(domain, issued.roots)].into(),
            revoked: Vec::new(),
        };
        let verifier = Verifier::new(&roots).map_err(|error| error.to_string())?;
        verifier
            .verify(&issued.chain, now)
            .map_err(|error| of_source(&error))?;
        let key = provider
            .key_provider
            .load_private_key(issued.key.clone_key())
            .map_err(|error| format!("the key cannot be read: {error}"))?;
        CertifiedKey::new(issued.chain.clone(), key.clone())
            .keys_match()
            .map_err(|_| "the key does not belong to the certificate")?;
        Ok(Self {
            identity: identity.clone(),
            chain: issued.chain,
            key,
            serial: validity.serial,
            not_before: validity.not_before,
            not_after: validity.not_after,
        })
    }
}
