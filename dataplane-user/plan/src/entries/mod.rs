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

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    iter,
    net::IpAddr,
    sync::Arc,
};

use imbl::{OrdMap, ordmap::DiffItem};
use model::{
    At, Backend, Endpoint, EndpointName, Entry, EntryName, EntryPort, EntryResolution, Gravity,
    Hints, PodAddresses, Preference, Problem, Records, Resolved, Service, ServiceName, ServicePort,
    ServiceType, Snapshot, TrafficPolicy, Weights, Workload, WorkloadName, is_allocated,
};
use smallvec::SmallVec;

use self::{
    given::{Former, host_name, may_have_number},
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

/// Returns the name of the service of a further host of an entry, for entries whose hosts are their own endpoints.
fn host_service_name(entry: &EntryName, host: &str) -> ServiceName {
    let name = format!("serviceentry:{}:{host}", entry.name());
    ServiceName::new(entry.namespace(), &name)
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

    /// Serves an entry in its present state. Returns the parts that are not served.
    fn serve(&mut self, entry: &Entry, now: u64) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut problem = |text: String| {
            problems.push(Problem {
                gravity: Gravity::Warning,
                place: format!("ServiceEntry {}", entry.name),
                text,
            });
        };
        let mut entry = entry.clone();
        for text in self.names.fill(&mut entry, &self.base) {
            problem(text);
        }
        if is_served(&entry) {
            let allowed = |address: &IpAddr| self.allowed(*address);
            let mut refuse = |field: &str, address: &IpAddr| match allowed(address) {
                Ok(()) => true,
                Err(why) => {
                    problem(format!("{field}: {address} is not served: {why}"));
                    false
                }
            };
            entry
                .addresses
                .retain(|address| refuse("spec.addresses", address));
            entry
                .ranges
                .retain(|address| refuse("spec.addresses", address));
            for index in 0..entry.hosts.len() {
                let mut vips = SmallVec::new();
                for address in self.assigned(&entry, &entry.hosts[index]) {
                    match address {
                        Ok(address) => vips.push(address),
                        Err((address, why)) => {
                            problem(format!("status.addresses: {address} is not served: {why}"));
                        }
                    }
                }
                let name = host_name(&entry, &entry.hosts[index]);
                if vips.is_empty() && may_have_number(&entry, &entry.hosts[index]) {
                    match self.vips.number(&name) {
                        Some(number) => {
                            vips = number.addresses().into();
                            entry.hosts[index].given = number.addresses().into();
                        }
                        None if self.vips.is_deferred(&name) => {}
                        None => problem(self.without_number(&name, index)),
                    }
                }
                entry.hosts[index].vips = vips;
            }
            self.note_former(&mut entry, now);
            let services: Vec<Service> = services(&entry).collect();
            for (index, host) in entry.hosts.iter_mut().enumerate() {
                // Each host has a service of its own, or all hosts have the first service.
                let service = services.get(index).unwrap_or(&services[0]);
                if host.vips.is_empty() && (index == 0 || services.len() == 1) {
                    host.vips.extend(entry.addresses.iter().copied());
                }
                let families = families(service);
                if families.contains(&true) {
                    host.vips
                        .retain(|vip| families[usize::from(!vip.is_ipv4())]);
                }
            }
            let has_vips = |service: &Service| {
                !service.cluster_ips.is_empty() || !service.external_ips.is_empty()
            };
            self.put(&entry.name, services.into_iter().filter(has_vips));
        } else {
            self.put(&entry.name, iter::empty());
            if entry.resolution == EntryResolution::None {
                // Clients connect to these addresses directly, without translation.
                for host in &mut entry.hosts {
                    host.vips = entry.addresses.iter().copied().collect();
                }
            }
        }
        let known = self.served.get(&entry.name);
        if known.is_none_or(|known| **known != entry) {
            self.served.insert(entry.name.clone(), Arc::new(entry));
        }
        problems
    }

    /// Checks whether an entry may have an address. The error is the reason.
    fn allowed(&self, address: IpAddr) -> Result<(), &'static str> {
        let holders = self.taken.get(&address).copied().unwrap_or_default();
        if self.own.contains(&address) {
            Err("it is an address of this node")
        } else if holders.owners > 0 {
            Err("a Service, a Pod or the API server has it")
        } else if self.pods.has(address) {
            Err("a Pod or a node has it")
        } else if holders.endpoints == 0 || is_allocated(address) {
            Ok(())
        } else if !self.has_stated {
            Err(
                "an endpoint of a Service has it; if it is an external IP, add its range to node.externalIPs",
            )
        } else if !self.pods.everywhere {
            Err(
                "an endpoint of a Service has it, and the endpoint may be a Pod: the agent does not know the Pods of all nodes",
            )
        } else {
            Ok(())
        }
    }

    /// Returns the reason why a host has no address.
    fn without_number(&self, host: &HostName, index: usize) -> String {
        let why = if self.vips.is_over(host) {
            "its namespace has more hosts than it may have of the 65521 addresses that there are; name fewer hosts"
        } else {
            "none of the 65521 addresses is free; it gets one when some time has passed"
        };
        format!("spec.hosts[{index}]: {} has no address: {why}", host.host)
    }

    /// Replaces the services of an entry.
    fn put(&mut self, entry: &EntryName, services: impl Iterator<Item = Service>) {
        let mut names = SmallVec::new();
        for service in services {
            let name = service.name.clone();
            if self
                .services
                .get(&name)
                .is_none_or(|known| **known != service)
            {
                self.services.insert(name.clone(), Arc::new(service));
            }
            names.push(name);
        }
        let now: HashSet<&ServiceName> = names.iter().collect();
        for name in self.made.remove(entry).unwrap_or_default() {
            if !now.contains(&name) {
                self.services.remove(&name);
            }
        }
        if !names.is_empty() {
            self.made.insert(entry.clone(), names);
        }
    }

    fn forget(&mut self, entry: &EntryName) {
        self.put(entry, iter::empty());
        self.served.remove(entry);
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

/// Returns whether a service has endpoints of IPv4 and of IPv6.
fn families(service: &Service) -> [bool; 2] {
    [true, false].map(|v4| {
        let mut endpoints = service.ports.iter().flat_map(|port| &port.endpoints);
        endpoints.any(|endpoint| endpoint.addr.is_ipv4() == v4)
    })
}

/// Returns the services of an entry: one in all, or one for each host if each host is its own endpoint.
pub(super) fn services(entry: &Entry) -> impl Iterator<Item = Service> + '_ {
    let count = match entry.resolution {
        EntryResolution::Hosts => entry.hosts.len().max(1),
        _ => 1,
    };
    (0..count).map(move |index| service(entry, (count > 1).then_some(index)))
}

/// Returns the service of all hosts of an entry, or of the host `only`.
fn service(entry: &Entry, only: Option<usize>) -> Service {
    // Only addresses from this node claim as strongly as cluster IPs, because the author of a `status` can write any
    // address.
    let (mut given, mut others) = (SmallVec::new(), SmallVec::<[IpAddr; 0]>::new());
    let hosts = match only {
        Some(index) => &entry.hosts[index..=index],
        None => &entry.hosts[..],
    };
    let mut seen = HashSet::new();
    for host in hosts {
        for vip in &host.given {
            if seen.insert(*vip) {
                given.push(*vip);
            }
        }
        let assigned = host.vips.iter().filter(|vip| !host.given.contains(vip));
        others.extend(assigned.chain(&host.former).copied());
    }
    let is_first = only.is_none_or(|index| index == 0);
    let own = entry.addresses.iter().chain(&entry.ranges);
    others.extend(own.filter(|_| is_first).copied());
    let name = match hosts.first() {
        Some(host) if !is_first => host_service_name(&entry.name, &host.name),
        _ => service_name(&entry.name),
    };
    // The host's own addresses, or the endpoints of all hosts.
    let own: Vec<Backend>;
    let backends = if entry.resolution == EntryResolution::Hosts {
        let endpoints = hosts.iter().flat_map(|host| &host.endpoints);
        own = endpoints.map(|address| Backend::at(*address)).collect();
        &own
    } else {
        &entry.backends
    };
    others.sort_unstable();
    others.dedup();
    Service {
        name,
        kind: ServiceType::Entry,
        created: entry.created,
        cluster_ips: given,
        external_ips: others,
        load_balancer_ips: SmallVec::new(),
        source_ranges: SmallVec::new(),
        affinity: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        aside: Vec::new(),
        records: Records::ClusterIps,
        ports: entry
            .ports
            .iter()
            .map(|port| service_port(entry, backends, port))
            .collect(),
    }
}

fn service_port(entry: &Entry, backends: &[Backend], port: &EntryPort) -> ServicePort {
    let [own, of_namespace] = entry.preference;
    let preference = own.or(of_namespace).unwrap_or(Preference::Any);
    let mut found: BTreeMap<(IpAddr, u16), (u32, bool, Hints)> = BTreeMap::new();
    for backend in backends {
        let number = backend.port_of(port);
        if let At::Address(addr) = backend.at
            && number != Backend::NO_PORT
        {
            let (weight, local, hints) = found.entry((addr, number)).or_default();
            *weight = weight.saturating_add(backend.weight);
            *local |= backend.local;
            *hints = backend.hints.max(*hints);
        }
    }
    let endpoint =
        |(&(addr, port), &(_, local, hints)): (&(IpAddr, u16), &(u32, bool, Hints))| Endpoint {
            addr,
            port,
            local,
            ready: true,
            serving: true,
            terminating: false,
            hints: hints.preferring(preference, local),
        };
    ServicePort {
        name: port.name.clone(),
        port: port.port,
        protocol: port.protocol,
        node_port: None,
        endpoints: found.iter().map(endpoint).collect(),
        weights: Weights::of(found.values().map(|(weight, ..)| *weight).collect()),
        split: None,
    }
}
