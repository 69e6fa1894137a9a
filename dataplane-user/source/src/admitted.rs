//! Decides which services and ServiceEntries of a source this node serves, and at which addresses.

use std::{collections::BTreeMap, mem, net::IpAddr, sync::Arc};

use imbl::{OrdMap, ordmap::DiffItem};
use model::{Entry, EntryName, Node, Problem, Service, ServiceName};

use super::{external_ips::ExternalIps, host_ips, own_ports, reserved};

/// Leaves out parts of a source's services: host ports at addresses that this node does not have, and ports that are
/// reserved on the node. Leaves out external addresses of services and ServiceEntries that the operator does not admit.
/// Reports the parts that it leaves out.
#[derive(Debug)]
pub struct Admitted {
    services: Filter<ServiceName, Service>,
    entries: Filter<EntryName, Entry>,
    /// The properties of the node that the decisions depend on.
    node: Node,
    /// The services with cluster IPs that the node has on an interface, with these IPs.
    owned: BTreeMap<ServiceName, Vec<IpAddr>>,
    external_ips: ExternalIps,
    reserved_ports: Vec<u16>,
}

impl Admitted {
    /// Returns a filter that has seen no service.
    pub fn new(external_ips: ExternalIps) -> Self {
        Self {
            services: Filter::default(),
            entries: Filter::default(),
            node: Node::default(),
            owned: BTreeMap::new(),
            external_ips,
            reserved_ports: Vec::new(),
        }
    }

    /// Sets ports of the node at which no object is served.
    #[must_use]
    pub fn with_reserved_ports(mut self, ports: Vec<u16>) -> Self {
        self.reserved_ports = ports;
        self
    }

    /// Returns the services to serve, and whether the [problems](Self::problems) have changed. The cost grows with the
    /// change, not with the parts that are left out. If the node's addresses changed, all services are checked.
    pub fn take(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        node: &Node,
    ) -> (OrdMap<ServiceName, Arc<Service>>, bool) {
        let same = self.node.own == node.own
            && self.node.ephemeral == node.ephemeral
            && self.node.listens == node.listens;
        let before = (!same).then(|| {
            self.node = Node {
                own: node.own.clone(),
                ephemeral: node.ephemeral.clone(),
                listens: node.listens.clone(),
                ..Node::default()
            };
            self.owned.clear();
            mem::take(&mut self.services).left_out
        });
        let (node, owned) = (&self.node, &mut self.owned);
        let changed = self.services.take(services, |name, service| {
            let own: Vec<IpAddr> = service
                .iter()
                .flat_map(|service| own_ports::owned(service, node))
                .collect();
            if own.is_empty() {
                owned.remove(name);
            } else {
                owned.insert(name.clone(), own);
            }
            let Some(service) = service else {
                return (None, None);
            };
            if let Some(problem) = host_ips::problem(service, &node.own) {
                return (None, Some(problem));
            }
            // Each step receives the result of the step before, and reports the parts that it removes.
            let steps: [Step<'_>; 3] = [
                &|service| reserved::left_out(service, &node.own, &self.reserved_ports),
                &|service| self.external_ips.left_out(service),
                &|service| own_ports::set_aside(service, node),
            ];
            let (mut served, mut said) = (Arc::clone(service), None::<Problem>);
            for step in steps {
                let Some((rest, problem)) = step(&served) else {
                    continue;
                };
                served = Arc::new(rest);
                match &mut said {
                    Some(said) => said.text = format!("{}; {}", said.text, problem.text),
                    None => said = Some(problem),
                }
            }
            (Some(served), said)
        });
        // After a check of all services, every problem looks new, so the problems are compared.
        let changed = before.map_or(changed, |before| before != self.services.left_out);
        (self.services.served.clone(), changed)
    }

    /// Returns the ServiceEntries to serve, and whether the [problems](Self::problems) have changed.
    pub fn take_entries(
        &mut self,
        entries: &OrdMap<EntryName, Arc<Entry>>,
    ) -> (OrdMap<EntryName, Arc<Entry>>, bool) {
        let changed = self.entries.take(entries, |_, entry| {
            let judged = entry.map(|entry| rest(entry, self.external_ips.left_out_of(entry)));
            judged.unwrap_or_default()
        });
        (self.entries.served.clone(), changed)
    }

    /// Returns the cluster IPs of services that the node has on an interface.
    pub fn owned(&self) -> impl Iterator<Item = IpAddr> {
        self.owned.values().flatten().copied()
    }

    /// Returns the parts that are left out.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        let of_services = self.services.left_out.values();
        of_services.chain(self.entries.left_out.values())
    }
}

/// Returns the part of an object that is served, and the problem of the part that is left out.
fn rest<T>(object: &Arc<T>, left_out: Option<(T, Problem)>) -> (Option<Arc<T>>, Option<Problem>) {
    match left_out {
        Some((rest, problem)) => (Some(Arc::new(rest)), Some(problem)),
        None => (Some(Arc::clone(object)), None),
    }
}

/// Returns a service without its refused parts, and the problem that names these parts. `None` if nothing was refused.
type Step<'a> = &'a dyn Fn(&Service) -> Option<(Service, Problem)>;

/// The objects of one kind, before and after the filter.
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
    /// Applies changes. Returns whether the parts that are left out have changed.
    fn take(
        &mut self,
        objects: &OrdMap<K, Arc<V>>,
        mut judge: impl FnMut(&K, Option<&Arc<V>>) -> (Option<Arc<V>>, Option<Problem>),
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
            let (object, problem) = judge(name, object);
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
