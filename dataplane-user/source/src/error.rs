//! Reasons why a source cannot be opened.

use super::{kubernetes, manifests};

/// The reason why a source cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The manifests cannot be served.
    #[error(transparent)]
    Manifests(#[from] manifests::Errors),
    /// The manifests cannot be watched.
    #[error(transparent)]
    Watch(#[from] manifests::WatchError),
    /// No setting leads to the API server.
    #[error(transparent)]
    Connect(#[from] kubernetes::ConnectError),
    /// A thread cannot be started.
    #[error("cannot start the thread that reads {what}: {error}")]
    Thread {
        /// The source.
        what: &'static str,
        /// The reason.
        error: std::io::Error,
    },
}
