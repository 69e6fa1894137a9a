//! The domain: the services and workloads that a node should serve. The types do not depend on the source of the
//! description.
//!
//! Pure values: this room imports no sibling, no tokio and no aya.

#![forbid(unsafe_code)]

mod allocated;
pub mod authorization;
mod cluster;
mod endpoint_name;
mod entry;
mod ephemeral;
mod gateway;
mod hosts;
mod identity;
mod istio;
mod name;
mod names;
mod order;
mod pod_addresses;
mod protocol;
mod reachable;
mod records;
mod resolution;
mod route;
mod rules;
mod service;
mod topology;
mod waypoint;
mod weights;
mod workload;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

pub use allocated::is_allocated;
pub use cluster::Cluster;
pub use endpoint_name::{ADDRESSES_MAX, EndpointName, Resolved, can_be_endpoint};
pub use entry::{At, Backend, Entry, EntryPort, EntryResolution, ExportTo, Host, Location};
pub use ephemeral::Ephemeral;
pub use gateway::{
    AllowedNamespaces, Binding, Gateway, GatewayAddress, GatewayListener, HBONE, Requirement,
    UseWaypoint,
};
pub use identity::{Identity, NoIdentity};
pub use istio::{Effect, Istio, IstioNamespace, IstioPolicy, Label};
pub use name::{EntryName, ServiceName, WorkloadName};
pub use names::Names;
pub use order::{Anchor, Name, Order};
pub use pod_addresses::PodAddresses;
pub use protocol::Protocol;
pub use reachable::Reachable;
pub use records::{Named, NamedProtocol, Published, PublishedPort, Records};
pub use resolution::{DnsPolicy, Resolution};
pub use route::{BackendRef, BackendTo, Grant, Parent, Route, RouteKind, RouteName};
pub use rules::{
    CapturedBy, DNS, Egress, Inbound, Layers, Mode, Policy, RefusedInbound, Rules, WithoutProxy,
};
pub use service::{
    Claim, Endpoint, Part, Service, ServicePort, ServiceType, Shares, Split, TrafficPolicy, VipPort,
};
pub use topology::{Hints, Locality, Preference, Reach};
pub use waypoint::{NoGateway, Waypoint};
pub use weights::{Weights, lcm, most_places, narrowed};
pub use workload::{
    Exempt, Place, RESERVED, Telemetry, Uid, VIRTUAL_INTERFACES, Workload, is_reserved,
    is_virtual_interface,
};

/// The properties of this node itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The name by which EndpointSlices say that an endpoint is here (`nodeName`).
    pub name: Arc<str>,
    /// Addresses on which node ports are answered, besides loopback; sorted, without duplicates.
    pub addresses: Vec<IpAddr>,
    /// Where each of them was learnt from, in the same order.
    pub addresses_from: Vec<AddressFrom>,
    /// The addresses of its interfaces, except loopback and link-local ones; sorted.
    pub own: Vec<IpAddr>,
    /// The ports that its kernel gives to sockets.
    pub ephemeral: Ephemeral,
    /// Where processes of the node listen at cluster IPs that are its own.
    pub listens: BTreeSet<VipPort>,
    /// Its zone (label `topology.kubernetes.io/zone`), to which endpoints may be hinted; empty if
    /// it is not known.
    pub zone: Arc<str>,
    /// Its region (label `topology.kubernetes.io/region`); empty if it is not known.
    pub region: Arc<str>,
    /// Its subzone (label `topology.istio.io/subzone`); empty if it has none.
    pub subzone: Arc<str>,
    /// The network of its pods (label `topology.istio.io/network`); empty if it is not known.
    pub network: Arc<str>,
    /// Why it is about to go, or gone; none: it stays. A node that leaves asks load balancers for no
    /// more connections.
    pub leaving: Option<Leaving>,
    /// Whether the operator gave its name, rather than the machine.
    pub name_given: bool,
}

/// Where it was learnt from that node ports are answered on an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AddressFrom {
    /// It is in a configured range.
    Given,
    /// The Node object has it.
    NodeObject,
    /// The interface with the default route has it first.
    DefaultRoute,
    /// There is no default route: all addresses are taken.
    All,
}

impl AddressFrom {
    /// As a person reads it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Given => "--nodeport-addresses",
            Self::NodeObject => "the Node object",
            Self::DefaultRoute => "the interface with the default route",
            Self::All => "there is no default route, so every address",
        }
    }
}

/// Why a node gets no more connections from load balancers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Its Node object is being deleted.
    Deleted,
    /// The cluster autoscaler has chosen it for deletion, by a taint.
    Tainted,
    /// The cluster has no Node of its name, or none any more.
    Unknown,
}

impl Leaving {
    /// The reason, as a clause about the Node.
    pub fn text(self) -> &'static str {
        match self {
            Self::Deleted => "it is being deleted from the cluster",
            Self::Tainted => {
                "it has the taint ToBeDeletedByClusterAutoscaler, by which the cluster autoscaler \
                 marks the nodes that it deletes next"
            }
            Self::Unknown => "the cluster has no Node of this name",
        }
    }
}

/// Something in a source that was not served, or not served as written, and that a person should
/// know of. It does not keep the rest from being served.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// How bad it is.
    pub gravity: Gravity,
    /// Where: a file with line, or an object.
    pub place: String,
    /// The event, and the remedy.
    pub text: String,
}

/// How bad a [`Problem`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gravity {
    /// An object is not followed: its last valid version stays served, if there is one. Its author has to act;
    /// the node is healthy.
    NotFollowed,
    /// The node does not know which endpoints are its own. An error of the node if a service's policy
    /// depends on that ([`Snapshot::depends_on_place`]); else worth a look.
    Place,
    /// Something is left out, or worth a look.
    #[default]
    Warning,
}

/// A whole, consistent view of everything that the node should serve: immutable, cheap to clone.
///
/// The services are in a persistent map: a new snapshot shares what did not change with the old
/// one, and their difference is found in the time of the change, not of the whole
/// ([`imbl::OrdMap::diff`]).
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Every service, also those that have no VIP.
    pub services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// Every ServiceEntry. The plan's tables have them as services of kind [`ServiceType::Entry`].
    pub entries: imbl::OrdMap<EntryName, Arc<Entry>>,
    /// Every route that is attached to a Service. The services are as the routes have split them.
    pub routes: imbl::OrdMap<RouteName, Arc<Route>>,
    /// Every ReferenceGrant, by its namespace and name.
    pub grants: imbl::OrdMap<ServiceName, Arc<Grant>>,
    /// Istio's objects that limit connections.
    pub istio: Istio,
    /// Every workload that is known, captured or not.
    pub workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// The addresses of Pods and their nodes, as far as ServiceEntries are served.
    pub pods: PodAddresses,
    /// This node.
    pub node: Arc<Node>,
    /// The cluster that it is of.
    pub cluster: Arc<Cluster>,
    /// Whether every Service of the cluster is here, so that a name that is not here does not exist.
    pub whole: bool,
    /// Namespaces in which a Service or an EndpointSlice cannot be read, so that this is true of other namespaces only.
    pub unread: imbl::OrdSet<Arc<str>>,
    /// All namespaces of the cluster; none if the source does not have them.
    pub namespaces: Option<imbl::OrdSet<Arc<str>>>,
    /// The destinations that the operator has stated to be reachable from workloads with `egress: deny`; `None` if no
    /// setting asks for them.
    pub reachable: Option<Arc<Reachable>>,
    /// Problems in the source's input.
    pub problems: Arc<[Problem]>,
}

impl Snapshot {
    /// Returns the snapshot of a source that may know more by now (`is_behind`): then a name that is not here may exist.
    #[must_use]
    pub fn in_doubt(&self, is_behind: bool) -> Self {
        Self {
            whole: self.whole && !is_behind,
            ..self.clone()
        }
    }

    /// The first service for which it matters which endpoints are on this node. Looks at all of them.
    pub fn depends_on_place(&self) -> Option<&ServiceName> {
        let mut services = self.services.values();
        let found = services.find(|service| {
            [service.internal_policy, service.external_policy].contains(&TrafficPolicy::Local)
                && !service.name.name().contains(':')
        });
        found.map(|service| &service.name)
    }
}
