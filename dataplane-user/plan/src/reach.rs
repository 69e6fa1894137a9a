//! Endpoints that a workload with `egress: deny` may reach: those at addresses of Pods, and those in ranges that the
//! operator has stated. An EndpointSlice may name any address and declare it a Pod's, so the declaration is not used.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use dataplane_common::tables::{Block, Endpoint};
use imbl::ordmap::DiffItem;
use model::{Reachable, Service, ServiceName, Snapshot, Workload};

/// Decides whether blocks are reachable. Tracks nothing if no mesh needs it.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// The ranges that the operator has stated. `None` if there is no mesh.
    stated: Option<Arc<Reachable>>,
    /// Number of Pods at each address.
    pods: HashMap<IpAddr, u32>,
    /// The services that have an endpoint at each address.
    services: HashMap<IpAddr, BTreeSet<ServiceName>>,
}

impl Reach {
    /// Records the Pods of a snapshot. Returns the services whose reachability may have changed.
    pub(super) fn update(&mut self, last: &Snapshot, new: &Snapshot) -> BTreeSet<ServiceName> {
        self.stated.clone_from(&new.reachable);
        if self.stated.is_none() {
            return BTreeSet::new();
        }
        let mut changed = BTreeSet::new();
        for change in last.workloads.diff(&new.workloads) {
            let (old, new): (Option<&Arc<Workload>>, Option<&Arc<Workload>>) = match change {
                DiffItem::Add(_, new) => (None, Some(new)),
                DiffItem::Remove(_, old) => (Some(old), None),
                DiffItem::Update {
                    old: (_, old),
                    new: (_, new),
                } => (Some(old), Some(new)),
            };
            if old.map(|pod| &pod.addresses) == new.map(|pod| &pod.addresses) {
                continue;
            }
            for addr in old.iter().flat_map(|pod| &pod.addresses) {
                if let Some(count) = self.pods.get_mut(addr) {
                    *count -= 1;
                    if *count == 0 {
                        self.pods.remove(addr);
                        changed.insert(*addr);
                    }
                }
            }
            for addr in new.iter().flat_map(|pod| &pod.addresses) {
                let count = self.pods.entry(*addr).or_default();
                *count += 1;
                if *count == 1 {
                    changed.insert(*addr);
                }
            }
        }
        let services = changed.iter().filter_map(|addr| self.services.get(addr));
        services.flatten().cloned().collect()
    }

    /// Records that a service's endpoints have changed.
    pub(super) fn change(&mut self, old: Option<&Service>, new: Option<&Service>) {
        if self.stated.is_none() {
            return;
        }
        let addresses = |service: &Service| -> BTreeSet<IpAddr> {
            let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
            endpoints.map(|endpoint| endpoint.addr).collect()
        };
        let before = old.map(addresses).unwrap_or_default();
        let after = new.map(addresses).unwrap_or_default();
        let Some(name) = old.or(new).map(|service| &service.name) else {
            return;
        };
        for addr in before.difference(&after) {
            if let Some(services) = self.services.get_mut(addr) {
                services.remove(name);
                if services.is_empty() {
                    self.services.remove(addr);
                }
            }
        }
        for addr in after.difference(&before) {
            let services = self.services.entry(*addr).or_default();
            services.insert(name.clone());
        }
    }

    /// Returns the flag of a block with these endpoints.
    pub(super) fn flag(&self, endpoints: &[Endpoint]) -> u16 {
        let Some(stated) = &self.stated else {
            return 0;
        };
        let is_reachable = |endpoint: &Endpoint| {
            let addr = endpoint.addr.ip();
            endpoint.is_none() || self.pods.contains_key(&addr) || stated.has_address(addr)
        };
        if !endpoints.is_empty() && endpoints.iter().all(is_reachable) {
            Block::REACHABLE
        } else {
            0
        }
    }
}
