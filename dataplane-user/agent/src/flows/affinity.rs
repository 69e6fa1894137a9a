//! Clients of services with session affinity.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use admin::State;
use kernel::tables::Tables;
use nix::time::{ClockId, clock_gettime};
use plan::Served;
use tokio::sync::watch;
use tracing::{debug, warn};

/// Removes clients of services with session affinity.
pub struct Affinity {
    state: Arc<State>,
    served: watch::Receiver<Served>,
}

impl Affinity {
    pub const fn new(state: Arc<State>, served: watch::Receiver<Served>) -> Self {
        Self { state, served }
    }

    /// Removes the clients whose timeout is over. If services of several namespaces have session affinity, also shares
    /// the room among the namespaces.
    pub fn expire(&mut self) {
        let _busy = self.state.beats.flows.begin();
        let served = self.served.borrow().clone();
        let expired = Tables::open(&self.state.paths.bpffs).and_then(|tables| {
            let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| {
                u64::try_from(Duration::from(now).as_nanos()).unwrap_or_default()
            });
            let remembered = tables.expire_affinity(now)?;
            let removed = if is_shared(&served) {
                tables.share_affinity(|group| {
                    let owner = served.pool_owner(group)?;
                    Some(owner.service.namespace().into())
                })?
            } else {
                BTreeMap::new()
            };
            Ok((remembered, removed))
        });
        match expired {
            Ok((remembered, removed)) => {
                debug!(?remembered, "looked at session affinity");
                for (namespace, clients) in &removed {
                    debug!(%namespace, clients, "removed from session affinity for want of room");
                }
                self.state.affinity_shared(removed);
            }
            Err(error) => warn!("cannot remove clients from session affinity: {error}"),
        }
    }
}

/// Whether services of several namespaces have session affinity.
fn is_shared(served: &Served) -> bool {
    let services = served.snapshot.services.iter();
    let mut services = services.filter(|(_, service)| service.affinity.is_some());
    let Some((first, _)) = services.next() else {
        return false;
    };
    services.any(|(name, _)| name.namespace() != first.namespace())
}
