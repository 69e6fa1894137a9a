//! ServiceEntries with the pods and WorkloadEntries that they select, and the WorkloadEntries that Services select.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use imbl::OrdMap;
use ipnet::IpNet;
use model::{
    ADDRESSES_MAX, At, Backend, Entry, EntryName, EntryResolution, Preference, Problem,
    ServiceName, is_allocated,
};
use smallvec::SmallVec;

use super::{
    Candidate, Selection, ServiceEntry, Slice, Sums, addresses_of,
    by_label::{ByLabel, LabelIn},
};

/// Maximum number of endpoints of all ServiceEntries of one namespace. Each counts once for each port of its entry, as
/// in the tables. Without a bound, an object of a megabyte could need hundreds of millions of endpoints, and a thousand
/// entries that select a thousand WorkloadEntries a million.
const ENDPOINTS_MAX: usize = 100_000;

/// Maximum number of addresses of all ServiceEntries of one namespace, each counted for each port: two for each host,
/// and those that entries name. A range, which is a text of 20 bytes, counts as up to 256 addresses.
const ADDRESSES_TOGETHER: usize = 100_000;

/// Identifies a candidate: whether it is a pod, and its name.
type CandidateName = (bool, ServiceName);

/// The ServiceEntries of a source with their endpoints. The cost of a change grows with its effects.
#[derive(Debug)]
pub struct Entries {
    /// Entries with a selector, and other entries whose endpoints are not in `joined`.
    selecting: HashMap<EntryName, ServiceEntry>,
    /// Entries with a selector, by one of the labels that they ask for.
    by_label: ByLabel<EntryName>,
    /// Entries with addresses that other objects may have.
    naming: BTreeSet<EntryName>,
    candidates: HashMap<CandidateName, Candidate>,
    candidates_by_label: ByLabel<CandidateName>,
    /// The numbers of endpoints and of addresses of the entries of each namespace.
    endpoints: Sums,
    addresses: Sums,
    /// Services with a selector.
    services: HashMap<ServiceName, Box<Selection>>,
    /// Services with a selector, by one of the labels that they ask for.
    services_by_label: ByLabel<ServiceName>,
    /// Services whose WorkloadEntries may have changed.
    dirty_services: BTreeSet<ServiceName>,
    /// The numbers of endpoints that the Services of each namespace have from WorkloadEntries.
    service_endpoints: Sums,
    /// The traffic distribution of each namespace.
    preferences: HashMap<Box<str>, Preference>,
    /// Entries whose endpoints may have changed.
    dirty: BTreeSet<EntryName>,
    joined: OrdMap<EntryName, Arc<Entry>>,
}

impl Default for Entries {
    fn default() -> Self {
        Self {
            selecting: HashMap::new(),
            by_label: ByLabel::default(),
            naming: BTreeSet::new(),
            candidates: HashMap::new(),
            candidates_by_label: ByLabel::default(),
            endpoints: Sums::new("ServiceEntry", ENDPOINTS_MAX),
            addresses: Sums::new("ServiceEntry", ADDRESSES_TOGETHER),
            services: HashMap::new(),
            services_by_label: ByLabel::default(),
            dirty_services: BTreeSet::new(),
            service_endpoints: Sums::new("Service", ENDPOINTS_MAX),
            preferences: HashMap::new(),
            dirty: BTreeSet::new(),
            joined: OrdMap::new(),
        }
    }
}

impl Entries {
    /// Stores a new or changed entry.
    pub fn put(&mut self, entry: ServiceEntry) {
        let name = entry.entry.name.clone();
        self.forget(&name);
        self.by_label.insert_at_one(asked_for(&entry), &name);
        let ranges = entry.ranges.iter().map(IpNet::addr);
        let mut named = entry.entry.named_addresses().chain(ranges);
        if named.any(|address| !is_allocated(address)) {
            self.naming.insert(name.clone());
        }
        drop(named);
        self.dirty.insert(name.clone());
        self.selecting.insert(name, entry);
    }

    /// Removes an entry.
    pub fn remove(&mut self, name: &EntryName) {
        self.forget(name);
        let name_of = ServiceName::new(name.namespace(), name.name());
        self.addresses.remove(&name_of);
        self.endpoints.remove(&name_of);
        self.joined.remove(name);
    }

    /// Stores a new or changed pod or WorkloadEntry. Returns whether an entry or Service may differ.
    pub fn put_candidate(&mut self, candidate: Candidate) -> bool {
        if self.candidates.get(&candidate.name) == Some(&candidate) {
            return false;
        }
        let name = candidate.name.clone();
        self.remove_candidate(&name);
        self.touch(&candidate);
        self.candidates_by_label.insert(labels(&candidate), &name);
        self.candidates.insert(name, candidate);
        !self.dirty.is_empty() || !self.dirty_services.is_empty()
    }

    /// Marks the objects that select a pod or WorkloadEntry, because their endpoints may have changed. Services do not
    /// select pods: EndpointSlices have these endpoints.
    fn touch(&mut self, candidate: &Candidate) {
        for label in labels(candidate) {
            let entries = self.by_label.at(&label).filter(|name| {
                let entry = self.selecting.get(name);
                entry.is_some_and(|entry| selects(entry, candidate))
            });
            self.dirty.extend(entries.cloned());
            if !candidate.name.0 {
                let services = self.services_by_label.at(&label).filter(|name| {
                    let selection = self.services.get(name);
                    selection.is_some_and(|selection| selection.selects(candidate))
                });
                self.dirty_services.extend(services.cloned());
            }
        }
    }

    /// Stores a new or changed Service. The caller must ask for its endpoints again in any case.
    pub fn put_service(&mut self, name: &ServiceName, selection: Option<Box<Selection>>) {
        let Some(selection) = selection else {
            return self.remove_service(name);
        };
        // It keeps its part of what its namespace may have.
        if self.services.get(name) != Some(&selection) {
            self.forget_selection(name);
            let labels = selection.labels_in(name.namespace());
            self.services_by_label.insert_at_one(labels, name);
            self.services.insert(name.clone(), selection);
        }
    }

    /// Removes a Service.
    pub fn remove_service(&mut self, name: &ServiceName) {
        self.service_endpoints.remove(name);
        self.forget_selection(name);
    }

    fn forget_selection(&mut self, name: &ServiceName) {
        if let Some(gone) = self.services.remove(name) {
            let labels = gone.labels_in(name.namespace());
            self.services_by_label.remove(labels, name);
        }
    }

    /// Returns the Services that select WorkloadEntries which were added, changed or removed since the last call, or for
    /// whose WorkloadEntries there may be room since then.
    pub fn take_dirty_services(&mut self) -> BTreeSet<ServiceName> {
        let mut all = std::mem::take(&mut self.dirty_services);
        all.extend(self.service_endpoints.take_hopeful());
        all
    }

    /// Returns the WorkloadEntries that a Service selects, each as a slice of the Service.
    pub fn slices(&mut self, name: &ServiceName) -> Vec<Slice> {
        let Some(selection) = self.services.get(name) else {
            return Vec::new();
        };
        let labels = selection.labels_in(name.namespace());
        let named = self.candidates_by_label.at_rarest(labels);
        let named = named.filter(|(pod, _)| !pod);
        let chosen = named
            .filter_map(|name| self.candidates.get(name))
            .filter(|candidate| selection.selects(candidate));
        let slices: Vec<Slice> = chosen
            .filter_map(|candidate| selection.slice(name, candidate))
            .collect();
        let size = slices.len() * selection.ports();
        let why = || {
            format!(
                "has none of the WorkloadEntries that it selects: the Services of namespace {} select more than \
                 {ENDPOINTS_MAX} together, each counted for each port. Select fewer",
                name.namespace()
            )
        };
        if self.service_endpoints.put(name, size, why) {
            slices
        } else {
            Vec::new()
        }
    }

    /// Sets the traffic distribution of the entries in a namespace. Returns whether it has changed.
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

    /// Returns the traffic distribution of the services in a namespace.
    pub fn preferred_in(&self, namespace: &str) -> Option<Preference> {
        self.preferences.get(namespace).copied()
    }

    /// Removes a pod or WorkloadEntry. Returns whether an entry or Service may differ.
    pub fn remove_candidate(&mut self, name: &CandidateName) -> bool {
        let Some(candidate) = self.candidates.remove(name) else {
            return false;
        };
        self.touch(&candidate);
        self.candidates_by_label.remove(labels(&candidate), name);
        !self.dirty.is_empty() || !self.dirty_services.is_empty()
    }

    /// Returns whether an entry selects pods, on any node.
    pub fn select(&self) -> bool {
        !self.by_label.is_empty()
    }

    /// Returns whether an entry has addresses that a Pod or a node may have.
    pub fn name_addresses(&self) -> bool {
        !self.naming.is_empty()
    }

    /// Returns the entries with their endpoints.
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

    /// Reports entries and services without endpoints or addresses, because their namespace has too many.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        let of_entries = self.addresses.problems().chain(self.endpoints.problems());
        of_entries.chain(self.service_endpoints.problems())
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
            // An entry without ports is not served.
            joined.ports.clear();
            return self.keep(joined);
        }
        let named = self.candidates_by_label.at_rarest(asked_for(entry));
        let all = named.filter_map(|name| self.candidates.get(name));
        let chosen: Vec<_> = all.filter(|candidate| selects(entry, candidate)).collect();
        let size = if entry.selector.is_some() {
            most_endpoints(chosen.iter().flat_map(|candidate| &candidate.backends))
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
            // The hosts must not become the endpoints either.
            joined.resolution = EntryResolution::Static;
            return self.keep(joined);
        }
        if entry.selector.is_none() {
            if let Some(mut entry) = self.selecting.remove(name) {
                entry.entry.ranges = ranges(&entry);
                self.keep(entry.entry);
            }
            return;
        }
        let mut joined = without_endpoints(&entry.entry);
        joined.ranges = ranges(entry);
        let chosen = chosen.into_iter();
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

    /// Puts an entry into the view. Shares it with the view before if it is equal.
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
        if let Some(entry) = self.selecting.remove(name) {
            self.by_label.remove(asked_for(&entry), name);
        }
    }
}

/// Returns the maximum number of addresses of an entry, each counted for each of its ports.
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

/// Returns the addresses of an entry's ranges, each once, without those that the entry names singly.
fn ranges(entry: &ServiceEntry) -> SmallVec<[IpAddr; 0]> {
    let mut seen: HashSet<IpAddr> = entry.entry.addresses.iter().copied().collect();
    let all = entry.ranges.iter().flat_map(addresses_of);
    all.filter(|ip| seen.insert(*ip)).collect()
}

/// Returns the maximum number of endpoints, for any number of addresses of their names.
fn most_endpoints<'a>(backends: impl IntoIterator<Item = &'a Backend>) -> usize {
    let each = backends.into_iter().map(|backend| match backend.at {
        At::Address(_) => 1,
        At::Name(_) => ADDRESSES_MAX,
    });
    each.sum()
}

/// Returns an entry without its endpoints.
fn without_endpoints(entry: &Entry) -> Entry {
    Entry {
        backends: Vec::new(),
        name: entry.name.clone(),
        hosts: entry.hosts.clone(),
        addresses: entry.addresses.clone(),
        ranges: entry.ranges.clone(),
        export_to: entry.export_to.clone(),
        identities: entry.identities.clone(),
        ports: entry.ports.clone(),
        ..*entry
    }
}

/// Returns the labels that an entry asks for; none if it has no selector.
fn asked_for(entry: &ServiceEntry) -> impl Iterator<Item = LabelIn> + use<'_> {
    let labels = entry.selector.iter().flatten();
    let namespace = entry.entry.name.namespace();
    labels.map(|(key, value)| (namespace.into(), key.as_str().into(), value.as_str().into()))
}

/// Returns whether an entry with a selector selects a pod or WorkloadEntry of its namespace.
fn selects(entry: &ServiceEntry, candidate: &Candidate) -> bool {
    let mut wanted = entry.selector.iter().flatten();
    wanted.all(|(key, value)| candidate.labels.get(key) == Some(value))
}

fn labels(candidate: &Candidate) -> impl Iterator<Item = LabelIn> + use<> {
    let namespace: Box<str> = candidate.name.1.namespace().into();
    let labels = candidate.labels.clone().into_iter();
    labels.map(move |(key, value)| (namespace.clone(), key.into(), value.into()))
}
