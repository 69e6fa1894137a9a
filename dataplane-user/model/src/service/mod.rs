//! Services and their endpoints, in Kubernetes' terms.

mod claim;
mod split;

use std::{net::IpAddr, sync::Arc, time::Duration};

use ipnet::IpNet;
use smallvec::SmallVec;

pub use self::{
    claim::Claim,
    split::{Part, Shares, Split},
};
use super::{
    Hints, Identity, Named, NamedProtocol, Protocol, Reach, Records, ServiceName, Weights,
};

/// `spec.type`, or where else it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceType {
    /// Cluster IPs only; none of them if headless.
    ClusterIp,
    /// Also a port on every node.
    NodePort,
    /// No Service, but the host ports of a pod on this node. Its external IPs are the node's own addresses, of which
    /// loopback is for sockets of the node's own network namespace.
    HostPort,
    /// Also addresses of a load balancer.
    LoadBalancer,
    /// A name in DNS: no VIP.
    ExternalName,
    /// No Service, but a ServiceEntry. Its cluster IPs are those that this node gave to its hosts, its external IPs those
    /// that it names.
    Entry,
}

/// `spec.internalTrafficPolicy` and `spec.externalTrafficPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TrafficPolicy {
    /// Any endpoint.
    #[default]
    Cluster,
    /// Only endpoints on this node.
    Local,
}

/// A port of an address.
pub type VipPort = (IpAddr, Protocol, u16);

/// A service with its endpoints.
///
/// The source leaves out SCTP ports, headless services' cluster IPs (`None`) and load-balancer addresses with
/// `ipMode: Proxy`. A service that is left to another proxy has no VIPs and no ports: only `records`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: ServiceName,
    /// `spec.type`.
    pub kind: ServiceType,
    /// `metadata.creationTimestamp` in seconds since the epoch: of two services that claim one
    /// VIP by the same kind of field, the older wins. Without a timestamp: treated as the youngest.
    pub created: Option<i64>,
    /// `spec.clusterIPs`; empty for headless services and `ExternalName`.
    pub cluster_ips: SmallVec<[IpAddr; 1]>,
    /// `spec.externalIPs`.
    pub external_ips: SmallVec<[IpAddr; 0]>,
    /// `status.loadBalancer.ingress[].ip` whose `ipMode` is `VIP` or absent.
    pub load_balancer_ips: SmallVec<[IpAddr; 0]>,
    /// `spec.loadBalancerSourceRanges`: who may use the load balancer's addresses; empty: all.
    pub source_ranges: SmallVec<[IpNet; 0]>,
    /// Session affinity `ClientIP` and its timeout.
    pub affinity: Option<Duration>,
    /// For the cluster IPs.
    pub internal_policy: TrafficPolicy,
    /// For clients outside the cluster.
    pub external_policy: TrafficPolicy,
    /// `spec.healthCheckNodePort`.
    pub health_check_node_port: Option<u16>,
    /// Ports at its cluster IPs and external IPs that are this node's own, and so are not served here.
    pub aside: Vec<VipPort>,
    /// Identities that its endpoints may have, besides those of their workloads: of a ServiceEntry.
    pub identities: Box<[Identity]>,
    /// Its ports.
    pub ports: SmallVec<[ServicePort; 1]>,
    /// Where its name leads.
    pub records: Records,
}

/// A port of a service, with the endpoints of both families that serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// `name`; empty if the only port has none.
    pub name: Box<str>,
    /// `port`, on the VIPs.
    pub port: u16,
    /// `protocol`.
    pub protocol: Protocol,
    /// `nodePort`, on the nodes' addresses.
    pub node_port: Option<u16>,
    /// Sorted by address and port, without duplicates.
    pub endpoints: Vec<Endpoint>,
    /// The part of the connections that each endpoint gets; `None`: all parts are equal.
    pub weights: Option<Box<Weights>>,
    /// How a route splits the connections; `endpoints` are then those of all of its backends.
    pub split: Option<Arc<Split>>,
}

/// An endpoint of a service's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "Kubernetes' conditions are independent"
)]
pub struct Endpoint {
    /// Its address.
    pub addr: IpAddr,
    /// Its port: what `targetPort` came to.
    pub port: u16,
    /// Whether it is on this node.
    pub local: bool,
    /// `conditions.ready`; unknown counts as ready.
    pub ready: bool,
    /// `conditions.serving`; unknown counts as `ready` does.
    pub serving: bool,
    /// `conditions.terminating`; unknown counts as not.
    pub terminating: bool,
    /// Whom it is meant for, as seen from this node.
    pub hints: Hints,
}

impl Service {
    /// The endpoints that are the Service's own, each with the port's protocol: not those of a route's backends, and none
    /// of a ServiceEntry, whose endpoints are reached by its addresses only.
    pub fn own_endpoints(&self) -> impl Iterator<Item = (Protocol, &Endpoint)> {
        self.own_ports().flat_map(|port| {
            let endpoints = port.endpoints.iter();
            endpoints.map(|endpoint| (port.protocol, endpoint))
        })
    }

    /// The ports with [`Service::own_endpoints`].
    pub fn own_ports(&self) -> impl Iterator<Item = &ServicePort> {
        let ports = self.ports.iter().enumerate();
        let ports = ports.filter(|_| self.kind != ServiceType::Entry);
        ports.filter_map(|(index, port)| match &port.split {
            None => Some(port),
            Some(split) => split.own.ports.get(index),
        })
    }
}

impl Service {
    /// The cluster IPs to which its name leads.
    pub fn named_ips(&self) -> &[IpAddr] {
        match &self.records {
            Records::Object(named) => &named.cluster_ips,
            Records::ClusterIps => &self.cluster_ips,
            Records::Alias(_) => &[],
        }
    }

    /// The same service as DNS has it, if another proxy serves it: without VIPs and ports.
    #[must_use]
    pub fn only_named(self) -> Self {
        let records = match self.records {
            Records::Object(named) => Records::Object(Box::new(Named {
                elsewhere: true,
                ..*named
            })),
            records => records,
        };
        Self {
            created: self.created,
            aside: self.aside,
            records,
            ..Self::new(self.name, self.kind)
        }
    }

    /// Its own ports that have names in DNS, or have none: name, protocol, number.
    pub fn named_ports(&self) -> impl Iterator<Item = (&str, NamedProtocol, u16)> {
        let (named, served) = match &self.records {
            Records::Object(named) => (&*named.ports, &[][..]),
            Records::ClusterIps => (&[][..], &*self.ports),
            Records::Alias(_) => (&[][..], &[][..]),
        };
        let named = named.iter();
        let named = named.map(|port| (&*port.name, port.protocol, port.number));
        let served = served.iter();
        named.chain(served.map(|port| (&*port.name, port.protocol.into(), port.port)))
    }

    /// Makes a service without addresses and ports.
    pub fn new(name: ServiceName, kind: ServiceType) -> Self {
        Self {
            name,
            kind,
            created: None,
            cluster_ips: SmallVec::new(),
            external_ips: SmallVec::new(),
            load_balancer_ips: SmallVec::new(),
            source_ranges: SmallVec::new(),
            affinity: None,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            health_check_node_port: None,
            aside: Vec::new(),
            identities: Box::default(),
            ports: SmallVec::new(),
            records: Records::ClusterIps,
        }
    }
}

impl Endpoint {
    /// Makes a ready endpoint on another node, without hints.
    pub fn new(addr: IpAddr, port: u16) -> Self {
        Self {
            addr,
            port,
            local: false,
            ready: true,
            serving: true,
            terminating: false,
            hints: Hints::default(),
        }
    }
}

impl ServicePort {
    /// Makes a port without a name, a node port and endpoints.
    pub fn new(port: u16, protocol: Protocol) -> Self {
        Self {
            name: "".into(),
            port,
            protocol,
            node_port: None,
            endpoints: Vec::new(),
            weights: None,
            split: None,
        }
    }

    /// The endpoints of one family that may be used, as Kubernetes specifies: those that are
    /// ready, and of these the ones that are hinted to this node or its zone if hints are complete
    /// (KEP-2433, KEP-3015); if none is ready, those that are serving while they terminate
    /// (KEP-1669), wherever they are. With `policy` Local, decided among those on this node alone,
    /// without a look at hints.
    pub fn usable(&self, v4: bool, policy: TrafficPolicy) -> impl Iterator<Item = &Endpoint> {
        self.weighted(v4, policy).map(|(endpoint, _)| endpoint)
    }

    /// Returns the endpoints of [`Self::usable`] with their weights.
    pub fn weighted(
        &self,
        v4: bool,
        policy: TrafficPolicy,
    ) -> impl Iterator<Item = (&Endpoint, u32)> {
        let eligible = move |e: &Endpoint| {
            e.addr.is_ipv4() == v4 && (policy == TrafficPolicy::Cluster || e.local)
        };
        let ready = self.endpoints.iter().any(|e| eligible(e) && e.ready);
        let reach = match policy {
            TrafficPolicy::Cluster => self.reach(v4),
            TrafficPolicy::Local => Reach::Cluster,
        };
        let all = self.endpoints.iter().enumerate();
        let usable = all.filter(move |(_, e)| {
            eligible(e)
                && if ready {
                    e.ready && reach.includes(e.hints)
                } else {
                    e.serving && e.terminating
                }
        });
        usable.map(|(index, e)| (e, self.weight(index)))
    }

    /// The endpoints of one family among which connections are drawn, with their weights, and the weight of those that
    /// are refused.
    pub fn shares(&self, v4: bool, policy: TrafficPolicy) -> Shares<'_> {
        match &self.split {
            Some(split) => split.shares(v4, policy),
            None => Shares {
                endpoints: self.weighted(v4, policy).collect(),
                refused: 0,
            },
        }
    }

    /// The weight of the endpoint at an index.
    pub fn weight(&self, index: usize) -> u32 {
        let weights = self.weights.as_ref();
        weights.map_or(1, |weights| weights.get(index))
    }

    /// How far this node looks for endpoints of one family, by the hints of those that are ready.
    pub fn reach(&self, v4: bool) -> Reach {
        let ready = |e: &&Endpoint| e.addr.is_ipv4() == v4 && e.ready;
        Reach::of(self.endpoints.iter().filter(ready).map(|e| e.hints))
    }
}
