//! The keys that a service wants, and the endpoints behind them. This file alone holds the semantics of services; they
//! are kube-proxy's.
//!
//! A client at the socket is on this node by definition, so `externalTrafficPolicy: Local` does not limit its choice:
//! kube-proxy gives it every endpoint, too. For the packet path, the pool names the pool for clients from outside. The
//! socket programs do not know source addresses, so the packet path handles all rules about source addresses.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use dataplane_common::{
    Addr, Port, Protocol, decide,
    packet::SourceKey,
    tables::{Block, Endpoint, FrontendKey, Kind},
};
use ipnet::IpNet;
use model::{
    Claim, Service, ServicePort, ServiceType, Shares, TrafficPolicy, Weights, most_places,
};

use super::{blocks::slots, shares::Entries};

/// A key that a service wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WantedKey {
    pub(super) key: FrontendKey,
    pub(super) kind: Kind,
    /// Index of the service's port; [`WantedKey::ADDRESS`] for a cluster address.
    pub(super) port: u16,
    /// The policy that selects the endpoints of the port.
    pub(super) policy: TrafficPolicy,
    /// The strongest of the service's claims to the key.
    pub(super) claim: Claim,
}

impl WantedKey {
    /// Stands for a port's index if the key is an address without a port.
    pub(super) const ADDRESS: u16 = u16::MAX;
}

/// Returns the number of a protocol in keys.
pub(super) const fn protocol(protocol: model::Protocol) -> Protocol {
    match protocol {
        model::Protocol::Tcp => Protocol::TCP,
        model::Protocol::Udp => Protocol::UDP,
    }
}

/// Formats a key for people: `10.96.0.10:53/udp`, `[fd00::a]:53/udp`, `10.96.0.10` (an address without a port),
/// `*:30080/tcp` and `[*]:30080/tcp` (a node port of IPv4 and IPv6).
pub fn key_text(key: &FrontendKey) -> String {
    let FrontendKey {
        addr,
        port,
        protocol,
        ..
    } = key;
    let (port, protocol): (_, &Protocol) = (port.host(), protocol);
    match addr.ip() {
        ip if key.is_address() => ip.to_string(),
        IpAddr::V4(ip) if ip.is_unspecified() => format!("*:{port}/{protocol}"),
        IpAddr::V6(ip) if ip.is_unspecified() => format!("[*]:{port}/{protocol}"),
        ip => format!("{}/{protocol}", SocketAddr::new(ip, port)),
    }
}

/// Returns whether `ip` can be a VIP. `0.0.0.0` and `::` cannot, because they are the keys of node ports. Loopback
/// cannot, because every pod has its own.
pub(super) fn can_be_vip(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast())
}

/// Returns whether `service` may have this external IP. A pod's host ports may have the node's own loopback addresses,
/// too.
pub(super) fn can_be_external_ip(service: &Service, ip: IpAddr) -> bool {
    let of_node = service.kind == ServiceType::HostPort && ip.to_canonical().is_loopback();
    of_node || can_be_vip(ip)
}

/// Returns the networks of one family that may use the load balancer's addresses. Empty if all may. Ranges of the other
/// family do not limit this family.
pub(super) fn source_ranges(service: &Service, v4: bool) -> impl Iterator<Item = &IpNet> {
    let of_family = move |range: &&IpNet| range.addr().is_ipv4() == v4;
    let ranges = service.source_ranges.iter().filter(of_family);
    let everybody = ranges.clone().any(|range| range.prefix_len() == 0);
    ranges.filter(move |_| !everybody)
}

/// Returns a network as a key of `SOURCES`.
pub fn source_key(set: u32, network: &IpNet) -> SourceKey {
    let network = network.trunc();
    let of_v6 = 128 - u32::from(network.max_prefix_len());
    let length = of_v6 + u32::from(network.prefix_len());
    SourceKey::network(set, network.network().into(), length)
}

/// Collects the keys that `service` wants: grouped by port, in the order of its ports, then its addresses. No key
/// occurs twice: of several kinds of address that are equal, the first of cluster IP, external IP and load balancer
/// counts.
pub(super) fn keys(service: &Service, keys: &mut Vec<WantedKey>) {
    keys.clear();
    // A headless service has no VIP of any kind. A service of type ExternalName has none either.
    let headless = service.kind == ServiceType::ClusterIp && service.cluster_ips.is_empty();
    if headless || service.kind == ServiceType::ExternalName {
        return;
    }
    let vips = |ips: &[IpAddr]| {
        ips.iter()
            .copied()
            .filter(|ip| can_be_vip(*ip))
            .map(Addr::from)
            .collect::<Vec<_>>()
    };
    let cluster_ips = vips(&service.cluster_ips);
    let external_ips: Vec<_> = service
        .external_ips
        .iter()
        .filter(|ip| can_be_external_ip(service, **ip))
        .map(|ip| Addr::from(*ip))
        .collect();
    let load_balancer_ips = vips(&service.load_balancer_ips);
    // An address of both kinds is claimed as the load balancer's.
    let of_both: BTreeSet<Addr> = match &external_ips[..] {
        [] => BTreeSet::new(),
        _ => load_balancer_ips.iter().copied().collect(),
    };
    let claim = |addr: &Addr, kind| {
        service.claim(match kind {
            Kind::CLUSTER_IP | Kind::CLUSTER_ADDRESS => Claim::ClusterIp,
            Kind::NODE_PORT => Claim::NodePort,
            Kind::EXTERNAL_IP if !of_both.contains(addr) => Claim::ExternalIp,
            _ => Claim::LoadBalancer,
        })
    };

    let every = TrafficPolicy::Cluster;
    for (index, port) in (0..WantedKey::ADDRESS).zip(&service.ports) {
        if port.port == 0 {
            continue;
        }
        let proto = protocol(port.protocol);
        let mut add = |addrs: &[Addr], kind, policy| {
            let key = |addr: &Addr| FrontendKey::new(*addr, Port::new(port.port), proto);
            let aside = |addr: &&Addr| {
                let port = (addr.ip(), port.protocol, port.port);
                kind == Kind::LOAD_BALANCER || !service.aside.contains(&port)
            };
            keys.extend(addrs.iter().filter(aside).map(|a| WantedKey {
                key: key(a),
                kind,
                port: index,
                policy,
                claim: claim(a, kind),
            }));
        };
        add(&cluster_ips, Kind::CLUSTER_IP, service.internal_policy);
        add(&external_ips, Kind::EXTERNAL_IP, every);
        add(&load_balancer_ips, Kind::LOAD_BALANCER, every);
        for v4 in [true, false] {
            let in_family = if cluster_ips.is_empty() {
                port.endpoints.iter().any(|e| e.addr.is_ipv4() == v4)
            } else {
                cluster_ips.iter().any(|addr| addr.is_v4() == v4)
            };
            if let Some(node_port) = port.node_port.filter(|port| *port != 0 && in_family) {
                let key = FrontendKey::node_port(v4, Port::new(node_port), proto);
                keys.push(WantedKey {
                    key,
                    kind: Kind::NODE_PORT,
                    port: index,
                    policy: every,
                    claim: claim(&key.addr, Kind::NODE_PORT),
                });
            }
        }
    }
    // An address at which a process of this node listens gets no key without a port, so its other ports are not
    // refused.
    let is_of_node = |addr: &&Addr| service.aside.iter().any(|(ip, ..)| *ip == addr.ip());
    let addresses = cluster_ips.iter().filter(|addr| !is_of_node(addr));
    keys.extend(addresses.map(|addr| WantedKey {
        key: FrontendKey::address(*addr),
        kind: Kind::CLUSTER_ADDRESS,
        port: WantedKey::ADDRESS,
        policy: every,
        claim: claim(addr, Kind::CLUSTER_ADDRESS),
    }));
    if keys.len() <= FEW
        || !is_each_once(service, [&cluster_ips, &external_ips, &load_balancer_ips])
    {
        without_duplicates(keys);
    }
}

/// Number of keys up to which each is compared with each. Nearly every service has fewer.
const FEW: usize = 16;

/// Returns whether a service names each of its `addresses`, ports and node ports once. Then no key occurs twice, and a
/// service with very many keys is spared a table of them.
fn is_each_once(service: &Service, addresses: [&[Addr]; 3]) -> bool {
    fn is_once<T: Ord>(all: impl Iterator<Item = T>) -> bool {
        let mut all: Vec<T> = all.collect();
        all.sort_unstable();
        all.is_sorted_by(|a, b| a < b)
    }
    let ports = || service.ports.iter();
    is_once(addresses.into_iter().flatten())
        && is_once(ports().map(|port| (port.port, port.protocol)))
        && is_once(ports().filter_map(|port| Some((port.node_port?, port.protocol))))
}

/// Returns the number of keys, pools, slots and source ranges that `service` needs if it owns all of `keys`, which are
/// all keys that it wants. This is an upper bound for any readiness and location of its endpoints, so it is the same on
/// every node and does not change with each pod's readiness.
pub(super) fn cost(service: &Service, keys: &[WantedKey]) -> Entries {
    let policies = [service.internal_policy, service.external_policy];
    let copies = 1 + u64::from(policies.contains(&TrafficPolicy::Local));
    let ranges = [true, false].map(|v4| source_ranges(service, v4).count() as u64);
    let [mut pools, mut taken, mut sources] = [0; 3];
    for keys in keys.chunk_by(|a, b| a.port == b.port) {
        let Some(port) = service.ports.get(usize::from(keys[0].port)) else {
            pools += 1;
            continue;
        };
        for (v4, ranges) in [true, false].into_iter().zip(ranges) {
            if keys.iter().all(|wanted| wanted.key.addr.is_v4() != v4) {
                continue;
            }
            pools += copies;
            sources += ranges;
            let endpoints = port.endpoints.iter().enumerate();
            let endpoints = endpoints.filter(|(_, e)| e.addr.is_ipv4() == v4);
            let endpoints = if let Some(split) = &port.split {
                split.most_places(v4)
            } else if port.weights.is_none() {
                endpoints.count()
            } else {
                let weights: Vec<_> = endpoints.map(|(index, _)| port.weight(index)).collect();
                most_places(&weights)
            };
            if endpoints > 0 {
                taken += copies * u64::from(slots(endpoints.min(Block::MAX_LEN)));
            }
        }
    }
    [keys.len() as u64, pools, taken, sources]
}

/// Returns the lengths of the blocks that `service` needs for `keys` if all of them are new.
pub(super) fn blocks(service: &Service, keys: &[WantedKey]) -> Vec<usize> {
    let policies = [service.internal_policy, service.external_policy];
    let has_local = policies.contains(&TrafficPolicy::Local);
    let (mut lens, mut found) = (Vec::new(), Vec::new());
    for keys in keys.chunk_by(|a, b| a.port == b.port) {
        let Some(port) = service.ports.get(usize::from(keys[0].port)) else {
            continue;
        };
        for v4 in [true, false] {
            if keys.iter().all(|wanted| wanted.key.addr.is_v4() != v4) {
                continue;
            }
            for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
                if policy == TrafficPolicy::Cluster || has_local {
                    endpoints(port, v4, policy, &mut found);
                    lens.extend((!found.is_empty()).then_some(found.len()));
                }
            }
        }
    }
    lens
}

fn without_duplicates(keys: &mut Vec<WantedKey>) {
    if keys.len() <= FEW {
        let mut kept = 0;
        for i in 0..keys.len() {
            let wanted = keys[i];
            if keys[..kept].iter().all(|before| before.key != wanted.key) {
                keys[kept] = wanted;
                kept += 1;
            }
        }
        keys.truncate(kept);
    } else {
        let mut seen = std::collections::HashSet::with_capacity(keys.len());
        keys.retain(|wanted| seen.insert(wanted.key));
    }
}

/// Collects the endpoints that may answer for `port` in one family, as a pool holds them: sorted, at most
/// [`Block::MAX_LEN`]. Each occurs once, or as often as its weight asks; so does [`Endpoint::NONE`], for connections
/// that are refused. Returns their number before truncation.
pub(super) fn endpoints(
    port: &ServicePort,
    v4: bool,
    policy: TrafficPolicy,
    endpoints: &mut Vec<Endpoint>,
) -> usize {
    endpoints.clear();
    let endpoint = |e: &model::Endpoint| Endpoint::new(Addr::from(e.addr), Port::new(e.port));
    if port.weights.is_some() || port.split.is_some() {
        let Shares {
            endpoints: found,
            refused,
        } = port.shares(v4, policy);
        if found.is_empty() {
            return 0;
        }
        let count = found.len();
        let mut weighted: Vec<_> = found
            .into_iter()
            .map(|(e, weight)| (endpoint(e), weight))
            .collect();
        weighted.extend((refused > 0).then_some((Endpoint::NONE, refused)));
        // An endpoint of several backends of a route gets the parts of all of them.
        weighted.sort_unstable_by(|(a, _), (b, _)| decide::order(a, b));
        weighted.dedup_by(|(b, more), (a, weight)| {
            let same = a == b;
            *weight = weight.saturating_add(if same { *more } else { 0 });
            same
        });
        endpoints.extend(Weights::repeated(&weighted));
        endpoints.truncate(Block::MAX_LEN);
        return count;
    }
    endpoints.extend(port.usable(v4, policy).map(endpoint));
    if !endpoints.is_sorted_by(|a, b| decide::order(a, b).is_lt()) {
        endpoints.sort_unstable_by(decide::order);
        endpoints.dedup();
    }
    let found = endpoints.len();
    endpoints.truncate(Block::MAX_LEN);
    found
}

/// Returns the timeout of session affinity in seconds; 0: no affinity.
pub(super) fn affinity_seconds(service: &Service) -> u32 {
    service
        .affinity
        .map_or(0, |timeout| timeout.as_secs().clamp(1, 86_400) as u32)
}

#[cfg(test)]
mod tests;
