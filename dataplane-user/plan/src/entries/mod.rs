//! ServiceEntries as services of the tables.
//!
//! An entry becomes a [`Service`] of its own kind, with a name that no Service can have. Its VIPs are the assigned
//! addresses of its hosts and the addresses that the entry names. So budgets, claims and the order of writes are those
//! of services.
//!
//! An entry does not get an address that a Service, an endpoint of a Service, a Pod or a node has, on any port, and
//! gets no address from a control plane that belongs to another host. After a host's address has changed, the former
//! address is served for ten minutes, because DNS gave it out.
//!
//! The author of an EndpointSlice can write any address. So an endpoint that is not a Pod's does not reserve an address
//! that the operator has stated to be an external IP, and does not reserve an address in the ranges of hosts. The owner
//! of any other address is unknown, so the endpoint reserves it.

mod cluster;
mod given;
mod names;
mod serve;
mod service;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use imbl::{OrdMap, ordmap::DiffItem};
use model::{
    EndpointName, Entry, EntryName, EntryResolution, PodAddresses, Problem, Resolved, Service,
    ServiceName, Snapshot, Workload, WorkloadName,
};
use smallvec::SmallVec;

pub(super) use self::service::services;
use self::{
    given::{Former, host_name},
    names::Names,
};
use super::vips::{Age, HostName, Record, Vips};

/// The Service of the API server.
const API_SERVER: &str = "default/kubernetes";

/// Adds the services of entries to the cluster's services. The cost of each step grows with the change.
#[derive(Debug)]
pub struct Entries {
    vips: Vips,
    /// The entries of the last snapshot.
    last: OrdMap<EntryName, Arc<Entry>>,
    base: OrdMap<ServiceName, Arc<Service>>,
    workloads: OrdMap<WorkloadName, Arc<Workload>>,
    /// The node's own addresses.
    own: Vec<IpAddr>,
    /// The holders of each address. Empty while no entry names an address.
    taken: HashMap<IpAddr, Holders>,
    pods: PodAddresses,
    /// Whether the operator has stated which external addresses are served.
    has_stated: bool,
    /// The entries that name each address, or that have it from a control plane.
    naming: HashMap<IpAddr, BTreeSet<EntryName>>,
    /// The hosts to which a control plane has assigned each address.
    assigned: HashMap<IpAddr, BTreeSet<(Age, HostName)>>,
    /// Whether new hosts wait for a control plane that assigns addresses.
    defers: bool,
    /// The hosts of each entry that want a number.
    asking: HashMap<EntryName, Vec<(HostName, Age)>>,
    /// Addresses that hosts had a moment ago.
    former: BTreeMap<EntryName, Vec<Former>>,
    /// DNS names of endpoints.
    names: Names,
    /// The entries whose names resolve to other addresses than when the entries were last served.
    moved: BTreeSet<EntryName>,
    /// The services of each entry.
    made: HashMap<EntryName, SmallVec<[ServiceName; 1]>>,
    services: OrdMap<ServiceName, Arc<Service>>,
    served: OrdMap<EntryName, Arc<Entry>>,
    problems: BTreeMap<EntryName, Vec<Problem>>,
}

/// Number of holders of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holders {
    /// Services, Pods, and endpoints of the API server.
    owners: u32,
    /// Endpoints of other Services.
    endpoints: u32,
}

impl Holders {
    fn of(&mut self, holder: Holder) -> &mut u32 {
        match holder {
            Holder::Owner => &mut self.owners,
            Holder::Endpoint => &mut self.endpoints,
        }
    }

    fn kinds(self) -> [bool; 2] {
        [self.owners > 0, self.endpoints > 0]
    }
}

/// A kind of object that holds an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Owner,
    Endpoint,
}

/// The services and entries of a snapshot, with entries served.
#[derive(Clone, Debug)]
pub struct Derived {
    /// All services, including those of entries.
    pub services: OrdMap<ServiceName, Arc<Service>>,
    /// The entries, with the addresses of their hosts.
    pub entries: OrdMap<EntryName, Arc<Entry>>,
    /// Whether the [problems](Entries::problems) have changed.
    pub other_problems: bool,
    /// Records of addresses, which the caller stores before it publishes the addresses.
    pub records: Vec<Record>,
}

/// Returns the name of the service that an entry becomes.
pub fn service_name(entry: &EntryName) -> ServiceName {
    ServiceName::new(entry.namespace(), &format!("serviceentry:{}", entry.name()))
}

impl Entries {
    /// Starts with stored addresses.
    pub fn new(records: impl IntoIterator<Item = Record>) -> Self {
        Self {
            vips: Vips::new(records),
            last: OrdMap::new(),
            base: OrdMap::new(),
            workloads: OrdMap::new(),
            own: Vec::new(),
            taken: HashMap::new(),
            pods: PodAddresses::default(),
            has_stated: false,
            naming: HashMap::new(),
            assigned: HashMap::new(),
            defers: false,
            asking: HashMap::new(),
            former: BTreeMap::new(),
            names: Names::default(),
            moved: BTreeSet::new(),
            made: HashMap::new(),
            services: OrdMap::new(),
            served: OrdMap::new(),
            problems: BTreeMap::new(),
        }
    }

    /// Sets whether entries may have only addresses that the operator has stated to be external, and addresses in the
    /// ranges of hosts.
    #[must_use]
    pub fn with_stated_addresses(self, stated: bool) -> Self {
        Self {
            has_stated: stated,
            ..self
        }
    }

    /// Makes new hosts wait a moment for a control plane, if a control plane has assigned addresses to other hosts. The
    /// caller serves the entries again while [`Entries::defers`] returns true.
    #[must_use]
    pub fn with_control_plane(self) -> Self {
        Self {
            defers: true,
            ..self
        }
    }

    /// Requests the addresses of endpoints' names. The caller reports them by [`Entries::learn`]. `last`: the last
    /// known addresses.
    #[must_use]
    pub fn with_names(self, last: HashMap<EndpointName, Resolved>) -> Self {
        Self {
            names: Names::resolved(last),
            ..self
        }
    }

    /// Records addresses of names. Returns true if they change an entry; the next [`Entries::take`] serves the change.
    pub fn learn(&mut self, resolved: impl IntoIterator<Item = (EndpointName, Resolved)>) -> bool {
        for (name, resolved) in resolved {
            self.moved.extend(self.names.learn(name, resolved));
        }
        !self.moved.is_empty()
    }

    /// Returns the names to look up, if they have changed since the last call.
    pub fn take_wanted_names(&mut self) -> Option<Vec<EndpointName>> {
        self.names.take_wanted()
    }

    /// Returns the addresses of names.
    pub const fn known_names(&self) -> &HashMap<EndpointName, Resolved> {
        self.names.known()
    }

    /// Adds the services of `entries` to `services`, with the other objects of `snapshot`. `now`: in seconds since the
    /// epoch.
    pub fn take(
        &mut self,
        entries: &OrdMap<EntryName, Arc<Entry>>,
        services: &OrdMap<ServiceName, Arc<Service>>,
        snapshot: &Snapshot,
        now: u64,
    ) -> Derived {
        let node = &snapshot.node;
        let mut dirty = std::mem::take(&mut self.moved);
        let knew_none = self.naming.is_empty();
        self.names.set_domain(&snapshot.cluster.domain);
        let last = std::mem::replace(&mut self.last, entries.clone());
        for change in last.diff(entries) {
            let (_, old, new) = sides(&change);
            for (entry, is_there) in old
                .map(|old| (old, false))
                .into_iter()
                .chain(new.map(|new| (new, true)))
            {
                self.note(entry, is_there, &mut dirty);
                dirty.insert(entry.name.clone());
            }
        }
        if self.naming.is_empty() {
            (self.taken, self.naming) = Default::default();
        } else if knew_none {
            let of_services = services.values().flat_map(|service| taken_by(service));
            let of_pods = snapshot.workloads.values().flat_map(|pod| &pod.addresses);
            let of_pods = of_pods.map(|address| (*address, Holder::Owner));
            for (address, holder) in of_services.chain(of_pods) {
                *self.taken.entry(address).or_default().of(holder) += 1;
            }
        }
        self.base(services, knew_none, &mut dirty);
        self.workloads(&snapshot.workloads, knew_none, &mut dirty);
        self.pods(&snapshot.pods, &mut dirty);
        if self.own != node.own {
            self.own.clone_from(&node.own);
            dirty.extend(self.naming.values().flatten().cloned());
        }
        self.forget_former(now, &mut dirty);
        let records = self.number(now, &mut dirty);
        let mut other_problems = false;
        for name in dirty {
            let problems = if let Some(entry) = self.last.get(&name).map(Arc::clone) {
                self.serve(&entry, now)
            } else {
                self.forget(&name);
                Vec::new()
            };
            let before = if problems.is_empty() {
                self.problems.remove(&name)
            } else {
                self.problems.insert(name.clone(), problems)
            };
            other_problems |= before.as_ref() != self.problems.get(&name);
        }
        Derived {
            services: self.services.clone(),
            entries: self.served.clone(),
            other_problems,
            records,
        }
    }

    /// Returns the parts of entries that are not served.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().flatten()
    }

    /// Returns whether hosts wait for addresses that will be free later, or will give addresses up later.
    pub fn is_waiting(&self) -> bool {
        let mut assigned = self.assigned.keys();
        self.vips.is_waiting()
            || !self.former.is_empty()
            || assigned.any(|address| self.vips.is_gone(*address))
    }

    /// Returns whether hosts wait for a control plane, which takes some seconds.
    pub fn defers(&self) -> bool {
        self.vips.defers()
    }

    /// Returns all records to store.
    pub fn records(&self) -> Vec<Record> {
        self.vips.records()
    }

    /// Adds the names and addresses of an entry, or removes them.
    fn note(&mut self, entry: &Entry, is_there: bool, dirty: &mut BTreeSet<EntryName>) {
        if is_served(entry) {
            self.names.note(entry, is_there);
        }
        for host in &entry.hosts {
            for address in &host.assigned {
                self.vips.foreign(*address, is_there);
                let claims = self.assigned.entry(*address).or_default();
                let age = Age::of(entry.name.clone(), entry.created);
                let claim = (age, host_name(entry, host));
                if is_there {
                    claims.insert(claim);
                } else {
                    claims.remove(&claim);
                    if claims.is_empty() {
                        self.assigned.remove(address);
                    }
                }
                dirty.extend(self.naming.get(address).into_iter().flatten().cloned());
            }
        }
        for address in entry.named_addresses() {
            let naming = self.naming.entry(address).or_default();
            if is_there {
                naming.insert(entry.name.clone());
            } else {
                naming.remove(&entry.name);
                if naming.is_empty() {
                    self.naming.remove(&address);
                }
            }
        }
    }

    /// Records the services of the cluster.
    fn base(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        knew_none: bool,
        dirty: &mut BTreeSet<EntryName>,
    ) {
        let counts = self.counts(knew_none);
        let base = std::mem::replace(&mut self.base, services.clone());
        for change in base.diff(services) {
            let (name, old, new) = sides(&change);
            match new {
                Some(new) => _ = self.services.insert(name.clone(), Arc::clone(new)),
                None => _ = self.services.remove(name),
            }
            dirty.extend(self.names.of_service(name).cloned());
            if counts {
                let old = old.into_iter().flat_map(|service| taken_by(service));
                let new = new.into_iter().flat_map(|service| taken_by(service));
                self.recount(old, new, dirty);
            }
        }
    }

    /// Records the workloads.
    fn workloads(
        &mut self,
        workloads: &OrdMap<WorkloadName, Arc<Workload>>,
        knew_none: bool,
        dirty: &mut BTreeSet<EntryName>,
    ) {
        let counts = self.counts(knew_none);
        let last = std::mem::replace(&mut self.workloads, workloads.clone());
        if !counts {
            return;
        }
        for change in last.diff(workloads) {
            let (_, old, new) = sides(&change);
            let addresses = |pod: Option<&Arc<Workload>>| -> Vec<(IpAddr, Holder)> {
                let addresses = pod.into_iter().flat_map(|pod| &pod.addresses);
                addresses.map(|address| (*address, Holder::Owner)).collect()
            };
            self.recount(addresses(old), addresses(new), dirty);
        }
    }

    /// Records the addresses of Pods and nodes.
    fn pods(&mut self, pods: &PodAddresses, dirty: &mut BTreeSet<EntryName>) {
        let last = std::mem::replace(&mut self.pods, pods.clone());
        if last.everywhere != pods.everywhere {
            dirty.extend(self.naming.values().flatten().cloned());
        }
        for change in last.counts.diff(&pods.counts) {
            if let DiffItem::Add(address, _) | DiffItem::Remove(address, _) = change {
                dirty.extend(self.naming.get(address).into_iter().flatten().cloned());
            }
        }
    }

    /// Returns whether changes of addresses are counted. They are not counted while no entry names an address, and not
    /// right after the first entry has named one, because everything is then counted from the start.
    fn counts(&self, knew_none: bool) -> bool {
        !self.naming.is_empty() && !knew_none
    }

    /// Counts the holders of addresses. Marks the entries dirty that name an address whose kinds of holders change.
    fn recount(
        &mut self,
        old: impl IntoIterator<Item = (IpAddr, Holder)>,
        new: impl IntoIterator<Item = (IpAddr, Holder)>,
        dirty: &mut BTreeSet<EntryName>,
    ) {
        let mut changed = |address: &IpAddr| {
            dirty.extend(self.naming.get(address).into_iter().flatten().cloned());
        };
        for (address, holder) in new {
            let holders = self.taken.entry(address).or_default();
            let before = holders.kinds();
            *holders.of(holder) += 1;
            if holders.kinds() != before {
                changed(&address);
            }
        }
        for (address, holder) in old {
            if let Some(holders) = self.taken.get_mut(&address) {
                let before = holders.kinds();
                *holders.of(holder) -= 1;
                let now = holders.kinds();
                if now == [false, false] {
                    self.taken.remove(&address);
                }
                if now != before {
                    changed(&address);
                }
            }
        }
    }
}

/// Returns whether the tables can serve an entry.
pub(super) fn is_served(entry: &Entry) -> bool {
    !entry.ports.is_empty() && entry.resolution != EntryResolution::None
}

/// Returns the addresses that a service has: its own, and those of its endpoints.
fn taken_by(service: &Service) -> impl Iterator<Item = (IpAddr, Holder)> + '_ {
    let own = service.cluster_ips.iter().chain(&service.external_ips);
    let own = own.chain(&service.load_balancer_ips);
    let own = own.map(|address| (*address, Holder::Owner));
    // Only the operator can write the endpoints of the API server.
    let is_api_server = service.name.as_str() == API_SERVER;
    let endpoint = if is_api_server {
        Holder::Owner
    } else {
        Holder::Endpoint
    };
    let endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
    own.chain(endpoints.map(move |of| (of.addr, endpoint)))
}

/// Returns the key of a change, with the former and the present value.
fn sides<'a, K: Ord, V: PartialEq>(
    change: &DiffItem<'a, 'a, K, V>,
) -> (&'a K, Option<&'a V>, Option<&'a V>) {
    match *change {
        DiffItem::Add(key, new) => (key, None, Some(new)),
        DiffItem::Update {
            old: (_, old),
            new: (key, new),
        } => (key, Some(old), Some(new)),
        DiffItem::Remove(key, old) => (key, Some(old), None),
    }
}

#[cfg(test)]
mod tests;
