//! The state of reading a source.

use std::sync::Arc;

use super::{kubernetes, manifests};

/// Seconds of failure after which the known services may be stale.
const BEHIND: u64 = 5;

/// The state of reading a source. Times are in seconds since the epoch.
#[derive(Clone, Debug)]
pub enum Health {
    /// The state of files and directories.
    Manifests(Arc<manifests::Health>),
    /// The state of the Kubernetes API.
    Kubernetes {
        /// The server's name for people.
        server: String,
        /// The state of each kind of object.
        kinds: Arc<kubernetes::Health>,
    },
}

/// The state of a source without files and without a server.
impl Default for Health {
    fn default() -> Self {
        Self::Manifests(Arc::default())
    }
}

impl Health {
    /// Returns the files and directories, or the server.
    pub fn places(&self) -> Vec<String> {
        match self {
            Self::Manifests(files) => files.paths(),
            Self::Kubernetes { server, .. } => vec![server.clone()],
        }
    }

    /// Returns the time at which the newest view was last known to be current. 0: not everything has been read yet.
    pub fn heard(&self) -> u64 {
        match self {
            Self::Manifests(files) => files.read(),
            Self::Kubernetes { kinds, .. } => kinds.heard(),
        }
    }

    /// Returns the time since which the source cannot be read, and the reason. The objects read before are still valid.
    pub fn failure(&self) -> Option<(u64, String)> {
        match self {
            Self::Manifests(files) => files.failure(),
            Self::Kubernetes { kinds, .. } => kinds.failure(),
        }
    }

    /// Returns whether the source has failed for so long that its services may be stale. `now`: in seconds since the
    /// epoch.
    pub fn is_behind(&self, now: u64) -> bool {
        let since = match self {
            Self::Kubernetes { kinds, .. } => kinds.behind_since(),
            Self::Manifests(_) => self.failure().map(|(since, _)| since),
        };
        since.is_some_and(|since| now.saturating_sub(since) >= BEHIND)
    }

    /// Returns the number of failed reads.
    pub fn failures(&self) -> u64 {
        match self {
            Self::Manifests(files) => files.failures(),
            Self::Kubernetes { kinds, .. } => kubernetes::Kind::ALL
                .iter()
                .map(|&kind| kinds.of(kind).failures())
                .sum(),
        }
    }
}
