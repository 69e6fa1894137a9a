//! A [`View`]: everything that a source has, at one moment.

use std::{sync::Arc, time::Instant};

use model::{
    Entry, EntryName, Grant, Istio, PodAddresses, Problem, Route, RouteName, Service, ServiceName,
    Workload, WorkloadName,
};

use super::objects::NodeFacts;

/// The state of a source at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every service, including host ports of pods. Shares unchanged services with the view before.
    pub services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// Every ServiceEntry with its endpoints, without the addresses that this node assigns to hosts.
    pub entries: imbl::OrdMap<EntryName, Arc<Entry>>,
    /// Every route that is attached to a Service.
    pub routes: imbl::OrdMap<RouteName, Arc<Route>>,
    /// Every ReferenceGrant.
    pub grants: imbl::OrdMap<ServiceName, Arc<Grant>>,
    /// Istio's objects that limit connections, without the operator's settings.
    pub istio: Istio,
    /// The pods of this node, and of other nodes if they are wanted.
    pub workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// The addresses of these pods and their nodes, if entries are read.
    pub pods: PodAddresses,
    /// Whether the view has every Service of the cluster.
    pub whole: bool,
    /// Namespaces in which a Service or an EndpointSlice cannot be read. There, `whole` does not hold.
    pub unread: imbl::OrdSet<Arc<str>>,
    /// All namespaces of the cluster. `None` if the source does not have them.
    pub namespaces: Option<imbl::OrdSet<Arc<str>>>,
    /// Facts from this node's own object. `None` if the source has no nodes.
    pub node: Option<NodeFacts>,
    /// Parts that are left out because they cannot be served as written.
    pub problems: Arc<[Problem]>,
    /// Arrival time of the oldest change since the last view that was taken. `None` if it is unknown, as for a complete
    /// list.
    pub since: Option<Instant>,
}

impl View {
    /// Replaces an older view that was not taken.
    pub(crate) fn follows(&mut self, untaken: &Self) {
        self.since = match (self.since, untaken.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}
