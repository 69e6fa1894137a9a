//! A service's port as the target of a connection, and the choice among its endpoints.

use std::{
    cmp::Reverse,
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
};

use model::{Claim, Protocol, Service, ServiceName, ServicePort, Shares, TrafficPolicy, Weights};
use rand::seq::IteratorRandom;
use smallvec::SmallVec;

/// A service's port, as one of the service's addresses reaches it.
#[derive(Debug)]
pub struct Target {
    pub(crate) service: Arc<Service>,
    port: usize,
    policy: TrafficPolicy,
    claim: Claim,
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

/// How an address of a service leads to its endpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Access {
    port: usize,
    policy: TrafficPolicy,
    /// How the service claims the address.
    claim: Claim,
    guarded: bool,
}

/// Every address and port at which a service is reached over TCP.
pub(super) fn addresses<'a>(
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
            let access = move |policy, claim| Access {
                port: number,
                policy,
                claim: service.claim(claim),
                guarded: false,
            };
            let inside = access(service.internal_policy, Claim::ClusterIp);
            // externalTrafficPolicy is for clients from outside. A pod or the node itself reaches an
            // external address with either policy.
            let outside = move |claim| access(TrafficPolicy::Cluster, claim);
            let cluster = service.cluster_ips.iter().map(move |ip| (*ip, inside));
            let external = service.external_ips.iter();
            // As in the kernel's tables, an address of both kinds is claimed as the load balancer's.
            let external = external.map(move |ip| {
                let of_both = service.load_balancer_ips.contains(ip);
                let claims = [Claim::ExternalIp, Claim::LoadBalancer];
                (*ip, outside(claims[usize::from(of_both)]))
            });
            let guarded = Access {
                guarded: true,
                ..outside(Claim::LoadBalancer)
            };
            let balancer = service.load_balancer_ips.iter();
            let balancer = balancer.map(move |ip| (*ip, guarded));
            let vips = cluster.chain(external).chain(balancer);
            let vips = vips.map(move |(ip, access)| (SocketAddr::new(ip, port.port), access));
            let node_port = port.node_port.into_iter().flat_map(move |number| {
                let at = node.iter().map(move |ip| SocketAddr::new(*ip, number));
                at.map(move |at| (at, outside(Claim::NodePort)))
            });
            vips.chain(node_port)
        })
}

/// Every address and port at which a service is reached over TCP, with its target. Addresses with the
/// same access share a target.
pub(super) fn frontends(service: &Arc<Service>, node: &[IpAddr]) -> Vec<(SocketAddr, Arc<Target>)> {
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
                claim: access.claim,
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

    /// Whether this target serves an address that both claim: the stronger claim does, and of equal claims the older
    /// service's, as in the kernel's tables.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        let age = |target: &Self| {
            let created = target.service.created;
            (Reverse(created.is_some()), created)
        };
        let rank = |target: &Self| (target.claim, age(target));
        (rank(self), &self.service.name) < (rank(other), &other.service.name)
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
