//! Limits the changes of a source that are applied at a time.
//!
//! The work that follows from a change grows with its size: lookups of addresses, and planning and writing of keys.
//! Each step has a budget. So a namespace with many changes delays its own further changes, and not those of other
//! namespaces. If an object changes again while it waits, only its newest state is applied.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use imbl::{OrdMap, ordmap::DiffItem};
use model::{
    BackendTo, Entry, EntryName, Gravity, Problem, Route, RouteName, Service, ServiceName,
};

use super::{cost, turns::Turns};

/// Bounds of a step's budget, roughly in keys, endpoints and addresses. The budget adapts to the machine between them.
const BUDGETS: std::ops::RangeInclusive<u64> = 1 << 11..=1 << 16;
const FIRST: u64 = 1 << 14;
/// Target duration of a step.
const STEP: Duration = Duration::from_millis(20);
/// Cost of each object in addition to its keys, endpoints and addresses.
const OBJECT: u64 = 8;
/// Time after which a waiting namespace is reported.
const NAMED_AFTER: Duration = Duration::from_secs(1);

/// The services, entries and routes of a source, as far as their changes have been applied.
///
/// A route costs little, but it belongs to Services: one that leads to a Service which is not applied yet would refuse the
/// Service's part of the connections. So a changed route waits for the namespaces of its Services.
#[derive(Debug)]
pub struct Paced {
    /// Whether the first objects have been applied.
    is_begun: bool,
    wanted: Objects,
    taken: Objects,
    turns: Turns<Name>,
    budget: u64,
    /// Whether the last step was large and left changes for the next one.
    is_full: bool,
    /// The time since which each namespace waits.
    since: BTreeMap<Box<str>, Instant>,
    problems: BTreeMap<Box<str>, Problem>,
}

#[derive(Clone, Debug, Default)]
struct Objects {
    services: OrdMap<ServiceName, Arc<Service>>,
    entries: OrdMap<EntryName, Arc<Entry>>,
    routes: OrdMap<RouteName, Arc<Route>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Name {
    Service(ServiceName),
    Entry(EntryName),
}

impl Default for Paced {
    fn default() -> Self {
        Self {
            is_begun: false,
            wanted: Objects::default(),
            taken: Objects::default(),
            turns: Turns::default(),
            budget: FIRST,
            is_full: false,
            since: BTreeMap::new(),
            problems: BTreeMap::new(),
        }
    }
}

impl Paced {
    /// Sets the wanted objects. The cost grows with the changes since the last call.
    pub fn want(
        &mut self,
        services: &OrdMap<ServiceName, Arc<Service>>,
        entries: &OrdMap<EntryName, Arc<Entry>>,
        routes: &OrdMap<RouteName, Arc<Route>>,
    ) {
        let wanted = Objects {
            services: services.clone(),
            entries: entries.clone(),
            routes: routes.clone(),
        };
        // The first objects are applied at once: there are no earlier services that could be delayed.
        if !self.is_begun {
            self.is_begun = true;
            self.taken = wanted.clone();
            self.wanted = wanted;
            return;
        }
        for (name, stays) in changes(&self.wanted.services, services) {
            let [old, new] = [&self.taken.services, services].map(|of| of.get(&name));
            let cost =
                [old, new].map(|service| service.map_or(0, |service| cost::of_service(service)));
            let namespace = name.namespace();
            let object = Name::Service(name.clone());
            self.turns
                .put(namespace, &object, OBJECT + cost[0] + cost[1], stays);
        }
        for (name, stays) in changes(&self.wanted.entries, entries) {
            let [old, new] = [&self.taken.entries, entries].map(|of| of.get(&name));
            let cost = [old, new].map(|entry| entry.map_or(0, |entry| cost::of_entry(entry)));
            let namespace = name.namespace();
            let object = Name::Entry(name.clone());
            self.turns
                .put(namespace, &object, OBJECT + cost[0] + cost[1], stays);
        }
        self.wanted = wanted;
    }

    /// Applies the next changes. Returns whether the [problems](Self::problems) have changed.
    pub fn step(&mut self, now: Instant) -> bool {
        for name in self.turns.take(self.budget) {
            match name {
                Name::Service(name) => {
                    bring(&mut self.taken.services, &self.wanted.services, &name);
                }
                Name::Entry(name) => bring(&mut self.taken.entries, &self.wanted.entries, &name),
            }
        }
        self.is_full = self.is_behind() && self.turns.was_large();
        let waiting: BTreeSet<&str> = self.turns.namespaces().collect();
        for (name, _) in changes(&self.taken.routes, &self.wanted.routes) {
            let waits = [&self.taken.routes, &self.wanted.routes]
                .into_iter()
                .filter_map(|of| of.get(&name))
                .any(|route| concerns(route, &waiting));
            if !waits {
                bring(&mut self.taken.routes, &self.wanted.routes, &name);
            }
        }
        self.since
            .retain(|namespace, _| waiting.contains(&**namespace));
        for namespace in waiting {
            if !self.since.contains_key(namespace) {
                self.since.insert(namespace.into(), now);
            }
        }
        self.name(now)
    }

    /// Records the duration of the last step with all its consequences. If the step was full, this adapts the budget.
    pub fn took(&mut self, time: Duration) {
        if !self.is_full {
            return;
        }
        let budget = if time > STEP {
            self.budget / 2
        } else if time < STEP / 4 {
            self.budget * 2
        } else {
            self.budget
        };
        self.budget = budget.clamp(*BUDGETS.start(), *BUDGETS.end());
    }

    /// Returns whether changes wait for the next step.
    pub fn is_behind(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Returns the namespaces whose changes wait. A name in them may exist although it is not known.
    pub fn behind(&self) -> impl Iterator<Item = &str> {
        self.turns.namespaces()
    }

    /// Returns the services with all applied changes.
    pub const fn services(&self) -> &OrdMap<ServiceName, Arc<Service>> {
        &self.taken.services
    }

    /// Returns the entries with all applied changes.
    pub const fn entries(&self) -> &OrdMap<EntryName, Arc<Entry>> {
        &self.taken.entries
    }

    /// Returns the routes with all applied changes.
    pub const fn routes(&self) -> &OrdMap<RouteName, Arc<Route>> {
        &self.taken.routes
    }

    /// Returns a problem for each namespace that has waited for some time.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values()
    }

    fn name(&mut self, now: Instant) -> bool {
        let long = self
            .since
            .iter()
            .filter(|(_, since)| now.saturating_duration_since(**since) >= NAMED_AFTER);
        let named = long.map(|(namespace, _)| {
            let problem = Problem {
                gravity: Gravity::Warning,
                place: format!("namespace {namespace}"),
                text: "changes of its Services and ServiceEntries are not applied yet, because this namespace or another has \
                       more changes than the agent applies at a time; what was served before is served until then. Where \
                       this stays, change fewer objects at a time, or smaller ones, in the namespaces that are named so"
                    .to_owned(),
            };
            (namespace.clone(), problem)
        });
        let named: BTreeMap<_, _> = named.collect();
        let changed = named != self.problems;
        self.problems = named;
        changed
    }
}

/// Returns the names of the objects that differ, and whether each still exists.
fn changes<K: Ord + Clone, V: PartialEq>(
    old: &OrdMap<K, Arc<V>>,
    new: &OrdMap<K, Arc<V>>,
) -> Vec<(K, bool)> {
    let changes = old.diff(new).map(|change| match change {
        DiffItem::Add(name, _) | DiffItem::Update { new: (name, _), .. } => (name.clone(), true),
        DiffItem::Remove(name, _) => (name.clone(), false),
    });
    changes.collect()
}

/// Returns whether a route is in one of these namespaces, as its parents are, or leads to a Service in one. (A host's entry
/// can be in any namespace, and is not waited for.)
fn concerns(route: &Route, namespaces: &BTreeSet<&str>) -> bool {
    let of_backends = route
        .backends
        .iter()
        .filter_map(|backend| match &backend.to {
            BackendTo::Service(name) => Some(name.namespace()),
            BackendTo::Host(_) | BackendTo::Invalid(..) => None,
        });
    let mut all = of_backends.chain([&*route.name.namespace]);
    all.any(|namespace| namespaces.contains(namespace))
}

/// Copies the state of one object from `wanted`, or removes the object.
fn bring<K: Ord + Clone, V>(taken: &mut OrdMap<K, Arc<V>>, wanted: &OrdMap<K, Arc<V>>, name: &K) {
    match wanted.get(name) {
        Some(object) => _ = taken.insert(name.clone(), Arc::clone(object)),
        None => _ = taken.remove(name),
    }
}

#[cfg(test)]
mod tests {
    use model::{BackendRef, Parent, RouteKind};
    use serde_json::json;
    use smallvec::smallvec;

    use super::*;
    use crate::objects::{self, Findings, Outcome};

    /// The newest objects of the authors.
    #[derive(Default)]
    struct Wanted {
        services: OrdMap<ServiceName, Arc<Service>>,
        entries: OrdMap<EntryName, Arc<Entry>>,
        routes: OrdMap<RouteName, Arc<Route>>,
    }

    impl Wanted {
        /// Sets a route of the namespace's Service `web` to a Service of a namespace.
        fn route(&mut self, namespace: &str, to: &str) {
            let name = RouteName {
                namespace: namespace.into(),
                name: "route".into(),
                kind: RouteKind::Tcp,
            };
            let route = Route {
                name: name.clone(),
                created: None,
                parents: smallvec![Parent {
                    service: ServiceName::new(namespace, "web"),
                    port: None,
                    section: None,
                }],
                abroad: None,
                unsupported: None,
                backends: vec![BackendRef {
                    to: BackendTo::Service(ServiceName::new(to, "s99")),
                    port: Some(1),
                    weight: 1,
                }],
            };
            self.routes.insert(name, Arc::new(route));
        }

        /// Sets a Service with `ports` ports at one address. The port numbers show the version.
        fn service(&mut self, namespace: &str, name: &str, ports: u16, version: u16) {
            let port =
                |n: u16| json!({ "name": format!("p{n}"), "port": 1 + n + 10_000 * version });
            let object = json!({
                "metadata": { "name": name, "namespace": namespace },
                "spec": {
                    "clusterIPs": ["10.96.0.1"],
                    "ports": (0..ports).map(port).collect::<Vec<_>>(),
                },
            });
            let mut findings = Findings::default();
            let object = serde_json::from_value(object).unwrap();
            let Outcome::Served(service) = objects::service(object, &mut findings) else {
                panic!("{findings:?}");
            };
            self.services
                .insert(service.name.clone(), Arc::new(service));
        }

        /// Sets a ServiceEntry with `addresses` addresses.
        fn entry(&mut self, namespace: &str, name: &str, addresses: u32) {
            let named = (0..addresses).map(|n| std::net::Ipv4Addr::from_bits(0x0b00_0000 + n));
            let object = json!({
                "metadata": { "name": name, "namespace": namespace },
                "spec": {
                    "hosts": ["db.example.com"], "addresses": named.collect::<Vec<_>>(), "resolution": "STATIC",
                    "ports": [{ "number": 80, "name": "p", "protocol": "TCP" }],
                },
            });
            let mut findings = Findings::default();
            let object = serde_json::from_value(object).unwrap();
            let entry = objects::service_entry(object, &model::Node::default(), &mut findings);
            assert!(findings.faults.is_empty(), "{findings:?}");
            self.entries
                .insert(entry.entry.name.clone(), Arc::new(entry.entry));
        }

        fn want(&self, paced: &mut Paced) {
            paced.want(&self.services, &self.entries, &self.routes);
        }
    }

    fn name(namespace: &str, name: &str) -> ServiceName {
        ServiceName::new(namespace, name)
    }

    fn begun() -> (Paced, Wanted) {
        let (mut paced, mut wanted) = (Paced::default(), Wanted::default());
        wanted.service("shop", "web", 1, 0);
        wanted.want(&mut paced);
        paced.step(Instant::now());
        (paced, wanted)
    }

    #[test]
    fn the_first_view_is_taken_in_whole() {
        let (mut paced, mut wanted) = (Paced::default(), Wanted::default());
        for n in 0..100 {
            wanted.service("tenant", &format!("s{n}"), 1000, 0);
        }
        wanted.want(&mut paced);
        paced.step(Instant::now());
        assert!(!paced.is_behind());
        assert_eq!(*paced.services(), wanted.services);
    }

    #[test]
    fn changes_of_one_namespace_do_not_wait_for_those_of_another() {
        let (mut paced, mut wanted) = begun();
        for n in 0..100 {
            wanted.service("tenant", &format!("s{n:02}"), 500, 0);
            wanted.entry("tenant", &format!("e{n:02}"), 500);
        }
        let mut steps = 0;
        let mut most = 0;
        while steps == 0 || paced.is_behind() {
            steps += 1;
            wanted.service("shop", "web", 1, steps % 6);
            // The newest state of a waiting object counts.
            if steps == 2 {
                wanted.service("tenant", "s99", 500, 1);
                wanted.services.remove(&name("tenant", "s98"));
            }
            wanted.want(&mut paced);
            let before = paced.services().len() + paced.entries().len();
            paced.step(Instant::now());
            let web = |of: &OrdMap<_, _>| of.get(&name("shop", "web")).map(Arc::clone);
            assert_eq!(web(paced.services()), web(&wanted.services), "step {steps}");
            assert!(paced.behind().all(|namespace| namespace == "tenant"));
            most = most.max(paced.services().len() + paced.entries().len() - before);
            assert!(steps < 1000);
        }
        // A Service of 500 ports has at least 508 keys, so a step holds about 16 of them.
        assert!(
            (5..50).contains(&most),
            "{most} objects in one of {steps} steps"
        );
        assert_eq!(*paced.services(), wanted.services);
        assert_eq!(*paced.entries(), wanted.entries);
    }

    #[test]
    fn a_route_waits_for_its_services_and_for_no_others() {
        let (mut paced, mut wanted) = begun();
        wanted.route("shop", "shop");
        wanted.route("other", "shop");
        wanted.want(&mut paced);
        paced.step(Instant::now());
        assert_eq!(*paced.routes(), wanted.routes);
        for n in 0..100 {
            wanted.service("tenant", &format!("s{n:02}"), 500, 0);
        }
        wanted.route("shop", "tenant");
        wanted.route("tenant", "shop");
        wanted.route("third", "shop");
        let gone = wanted
            .routes
            .keys()
            .find(|name| &*name.namespace == "other");
        let gone = gone.cloned().unwrap();
        wanted.routes.remove(&gone);
        wanted.want(&mut paced);
        let mut steps = 0;
        while steps == 0 || paced.is_behind() {
            steps += 1;
            paced.step(Instant::now());
            let routes = paced.routes();
            assert!(!routes.contains_key(&gone));
            let has = |namespace: &str| routes.keys().any(|name| *name.namespace == *namespace);
            assert!(has("third"));
            // The route in `shop` leads where it led, and that in `tenant` is new.
            let is_there = paced.services().contains_key(&name("tenant", "s99"));
            let leads = routes.values().any(|route| {
                matches!(&route.backends[0].to, BackendTo::Service(to) if to.namespace() == "tenant")
            });
            assert!(is_there || !leads, "step {steps}");
            assert_eq!(
                (leads, has("tenant")),
                (!paced.is_behind(), !paced.is_behind())
            );
        }
        assert!(steps > 2);
        assert_eq!(*paced.routes(), wanted.routes);
    }

    #[test]
    fn who_waits_for_long_is_named_until_all_is_taken_in() {
        let (mut paced, mut wanted) = begun();
        let start = Instant::now();
        for n in 0..100 {
            wanted.service("tenant", &format!("s{n}"), 500, 0);
        }
        wanted.want(&mut paced);
        assert!(!paced.step(start));
        assert_eq!(paced.problems().count(), 0);
        assert!(paced.step(start + NAMED_AFTER));
        let places: Vec<_> = paced.problems().map(|problem| &*problem.place).collect();
        assert_eq!(places, ["namespace tenant"]);
        while paced.is_behind() {
            paced.step(start + NAMED_AFTER);
        }
        assert_eq!(paced.problems().count(), 0);
    }

    #[test]
    fn full_steps_adapt_to_the_machine_and_others_do_not() {
        let (mut paced, mut wanted) = begun();
        paced.took(Duration::from_secs(1));
        assert_eq!(paced.budget, FIRST);
        for n in 0..400 {
            wanted.service("tenant", &format!("s{n}"), 1000, 0);
        }
        wanted.want(&mut paced);
        for (time, budget) in [(30, FIRST / 2), (10, FIRST / 2), (1, FIRST)] {
            paced.step(Instant::now());
            paced.took(Duration::from_millis(time));
            assert_eq!(paced.budget, budget);
        }
        for (time, budget) in [
            (Duration::from_secs(1), BUDGETS.start()),
            (Duration::ZERO, BUDGETS.end()),
        ] {
            for _ in 0..10 {
                paced.step(Instant::now());
                paced.took(time);
            }
            assert_eq!(paced.budget, *budget);
        }
    }
}
