//! Reasons why the API could not be read.

use std::time::Duration;

use serde::Deserialize;

use super::{Kind, error::ConnectError};

/// The reason why the API could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The settings for the connection are wrong.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The server cannot be reached, or does not speak HTTP.
    #[error("cannot reach it: {0}")]
    Unreachable(String),
    /// The server refused.
    #[error("it answered {code}{}: {message}", hint(*code))]
    Refused {
        /// The HTTP status.
        code: u16,
        /// The server's message.
        message: String,
        /// Time that the server asks the client to wait.
        retry_after: Option<Duration>,
    },
    /// The answer did not begin, or did not continue.
    #[error("nothing came from it for {0:?}")]
    Silent(Duration),
    /// The connection ended in the middle of an answer.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// The answer is not that of an API server.
    #[error("its answer makes no sense: {0}")]
    Nonsense(#[from] serde_json::Error),
}

/// Returns the remedy for a status code.
fn hint(code: u16) -> &'static str {
    match code {
        401 => " (it does not accept our token or certificate)",
        403 => {
            " (RBAC: a ClusterRole must allow the agent get, list and watch on it, as that in deploy/ does; an API server \
             that has just started forbids everything for a second)"
        }
        _ => "",
    }
}

impl Failure {
    /// Returns whether the known version is too old to continue from, so that all objects must be listed again.
    pub(super) fn is_expired(&self) -> bool {
        match self {
            Self::Refused { code, message, .. } => match code {
                // The server was reset to an older state, and the known version is newer than its newest.
                500 | 504 => message.contains("Too large resource version"),
                // The version is gone. Or the server works and knows the agent, and rejects this request.
                400 | 404 | 405 | 409 | 410 | 422 => true,
                _ => false,
            },
            _ => false,
        }
    }

    /// Returns whether the server does not have the kind.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { code: 404, .. })
    }

    /// Returns whether the agent has no permission to read.
    pub(super) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused { code: 403, .. })
    }

    /// Returns whether another connection, with the present files, may help.
    pub(super) fn is_of_connection(&self) -> bool {
        !matches!(self, Self::Refused { code, .. } if *code != 401)
    }

    /// Returns whether the server was not reached, or is silent.
    pub(super) fn is_of_network(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Silent(_))
    }

    /// Returns the time that the server asks the client to wait.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns a message for people: the request, and the reason why it failed.
    pub(super) fn told(&self, server: &str, doing: &str, kind: Kind) -> String {
        format!("cannot {doing} {kind} of {server}: {self}")
    }
}

/// `Status`, which the API server sends as an error, or in a watch.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub code: u16,
    pub message: String,
    pub reason: String,
    pub details: Option<Details>,
}

/// `Status.details`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Details {
    pub retry_after_seconds: u64,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let seconds = status
            .details
            .map_or(0, |details| details.retry_after_seconds);
        Self::Refused {
            code: if status.reason == "Expired" {
                410
            } else {
                status.code
            },
            message: status.message,
            retry_after: (seconds > 0).then(|| Duration::from_secs(seconds)),
        }
    }
}
