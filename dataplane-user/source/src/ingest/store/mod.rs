//! Stores objects, and combines them into views.

mod problems;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use model::{EntryName, Grant, Node, Preference, Problem, Route, RouteName, Service, ServiceName};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Body, Kind, Object, Scope, WantedKinds, WantedPolicies,
    orphans::Orphans,
    pods::{self, Pods},
};
use crate::{
    objects::{self, Candidate, Distribution, Entries, IstioObjects, Joins, NodeFacts, Slice},
    turns::Turns,
};

/// Maximum number of problems of one object that are named. Each view has the problems of all objects, so the time of
/// everybody's changes grows with their number.
const PROBLEMS: usize = 32;

/// A message to the store.
#[derive(Debug)]
pub enum Message {
    /// A list begins. Objects that are missing in it are removed.
    Begin(Kind),
    /// A listed, new or changed object.
    Put(Object, Instant),
    /// A removed object.
    Gone(Object, Instant),
    /// The list is complete. Whether it had the objects of all nodes.
    End(Kind, bool),
    /// The cluster does not have the kind, which is as good as an empty list.
    Missing(Kind),
    /// Reading of a kind works again. There is a view without a change, too.
    Back,
    /// The API server refuses to let the kind be read, with its reason, and the agent continues without the kind.
    /// `None`: the server permits it again.
    Refused(Kind, Option<String>),
}

/// The known objects.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own, and all of their combinations can be"
)]
pub struct Store {
    /// This node, without the facts of its object.
    base: Arc<Node>,
    wanted: WantedKinds,
    /// Maximum number of endpoints, each counted for each port of a slice, that services of one namespace gain in one
    /// view. The others wait for the next view. `None`: no maximum.
    endpoints_at_once: Option<u64>,
    facts: NodeFacts,
    /// The services of the last view.
    services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// The changes for the next view.
    pending: BTreeMap<ServiceName, Change>,
    /// The order of those changes. A view has a limit of work.
    turns: Turns<ServiceName>,
    /// Slices by the service that they name, whether the service exists or not. Those of a service are in the order of
    /// their names.
    slices: HashMap<ServiceName, SmallVec<[Slice; 1]>>,
    /// The service that each slice names, and the slice's file.
    named: HashMap<ServiceName, (ServiceName, Option<Arc<str>>)>,
    /// Services of other proxies that cannot be read. They have names.
    unreadable: BTreeSet<ServiceName>,
    joins: Joins,
    pods: Pods,
    entries: Entries,
    /// The traffic distribution that the services' own annotations ask for.
    distributions: HashMap<ServiceName, Distribution>,
    routes: imbl::OrdMap<RouteName, Arc<Route>>,
    grants: imbl::OrdMap<ServiceName, Arc<Grant>>,
    istio: IstioObjects,
    problems: BTreeMap<(Kind, ServiceName), Vec<Problem>>,
    problems_seen: Arc<[Problem]>,
    orphans: Orphans,
    /// Whether this node's own object was ever found.
    node_seen: bool,
    /// The objects of each kind, valid or not.
    known: HashMap<Kind, HashSet<ServiceName>>,
    /// The objects of the list that is being read.
    listing: HashMap<Kind, HashSet<ServiceName>>,
    /// Kinds that were listed completely, and kinds that the cluster lacks.
    listed: BTreeSet<Kind>,
    /// Kinds that the cluster lacked when they were last read.
    missing: BTreeSet<Kind>,
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
#[derive(Debug)]
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
    /// Returns a store without objects. `endpoints_at_once`: the maximum number of endpoints that services of one
    /// namespace gain in one view. `orphan`: the time for which the Service of a slice may be missing.
    pub fn new(
        base: Arc<Node>,
        wanted: WantedKinds,
        endpoints_at_once: Option<u64>,
        orphan: Duration,
    ) -> Self {
        Self {
            base,
            wanted,
            endpoints_at_once,
            facts: NodeFacts::default(),
            services: imbl::OrdMap::new(),
            pending: BTreeMap::new(),
            turns: Turns::default(),
            slices: HashMap::new(),
            named: HashMap::new(),
            unreadable: BTreeSet::new(),
            joins: Joins::default(),
            pods: Pods::default(),
            entries: Entries::default(),
            distributions: HashMap::new(),
            routes: imbl::OrdMap::new(),
            grants: imbl::OrdMap::new(),
            istio: IstioObjects::new(wanted.policies != WantedPolicies::None),
            problems: BTreeMap::new(),
            problems_seen: Arc::default(),
            orphans: Orphans::new(orphan),
            node_seen: false,
            known: HashMap::new(),
            listing: HashMap::new(),
            listed: BTreeSet::new(),
            missing: BTreeSet::new(),
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
            Message::Begin(kind) => {
                // The list before may have ended early.
                let before = self.listing.insert(kind, HashSet::new());
                let known = self.known.entry(kind).or_default();
                known.extend(before.into_iter().flatten());
            }
            Message::Put(object, at) => {
                let listing = self.listing.get_mut(&object.kind);
                let is_listed = listing.is_some();
                let known = match listing {
                    Some(listing) => listing,
                    None => self.known.entry(object.kind).or_default(),
                };
                known.insert(object.name.clone());
                if self.put(object) {
                    self.changed = true;
                    if !is_listed {
                        self.since.get_or_insert(at);
                    }
                }
            }
            Message::Gone(object, at) => {
                self.since.get_or_insert(at);
                if let Some(known) = self.known.get_mut(&object.kind) {
                    known.remove(&object.name);
                }
                self.remove(object.kind, &object.name);
            }
            Message::End(kind, everywhere) => {
                if let Some(seen) = self.listing.remove(&kind) {
                    self.keep(kind, seen);
                }
                self.changed |= self.listed.insert(kind);
                self.missing.remove(&kind);
                if kind == Kind::Pod {
                    self.changed |= self.everywhere != everywhere;
                    self.everywhere = everywhere;
                }
            }
            Message::Missing(kind) => {
                self.take(Message::Begin(kind));
                self.take(Message::End(kind, false));
                self.missing.insert(kind);
            }
            Message::Back => self.changed = true,
            Message::Refused(kind, why) => self.refuse(kind, why),
        }
    }

    /// Returns the time at which a missing Service of a slice must be reported. `None` if none is missing.
    pub fn due(&self) -> Option<Instant> {
        self.orphans.due()
    }

    /// Reports the missing Services whose time has come.
    pub fn pass_time(&mut self) {
        self.changed |= self.orphans.tell(Instant::now());
    }

    /// Records changes of services that are host ports.
    fn host_ports(&mut self, changes: Vec<pods::Change>) {
        let changes = changes.into_iter();
        self.pending.extend(changes.map(|(name, service)| {
            let change = service.map_or(Change::Remove, Change::Whole);
            (name, change)
        }));
    }

    /// Stores an object. Returns whether the next view may differ.
    fn put(&mut self, object: Object) -> bool {
        let told = self.found(&object);
        let Object {
            kind,
            name,
            file,
            body,
            findings,
            ..
        } = object;
        // An invalid object keeps its former state. A pod decides this for each of its parts.
        let faulty = !findings.faults.is_empty() && kind != Kind::Pod;
        let Some(body) = body.filter(|_| !faulty) else {
            return told;
        };
        match body {
            Body::Service(service, by_istio) => {
                self.unreadable.remove(&name);
                if self.wanted.entries {
                    self.entries.put_service(&name, by_istio.selection);
                    match by_istio.distribution {
                        Some(own) => _ = self.distributions.insert(name.clone(), own),
                        None => _ = self.distributions.remove(&name),
                    }
                }
                self.istio.label(kind.word(), &name, by_istio.waypoint);
                self.pending.insert(name, Change::Put(service));
            }
            Body::Slice(slice, _) => {
                self.forget_slice(&name, Some(&slice.service));
                let named = (slice.service.clone(), file);
                self.named.insert(name.clone(), named);
                self.join(&slice.service);
                let slices = self.slices.entry(slice.service.clone()).or_default();
                match slices.binary_search_by(|known| known.name.cmp(&name)) {
                    Ok(at) => slices[at] = slice,
                    Err(at) => slices.insert(at, slice),
                }
            }
            Body::Node(facts) => {
                self.facts = facts;
                self.node_seen = true;
            }
            Body::Pod(mut pod) => {
                if self.wanted.scope < Scope::Mesh {
                    pod.workload = None;
                }
                let of = pod.workload.as_mut();
                if let Some(of) = of.filter(|_| self.wanted.policies == WantedPolicies::None) {
                    of.labels = Box::default();
                }
                if !self.wanted.entries {
                    pod.addresses.clear();
                }
                let selected = self.wanted.entries && self.candidate(&name, pod.candidate.take());
                let Some(changes) = self.pods.put(&name, *pod) else {
                    return told || selected;
                };
                self.host_ports(changes);
            }
            Body::Namespace(namespace) => {
                self.prefer(&namespace.name, namespace.preference);
                let (waypoint, labels) = (namespace.waypoint.clone(), namespace.labels.clone());
                (self.istio).label_namespace(&namespace.name, waypoint, labels);
                self.pods.put_namespace(namespace);
            }
            Body::ServiceEntry(mut entry) => {
                let waypoint = entry.waypoint.take();
                self.istio.label(kind.word(), &name, waypoint);
                self.entries.put(*entry);
            }
            Body::WorkloadEntry(entry) => return self.entries.put_candidate(*entry) || told,
            Body::Route(route) => {
                if self.routes.get(&route.name) == Some(&route) {
                    return told;
                }
                self.routes.insert(route.name.clone(), route);
            }
            Body::Grant(grant) => {
                if self.grants.get(&grant.name) == Some(&grant) {
                    return told;
                }
                self.grants.insert(grant.name.clone(), grant);
            }
            Body::Gateway(of) => return self.istio.put_gateway(&name, Some(of)) || told,
            Body::GatewayClass(of) => return self.istio.put_class(name.name(), of) || told,
            Body::Policy(policy) => return self.istio.put(kind.word(), &name, policy) || told,
            Body::Others => {
                self.forget(kind, &name);
                if kind == Kind::Service {
                    self.unreadable.insert(name);
                }
            }
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
                self.istio.label(kind.word(), name, None);
                self.entries.remove_service(name);
                self.distributions.remove(name);
                self.unreadable.remove(name);
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
                (self.istio).label_namespace(name.name(), None, Box::default());
                self.pods.remove_namespace(name.name());
            }
            Kind::ServiceEntry => {
                self.istio.label(kind.word(), name, None);
                let name = EntryName::new(name.namespace(), name.name());
                self.entries.remove(&name);
            }
            Kind::WorkloadEntry => {
                self.entries.remove_candidate(&(false, name.clone()));
            }
            Kind::ReferenceGrant => _ = self.grants.remove(name),
            Kind::Gateway => _ = self.istio.put_gateway(name, None),
            Kind::GatewayClass => _ = self.istio.put_class(name.name(), None),
            Kind::AuthorizationPolicy | Kind::PeerAuthentication => {
                self.istio.put(kind.word(), name, None);
            }
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
        let named = self.named.get(name).map(|(service, _)| service);
        let Some(service) = named.filter(|named| Some(*named) != but) else {
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
    fn keep(&mut self, kind: Kind, seen: HashSet<ServiceName>) {
        if kind == Kind::Node {
            if seen.is_empty() {
                self.changed = true;
                self.missing_node();
            }
            return;
        }
        let mut gone = self.known.remove(&kind).unwrap_or_default();
        gone.retain(|name| !seen.contains(name));
        self.known.insert(kind, seen);
        for name in gone {
            self.remove(kind, &name);
        }
    }
}
