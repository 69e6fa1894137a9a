//! The domain: what a node should serve, wherever the description came from.
//!
//! Pure values: this room imports none of its siblings, and neither tokio nor aya.

mod name;
mod service;
mod topology;
mod workload;

pub use name::{ServiceName, WorkloadName};
pub use service::{Endpoint, Protocol, Service, ServicePort, ServiceType, TrafficPolicy};
pub use topology::{Hints, Reach};
pub use workload::{
    Acceleration, CapturedBy, Egress, Identity, Layers, Mode, Place, Policy, Rules, WithoutProxy,
    Workload, is_reserved,
};

use std::{net::IpAddr, sync::Arc};

/// What is known of this node itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The name by which EndpointSlices say that an endpoint is here (`nodeName`).
    pub name: Arc<str>,
    /// Addresses on which node ports are answered, besides loopback; sorted, without duplicates.
    pub addresses: Vec<IpAddr>,
    /// Its zone (label `topology.kubernetes.io/zone`), to which endpoints may be hinted; empty if
    /// it is not known.
    pub zone: Arc<str>,
    /// Whether it is about to go: being deleted, or chosen for it by the cluster autoscaler. It
    /// then asks load balancers for no more connections.
    pub leaving: bool,
}

/// Something in a source that was not served, or not served as written, and that a person should
/// know of. It does not keep the rest from being served.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where: a file with line, or an object.
    pub place: String,
    /// What happened, and what to do.
    pub text: String,
}

/// A whole, consistent view of what to serve: immutable, cheap to clone.
///
/// The services are in a persistent map: a new snapshot shares what did not change with the old
/// one, and their difference is found in the time of the change, not of the whole
/// ([`imbl::OrdMap::diff`]).
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Every service, also those that have no VIP.
    pub services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// Every workload that is known, captured or not.
    pub workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// This node.
    pub node: Arc<Node>,
    /// What the source could not make sense of.
    pub problems: Arc<[Problem]>,
}
