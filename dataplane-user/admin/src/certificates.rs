//! The certificates of workloads.

use std::{fmt, sync::Arc};

use super::api;

/// A view of the certificates of workloads.
#[derive(Clone)]
pub struct Certificates(Arc<identity::Store>);

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}

impl Certificates {
    /// Returns a view of the certificates of this store.
    pub fn new(store: Arc<identity::Store>) -> Self {
        Self(store)
    }

    /// Lists the certificates.
    pub fn list(&self) -> api::Certificates {
        api::Certificates {
            certificates: self.0.list(),
            problems: self.0.problems(),
        }
    }
}
