//! Collects objects from files for a snapshot.

use std::{
    collections::{BTreeMap, HashMap, btree_map},
    path::PathBuf,
    sync::Arc,
};

use model::{
    Grant, Gravity, Node, PodAddresses, Preference, Problem, Route, RouteName, Service,
    ServiceName, Snapshot, Workload, WorkloadName,
};
use smallvec::SmallVec;

use super::{
    Errors, Loaded,
    document::{Body, Entry},
    faults::{Faults, Origin},
    files,
    parse::{self, Format},
    whereabouts::Whereabouts,
};
use crate::objects::{
    ByIstio, Candidate, Entries, Joins, NamespaceRules, NodeFacts, Outcome, ServiceEntry, Slice,
    Sources,
};

/// The objects that were read.
pub struct Stage<'a> {
    node: &'a Node,
    files: Vec<PathBuf>,
    /// Services without their endpoints. `None` if left to others. Each has its final place in memory from the start,
    /// because a table of a hundred thousand services by value would be copied as it grows.
    services: BTreeMap<ServiceName, (Option<Arc<Service>>, Origin)>,
    by_istio: HashMap<ServiceName, ByIstio>,
    slices: Vec<Slice>,
    slice_origins: HashMap<ServiceName, Origin>,
    whereabouts: Whereabouts,
    /// This node's own object.
    node_object: Option<(NodeFacts, Origin)>,
    pods: HashMap<ServiceName, Origin>,
    /// Host ports of the pods on this node, with their endpoints.
    host_ports: BTreeMap<ServiceName, Arc<Service>>,
    workloads: BTreeMap<WorkloadName, Workload>,
    namespaces: HashMap<Arc<str>, (NamespaceRules, Origin)>,
    /// `None` if the entry is invalid; then its former state stays.
    entries: HashMap<ServiceName, (Option<Box<ServiceEntry>>, Origin)>,
    workload_entries: HashMap<ServiceName, Origin>,
    /// Pods and WorkloadEntries that entries may select.
    candidates: Vec<Candidate>,
    /// `None` if the route is not attached to a Service, or is invalid (true); then its former state stays.
    routes: BTreeMap<RouteName, (Option<Arc<Route>>, bool, Origin)>,
    /// `None` if the grant is invalid; then its former state stays.
    grants: BTreeMap<ServiceName, (Option<Arc<Grant>>, Origin)>,
    ignored: BTreeMap<String, usize>,
    left_alone: usize,
    problems: Vec<Problem>,
    faults: Faults,
}

impl<'a> Stage<'a> {
    /// Returns an empty stage for this node.
    pub fn new(node: &'a Node) -> Self {
        Self {
            node,
            files: Vec::new(),
            services: BTreeMap::new(),
            by_istio: HashMap::new(),
            slices: Vec::new(),
            slice_origins: HashMap::new(),
            whereabouts: Whereabouts::default(),
            node_object: None,
            pods: HashMap::new(),
            host_ports: BTreeMap::new(),
            workloads: BTreeMap::new(),
            namespaces: HashMap::new(),
            entries: HashMap::new(),
            workload_entries: HashMap::new(),
            candidates: Vec::new(),
            routes: BTreeMap::new(),
            grants: BTreeMap::new(),
            ignored: BTreeMap::new(),
            left_alone: 0,
            problems: Vec::new(),
            faults: Faults::default(),
        }
    }

    /// Adds a file or directory that cannot be read.
    pub fn unreadable(&mut self, path: PathBuf, text: String) {
        self.faults.whole(path, text);
    }

    /// Reads a file.
    pub fn file(&mut self, path: PathBuf) {
        let text = match files::read(&path) {
            Ok(text) => text,
            Err(wrong) => return self.unreadable(path, wrong),
        };
        let format = Format::of(&path);
        let documents = parse::documents(&text, format);
        if documents.is_empty() {
            return self.unreadable(path, "empty; expected at least one object".into());
        }
        let file = index(self.files.len());
        self.files.push(path);
        let mut entries = Vec::new();
        for (number, text) in documents.into_iter().enumerate() {
            let document = Origin {
                file,
                document: index(number),
                item: None,
            };
            let result = parse::parse(text, format, self.node, &mut entries);
            for entry in entries.drain(..) {
                self.entry(entry, document);
            }
            if let Err(stop) = result {
                self.faults.stop(document, stop);
            }
        }
    }

    fn entry(&mut self, entry: Entry, document: Origin) {
        let origin = Origin {
            item: entry.item.map(index),
            ..document
        };
        let object = entry.label();
        let stays = matches!(
            entry.body,
            Body::ServiceEntry(_) | Body::WorkloadEntry(_) | Body::Route(..) | Body::Grant(_)
        );
        let is_faulty = !entry.findings.faults.is_empty();
        for (field, text) in entry.findings.faults {
            if stays {
                let text =
                    format!("{field}: {text}; it stays as it was before, if it was ever served");
                self.problem(Gravity::NotFollowed, origin, object.as_deref(), text);
            } else {
                self.faults.field(origin, &field, object.clone(), text);
            }
        }
        for (field, text) in entry.findings.notes {
            let text = format!("{field}: {text}");
            self.problem(Gravity::Warning, origin, object.as_deref(), text);
        }
        // The missing name is already reported. Two objects without a name are not the same object.
        let named = object.is_some();
        match entry.body {
            Body::Service(outcome, by_istio) => {
                if by_istio != ByIstio::default() {
                    self.by_istio.insert(entry.name.clone(), by_istio);
                }
                let service = match outcome {
                    Outcome::Served(service) => {
                        self.left_alone += usize::from(service.records.is_elsewhere());
                        Some(Arc::new(service))
                    }
                    Outcome::LeftAlone => {
                        self.left_alone += 1;
                        None
                    }
                };
                match self.services.entry(entry.name) {
                    btree_map::Entry::Vacant(vacant) => _ = vacant.insert((service, origin)),
                    btree_map::Entry::Occupied(first) if named => {
                        self.faults.twice(origin, object, first.get().1);
                    }
                    btree_map::Entry::Occupied(_) => {}
                }
            }
            Body::Slice(outcome, elsewhere) => {
                self.whereabouts.slice(&outcome, elsewhere);
                if let Some(first) = self.slice_origins.insert(entry.name, origin)
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
                match outcome {
                    Outcome::LeftAlone => self.left_alone += 1,
                    Outcome::Served(slice) => self.slices.push(slice),
                }
            }
            Body::Node(facts) if *facts.name == *self.node.name => match &self.node_object {
                None => self.node_object = Some((facts, origin)),
                Some((_, first)) if named => self.faults.twice(origin, object, *first),
                Some(_) => {}
            },
            Body::Pod(services, workload, candidate) => {
                self.candidates
                    .extend(candidate.map(|candidate| *candidate));
                if let Some(first) = self.pods.insert(entry.name, origin)
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
                self.whereabouts.here |= !services.is_empty();
                let services = services.into_iter();
                let services = services.map(|service| (service.name.clone(), Arc::new(service)));
                self.host_ports.extend(services);
                if let Some(workload) = workload {
                    self.workloads.insert(workload.name.clone(), *workload);
                }
            }
            Body::Namespace(found) => {
                let name = Arc::clone(&found.name);
                if let Some((_, first)) = self.namespaces.insert(name, (*found, origin))
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
            }
            Body::ServiceEntry(found) => {
                if let Some((_, first)) = self.entries.insert(entry.name, (found, origin))
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
            }
            Body::WorkloadEntry(candidate) => {
                self.candidates
                    .extend(candidate.map(|candidate| *candidate));
                if let Some(first) = self.workload_entries.insert(entry.name, origin)
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
            }
            Body::Route(kind, route) => {
                let name = RouteName {
                    namespace: entry.name.namespace().into(),
                    name: entry.name.name().into(),
                    kind,
                };
                let route = route.map(Arc::from);
                if let Some((.., first)) = self.routes.insert(name, (route, is_faulty, origin))
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
            }
            Body::Grant(grant) => {
                let grant = grant.map(Arc::from);
                if let Some((_, first)) = self.grants.insert(entry.name, (grant, origin))
                    && named
                {
                    self.faults.twice(origin, object, first);
                }
            }
            Body::Ignored(kind) => *self.ignored.entry(kind).or_default() += 1,
            // Facts of other nodes do not matter to this node.
            Body::Node(other) => self.whereabouts.node(&other.name),
            Body::Unknown => {}
        }
    }

    /// Adds a problem of an object that is left out or has no effect.
    fn problem(&mut self, gravity: Gravity, origin: Origin, object: Option<&str>, text: String) {
        let file = self.files[origin.file as usize].display();
        let place = object.map_or_else(|| file.to_string(), |o| format!("{file}: {o}"));
        self.problems.push(Problem {
            gravity,
            place,
            text,
        });
    }

    /// Returns facts from this node's own object, if there is one.
    pub fn node_facts(&self) -> Option<&NodeFacts> {
        self.node_object.as_ref().map(|(facts, _)| facts)
    }

    /// Returns whether there is a fault.
    pub fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Joins services and slices. Returns all faults if there are any.
    pub fn finish(mut self, previous: &Snapshot, node: &Node) -> Result<Loaded, Errors> {
        self.slices
            .sort_unstable_by(|a, b| (&a.service, &a.name).cmp(&(&b.service, &b.name)));
        if !self.faults.is_empty() {
            return Err(self.faults.place(&self.files));
        }
        self.orphans();
        let unknown = self.whereabouts.problem(self.node);
        self.problems
            .extend(unknown.filter(|_| self.node_object.is_none()));
        let unread = self.services.iter().filter(|(_, (of, _))| of.is_none());
        let unread = unread
            .map(|(name, _)| Arc::from(name.namespace()))
            .collect();
        let mut services = previous.services.clone();
        let gone: Vec<_> = previous
            .services
            .keys()
            .filter(|name| !self.is_served(name))
            .cloned()
            .collect();
        for name in gone {
            services.remove(&name);
        }
        let mut entries = Entries::like(previous.entries.clone());
        for name in previous.entries.keys() {
            let name_of = ServiceName::new(name.namespace(), name.name());
            if !self.entries.contains_key(&name_of) {
                entries.remove(name);
            }
        }
        for candidate in self.candidates {
            entries.put_candidate(candidate);
        }
        for (name, (namespace, _)) in &self.namespaces {
            entries.prefer(name, namespace.preference);
        }
        let mut joins = Joins::default();
        let mut slices = self.slices.into_iter().peekable();
        for (name, (service, _)) in self.services {
            let own: SmallVec<[Slice; 2]> =
                std::iter::from_fn(|| slices.next_if(|slice| slice.service == name)).collect();
            let Some(mut service) = service else { continue };
            let by_istio = self.by_istio.remove(&name).unwrap_or_default();
            entries.put_service(&name, by_istio.selection);
            let preference = by_istio.preference;
            let preference = preference.or_else(|| entries.preferred_in(name.namespace()));
            let sources = Sources {
                slices: &own,
                selected: &entries.slices(&name),
                names: true,
                preference: preference.unwrap_or(Preference::Any),
            };
            joins.join(Arc::make_mut(&mut service), sources);
            if services.get(&name).is_none_or(|known| *known != service) {
                services.insert(name, service);
            }
        }
        for (name, service) in self.host_ports {
            if services.get(&name).is_none_or(|known| *known != service) {
                services.insert(name, service);
            }
        }
        for (entry, _) in self.entries.into_values() {
            if let Some(entry) = entry {
                entries.put(*entry);
            }
        }
        let all_entries = entries.view();
        self.problems.extend(entries.problems().cloned());
        self.problems.extend(joins.problems().cloned());
        self.problems.sort();
        let mut workloads = previous.workloads.clone();
        let gone = |name: &&WorkloadName| !self.workloads.contains_key(*name);
        for name in previous.workloads.keys().filter(gone) {
            workloads.remove(name);
        }
        for (name, mut workload) in self.workloads {
            if let Some((namespace, _)) = self.namespaces.get(name.namespace()) {
                Arc::make_mut(&mut workload.rules).namespace = namespace.rules.clone();
            }
            if workloads.get(&name).is_none_or(|known| **known != workload) {
                workloads.insert(name, Arc::new(workload));
            }
        }
        let mut routes = imbl::OrdMap::new();
        for (name, (route, is_faulty, _)) in self.routes {
            let known = previous.routes.get(&name);
            let route = match route {
                Some(route) => Some(kept_arc(known, route)),
                None => known.filter(|_| is_faulty).cloned(),
            };
            routes.extend(route.map(|route| (name, route)));
        }
        let mut grants = imbl::OrdMap::new();
        for (name, (grant, _)) in self.grants {
            let known = previous.grants.get(&name);
            let grant = match grant {
                Some(grant) => Some(kept_arc(known, grant)),
                None => known.cloned(),
            };
            grants.extend(grant.map(|grant| (name, grant)));
        }
        let snapshot = Snapshot {
            services,
            entries: all_entries,
            routes,
            grants,
            workloads,
            cluster: Arc::clone(&previous.cluster),
            whole: true,
            unread,
            namespaces: None,
            reachable: previous.reachable.clone(),
            pods: PodAddresses::default(),
            node: kept(&previous.node, node, || Arc::new(node.clone())),
            problems: kept(&previous.problems, &*self.problems, || {
                self.problems.as_slice().into()
            }),
        };
        Ok(Loaded {
            snapshot,
            facts: self.node_object.map(|(facts, _)| facts),
            ignored: self.ignored,
            left_alone: self.left_alone,
            files: self.files.len(),
        })
    }

    fn is_served(&self, name: &ServiceName) -> bool {
        matches!(self.services.get(name), Some((Some(_), _))) || self.host_ports.contains_key(name)
    }

    /// Removes slices without a service.
    fn orphans(&mut self) {
        let is_orphan = |slice: &mut Slice| !self.services.contains_key(&slice.service);
        for slice in self.slices.extract_if(.., is_orphan) {
            if let Some(origin) = self.slice_origins.get(&slice.name) {
                let file = self.files[origin.file as usize].display();
                self.problems.push(Problem {
                    gravity: Gravity::Warning,
                    place: format!("{file}: EndpointSlice {}", slice.name),
                    text: slice.orphan(),
                });
            }
        }
    }
}

/// Returns the former object if it is equal.
fn kept<T: PartialEq + ?Sized>(old: &Arc<T>, new: &T, make: impl FnOnce() -> Arc<T>) -> Arc<T> {
    if **old == *new { old.clone() } else { make() }
}

/// Returns the former object if it is equal.
fn kept_arc<T: PartialEq>(old: Option<&Arc<T>>, new: Arc<T>) -> Arc<T> {
    old.filter(|old| ***old == *new).cloned().unwrap_or(new)
}

fn index(number: usize) -> u32 {
    u32::try_from(number).expect("a file of limited size has fewer objects")
}
