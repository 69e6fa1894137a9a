//! Why the API could not be read.

use std::time::Duration;

use serde::Deserialize;

use super::{Kind, error::ConnectError};

/// Why the API could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// There is no way to it.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// It cannot be reached, or does not speak HTTP.
    #[error("cannot reach it: {0}")]
    Unreachable(String),
    /// It refused.
    #[error("it answered {code}{}: {message}", hint(*code))]
    Refused {
        /// The HTTP status.
        code: u16,
        /// What it said.
        message: String,
        /// How long it wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// Nothing came, or nothing more.
    #[error("nothing came from it for {0:?}")]
    Silent(Duration),
    /// The connection ended in the middle of an answer.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// It does not speak as an API server does.
    #[error("its answer makes no sense: {0}")]
    Nonsense(#[from] serde_json::Error),
}

/// What a person should do about it.
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
    /// Whether what we know is too old to go on from: everything is to be listed anew.
    pub(super) fn is_expired(&self) -> bool {
        match self {
            Self::Refused { code, message, .. } => match code {
                // The server was set back to an older state: our version is of its future.
                500 | 504 => message.contains("Too large resource version"),
                // Gone; or it is there, it knows us, it is not busy, and does not want this.
                400 | 404 | 405 | 409 | 410 | 422 => true,
                _ => false,
            },
            _ => false,
        }
    }

    /// Whether the server has no such kind.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { code: 404, .. })
    }

    /// Whether we may not read this.
    pub(super) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused { code: 403, .. })
    }

    /// Whether another connection, with what the files say now, may help.
    pub(super) fn is_of_connection(&self) -> bool {
        !matches!(self, Self::Refused { code, .. } if *code != 401)
    }

    /// Whether the server was not reached, or is silent.
    pub(super) fn is_of_network(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Silent(_))
    }

    /// How long the server wants to be left alone.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// For a person: what was tried, and why it did not work.
    pub(super) fn told(&self, server: &str, doing: &str, kind: Kind) -> String {
        format!("cannot {doing} {kind} of {server}: {self}")
    }
}

/// `Status`, as the API server answers with if it does not want to, and sends in a watch.
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
