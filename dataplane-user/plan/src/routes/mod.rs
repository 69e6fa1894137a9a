//! Routes: they split the connections to ports of services.
//!
//! A route that is attached to a Service replaces the endpoints of its ports by those of its backends. Each backend
//! gets its part of the connections. If a backend does not exist, or the route may not lead to it, the connections of
//! its part are refused: so a mistake in one backend does not send more connections to the others.
//!
//! Routes split only Services of their own namespace, so authors cannot split Services of other namespaces. The cost of
//! each step grows with the change, and if a backend changes, with the routes in force that lead to it. It does not
//! grow with all routes that are attached to their Services, because any author may lead a route to any backend.

mod backends;
mod claims;
mod index;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use imbl::{OrdMap, ordmap::DiffItem};
use model::{
    BackendTo, Endpoint, Entry, EntryName, Grant, Gravity, Part, Problem, Route, RouteKind,
    RouteName, Service, ServiceName, Split,
};

use self::{
    backends::Backends,
    claims::Claims,
    index::{OfNamespaces, note, note_by_namespace, services_of, sides},
};

/// Maximum number of endpoints that the routes of one namespace lead to together. An endpoint counts once for each port
/// of a Service and each backend that has it. Without a bound, a thousand routes to a thousand endpoints would need a
/// million.
const ENDPOINTS_MAX: usize = 100_000;

/// Splits the ports of services according to routes.
#[derive(Debug)]
pub struct Routes {
    known: OrdMap<RouteName, Arc<Route>>,
    grants: OrdMap<ServiceName, Arc<Grant>>,
    backends: Backends,
    /// The routes that are attached to each Service.
    attached: BTreeMap<ServiceName, BTreeSet<RouteName>>,
    /// The Services whose routes in force lead to each Service.
    leading: BTreeMap<ServiceName, BTreeSet<ServiceName>>,
    /// The routes from other namespaces that lead to Services of each namespace, by the namespace of the route.
    abroad_to: BTreeMap<Box<str>, OfNamespaces>,
    /// The routes that lead to each host, by the namespace of the route.
    to_host: BTreeMap<Arc<str>, OfNamespaces>,
    /// The routes in force of each Service, and the problems of the others.
    claimed: BTreeMap<ServiceName, Claimed>,
    /// The result of the routes of each Service.
    wanted: BTreeMap<ServiceName, Routing>,
    /// Number of endpoints that the routes of each namespace lead to. `most` is the limit, and `over` the Services
    /// beyond it.
    sums: HashMap<Box<str>, usize>,
    most: usize,
    over: BTreeSet<ServiceName>,
    services: OrdMap<ServiceName, Arc<Service>>,
    problems: BTreeMap<ServiceName, Vec<Problem>>,
    /// Routes that are attached to Services of other namespaces.
    abroad: BTreeMap<RouteName, Problem>,
}

/// The routes in force of a Service.
#[derive(Debug, Default)]
struct Claimed {
    /// Each route with the indices of its ports.
    won: Vec<(Arc<Route>, Vec<usize>)>,
    problems: Vec<Problem>,
}

/// The result of a Service's routes.
#[derive(Debug, Default)]
struct Routing {
    /// The splits of ports, by the index of the port.
    splits: Vec<(usize, Arc<Split>)>,
    /// The routes that split the ports.
    routes: Vec<RouteName>,
    /// Number of endpoints that these routes lead to.
    endpoints: usize,
    problems: Vec<Problem>,
}

/// The services after routes have split them.
#[derive(Clone, Debug)]
pub struct Routed {
    /// All services, with their ports split.
    pub services: OrdMap<ServiceName, Arc<Service>>,
    /// Whether the [problems](Routes::problems) have changed.
    pub other_problems: bool,
}

/// The objects that the result depends on.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The routes.
    pub routes: &'a OrdMap<RouteName, Arc<Route>>,
    /// Permissions to lead to Services of other namespaces.
    pub grants: &'a OrdMap<ServiceName, Arc<Grant>>,
    /// The services, including those of entries.
    pub services: &'a OrdMap<ServiceName, Arc<Service>>,
    /// The entries with the addresses that are served.
    pub entries: &'a OrdMap<EntryName, Arc<Entry>>,
}

impl Default for Routes {
    fn default() -> Self {
        Self::within(ENDPOINTS_MAX)
    }
}

impl Routes {
    /// Sets the limit of endpoints that the routes of one namespace lead to together.
    fn within(most: usize) -> Self {
        Self {
            known: OrdMap::new(),
            grants: OrdMap::new(),
            backends: Backends::default(),
            attached: BTreeMap::new(),
            leading: BTreeMap::new(),
            abroad_to: BTreeMap::new(),
            to_host: BTreeMap::new(),
            claimed: BTreeMap::new(),
            wanted: BTreeMap::new(),
            sums: HashMap::new(),
            most,
            over: BTreeSet::new(),
            services: OrdMap::new(),
            problems: BTreeMap::new(),
            abroad: BTreeMap::new(),
        }
    }

    /// Splits services according to routes.
    pub fn take(&mut self, from: Sources<'_>) -> Routed {
        // The Services whose routes in force may change, the Services whose splits may change, and the routes whose
        // backends may change.
        let mut claimed: BTreeSet<ServiceName> = BTreeSet::new();
        let mut dirty: BTreeSet<ServiceName> = BTreeSet::new();
        let mut moved: BTreeSet<RouteName> = BTreeSet::new();
        let mut other_problems = self.take_routes(from.routes, &mut claimed);
        self.take_grants(from.grants, &mut moved);
        self.take_entries(from.entries, &mut moved);
        self.take_services(from.services, &mut claimed, &mut dirty);
        for name in claimed {
            other_problems |= self.claim(&name);
            dirty.insert(name);
        }
        for route in moved.iter().filter_map(|name| self.known.get(name)) {
            dirty.extend(route.parents.iter().map(|parent| parent.service.clone()));
        }
        let mut namespaces: BTreeSet<Box<str>> = BTreeSet::new();
        for name in &dirty {
            self.update_routing(name);
            namespaces.insert(name.namespace().into());
        }
        for namespace in namespaces {
            dirty.extend(self.bound(&namespace));
        }
        for name in dirty {
            let problems = self.serve(&name);
            let before = if problems.is_empty() {
                self.problems.remove(&name)
            } else {
                self.problems.insert(name.clone(), problems)
            };
            other_problems |= before.as_ref() != self.problems.get(&name);
        }
        Routed {
            services: self.services.clone(),
            other_problems,
        }
    }

    /// Returns the parts of routes that have no effect.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        let lost = self.claimed.values().flat_map(|of| &of.problems);
        let others = self.problems.values().flatten();
        lost.chain(others).chain(self.abroad.values())
    }

    fn take_routes(
        &mut self,
        routes: &OrdMap<RouteName, Arc<Route>>,
        claimed: &mut BTreeSet<ServiceName>,
    ) -> bool {
        let mut others = false;
        let before = std::mem::replace(&mut self.known, routes.clone());
        for change in before.diff(routes) {
            for (name, route, is_there) in sides(&change) {
                for parent in &route.parents {
                    note(&mut self.attached, &parent.service, name, is_there);
                    claimed.insert(parent.service.clone());
                }
                for backend in &route.backends {
                    match &backend.to {
                        BackendTo::Service(to) => {
                            let namespace: Box<str> = to.namespace().into();
                            if namespace != name.namespace {
                                note_by_namespace(&mut self.abroad_to, &namespace, name, is_there);
                            }
                        }
                        BackendTo::Host(host) => {
                            note_by_namespace(&mut self.to_host, host, name, is_there);
                        }
                        BackendTo::Invalid(..) => {}
                    }
                }
                if let Some(why) = &route.abroad {
                    others = true;
                    if is_there {
                        let problem = problem(name, "Accepted=False", "UnsupportedValue", why);
                        self.abroad.insert(name.clone(), problem);
                    } else {
                        self.abroad.remove(name);
                    }
                }
            }
        }
        others
    }

    fn take_grants(
        &mut self,
        grants: &OrdMap<ServiceName, Arc<Grant>>,
        moved: &mut BTreeSet<RouteName>,
    ) {
        let before = std::mem::replace(&mut self.grants, grants.clone());
        let mut touched: BTreeMap<&str, HashSet<&(RouteKind, Box<str>)>> = BTreeMap::new();
        let differences: Vec<_> = before
            .diff(grants)
            .flat_map(|change| sides(&change))
            .collect();
        for (name, grant, is_there) in differences {
            self.backends.note_grant(grant, is_there);
            let from = touched.entry(name.namespace()).or_default();
            from.extend(&grant.from);
        }
        for (namespace, from) in touched {
            let Some(leading) = self.abroad_to.get(namespace) else {
                continue;
            };
            for (kind, from) in from {
                let routes = leading.get(&(from.clone(), *kind));
                moved.extend(routes.into_iter().flatten().cloned());
            }
        }
    }

    fn take_entries(
        &mut self,
        entries: &OrdMap<EntryName, Arc<Entry>>,
        moved: &mut BTreeSet<RouteName>,
    ) {
        let before = std::mem::replace(&mut self.backends.entries, entries.clone());
        let mut changed: BTreeMap<&Arc<str>, Vec<&Entry>> = BTreeMap::new();
        for (_, entry, is_there) in before.diff(entries).flat_map(|change| sides(&change)) {
            self.backends.note_entry(entry, is_there);
            for host in &entry.hosts {
                changed.entry(&host.name).or_default().push(entry);
            }
        }
        for (host, entries) in changed {
            for ((namespace, _), routes) in self.to_host.get(host).into_iter().flatten() {
                if entries.iter().any(|entry| entry.is_visible_in(namespace)) {
                    moved.extend(routes.iter().cloned());
                }
            }
        }
    }

    fn take_services(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        claimed: &mut BTreeSet<ServiceName>,
        dirty: &mut BTreeSet<ServiceName>,
    ) {
        let before = std::mem::replace(&mut self.backends.services, services.clone());
        for change in before.diff(services) {
            let (name, new) = match change {
                DiffItem::Add(name, new)
                | DiffItem::Update {
                    new: (name, new), ..
                } => (name, Some(new)),
                DiffItem::Remove(name, _) => (name, None),
            };
            match new {
                Some(new) => _ = self.services.insert(name.clone(), Arc::clone(new)),
                None => _ = self.services.remove(name),
            }
            if self.attached.contains_key(name) {
                claimed.insert(name.clone());
            }
            dirty.extend(self.leading.get(name).into_iter().flatten().cloned());
        }
    }

    /// Updates the routes in force of a Service. Returns whether the refused routes or their reasons have changed.
    fn claim(&mut self, name: &ServiceName) -> bool {
        let before = self.claimed.remove(name).unwrap_or_default();
        for to in before.won.iter().flat_map(|(route, _)| services_of(route)) {
            note(&mut self.leading, to, name, false);
        }
        let names = self.attached.get(name).into_iter().flatten();
        let mut routes: Vec<_> = names
            .filter_map(|name| self.known.get(name))
            .cloned()
            .collect();
        if routes.is_empty() {
            return !before.problems.is_empty();
        }
        claims::sort(&mut routes);
        let service = self.backends.services.get(name);
        let claims = Claims::of(name, service.map(|service| &**service), &routes);
        for to in claims.won.iter().flat_map(|(route, _)| services_of(route)) {
            note(&mut self.leading, to, name, true);
        }
        let lost = claims.lost.iter();
        let lost = lost.map(|(route, reason, text)| problem(route, "Accepted=False", reason, text));
        let claimed = Claimed {
            won: claims.won,
            problems: lost.collect(),
        };
        let others = before.problems != claimed.problems;
        self.claimed.insert(name.clone(), claimed);
        others
    }

    /// Updates the result of a Service's routes.
    fn update_routing(&mut self, name: &ServiceName) {
        let sum = self.sums.entry(name.namespace().into()).or_default();
        if let Some(before) = self.wanted.remove(name) {
            *sum -= before.endpoints;
        }
        let claimed = self.claimed.get(name);
        let won = claimed.map(|claimed| claimed.won.clone());
        let service = self.backends.services.get(name).map(Arc::clone);
        let (Some(won), Some(service)) = (won, service) else {
            return;
        };
        let mut wanted = Routing::default();
        for (route, ports) in won {
            let parts = self.parts(&service, &route, &mut wanted.problems);
            let backends = parts.iter().filter_map(|part| part.backend.as_ref());
            let sizes = backends.map(|(of, port)| of.ports[*port].endpoints.len());
            wanted.endpoints += sizes.sum::<usize>() * ports.len();
            let split = Arc::new(Split {
                by: route.name.to_string().into(),
                own: Arc::clone(&service),
                parts,
            });
            let splits = ports.into_iter().map(|port| (port, Arc::clone(&split)));
            wanted.splits.extend(splits);
            wanted.routes.push(route.name.clone());
        }
        *self.sums.entry(name.namespace().into()).or_default() += wanted.endpoints;
        self.wanted.insert(name.clone(), wanted);
    }

    /// Returns the backends of a route that get a part, and adds the problems of the others.
    fn parts(&mut self, parent: &Service, route: &Route, problems: &mut Vec<Problem>) -> Vec<Part> {
        let weights = route.backends.iter().map(|of| u64::from(of.weight));
        let sum: u64 = weights.sum();
        let mut parts = Vec::new();
        for (index, backend) in route.backends.iter().enumerate() {
            let found = self.backends.of(parent, &route.name, backend);
            if let Err((reason, text)) = &found {
                let refused = match u64::from(backend.weight) {
                    0 => "its weight is 0, so that no connections are refused".to_owned(),
                    weight => {
                        let percent = (weight * 100 + sum / 2) / sum;
                        format!("{percent} % of the connections are refused")
                    }
                };
                let text = format!("spec.rules[0].backendRefs[{index}]: {text}; {refused}");
                problems.push(problem(&route.name, "ResolvedRefs=False", reason, &text));
            }
            if backend.weight == 0 {
                continue;
            }
            parts.push(Part {
                weight: backend.weight,
                backend: found.ok(),
            });
        }
        if parts.is_empty() {
            problems.push(Problem {
                gravity: Gravity::Warning,
                place: route.name.to_string(),
                text: "spec.rules[0].backendRefs: no backend has a weight above 0; all connections are refused"
                    .to_owned(),
            });
        }
        parts
    }

    /// Updates the Services of a namespace that are not split because its routes lead to too many endpoints. The first
    /// by name are split. Returns the Services whose case has changed.
    fn bound(&mut self, namespace: &str) -> Vec<ServiceName> {
        let is_within = |name: &ServiceName| name.namespace() == namespace;
        let from = ServiceName::new(namespace, "");
        let before = self.over.range(from.clone()..);
        let before: BTreeSet<_> = before.take_while(|name| is_within(name)).cloned().collect();
        let mut over = BTreeSet::new();
        match self.sums.get(namespace).copied() {
            Some(sum) if sum > self.most => {
                let all = self.wanted.range(from..);
                let mut left = self.most;
                for (name, wanted) in all.take_while(|(name, _)| is_within(name)) {
                    match left.checked_sub(wanted.endpoints) {
                        Some(rest) => left = rest,
                        None => _ = over.insert(name.clone()),
                    }
                }
            }
            Some(0) => _ = self.sums.remove(namespace),
            _ => {}
        }
        let changed = before.symmetric_difference(&over).cloned().collect();
        for name in &before {
            self.over.remove(name);
        }
        self.over.extend(over);
        changed
    }

    /// Updates the splits of a Service's ports. Returns the problems of its routes.
    fn serve(&mut self, name: &ServiceName) -> Vec<Problem> {
        let wanted = self.wanted.get(name);
        let mut problems = wanted.map_or_else(Vec::new, |wanted| wanted.problems.clone());
        let Some(service) = self.backends.services.get(name) else {
            return problems;
        };
        let mut now = Arc::clone(service);
        if let Some(wanted) = wanted.filter(|wanted| !wanted.splits.is_empty()) {
            if self.over.contains(name) {
                let text = format!(
                    "the routes of namespace {} lead to more than {} endpoints together, and Service {name} is \
                     beyond that; lead to fewer",
                    name.namespace(),
                    self.most
                );
                let routes = wanted.routes.iter();
                problems.extend(
                    routes.map(|route| problem(route, "Accepted=False", "UnsupportedValue", &text)),
                );
            } else {
                let mut split = (**service).clone();
                for (port, by) in &wanted.splits {
                    let port = &mut split.ports[*port];
                    port.endpoints = endpoints(by);
                    port.weights = None;
                    port.split = Some(Arc::clone(by));
                }
                now = Arc::new(split);
            }
        }
        if self.services.get(name).is_none_or(|known| **known != *now) {
            self.services.insert(name.clone(), now);
        }
        problems
    }
}

/// Returns the endpoints of all backends.
fn endpoints(split: &Split) -> Vec<Endpoint> {
    let backends = split.parts.iter().filter_map(|part| part.backend.as_ref());
    let all = backends.flat_map(|(of, port)| &of.ports[*port].endpoints);
    let mut endpoints: Vec<_> = all.copied().collect();
    endpoints.sort_unstable();
    // An endpoint of several backends is local, ready or serving if it is so for any of them, and terminating if it is
    // so for all.
    endpoints.dedup_by(|more, known| {
        let same = (more.addr, more.port) == (known.addr, known.port);
        if same {
            known.local |= more.local;
            known.ready |= more.ready;
            known.serving |= more.serving;
            known.terminating &= more.terminating;
        }
        same
    });
    endpoints
}

fn problem(route: &RouteName, condition: &str, reason: &str, text: &str) -> Problem {
    Problem {
        gravity: Gravity::Warning,
        place: route.to_string(),
        text: format!("{condition} ({reason}): {text}"),
    }
}
