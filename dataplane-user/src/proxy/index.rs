//! What the proxy knows of services: from a VIP and port to the endpoints that may be connected to.

use std::{
    cmp::Reverse,
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
};

use imbl::ordmap::DiffItem;
use rand::seq::IteratorRandom;
use smallvec::SmallVec;

use crate::model::{
    Protocol, Service, ServiceName, ServicePort, Snapshot, TrafficPolicy, Workload,
};

/// A snapshot, arranged for looking up destinations. A change costs what changed: the maps share
/// the rest with the index before.
#[derive(Clone, Debug, Default)]
pub struct Index {
    /// By address and port. Of several claims to one the first serves it.
    frontends: imbl::HashMap<SocketAddr, SmallVec<[Arc<Target>; 1]>>,
    /// Cluster IPs, on which a port that no service has is nobody's; and how many claim each.
    vips: imbl::HashMap<IpAddr, u32>,
    /// Addresses of endpoints and workloads, and how many have each: what "registry only" lets pass.
    known: imbl::HashMap<IpAddr, u32>,
    /// Workloads by their addresses, for metrics.
    workloads: imbl::HashMap<IpAddr, SmallVec<[Arc<Workload>; 1]>>,
    snapshot: Snapshot,
}

/// A service's port, as it is reached by one of its addresses.
#[derive(Debug)]
pub struct Target {
    service: Arc<Service>,
    port: usize,
    policy: TrafficPolicy,
    /// Whether clients must be in the service's source ranges.
    guarded: bool,
    /// IPv4 and IPv6; computed when somebody first connects.
    candidates: [OnceLock<Candidates>; 2],
}

/// Endpoints, in the order of preference.
#[derive(Debug)]
struct Candidates {
    /// Those that this node should use.
    near: Box<[SocketAddr]>,
    /// Those that are ready elsewhere: for when all of the others refuse.
    far: Box<[SocketAddr]>,
}

/// What a destination is.
#[derive(Clone, Debug)]
pub enum Found {
    /// A service's port.
    Service(Arc<Target>),
    /// A service's cluster IP, and none of its ports.
    UnknownPort,
    /// An endpoint of some service, or another workload.
    Known,
    /// Nothing that the snapshot has.
    Unknown,
}

impl Index {
    /// The index of another snapshot.
    #[must_use]
    pub fn updated(&self, snapshot: Snapshot) -> Self {
        // Node ports are on the node's addresses: another node is another index.
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
                    release(&mut index.known, *addr);
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
                    *index.known.entry(*addr).or_default() += 1;
                    let known = index.workloads.entry(*addr).or_default();
                    known.push(Arc::clone(new));
                }
            }
        }
        index.snapshot = snapshot;
        index
    }

    /// The snapshot that this is the index of.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The workload that has an address, and that nobody else has: a new pod may have the address before
    /// the old one is gone. An address of the node is no workload's.
    pub fn workload(&self, addr: IpAddr) -> Option<&Arc<Workload>> {
        match self.workloads.get(&addr)?.as_slice() {
            [workload] if !self.snapshot.node.addresses.contains(&addr) => Some(workload),
            _ => None,
        }
    }

    /// What a destination is. An exact VIP and port comes first, whatever else has the address.
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

    fn add(&mut self, service: &Arc<Service>) {
        for (at, target) in frontends(service, &self.snapshot.node.addresses) {
            let claims = self.frontends.entry(at).or_default();
            // Of a service's own, the one that came first: its cluster IPs.
            let place = claims.partition_point(|other| !target.precedes(other));
            claims.insert(place, target);
        }
        for vip in &service.cluster_ips {
            *self.vips.entry(*vip).or_default() += 1;
        }
        for endpoint in service.ports.iter().flat_map(|port| &port.endpoints) {
            *self.known.entry(endpoint.addr).or_default() += 1;
        }
    }

    fn remove(&mut self, service: &Service) {
        for (at, _) in places(service, &self.snapshot.node.addresses) {
            if let Some(claims) = self.frontends.get_mut(&at) {
                claims.retain(|target| target.service.name != service.name);
                if claims.is_empty() {
                    self.frontends.remove(&at);
                }
            }
        }
        for vip in &service.cluster_ips {
            release(&mut self.vips, *vip);
        }
        for endpoint in service.ports.iter().flat_map(|port| &port.endpoints) {
            release(&mut self.known, endpoint.addr);
        }
    }
}

fn release(counts: &mut imbl::HashMap<IpAddr, u32>, addr: IpAddr) {
    if let Some(count) = counts.get_mut(&addr) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&addr);
        }
    }
}

/// How an address of a service is reached.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Way {
    port: usize,
    policy: TrafficPolicy,
    guarded: bool,
}

/// Every address and port at which a service is reached over TCP.
fn places<'a>(
    service: &'a Service,
    node: &'a [IpAddr],
) -> impl Iterator<Item = (SocketAddr, Way)> + 'a {
    let tcp = |(_, port): &(usize, &ServicePort)| port.protocol == Protocol::Tcp;
    service
        .ports
        .iter()
        .enumerate()
        .filter(tcp)
        .flat_map(move |(number, port)| {
            let way = move |policy, guarded| Way {
                port: number,
                policy,
                guarded,
            };
            let inside = way(service.internal_policy, false);
            // From a pod or the node itself an outside address is reached whatever
            // externalTrafficPolicy says, which is for clients from outside.
            let outside = way(TrafficPolicy::Cluster, false);
            let for_some = way(TrafficPolicy::Cluster, true);
            let cluster = service.cluster_ips.iter().map(move |ip| (*ip, inside));
            let external = service.external_ips.iter().map(move |ip| (*ip, outside));
            let balancer = service.load_balancer_ips.iter();
            let balancer = balancer.map(move |ip| (*ip, for_some));
            let vips = cluster.chain(external).chain(balancer);
            let vips = vips.map(move |(ip, way)| (SocketAddr::new(ip, port.port), way));
            let node_port = port.node_port.into_iter().flat_map(move |number| {
                let at = node.iter().map(move |ip| SocketAddr::new(*ip, number));
                at.map(move |at| (at, outside))
            });
            vips.chain(node_port)
        })
}

/// The same, with targets: addresses that are reached the same way share one.
fn frontends(service: &Arc<Service>, node: &[IpAddr]) -> Vec<(SocketAddr, Arc<Target>)> {
    let mut shared: SmallVec<[(Way, Arc<Target>); 4]> = SmallVec::new();
    let target = |(at, way)| {
        let known = shared.iter().find(|(other, _)| *other == way);
        let target = if let Some((_, target)) = known {
            Arc::clone(target)
        } else {
            let target = Arc::new(Target {
                service: Arc::clone(service),
                port: way.port,
                policy: way.policy,
                guarded: way.guarded,
                candidates: Default::default(),
            });
            shared.push((way, Arc::clone(&target)));
            target
        };
        (at, target)
    };
    places(service, node).map(target).collect()
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

    /// Whether a client may use it (`loadBalancerSourceRanges`).
    pub fn admits(&self, client: IpAddr) -> bool {
        let ranges = &self.service.source_ranges;
        !self.guarded || ranges.is_empty() || ranges.iter().any(|range| range.contains(&client))
    }

    /// Whether it has an endpoint of the family.
    pub fn has_endpoint(&self, v4: bool) -> bool {
        let candidates = self.candidates(v4);
        !candidates.near.is_empty() || !candidates.far.is_empty()
    }

    /// The endpoint to connect to, of those that were not `tried` in vain: one of those that this
    /// node should use (hinted to it, to its zone, or all), and when these are exhausted one that is
    /// ready elsewhere. At random; by client address if the service has session affinity.
    pub fn choose(&self, v4: bool, client: IpAddr, tried: &[SocketAddr]) -> Option<SocketAddr> {
        let Candidates { near, far } = self.candidates(v4);
        [near, far].into_iter().find_map(|tier| {
            let left = tier.iter().filter(|endpoint| !tried.contains(endpoint));
            if self.service.affinity.is_some() {
                left.max_by_key(|endpoint| rank(client, **endpoint))
            } else if tried.is_empty() {
                (!tier.is_empty()).then(|| &tier[rand::random_range(0..tier.len())])
            } else {
                left.choose(&mut rand::rng())
            }
            .copied()
        })
    }

    /// All endpoints that [`Target::choose`] may name, the preferred ones first.
    pub fn endpoints(&self, v4: bool) -> impl Iterator<Item = SocketAddr> + '_ {
        let Candidates { near, far } = self.candidates(v4);
        near.iter().chain(far).copied()
    }

    fn candidates(&self, v4: bool) -> &Candidates {
        self.candidates[usize::from(!v4)].get_or_init(|| {
            let port = self.port();
            let mut near: Vec<SocketAddr> = port
                .usable(v4, self.policy)
                .map(|endpoint| SocketAddr::new(endpoint.addr, endpoint.port))
                .collect();
            near.dedup();
            let elsewhere = port.endpoints.iter().filter(|endpoint| {
                self.policy == TrafficPolicy::Cluster
                    && endpoint.addr.is_ipv4() == v4
                    && endpoint.ready
            });
            let far = elsewhere
                .map(|endpoint| SocketAddr::new(endpoint.addr, endpoint.port))
                .filter(|endpoint| !near.contains(endpoint));
            Candidates {
                far: far.collect(),
                near: near.into(),
            }
        })
    }

    /// Of two services that claim one address, the older serves it, as in the kernel's tables.
    fn precedes(&self, other: &Self) -> bool {
        let age = |target: &Self| {
            let created = target.service.created;
            (Reverse(created.is_some()), created)
        };
        (age(self), &self.service.name) < (age(other), &other.service.name)
    }
}

/// A client's endpoint is the one with the highest rank: it stays the same while that endpoint is
/// there, and nobody has to remember it. (Rendezvous hashing.)
fn rank(client: IpAddr, endpoint: SocketAddr) -> u64 {
    // With a fixed seed: other workers, and a proxy that was restarted, draw the same.
    BuildHasherDefault::<DefaultHasher>::default().hash_one((client, endpoint))
}
