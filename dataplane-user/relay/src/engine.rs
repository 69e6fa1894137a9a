//! The interface between the relay, which decides where connections go, and the engine that carries their bytes.

use std::{sync::Arc, time::Instant};

use super::attachment::{Attached, Listener};

/// Carries connections: accepts them at listening sockets, begins a [`Session`](super::Session) for
/// each, and moves its bytes until it ends.
///
/// An engine chooses its threads and how they wait for sockets. The proxy's epoll workers are an engine.
pub trait Engine {
    /// Accepts connections at these sockets from now on: at those that it can serve, because tunnels
    /// ([`Listener::is_tunnel`]) need another engine than plain connections.
    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>);

    /// Stops accepting connections of an attachment, and resets its remaining connections at the deadline. Returns at
    /// once.
    fn shut(&self, attached: &Attached, deadline: Instant);

    /// Stops accepting connections, waits until all have ended, and resets the remaining ones at the deadline. The
    /// engine cannot be used afterwards.
    fn drain(&mut self, deadline: Instant);
}
