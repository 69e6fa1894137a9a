//! A service's port and its endpoints for each traffic policy, for both modes.

use std::net::IpAddr;

use ipnet::IpNet;
use model::{Endpoint, Service, ServicePort, Snapshot, TrafficPolicy};

use super::Family;

/// A service's port in one family. The endpoints are selected and sorted as in kube-proxy
/// (`CategorizeEndpoints`).
pub struct Port<'a> {
    /// The service.
    pub service: &'a Service,
    /// Its port.
    pub spec: &'a ServicePort,
    /// The service's cluster IP of the family.
    pub cluster_ip: IpAddr,
    /// Endpoints for traffic policy Cluster. Empty if no address uses this policy.
    pub cluster: Vec<&'a Endpoint>,
    /// Endpoints for traffic policy Local. Empty if no address uses this policy.
    pub local: Vec<&'a Endpoint>,
    /// Whether any node has an endpoint that serves.
    pub served: bool,
    /// The family.
    pub family: Family,
}

/// How traffic to a port without usable endpoints is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No node has an endpoint that serves: REJECT.
    NoEndpoints,
    /// The policy is Local, and no endpoint on this node serves: DROP.
    NoLocalEndpoints,
}

impl Refusal {
    /// kube-proxy's comment on the rule.
    pub const fn comment(self) -> &'static str {
        match self {
            Self::NoEndpoints => "has no endpoints",
            Self::NoLocalEndpoints => "has no local endpoints",
        }
    }
}

/// Returns every port of every service that has a cluster IP of `family`, in the order of names.
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
        // With `externalTrafficPolicy: Local`, traffic from this node still reaches all endpoints.
        if !this.internal_local() || external {
            this.cluster = port.usable(v4, TrafficPolicy::Cluster).collect();
        }
        if this.internal_local() || this.external_local() && external {
            this.local = port.usable(v4, TrafficPolicy::Local).collect();
        }
        this
    }

    /// Returns whether the service has `internalTrafficPolicy: Local`.
    pub fn internal_local(&self) -> bool {
        self.service.internal_policy == TrafficPolicy::Local
    }

    /// Returns whether the service has `externalTrafficPolicy: Local`.
    pub fn external_local(&self) -> bool {
        self.service.external_policy == TrafficPolicy::Local
    }

    /// Returns whether clients can reach the port by an address other than the cluster IP.
    pub fn externally_accessible(&self) -> bool {
        self.spec.node_port.is_some()
            || self.external_ips().next().is_some()
            || self.load_balancer_ips().next().is_some()
    }

    /// Returns the service's external IPs of the family.
    pub fn external_ips(&self) -> impl Iterator<Item = IpAddr> + use<'a> {
        let family = self.family;
        self.service
            .external_ips
            .iter()
            .copied()
            .filter(move |ip| family.has(*ip))
    }

    /// Returns the service's load-balancer addresses of the family.
    pub fn load_balancer_ips(&self) -> impl Iterator<Item = IpAddr> + use<'a> {
        let family = self.family;
        self.service
            .load_balancer_ips
            .iter()
            .copied()
            .filter(move |ip| family.has(*ip))
    }

    /// Returns the service's source ranges of the family.
    pub fn source_ranges(&self) -> impl Iterator<Item = &'a IpNet> + use<'a> {
        let family = self.family;
        self.service
            .source_ranges
            .iter()
            .filter(move |net| family.has_net(net))
    }

    /// Returns whether source ranges limit the clients of the load-balancer addresses.
    pub fn firewalled(&self) -> bool {
        self.load_balancer_ips().next().is_some() && self.source_ranges().next().is_some()
    }

    /// Returns the endpoints of both policies, each once.
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

    /// Returns how traffic to the cluster IP is refused. `None` if it is served.
    pub fn internal_refusal(&self) -> Option<Refusal> {
        self.refusal(self.internal_local())
    }

    /// Returns how traffic from outside is refused. `None` if it is served.
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

    /// Returns `namespace/name:port`, as in kube-proxy's comments and hashes.
    pub fn name(&self) -> String {
        match &*self.spec.name {
            "" => self.service.name.to_string(),
            port => format!("{}:{port}", self.service.name),
        }
    }
}
