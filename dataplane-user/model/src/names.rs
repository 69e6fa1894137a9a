//! The parts of a snapshot that DNS needs: services by name and by address, hosts of entries by name, and clients by
//! address.

use std::{net::IpAddr, sync::Arc};

use imbl::ordmap::DiffItem;
use smallvec::SmallVec;

use super::{
    Entry, Host, Service, ServiceName, ServiceType, Snapshot, Workload, WorkloadName, hosts::Hosts,
};

/// The names of the objects that have each address.
type ByAddress<Name> = imbl::HashMap<IpAddr, SmallVec<[Name; 1]>>;

/// An index of a [`Snapshot`]: its services by their names in DNS and by their addresses, and its workloads by their
/// addresses.
///
/// It shares the snapshot's maps. [`Names::follow`] takes the time of what changed since the snapshot before.
#[derive(Clone, Debug, Default)]
pub struct Names {
    domain: Arc<str>,
    whole: bool,
    /// All namespaces; none if they are not known.
    namespaces: Option<imbl::OrdSet<Arc<str>>>,
    /// Namespaces in which something cannot be read.
    unread: imbl::OrdSet<Arc<str>>,
    services: imbl::OrdMap<ServiceName, Arc<Service>>,
    workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// The services that an address is a cluster IP of, or a published endpoint.
    of_address: ByAddress<ServiceName>,
    clients: ByAddress<WorkloadName>,
    hosts: Hosts,
}

impl Names {
    /// The names of a snapshot.
    pub fn of(snapshot: &Snapshot) -> Self {
        let mut names = Self::default();
        names.follow(snapshot);
        names
    }

    /// Turns into the names of another snapshot.
    pub fn follow(&mut self, snapshot: &Snapshot) {
        self.domain = Arc::clone(&snapshot.cluster.domain);
        self.whole = snapshot.whole;
        self.unread.clone_from(&snapshot.unread);
        self.namespaces.clone_from(&snapshot.namespaces);
        self.hosts.follow(&snapshot.entries);
        let before = std::mem::replace(&mut self.services, snapshot.services.clone());
        for change in before.diff(&snapshot.services) {
            let (old, new) = sides(&change);
            let (was, is) = (
                old.map_or_else(Vec::new, |of| addresses(of)),
                new.map_or_else(Vec::new, |of| addresses(of)),
            );
            // Of many endpoints, a change concerns few.
            let gone = was.iter().filter(|addr| is.binary_search(addr).is_err());
            let come = is.iter().filter(|addr| was.binary_search(addr).is_err());
            if let Some(old) = old {
                remove(&mut self.of_address, gone.copied(), &old.name);
            }
            if let Some(new) = new {
                insert(&mut self.of_address, come.copied(), &new.name);
            }
        }
        let before = std::mem::replace(&mut self.workloads, snapshot.workloads.clone());
        for change in before.diff(&snapshot.workloads) {
            let (old, new) = sides(&change);
            if let Some(old) = old {
                remove(&mut self.clients, old.addresses.clone(), &old.name);
            }
            if let Some(new) = new {
                insert(&mut self.clients, new.addresses.clone(), &new.name);
            }
        }
    }

    /// The cluster's domain, in lower case, without dots around it.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Whether every service is here, except those of namespaces of which something cannot be read.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Whether a service of a namespace that is not here does not exist.
    pub fn is_whole_in(&self, namespace: &str) -> bool {
        self.whole && !self.unread.contains(namespace)
    }

    /// The service of a name in lower case. A pod's host ports have no name, and an entry has other
    /// names.
    pub fn service(&self, namespace: &str, name: &str) -> Option<&Arc<Service>> {
        let found = self.services.get(&ServiceName::new(namespace, name))?;
        has_name(found).then_some(found)
    }

    /// Whether a namespace exists; none if that is not known, because no service is in it and the source does not have all
    /// namespaces.
    pub fn has_namespace(&self, namespace: &str) -> Option<bool> {
        let services = self.services.range(ServiceName::new(namespace, "")..);
        let mut here = services.take_while(|(name, _)| name.namespace() == namespace);
        if here.any(|(_, service)| has_name(service)) {
            return Some(true);
        }
        let namespaces = self.namespaces.as_ref().filter(|_| self.whole);
        namespaces.map(|namespaces| namespaces.contains(namespace))
    }

    /// Whether entries name hosts.
    pub fn has_hosts(&self) -> bool {
        !self.hosts.is_empty()
    }

    /// The host of an entry that a name in lower case is, for clients of a namespace: the name itself before a wildcard,
    /// and a longer wildcard before a shorter one. Of several entries that name the host and that the namespace sees, one
    /// of its own comes first, and then the oldest. If the name may be one of the cluster's without its domain, only entries
    /// of the namespace count that it would be in. `of`: only entries of this namespace count.
    pub fn host(
        &self,
        name: &str,
        namespace: &str,
        of: Option<&str>,
    ) -> Option<(&Arc<Entry>, &Host)> {
        let found = self.hosts.find(name, namespace, of)?;
        match self.deciding(name, namespace).filter(|_| of.is_none()) {
            Some(only) => self.hosts.find(name, namespace, Some(only)),
            None => Some(found),
        }
    }

    /// The only namespace whose entries decide about a name that may be one of the cluster's without its domain: a client
    /// asks for `SERVICE.NAMESPACE`, `SERVICE.NAMESPACE.svc` and `HOST.SERVICE` as they are, too, and before or after the
    /// domains of its search list.
    fn deciding<'a>(&self, name: &'a str, namespace: &'a str) -> Option<&'a str> {
        let mut labels = name.rsplit('.');
        let last = match labels.next()? {
            "svc" => return Some(labels.next().unwrap_or_default()),
            last => last,
        };
        if self.has_namespace(last) == Some(true) {
            return Some(last);
        }
        self.service(namespace, last).map(|_| namespace)
    }

    /// The services that have an address as cluster IP, or that publish an endpoint with it.
    pub fn of_address(&self, addr: IpAddr) -> impl Iterator<Item = &Arc<Service>> {
        let names = self.of_address.get(&addr.to_canonical());
        let names = names.into_iter().flatten();
        names.filter_map(|name| self.services.get(name))
    }

    /// The workload that has an address; of several, the one that was seen last.
    pub fn client(&self, addr: IpAddr) -> Option<&Arc<Workload>> {
        let names = self.clients.get(&addr.to_canonical())?;
        self.workloads.get(names.last()?)
    }

    /// The workload of a name.
    pub fn workload(&self, name: &WorkloadName) -> Option<&Arc<Workload>> {
        self.workloads.get(name)
    }
}

/// Whether a service has a name in DNS: a pod's host ports have none, and an entry has other ones.
fn has_name(service: &Service) -> bool {
    !matches!(service.kind, ServiceType::HostPort | ServiceType::Entry)
}

fn insert<Name: Clone + PartialEq>(
    map: &mut ByAddress<Name>,
    addresses: impl IntoIterator<Item = IpAddr>,
    name: &Name,
) {
    for addr in addresses {
        let names = map.entry(addr).or_default();
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
}

fn remove<Name: Clone + PartialEq>(
    map: &mut ByAddress<Name>,
    addresses: impl IntoIterator<Item = IpAddr>,
    name: &Name,
) {
    for addr in addresses {
        if let Some(names) = map.get_mut(&addr) {
            names.retain(|known| known != name);
            if names.is_empty() {
                map.remove(&addr);
            }
        }
    }
}

/// Returns the old and the new value of a change.
fn sides<'a, K, V>(change: &DiffItem<'a, 'a, K, V>) -> (Option<&'a V>, Option<&'a V>) {
    match *change {
        DiffItem::Add(_, new) => (None, Some(new)),
        DiffItem::Update { old, new } => (Some(old.1), Some(new.1)),
        DiffItem::Remove(_, old) => (Some(old), None),
    }
}

/// The addresses that lead back to the name of a service: sorted, without duplicates.
fn addresses(service: &Service) -> Vec<IpAddr> {
    if !has_name(service) {
        return Vec::new();
    }
    let endpoints = service.records.published().iter().map(|e| e.addr);
    let mut addresses: Vec<_> = service
        .named_ips()
        .iter()
        .copied()
        .chain(endpoints)
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}
