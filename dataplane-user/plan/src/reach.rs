//! Endpoints that a workload with `egress: deny` may reach: those at addresses of Pods, and those in ranges that the
//! operator has stated. An EndpointSlice may name any address and declare it a Pod's, so the declaration is not used.
//! And endpoints that speak HBONE: those at addresses that a Pod with HBONE has.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use dataplane_common::tables::{Block, Endpoint};
use imbl::ordmap::DiffItem;
use model::{Reachable, Service, ServiceName, Snapshot, Workload};

/// Decides whether blocks are reachable, and whether they have endpoints that speak HBONE. Tracks nothing if no mesh needs it.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// The ranges that the operator has stated. `None` if there is no mesh.
    stated: Option<Arc<Reachable>>,
    /// Number of Pods at each address.
    pods: HashMap<IpAddr, u32>,
    /// Number of Pods that speak HBONE at each address.
    speaking: HashMap<IpAddr, u32>,
    /// The services that have an endpoint at each address.
    services: HashMap<IpAddr, BTreeSet<ServiceName>>,
}

impl Reach {
    /// Records the Pods of a snapshot. Returns the services whose flags may have changed.
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
            let speaks = |pod: &&Arc<Workload>| pod.speaks_hbone;
            recount(&mut self.pods, old, new, &mut changed);
            let (old, new) = (old.filter(speaks), new.filter(speaks));
            recount(&mut self.speaking, old, new, &mut changed);
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

    /// Returns the flags of a block with these endpoints.
    pub(super) fn flags(&self, endpoints: &[Endpoint]) -> u16 {
        let Some(stated) = &self.stated else {
            return 0;
        };
        let is_reachable = |endpoint: &Endpoint| {
            let addr = endpoint.addr.ip();
            endpoint.is_none() || self.pods.contains_key(&addr) || stated.has_address(addr)
        };
        let mut flags = 0;
        if !endpoints.is_empty() && endpoints.iter().all(is_reachable) {
            flags |= Block::REACHABLE;
        }
        let speaks = |endpoint: &Endpoint| self.speaking.contains_key(&endpoint.addr.ip());
        if !self.speaking.is_empty() && endpoints.iter().any(speaks) {
            flags |= Block::HBONE;
        }
        flags
    }
}

/// Counts a workload's new addresses in place of its old ones, and adds the addresses that no workload had before or that none
/// has now to `changed`.
fn recount(
    counts: &mut HashMap<IpAddr, u32>,
    old: Option<&Arc<Workload>>,
    new: Option<&Arc<Workload>>,
    changed: &mut BTreeSet<IpAddr>,
) {
    if old.map(|pod| &pod.addresses) == new.map(|pod| &pod.addresses) {
        return;
    }
    for addr in old.iter().flat_map(|pod| &pod.addresses) {
        if let Some(count) = counts.get_mut(addr) {
            *count -= 1;
            if *count == 0 {
                counts.remove(addr);
                changed.insert(*addr);
            }
        }
    }
    for addr in new.iter().flat_map(|pod| &pod.addresses) {
        let count = counts.entry(*addr).or_default();
        *count += 1;
        if *count == 1 {
            changed.insert(*addr);
        }
    }
}

#[cfg(test)]
mod tests {
    use imbl::OrdMap;
    use model::{Place, Protocol, ServicePort, ServiceType, WorkloadName};

    use super::*;
    use crate::Planner;

    /// Pods with an address each: `a=1` has 10.0.0.1, and `a=1+` speaks HBONE, too.
    fn pods(all: &str) -> OrdMap<WorkloadName, Arc<Workload>> {
        let pods = all.split_whitespace().map(|pod| {
            let (name, at) = pod.split_once('=').unwrap();
            let name = WorkloadName::new("shop", name);
            let addr = format!("10.0.0.{}", at.trim_end_matches('+'));
            let pod = Workload {
                addresses: [addr.parse().unwrap()].into_iter().collect(),
                speaks_hbone: at.ends_with('+'),
                ..Workload::new(name.clone(), Place::Elsewhere)
            };
            (name, Arc::new(pod))
        });
        pods.collect()
    }

    /// Each line has Pods (`+`: with HBONE), and the flags of a block with the endpoints 10.0.0.1 and 10.0.0.2.
    #[test]
    fn a_block_has_the_flag_of_hbone_while_a_pod_at_an_endpoint_speaks_it() {
        let both = ["10.0.0.1", "10.0.0.2"].map(|addr| addr.parse::<IpAddr>().unwrap());
        let endpoints =
            both.map(|addr| Endpoint::new(addr.into(), dataplane_common::Port::new(80)));
        let (reachable, hbone) = (Block::REACHABLE, Block::HBONE);
        let mut reach = Reach::default();
        let mut last = Snapshot {
            reachable: Some(Arc::default()),
            ..Snapshot::default()
        };
        for (all, wanted) in [
            ("", 0),
            ("a=1", 0),
            ("a=1 b=2", reachable),
            ("a=1 b=2 c=3+", reachable),
            ("a=1+ b=2 c=3+", reachable | hbone),
            // The next Pod has the address already.
            ("a=1+ b=2 n=1", reachable | hbone),
            ("b=2 n=1", reachable),
            ("b=2 n=1+ m=1+", reachable | hbone),
            ("b=2 n=1+", reachable | hbone),
            ("n=1+", hbone),
            ("n=3+", 0),
        ] {
            let new = Snapshot {
                workloads: pods(all),
                ..last.clone()
            };
            reach.update(&last, &new);
            assert_eq!(reach.flags(&endpoints), wanted, "{:?}", new.workloads);
            last = new;
        }
    }
    /// Each line has Pods, the last part of the address of a service's only endpoint, and the flags of its block.
    #[test]
    fn the_block_of_a_service_follows_the_pods_at_its_endpoint() {
        let (reachable, hbone) = (Block::REACHABLE, Block::HBONE);
        let mut planner = Planner::new();
        let mut snapshot = Snapshot {
            reachable: Some(Arc::default()),
            ..Snapshot::default()
        };
        for (all, endpoint, wanted) in [
            ("", 1, 0),
            ("a=1", 1, reachable),
            ("a=1+", 1, reachable | hbone),
            ("a=1+", 2, 0),
            ("a=1+ b=2+", 2, reachable | hbone),
            ("b=2", 2, reachable),
            ("b=3", 2, 0),
            ("b=3", 3, reachable),
            ("", 3, 0),
        ] {
            let name = ServiceName::new("shop", "web");
            let port = ServicePort {
                endpoints: vec![model::Endpoint::new([10, 0, 0, endpoint].into(), 8080)],
                ..ServicePort::new(80, Protocol::Tcp)
            };
            let web = Service {
                cluster_ips: [IpAddr::from([10, 96, 0, 1])].into_iter().collect(),
                ports: [port].into(),
                ..Service::new(name.clone(), ServiceType::ClusterIp)
            };
            snapshot.workloads = pods(all);
            snapshot.services.insert(name, Arc::new(web));
            planner.plan(&snapshot);
            let keys = planner.frontends();
            let (_, web) = keys.iter().find(|(key, _)| !key.is_address()).unwrap();
            let (pool, _) = planner.pool(web.pool()).unwrap();
            let found = pool.block.flags() & (reachable | hbone);
            assert_eq!(found, wanted, "{all:?} {endpoint}");
        }
    }
}
