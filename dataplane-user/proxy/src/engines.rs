//! The engines of the proxy: the workers, and the engine of tunnels if the proxy has one.

use std::{sync::Arc, time::Instant};

use relay::{Attached, Engine, Listener, Tunnelling};

use super::{shared::Shared, workers::Workers};

/// Both engines as one.
#[derive(Debug)]
pub struct Engines(pub Workers);

impl Engines {
    /// Returns the state that the workers share.
    pub fn shared(&self) -> &Arc<Shared> {
        self.0.shared()
    }

    fn tunnels(&self) -> Option<&Arc<dyn Tunnelling>> {
        self.shared().tunnels.get()
    }
}

impl Engine for Engines {
    fn take(&self, attached: &Arc<Attached>, listeners: &Arc<[Listener]>) {
        // Before the workers hand connections over.
        if let Some(tunnels) = self.tunnels() {
            tunnels.take(attached, listeners);
        }
        self.0.take(attached, listeners);
    }

    fn shut(&self, attached: &Attached, deadline: Instant) {
        self.0.shut(attached, deadline);
        if let Some(tunnels) = self.tunnels() {
            tunnels.shut(attached, deadline);
        }
    }

    fn drain(&mut self, deadline: Instant) {
        // Both engines have the same deadline. The workers hand over the connections that they accept last.
        let tunnels = self.tunnels().cloned();
        if let Some(tunnels) = &tunnels {
            tunnels.begin_drain();
        }
        self.0.drain(deadline);
        if let Some(tunnels) = tunnels {
            tunnels.drain(deadline);
        }
    }
}
