//! Changes of routes as the kernel sees them: each is one write of a pool's word. Clients get the old split before the
//! write and the new split after it.

use std::sync::Arc;

use dataplane_common::{Port, tables::FrontendKey};
use dataplane_plan::{
    Planner, Write,
    routes::{Routes, Sources},
};
use imbl::OrdMap;
use model::{
    BackendRef, BackendTo, Endpoint, Parent, Protocol, Route, RouteKind, RouteName, Service,
    ServiceName, ServicePort, ServiceType, Snapshot, TrafficPolicy,
};

use super::sim::{Resolved, Sim};

/// A service at `10.96.0.OWN` whose endpoint `10.0.OWN.1` is on this node and whose other endpoints are not.
fn service(name: &str, own: u8, endpoints: u8) -> Service {
    let endpoint = |n: u8| Endpoint {
        local: n == 1,
        ..Endpoint::new([10, 0, own, n].into(), 8080)
    };
    Service {
        cluster_ips: [[10, 96, 0, own].into()].into(),
        load_balancer_ips: [[192, 0, 2, own].into()].into_iter().collect(),
        ports: [ServicePort {
            endpoints: (1..=endpoints).map(endpoint).collect(),
            ..ServicePort::new(80, Protocol::Tcp)
        }]
        .into(),
        ..Service::new(ServiceName::new("shop", name), ServiceType::LoadBalancer)
    }
}

/// A route that splits Service `web` among `one`, `two` and a Service that does not exist.
fn route(weights: [u32; 3]) -> Route {
    let name = |name: &str| ServiceName::new("shop", name);
    let refs = ["one", "two", "none"].into_iter().zip(weights);
    Route {
        name: RouteName {
            namespace: "shop".into(),
            name: "split".into(),
            kind: RouteKind::Tcp,
        },
        created: None,
        parents: [Parent {
            service: name("web"),
            port: None,
            section: None,
        }]
        .into(),
        abroad: None,
        unsupported: None,
        backends: refs
            .map(|(to, weight)| BackendRef {
                to: BackendTo::Service(name(to)),
                port: Some(80),
                weight,
            })
            .collect(),
    }
}

/// An agent's tables.
#[derive(Default)]
struct Node {
    services: OrdMap<ServiceName, Arc<Service>>,
    routes: Routes,
    planner: Planner,
    sim: Sim,
}

impl Node {
    fn new(policy: TrafficPolicy) -> Self {
        let mut node = Self::default();
        for (own, name) in (1..).zip(["web", "one", "two"]) {
            let mut service = service(name, own, 3);
            service.external_policy = policy;
            node.services.insert(service.name.clone(), service.into());
        }
        node.take(None, |_| {});
        node
    }

    /// Applies this route. Returns the writes.
    fn take(&mut self, route: Option<Route>, after_each: impl FnMut(&Sim)) -> Vec<Write> {
        let routes = route.map(|route| (route.name.clone(), Arc::new(route)));
        let taken = self.routes.take(Sources {
            routes: &routes.into_iter().collect(),
            grants: &OrdMap::new(),
            services: &self.services,
            entries: &OrdMap::new(),
        });
        let plan = self.planner.plan(&Snapshot {
            services: taken.services,
            ..Snapshot::default()
        });
        self.sim.apply(&plan, after_each);
        self.sim.assert_mirrored_by(&self.planner);
        plan.writes
    }
}

fn resolved(sim: &Sim, key: &FrontendKey) -> Resolved {
    sim.resolve(sim.keys[key])
}

fn is_flip(write: &Write) -> bool {
    matches!(write, Write::Pool { fresh: false, .. })
}

#[test]
fn each_change_of_a_route_is_one_flip_and_until_then_clients_get_the_old_split() {
    let steps = [
        ("a route is attached", Some(route([9, 1, 0]))),
        ("weights change", Some(route([1, 9, 0]))),
        ("a backend goes", Some(route([1, 0, 0]))),
        ("a part is refused", Some(route([1, 1, 2]))),
        ("all is refused", Some(route([0, 0, 1]))),
        ("a route is other again", Some(route([3, 2, 0]))),
        ("a route goes", None),
    ];
    let clients = [([10, 96, 0, 1], false), ([192, 0, 2, 1], true)];
    for (policy, flips) in [(TrafficPolicy::Cluster, 1), (TrafficPolicy::Local, 2)] {
        let mut node = Node::new(policy);
        for (what, route) in &steps {
            // The old endpoints stay until a grace period has passed, because a program may still read them.
            node.sim.grace();
            node.planner.grace_passed();
            let before = clients.map(|(addr, outside)| view(&node.sim, addr, outside));
            let mut seen = Vec::new();
            let writes = node.take(route.clone(), |sim| {
                seen.push(clients.map(|(addr, outside)| view(sim, addr, outside)));
            });
            let what = format!("{what}, policy {policy:?}: {writes:?}");
            let after = clients.map(|(addr, outside)| view(&node.sim, addr, outside));
            assert_eq!(
                writes.iter().filter(|write| is_flip(write)).count(),
                flips,
                "{what}"
            );
            let other = |write: &&Write| !is_flip(write);
            let fills = |write: &Write| matches!(write, Write::Endpoints { .. });
            assert!(writes.iter().filter(other).all(fills), "{what}");
            // A client gets the old split before the flip of its pool, and the new split from the flip on.
            for (client, (old, new)) in before.iter().zip(&after).enumerate() {
                assert_ne!(old, new, "{what}");
                let views: Vec<_> = seen.iter().map(|views| &views[client]).collect();
                let at = views.partition_point(|view| *view == old);
                assert!(is_flip(&writes[at]), "{what}");
                assert!(views[at..].iter().all(|view| *view == new), "{what}");
            }
        }
    }
}

/// Returns the endpoints of an address, for clients of the cluster or from outside.
fn view(sim: &Sim, addr: [u8; 4], outside: bool) -> String {
    let key = FrontendKey::new(
        std::net::IpAddr::from(addr).into(),
        Port::new(80),
        dataplane_common::Protocol::TCP,
    );
    let resolved = resolved(sim, &key);
    if outside {
        format!("{:?}", resolved.outside())
    } else {
        format!("{:?}", resolved.inside())
    }
}

/// Each step with what `dataplane plan` says about the cluster IP. `N` stands for the endpoints 1 to 3.
#[test]
fn changes_of_a_route_as_a_person_reads_them() {
    let mut node = Node::new(TrafficPolicy::Cluster);
    let by = ", split by TCPRoute shop/split";
    let steps: [(_, _, &[&str]); 6] = [
        (
            Some(route([9, 1, 0])),
            by,
            &[
                "-10.0.1.N:8080",
                "+10.0.2.N:8080",
                "+10.0.3.N:8080",
                "10.0.2.N:8080 gets 30.0 %",
                "10.0.3.N:8080 gets 3.3 %",
            ],
        ),
        (
            Some(route([1, 9, 0])),
            by,
            &["10.0.2.N:8080 gets 3.3 %", "10.0.3.N:8080 gets 30.0 %"],
        ),
        (
            Some(route([1, 1, 2])),
            by,
            &[
                "10.0.2.N:8080 gets 8.3 %",
                "10.0.3.N:8080 gets 8.3 %",
                "50.0 % are refused",
            ],
        ),
        (
            Some(route([1, 0, 2])),
            by,
            &[
                "-10.0.3.N:8080",
                "10.0.2.N:8080 gets 11.1 %",
                "66.7 % are refused",
            ],
        ),
        (Some(route([1, 0, 0])), by, &["equal parts"]),
        (None, "", &["-10.0.2.N:8080", "+10.0.1.N:8080"]),
    ];
    for (route, by, wanted) in steps {
        let before = node.sim.contents();
        node.take(route, |_| {});
        let changes = dataplane_plan::changes(&before, &node.planner);
        let mut lines = changes.iter().map(ToString::to_string);
        let line = lines.find(|line| line.contains("10.96.0.1:80/tcp"));
        let each = wanted.iter().flat_map(|text| {
            let last = if text.contains('N') { 3 } else { 1 };
            (1..=last).map(|n| text.replace('N', &n.to_string()))
        });
        let wanted = each.collect::<Vec<_>>().join(", ");
        let wanted = format!("~ 10.96.0.1:80/tcp ClusterIP of shop/web{by}: {wanted}");
        assert_eq!(line, Some(wanted));
    }
}
