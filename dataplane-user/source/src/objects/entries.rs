//! ServiceEntries and what they select: pods and WorkloadEntries; and the WorkloadEntries that Services select.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use imbl::OrdMap;
use ipnet::IpNet;
use model::{
    ADDRESSES_MAX, At, Backend, Entry, EntryName, EntryResolution, Gravity, Preference, Problem,
    ServiceName, is_allocated,
};
use smallvec::SmallVec;

use super::{Candidate, Selection, ServiceEntry, Slice, Sums, addresses_of};

/// Endpoints that the ServiceEntries of one namespace may have together, each counted once for each port of its entry, as
/// the tables have it. Without a bound, one object of a megabyte would be hundreds of millions of endpoints, and a
/// thousand entries that select a thousand WorkloadEntries a million.
const ENDPOINTS_MAX: usize = 100_000;

/// Addresses at which the ServiceEntries of one namespace may be served together, each counted once for each port: two for
/// each host, and those that entries name. A range of 20 bytes is 256 of them.
const ADDRESSES_TOGETHER: usize = 100_000;

/// What is selected: whether it is a pod, and its name.
type CandidateName = (bool, ServiceName);
/// A namespace, and a label within it.
type LabelIn = (Box<str>, Box<str>, Box<str>);

/// The ServiceEntries of a source with their endpoints. A change takes time for what it changes.
#[derive(Debug)]
pub struct Entries {
    /// Entries with a selector, and others whose endpoints are not in `joined`.
    selecting: HashMap<EntryName, ServiceEntry>,
    /// Entries with a selector by the first label that they ask for.
    by_label: HashMap<LabelIn, BTreeSet<EntryName>>,
    /// Entries with addresses that may be another's.
    naming: BTreeSet<EntryName>,
    candidates: HashMap<CandidateName, Candidate>,
    candidates_by_label: HashMap<LabelIn, BTreeSet<CandidateName>>,
    /// What entries of each namespace have: endpoints, and addresses.
    endpoints: Sums,
    addresses: Sums,
    /// Services with a selector.
    services: HashMap<ServiceName, Box<Selection>>,
    /// The same by the first label that they ask for.
    services_by_label: HashMap<LabelIn, BTreeSet<ServiceName>>,
    /// Services whose WorkloadEntries may be others.
    dirty_services: BTreeSet<ServiceName>,
    /// How many endpoints each of them has by WorkloadEntries, and the sums of namespaces.
    service_sizes: HashMap<ServiceName, usize>,
    service_sums: HashMap<Box<str>, usize>,
    /// Services that select more than their namespace may.
    services_over: BTreeMap<ServiceName, Problem>,
    /// What namespaces prefer.
    preferences: HashMap<Box<str>, Preference>,
    /// Entries whose endpoints may be others.
    dirty: BTreeSet<EntryName>,
    joined: OrdMap<EntryName, Arc<Entry>>,
}

impl Default for Entries {
    fn default() -> Self {
        Self {
            selecting: HashMap::new(),
            by_label: HashMap::new(),
            naming: BTreeSet::new(),
            candidates: HashMap::new(),
            candidates_by_label: HashMap::new(),
            endpoints: Sums::new("ServiceEntry", ENDPOINTS_MAX),
            addresses: Sums::new("ServiceEntry", ADDRESSES_TOGETHER),
            services: HashMap::new(),
            services_by_label: HashMap::new(),
            dirty_services: BTreeSet::new(),
            service_sizes: HashMap::new(),
            service_sums: HashMap::new(),
            services_over: BTreeMap::new(),
            preferences: HashMap::new(),
            dirty: BTreeSet::new(),
            joined: OrdMap::new(),
        }
    }
}

impl Entries {
    /// None yet; what is the same as in `previous` is shared with it.
    pub fn like(previous: OrdMap<EntryName, Arc<Entry>>) -> Self {
        Self {
            joined: previous,
            ..Self::default()
        }
    }

    /// An entry came or changed.
    pub fn put(&mut self, entry: ServiceEntry) {
        let name = entry.entry.name.clone();
        self.forget(&name);
        if let Some(label) = first_label(&entry) {
            self.by_label.entry(label).or_default().insert(name.clone());
        }
        let ranges = entry.ranges.iter().map(IpNet::addr);
        let mut named = entry.entry.named_addresses().chain(ranges);
        if named.any(|address| !is_allocated(address)) {
            self.naming.insert(name.clone());
        }
        drop(named);
        self.dirty.insert(name.clone());
        self.selecting.insert(name, entry);
    }

    /// An entry is gone.
    pub fn remove(&mut self, name: &EntryName) {
        self.forget(name);
        let name_of = ServiceName::new(name.namespace(), name.name());
        self.addresses.remove(&name_of);
        self.endpoints.remove(&name_of);
        self.joined.remove(name);
    }

    /// A pod or WorkloadEntry came or changed; whether that makes a difference to an entry.
    pub fn put_candidate(&mut self, candidate: Candidate) -> bool {
        if self.candidates.get(&candidate.name) == Some(&candidate) {
            return false;
        }
        let name = candidate.name.clone();
        self.remove_candidate(&name);
        for label in labels(&candidate) {
            self.touch(&label, candidate.name.0);
            let named = self.candidates_by_label.entry(label).or_default();
            named.insert(name.clone());
        }
        self.candidates.insert(name, candidate);
        !self.dirty.is_empty() || !self.dirty_services.is_empty()
    }

    /// Who asks for this label may get other endpoints. Services select no pods: their EndpointSlices have these.
    fn touch(&mut self, label: &LabelIn, pod: bool) {
        let entries = self.by_label.get(label).into_iter().flatten();
        self.dirty.extend(entries.cloned());
        let services = self.services_by_label.get(label).into_iter().flatten();
        let services = services.filter(|_| !pod).cloned();
        self.dirty_services.extend(services);
    }

    /// A Service came or changed. Its endpoints are to be asked for again in any case.
    pub fn put_service(&mut self, name: &ServiceName, selection: Option<Box<Selection>>) {
        self.remove_service(name);
        if let Some(selection) = selection {
            if let Some(label) = selection_label(name, &selection) {
                let named = self.services_by_label.entry(label).or_default();
                named.insert(name.clone());
            }
            self.services.insert(name.clone(), selection);
        }
    }

    /// A Service is gone.
    pub fn remove_service(&mut self, name: &ServiceName) {
        self.free_service(name);
        let gone = self.services.remove(name);
        if let Some(label) = gone.and_then(|gone| selection_label(name, &gone))
            && let Some(named) = self.services_by_label.get_mut(&label)
        {
            named.remove(name);
            if named.is_empty() {
                self.services_by_label.remove(&label);
            }
        }
    }

    fn free_service(&mut self, name: &ServiceName) {
        if let Some(size) = self.service_sizes.remove(name) {
            if let Some(sum) = self.service_sums.get_mut(name.namespace()) {
                *sum -= size;
            }
            // There may be room for these now.
            let over = self.services_over.keys().filter(|other| *other != name);
            self.dirty_services.extend(over.cloned());
        }
        self.services_over.remove(name);
    }

    /// The Services that select WorkloadEntries which have come, changed or gone since the last call.
    pub fn take_dirty_services(&mut self) -> BTreeSet<ServiceName> {
        std::mem::take(&mut self.dirty_services)
    }

    /// The WorkloadEntries that a Service selects, each as a slice of the Service.
    pub fn slices(&mut self, name: &ServiceName) -> Vec<Slice> {
        self.free_service(name);
        let Some(selection) = self.services.get(name) else {
            return Vec::new();
        };
        let label = selection_label(name, selection);
        let named = label.and_then(|label| self.candidates_by_label.get(&label));
        let named = named.into_iter().flatten().filter(|(pod, _)| !pod);
        let chosen = named
            .filter_map(|name| self.candidates.get(name))
            .filter(|candidate| selection.selects(candidate));
        let slices: Vec<Slice> = chosen
            .filter_map(|candidate| selection.slice(name, candidate))
            .collect();
        let size = slices.len() * selection.ports();
        if size == 0 {
            return slices;
        }
        let sum = self.service_sums.entry(name.namespace().into());
        let sum = sum.or_default();
        if *sum + size > ENDPOINTS_MAX {
            let text = format!(
                "has none of the WorkloadEntries that it selects: the Services of namespace {} select more than \
                 {ENDPOINTS_MAX} together, each counted for each port. Select fewer",
                name.namespace()
            );
            let problem = Problem {
                gravity: Gravity::Warning,
                place: format!("Service {name}"),
                text,
            };
            self.services_over.insert(name.clone(), problem);
            return Vec::new();
        }
        *sum += size;
        self.service_sizes.insert(name.clone(), size);
        slices
    }

    /// What clients of the entries in a namespace prefer. Returns true if it is something else than before.
    pub fn prefer(&mut self, namespace: &str, preference: Option<Preference>) -> bool {
        let before = match preference {
            Some(preference) => self.preferences.insert(namespace.into(), preference),
            None => self.preferences.remove(namespace),
        };
        if before == preference {
            return false;
        }
        let of_namespace = EntryName::new(namespace, "")..;
        let names = self.joined.range(of_namespace).map(|(name, _)| name);
        let names = names.take_while(|name| name.namespace() == namespace);
        for name in names.cloned().collect::<Vec<_>>() {
            if let Some(entry) = self.joined.get_mut(&name) {
                Arc::make_mut(entry).preference[1] = preference;
            }
        }
        true
    }

    /// The traffic distribution of the services in a namespace.
    pub fn preferred_in(&self, namespace: &str) -> Option<Preference> {
        self.preferences.get(namespace).copied()
    }

    /// A pod or WorkloadEntry is gone; whether that makes a difference to an entry.
    pub fn remove_candidate(&mut self, name: &CandidateName) -> bool {
        let Some(candidate) = self.candidates.remove(name) else {
            return false;
        };
        for label in labels(&candidate) {
            self.touch(&label, candidate.name.0);
            if let Some(named) = self.candidates_by_label.get_mut(&label) {
                named.remove(name);
                if named.is_empty() {
                    self.candidates_by_label.remove(&label);
                }
            }
        }
        !self.dirty.is_empty() || !self.dirty_services.is_empty()
    }

    /// Whether an entry selects pods, wherever they are.
    pub fn select(&self) -> bool {
        !self.by_label.is_empty()
    }

    /// Whether an entry has addresses that may be a Pod's or a node's, wherever they are.
    pub fn name_addresses(&self) -> bool {
        !self.naming.is_empty()
    }

    /// The entries that there are.
    pub fn names(&self) -> impl Iterator<Item = &EntryName> {
        self.joined.keys().chain(self.selecting.keys())
    }

    /// The pods (`true`) or WorkloadEntries that there are.
    pub fn candidates(&self, pods: bool) -> impl Iterator<Item = &ServiceName> {
        let names = self.candidates.keys();
        names.filter_map(move |(pod, name)| (*pod == pods).then_some(name))
    }

    /// The entries with their endpoints.
    pub fn view(&mut self) -> OrdMap<EntryName, Arc<Entry>> {
        for name in std::mem::take(&mut self.dirty) {
            self.join(&name);
        }
        let hopeful = self.addresses.take_hopeful().into_iter();
        for name in hopeful.chain(self.endpoints.take_hopeful()) {
            self.join(&EntryName::new(name.namespace(), name.name()));
        }
        self.joined.clone()
    }

    /// Names entries and services that have no endpoints, or are not served, because their namespace has too many.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        let of_entries = self.addresses.problems().chain(self.endpoints.problems());
        of_entries.chain(self.services_over.values())
    }

    fn join(&mut self, name: &EntryName) {
        let Some(entry) = self.selecting.get(name) else {
            return;
        };
        let name_of = ServiceName::new(name.namespace(), name.name());
        let addresses = how_many_addresses(entry);
        let why = || {
            format!(
                "is not served: the entries of namespace {} have more than {ADDRESSES_TOGETHER} addresses together, two for \
                 each host and those of spec.addresses, each counted for each port; it has {addresses}. Name fewer hosts, \
                 addresses or ports, or smaller ranges",
                name.namespace()
            )
        };
        if !self.addresses.put(&name_of, addresses, why) {
            self.endpoints.remove(&name_of);
            let mut joined = without_endpoints(&entry.entry);
            joined.addresses.clear();
            // Without ports, nothing of it is served.
            joined.ports.clear();
            return self.keep(joined);
        }
        let label = first_label(entry);
        let named = label.and_then(|label| self.candidates_by_label.get(&label));
        let size = if entry.selector.is_some() {
            let candidates = named.into_iter().flatten();
            let candidates = candidates.filter_map(|name| self.candidates.get(name));
            most_endpoints(candidates.flat_map(|candidate| &candidate.backends))
        } else {
            let hosts = match entry.entry.resolution {
                EntryResolution::Hosts => entry.entry.hosts.len(),
                _ => 0,
            };
            most_endpoints(&entry.entry.backends) + hosts * ADDRESSES_MAX
        };
        let size = size * entry.entry.ports.len();
        let why = || {
            format!(
                "has none of its endpoints, so connections to it are refused: the entries of namespace {} have more than \
                 {ENDPOINTS_MAX} endpoints together, each counted for each port. Name or select fewer",
                name.namespace()
            )
        };
        if !self.endpoints.put(&name_of, size, why) {
            let mut joined = without_endpoints(&entry.entry);
            joined.ranges = ranges(entry);
            // The hosts are not its endpoints either.
            joined.resolution = EntryResolution::Static;
            return self.keep(joined);
        }
        let Some(wanted) = &entry.selector else {
            if let Some(mut entry) = self.selecting.remove(name) {
                entry.entry.ranges = ranges(&entry);
                self.keep(entry.entry);
            }
            return;
        };
        let mut joined = without_endpoints(&entry.entry);
        joined.ranges = ranges(entry);
        let all = named.into_iter().flatten();
        let all = all.filter_map(|name| self.candidates.get(name));
        let chosen = all.filter(|candidate| {
            let mut wanted = wanted.iter();
            wanted.all(|(key, value)| candidate.labels.get(key) == Some(value))
        });
        joined.backends = chosen.flat_map(|chosen| chosen.backends.clone()).collect();
        joined.backends.sort_unstable();
        joined.backends.dedup_by(|a, b| {
            Backend {
                local: b.local,
                ..a.clone()
            } == *b
        });
        self.keep(joined);
    }

    /// Puts an entry into the view, and shares it with the view before if it is the same.
    fn keep(&mut self, mut entry: Entry) {
        entry.preference[1] = self.preferred_in(entry.name.namespace());
        if self
            .joined
            .get(&entry.name)
            .is_none_or(|known| **known != entry)
        {
            self.joined.insert(entry.name.clone(), Arc::new(entry));
        }
    }

    fn forget(&mut self, name: &EntryName) {
        self.naming.remove(name);
        self.dirty.remove(name);
        let entry = self.selecting.remove(name);
        if let Some(label) = entry.as_ref().and_then(first_label)
            && let Some(named) = self.by_label.get_mut(&label)
        {
            named.remove(name);
            if named.is_empty() {
                self.by_label.remove(&label);
            }
        }
    }
}

/// At how many addresses an entry is served at most, each counted for each of its ports.
fn how_many_addresses(entry: &ServiceEntry) -> usize {
    let ServiceEntry { entry, ranges, .. } = entry;
    let sizes = ranges.iter().map(|range| {
        let bits = range.max_prefix_len() - range.prefix_len();
        1usize.checked_shl(bits.into()).unwrap_or(usize::MAX)
    });
    let sum = sizes.fold(0, usize::saturating_add);
    let all = sum.saturating_add(entry.addresses.len() + 2 * entry.hosts.len());
    all.saturating_mul(entry.ports.len().max(1))
}

/// The addresses of an entry's ranges, each once, without those that it names by themselves.
fn ranges(entry: &ServiceEntry) -> SmallVec<[IpAddr; 0]> {
    let mut seen: HashSet<IpAddr> = entry.entry.addresses.iter().copied().collect();
    let all = entry.ranges.iter().flat_map(addresses_of);
    all.filter(|ip| seen.insert(*ip)).collect()
}

/// How many endpoints these are at most, whatever addresses names have.
fn most_endpoints<'a>(backends: impl IntoIterator<Item = &'a Backend>) -> usize {
    let each = backends.into_iter().map(|backend| match backend.at {
        At::Address(_) => 1,
        At::Name(_) => ADDRESSES_MAX,
    });
    each.sum()
}

/// An entry as it is without its endpoints.
fn without_endpoints(entry: &Entry) -> Entry {
    Entry {
        backends: Vec::new(),
        name: entry.name.clone(),
        hosts: entry.hosts.clone(),
        addresses: entry.addresses.clone(),
        ranges: entry.ranges.clone(),
        export_to: entry.export_to.clone(),
        ports: entry.ports.clone(),
        ..*entry
    }
}

/// The first label that an entry asks for; none if it has no selector.
fn first_label(entry: &ServiceEntry) -> Option<LabelIn> {
    let (key, value) = entry.selector.as_ref()?.first_key_value()?;
    let namespace = entry.entry.name.namespace();
    Some((namespace.into(), key.as_str().into(), value.as_str().into()))
}

fn selection_label(name: &ServiceName, selection: &Selection) -> Option<LabelIn> {
    let (key, value) = selection.labels.first()?.clone();
    Some((name.namespace().into(), key, value))
}

fn labels(candidate: &Candidate) -> impl Iterator<Item = LabelIn> + use<> {
    let namespace: Box<str> = candidate.name.1.namespace().into();
    let labels = candidate.labels.clone().into_iter();
    labels.map(move |(key, value)| (namespace.clone(), key.into(), value.into()))
}
