//! Certificates of workloads, their sources, and the roots against which peers are verified.
//!
//! Tunnels ask an [`Identities`] for the certificate of a workload, and verify peers against its [`Roots`].

#![forbid(unsafe_code)]

mod credential;
#[cfg(test)]
mod fixture;
mod peer;
mod roots;
mod source;
mod store;
mod trust;
mod validity;
mod watching;

use std::{future::Future, sync::Arc};

pub use credential::Credential;
use model::Identity;
pub use peer::{PeerError, RootsError, Verifier, end, expect};
pub use roots::Roots;
pub use source::{Authority, AuthorityError, Issued, IstioCa, Source};
pub use store::{Failed, Listed, Store};
use tokio::sync::watch;
pub use trust::TrustFiles;

/// An error because an identity has no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no certificate of {identity}: {cause}")]
pub struct IdentityError {
    /// The identity.
    pub identity: Identity,
    /// The failed operation with its file or address, the reason, and the remedy if it is known.
    pub cause: Arc<str>,
}

/// A provider of certificates and roots.
pub trait Identities: Send + Sync {
    /// Returns the present certificate of an identity. Waits for the source if there is none yet, at most as long as the
    /// source's own timeout.
    ///
    /// # Errors
    /// If the source has no certificate, refuses, or does not answer.
    fn credential(
        &self,
        identity: &Identity,
    ) -> impl Future<Output = Result<Arc<Credential>, IdentityError>> + Send;

    /// Returns the present roots and revocations. The receiver is notified of each change.
    fn roots(&self) -> watch::Receiver<Arc<Roots>>;
}
