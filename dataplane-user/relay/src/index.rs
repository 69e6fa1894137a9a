//! The index of a snapshot: it leads from a VIP and port to the endpoints to connect to.

use std::{
    cmp::Reverse,
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, OnceLock},
};

use imbl::ordmap::DiffItem;
use model::{
    Protocol, Service, ServiceName, ServicePort, Shares, Snapshot, TrafficPolicy, Weights, Workload,
};
use rand::seq::IteratorRandom;
use smallvec::SmallVec;

use super::limits::Client;

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
}

/// A service's port, as one of the service's addresses reaches it.
#[derive(Debug)]
pub struct Target {
    service: Arc<Service>,
    port: usize,
    policy: TrafficPolicy,
    /// Whether the service's source ranges apply.
    guarded: bool,
    /// For IPv4 and IPv6; computed at the first connection.
    candidates: [OnceLock<Candidates>; 2],
}

/// Endpoints in the order of preference.
#[derive(Debug)]
struct Candidates {
    /// The endpoints that this node should use, each as often as its weight asks, one after the other.
    preferred: Box<[SocketAddr]>,
    /// Other ready endpoints, for when all preferred ones refuse.
    others: Box<[SocketAddr]>,
    /// How many draws beside those of the preferred ones are refused: parts of a route without endpoints.
    refused: usize,
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
    pub(crate) fn client(&self, addr: IpAddr) -> Client {
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

    /// Whether it may connect to a service: each endpoint is a Pod's, or in a range that the operator has stated.
    pub fn is_service_reachable(&self, target: &Target, v4: bool) -> bool {
        let Some(stated) = &self.snapshot.reachable else {
            return true;
        };
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

/// How an address of a service leads to its endpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Access {
    port: usize,
    policy: TrafficPolicy,
    guarded: bool,
}

/// Every address and port at which a service is reached over TCP.
fn addresses<'a>(
    service: &'a Service,
    node: &'a [IpAddr],
) -> impl Iterator<Item = (SocketAddr, Access)> + 'a {
    let tcp = |(_, port): &(usize, &ServicePort)| port.protocol == Protocol::Tcp;
    service
        .ports
        .iter()
        .enumerate()
        .filter(tcp)
        .flat_map(move |(number, port)| {
            let access = move |policy, guarded| Access {
                port: number,
                policy,
                guarded,
            };
            let inside = access(service.internal_policy, false);
            // externalTrafficPolicy is for clients from outside. A pod or the node itself reaches an
            // external address with either policy.
            let outside = access(TrafficPolicy::Cluster, false);
            let guarded = access(TrafficPolicy::Cluster, true);
            let cluster = service.cluster_ips.iter().map(move |ip| (*ip, inside));
            let external = service.external_ips.iter().map(move |ip| (*ip, outside));
            let balancer = service.load_balancer_ips.iter();
            let balancer = balancer.map(move |ip| (*ip, guarded));
            let vips = cluster.chain(external).chain(balancer);
            let vips = vips.map(move |(ip, access)| (SocketAddr::new(ip, port.port), access));
            let node_port = port.node_port.into_iter().flat_map(move |number| {
                let at = node.iter().map(move |ip| SocketAddr::new(*ip, number));
                at.map(move |at| (at, outside))
            });
            vips.chain(node_port)
        })
}

/// Every address and port at which a service is reached over TCP, with its target. Addresses with the
/// same access share a target.
fn frontends(service: &Arc<Service>, node: &[IpAddr]) -> Vec<(SocketAddr, Arc<Target>)> {
    let mut shared: SmallVec<[(Access, Arc<Target>); 4]> = SmallVec::new();
    let target = |(at, access): (SocketAddr, Access)| {
        let known = shared.iter().find(|(other, _)| *other == access);
        let target = if let Some((_, target)) = known {
            Arc::clone(target)
        } else {
            let target = Arc::new(Target {
                service: Arc::clone(service),
                port: access.port,
                policy: access.policy,
                guarded: access.guarded,
                candidates: Default::default(),
            });
            shared.push((access, Arc::clone(&target)));
            target
        };
        (at, target)
    };
    addresses(service, node).map(target).collect()
}

impl Target {
    /// The service's name.
    pub fn service(&self) -> &ServiceName {
        &self.service.name
    }

    /// The service's port.
    pub fn port(&self) -> &ServicePort {
        &self.service.ports[self.port]
    }

    /// Whether `loadBalancerSourceRanges` admit a client.
    pub fn admits(&self, client: IpAddr) -> bool {
        let ranges = &self.service.source_ranges;
        !self.guarded || ranges.is_empty() || ranges.iter().any(|range| range.contains(&client))
    }

    /// Whether there is an endpoint of the family.
    pub fn has_endpoint(&self, v4: bool) -> bool {
        let candidates = self.candidates(v4);
        !candidates.preferred.is_empty() || !candidates.others.is_empty()
    }

    /// Chooses the endpoint to connect to: a preferred one (hinted to this node, to its zone, or all),
    /// and after these another ready one. The choice is random; with session affinity the client's
    /// address decides. `tried` endpoints are left out. None also for a connection that a route has refused.
    pub fn choose(&self, v4: bool, client: IpAddr, tried: &[SocketAddr]) -> Option<SocketAddr> {
        let Candidates {
            preferred,
            others,
            refused,
        } = self.candidates(v4);
        if self.service.affinity.is_some() {
            let best = ranked(client, preferred, *refused, tried);
            let best = best.or_else(|| ranked(client, others, 0, tried));
            return best.and_then(|(_, endpoint)| endpoint);
        }
        if tried.is_empty() && !preferred.is_empty() {
            let drawn = rand::random_range(0..preferred.len() + refused);
            return preferred.get(drawn).copied();
        }
        [preferred, others].into_iter().find_map(|tier| {
            let left = tier.iter().filter(|endpoint| !tried.contains(endpoint));
            left.choose(&mut rand::rng()).copied()
        })
    }

    /// All endpoints that [`Target::choose`] may return, the preferred ones first.
    pub fn endpoints(&self, v4: bool) -> impl Iterator<Item = SocketAddr> + '_ {
        let Candidates {
            preferred, others, ..
        } = self.candidates(v4);
        preferred.iter().chain(others).copied()
    }

    fn candidates(&self, v4: bool) -> &Candidates {
        self.candidates[usize::from(!v4)].get_or_init(|| {
            let port = self.port();
            let mut preferred: Vec<SocketAddr> = port
                .usable(v4, self.policy)
                .map(|endpoint| SocketAddr::new(endpoint.addr, endpoint.port))
                .collect();
            preferred.dedup();
            let mut drawn = preferred.clone();
            if port.weights.is_some() || port.split.is_some() {
                let Shares { endpoints, refused } = port.shares(v4, self.policy);
                let endpoints = endpoints.into_iter();
                let mut weighted: Vec<_> = endpoints
                    .map(|(e, weight)| (Some(SocketAddr::new(e.addr, e.port)), weight))
                    .collect();
                weighted.extend((refused > 0).then_some((None, refused)));
                let places: Vec<_> = Weights::repeated(&weighted).collect();
                drawn = places.iter().copied().flatten().collect();
                if port.split.is_some() {
                    return Candidates {
                        refused: places.len() - drawn.len(),
                        preferred: drawn.into(),
                        others: Box::default(),
                    };
                }
            }
            let ready = port.endpoints.iter().filter(|endpoint| {
                self.policy == TrafficPolicy::Cluster
                    && endpoint.addr.is_ipv4() == v4
                    && endpoint.ready
            });
            let others = ready
                .map(|endpoint| SocketAddr::new(endpoint.addr, endpoint.port))
                .filter(|endpoint| !preferred.contains(endpoint));
            Candidates {
                others: others.collect(),
                preferred: drawn.into(),
                refused: 0,
            }
        })
    }

    /// Whether this target serves an address that both claim: the older service does, as in the kernel's
    /// tables.
    fn precedes(&self, other: &Self) -> bool {
        let age = |target: &Self| {
            let created = target.service.created;
            (Reverse(created.is_some()), created)
        };
        (age(self), &self.service.name) < (age(other), &other.service.name)
    }
}

/// The endpoint with the highest rank for a client, by rendezvous hashing: the client keeps the endpoint for as long as it
/// exists, and no state is needed for it. Each of an endpoint's places has a rank of its own, so that weights hold. The
/// places that are `refused` have no endpoint.
fn ranked(
    client: IpAddr,
    places: &[SocketAddr],
    refused: usize,
    tried: &[SocketAddr],
) -> Option<(u64, Option<SocketAddr>)> {
    // The seed is fixed, so that other workers and a restarted proxy choose the same endpoint.
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    let same = places.chunk_by(|a, b| a == b);
    let numbered = same.flat_map(|same| same.iter().enumerate());
    let left = numbered.filter(|(_, endpoint)| !tried.contains(endpoint));
    let left = left.map(|(place, endpoint)| (place, Some(*endpoint)));
    // After a try, the connection is not among those that are refused.
    let refused = if tried.is_empty() { refused } else { 0 };
    let all = left.chain((0..refused).map(|place| (place, None)));
    let ranks = all.map(|(place, of)| (hasher.hash_one((client, of, place)), of));
    ranks.max_by_key(|(rank, _)| *rank)
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
}
