//! Which services and ServiceEntries of a source this node serves, and at which addresses.

use std::{collections::BTreeMap, mem, net::IpAddr, sync::Arc};

use imbl::{OrdMap, ordmap::DiffItem};

use super::{external_ips::ExternalIps, host_ips, reserved};
use crate::model::{Entry, EntryName, Node, Problem, Service, ServiceName};

/// Leaves out of a source's services the host ports at addresses that this node does not have and what would take a
/// reserved port of the node, and out of services and ServiceEntries the external addresses that the operator does not admit. Names what it leaves out.
#[derive(Debug)]
pub struct Admitted {
    services: Filter<ServiceName, Service>,
    entries: Filter<EntryName, Entry>,
    own: Vec<IpAddr>,
    external_ips: ExternalIps,
    reserved_ports: Vec<u16>,
}

impl Admitted {
    /// Has seen no service yet.
    pub fn new(external_ips: ExternalIps) -> Self {
        Self {
            services: Filter::default(),
            entries: Filter::default(),
            own: Vec::new(),
            external_ips,
            reserved_ports: Vec::new(),
        }
    }

    /// Serves nothing at these ports of the node.
    #[must_use]
    pub fn with_reserved_ports(mut self, ports: Vec<u16>) -> Self {
        self.reserved_ports = ports;
        self
    }

    /// Returns the services that are served, and whether the [problems](Self::problems) have changed. Takes time for
    /// what changed, however much is left out; for all services if the node's addresses changed.
    pub fn take(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        node: &Node,
    ) -> (OrdMap<ServiceName, Arc<Service>>, bool) {
        let before = (self.own != node.own).then(|| {
            self.own.clone_from(&node.own);
            mem::take(&mut self.services).left_out
        });
        let changed = self.services.take(services, |service| {
            if let Some(problem) = host_ips::problem(service, &self.own) {
                return (None, Some(problem));
            }
            let reserved = reserved::left_out(service, &self.own, &self.reserved_ports);
            let (service, problem) = rest(service, reserved);
            let other = service
                .as_ref()
                .map(|service| rest(service, self.external_ips.left_out(service)));
            let (service, other) = other.unwrap_or_default();
            let problem = match (problem, other) {
                (Some(problem), Some(other)) => Some(Problem {
                    text: format!("{}. {}", problem.text, other.text),
                    ..problem
                }),
                (problem, other) => problem.or(other),
            };
            (service, problem)
        });
        // Judged anew, all that is left out looks new.
        let changed = before.map_or(changed, |before| before != self.services.left_out);
        (self.services.served.clone(), changed)
    }

    /// The same for ServiceEntries.
    pub fn take_entries(
        &mut self,
        entries: &OrdMap<EntryName, Arc<Entry>>,
    ) -> (OrdMap<EntryName, Arc<Entry>>, bool) {
        let changed = self.entries.take(entries, |entry| {
            rest(entry, self.external_ips.left_out_of(entry))
        });
        (self.entries.served.clone(), changed)
    }

    /// Names what is left out.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        let of_services = self.services.left_out.values();
        of_services.chain(self.entries.left_out.values())
    }
}

/// What is served of an object, and what is left out of it.
fn rest<T>(object: &Arc<T>, left_out: Option<(T, Problem)>) -> (Option<Arc<T>>, Option<Problem>) {
    match left_out {
        Some((rest, problem)) => (Some(Arc::new(rest)), Some(problem)),
        None => (Some(Arc::clone(object)), None),
    }
}

/// The objects of one kind, without what is left out of them.
#[derive(Debug)]
struct Filter<K: Ord, V> {
    last: OrdMap<K, Arc<V>>,
    served: OrdMap<K, Arc<V>>,
    left_out: BTreeMap<K, Problem>,
}

impl<K: Ord, V> Default for Filter<K, V> {
    fn default() -> Self {
        Self {
            last: OrdMap::new(),
            served: OrdMap::new(),
            left_out: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Clone, V: PartialEq> Filter<K, V> {
    /// Takes in what changed. Returns whether something else is left out than before.
    fn take(
        &mut self,
        objects: &OrdMap<K, Arc<V>>,
        judge: impl Fn(&Arc<V>) -> (Option<Arc<V>>, Option<Problem>),
    ) -> bool {
        let mut changed = false;
        for change in self.last.diff(objects) {
            let (name, object) = match change {
                DiffItem::Add(name, new)
                | DiffItem::Update {
                    new: (name, new), ..
                } => (name, Some(new)),
                DiffItem::Remove(name, _) => (name, None),
            };
            let (object, problem) = object.map_or((None, None), &judge);
            match object {
                Some(object) => self.served.insert(name.clone(), object),
                None => self.served.remove(name),
            };
            let last = match &problem {
                Some(problem) => self.left_out.insert(name.clone(), problem.clone()),
                None => self.left_out.remove(name),
            };
            changed |= last != problem;
        }
        self.last = objects.clone();
        changed
    }
}
