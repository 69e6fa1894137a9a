//! Errors of tunnels and their streams.

use std::{fmt, io, net::SocketAddr, sync::Arc};

use http::StatusCode;
use identity::{IdentityError, PeerError};
use relay::Flag;
use rustls::AlertDescription;

/// The phase of a connection attempt, named by the event that ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The certificate of this side.
    Certificate,
    /// The peer to accept the TCP connection.
    Connecting,
    /// The TLS handshake.
    Handshake,
    /// The answer to CONNECT.
    Answer,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "for the certificate of this side",
            Self::Connecting => "for the peer to accept the TCP connection",
            Self::Handshake => "for the peer's part of the TLS handshake",
            Self::Answer => "for the peer's answer to CONNECT",
        })
    }
}

/// The cause of a failed tunnel or stream. The text names the side that failed; `to` is the peer's address.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The peer does not accept the TCP connection.
    #[error("cannot connect to {to}: {cause}")]
    Connect {
        /// The peer.
        to: SocketAddr,
        /// The kernel's error.
        cause: Arc<io::Error>,
    },
    /// The time to connect has passed.
    #[error("timeout with {to}: waited {phase}")]
    Timeout {
        /// The peer.
        to: SocketAddr,
        /// The phase that did not end.
        phase: Phase,
    },
    /// This side has no certificate.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// This side cannot read its roots.
    #[error("no peer can be verified: {0}")]
    Roots(Box<str>),
    /// This side refuses the peer's certificate.
    #[error("this side refuses {to}: {cause}")]
    Peer {
        /// The peer.
        to: SocketAddr,
        /// The cause.
        cause: PeerError,
    },
    /// The peer refuses the TLS handshake.
    #[error("{to} refuses this side's TLS handshake: it sent the alert {alert:?}")]
    Alert {
        /// The peer.
        to: SocketAddr,
        /// Its alert.
        alert: AlertDescription,
    },
    /// The TLS handshake failed for another reason.
    #[error("TLS with {to} failed: {cause}")]
    Tls {
        /// The peer.
        to: SocketAddr,
        /// The cause.
        cause: Arc<io::Error>,
    },
    /// The peer does not speak HTTP/2.
    #[error("{to} does not speak HTTP/2: {cause}")]
    NotH2 {
        /// The peer.
        to: SocketAddr,
        /// The evidence.
        cause: Arc<str>,
    },
    /// The HTTP/2 connection broke, or the peer reset the stream.
    #[error("tunnel with {to} failed: {cause}")]
    Broken {
        /// The peer.
        to: SocketAddr,
        /// The library's error.
        cause: Arc<h2::Error>,
    },
    /// The peer answered with another status than 200.
    #[error("{to} refused the connection with status {status}{}", meaning(*status))]
    Refused {
        /// The peer.
        to: SocketAddr,
        /// The status.
        status: StatusCode,
    },
    /// The peer exceeded the limit for frames that are costly to receive.
    #[error("{to} floods this side with frames: {what}; this side cut the tunnel")]
    Flood {
        /// The peer.
        to: SocketAddr,
        /// The kind of frames.
        what: &'static str,
    },
    /// The peer has its share of the tunnels.
    #[error("{to} has {has} {kind}, which is its share; this side refused another tunnel")]
    TooMany {
        /// The peer.
        to: SocketAddr,
        /// The number of tunnels that the peer has.
        has: usize,
        /// The kind of tunnels.
        kind: &'static str,
    },
    /// Another client needed the place of the tunnel.
    #[error(
        "{to} is of the client that has the most {kind}; this side ended one for another client"
    )]
    Displaced {
        /// The peer.
        to: SocketAddr,
        /// The kind of tunnels of which the client has the most.
        kind: &'static str,
    },
    /// The peer does not answer PING.
    #[error("{to} does not answer PING; this side cut the tunnel")]
    Silent {
        /// The peer.
        to: SocketAddr,
    },
    /// The peer takes no bytes that wait for it.
    #[error("{to} takes no bytes; this side cut the tunnel")]
    Stuck {
        /// The peer.
        to: SocketAddr,
    },
    /// This side ended the tunnel.
    #[error("this side ended the tunnel with {to}")]
    Ended {
        /// The peer.
        to: SocketAddr,
    },
}

fn meaning(status: StatusCode) -> &'static str {
    match status {
        StatusCode::BAD_REQUEST => {
            ": the peer does not have the address, or the request is invalid"
        }
        StatusCode::UNAUTHORIZED => ": a policy at the peer denies it",
        StatusCode::SERVICE_UNAVAILABLE => {
            ": the application does not accept the connection, or the peer is not ready or has reached a limit"
        }
        _ => "",
    }
}

impl Error {
    /// Returns the outcome of the connection, for metrics and access logs (`response_flags`).
    pub fn flag(&self) -> Flag {
        match self {
            Self::Refused { status, .. } if *status == StatusCode::UNAUTHORIZED => Flag::Denied,
            Self::Identity(_) | Self::Roots(_) => Flag::Identity,
            Self::Peer {
                cause: PeerError::Revoked { .. },
                ..
            } => Flag::Revoked,
            Self::Peer { .. }
            | Self::Alert { .. }
            | Self::Tls { .. }
            | Self::Timeout {
                phase: Phase::Handshake,
                ..
            } => Flag::Tls,
            Self::NotH2 { .. } => Flag::NotH2,
            Self::Timeout {
                phase: Phase::Connecting,
                ..
            } => Flag::NetworkPolicy,
            Self::Connect { cause, .. } if cause.kind() == io::ErrorKind::TimedOut => {
                Flag::NetworkPolicy
            }
            _ => Flag::Tunnel,
        }
    }

    /// Returns whether the client may try another endpoint. After a denial by a policy, or without a certificate of this
    /// side, it must not.
    pub fn may_try_another(&self) -> bool {
        !matches!(self.flag(), Flag::Denied | Flag::Identity)
    }
}
