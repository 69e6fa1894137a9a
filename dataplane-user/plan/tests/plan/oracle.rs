//! A naive implementation of Kubernetes' rules, which computes everything from scratch.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dataplane_common::{
    Addr, Port, decide,
    tables::{Block, Endpoint, FrontendKey, Kind},
};
use model::{Protocol, Service, ServiceName, ServiceType, Snapshot, TrafficPolicy};

use super::sim::Resolved;

/// A service, one of its ports, and the policy that selects its endpoints.
pub type Owner = (ServiceName, Option<(u16, Protocol)>, TrafficPolicy);

/// The wanted answer of a key, and the owner of the key.
#[derive(Clone, Debug)]
pub struct Expected {
    pub resolved: Resolved,
    /// `None` for a node's address.
    pub owner: Option<Owner>,
}

pub fn protocol(protocol: Protocol) -> dataplane_common::Protocol {
    match protocol {
        Protocol::Tcp => dataplane_common::Protocol::TCP,
        Protocol::Udp => dataplane_common::Protocol::UDP,
    }
}

fn usable(endpoints: &[model::Endpoint], v4: bool, only_local: bool) -> Vec<Endpoint> {
    let eligible: Vec<_> = endpoints
        .iter()
        .filter(|e| e.addr.is_ipv4() == v4)
        .filter(|e| e.local || !only_local)
        .collect();
    let mut chosen: Vec<_> = eligible.iter().filter(|e| e.ready).collect();
    if !only_local {
        let for_node: Vec<_> = chosen.iter().filter(|e| e.hints.for_this_node()).collect();
        let for_zone: Vec<_> = chosen.iter().filter(|e| e.hints.for_this_zone()).collect();
        if chosen.iter().all(|e| e.hints.for_nodes()) && !for_node.is_empty() {
            chosen = for_node.into_iter().copied().collect();
        } else if chosen.iter().all(|e| e.hints.for_zones()) && !for_zone.is_empty() {
            chosen = for_zone.into_iter().copied().collect();
        }
    }
    if chosen.is_empty() {
        chosen = eligible
            .iter()
            .filter(|e| e.serving && e.terminating)
            .collect();
    }
    let mut chosen: Vec<_> = chosen
        .iter()
        .map(|e| Endpoint::new(e.addr.into(), Port::new(e.port)))
        .collect();
    chosen.sort_by(decide::order);
    chosen.dedup();
    chosen
}

/// An address in the network that contains all addresses; no other network of the tests contains it.
fn any_address(v4: bool) -> Addr {
    if v4 {
        Addr::from_v4([0; 4])
    } else {
        Addr::UNSPECIFIED
    }
}

/// Returns the answer of a key of `kind` of a service's port.
pub fn answer(
    service: &Service,
    port: (u16, Protocol),
    v4: bool,
    kind: Kind,
    policy: TrafficPolicy,
) -> Option<Resolved> {
    let port = service
        .ports
        .iter()
        .find(|p| (p.port, p.protocol) == port)?;
    let all = usable(&port.endpoints, v4, false);
    let endpoints = match policy {
        TrafficPolicy::Cluster => all.clone(),
        TrafficPolicy::Local => usable(&port.endpoints, v4, true),
    };
    let flags = if endpoints.is_empty() && !all.is_empty() {
        Block::NO_LOCAL
    } else {
        0
    };
    let affinity_seconds = service
        .affinity
        .map_or(0, |t| t.as_secs().try_into().unwrap());
    let from_outside = [Kind::NODE_PORT, Kind::EXTERNAL_IP, Kind::LOAD_BALANCER].contains(&kind);
    let external = (from_outside && service.external_policy == TrafficPolicy::Local).then(|| {
        let here = usable(&port.endpoints, v4, true);
        let none_here = here.is_empty() && !all.is_empty();
        (if none_here { Block::NO_LOCAL } else { 0 }, here)
    });
    let of_family = service
        .source_ranges
        .iter()
        .filter(|range| range.addr().is_ipv4() == v4);
    let ranges: BTreeSet<_> = of_family
        .map(|range| {
            let more = if v4 { 96 } else { 0 };
            (more + u32::from(range.prefix_len()), range.network().into())
        })
        .collect();
    let everybody = ranges.is_empty() || ranges.iter().any(|(_, addr)| *addr == any_address(v4));
    let ranges = (kind == Kind::LOAD_BALANCER && !everybody).then_some(ranges);
    Some(Resolved {
        kind,
        flags,
        affinity_seconds,
        endpoints,
        external,
        ranges,
    })
}

/// Returns whether no earlier service claims `key` by a stronger field.
fn wins(service: &Service, key: FrontendKey, strengths: &mut BTreeMap<FrontendKey, usize>) -> bool {
    let is = |ips: &[IpAddr]| ips.iter().any(|ip| Addr::from(*ip) == key.addr);
    let of_pod = service.kind == ServiceType::HostPort;
    let of_entry = service.kind == ServiceType::Entry;
    let is_node_port =
        key.addr == FrontendKey::node_port(key.addr.is_v4(), key.port, key.protocol).addr;
    let of_service = !of_pod && !of_entry;
    let claims = [
        of_service && is(&service.cluster_ips),
        of_service && is_node_port,
        of_service && is(&service.load_balancer_ips),
        of_entry && is(&service.cluster_ips),
        of_service && is(&service.external_ips),
        of_pod,
        of_entry,
    ];
    let strength = claims.iter().position(|claim| *claim).expect("a claim");
    let wins = strengths.get(&key).is_none_or(|known| strength <= *known);
    if wins {
        strengths.insert(key, strength);
    }
    wins
}

/// Returns all entries that the tables should hold for `snapshot`.
pub fn expected(snapshot: &Snapshot) -> BTreeMap<FrontendKey, Expected> {
    let claims = claims(snapshot).into_iter();
    let expected = claims.map(|(key, claim)| {
        let (owner, resolved) = match claim {
            Claim::Node => (None, address(Kind::NODE_ADDRESS, 0)),
            Claim::Address(service) => {
                let owner = (service.name.clone(), None, TrafficPolicy::Cluster);
                let resolved = address(Kind::CLUSTER_ADDRESS, Block::NO_SUCH_PORT);
                (Some(owner), resolved)
            }
            Claim::Port(service, id, kind, policy) => {
                let resolved = answer(service, id, key.addr.is_v4(), kind, policy);
                let owner = (service.name.clone(), Some(id), policy);
                (Some(owner), resolved.expect("its own port"))
            }
        };
        (key, Expected { resolved, owner })
    });
    expected.collect()
}

/// Returns the answer of an address without a port.
fn address(kind: Kind, flags: u16) -> Resolved {
    Resolved {
        kind,
        flags,
        affinity_seconds: 0,
        endpoints: vec![],
        external: None,
        ranges: None,
    }
}

/// The owner of a key.
#[derive(Clone, Copy, Debug)]
pub enum Claim<'a> {
    Node,
    /// All ports without a key of their own.
    Address(&'a Service),
    Port(&'a Service, (u16, Protocol), Kind, TrafficPolicy),
}

impl Claim<'_> {
    /// Returns the service. `None` for a node's address.
    pub fn service(&self) -> Option<&ServiceName> {
        match self {
            Self::Node => None,
            Self::Address(service) | Self::Port(service, ..) => Some(&service.name),
        }
    }
}

/// Returns every key that the tables should hold for `snapshot`.
pub fn claims(snapshot: &Snapshot) -> BTreeMap<FrontendKey, Claim<'_>> {
    let mut keys = BTreeMap::new();
    for addr in &snapshot.node.addresses {
        keys.insert(FrontendKey::address((*addr).into()), Claim::Node);
    }
    let mut strengths = BTreeMap::new();
    // The last writer of a key wins. So the weakest claim comes first, and never overwrites a stronger kind of claim.
    let mut services: Vec<_> = snapshot.services.values().collect();
    services.sort_by_key(|s| (s.created.is_none(), s.created, s.name.clone()));
    for service in services.into_iter().rev() {
        let no_cluster_ip = service.cluster_ips.is_empty();
        if service.kind == ServiceType::ExternalName
            || (service.kind == ServiceType::ClusterIp && no_cluster_ip)
        {
            continue;
        }
        for port in service.ports.iter().rev() {
            let proto = protocol(port.protocol);
            let id = (port.port, port.protocol);
            let mut claim = |key: FrontendKey, kind, policy| {
                if wins(service, key, &mut strengths) {
                    keys.insert(key, Claim::Port(service, id, kind, policy));
                }
            };
            let mut family = |v4: bool| {
                let of_family = |ips: &[IpAddr]| -> Vec<FrontendKey> {
                    let ips = ips.iter().filter(|ip| ip.is_ipv4() == v4);
                    ips.map(|ip| FrontendKey::new((*ip).into(), Port::new(port.port), proto))
                        .collect()
                };
                let any = TrafficPolicy::Cluster;
                let has_family = if no_cluster_ip {
                    port.endpoints.iter().any(|e| e.addr.is_ipv4() == v4)
                } else {
                    service.cluster_ips.iter().any(|ip| ip.is_ipv4() == v4)
                };
                if let Some(node_port) = port.node_port.filter(|_| has_family) {
                    let key = FrontendKey::node_port(v4, Port::new(node_port), proto);
                    claim(key, Kind::NODE_PORT, any);
                }
                for key in of_family(&service.load_balancer_ips) {
                    claim(key, Kind::LOAD_BALANCER, any);
                }
                for key in of_family(&service.external_ips) {
                    claim(key, Kind::EXTERNAL_IP, any);
                }
                for key in of_family(&service.cluster_ips) {
                    claim(key, Kind::CLUSTER_IP, service.internal_policy);
                }
            };
            family(true);
            family(false);
        }
        for ip in &service.cluster_ips {
            let key = FrontendKey::address(Addr::from(*ip));
            wins(service, key, &mut strengths);
            keys.insert(key, Claim::Address(service));
        }
    }
    keys
}
