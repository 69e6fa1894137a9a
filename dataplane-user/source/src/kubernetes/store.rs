//! Stores objects, and combines them into views.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use model::{
    EntryName, Grant, Gravity, Node, Preference, Problem, Route, RouteName, Service, ServiceName,
};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Kind, Patience, Scope,
    follow::Message,
    kind::{Body, Object, WantedKinds},
    orphans::Orphans,
    pods::{self, Pods},
    sight::Perspective,
};
use crate::{
    View,
    objects::{self, Candidate, Entries, Findings, Joins, NodeFacts, Slice},
    turns::Turns,
};

/// Maximum number of endpoints, each counted for each port of a slice, that services of one namespace gain in one view.
/// The others wait for the next view.
const ENDPOINTS_AT_ONCE: u64 = 1 << 17;

/// The known objects.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own, and all of their combinations can be"
)]
pub struct Store {
    /// This node, without the facts of its object.
    base: Arc<Node>,
    wanted: WantedKinds,
    facts: NodeFacts,
    /// The services of the last view.
    services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// The changes for the next view.
    pending: BTreeMap<ServiceName, Change>,
    /// The order of those changes. A view has a limit of work.
    turns: Turns<ServiceName>,
    /// Slices by the service that they name, whether the service exists or not.
    slices: HashMap<ServiceName, SmallVec<[Slice; 1]>>,
    /// The service that each slice names.
    named: HashMap<ServiceName, ServiceName>,
    joins: Joins,
    pods: Pods,
    entries: Entries,
    /// The traffic distribution that the services' own annotations ask for.
    preferences: HashMap<ServiceName, Preference>,
    routes: imbl::OrdMap<RouteName, Arc<Route>>,
    grants: imbl::OrdMap<ServiceName, Arc<Grant>>,
    problems: BTreeMap<(Kind, ServiceName), Vec<Problem>>,
    problems_seen: Arc<[Problem]>,
    orphans: Orphans,
    /// Whether this node's own object was ever found.
    node_seen: bool,
    /// The objects of the list that is being read.
    listing: HashMap<Kind, HashSet<ServiceName>>,
    /// Kinds that were listed completely.
    listed: BTreeSet<Kind>,
    /// Whether the pods of all nodes were listed.
    everywhere: bool,
    /// Whether a view was returned.
    told: bool,
    /// Kinds that the server refuses, and without which the agent continues.
    refused: BTreeSet<Kind>,
    changed: bool,
    since: Option<Instant>,
}

/// A change of a service.
enum Change {
    /// A new state, without endpoints.
    Put(Arc<Service>),
    /// A new state that needs no slices.
    Whole(Arc<Service>),
    /// The same state with other endpoints.
    Join,
    /// The removal.
    Remove,
}

impl Store {
    /// Returns a store without objects.
    pub fn new(base: Arc<Node>, wanted: WantedKinds, patience: Patience) -> Self {
        Self {
            base,
            wanted,
            facts: NodeFacts::default(),
            services: imbl::OrdMap::new(),
            pending: BTreeMap::new(),
            turns: Turns::default(),
            slices: HashMap::new(),
            named: HashMap::new(),
            joins: Joins::default(),
            pods: Pods::default(),
            entries: Entries::default(),
            preferences: HashMap::new(),
            routes: imbl::OrdMap::new(),
            grants: imbl::OrdMap::new(),
            problems: BTreeMap::new(),
            problems_seen: Arc::default(),
            orphans: Orphans::new(patience.orphan),
            node_seen: false,
            listing: HashMap::new(),
            listed: BTreeSet::new(),
            everywhere: false,
            told: false,
            refused: BTreeSet::new(),
            changed: false,
            since: None,
        }
    }

    /// Applies a message.
    pub fn take(&mut self, message: Message) {
        match message {
            Message::Begin(kind) => _ = self.listing.insert(kind, HashSet::new()),
            Message::Put(kind, object, at) => {
                let listing = self.listing.get_mut(&kind);
                let listed = listing.map(|listing| listing.insert(object.name.clone()));
                if self.put(kind, object) {
                    self.changed = true;
                    if listed.is_none() {
                        self.since.get_or_insert(at);
                    }
                }
            }
            Message::Gone(kind, object, at) => {
                self.since.get_or_insert(at);
                self.remove(kind, &object.name);
            }
            Message::End(kind, sight) => {
                if let Some(seen) = self.listing.remove(&kind) {
                    self.keep(kind, &seen);
                }
                self.changed |= self.listed.insert(kind);
                if kind == Kind::Pod {
                    self.changed |= self.everywhere != sight.everywhere;
                    self.everywhere = sight.everywhere;
                }
            }
            Message::Back => self.changed = true,
            Message::Refused(kind, why) => self.refuse(kind, why),
        }
    }

    /// Returns the perspective: this node with the facts of its object, once they are known, as far as slices depend on
    /// them; and whether the pods of all nodes are wanted.
    pub fn eyes(&mut self) -> Perspective {
        let node = || Node {
            leaving: None,
            ..self.facts.applied_to(&self.base)
        };
        Perspective {
            node: self.listed.contains(&Kind::Node).then(|| Arc::new(node())),
            everywhere: self.wants_everywhere(),
        }
    }

    /// Returns whether the pods of all nodes are wanted.
    fn wants_everywhere(&mut self) -> bool {
        let scope = self.wanted.scope;
        scope >= Scope::Registry
            || scope >= Scope::Mesh && self.pods.denies()
            || self.entries.select()
            || self.entries.name_addresses()
    }

    /// Returns a view if there is a change, and if every kind was read once.
    pub fn view(&mut self) -> Option<View> {
        let mut kinds = Kind::ALL.iter().filter(|kind| self.wanted.includes(**kind));
        let known = |kind| self.listed.contains(kind) || self.refused.contains(kind);
        if !self.changed || !kinds.all(known) {
            return None;
        }
        // The first view waits for the pods of all nodes, so that the destinations that an earlier agent allowed do not
        // disappear. Later views do not wait.
        if !self.told
            && !self.refused.contains(&Kind::Pod)
            && self.wants_everywhere()
            && !self.everywhere
        {
            return None;
        }
        let is_first = !std::mem::replace(&mut self.told, true);
        for name in self.entries.take_dirty_services() {
            self.join(&name);
        }
        for (name, change) in self.take_pending(is_first) {
            self.settle(&name, change);
            let alone = self.slices.contains_key(&name) && !self.services.contains_key(&name);
            self.orphans.note(name, alone);
        }
        for name in self.joins.take_hopeful() {
            self.join(&name);
        }
        self.changed = self.is_behind();
        let orphans = self.orphans.told().filter(|service| {
            // A Service that cannot be read exists.
            !self
                .problems
                .contains_key(&(Kind::Service, (*service).clone()))
        });
        let orphans = orphans.filter_map(|service| self.slices.get(service));
        let orphans = orphans.flatten().map(|slice| Problem {
            gravity: Gravity::Warning,
            place: format!("{} {}", Kind::Slice.word(), slice.name),
            text: slice.orphan(),
        });
        let entries = self.entries.view();
        let problems: Vec<Problem> = self
            .problems
            .values()
            .flatten()
            .chain(self.entries.problems())
            .chain(self.joins.problems())
            .cloned()
            .chain(orphans)
            .collect();
        if *self.problems_seen != *problems {
            self.problems_seen = problems.into();
        }
        // Without permission to read pods, there may be further pods.
        let everywhere = self.everywhere && !self.refused.contains(&Kind::Pod);
        Some(View {
            services: self.services.clone(),
            entries,
            routes: self.routes.clone(),
            grants: self.grants.clone(),
            workloads: self.pods.workloads(),
            pods: self.pods.addresses(everywhere),
            whole: self.wanted.names,
            unread: self.unread(),
            namespaces: self.all_namespaces(),
            node: Some(self.facts.clone()),
            problems: Arc::clone(&self.problems_seen),
            since: self.since.take().map(Instant::into_std),
        })
    }

    /// Returns the next changes of services, or all of them if `all` is set.
    fn take_pending(&mut self, all: bool) -> Vec<(ServiceName, Change)> {
        if all {
            return std::mem::take(&mut self.pending).into_iter().collect();
        }
        for (name, change) in &self.pending {
            let slices = self.slices.get(name).into_iter().flatten();
            let endpoints = slices.map(|slice| slice.ports.len() * slice.endpoints.len());
            let cost = (1 + endpoints.sum::<usize>()) as u64;
            let stays = !matches!(change, Change::Remove);
            self.turns.put(name.namespace(), name, cost, stays);
        }
        let next = self.turns.take(ENDPOINTS_AT_ONCE).into_iter();
        let next = next.filter_map(|name| self.pending.remove_entry(&name));
        next.collect()
    }

    /// Returns whether changes of services wait for the next view, which should then be taken soon.
    pub fn is_behind(&self) -> bool {
        self.told && !self.pending.is_empty()
    }

    /// Returns the namespaces in which a Service or a slice cannot be read, or waits: a name there may exist although
    /// it is not known.
    fn unread(&self) -> imbl::OrdSet<Arc<str>> {
        let is_unread = |kind: Kind, problems: &[Problem]| {
            let mut problems = problems.iter();
            matches!(kind, Kind::Service | Kind::Slice)
                && problems.any(|problem| problem.gravity != Gravity::Warning)
        };
        let problems = self.problems.iter();
        let unread = problems.filter(|((kind, _), problems)| is_unread(*kind, problems));
        let unread = unread.map(|((_, name), _)| name.namespace());
        unread
            .chain(self.turns.namespaces())
            .map(Arc::from)
            .collect()
    }

    /// Returns all namespaces, if names need them.
    fn all_namespaces(&self) -> Option<imbl::OrdSet<Arc<str>>> {
        let known = self.wanted.names
            && self.listed.contains(&Kind::Namespace)
            && !self.refused.contains(&Kind::Namespace);
        known.then(|| self.pods.namespace_names.clone())
    }

    fn settle(&mut self, name: &ServiceName, change: Change) {
        let mut service = match change {
            Change::Put(service) => service,
            Change::Whole(service) => return self.serve(name, service),
            Change::Join => match self.services.get(name) {
                Some(service) => Arc::clone(service),
                None => return,
            },
            Change::Remove => {
                self.services.remove(name);
                self.joins.remove(name);
                return;
            }
        };
        let slices = self.slices.get(name).map_or(&[][..], SmallVec::as_slice);
        let selected = self.entries.slices(name);
        let preference = self.preferences.get(name).copied();
        let preference = preference.or_else(|| self.entries.preferred_in(name.namespace()));
        let sources = objects::Sources {
            slices,
            selected: &selected,
            names: self.wanted.names,
            preference: preference.unwrap_or(Preference::Any),
        };
        self.joins.join(Arc::make_mut(&mut service), sources);
        self.serve(name, service);
    }

    /// Returns the time at which a missing Service of a slice must be reported. `None` if none is missing.
    pub fn due(&self) -> Option<Instant> {
        self.orphans.due()
    }

    /// Reports the missing Services whose time has come.
    pub fn pass_time(&mut self) {
        self.changed |= self.orphans.tell(Instant::now());
    }

    fn serve(&mut self, name: &ServiceName, service: Arc<Service>) {
        let known = self.services.get(name);
        if known.is_none_or(|known| *known != service) {
            self.services.insert(name.clone(), service);
        }
    }

    /// Records changes of services that are host ports.
    fn host_ports(&mut self, changes: Vec<pods::Change>) {
        let changes = changes.into_iter();
        self.pending.extend(changes.map(|(name, service)| {
            let change = service.map_or(Change::Remove, Change::Whole);
            (name, change)
        }));
    }

    /// Records that a kind cannot be read, or can be read again.
    fn refuse(&mut self, kind: Kind, why: Option<String>) {
        self.changed = true;
        let key = (kind, no_object());
        let Some(why) = why else {
            self.refused.remove(&kind);
            self.problems.remove(&key);
            return;
        };
        self.refused.insert(kind);
        let without = if self.listed.contains(&kind) {
            "the agent serves the state that it read before, without later changes"
        } else {
            kind.without().unwrap_or_default()
        };
        let problem = Problem {
            gravity: Gravity::Warning,
            place: "the Kubernetes API".to_owned(),
            text: format!("{kind} cannot be read, so that {without}: {why}"),
        };
        self.problems.insert(key, vec![problem]);
    }

    /// Stores an object. Returns whether the next view may differ.
    fn put(&mut self, kind: Kind, object: Object) -> bool {
        let Object {
            name,
            body,
            findings,
            ..
        } = object;
        let faulty = !findings.faults.is_empty();
        let told = self.found(kind, &name, &findings);
        // An invalid object keeps its former state. A pod decides this for each of its parts.
        if faulty && kind != Kind::Pod {
            return told;
        }
        match body {
            Body::Service(Some(service), by_istio) => {
                if self.wanted.entries {
                    self.entries.put_service(&name, by_istio.selection);
                    match by_istio.preference {
                        Some(preference) => _ = self.preferences.insert(name.clone(), preference),
                        None => _ = self.preferences.remove(&name),
                    }
                }
                self.pending.insert(name, Change::Put(Arc::new(service)));
            }
            Body::Slice(Some(slice)) => {
                self.forget_slice(&name, Some(&slice.service));
                self.named.insert(name.clone(), slice.service.clone());
                self.join(&slice.service);
                let slices = self.slices.entry(slice.service.clone()).or_default();
                match slices.iter_mut().find(|known| known.name == name) {
                    Some(known) => *known = slice,
                    None => slices.push(slice),
                }
            }
            Body::Node(facts) => {
                self.facts = facts;
                self.node_seen = true;
            }
            Body::Pod(Some(mut pod)) => {
                if self.wanted.scope < Scope::Mesh {
                    pod.workload = None;
                }
                if !self.wanted.entries {
                    pod.addresses.clear();
                }
                let selected = self.wanted.entries && self.candidate(&name, pod.candidate.take());
                let Some(changes) = self.pods.put(&name, pod) else {
                    return told || selected;
                };
                self.host_ports(changes);
            }
            Body::Pod(None) => return told,
            Body::Namespace(namespace) => {
                self.prefer(&namespace.name, namespace.preference);
                self.pods.put_namespace(namespace);
            }
            Body::ServiceEntry(Some(entry)) => self.entries.put(*entry),
            Body::WorkloadEntry(Some(entry)) => return self.entries.put_candidate(*entry) || told,
            Body::Route(Some(route)) => {
                if self.routes.get(&route.name) == Some(&route) {
                    return told;
                }
                self.routes.insert(route.name.clone(), route);
            }
            Body::Grant(Some(grant)) => _ = self.grants.insert(grant.name.clone(), grant),
            Body::Service(None, _)
            | Body::Slice(None)
            | Body::Route(None)
            | Body::Grant(None)
            | Body::ServiceEntry(None)
            | Body::WorkloadEntry(None) => self.forget(kind, &name),
        }
        true
    }

    /// Stores a pod that entries may select, or removes it. Returns whether an entry may differ.
    fn candidate(&mut self, name: &ServiceName, candidate: Option<Box<Candidate>>) -> bool {
        match candidate {
            Some(candidate) => self.entries.put_candidate(*candidate),
            None => self.entries.remove_candidate(&(true, name.clone())),
        }
    }

    fn remove(&mut self, kind: Kind, name: &ServiceName) {
        self.changed = true;
        self.problems.remove(&(kind, name.clone()));
        self.forget(kind, name);
    }

    /// Forgets an object.
    fn forget(&mut self, kind: Kind, name: &ServiceName) {
        match kind {
            Kind::Service => {
                self.entries.remove_service(name);
                self.preferences.remove(name);
                self.pending.insert(name.clone(), Change::Remove);
            }
            Kind::Slice => self.forget_slice(name, None),
            Kind::Node => self.missing_node(),
            Kind::Pod => {
                let changes = self.pods.remove(name);
                self.host_ports(changes);
                self.candidate(name, None);
            }
            Kind::Namespace => {
                self.prefer(name.name(), None);
                self.pods.remove_namespace(name.name());
            }
            Kind::ServiceEntry => {
                let name = EntryName::new(name.namespace(), name.name());
                self.entries.remove(&name);
            }
            Kind::WorkloadEntry => {
                self.entries.remove_candidate(&(false, name.clone()));
            }
            Kind::ReferenceGrant => _ = self.grants.remove(name),
            Kind::TcpRoute | Kind::TlsRoute | Kind::HttpRoute | Kind::GrpcRoute => {
                if let Some(kind) = kind.route() {
                    let (namespace, name) = (name.namespace().into(), name.name().into());
                    self.routes.remove(&RouteName {
                        namespace,
                        name,
                        kind,
                    });
                }
            }
        }
    }

    /// Forgets a slice, unless it belongs to the service `but`.
    fn forget_slice(&mut self, name: &ServiceName, but: Option<&ServiceName>) {
        let Some(service) = self.named.get(name).filter(|named| Some(*named) != but) else {
            return;
        };
        let service = service.clone();
        self.named.remove(name);
        if let Some(slices) = self.slices.get_mut(&service) {
            slices.retain(|slice| slice.name != *name);
            if slices.is_empty() {
                self.slices.remove(&service);
            }
        }
        self.join(&service);
    }

    /// Joins the services of a namespace again if the preference of its clients has changed.
    fn prefer(&mut self, namespace: &str, preference: Option<Preference>) {
        if !self.wanted.entries || !self.entries.prefer(namespace, preference) {
            return;
        }
        let those = self.services.range(ServiceName::new(namespace, "")..);
        let those = those.take_while(|(name, _)| name.namespace() == namespace);
        let those = those.filter(|(name, _)| !objects::is_of_host_ports(name));
        for name in those.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.join(&name);
        }
    }

    /// Joins a service and its endpoints again.
    fn join(&mut self, service: &ServiceName) {
        if !self.pending.contains_key(service) {
            self.pending.insert(service.clone(), Change::Join);
        }
    }

    /// Removes the objects that a list did not have.
    fn keep(&mut self, kind: Kind, seen: &HashSet<ServiceName>) {
        let known: Vec<ServiceName> = match kind {
            Kind::Service => {
                let put = |(name, change): (&ServiceName, &Change)| {
                    matches!(change, Change::Put(_)).then(|| name.clone())
                };
                let pending = self.pending.iter().filter_map(put);
                let served = self.services.keys();
                let served = served.filter(|name| !objects::is_of_host_ports(name));
                served.cloned().chain(pending).collect()
            }
            Kind::Slice => self.named.keys().cloned().collect(),
            Kind::Pod => {
                let mut names = self.pods.names();
                names.extend(self.entries.candidates(true).cloned());
                names
            }
            Kind::Namespace => self.pods.namespaces(),
            Kind::ServiceEntry => {
                let names = self.entries.names();
                let names = names.map(|name| ServiceName::new(name.namespace(), name.name()));
                names.collect()
            }
            Kind::WorkloadEntry => self.entries.candidates(false).cloned().collect(),
            Kind::ReferenceGrant => self.grants.keys().cloned().collect(),
            Kind::TcpRoute | Kind::TlsRoute | Kind::HttpRoute | Kind::GrpcRoute => {
                let routes = self
                    .routes
                    .keys()
                    .filter(|name| Some(name.kind) == kind.route());
                let names = routes.map(|name| ServiceName::new(&name.namespace, &name.name));
                names.collect()
            }
            Kind::Node => {
                if seen.is_empty() {
                    self.changed = true;
                    self.missing_node();
                }
                return;
            }
        };
        let faulty = self.problems.keys();
        let faulty = faulty.filter(|(of, name)| *of == kind && *name != no_object());
        let faulty: Vec<_> = faulty.map(|(_, name)| name.clone()).collect();
        for name in known.into_iter().chain(faulty) {
            if !seen.contains(&name) {
                self.remove(kind, &name);
            }
        }
    }

    /// Records that this node's own object does not exist.
    fn missing_node(&mut self) {
        self.facts = NodeFacts::of_no_object();
        let text = if self.node_seen {
            "the Node was deleted from the cluster while the agent runs: services are served on, \
             without its zone, and no new endpoint counts as local"
        } else if self.base.name_given {
            "the cluster has no Node of this name, so its zone is not known and no endpoint counts \
             as local: either the kubelet has not registered it yet, or --node-name is not its name"
        } else {
            "the cluster has no Node of this name, which is the machine's host name, so its zone is \
             not known and no endpoint counts as local: give the Node's name with --node-name, \
             or wait if the kubelet has not registered the Node yet"
        };
        let problem = Problem {
            gravity: Gravity::Place,
            place: format!("Node {}", self.base.name),
            text: text.to_owned(),
        };
        let name = ServiceName::new("", &self.base.name);
        self.problems.insert((Kind::Node, name), vec![problem]);
    }

    /// Records the problems of an object. Returns whether they have changed.
    fn found(&mut self, kind: Kind, name: &ServiceName, findings: &Findings) -> bool {
        if kind == Kind::Node {
            self.problems.retain(|(of, _), _| *of != Kind::Node);
        }
        let faults = findings.faults.iter().map(|(field, text)| {
            let text = format!("{field}: {text}; it stays as it was before, if it was ever served");
            (Gravity::NotFollowed, text)
        });
        let notes = findings.notes.iter();
        let notes = notes.map(|(field, text)| (Gravity::Warning, format!("{field}: {text}")));
        let place = || {
            if kind.is_of_the_cluster() {
                format!("{} {}", kind.word(), name.name())
            } else {
                format!("{} {name}", kind.word())
            }
        };
        let problems: Vec<Problem> = faults
            .chain(notes)
            .map(|(gravity, text)| Problem {
                gravity,
                place: place(),
                text,
            })
            .collect();
        let key = (kind, name.clone());
        if self.problems.get(&key).is_none_or(Vec::is_empty) && problems.is_empty()
            || self.problems.get(&key) == Some(&problems)
        {
            return false;
        }
        if problems.is_empty() {
            self.problems.remove(&key);
        } else {
            self.problems.insert(key, problems);
        }
        true
    }
}

/// Stands for an object's name in problems of a kind.
fn no_object() -> ServiceName {
    ServiceName::new("", "")
}
