//! Counters of connections, and the totals read from them.

use std::{
    ops::AddAssign,
    sync::atomic::{AtomicU64, Ordering},
};

/// The totals of some connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Connections that reached an endpoint.
    pub opened: u64,
    /// Connections that reached an endpoint and have ended.
    pub closed: u64,
    /// Connections that were refused, or that no endpoint took.
    pub failed: u64,
    /// Bytes from clients.
    pub received: u64,
    /// Bytes to clients.
    pub sent: u64,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, more: Self) {
        self.opened += more.opened;
        self.closed += more.closed;
        self.failed += more.failed;
        self.received += more.received;
        self.sent += more.sent;
    }
}

/// Counters of one kind of connection.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections that reached an endpoint.
    pub opened: AtomicU64,
    /// Connections that reached an endpoint and have ended.
    pub closed: AtomicU64,
    /// Connections that were refused, or that no endpoint took.
    pub failed: AtomicU64,
    /// Bytes from the client.
    pub received: AtomicU64,
    /// Bytes to the client.
    pub sent: AtomicU64,
}

impl Counters {
    /// Reads the counters and sets them to 0.
    pub fn take(&self) -> Totals {
        let read = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Totals {
            opened: read(&self.opened),
            closed: read(&self.closed),
            failed: read(&self.failed),
            received: read(&self.received),
            sent: read(&self.sent),
        }
    }
}
