//! Waypoints: proxies of Istio, described by Gateways, through which connections to services and workloads go.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use super::{
    AllowedNamespaces, Binding, Gateway, Istio, Label, Requirement, Service, ServiceName,
    UseWaypoint, Workload,
};

/// A label of the Pods of a Gateway: the Gateway's name.
const LABEL_GATEWAY: &str = "gateway.networking.k8s.io/gateway-name";

/// The waypoint for connections to a service or a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waypoint<'a> {
    /// The Gateway's name.
    pub name: &'a ServiceName,
    /// The Gateway, or the reason for which no connection can go through it.
    pub gateway: Result<&'a Gateway, NoGateway>,
}

/// The reason for which no connection can go through a Gateway that labels name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGateway {
    /// The source does not have it.
    Missing,
    /// Its listener does not allow the namespace of the object that names it.
    NotAllowed,
    /// Its `status` has no address.
    NoAddress,
}

impl fmt::Display for NoGateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With the names of the condition that Istio's control plane writes.
        let (text, reason) = match self {
            Self::Missing => (
                "the Gateway does not exist, or cannot be read",
                "WaypointIsNotReady",
            ),
            Self::NotAllowed => (
                "allowedRoutes of the Gateway's listener do not allow the namespace of the object that names it",
                "AttachmentDenied",
            ),
            Self::NoAddress => (
                "the Gateway has no usable address (status.addresses)",
                "WaypointIsNotReady",
            ),
        };
        write!(f, "{text} (WaypointBound=False, {reason})")
    }
}

impl Istio {
    /// Returns the waypoint for connections that are addressed to a service. `None`: they go to the service's endpoints, also
    /// if the Gateway is not for services.
    pub fn waypoint_of_service(&self, service: &Service) -> Option<Waypoint<'_>> {
        if !self.waypoints {
            return None;
        }
        let namespace = service.name.namespace();
        let of = self.namespaces.get(namespace)?;
        self.waypoint(namespace, of.waypoint_label(service)?, |of| of.for_services)
    }

    /// Returns the waypoint for connections that are addressed to a workload. `None`: they go to the workload, also if the
    /// Gateway is not for workloads.
    pub fn waypoint_of_workload<'a>(&'a self, workload: &'a Workload) -> Option<Waypoint<'a>> {
        if !self.waypoints {
            return None;
        }
        let namespace = workload.name.namespace();
        let of_namespace = || self.namespaces.get(namespace)?.waypoint.as_ref();
        let used = workload.waypoint.as_ref().or_else(of_namespace)?;
        self.waypoint(namespace, used, |of| of.for_workloads)
    }

    fn waypoint<'a>(
        &'a self,
        namespace: &str,
        used: &'a UseWaypoint,
        takes: impl FnOnce(&Gateway) -> bool,
    ) -> Option<Waypoint<'a>> {
        let name = used.gateway()?;
        let gateway = match self.gateways.get(name) {
            None => Err(NoGateway::Missing),
            Some(of) if !takes(of) => return None,
            Some(of) if !self.allows(of, name, namespace) => Err(NoGateway::NotAllowed),
            Some(of) if of.addresses.is_empty() => Err(NoGateway::NoAddress),
            Some(of) => Ok(&**of),
        };
        Some(Waypoint { name, gateway })
    }

    /// Returns how the Pods of a Gateway take streams. `None`: as other Pods.
    pub fn binding(&self, gateway: &Gateway) -> Option<Binding> {
        let of_class = || self.classes.get(&gateway.class).copied();
        gateway.binding.or_else(of_class)
    }

    /// Returns the Gateway whose Pod a workload on this node is, and how it takes streams. `None`: as other Pods, also if the
    /// Gateway has no address, unless streams have a header: without it, the Pod would take the client's bytes for one.
    pub fn bound(&self, workload: &Workload) -> Option<(ServiceName, Binding)> {
        let mut labels = workload.labels.iter();
        let name = labels.find_map(|(key, value)| (**key == *LABEL_GATEWAY).then_some(value))?;
        let name = ServiceName::new(workload.name.namespace(), name);
        let gateway = self.gateways.get(&name)?;
        let binding = self.binding(gateway)?;
        let is_so = binding.has_header || !gateway.addresses.is_empty();
        is_so.then_some((name, binding))
    }

    fn allows(&self, gateway: &Gateway, name: &ServiceName, namespace: &str) -> bool {
        match gateway.allowed(self.binding(gateway)) {
            AllowedNamespaces::Same => name.namespace() == namespace,
            AllowedNamespaces::All => true,
            AllowedNamespaces::None => false,
            AllowedNamespaces::Selected(all) => {
                let of = self.namespaces.get(namespace);
                let labels = of.map_or(&[][..], |of| &of.own_labels);
                all.iter().all(|of| is_met(of, namespace, labels))
            }
        }
    }

    /// Returns lines for the Gateways that labels of Services, ServiceEntries, Namespaces and these workloads name and through
    /// which no connection can go, by the namespace whose labels name them: at most `most` for each namespace.
    pub fn unusable_waypoints<'a>(
        &'a self,
        workloads: impl Iterator<Item = &'a Workload>,
        most: usize,
    ) -> BTreeMap<&'a str, BTreeSet<String>> {
        let mut found: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        let mut add = |namespace: &'a str, who: &str, waypoint: Option<Waypoint<'_>>| {
            if let Some(Waypoint {
                name,
                gateway: Err(why),
            }) = waypoint
            {
                let lines = found.entry(namespace).or_default();
                if lines.len() < most {
                    let name = name.as_str().escape_debug();
                    lines.insert(format!(
                        "{name}, which {who}namespace {namespace} names: {why}"
                    ));
                }
            }
        };
        for (namespace, of) in self.namespaces.iter().filter(|_| self.waypoints) {
            for used in of.labels.values().chain(&of.waypoint) {
                let takes = |of: &Gateway| of.for_services || of.for_workloads;
                add(namespace, "", self.waypoint(namespace, used, takes));
            }
        }
        for workload in workloads.filter(|of| of.waypoint.is_some()) {
            let waypoint = self.waypoint_of_workload(workload);
            add(workload.name.namespace(), "a Pod of ", waypoint);
        }
        found
    }
}

/// Returns whether a Namespace with these labels meets a requirement.
fn is_met(of: &Requirement, namespace: &str, labels: &[Label]) -> bool {
    // Each Namespace has this label.
    let value = match &*of.key {
        "kubernetes.io/metadata.name" => Some(namespace),
        key => {
            let mut labels = labels.iter();
            labels.find_map(|(own, value)| (**own == *key).then_some(&**value))
        }
    };
    let is_so = value.is_some_and(|value| {
        let values = of.values.as_ref();
        values.is_none_or(|values| values.iter().any(|wanted| **wanted == *value))
    });
    is_so != of.negated
}
