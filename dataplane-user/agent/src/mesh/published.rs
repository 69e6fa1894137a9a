//! The snapshot from which the proxy and the DNS server work: the one with which the tables of services are in line,
//! from the moment when they are.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use dns::{Basis, Zone, Zones};
use model::{Names, Snapshot};
use proxy::Routes;

/// Publishes snapshots to the proxy and to the DNS server. Clones share the last snapshot.
#[derive(Clone)]
pub struct Published(Arc<Mutex<Last>>);

struct Last {
    proxy: Option<Routes>,
    dns: Option<(Zones, Basis)>,
    names: Names,
    snapshot: Snapshot,
    is_behind: bool,
}

impl Published {
    /// Starts without a snapshot.
    pub fn new(proxy: Option<Routes>, dns: Option<(Zones, Basis)>) -> Self {
        Self(Arc::new(Mutex::new(Last {
            proxy,
            dns,
            names: Names::default(),
            snapshot: Snapshot::default(),
            is_behind: false,
        })))
    }

    /// Publishes a snapshot. `is_behind`: the source may have newer objects by now.
    pub fn publish(&self, snapshot: &Snapshot, is_behind: bool) {
        let mut last = self.lock();
        last.snapshot = snapshot.clone();
        last.is_behind = is_behind;
        last.apply();
    }

    /// Publishes the last snapshot once more, if its source has fallen behind since, or has caught up.
    pub fn doubt(&self, is_behind: bool) {
        let mut last = self.lock();
        if mem::replace(&mut last.is_behind, is_behind) != is_behind {
            last.apply();
        }
    }

    /// The names of the snapshot that was published last.
    pub fn names(&self) -> Names {
        self.lock().names.clone()
    }

    /// Makes the DNS server forget its clients.
    pub fn forget_clients(&self) {
        self.lock().set_zone();
    }

    fn lock(&self) -> MutexGuard<'_, Last> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Last {
    fn apply(&mut self) {
        let snapshot = self.snapshot.in_doubt(self.is_behind);
        if let Some(proxy) = &self.proxy {
            proxy.set_snapshot(snapshot.clone());
        }
        if let Some((_, basis)) = &self.dns {
            self.names = basis.names(mem::take(&mut self.names), &snapshot);
            self.set_zone();
        }
    }

    fn set_zone(&self) {
        if let Some((zones, basis)) = &self.dns {
            zones.set(Zone::new(self.names.clone(), basis.ttls));
        }
    }
}
