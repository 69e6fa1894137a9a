//! What both modes need to know of a service's port: which endpoints, by which policy.

use std::net::IpAddr;

use ipnet::IpNet;
use model::{Endpoint, Service, ServicePort, Snapshot, TrafficPolicy};

use super::Family;

/// A service's port in one family, with the endpoints sorted as kube-proxy does
/// (`CategorizeEndpoints`).
pub struct Port<'a> {
    /// The service.
    pub service: &'a Service,
    /// Its port.
    pub spec: &'a ServicePort,
    /// Its cluster IP of the family.
    pub cluster_ip: IpAddr,
    /// Used with traffic policy Cluster; empty if nothing uses that.
    pub cluster: Vec<&'a Endpoint>,
    /// Used with traffic policy Local; empty if nothing uses that.
    pub local: Vec<&'a Endpoint>,
    /// Whether anybody serves at all, on whatever node.
    pub served: bool,
    /// The family.
    pub family: Family,
}

/// What becomes of traffic that has nowhere to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Nobody serves: REJECT.
    NoEndpoints,
    /// Nobody serves here, and the policy is Local: DROP.
    NoLocalEndpoints,
}

impl Refusal {
    /// kube-proxy's words for it.
    pub const fn comment(self) -> &'static str {
        match self {
            Self::NoEndpoints => "has no endpoints",
            Self::NoLocalEndpoints => "has no local endpoints",
        }
    }
}

/// Every port of every service that has a cluster IP of `family`, in the order of names.
pub fn ports(snapshot: &Snapshot, family: Family) -> impl Iterator<Item = Port<'_>> {
    snapshot.services.values().flat_map(move |service| {
        let cluster_ip = service
            .cluster_ips
            .iter()
            .copied()
            .find(|ip| family.has(*ip));
        service
            .ports
            .iter()
            .filter_map(move |port| Some(Port::new(service, port, cluster_ip?, family)))
    })
}

impl<'a> Port<'a> {
    fn new(
        service: &'a Service,
        port: &'a ServicePort,
        cluster_ip: IpAddr,
        family: Family,
    ) -> Self {
        let v4 = family == Family::V4;
        let served = port.usable(v4, TrafficPolicy::Cluster).next().is_some();
        let (cluster, local) = (vec![], vec![]);
        let mut this = Self {
            service,
            spec: port,
            cluster_ip,
            cluster,
            local,
            served,
            family,
        };
        let external = this.externally_accessible();
        // Local traffic to an eTP Local service is short-circuited to all endpoints.
        if !this.internal_local() || external {
            this.cluster = port.usable(v4, TrafficPolicy::Cluster).collect();
        }
        if this.internal_local() || this.external_local() && external {
            this.local = port.usable(v4, TrafficPolicy::Local).collect();
        }
        this
    }

    /// `internalTrafficPolicy: Local`.
    pub fn internal_local(&self) -> bool {
        self.service.internal_policy == TrafficPolicy::Local
    }

    /// `externalTrafficPolicy: Local`.
    pub fn external_local(&self) -> bool {
        self.service.external_policy == TrafficPolicy::Local
    }

    /// Whether it has any address but the cluster IP.
    pub fn externally_accessible(&self) -> bool {
        self.spec.node_port.is_some()
            || self.external_ips().next().is_some()
            || self.load_balancer_ips().next().is_some()
    }

    /// External IPs of the family.
    pub fn external_ips(&self) -> impl Iterator<Item = IpAddr> + use<'a> {
        let family = self.family;
        self.service
            .external_ips
            .iter()
            .copied()
            .filter(move |ip| family.has(*ip))
    }

    /// Load-balancer addresses of the family.
    pub fn load_balancer_ips(&self) -> impl Iterator<Item = IpAddr> + use<'a> {
        let family = self.family;
        self.service
            .load_balancer_ips
            .iter()
            .copied()
            .filter(move |ip| family.has(*ip))
    }

    /// Source ranges of the family.
    pub fn source_ranges(&self) -> impl Iterator<Item = &'a IpNet> + use<'a> {
        let family = self.family;
        self.service
            .source_ranges
            .iter()
            .filter(move |net| family.has_net(net))
    }

    /// Whether its load-balancer addresses are only for some.
    pub fn firewalled(&self) -> bool {
        self.load_balancer_ips().next().is_some() && self.source_ranges().next().is_some()
    }

    /// Endpoints that any policy uses, each once.
    pub fn endpoints(&self) -> Vec<&'a Endpoint> {
        let mut all = self.cluster.clone();
        all.extend(
            self.local
                .iter()
                .copied()
                .filter(|e| !self.cluster.contains(e)),
        );
        all
    }

    /// Why traffic to the cluster IP is refused, if it is.
    pub fn internal_refusal(&self) -> Option<Refusal> {
        self.refusal(self.internal_local())
    }

    /// Why traffic from outside is refused, if it is.
    pub fn external_refusal(&self) -> Option<Refusal> {
        self.refusal(self.external_local())
    }

    fn refusal(&self, local: bool) -> Option<Refusal> {
        if !self.served {
            Some(Refusal::NoEndpoints)
        } else if local && self.local.is_empty() {
            Some(Refusal::NoLocalEndpoints)
        } else {
            None
        }
    }

    /// `namespace/name:port`, as kube-proxy's comments and hashes have it.
    pub fn name(&self) -> String {
        match &*self.spec.name {
            "" => self.service.name.to_string(),
            port => format!("{}:{port}", self.service.name),
        }
    }
}
