//! Why a tunnel or a stream of it failed.

use std::{fmt, io, net::SocketAddr, sync::Arc};

use http::StatusCode;
use identity::{IdentityError, PeerError};
use relay::Flag;
use rustls::AlertDescription;

/// What a tunnel was waiting for.
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

/// Why a tunnel or a stream failed. The text says which side failed; `to` is the peer's address.
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
        /// What it waited for.
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
        /// Why.
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
    /// The TLS handshake failed otherwise.
    #[error("TLS with {to} failed: {cause}")]
    Tls {
        /// The peer.
        to: SocketAddr,
        /// Why.
        cause: Arc<io::Error>,
    },
    /// The peer does not speak HTTP/2.
    #[error("{to} does not speak HTTP/2: {cause}")]
    NotH2 {
        /// The peer.
        to: SocketAddr,
        /// How this side knows.
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
    /// The peer sent more frames that cost than it may.
    #[error("{to} floods this side with frames: {what}; its tunnel was cut")]
    Flood {
        /// The peer.
        to: SocketAddr,
        /// Which frames.
        what: &'static str,
    },
    /// The peer has as many tunnels to one workload as it may.
    #[error("{to} has {most} tunnels to this workload; a further one was refused")]
    TooMany {
        /// The peer.
        to: SocketAddr,
        /// As many as it may have.
        most: usize,
    },
    /// The peer does not answer PING.
    #[error("{to} does not answer PING; its tunnel was cut")]
    Silent {
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
        StatusCode::BAD_REQUEST => ": the address is not the peer's, or the request is wrong",
        StatusCode::UNAUTHORIZED => ": a policy at the peer denies it",
        StatusCode::SERVICE_UNAVAILABLE => {
            ": the application does not accept connections, or its side is not ready or at its limit"
        }
        _ => "",
    }
}

impl Error {
    /// The outcome of the connection, for metrics and access logs (`response_flags`).
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
            _ => Flag::Tunnel,
        }
    }

    /// Whether another endpoint may be tried: it may not if a policy denies the connection, or if this side has no
    /// certificate.
    pub fn may_try_another(&self) -> bool {
        !matches!(self.flag(), Flag::Denied | Flag::Identity)
    }
}
