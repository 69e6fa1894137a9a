//! What decides between services that claim the same address and port.

use super::{Service, ServiceType};

/// Kinds of claims to an address and port, the strongest first. A stronger claim wins, whatever the age of the services: an
/// author cannot take an address that the cluster assigned to another service. Of equal claims, the older service's wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claim {
    /// `spec.clusterIPs`.
    ClusterIp,
    /// `nodePort`.
    NodePort,
    /// `status.loadBalancer.ingress`.
    LoadBalancer,
    /// An address that this node assigned to a host of a ServiceEntry.
    GivenToEntry,
    /// `spec.externalIPs`.
    ExternalIp,
    /// A pod's `hostPort`.
    HostPort,
    /// `spec.addresses` of a ServiceEntry, and those of its `status`.
    NamedByEntry,
}

impl Service {
    /// Returns the claim of this service to an address that a Service would claim by `of`.
    #[must_use]
    pub fn claim(&self, of: Claim) -> Claim {
        match self.kind {
            ServiceType::HostPort => Claim::HostPort,
            ServiceType::Entry if of == Claim::ExternalIp => Claim::NamedByEntry,
            ServiceType::Entry => Claim::GivenToEntry,
            _ => of,
        }
    }
}
