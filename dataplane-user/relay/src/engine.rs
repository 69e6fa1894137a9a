//! The interface between the relay, which decides where connections go, and the engine that carries their bytes.

use std::{sync::Arc, time::Instant};

use super::attachment::{Attached, Listener};

/// Carries connections: accepts them at listening sockets, begins a [`Session`](super::Session) for
/// each, and moves its bytes until it ends.
///
/// An engine chooses its threads and how they wait for sockets. The proxy's epoll workers are an engine.
pub trait Engine {
    /// Accepts connections at these sockets from now on.
    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>);

    /// Accepts no more connections of an attachment, and resets those that are left at the deadline.
    /// Returns at once.
    fn shut(&self, attached: &Attached, deadline: Instant);

    /// Accepts no more connections, waits until all have ended, and resets those that are left at the
    /// deadline. The engine is of no use afterwards.
    fn drain(&mut self, deadline: Instant);
}
