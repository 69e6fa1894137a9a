//! Counters of direct connections.

use crate::{
    Addr,
    tables::{Owners, SOCKET_SETS, SOCKET_WAYS},
};

layout! {
    /// A connection that goes direct, while it lives.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Meter {
        /// The counters that it adds to.
        pub key: TrafficKey,
        /// When it was made (CLOCK_MONOTONIC, nanoseconds); 0 until it is established.
        pub opened_at: u64,
    }

    /// Sockets and their meters.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug)]
    pub struct MeterSets {
        /// The sockets that own the places: until the connection is closed, which is later than the socket.
        pub owners: Owners,
        /// Their meters.
        pub meters: [[Meter; SOCKET_SETS]; SOCKET_WAYS],
    }

    /// The key of the counters of direct connections.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct TrafficKey {
        /// [`Enrolled::workload`](super::Enrolled::workload) of the side that connects, or of the side that accepts.
        pub workload: u32,
        /// The pool of the service that the client asked for; 0: none. [`TrafficKey::INBOUND`] if the workload accepted
        /// the connection.
        pub pool: u32,
        /// The other side: the address if it is a known one, else unspecified.
        pub addr: Addr,
    }

    /// Counters of direct connections.
    #[repr(C, align(8))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Traffic {
        /// Connections that were established.
        pub opened: u64,
        /// Of these, those that were closed.
        pub closed: u64,
        /// Connections that were not established.
        pub failed: u64,
        /// Bytes that the other side has acknowledged, of those that were closed.
        pub sent: u64,
        /// Bytes that the other side has sent, of those that were closed.
        pub received: u64,
        /// How long those that were closed were open, in nanoseconds.
        pub nanoseconds: u64,
    }
}

impl TrafficKey {
    /// As a pool: connections that the workload accepts.
    pub const INBOUND: u32 = u32::MAX;
    /// As a pool, with the number of a policy below it: connections to the workload that the policy refused.
    pub const REFUSED: u32 = 1 << 31;
    /// The number for all policies with ALLOW of a workload, if none of them matches.
    pub const NOT_ALLOWED: u32 = 1;
    /// The most policies that get a number, in the life of the tables. Refusals by others count without a policy.
    pub const REFUSERS: u32 = 1 << 24;

    /// Returns the number of the policy that refused the connections; 0: a policy without a number, or no policy.
    pub const fn refused_by(&self) -> Option<u32> {
        if self.pool & Self::REFUSED == 0 || self.pool == Self::INBOUND {
            return None;
        }
        Some(self.pool & !Self::REFUSED)
    }
}

/// The most pairs of workload and destination that have counters of their own.
pub const TRAFFIC: u32 = 65_536;

const _: () = assert!(size_of::<TrafficKey>() == 24);
const _: () = assert!(size_of::<Meter>() == 32);
const _: () = assert!(size_of::<MeterSets>() == 16 * 160);
const _: () = assert!(size_of::<Traffic>() == 48);
