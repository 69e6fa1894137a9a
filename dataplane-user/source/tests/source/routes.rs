//! The effect of routes on their Services: from manifests to the slots of the tables.

use std::{collections::BTreeMap, sync::Arc};

use dataplane_source::manifests::{self, Loaded, Manifests};
use model::{Node, Service, ServiceName, Snapshot, TrafficPolicy, Weights};
use plan::{
    Planner,
    entries::Entries,
    routes::{Routes, Sources},
};
use serde_json::{Value, json};

fn load(objects: &[Value], manifests: &mut Manifests) -> Loaded {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    std::fs::write(file.path(), list.to_string()).unwrap();
    let loaded = manifests.read(&[file.path().to_owned()]);
    loaded.unwrap_or_else(|errors| panic!("{errors}"))
}

/// A Service of `shop` at the TCP port 80 and the UDP port 53, with endpoints 10.244.NUMBER.1, 2, ….
fn service(name: &str, number: u8, endpoints: u8) -> [Value; 2] {
    of("shop", name, number, endpoints)
}

fn of(namespace: &str, name: &str, number: u8, endpoints: u8) -> [Value; 2] {
    let ports = json!([
        { "name": "web", "port": 80, "protocol": "TCP" },
        { "name": "dns", "port": 53, "protocol": "UDP" },
    ]);
    let endpoints = (1..=endpoints).map(|last| {
        let node = if last == 1 { "node1" } else { "node2" };
        json!({ "addresses": [format!("10.244.{number}.{last}")], "nodeName": node })
    });
    [
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": name, "namespace": namespace },
            "spec": { "clusterIP": format!("10.96.0.{number}"), "ports": ports },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{name}-x"), "namespace": namespace,
                "labels": { "kubernetes.io/service-name": name },
            },
            "addressType": "IPv4",
            "ports": [
                { "name": "web", "port": 80, "protocol": "TCP" },
                { "name": "dns", "port": 53, "protocol": "UDP" },
            ],
            "endpoints": endpoints.collect::<Vec<_>>(),
        }),
    ]
}

/// A route of `shop` that is attached to Service `web`.
fn route(kind: &str, name: &str, rule: Value) -> Value {
    let mut route = json!({
        "apiVersion": "gateway.networking.k8s.io/v1alpha2", "kind": kind,
        "metadata": {
            "name": name, "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "parentRefs": [{ "group": "", "kind": "Service", "name": "web" }],
        },
    });
    route["spec"]["rules"] = Value::Array(vec![rule]);
    route
}

fn split(backends: Value) -> Value {
    let mut rule = json!({});
    rule["backendRefs"] = backends;
    route("TCPRoute", "split", rule)
}

/// The state of objects and routes over several steps.
#[derive(Default)]
struct World {
    entries: Option<Entries>,
    manifests: Option<Manifests>,
    routes: Routes,
    snapshot: Snapshot,
    services: imbl::OrdMap<ServiceName, Arc<Service>>,
    loaded: Vec<String>,
}

impl World {
    fn of(objects: &[Value]) -> Self {
        let mut world = Self::default();
        world.next(objects);
        world
    }

    /// Services `web` (1), `a` (2, three endpoints) and `b` (3, two endpoints), and these objects.
    fn with(objects: &[Value]) -> Self {
        let base = [service("web", 1, 1), service("a", 2, 3), service("b", 3, 2)];
        Self::of(&[base.concat().as_slice(), objects].concat())
    }

    fn next(&mut self, objects: &[Value]) {
        let node = Node {
            name: "node1".into(),
            ..Node::default()
        };
        let manifests = self.manifests.get_or_insert_with(|| Manifests::new(&node));
        let loaded = load(objects, manifests);
        self.snapshot = loaded.snapshot;
        let problems = self.snapshot.problems.iter();
        self.loaded = problems.map(|of| of.text.clone()).collect();
        let Snapshot {
            entries, services, ..
        } = &self.snapshot;
        let of_entries = self.entries.get_or_insert_with(|| Entries::new([]));
        let taken = of_entries.take(entries, services, &self.snapshot, 1_800_000_000);
        let routed = self.routes.take(Sources {
            routes: &self.snapshot.routes,
            grants: &self.snapshot.grants,
            services: &taken.services,
            entries: &taken.entries,
        });
        // The result equals that of reading all objects in one step.
        let fresh = Routes::default().take(Sources {
            routes: &self.snapshot.routes,
            grants: &self.snapshot.grants,
            services: &taken.services,
            entries: &taken.entries,
        });
        assert_eq!(routed.services, fresh.services);
        self.services = routed.services;
    }

    /// Returns the part of each backend of `web`'s TCP port, by the third byte of its endpoints' addresses. 0 stands
    /// for refused connections.
    fn parts(&self) -> BTreeMap<u8, f64> {
        self.parts_of("web", TrafficPolicy::Cluster)
    }

    fn parts_of(&self, name: &str, policy: TrafficPolicy) -> BTreeMap<u8, f64> {
        let service = &self.services[&ServiceName::new("shop", name)];
        let shares = service.ports[0].shares(true, policy);
        let endpoints = shares.endpoints.iter().map(|(endpoint, weight)| {
            let std::net::IpAddr::V4(addr) = endpoint.addr else {
                panic!("{endpoint:?}")
            };
            (addr.octets()[2], *weight)
        });
        let refused = (shares.refused > 0).then_some((0, shares.refused));
        let all: Vec<_> = endpoints.chain(refused).collect();
        let places: Vec<u8> = Weights::repeated(&all).collect();
        let mut parts = BTreeMap::new();
        for of in &places {
            *parts.entry(*of).or_default() += 1.0 / f64::from(u32::try_from(places.len()).unwrap());
        }
        parts
    }

    #[track_caller]
    fn are(&self, wanted: &[(u8, f64)]) {
        let parts = self.parts();
        let wanted: BTreeMap<u8, f64> = wanted.iter().copied().collect();
        let all: std::collections::BTreeSet<_> = parts.keys().chain(wanted.keys()).collect();
        for of in all {
            let [a, b] = [&parts, &wanted].map(|of_| of_.get(of).copied().unwrap_or_default());
            assert!(
                (a - b).abs() < 0.001,
                "{parts:?}, not {wanted:?}; {:?}",
                self.says()
            );
        }
    }

    fn says(&self) -> Vec<String> {
        let problems = self.routes.problems();
        problems
            .map(|of| format!("{}: {}", of.place, of.text))
            .collect()
    }

    #[track_caller]
    fn says_only(&self, begin: &str) {
        let says = self.says();
        assert!(
            says.len() == 1 && says[0].starts_with(begin),
            "{says:#?}, not {begin}"
        );
    }
}

/// The Service's own endpoints only.
const OWN: &[(u8, f64)] = &[(1, 1.0)];

#[test]
fn weights_are_those_of_backends_however_many_endpoints_each_has() {
    let weighted = |a: u32, b: u32| {
        split(json!([
            { "name": "a", "port": 80, "weight": a }, { "name": "b", "port": 80, "weight": b },
        ]))
    };
    for (a, b) in [(1, 1), (9, 1), (90, 10), (0, 5), (997, 3)] {
        let world = World::with(&[weighted(a, b)]);
        let sum = f64::from(a + b);
        world.are(&[(2, f64::from(a) / sum), (3, f64::from(b) / sum)]);
        assert!(world.says().is_empty() && world.loaded.is_empty());
        // Routes do not apply to UDP.
        let web = &world.services[&ServiceName::new("shop", "web")];
        assert!(web.ports[1].split.is_none() && web.ports[1].endpoints.len() == 1);
        // The backend's own address leads only to the backend.
        let a = &world.services[&ServiceName::new("shop", "a")];
        assert!(a.ports.iter().all(|port| port.split.is_none()));
    }
    // A missing weight is 1.
    let world = World::with(&[split(json!([
        { "name": "a", "port": 80 }, { "group": "", "kind": "Service", "name": "b", "port": 80 },
    ]))]);
    world.are(&[(2, 0.5), (3, 0.5)]);
}

#[test]
fn a_change_of_weight_is_one_flip_and_a_route_that_goes_gives_the_endpoints_back() {
    let base = [service("web", 1, 1), service("a", 2, 3), service("b", 3, 2)].concat();
    let weighted = |weight: u32| {
        split(json!([
            { "name": "a", "port": 80, "weight": weight }, { "name": "b", "port": 80 },
        ]))
    };
    let mut world = World::of(&base);
    let mut planner = Planner::new();
    let plan = |world: &World, planner: &mut Planner| {
        let snapshot = Snapshot {
            services: world.services.clone(),
            ..world.snapshot.clone()
        };
        let writes = planner.plan(&snapshot).writes;
        let is_pool = |write: &&plan::Write| matches!(write, plan::Write::Pool { .. });
        (writes.len(), writes.iter().filter(is_pool).count())
    };
    plan(&world, &mut planner);
    world.are(OWN);
    for weight in [3, 5] {
        world.next(&[base.as_slice(), &[weighted(weight)]].concat());
        assert_eq!(
            plan(&world, &mut planner),
            (2, 1),
            "the slots, and one pool"
        );
    }
    // A backend gets another endpoint.
    let more = [service("web", 1, 1), service("a", 2, 4), service("b", 3, 2)].concat();
    world.next(&[more.as_slice(), &[weighted(5)]].concat());
    world.are(&[(2, 5.0 / 6.0), (3, 1.0 / 6.0)]);
    world.next(&more);
    world.are(OWN);
    assert!(world.says().is_empty());
}

/// Each row: the backends, their resulting parts, and the messages in `status`.
#[test]
fn a_backend_that_cannot_be_reached_keeps_its_part_which_is_refused() {
    let entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "name": "db", "namespace": "shop" },
        "spec": {
            "hosts": ["db.example.com"], "resolution": "STATIC", "addresses": ["203.0.113.1"],
            "ports": [{ "number": 80, "name": "tcp", "protocol": "TCP", "targetPort": 5432 }],
            "endpoints": [{ "address": "10.244.9.1" }, { "address": "10.244.9.2", "weight": 3 }],
        },
    });
    let mut hidden = entry.clone();
    hidden["metadata"]["name"] = json!("hidden");
    hidden["metadata"]["namespace"] = json!("other");
    hidden["spec"]["hosts"] = json!(["hidden.example.com"]);
    hidden["spec"]["addresses"] = json!(null);
    hidden["spec"]["exportTo"] = json!(["."]);
    let host = |name: &str| json!({ "group": "networking.istio.io", "kind": "Hostname", "name": name, "port": 80 });
    let mut in_namespace = host("db.example.com");
    in_namespace["namespace"] = json!("shop");
    let mut other_port = host("db.example.com");
    other_port["port"] = json!(81);
    let alias = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "alias", "namespace": "shop" },
        "spec": { "type": "ExternalName", "externalName": "x.example.com" },
    });
    let others = [
        [entry, hidden, alias].as_slice(),
        &of("other", "far", 7, 1),
        &service("empty", 8, 0),
    ]
    .concat();
    let refused: &[(u8, f64)] = &[(0, 0.25), (2, 0.75)];
    for (backend, parts, says) in [
        (host("db.example.com"), &[(9, 0.25), (2, 0.75)][..], ""),
        (json!({ "name": "empty", "port": 80 }), refused, ""),
        (
            json!({ "name": "none", "port": 80 }),
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: there is no Service shop/none; 25 % of \
             the connections are refused",
        ),
        (
            json!({ "name": "b", "port": 81 }),
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: Service shop/b has no TCP port 81",
        ),
        (
            json!({ "name": "b", "port": 53 }),
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: Service shop/b has no TCP port 53",
        ),
        (
            other_port,
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: the ServiceEntry of host db.example.com has \
             no TCP port 81",
        ),
        (
            json!({ "name": "b" }),
            refused,
            "ResolvedRefs=False (UnsupportedValue): spec.rules[0].backendRefs[1]: port is missing",
        ),
        (
            json!({ "name": "alias", "port": 80 }),
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: Service shop/alias is of type \
             ExternalName",
        ),
        (
            json!({ "name": "far", "namespace": "other", "port": 80 }),
            &[(7, 0.25), (2, 0.75)],
            "",
        ),
        (
            host("hidden.example.com"),
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: no ServiceEntry that namespace shop sees \
             has the host hidden.example.com",
        ),
        (
            in_namespace,
            refused,
            "ResolvedRefs=False (InvalidKind): spec.rules[0].backendRefs[1]: namespace: a Hostname is in no namespace",
        ),
        (
            json!({ "name": "none", "port": 80, "weight": 0 }),
            &[(2, 1.0)],
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: there is no Service shop/none; its \
             weight is 0, so that no connections are refused",
        ),
        (
            host("a b"),
            refused,
            "ResolvedRefs=False (BackendNotFound): spec.rules[0].backendRefs[1]: \"a b\" is not a host",
        ),
        (
            json!({ "group": "x.example.com", "kind": "Thing", "name": "b", "port": 80 }),
            refused,
            "ResolvedRefs=False (InvalidKind): spec.rules[0].backendRefs[1]: Thing of x.example.com cannot be a backend",
        ),
    ] {
        let route = split(json!([{ "name": "a", "port": 80, "weight": 3 }, backend]));
        let world = World::with(&[others.as_slice(), &[route]].concat());
        world.are(parts);
        if says.is_empty() {
            assert!(world.says().is_empty(), "{:?}", world.says());
        } else {
            world.says_only(&format!("TCPRoute shop/split: {says}"));
        }
    }
    // No backend is left, so no endpoint is chosen.
    let world = World::with(&[split(json!([{ "name": "none", "port": 80 }]))]);
    assert!(
        world.services[&ServiceName::new("shop", "web")].ports[0]
            .endpoints
            .is_empty()
    );
    let world = World::with(&[split(json!([{ "name": "a", "port": 80, "weight": 0 }]))]);
    assert!(world.parts().is_empty() || world.parts().keys().eq(&[0]));
    world.says_only(
        "TCPRoute shop/split: spec.rules[0].backendRefs: no backend has a weight above 0",
    );
}

/// An entry does not know that its endpoint is on this node, and states that it is ready.
#[test]
fn an_endpoint_that_several_backends_have_is_what_it_is_for_any_of_them() {
    let mut unready = service("b", 3, 2);
    unready[1]["endpoints"][0]["conditions"] = json!({ "ready": false, "serving": false });
    let entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "name": "ext", "namespace": "shop" },
        "spec": {
            "hosts": ["ext.example.com"], "resolution": "STATIC",
            "ports": [{ "number": 80, "name": "tcp", "protocol": "TCP" }],
            "endpoints": [{ "address": "10.244.2.1" }, { "address": "10.244.3.1" }],
        },
    });
    let host = json!({
        "group": "networking.istio.io", "kind": "Hostname", "name": "ext.example.com", "port": 80,
    });
    let route = split(json!([
        host, { "name": "a", "port": 80 }, { "name": "b", "port": 80 },
    ]));
    let objects = [
        service("web", 1, 1).to_vec(),
        service("a", 2, 1).to_vec(),
        unready.to_vec(),
        vec![entry, route],
    ];
    let world = World::of(&objects.concat());
    let web = &world.services[&ServiceName::new("shop", "web")];
    let endpoints = web.ports[0].endpoints.iter();
    let all: Vec<_> = endpoints
        .map(|e| (e.addr.to_string(), e.local, e.ready && e.serving))
        .collect();
    let of = |addr: &str, local| (addr.to_owned(), local, true);
    assert_eq!(
        all,
        [
            of("10.244.2.1", true),
            of("10.244.3.1", true),
            of("10.244.3.2", false)
        ]
    );
}

/// A backend stands for its Service's own endpoints, even if routes are attached to that Service: there is no loop.
#[test]
fn routes_that_lead_to_each_other_and_to_themselves_lead_to_endpoints() {
    let attached = |to: &str, backends: Value| {
        let mut route = split(backends);
        route["metadata"]["name"] = json!(to);
        route["spec"]["parentRefs"][0]["name"] = json!(to);
        route
    };
    let refs = |names: &[&str]| {
        let refs = names.iter().map(|name| json!({ "name": name, "port": 80 }));
        Value::Array(refs.collect())
    };
    let world = World::with(&[
        attached("web", refs(&["web", "a", "a"])),
        attached("a", refs(&["web", "b"])),
    ]);
    world.are(&[(1, 1.0 / 3.0), (2, 2.0 / 3.0)]);
    let a = world.parts_of("a", TrafficPolicy::Cluster);
    assert_eq!(a.keys().copied().collect::<Vec<_>>(), [1, 3]);
    assert!(world.says().is_empty(), "{:?}", world.says());
}

/// Clients of cluster IPs can reach the other namespace's Service without the route; clients from outside cannot.
#[test]
fn a_grant_lets_a_route_of_an_exposed_service_lead_into_another_namespace() {
    let far = split(json!([{ "name": "far", "namespace": "other", "port": 80 }]));
    let exposed = |field: &str, value: Value| {
        let mut objects = [service("web", 1, 1), of("other", "far", 7, 1)].concat();
        let web = &mut objects[0];
        *web.pointer_mut(field).unwrap() = value;
        web["spec"]["type"] = json!("LoadBalancer");
        objects.push(far.clone());
        World::of(&objects)
    };
    let ports = |node_port: Value| json!([{ "name": "web", "port": 80, "nodePort": node_port }]);
    let world = exposed("/spec/ports", ports(json!(null)));
    world.are(&[(7, 1.0)]);
    assert!(world.says().is_empty(), "{:?}", world.says());
    let object = json!({ "clusterIP": "10.96.0.1", "externalIPs": ["203.0.113.1"], "ports": ports(json!(null)) });
    for world in [
        exposed("/spec/ports", ports(json!(30080))),
        exposed("/spec", object),
    ] {
        world.are(&[(0, 1.0)]);
        world.says_only(
            "TCPRoute shop/split: ResolvedRefs=False (RefNotPermitted): spec.rules[0].backendRefs[0]: Service shop/web has \
             node ports or external addresses, and no ReferenceGrant of namespace other",
        );
    }
    let mut base = [
        service("web", 1, 1),
        service("a", 2, 3),
        of("other", "far", 7, 1),
    ]
    .concat();
    base[0]["spec"]["type"] = json!("NodePort");
    base[0]["spec"]["ports"][0]["nodePort"] = json!(30080);
    let route = far;
    let grant = |from: Value, to: Value| {
        json!({
            "apiVersion": "gateway.networking.k8s.io/v1beta1", "kind": "ReferenceGrant",
            "metadata": { "name": "in", "namespace": "other" },
            "spec": { "from": [from], "to": [to] },
        })
    };
    let gateway = "gateway.networking.k8s.io";
    let from = |kind: &str, namespace: &str| json!({ "group": gateway, "kind": kind, "namespace": namespace });
    let to = |kind: &str, name: Value| json!({ "group": "", "kind": kind, "name": name });
    let mut world = World::of(&[base.as_slice(), std::slice::from_ref(&route)].concat());
    for (grant, permits) in [
        (
            grant(from("TCPRoute", "shop"), to("Service", json!("far"))),
            true,
        ),
        (
            grant(from("TCPRoute", "shop"), to("Service", json!(null))),
            true,
        ),
        (
            grant(from("TCPRoute", "shop"), to("Service", json!("near"))),
            false,
        ),
        (
            grant(from("TCPRoute", "shop"), to("Secret", json!("far"))),
            false,
        ),
        (
            grant(from("HTTPRoute", "shop"), to("Service", json!("far"))),
            false,
        ),
        (
            grant(from("TCPRoute", "web"), to("Service", json!("far"))),
            false,
        ),
    ] {
        world.next(&[base.as_slice(), &[route.clone(), grant.clone()]].concat());
        assert_eq!(world.parts().contains_key(&7), permits, "{grant}");
        assert_eq!(world.says().is_empty(), permits, "{:?}", world.says());
        world.next(&[base.as_slice(), std::slice::from_ref(&route)].concat());
        assert!(!world.parts().contains_key(&7));
    }
}

/// Each row: a route that needs more than layer 4, or is not for this node, and the beginning of its message.
#[test]
fn what_needs_layer_7_is_named_and_the_service_keeps_its_endpoints() {
    let refs = json!([{ "name": "a", "port": 80 }]);
    let with = |kind: &str, field: &str, value: Value| {
        let mut route = route(kind, "split", json!({ "backendRefs": refs }));
        *route
            .pointer_mut("/spec")
            .unwrap()
            .pointer_mut("/rules/0")
            .unwrap() = json!({ "backendRefs": refs, field: value });
        route
    };
    for (kind, field, value, wanted) in [
        (
            "HTTPRoute",
            "matches",
            json!([{ "path": { "type": "Exact", "value": "/x" } }]),
            "matches[0]",
        ),
        (
            "HTTPRoute",
            "matches",
            json!([{ "path": { "value": "/x" } }]),
            "matches[0]",
        ),
        (
            "HTTPRoute",
            "matches",
            json!([{ "headers": [{ "name": "a", "value": "b" }] }]),
            "matches[0]",
        ),
        (
            "HTTPRoute",
            "matches",
            json!([{ "queryParams": [{ "name": "a", "value": "b" }] }]),
            "matches[0]",
        ),
        (
            "HTTPRoute",
            "matches",
            json!([{}, { "method": "GET" }]),
            "matches[1]",
        ),
        (
            "GRPCRoute",
            "matches",
            json!([{ "method": { "service": "x" } }]),
            "matches[0]",
        ),
        (
            "HTTPRoute",
            "filters",
            json!([{ "type": "RequestMirror" }]),
            "filters",
        ),
        (
            "GRPCRoute",
            "filters",
            json!([{ "type": "RequestMirror" }]),
            "filters",
        ),
        (
            "HTTPRoute",
            "timeouts",
            json!({ "request": "1s" }),
            "timeouts",
        ),
        ("HTTPRoute", "retry", json!({ "attempts": 1 }), "retry"),
        (
            "HTTPRoute",
            "sessionPersistence",
            json!({ "type": "Cookie" }),
            "sessionPersistence",
        ),
        (
            "HTTPRoute",
            "backendRefs",
            json!([{ "name": "a", "port": 80, "filters": [{ "type": "RequestHeaderModifier" }] }]),
            "backendRefs[0].filters",
        ),
    ] {
        let world = World::with(&[with(kind, field, value)]);
        world.are(OWN);
        world.says_only(&format!(
            "{kind} shop/split: Accepted=False (UnsupportedValue): spec.rules[0].{wanted}: needs a proxy"
        ));
    }
    // None of these needs layer 7.
    for (kind, matches) in [
        ("HTTPRoute", json!(null)),
        ("HTTPRoute", json!([])),
        (
            "HTTPRoute",
            json!([{ "path": { "type": "PathPrefix", "value": "/" } }]),
        ),
        ("GRPCRoute", json!([{}])),
        ("TLSRoute", json!(null)),
    ] {
        let world = World::with(&[with(kind, "matches", matches)]);
        world.are(&[(2, 1.0)]);
        assert!(world.says().is_empty(), "{:?}", world.says());
    }
    let mut two = split(refs.clone());
    two["spec"]["rules"] = json!([{ "backendRefs": refs }, { "backendRefs": refs }]);
    let world = World::with(&[two]);
    world.are(OWN);
    world.says_only(
        "TCPRoute shop/split: Accepted=False (UnsupportedValue): spec.rules: there are 2",
    );
    let mut named = route("TLSRoute", "split", json!({ "backendRefs": refs }));
    named["spec"]["hostnames"] = json!(["a.example.com"]);
    let world = World::with(&[named]);
    world.are(OWN);
    world.says_only("TLSRoute shop/split: Accepted=False (UnsupportedValue): spec.hostnames");
}

#[test]
fn a_route_is_for_the_ports_of_services_of_its_own_namespace() {
    let refs = json!([{ "name": "a", "port": 80 }]);
    let attached = |parent: Value| {
        let mut route = split(refs.clone());
        route["spec"]["parentRefs"] = json!([parent]);
        route
    };
    let parent = |fields: Value| {
        let mut parent = json!({ "group": "", "kind": "Service", "name": "web" });
        for (field, value) in fields.as_object().unwrap() {
            parent[field] = value.clone();
        }
        attached(parent)
    };
    for fields in [
        json!({}),
        json!({ "port": 80 }),
        json!({ "sectionName": "web" }),
        json!({ "sectionName": "web", "port": 80 }),
        json!({ "namespace": "shop" }),
    ] {
        World::with(&[parent(fields)]).are(&[(2, 1.0)]);
    }
    for (fields, says) in [
        (
            json!({ "port": 81 }),
            "Accepted=False (NoMatchingParent): Service shop/web has no TCP port",
        ),
        (json!({ "port": 53 }), "Accepted=False (NoMatchingParent)"),
        (
            json!({ "sectionName": "dns" }),
            "Accepted=False (NoMatchingParent)",
        ),
        (
            json!({ "sectionName": "web", "port": 53 }),
            "Accepted=False (NoMatchingParent)",
        ),
        (
            json!({ "name": "none" }),
            "Accepted=False (NoMatchingParent): there is no Service shop/none",
        ),
    ] {
        let world = World::with(&[parent(fields)]);
        world.are(OWN);
        world.says_only(&format!("TCPRoute shop/split: {says}"));
    }
    // A consumer's route would be for clients of one namespace. It does not affect a Service of another namespace.
    let other = of("other", "far", 7, 1);
    let theirs =
        attached(json!({ "group": "", "kind": "Service", "name": "far", "namespace": "other" }));
    let world = World::with(&[other.as_slice(), &[theirs]].concat());
    let far = &world.services[&ServiceName::new("other", "far")];
    assert!(far.ports.iter().all(|port| port.split.is_none()));
    assert_eq!(world.says().len(), 1, "{:?}", world.says());
    // A route of a Gateway is not for this node.
    let world = World::with(&[attached(json!({ "name": "edge" }))]);
    world.are(OWN);
    assert!(world.says().is_empty() && world.loaded.is_empty());
    // No client connects to a headless Service by its address.
    let mut headless = service("web", 1, 1);
    headless[0]["spec"]["clusterIP"] = json!("None");
    let world = World::of(
        &[
            headless.as_slice(),
            &service("a", 2, 1),
            &[split(refs.clone())],
        ]
        .concat(),
    );
    world.says_only(
        "TCPRoute shop/split: Accepted=False (NoMatchingParent): Service shop/web is headless",
    );
}

#[test]
fn of_two_routes_the_oldest_has_a_port_and_then_the_first_by_name() {
    let to = |kind: &str, name: &str, created: &str, backend: &str| {
        let mut route = route(
            kind,
            name,
            json!({ "backendRefs": [{ "name": backend, "port": 80 }] }),
        );
        route["metadata"]["creationTimestamp"] = json!(created);
        route
    };
    let (old, new) = ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z");
    for (routes, has, says) in [
        (
            [to("TCPRoute", "y", old, "a"), to("TCPRoute", "x", new, "b")],
            2,
            "TCPRoute shop/x: Accepted=False (Conflicted): port 80 of Service shop/web: TCPRoute shop/y comes before it",
        ),
        (
            [to("TCPRoute", "y", old, "a"), to("TCPRoute", "x", old, "b")],
            3,
            "TCPRoute shop/y: Accepted=False (Conflicted)",
        ),
        (
            [
                to("HTTPRoute", "y", old, "a"),
                to("TCPRoute", "x", new, "b"),
            ],
            2,
            "TCPRoute shop/x: Accepted=False (Conflicted)",
        ),
        // Gateway API's order of kinds counts before age.
        (
            [
                to("HTTPRoute", "y", old, "a"),
                to("GRPCRoute", "x", new, "b"),
            ],
            3,
            "HTTPRoute shop/y: Accepted=False (Conflicted)",
        ),
        // Clients send the server's name. Without it, a TLSRoute applies to all connections or none.
        (
            [to("TLSRoute", "y", old, "a"), to("TCPRoute", "x", new, "b")],
            3,
            "TLSRoute shop/y: Accepted=False (Conflicted)",
        ),
    ] {
        let world = World::with(&routes);
        world.are(&[(has, 1.0)]);
        world.says_only(says);
        // The other route takes over.
        let mut world = world;
        let base = [service("web", 1, 1), service("a", 2, 3), service("b", 3, 2)].concat();
        let other = &routes[usize::from(has == 2)];
        world.next(&[base.as_slice(), std::slice::from_ref(other)].concat());
        world.are(&[(5 - has, 1.0)]);
        assert!(world.says().is_empty());
    }
}

#[test]
fn two_tls_routes_leave_a_port_to_its_service() {
    let routes = ["x", "y"].map(|name| {
        let refs = json!({ "backendRefs": [{ "name": "a", "port": 80 }] });
        route("TLSRoute", name, refs)
    });
    let world = World::with(&routes);
    world.are(OWN);
    let said = world.says();
    assert_eq!(said.len(), 2, "{said:?}");
    for text in said {
        let reason = "Accepted=False (UnsupportedValue): port 80 of Service shop/web: another route claims it";
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn policies_and_affinity_are_those_of_the_routes_service() {
    let mut base = [service("web", 1, 1), service("a", 2, 3), service("b", 3, 2)].concat();
    base[0]["spec"]["internalTrafficPolicy"] = json!("Local");
    base[0]["spec"]["sessionAffinity"] = json!("ClientIP");
    let route = split(json!([
        { "name": "a", "port": 80, "weight": 3 }, { "name": "b", "port": 80, "weight": 1 },
    ]));
    let world = World::of(&[base.as_slice(), std::slice::from_ref(&route)].concat());
    let web = &world.services[&ServiceName::new("shop", "web")];
    assert!(web.affinity.is_some() && web.internal_policy == TrafficPolicy::Local);
    // One endpoint of each backend is on this node.
    let local = world.parts_of("web", TrafficPolicy::Local);
    assert!(
        (local[&2] - 0.75).abs() < 0.001 && (local[&3] - 0.25).abs() < 0.001,
        "{local:?}"
    );
    let shares = web.ports[0].shares(true, TrafficPolicy::Local);
    assert_eq!(shares.endpoints.len(), 2);
    // A backend without an endpoint on this node keeps its part of the connections, which are refused.
    for slice in base.iter_mut().filter(|of| of["metadata"]["name"] == "b-x") {
        slice["endpoints"][0]["nodeName"] = json!("node2");
    }
    let world = World::of(&[base.as_slice(), &[route]].concat());
    let local = world.parts_of("web", TrafficPolicy::Local);
    assert!(
        (local[&2] - 0.75).abs() < 0.001 && (local[&0] - 0.25).abs() < 0.001,
        "{local:?}"
    );
    world.are(&[(2, 0.75), (3, 0.25)]);
}

/// Gateway API gives the port to the HTTPRoute and refuses the TCPRoute. Here the HTTPRoute is not accepted, so the
/// TCPRoute has the port.
#[test]
fn a_route_that_is_not_followed_leaves_its_port_to_the_next() {
    let mut http = route(
        "HTTPRoute",
        "http",
        json!({
            "matches": [{ "path": { "value": "/x" } }],
            "backendRefs": [{ "name": "b", "port": 80 }],
        }),
    );
    http["metadata"]["creationTimestamp"] = json!("2025-01-01T00:00:00Z");
    let tcp = split(json!([{ "name": "a", "port": 80 }]));
    let world = World::with(&[http, tcp]);
    world.are(&[(2, 1.0)]);
    world.says_only("HTTPRoute shop/http: Accepted=False (UnsupportedValue)");
}

/// Routes of one kind belong together: if layer 4 cannot tell the connections of one apart, it cannot tell those of two
/// apart.
#[test]
fn a_route_of_the_same_kind_that_is_not_followed_takes_the_others_of_the_port_with_it() {
    for (kind, wrong) in [
        (
            "HTTPRoute",
            json!({ "matches": [{ "path": { "value": "/admin" } }] }),
        ),
        (
            "GRPCRoute",
            json!({ "filters": [{ "type": "RequestMirror" }] }),
        ),
        (
            "TCPRoute",
            json!({ "backendRefs": [{ "name": "a", "port": 80, "filters": [{}] }] }),
        ),
    ] {
        for created in ["2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z"] {
            let mut admin = route(kind, "admin", wrong.clone());
            admin["metadata"]["creationTimestamp"] = json!(created);
            let all = route(
                kind,
                "all",
                json!({ "backendRefs": [{ "name": "b", "port": 80 }] }),
            );
            let world = World::with(&[admin.clone(), all.clone()]);
            world.are(OWN);
            let says = world.says();
            let told = format!(
                "{kind} shop/all: Accepted=False (UnsupportedValue): port 80 of Service web: {kind} shop/admin has it, too"
            );
            assert!(
                says.len() == 2
                    && says
                        .iter()
                        .any(|said| said.replace("shop/web", "web").starts_with(&told)),
                "{says:#?}"
            );
            // At other ports the route is alone, and other kinds are separate.
            admin["spec"]["parentRefs"][0]["sectionName"] = json!("dns");
            World::with(&[admin.clone(), all.clone()]).are(&[(3, 1.0)]);
            admin["spec"]["parentRefs"][0]["sectionName"] = json!(null);
            let other = if kind == "TCPRoute" {
                "HTTPRoute"
            } else {
                "TCPRoute"
            };
            let mut apart = all;
            apart["kind"] = json!(other);
            World::with(&[admin, apart]).are(&[(3, 1.0)]);
        }
    }
}

/// The default group of a parent is Gateway API's own.
#[test]
fn a_parent_without_its_group_is_named() {
    let mut route = split(json!([{ "name": "a", "port": 80 }]));
    route["spec"]["parentRefs"] = json!([{ "kind": "Service", "name": "web" }]);
    let world = World::with(&[route.clone()]);
    world.are(OWN);
    assert!(
        world.loaded.len() == 1
            && world.loaded[0].contains("spec.parentRefs[0].group: the parent is a Service of"),
        "{:?}",
        world.loaded
    );
    route["spec"]["parentRefs"] = json!([{ "name": "gateway" }]);
    assert!(World::with(&[route]).loaded.is_empty());
}

#[test]
fn each_version_is_read() {
    for version in ["v1", "v1beta1", "v1alpha3", "v1alpha2"] {
        let mut route = split(json!([{ "name": "a", "port": 80 }]));
        route["apiVersion"] = json!(format!("gateway.networking.k8s.io/{version}"));
        World::with(&[route]).are(&[(2, 1.0)]);
    }
}

#[test]
fn a_wrong_route_stays_what_it_was_and_the_rest_is_served() {
    let base = [service("web", 1, 1), service("a", 2, 3), service("b", 3, 2)].concat();
    let weighted = |weight: Value| split(json!([{ "name": "a", "port": 80, "weight": weight }]));
    let mut world = World::of(&[base.as_slice(), &[weighted(json!(1))]].concat());
    for (weight, says) in [
        (
            json!(-1),
            "spec.rules[0].backendRefs[0].weight: -1 is out of range",
        ),
        (json!("x"), "spec.rules[0].backendRefs[0].weight: "),
    ] {
        world.next(&[base.as_slice(), &[weighted(weight)]].concat());
        world.are(&[(2, 1.0)]);
        assert!(
            world.loaded.iter().any(|text| text.starts_with(says)),
            "{:?}",
            world.loaded
        );
    }
}

#[test]
fn the_example_does_what_its_comment_says() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tcp-route.yaml");
    let loaded = manifests::load(&[example.into()], &Node::default()).unwrap();
    let Snapshot {
        routes,
        grants,
        services,
        entries,
        ..
    } = &loaded.snapshot;
    let mut of_routes = Routes::default();
    let routed = of_routes.take(Sources {
        routes,
        grants,
        services,
        entries,
    });
    assert_eq!(of_routes.problems().count(), 0);
    let service = &routed.services[&ServiceName::new("shop", "shop-api")];
    let shares = service.ports[0].shares(true, TrafficPolicy::Cluster);
    let weights: Vec<_> = shares.endpoints.iter().map(|(_, weight)| *weight).collect();
    assert_eq!(weights, [9, 1]);
}
