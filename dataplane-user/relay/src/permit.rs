//! The share of the limits that a connection takes.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
};

use super::{attachment::Attached, direction::Direction, index::Index, limits::Client};

/// A connection's share of the limits of its node, namespace, workload and client. A dropped permit gives the share back.
#[derive(Debug)]
pub struct Permit {
    attached: Arc<Attached>,
    direction: Direction,
    /// The client that the connection also counts for.
    client: Option<Client>,
}

impl Permit {
    /// Acquires a permit for one connection of a workload. `None`: a limit is reached.
    ///
    /// An engine acquires it before it accepts a connection, because a connection that was accepted cannot be put back.
    pub fn acquire(attached: &Arc<Attached>, direction: Direction) -> Option<Self> {
        if !attached.limits.acquire(&attached.holders, direction) {
            attached.deferred.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Self {
            attached: Arc::clone(attached),
            direction,
            client: None,
        })
    }

    /// Counts an inbound connection for its client, too. Returns whether the client's share allows it.
    pub(crate) fn admit(&mut self, index: &Index, client: SocketAddr) -> bool {
        if self.direction == Direction::Outbound {
            return true;
        }
        let client = index.client(client.ip());
        let admitted = self.attached.limits.admit(&self.attached.holders, &client);
        self.client = admitted.then_some(client);
        admitted
    }

    /// The workload.
    pub fn attached(&self) -> &Arc<Attached> {
        &self.attached
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let holders = &self.attached.holders;
        if let Some(client) = &self.client {
            holders.forget(client);
        }
        self.attached.limits.release(holders, self.direction);
    }
}
