//! Certificates of workloads: where they come from, and which roots peers are verified against.
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
pub use peer::{PeerError, RootsError, Verifier, end, expect, verify_peer};
pub use roots::Roots;
pub use source::{Authority, AuthorityError, Issued, IstioCa, Source};
pub use store::{Failed, Listed, Store};
use tokio::sync::watch;
pub use trust::TrustFiles;

/// Why there is no certificate of an identity: what failed, where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no certificate of {identity}: {cause}")]
pub struct IdentityError {
    /// Whose certificate was asked for.
    pub identity: Identity,
    /// What the source says.
    pub cause: Arc<str>,
}

/// Where certificates come from.
pub trait Identities: Send + Sync {
    /// Returns the present certificate of an identity. Waits for the source if there is none yet, at most as long as the
    /// source's own timeout.
    ///
    /// # Errors
    /// If the source has none, refuses, or does not answer.
    fn credential(
        &self,
        identity: &Identity,
    ) -> impl Future<Output = Result<Arc<Credential>, IdentityError>> + Send;

    /// The present roots and revocations; the receiver is notified of each change.
    fn roots(&self) -> watch::Receiver<Arc<Roots>>;
}
