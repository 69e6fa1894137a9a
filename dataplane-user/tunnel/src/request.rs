//! The request for a stream in a tunnel, and its refusal.

use std::net::SocketAddr;

use http::{StatusCode, uri::Authority};
use model::Identity;

use super::headers::Statements;

/// The request for a stream.
#[derive(Clone, Debug)]
pub struct Request {
    /// The verified identity of the peer.
    pub peer: Identity,
    /// The source address of the tunnel, which is the client's.
    pub client: SocketAddr,
    /// The destination of the stream.
    pub authority: Authority,
    /// The peer's statements about it.
    pub statements: Statements,
}

impl Request {
    /// Returns the destination of the stream, if the authority is an address and a port.
    pub fn destination(&self) -> Option<SocketAddr> {
        self.authority.as_str().parse().ok()
    }
}

/// The reason for refusing a stream, and its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The workload does not have the destination's address, or the request is invalid: 400.
    BadRequest,
    /// A policy denies it: 401.
    Denied,
    /// The application does not accept the connection, or the peer's certificate has expired since the handshake: 503.
    Unavailable,
}

impl Refusal {
    /// Returns the answer's status.
    pub fn status(self) -> StatusCode {
        match self {
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::Denied => StatusCode::UNAUTHORIZED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}
