//! The backends that a route leads to, and their endpoints.

use super::*;

/// Service `from` with so many ports, and a route that leads to these backends.
fn world(namespace: usize, ports: u16, to: Vec<BackendTo>) -> World {
    let mut world = World::default();
    let from = service(namespace, "from", ports, 1);
    world.services.insert(from.name.clone(), Arc::new(from));
    let mut route = route(namespace, "r", RouteKind::Tcp, to);
    route.parents.push(parent(namespace, "from", None));
    world.routes.insert(route.name.clone(), Arc::new(route));
    world
}

fn from(world: &World, namespace: usize) -> Service {
    let (_, outcome) = world.fresh();
    (*outcome.services[&ServiceName::new(NAMESPACES[namespace], "from")]).clone()
}

/// The namespace of a route, entries with a host by namespace and age, whether all namespaces see them, and the entry to which
/// the host belongs.
#[test]
fn a_host_is_that_of_the_namespaces_own_entry_then_of_the_oldest() {
    for (namespace, entries, wanted) in [
        (0, [(0, 9, true), (1, 1, true)], 0),
        (1, [(0, 1, true), (1, 9, true)], 1),
        (2, [(0, 9, true), (1, 1, true)], 1),
        (2, [(0, 1, false), (1, 9, true)], 1),
    ] {
        let mut world = world(namespace, 1, vec![BackendTo::Host("h".into())]);
        let entries = entries.map(|(of, created, is_public)| {
            let export = if is_public {
                ExportTo::All
            } else {
                ExportTo::Namespaces([NAMESPACES[of].into()].into())
            };
            let mut made = entry(of, "e", "h", export);
            made.created = Some(created);
            made
        });
        let all = entries.iter();
        world.entries = all
            .map(|of| (of.name.clone(), Arc::new(of.clone())))
            .collect();
        let found = from(&world, namespace);
        let split = found.ports[0].split.as_ref().unwrap();
        let (backend, _) = split.parts[0].backend.as_ref().unwrap();
        let wanted = crate::entries::service_name(&entries[wanted].name);
        assert_eq!(backend.name, wanted, "{namespace} {entries:?}");
    }
}

#[test]
fn of_hosts_that_are_endpoints_a_route_leads_to_the_one_that_it_names() {
    let mut world = world(
        0,
        1,
        ["a", "b"].map(|of| BackendTo::Host(of.into())).to_vec(),
    );
    let mut made = entry(0, "e", "a", ExportTo::All);
    made.hosts.push(Host::new("b".into()));
    made.resolution = EntryResolution::Hosts;
    for (host, last) in made.hosts.iter_mut().zip([1, 2]) {
        host.endpoints.push([10, 0, 0, last].into());
    }
    world.entries.insert(made.name.clone(), Arc::new(made));
    let found = from(&world, 0);
    let parts = found.ports[0].split.as_ref().unwrap().parts.iter();
    let parts = parts.map(|part| {
        let (backend, port) = part.backend.as_ref().unwrap();
        let endpoints = backend.ports[*port].endpoints.iter();
        endpoints.map(|of| of.addr.to_string()).collect::<String>()
    });
    assert_eq!(parts.collect::<Vec<_>>(), ["10.0.0.1", "10.0.0.2"]);
}

/// Two backends have one endpoint, which is terminating for the first, for the second, or for both of them.
#[test]
fn an_endpoint_ends_if_it_does_so_for_all_backends() {
    let names = ["a", "b"].map(|of| ServiceName::new(NAMESPACES[0], of));
    for terminating in [[true, false], [false, true], [true, true]] {
        let mut world = world(0, 1, names.clone().map(BackendTo::Service).to_vec());
        for (name, terminating) in names.iter().zip(terminating) {
            let mut made = service(0, name.name(), 1, 1);
            made.ports[0].endpoints[0].terminating = terminating;
            world.services.insert(name.clone(), Arc::new(made));
        }
        let found = &from(&world, 0).ports[0].endpoints;
        let found: Vec<_> = found.iter().map(|of| of.terminating).collect();
        assert_eq!(found, [terminating == [true; 2]], "{terminating:?}");
    }
}

/// Of so many parts the first leads nowhere: its percentage.
#[test]
fn a_part_that_leads_nowhere_is_refused() {
    for (parts, percent) in [(3, 33), (6, 17)] {
        let to = BackendTo::Service(ServiceName::new(NAMESPACES[0], "from"));
        let mut all = vec![to; parts];
        all[0] = BackendTo::Invalid("InvalidKind", "Thing".into());
        let says = said(&world(0, 1, all).fresh().0);
        assert_eq!(says.len(), 1);
        let wanted = format!("backendRefs[0]: Thing; {percent} % of the connections are refused");
        assert!(says[0].text.ends_with(&wanted), "{says:?}");
    }
}

/// The endpoints count at each port of a Service.
#[test]
fn a_service_with_two_ports_leads_to_its_endpoints_twice() {
    for (ports, endpoints, is_split) in [(1, 8, true), (1, 9, false), (2, 4, true), (2, 5, false)] {
        let to = ServiceName::new(NAMESPACES[0], "to");
        let mut world = world(0, ports, vec![BackendTo::Service(to.clone())]);
        let to = (to, Arc::new(service(0, "to", 1, endpoints)));
        world.services.extend([to]);
        let found = from(&world, 0).ports[0].split.is_some();
        assert_eq!(found, is_split, "{ports} {endpoints}");
    }
}
