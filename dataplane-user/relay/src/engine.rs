//! The interface between the relay, which decides where connections go, and the engine that carries their bytes.

use std::{fmt, net::SocketAddr, os::fd::OwnedFd, sync::Arc, time::Instant};

use model::Identity;

use super::{
    attachment::{Attached, Listener},
    direction::Direction,
    session::Session,
};

/// Carries connections: accepts them at listening sockets, begins a [`Session`](super::Session) for
/// each, and moves its bytes until it ends.
///
/// An engine chooses its threads and how they wait for sockets. The proxy's epoll workers are an engine.
pub trait Engine {
    /// Accepts connections at the sockets that the engine can serve, from now on. Tunnels ([`Listener::is_tunnel`]) need
    /// another engine than plain connections.
    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>);

    /// Stops accepting connections of an attachment, and resets its remaining connections at the deadline. Returns at
    /// once.
    fn shut(&self, attached: &Attached, deadline: Instant);

    /// Stops accepting connections, waits until all have ended, and resets the remaining ones at the deadline. The
    /// engine cannot be used afterwards.
    fn drain(&mut self, deadline: Instant);
}

/// A connection that an engine has accepted, and whose endpoint is reached through a tunnel.
#[derive(Debug)]
pub struct Handed {
    /// Its session, which has chosen the endpoint.
    pub session: Session,
    /// The client's socket, which does not block.
    pub client: OwnedFd,
    /// The bytes that were already read from the client.
    pub first: Vec<u8>,
}

/// An established tunnel, for `status` and dumps.
#[derive(Clone, Debug)]
pub struct TunnelView {
    /// The attachment of this side's workload.
    pub attachment: u64,
    /// Out of this workload or into it.
    pub direction: Direction,
    /// The identity that the other side has proven.
    pub peer: Identity,
    /// The other side's address.
    pub address: SocketAddr,
    /// The number of connections in the tunnel.
    pub streams: usize,
}

/// The engine of tunnels, beside the engine that accepts plain connections.
///
/// It is a part of an [`Engine`]. All threads may call it.
pub trait Tunnelling: fmt::Debug + Send + Sync {
    /// Carries a connection through a tunnel to its endpoint, until the connection ends.
    fn carry(&self, handed: Handed);

    /// Returns the established tunnels.
    fn tunnels(&self) -> Vec<TunnelView>;

    /// Returns the bytes that connections in tunnels hold for readers that do not keep up, and their maximum.
    fn held(&self) -> [usize; 2];

    /// See [`Engine::take`].
    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>);

    /// See [`Engine::shut`].
    fn shut(&self, attached: &Attached, deadline: Instant);

    /// Stops accepting tunnels, and tells peers to begin no more streams. Still carries connections that are handed over.
    fn begin_drain(&self);

    /// See [`Engine::drain`].
    fn drain(&self, deadline: Instant);
}
