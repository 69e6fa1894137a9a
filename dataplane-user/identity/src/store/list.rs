//! The list of certificates that `dataplane certs` shows.

use serde::{Deserialize, Serialize};

use super::{Failure, State, Store};
use crate::peer::Shown;

/// A wanted identity and its certificate. Times are in UTC, as RFC 3339 writes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// The identity.
    pub identity: String,
    /// The certificate's serial number, as hexadecimal digits. Missing if there is no certificate.
    pub serial: Option<String>,
    /// The start of its validity.
    pub from: Option<String>,
    /// The end of its validity.
    pub to: Option<String>,
    /// Whether the certificate is missing, or at most a third of its lifetime is left, so that it should have been renewed.
    pub overdue: bool,
    /// The source of the certificate.
    pub source: String,
    /// The last attempt to get a certificate, if it failed.
    pub failed: Option<Failed>,
}

/// A failed attempt to get a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The failed operation, the reason, and the remedy if it is known.
    pub cause: String,
    /// The time of the failure.
    pub at: String,
    /// The time of the next attempt.
    pub next: String,
}

impl Store {
    /// Lists the identities that are wanted, sorted, with their certificates.
    pub fn list(&self) -> Vec<Listed> {
        let now = (self.inner.clock)();
        let contents = self.inner.contents();
        let listed = contents.slots.iter().map(|(identity, slot)| {
            let State {
                credential, failed, ..
            } = &*slot.state.borrow();
            let credential = credential.as_deref();
            let overdue = credential.is_none_or(|credential| {
                let (from, to) = (credential.not_before, credential.not_after);
                let lifetime = to.duration_since(from).unwrap_or_default();
                !credential.is_valid(now) || now + lifetime / 3 > to
            });
            Listed {
                identity: identity.to_string(),
                serial: credential.map(|credential| credential.serial.to_string()),
                from: credential.map(|credential| Shown(credential.not_before).to_string()),
                to: credential.map(|credential| Shown(credential.not_after).to_string()),
                overdue,
                source: self.inner.source.name(),
                failed: failed.as_ref().map(Failed::from),
            }
        });
        listed.collect()
    }

    /// Returns the problems of the files of roots and of revoked certificates, with their effects.
    pub fn problems(&self) -> Vec<String> {
        let now = (self.inner.clock)();
        let contents = self.inner.contents();
        let next_updates = contents.trust.iter().flat_map(|trust| &trust.next_updates);
        let overdue = next_updates.filter(|(_, next)| *next < now).map(|(path, next)| {
            format!(
                "{}: a newer list of revoked certificates was due at {}: certificates revoked since then are accepted",
                path.display(),
                Shown(*next)
            )
        });
        let unreadable = contents.problem.iter().map(ToString::to_string);
        unreadable.chain(overdue).collect()
    }
}

impl From<&Failure> for Failed {
    fn from(failure: &Failure) -> Self {
        Self {
            cause: failure.cause.to_string(),
            at: Shown(failure.at).to_string(),
            next: Shown(failure.next).to_string(),
        }
    }
}
