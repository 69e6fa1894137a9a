//! The pods of this node with the rules of their namespaces, and the pods of other nodes if they are wanted.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use model::{Egress, Place, PodAddresses, Rules, Service, ServiceName, Workload, WorkloadName};
use smallvec::SmallVec;

use super::kind::Pod;
use crate::objects::NamespaceRules;

/// The known pods and namespaces.
#[derive(Debug, Default)]
pub struct Pods {
    seen: BTreeMap<ServiceName, ReadPod>,
    namespaces: HashMap<Arc<str>, Rules>,
    /// Names of all namespaces.
    pub namespace_names: imbl::OrdSet<Arc<str>>,
    /// Addresses of all known pods.
    addresses: PodAddresses,
    /// The workloads of the last view.
    workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// The pods that may differ in the next view.
    changed: BTreeSet<ServiceName>,
    /// Whether a pod of this node may reach only known destinations. `None`: not computed yet.
    denies: Option<bool>,
    texts: Texts,
}

/// Shares texts that many workloads have: names of their controllers, labels, nodes.
#[derive(Debug, Default)]
struct Texts {
    known: HashSet<Arc<str>>,
    /// Number of texts at which unused texts are removed.
    room: usize,
}

impl Texts {
    fn share(&mut self, workload: &mut Workload) {
        workload.share_texts(|text| match self.known.get(text) {
            Some(known) => *text = Arc::clone(known),
            None => _ = self.known.insert(Arc::clone(text)),
        });
        if self.known.len() > self.room {
            self.known.retain(|text| Arc::strong_count(text) > 1);
            // Twice the number of used texts, so a sweep has constant cost for each new text.
            self.room = 2 * self.known.len() + 64;
        }
    }
}

/// A pod.
#[derive(Debug, Default, PartialEq)]
struct ReadPod {
    /// Its host ports as services.
    host_ports: Vec<Arc<Service>>,
    /// The pod as a workload, with its own rules.
    workload: Option<Workload>,
    /// Its addresses and those of its node.
    addresses: SmallVec<[IpAddr; 4]>,
}

impl ReadPod {
    /// Returns whether it is a workload on this node.
    fn is_here(&self) -> bool {
        let workload = self.workload.as_ref();
        workload.is_some_and(|workload| workload.place != Place::Elsewhere)
    }
}

/// A service and its new state. `None`: the service is removed.
pub type Change = (ServiceName, Option<Arc<Service>>);

impl Pods {
    /// Stores a new or changed pod. Returns the changes to the services of its host ports. `None` if no relevant field
    /// has changed, which is the usual case, because a pod's status changes often.
    pub fn put(&mut self, name: &ServiceName, pod: Pod) -> Option<Vec<Change>> {
        let seen = self.seen.entry(name.clone()).or_default();
        let host_ports = match pod.host_ports {
            Some(services) => services.into_iter().map(Arc::new).collect(),
            None => seen.host_ports.clone(),
        };
        let now = ReadPod {
            host_ports,
            workload: pod.workload,
            addresses: pod.addresses,
        };
        if *seen == now {
            return None;
        }
        let before = std::mem::replace(seen, now);
        if before.addresses != seen.addresses {
            self.addresses.add(&seen.addresses);
            self.addresses.remove(&before.addresses);
        }
        if let Some(workload) = &mut seen.workload {
            self.texts.share(workload);
        }
        if before.is_here() || seen.is_here() {
            self.denies = None;
        }
        self.changed.insert(name.clone());
        let now = &seen.host_ports;
        let gone = before.host_ports.iter().map(|service| &service.name);
        let gone = gone.filter(|name| now.iter().all(|service| service.name != **name));
        let put = now.iter();
        let put = put.map(|service| (service.name.clone(), Some(Arc::clone(service))));
        Some(gone.map(|name| (name.clone(), None)).chain(put).collect())
    }

    /// Removes a pod. Returns the removal of its host ports.
    pub fn remove(&mut self, name: &ServiceName) -> Vec<Change> {
        let Some(seen) = self.seen.remove(name) else {
            return Vec::new();
        };
        self.addresses.remove(&seen.addresses);
        if seen.is_here() {
            self.denies = None;
        }
        self.changed.insert(name.clone());
        let gone = seen.host_ports.iter();
        gone.map(|service| (service.name.clone(), None)).collect()
    }

    /// Stores a new or changed namespace.
    pub fn put_namespace(&mut self, namespace: NamespaceRules) {
        let name = Arc::clone(&namespace.name);
        self.namespace_names.insert(Arc::clone(&name));
        let before = self.namespaces.insert(namespace.name, namespace.rules);
        if before.unwrap_or_default() != self.namespaces[&name] {
            self.changed_in(&name);
        }
    }

    /// Removes a namespace.
    pub fn remove_namespace(&mut self, name: &str) {
        self.namespace_names.remove(name);
        if self.namespaces.remove(name).is_some() {
            self.changed_in(name);
        }
    }

    /// Marks the pods of a namespace whose rules have changed.
    fn changed_in(&mut self, namespace: &str) {
        self.denies = None;
        let those = self.seen.range(ServiceName::new(namespace, "")..);
        let those = those.take_while(|(name, _)| name.namespace() == namespace);
        self.changed.extend(those.map(|(name, _)| name.clone()));
    }

    /// Returns whether a pod of this node may reach only known destinations.
    pub fn denies(&mut self) -> bool {
        *self.denies.get_or_insert_with(|| {
            let here = self.seen.values().filter(|seen| seen.is_here());
            let mut workloads = here.filter_map(|seen| seen.workload.as_ref());
            workloads.any(|workload| {
                let general = self.namespaces.get(workload.name.namespace());
                let general = general.and_then(|rules| rules.egress);
                workload.rules.own.egress.or(general) == Some(Egress::Deny)
            })
        })
    }

    /// Returns the addresses of the known pods. `everywhere`: whether the pods of all nodes are known.
    pub fn addresses(&self, everywhere: bool) -> PodAddresses {
        PodAddresses {
            counts: self.addresses.counts.clone(),
            everywhere,
        }
    }

    /// Returns the known workloads. A workload that can be captured has its own rules, and those of its namespace below
    /// them.
    pub fn workloads(&mut self) -> imbl::OrdMap<WorkloadName, Arc<Workload>> {
        for name in std::mem::take(&mut self.changed) {
            let seen = self.seen.get(&name);
            let Some(workload) = seen.and_then(|seen| seen.workload.as_ref()) else {
                let name = WorkloadName::new(name.namespace(), name.name());
                self.workloads.remove(&name);
                continue;
            };
            let mut workload = workload.clone();
            if workload.place != Place::Elsewhere
                && let Some(general) = self.namespaces.get(name.namespace())
            {
                Arc::make_mut(&mut workload.rules).namespace = general.clone();
            }
            let known = self.workloads.get(&workload.name);
            if known.is_none_or(|known| **known != workload) {
                self.workloads
                    .insert(workload.name.clone(), Arc::new(workload));
            }
        }
        self.workloads.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, node: &str) -> Pod {
        let name = WorkloadName::new("default", name);
        Pod {
            host_ports: Some(Vec::new()),
            workload: Some(Workload {
                node: node.into(),
                ..Workload::new(name, Place::Elsewhere)
            }),
            addresses: SmallVec::new(),
            candidate: None,
        }
    }

    #[test]
    fn texts_that_many_pods_have_are_kept_once_and_go_with_the_last_of_them() {
        let mut pods = Pods::default();
        let name = |number: usize| ServiceName::new("default", &format!("web-{number}"));
        for number in 0..10_000 {
            pods.put(&name(number), pod(name(number).name(), "there"));
            if number >= 2 {
                pods.remove(&name(number - 2));
            }
            let known = pods.texts.known.len();
            assert!(known < 200, "{known} texts of 2 pods");
        }
        let workloads = pods.workloads();
        let nodes: Vec<_> = workloads.values().map(|of| &of.node).collect();
        assert_eq!(nodes.len(), 2);
        assert!(Arc::ptr_eq(nodes[0], nodes[1]));
    }
}
