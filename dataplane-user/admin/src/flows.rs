//! Figures of flows and sockets, for the metrics.

use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use dataplane_common::{Addr, Protocol, tables::Peer};
use kernel::conntrack::{Census, Ports};

use super::{api, clock::now, lock::lock};

/// A walk through all flows.
#[derive(Clone, Debug)]
pub struct Walk {
    /// The result.
    pub census: Census,
    /// How long it took, rests not counted.
    pub took: Duration,
    /// When it ended, in seconds since the epoch.
    pub at: u64,
}

/// The services' addresses that flows go to, as a walk through all flows found them.
#[derive(Debug)]
pub struct Vips {
    /// When the walk began.
    pub since: Instant,
    /// The addresses.
    pub addresses: HashSet<Addr>,
}

impl api::Ports {
    /// The ports of an endpoint that a walk found. `limit`: how many the endpoint can have.
    pub fn new(ports: &Ports, limit: u32) -> Self {
        Self {
            protocol: ports.protocol.to_string(),
            endpoint: ports.endpoint.to_string(),
            used: ports.used,
            limit,
        }
    }
}

/// Counters of flows and sockets since the agent started.
#[derive(Debug, Default)]
pub struct FlowFigures {
    last: Mutex<Option<Walk>>,
    vips: Mutex<Option<Vips>>,
    idle: AtomicU64,
    departed: AtomicU64,
    tcp_sockets: AtomicU64,
    udp_sockets: AtomicU64,
}

impl FlowFigures {
    /// Records a walk through all flows, which began at `since`.
    pub fn walked(&self, mut census: Census, since: Instant, took: Duration) {
        *lock(&self.vips) = Some(Vips {
            since,
            addresses: std::mem::take(&mut census.vips),
        });
        self.idle.fetch_add(census.removed, Ordering::Relaxed);
        *lock(&self.last) = Some(Walk {
            census,
            took,
            at: now(),
        });
    }

    /// Counts flows that were ended because their endpoint went away.
    pub fn ended(&self, flows: u64) {
        self.departed.fetch_add(flows, Ordering::Relaxed);
    }

    /// Counts sockets that were destroyed because their endpoint went away.
    pub fn destroyed(&self, sockets: &[(Protocol, Peer)]) {
        for (protocol, _) in sockets {
            let counter = if *protocol == Protocol::TCP {
                &self.tcp_sockets
            } else {
                &self.udp_sockets
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the last walk; `None` before the first, or without a packet path.
    pub fn last(&self) -> Option<Walk> {
        lock(&self.last).clone()
    }

    /// Takes the services' addresses that the last walk found, once.
    pub fn take_vips(&self) -> Option<Vips> {
        lock(&self.vips).take()
    }

    /// Returns the removed flows, by reason.
    pub fn removed(&self) -> [(&'static str, u64); 2] {
        [
            ("idle", self.idle.load(Ordering::Relaxed)),
            ("endpoint-gone", self.departed.load(Ordering::Relaxed)),
        ]
    }

    /// Returns the destroyed sockets, by protocol.
    pub fn sockets(&self) -> [(&'static str, u64); 2] {
        [
            ("tcp", self.tcp_sockets.load(Ordering::Relaxed)),
            ("udp", self.udp_sockets.load(Ordering::Relaxed)),
        ]
    }
}
