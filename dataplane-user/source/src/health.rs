//! How reading a source goes.

use std::sync::Arc;

use super::{kubernetes, manifests};

/// Seconds for which a source has failed when others may know more than it has said.
const BEHIND: u64 = 5;

/// How reading a source goes. Times are in seconds since the epoch.
#[derive(Clone, Debug)]
pub enum Health {
    /// Of files and directories.
    Manifests(Arc<manifests::Health>),
    /// Of the Kubernetes API.
    Kubernetes {
        /// The server, as a person knows it.
        server: String,
        /// How reading each kind of object goes.
        kinds: Arc<kubernetes::Health>,
    },
    /// Of several feeds that yield views together.
    Combined(Vec<Health>),
}

impl Health {
    /// Files and directories, or the server.
    pub fn places(&self) -> Vec<String> {
        match self {
            Self::Manifests(files) => files.paths(),
            Self::Kubernetes { server, .. } => vec![server.clone()],
            Self::Combined(parts) => parts.iter().flat_map(Self::places).collect(),
        }
    }

    /// When everything was last known to be as the newest view says; 0: not everything was read yet.
    pub fn heard(&self) -> u64 {
        match self {
            Self::Manifests(files) => files.read(),
            Self::Kubernetes { kinds, .. } => kinds.heard(),
            Self::Combined(parts) => parts.iter().map(Self::heard).min().unwrap_or_default(),
        }
    }

    /// Since when the source cannot be read, and why; what was read before is still valid.
    pub fn failure(&self) -> Option<(u64, String)> {
        match self {
            Self::Manifests(files) => files.failure(),
            Self::Kubernetes { kinds, .. } => kinds.failure(),
            Self::Combined(parts) => parts.iter().filter_map(Self::failure).min(),
        }
    }

    /// Whether the source has failed for so long that what it said last of services may be old. `now`: in seconds since
    /// 1970.
    pub fn is_behind(&self, now: u64) -> bool {
        let since = match self {
            Self::Kubernetes { kinds, .. } => kinds.behind_since(),
            Self::Combined(parts) => return parts.iter().any(|part| part.is_behind(now)),
            Self::Manifests(_) => self.failure().map(|(since, _)| since),
        };
        since.is_some_and(|since| now.saturating_sub(since) >= BEHIND)
    }

    /// How often the source could not be read.
    pub fn failures(&self) -> u64 {
        match self {
            Self::Manifests(files) => files.failures(),
            Self::Kubernetes { kinds, .. } => kubernetes::Kind::ALL
                .iter()
                .map(|&kind| kinds.of(kind).failures())
                .sum(),
            Self::Combined(parts) => parts.iter().map(Self::failures).sum(),
        }
    }

    /// The health of each source that is not made of others.
    pub fn each(&self) -> Vec<&Self> {
        match self {
            Self::Combined(parts) => parts.iter().flat_map(Self::each).collect(),
            one => vec![one],
        }
    }
}
