//! The pods of this node, and what their namespaces say of them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::kind::Pod;
use crate::{
    model::{Rules, Service, ServiceName, Workload, WorkloadName},
    source::objects::NamespaceRules,
};

/// What was seen of them so far.
#[derive(Default)]
pub struct Pods {
    seen: BTreeMap<ServiceName, Seen>,
    namespaces: HashMap<Arc<str>, Rules>,
    /// As in the last view.
    workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// Whether they may be others in the next.
    changed: bool,
}

/// A pod.
#[derive(Default, PartialEq)]
struct Seen {
    /// The services that its host ports are.
    host_ports: Vec<Arc<Service>>,
    /// Itself, by its own rules.
    workload: Option<Workload>,
}

/// A service that takes the place of what was there; or none does.
pub type Change = (ServiceName, Option<Arc<Service>>);

impl Pods {
    /// A pod came or changed: what becomes of its host ports. `None`: nothing that matters here has
    /// changed, as is the rule, since a pod's status changes all the time.
    pub fn put(&mut self, name: &ServiceName, pod: Pod) -> Option<Vec<Change>> {
        let seen = self.seen.entry(name.clone()).or_default();
        let earlier = seen.workload.as_ref();
        let workload = pod.workload.map(|workload| match earlier {
            Some(earlier) if pod.faulty => Workload {
                rules: Arc::clone(&earlier.rules),
                ..workload
            },
            _ => workload,
        });
        let host_ports = match pod.host_ports {
            Some(services) => services.into_iter().map(Arc::new).collect(),
            None => seen.host_ports.clone(),
        };
        let now = Seen {
            host_ports,
            workload,
        };
        if *seen == now {
            return None;
        }
        let before = std::mem::replace(seen, now);
        self.changed = true;
        let now = &seen.host_ports;
        let gone = before.host_ports.iter().map(|service| &service.name);
        let gone = gone.filter(|name| now.iter().all(|service| service.name != **name));
        let put = now.iter();
        let put = put.map(|service| (service.name.clone(), Some(Arc::clone(service))));
        Some(gone.map(|name| (name.clone(), None)).chain(put).collect())
    }

    /// A pod is gone: so are its host ports.
    pub fn remove(&mut self, name: &ServiceName) -> Vec<Change> {
        let Some(seen) = self.seen.remove(name) else {
            return Vec::new();
        };
        self.changed = true;
        let gone = seen.host_ports.iter();
        gone.map(|service| (service.name.clone(), None)).collect()
    }

    /// A namespace came or changed.
    pub fn put_namespace(&mut self, namespace: NamespaceRules) {
        self.namespaces.insert(namespace.name, namespace.rules);
        self.changed = true;
    }

    /// A namespace is gone.
    pub fn remove_namespace(&mut self, name: &str) {
        self.namespaces.remove(name);
        self.changed = true;
    }

    /// Those that there are.
    pub fn names(&self) -> Vec<ServiceName> {
        self.seen.keys().cloned().collect()
    }

    /// The namespaces that there are.
    pub fn namespaces(&self) -> Vec<ServiceName> {
        let names = self.namespaces.keys();
        names
            .map(|name| super::kind::of_the_cluster(name))
            .collect()
    }

    /// Who can be captured, each by its own rules over those of its namespace.
    pub fn workloads(&mut self) -> imbl::OrdMap<WorkloadName, Arc<Workload>> {
        if std::mem::take(&mut self.changed) {
            let mut gone: Vec<WorkloadName> = self.workloads.keys().cloned().collect();
            for workload in self.seen.values().filter_map(|seen| seen.workload.as_ref()) {
                gone.retain(|name| *name != workload.name);
                let mut workload = workload.clone();
                if let Some(general) = self.namespaces.get(workload.name.namespace()) {
                    Arc::make_mut(&mut workload.rules).namespace = general.clone();
                }
                let known = self.workloads.get(&workload.name);
                if known.is_none_or(|known| **known != workload) {
                    self.workloads
                        .insert(workload.name.clone(), Arc::new(workload));
                }
            }
            for name in gone {
                self.workloads.remove(&name);
            }
        }
        self.workloads.clone()
    }
}
