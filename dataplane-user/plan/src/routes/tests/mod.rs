use std::net::{IpAddr, Ipv4Addr};

use model::{
    At, Backend, BackendRef, EntryPort, EntryResolution, ExportTo, Host, Location, Parent,
    Protocol, RouteKind, ServicePort, ServiceType,
};
use proptest::prelude::*;
use threads::computed;

use super::*;

mod parts;

const NAMESPACES: [&str; 3] = ["one", "two", "evil"];

fn service(namespace: usize, name: &str, ports: u16, endpoints: u32) -> Service {
    let endpoint = |n: u32| Endpoint {
        hints: model::Hints::default(),
        ..Endpoint::new(Ipv4Addr::from_bits(0x0a00_0000 + n).into(), 80)
    };
    let port = |port: u16| ServicePort {
        name: port.to_string().into(),
        endpoints: (0..endpoints).map(endpoint).collect(),
        ..ServicePort::new(port, Protocol::Tcp)
    };
    Service {
        cluster_ips: smallvec::smallvec![Ipv4Addr::new(10, 96, 0, 1).into()],
        ports: (80..80 + ports).map(port).collect(),
        ..Service::new(
            ServiceName::new(NAMESPACES[namespace], name),
            ServiceType::ClusterIp,
        )
    }
}

fn entry(namespace: usize, name: &str, host: &str, export_to: ExportTo) -> Entry {
    Entry {
        name: EntryName::new(NAMESPACES[namespace], name),
        created: None,
        hosts: smallvec::smallvec![Host::new(host.into())],
        addresses: smallvec::SmallVec::new(),
        ranges: smallvec::SmallVec::new(),
        wants_vips: false,
        resolution: EntryResolution::Static,
        location: Location::External,
        export_to,
        ports: smallvec::smallvec![EntryPort {
            name: "tcp".into(),
            port: 80,
            protocol: Protocol::Tcp,
            target: None,
        }],
        preference: [None; 2],
        identities: Box::default(),
        backends: vec![Backend {
            hints: model::Hints::default(),
            at: At::Address(Ipv4Addr::new(203, 0, 113, 1).into()),
            ports: smallvec::SmallVec::new(),
            weight: 1,
            local: false,
        }],
    }
}

fn route(namespace: usize, name: &str, kind: RouteKind, to: Vec<BackendTo>) -> Route {
    let backend = |to: BackendTo| BackendRef {
        to,
        port: Some(80),
        weight: 1,
    };
    Route {
        name: RouteName {
            namespace: NAMESPACES[namespace].into(),
            name: name.into(),
            kind,
        },
        created: None,
        parents: smallvec::SmallVec::new(),
        abroad: None,
        unsupported: None,
        backends: to.into_iter().map(backend).collect(),
    }
}

fn parent(namespace: usize, name: &str, port: Option<u16>) -> Parent {
    Parent {
        service: ServiceName::new(NAMESPACES[namespace], name),
        port,
        section: None,
    }
}

#[derive(Clone, Debug, Default)]
struct World {
    routes: OrdMap<RouteName, Arc<Route>>,
    grants: OrdMap<ServiceName, Arc<Grant>>,
    services: OrdMap<ServiceName, Arc<Service>>,
    entries: OrdMap<EntryName, Arc<Entry>>,
}

impl World {
    fn sources(&self) -> Sources<'_> {
        Sources {
            routes: &self.routes,
            grants: &self.grants,
            services: &self.services,
            entries: &self.entries,
        }
    }

    /// The result of routes that have seen no earlier state.
    fn fresh(&self) -> (Routes, Routed) {
        let mut routes = Routes::within(MOST);
        let outcome = routes.take(self.sources());
        (routes, outcome)
    }
}

/// A limit so low that some routes exceed it.
const MOST: usize = 8;

/// A change that an author makes.
#[derive(Clone, Debug)]
enum Change {
    Service(usize, usize, Option<(u16, u32)>),
    Entry(usize, usize, Option<(usize, Option<usize>)>),
    Grant(usize, usize, Option<(usize, Option<usize>)>),
    Route(usize, usize, RouteKind, Option<Box<Drawn>>),
}

#[derive(Clone, Debug)]
struct Drawn {
    created: Option<i64>,
    parents: Vec<(usize, Option<u16>)>,
    backends: Vec<(To, u32)>,
    unsupported: bool,
}

#[derive(Clone, Debug)]
enum To {
    Service(usize, usize),
    Host(usize),
    Nothing,
}

fn change() -> impl Strategy<Value = Change> {
    let (of, which) = (0..3usize, 0..3usize);
    let kind = prop::sample::select(vec![
        RouteKind::Tcp,
        RouteKind::Tls,
        RouteKind::Http,
        RouteKind::Grpc,
    ]);
    let to = prop_oneof![
        4 => (0..3usize, 0..3usize).prop_map(|(of, which)| To::Service(of, which)),
        2 => (0..2usize).prop_map(To::Host),
        1 => Just(To::Nothing),
    ];
    let parent = (
        0..3usize,
        prop::option::of(prop::sample::select(vec![80u16, 81])),
    );
    let drawn = (
        prop::option::of(0i64..3),
        prop::collection::vec(parent, 1..3),
        prop::collection::vec((to, 0..3u32), 0..4),
        prop::bool::weighted(0.1),
    );
    let drawn = drawn.prop_map(|(created, parents, backends, unsupported)| {
        Box::new(Drawn {
            created,
            parents,
            backends,
            unsupported,
        })
    });
    let there = |p| prop::option::weighted(p, Just(()));
    prop_oneof![
        2 => (of.clone(), which.clone(), prop::option::weighted(0.9, (1u16..3, 0u32..6)))
            .prop_map(|(of, which, size)| Change::Service(of, which, size)),
        1 => (of.clone(), which.clone(), there(0.8), 0..2usize, prop::option::of(0..3usize))
            .prop_map(|(of, which, there, host, to)| Change::Entry(of, which, there.map(|()| (host, to)))),
        1 => (of.clone(), which.clone(), there(0.7), 0..3usize, prop::option::of(0..3usize))
            .prop_map(|(of, which, there, from, to)| Change::Grant(of, which, there.map(|()| (from, to)))),
        4 => (of, which, kind, prop::option::weighted(0.8, drawn))
            .prop_map(|(of, which, kind, drawn)| Change::Route(of, which, kind, drawn)),
    ]
}

fn word(letter: &str, which: usize) -> String {
    format!("{letter}{which}")
}

impl World {
    fn apply(&mut self, change: &Change) {
        match change {
            Change::Service(of, which, size) => {
                let name = ServiceName::new(NAMESPACES[*of], &word("s", *which));
                match size {
                    Some((ports, endpoints)) => {
                        let made = service(*of, name.name(), *ports, *endpoints);
                        self.services.insert(name, Arc::new(made));
                    }
                    None => _ = self.services.remove(&name),
                }
            }
            Change::Entry(of, which, to) => {
                let name = EntryName::new(NAMESPACES[*of], &word("e", *which));
                match to {
                    Some((host, to)) => {
                        let to = to.map_or(ExportTo::All, |to| {
                            ExportTo::Namespaces([NAMESPACES[to].into()].into())
                        });
                        let made = entry(*of, name.name(), &word("h", *host), to);
                        self.entries.insert(name, Arc::new(made));
                    }
                    None => _ = self.entries.remove(&name),
                }
            }
            Change::Grant(of, which, from) => {
                let name = ServiceName::new(NAMESPACES[*of], &word("g", *which));
                match from {
                    Some((from, to)) => {
                        let from = (RouteKind::Tcp, NAMESPACES[*from].into());
                        let made = Grant {
                            name: name.clone(),
                            from: [from].into(),
                            to: to.map(|to| [word("s", to).into()].into()),
                        };
                        self.grants.insert(name, Arc::new(made));
                    }
                    None => _ = self.grants.remove(&name),
                }
            }
            Change::Route(of, which, kind, drawn) => {
                let mut made = route(*of, &word("r", *which), *kind, Vec::new());
                let Some(drawn) = drawn else {
                    self.routes.remove(&made.name);
                    return;
                };
                made.created = drawn.created;
                made.unsupported = drawn.unsupported.then(|| "spec.rules".into());
                let parents = drawn.parents.iter();
                made.parents = parents
                    .map(|(which, port)| parent(*of, &word("s", *which), *port))
                    .collect();
                let backends = drawn.backends.iter();
                made.backends = backends
                    .map(|(to, weight)| BackendRef {
                        to: match to {
                            To::Service(of, which) => {
                                let name = ServiceName::new(NAMESPACES[*of], &word("s", *which));
                                BackendTo::Service(name)
                            }
                            To::Host(which) => BackendTo::Host(word("h", *which).into()),
                            To::Nothing => BackendTo::Invalid("InvalidKind", "Thing".into()),
                        },
                        port: Some(80),
                        weight: *weight,
                    })
                    .collect();
                self.routes.insert(made.name.clone(), Arc::new(made));
            }
        }
    }
}

fn said(routes: &Routes) -> Vec<Problem> {
    let mut problems: Vec<_> = routes.problems().cloned().collect();
    problems.sort();
    problems
}

proptest! {
    /// After any history, the result equals that of adding all objects in one step.
    #[test]
    fn what_came_before_makes_no_difference(steps in prop::collection::vec(prop::collection::vec(change(), 1..5), 1..25)) {
        let (mut world, mut routes) = (World::default(), Routes::within(MOST));
        let mut before = said(&routes);
        for step in steps {
            for change in &step {
                world.apply(change);
            }
            let outcome = routes.take(world.sources());
            let (fresh, wanted) = world.fresh();
            prop_assert_eq!(&outcome.services, &wanted.services);
            let now = said(&routes);
            prop_assert_eq!(&now, &said(&fresh));
            prop_assert!(outcome.other_problems || now == before);
            before = now;
        }
    }

    /// Changes to an author's routes do not affect Services of other namespaces or the results of their routes.
    #[test]
    fn routes_of_one_namespace_change_nothing_of_anothers(changes in prop::collection::vec(change(), 1..60)) {
        let mut world = World::default();
        for change in &changes {
            world.apply(change);
        }
        let mut without = world.clone();
        let routes = world.routes.iter().filter(|(name, _)| *name.namespace != *NAMESPACES[2]);
        without.routes = routes.map(|(name, route)| (name.clone(), Arc::clone(route))).collect();
        let ((beside, outcome), (alone, wanted)) = (world.fresh(), without.fresh());
        let others = |of: &Routed| -> Vec<_> {
            let all = of.services.iter().filter(|(name, _)| name.namespace() != NAMESPACES[2]);
            all.map(|(_, service)| Arc::clone(service)).collect()
        };
        prop_assert_eq!(others(&outcome), others(&wanted));
        let others = |of: &Routes| -> Vec<_> {
            said(of).into_iter().filter(|said| !said.place.contains(" evil/")).collect()
        };
        prop_assert_eq!(others(&beside), others(&alone));
    }
}

#[test]
fn a_namespace_that_leads_to_too_many_endpoints_loses_its_last_services_by_name() {
    let mut world = World::default();
    let mut put = |of: usize, name: &str, backends: u32| {
        let service = |name: &str, endpoints| Arc::new(service(of, name, 1, endpoints));
        let backend = format!("{name}-v1");
        for made in [service(name, 1), service(&backend, backends)] {
            world.services.insert(made.name.clone(), made);
        }
        let to = BackendTo::Service(ServiceName::new(NAMESPACES[of], &backend));
        let mut made = route(of, name, RouteKind::Tcp, vec![to]);
        made.parents.push(parent(of, name, None));
        world.routes.insert(made.name.clone(), Arc::new(made));
    };
    for (of, name, backends) in [(0, "a", 5), (0, "b", 6), (0, "c", 3), (1, "d", 8)] {
        put(of, name, backends);
    }
    let is_split = |outcome: &Routed, of: usize, name: &str| {
        let service = &outcome.services[&ServiceName::new(NAMESPACES[of], name)];
        service.ports[0].split.is_some()
    };
    let mut routes = Routes::within(MOST);
    let outcome = routes.take(world.sources());
    let split = [(0, "a"), (0, "b"), (0, "c"), (1, "d")];
    let split = |outcome: &Routed| split.map(|(of, name)| is_split(outcome, of, name));
    assert_eq!(split(&outcome), [true, false, true, true]);
    let says = said(&routes);
    assert_eq!(says.len(), 1);
    assert_eq!(says[0].place, "TCPRoute one/b");
    assert!(says[0].text.starts_with(
        "Accepted=False (UnsupportedValue): the routes of namespace one lead to more than 8 endpoints together, and \
         Service one/b is beyond that"
    ));
    // The service fits when another route leads to fewer endpoints.
    let fewer = Arc::new(service(0, "a-v1", 1, 1));
    world.services.insert(fewer.name.clone(), fewer);
    let outcome = routes.take(world.sources());
    assert_eq!(split(&outcome), [true, true, false, true]);
}

/// Clients from outside may reach a backend of another Service only if a grant of the backend's namespace allows it.
#[test]
fn a_service_that_is_reached_from_outside_needs_a_grant() {
    type Expose = fn(&mut Service, IpAddr);
    let outside = Ipv4Addr::new(192, 0, 2, 1).into();
    let exposed: [(&str, Expose); 4] = [
        ("", |_, _| ()),
        ("external", |of, addr| of.external_ips.push(addr)),
        ("balancer", |of, addr| of.load_balancer_ips.push(addr)),
        ("port", |of, _| of.ports[0].node_port = Some(30_000)),
    ];
    // The grant's kind of routes, the namespace that it is for, and its Service.
    let grants = [
        (None, false),
        (Some((RouteKind::Tcp, "one", None)), true),
        (Some((RouteKind::Tcp, "one", Some("to"))), true),
        (Some((RouteKind::Tcp, "one", Some("other"))), false),
        (Some((RouteKind::Tls, "one", None)), false),
        (Some((RouteKind::Tcp, "evil", None)), false),
    ];
    let backend = ServiceName::new("two", "to");
    for (how, expose) in exposed {
        let mut world = World::default();
        let mut from = service(0, "from", 1, 1);
        expose(&mut from, outside);
        for made in [from, service(1, "to", 1, 2)] {
            world.services.insert(made.name.clone(), Arc::new(made));
        }
        let to = vec![BackendTo::Service(backend.clone())];
        let mut made = route(0, "r", RouteKind::Tcp, to);
        made.parents.push(parent(0, "from", None));
        world.routes.insert(made.name.clone(), Arc::new(made));
        let mut routes = Routes::within(MOST);
        for (grant, allows) in &grants {
            let name = ServiceName::new("two", "g");
            let grant_of = |(kind, namespace, to): &(RouteKind, &str, Option<&str>)| {
                let made = Grant {
                    name: name.clone(),
                    from: [(*kind, (*namespace).into())].into(),
                    to: to.map(|to| [to.into()].into()),
                };
                (name.clone(), Arc::new(made))
            };
            world.grants = grant.iter().map(grant_of).collect();
            // Also if the grant has come, changed or gone since.
            routes.take(world.sources());
            let says = said(&routes);
            let may = how.is_empty() || *allows;
            assert_eq!(says.is_empty(), may, "{how} {grant:?}: {says:?}");
            let is_meant = |of: &Problem| of.text.contains("ReferenceGrant");
            assert!(says.iter().all(is_meant), "{says:?}");
        }
    }
}

/// Returns the time for `count` routes with `count` of each other object that an author can write against the number of
/// routes.
fn time_of(count: usize) -> std::time::Duration {
    let mut world = World::default();
    let ports = u16::try_from(count).unwrap();
    let put = Arc::new(service(2, "web", ports, 1));
    world.services.insert(put.name.clone(), put);
    let far = Arc::new(service(0, "far", 1, 0));
    world.services.insert(far.name.clone(), Arc::clone(&far));
    for which in 0..count {
        let name = which.to_string();
        let to = [
            BackendTo::Service(far.name.clone()),
            BackendTo::Host("h".into()),
        ];
        let kind = if which % 2 == 0 {
            RouteKind::Tcp
        } else {
            RouteKind::Tls
        };
        let mut made = route(2, &name, kind, to.into());
        made.parents.push(parent(2, "web", None));
        world.routes.insert(made.name.clone(), Arc::new(made));
        let hidden = ExportTo::Namespaces([NAMESPACES[1].into()].into());
        let made = entry(0, &name, "h", hidden);
        world.entries.insert(made.name.clone(), Arc::new(made));
        let name = ServiceName::new(NAMESPACES[0], &name);
        let from = [(RouteKind::Tcp, name.name().into())].into();
        let made = Grant {
            name: name.clone(),
            from,
            to: None,
        };
        world.grants.insert(name, Arc::new(made));
    }
    let start = computed();
    let (_, outcome) = world.fresh();
    let web = &outcome.services[&ServiceName::new(NAMESPACES[2], "web")];
    assert!(web.ports.iter().all(|port| port.split.is_some()));
    computed().saturating_sub(start)
}

#[test]
fn routes_take_time_for_what_was_written_and_not_for_each_of_one_kind_with_each_of_another() {
    time_of(100);
    let (some, more) = (time_of(500), time_of(4000));
    assert!(more < some * 30, "{some:?} for 500, {more:?} for 4000");
}

/// Returns the time for changes of another namespace's Service and grants, when `count` routes of one Service lead
/// there.
fn time_beside(count: usize) -> std::time::Duration {
    let mut world = World::default();
    let far = service(0, "far", 1, 1);
    for which in 0..count {
        let to = BackendTo::Service(far.name.clone());
        let mut made = route(2, &which.to_string(), RouteKind::Tcp, vec![to]);
        made.parents.push(parent(2, "web", None));
        world.routes.insert(made.name.clone(), Arc::new(made));
    }
    // One of the routes is in force.
    let web = Arc::new(service(2, "web", 1, 1));
    world.services.insert(web.name.clone(), web);
    let mut routes = Routes::default();
    routes.take(world.sources());
    let start = computed();
    for step in 0..200 {
        let far = Arc::new(service(0, "far", 1, 1 + step % 2));
        world.services.insert(far.name.clone(), far);
        let grant = Grant {
            name: ServiceName::new(NAMESPACES[0], "g"),
            from: [(RouteKind::Tcp, NAMESPACES[1].into())].into(),
            to: (step % 2 == 0).then(|| ["far".into()].into()),
        };
        world.grants.insert(grant.name.clone(), Arc::new(grant));
        routes.take(world.sources());
    }
    computed().saturating_sub(start)
}

#[test]
fn routes_that_are_not_followed_cost_those_nothing_to_whom_they_lead() {
    time_beside(10);
    let (few, many) = (time_beside(10), time_beside(10_000));
    assert!(many < few * 10, "{few:?} beside 10, {many:?} beside 10 000");
}
