//! The index of a snapshot: it leads from a VIP and port to the endpoints to connect to.

mod policies;
mod target;
mod waypoint;

pub use policies::Denied;
pub use target::Target;
pub use waypoint::Via;

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use imbl::ordmap::DiffItem;
use model::{Protocol, Service, ServiceName, Snapshot, Workload};
use smallvec::SmallVec;

use self::{
    policies::Judged,
    target::{addresses, frontends},
};
use super::{denials::Denials, limits::Client};

/// A snapshot, arranged for looking up destinations. A new index costs as much as has changed: its
/// maps share the rest with the index before.
#[derive(Clone, Debug, Default)]
pub struct Index {
    /// Service ports by address and port. The first of several claims serves the address.
    frontends: imbl::HashMap<SocketAddr, SmallVec<[Arc<Target>; 1]>>,
    /// Cluster IPs, and how many services claim each. A connection to a port of a cluster IP that no
    /// service has is refused.
    vips: imbl::HashMap<IpAddr, u32>,
    /// Addresses of workloads and of endpoints, except those of ServiceEntries, and how many have each.
    known: imbl::HashMap<IpAddr, u32>,
    /// The IPv6 networks of 64 bits with such addresses, and how many have each.
    networks: imbl::HashMap<u64, u32>,
    /// Endpoints over TCP, and how many services have each.
    endpoints: imbl::HashMap<SocketAddr, u32>,
    /// Workloads by their addresses, for metrics.
    workloads: imbl::HashMap<IpAddr, SmallVec<[Arc<Workload>; 1]>>,
    snapshot: Snapshot,
    /// The policies of the attached workloads that have had connections.
    judged: Arc<Judged>,
    /// The connections that policies have refused. All indices share them.
    denials: Arc<Denials>,
}

/// A destination, as far as the snapshot knows it.
#[derive(Clone, Debug)]
pub enum Found {
    /// A service's port.
    Service(Arc<Target>),
    /// A service's cluster IP, with a port that the service does not have.
    UnknownPort,
    /// The address of an endpoint or a workload.
    Known,
    /// An address that is not in the snapshot.
    Unknown,
}

/// The way to an address.
#[derive(Clone, Debug)]
pub enum Way {
    /// In plaintext.
    Plain,
    /// Through a tunnel to this workload.
    Tunnel(Arc<Workload>),
    /// None: several workloads have the address, and one of them is reached through a tunnel. A new pod may have an address
    /// before the old pod is gone.
    Unclear,
}

impl Index {
    /// Returns the index of a new snapshot.
    #[must_use]
    pub fn updated(&self, snapshot: Snapshot) -> Self {
        // Node ports are on the node's addresses, so another node takes a new index.
        let same_node = self.snapshot.node == snapshot.node;
        let mut index = if same_node {
            self.clone()
        } else {
            Self::default()
        };
        index.judged = self.judged_by(&snapshot);
        index.denials = Arc::clone(&self.denials);
        let before = std::mem::take(&mut index.snapshot.services);
        index.snapshot.node = Arc::clone(&snapshot.node);
        for change in before.diff(&snapshot.services) {
            match change {
                DiffItem::Add(_, new) => index.add(new),
                DiffItem::Remove(_, old) => index.remove(old),
                DiffItem::Update {
                    old: (_, old),
                    new: (_, new),
                } => {
                    index.remove(old);
                    index.add(new);
                }
            }
        }
        let before = std::mem::take(&mut index.snapshot.workloads);
        for change in before.diff(&snapshot.workloads) {
            let (old, new) = match change {
                DiffItem::Add(_, new) => (None, Some(new)),
                DiffItem::Remove(_, old) => (Some(old), None),
                DiffItem::Update {
                    old: (_, old),
                    new: (_, new),
                } => (Some(old), Some(new)),
            };
            if let Some(old) = old {
                for addr in &old.addresses {
                    index.forget(*addr);
                    if let Some(known) = index.workloads.get_mut(addr) {
                        known.retain(|known| known.name != old.name);
                        if known.is_empty() {
                            index.workloads.remove(addr);
                        }
                    }
                }
            }
            if let Some(new) = new {
                for addr in &new.addresses {
                    index.know(*addr);
                    let known = index.workloads.entry(*addr).or_default();
                    known.push(Arc::clone(new));
                }
            }
        }
        index.snapshot = snapshot;
        index
    }

    /// The index's snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The workload with this address; `None` if several workloads or the node have it, since a new pod
    /// may have an address before the old pod is gone.
    pub fn workload(&self, addr: IpAddr) -> Option<&Arc<Workload>> {
        match self.workloads.get(&addr)?.as_slice() {
            [workload] if !self.snapshot.node.addresses.contains(&addr) => Some(workload),
            _ => None,
        }
    }

    /// Returns the way to an address: through a tunnel if its workload speaks HBONE.
    pub fn way(&self, addr: IpAddr) -> Way {
        match self.workloads_at(addr) {
            [workload] if workload.speaks_hbone => Way::Tunnel(Arc::clone(workload)),
            several if several.iter().any(|workload| workload.speaks_hbone) => Way::Unclear,
            _ => Way::Plain,
        }
    }

    /// Returns all workloads with an address.
    pub fn workloads_at(&self, addr: IpAddr) -> &[Arc<Workload>] {
        self.workloads.get(&addr).map_or(&[], |all| all)
    }

    /// Returns the service with a name in DNS, if `at` is one of its own endpoints.
    pub fn service_of(&self, host: &str, at: SocketAddr) -> Option<ServiceName> {
        let (name, host) = host.split_once('.')?;
        let (namespace, host) = host.split_once('.')?;
        if *host.strip_prefix("svc.")? != *self.snapshot.cluster.domain {
            return None;
        }
        let service = (self.snapshot.services).get(&ServiceName::new(namespace, name))?;
        let mut ports = service.own_ports();
        let is_own = ports.any(|port| {
            let found = (port.endpoints).binary_search_by_key(&at, |of| (of.addr, of.port).into());
            port.protocol == Protocol::Tcp && found.is_ok()
        });
        is_own.then(|| service.name.clone())
    }

    /// Looks a destination up. A service's exact address and port comes before anything else with the
    /// same address.
    pub fn find(&self, destination: SocketAddr) -> Found {
        let plain = SocketAddr::new(destination.ip(), destination.port());
        if let Some(target) = self.frontends.get(&plain).and_then(|claims| claims.first()) {
            Found::Service(Arc::clone(target))
        } else if self.vips.contains_key(&plain.ip()) {
            Found::UnknownPort
        } else if self.known.contains_key(&plain.ip()) {
            Found::Known
        } else {
            Found::Unknown
        }
    }

    /// The client at an address: the workload that has it; or else the address, by IPv6 the network of 64 bits, because a host
    /// outside may have any address in its network. In a network of pods, each address is a client: many pods share it, and each
    /// has its own.
    pub fn client(&self, addr: IpAddr) -> Client {
        match (self.workload(addr), addr) {
            (Some(workload), _) => Client::Workload(workload.name.clone()),
            (None, IpAddr::V6(v6)) if !self.networks.contains_key(&network(v6)) => {
                let base = u128::from(network(v6)) << 64;
                Client::Address(Ipv6Addr::from_bits(base).into())
            }
            (None, _) => Client::Address(addr),
        }
    }

    fn know(&mut self, addr: IpAddr) {
        *self.known.entry(addr).or_default() += 1;
        if let IpAddr::V6(v6) = addr {
            *self.networks.entry(network(v6)).or_default() += 1;
        }
    }

    fn forget(&mut self, addr: IpAddr) {
        release(&mut self.known, &addr);
        if let IpAddr::V6(v6) = addr {
            release(&mut self.networks, &network(v6));
        }
    }

    fn add(&mut self, service: &Arc<Service>) {
        for (at, target) in frontends(service, &self.snapshot.node.addresses) {
            let claims = self.frontends.entry(at).or_default();
            // Of one service's claims the first one stays first: that of its cluster IPs.
            let position = claims.partition_point(|other| !target.precedes(other));
            claims.insert(position, target);
        }
        for vip in &service.cluster_ips {
            *self.vips.entry(*vip).or_default() += 1;
        }
        for (_, endpoint) in service.own_endpoints() {
            self.know(endpoint.addr);
        }
        for at in endpoints(service) {
            *self.endpoints.entry(at).or_default() += 1;
        }
    }

    fn remove(&mut self, service: &Service) {
        for (at, _) in addresses(service, &self.snapshot.node.addresses) {
            if let Some(claims) = self.frontends.get_mut(&at) {
                claims.retain(|target| target.service.name != service.name);
                if claims.is_empty() {
                    self.frontends.remove(&at);
                }
            }
        }
        for vip in &service.cluster_ips {
            release(&mut self.vips, vip);
        }
        for (_, endpoint) in service.own_endpoints() {
            self.forget(endpoint.addr);
        }
        for at in endpoints(service) {
            release(&mut self.endpoints, &at);
        }
    }

    /// Whether a workload that is denied egress may connect to a destination, as the kernel's programs judge it. The
    /// workload may connect to a service's endpoint whose address is a Pod's, to a port that a Pod declares, and to
    /// destinations that the operator has stated.
    pub fn is_reachable(&self, destination: SocketAddr) -> bool {
        let to = SocketAddr::new(destination.ip(), destination.port());
        match &self.snapshot.reachable {
            Some(stated) => {
                stated.has(to)
                    || self.workloads.get(&to.ip()).is_some_and(|pods| {
                        let declared = (Protocol::Tcp, to.port());
                        self.endpoints.contains_key(&to)
                            || pods.iter().any(|pod| pod.ports.contains(&declared))
                    })
            }
            // The snapshot does not say which addresses are Pods'.
            None => self.known.contains_key(&to.ip()),
        }
    }

    /// Whether it may connect to a service: it has endpoints, and each of them is a Pod's, or in a range that the operator
    /// has stated.
    pub fn is_service_reachable(&self, target: &Target, v4: bool) -> bool {
        let Some(stated) = &self.snapshot.reachable else {
            return true;
        };
        // Without this, its waypoint would be reached.
        if !target.has_endpoint(v4) {
            return false;
        }
        target.endpoints(v4).all(|endpoint| {
            self.workloads.contains_key(&endpoint.ip()) || stated.has_address(endpoint.ip())
        })
    }

    /// Whether captured workloads may not connect to a service, because nothing on the node enforces its waypoint.
    pub fn is_refused(&self, target: &Target) -> bool {
        self.snapshot.istio.refuses(&target.service)
    }

    /// Whether an endpoint of a service is the node itself, as which the proxy on the node would connect.
    pub fn leads_to_node(&self, target: &Target, v4: bool) -> bool {
        target
            .endpoints(v4)
            .any(|endpoint| self.is_node(endpoint.ip()))
    }

    /// Whether an address is the node's.
    pub fn is_node(&self, addr: IpAddr) -> bool {
        let node = &self.snapshot.node;
        addr.is_loopback() || node.own.contains(&addr) || node.addresses.contains(&addr)
    }
}

/// A service's own endpoints over TCP.
fn endpoints(service: &Service) -> impl Iterator<Item = SocketAddr> {
    let own = service.own_endpoints();
    let tcp = own.filter(|(protocol, _)| *protocol == Protocol::Tcp);
    tcp.map(|(_, endpoint)| SocketAddr::new(endpoint.addr, endpoint.port))
}

/// The upper 64 bits of an address.
fn network(addr: Ipv6Addr) -> u64 {
    (addr.to_bits() >> 64) as u64
}

fn release<K: std::hash::Hash + Eq + Clone>(counts: &mut imbl::HashMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use model::{Place, WorkloadName};

    use super::*;

    #[test]
    fn a_client_is_a_workload_or_an_address_or_a_network_outside() {
        let pod = |name: &str, addresses: &[&str]| {
            let addresses = addresses.iter().map(|addr| addr.parse().unwrap()).collect();
            let name = WorkloadName::new("default", name);
            Arc::new(Workload {
                addresses,
                ..Workload::new(name, Place::Elsewhere)
            })
        };
        let workloads = [pod("app", &["10.244.1.8", "fd00:1::8"])];
        let named = workloads.map(|pod| (pod.name.clone(), pod));
        let snapshot = Snapshot {
            workloads: named.into_iter().collect(),
            ..Snapshot::default()
        };
        let client = |index: &Index, addr: &str| index.client(addr.parse().unwrap());
        let index = Index::default().updated(snapshot);
        let app = Client::Workload(WorkloadName::new("default", "app"));
        assert_eq!(client(&index, "10.244.1.8"), app);
        assert_eq!(client(&index, "fd00:1::8"), app);
        // Pods that the agent does not know, in a network of pods.
        assert_ne!(client(&index, "fd00:1::9"), client(&index, "fd00:1::a"));
        // A host outside.
        assert_eq!(client(&index, "2001:db8::9"), client(&index, "2001:db8::a"));
        assert_ne!(client(&index, "192.0.2.1"), client(&index, "192.0.2.2"));
        let index = index.updated(Snapshot::default());
        assert_eq!(client(&index, "fd00:1::9"), client(&index, "fd00:1::a"));
    }

    #[test]
    fn a_host_is_a_service_only_if_the_destination_is_its_endpoint() {
        let mut service = Service::new(
            ServiceName::new("shop", "web"),
            model::ServiceType::ClusterIp,
        );
        for (number, protocol) in [(80, Protocol::Tcp), (53, Protocol::Udp)] {
            let mut port = model::ServicePort::new(number, protocol);
            let endpoint = |ip: &str| model::Endpoint::new(ip.parse().unwrap(), 8000 + number);
            port.endpoints = ["10.0.0.1", "10.0.0.7", "fd00::1"].map(endpoint).into();
            service.ports.push(port);
        }
        let name = service.name.clone();
        let index = Index::default().updated(Snapshot {
            services: [(name, Arc::new(service))].into_iter().collect(),
            ..Snapshot::default()
        });
        let host = "web.shop.svc.cluster.local";
        for (host, at, is_it) in [
            (host, "10.0.0.7:8080", true),
            (host, "[fd00::1]:8080", true),
            (host, "10.0.0.7:8081", false),
            (host, "10.0.0.2:8080", false),
            (host, "10.0.0.7:8053", false),
            ("web.shop.svc.cluster.example", "10.0.0.7:8080", false),
            ("api.shop.svc.cluster.local", "10.0.0.7:8080", false),
            ("web.shop.pod.cluster.local", "10.0.0.7:8080", false),
            ("web.shop.svc", "10.0.0.7:8080", false),
            ("", "10.0.0.7:8080", false),
        ] {
            let found = index.service_of(host, at.parse().unwrap());
            assert_eq!(found.is_some(), is_it, "{host} {at}");
        }
    }

    /// An address that a pod with HBONE shares with another pod is not reached in plaintext.
    #[test]
    fn an_address_is_reached_through_a_tunnel_if_its_only_workload_speaks_hbone() {
        let pod = |name: &str, addr: &str, speaks_hbone| {
            let name = WorkloadName::new("default", name);
            Arc::new(Workload {
                addresses: [addr.parse().unwrap()].into_iter().collect(),
                speaks_hbone,
                ..Workload::new(name, Place::Elsewhere)
            })
        };
        let mut index = Index::default();
        for (pods, wanted) in [
            (vec![], "Plain"),
            (vec![pod("a", "10.0.0.1", false)], "Plain"),
            (vec![pod("a", "10.0.0.2", true)], "Plain"),
            (vec![pod("a", "10.0.0.1", true)], "Tunnel"),
            (
                vec![pod("a", "10.0.0.1", true), pod("b", "10.0.0.1", false)],
                "Unclear",
            ),
            (
                vec![pod("a", "10.0.0.1", true), pod("b", "10.0.0.1", true)],
                "Unclear",
            ),
            (
                vec![pod("a", "10.0.0.1", false), pod("b", "10.0.0.1", false)],
                "Plain",
            ),
        ] {
            let named = pods.iter().map(|pod| (pod.name.clone(), Arc::clone(pod)));
            index = index.updated(Snapshot {
                workloads: named.collect(),
                ..Snapshot::default()
            });
            let way = format!("{:?}", index.way("10.0.0.1".parse().unwrap()));
            assert!(way.starts_with(wanted), "{pods:?}: {way}");
        }
    }
}
