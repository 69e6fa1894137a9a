//! Gateway API's routes and grants.

use dataplane_source::{
    View,
    kubernetes::{Kind, Scope, WantedKinds},
};
use model::{RouteKind, RouteName, ServiceName};
use serde_json::{Value, json};

use crate::site::{Site, endpoints, server, web};

const WANTED: WantedKinds = WantedKinds {
    scope: Scope::HostPorts,
    entries: false,
    names: false,
    ..WantedKinds::ALL
};

fn route(kind: &str, parent: &str, weight: i64) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": kind,
        "metadata": { "name": "split", "namespace": "default" },
        "spec": {
            "parentRefs": [{ "group": "", "kind": parent, "name": "web-1" }],
            "rules": [{ "backendRefs": [{ "name": "web-2", "port": 80, "weight": weight }] }],
        },
    })
}

/// Returns the weight of the first backend. `None` if the route does not exist.
fn weight(view: &View, kind: RouteKind) -> Option<u32> {
    let (namespace, name) = ("default".into(), "split".into());
    let route = view.routes.get(&RouteName {
        namespace,
        name,
        kind,
    })?;
    Some(route.backends[0].weight)
}

#[test]
fn a_cluster_without_the_kinds_is_no_failure_and_each_is_noticed_when_it_appears() {
    let site = Site::of(server(web(1, &[1])), WANTED);
    let view = site.view(|_| true);
    assert_eq!(endpoints(&view, "web-1"), [1]);
    assert!(view.routes.is_empty() && view.problems.is_empty());
    site.watching();
    assert_eq!(site.health.failure(), None);
    assert!(site.health.of(Kind::TcpRoute).is_missing());
    // HTTPRoutes, which a cluster has before TCPRoutes, in the newest version; other kinds in older versions.
    site.cluster().apply(route("HTTPRoute", "Service", 3));
    site.cluster().install_gateway_api(&["v1/httproutes"]);
    let view = site.view(|view| weight(view, RouteKind::Http) == Some(3));
    assert_eq!(weight(&view, RouteKind::Tcp), None);
    site.cluster().apply(route("TCPRoute", "Service", 4));
    let grant = json!({
        "apiVersion": "gateway.networking.k8s.io/v1beta1", "kind": "ReferenceGrant",
        "metadata": { "name": "in", "namespace": "default" },
        "spec": {
            "from": [{ "group": "gateway.networking.k8s.io", "kind": "TCPRoute", "namespace": "x" }],
            "to": [{ "group": "", "kind": "Service" }],
        },
    });
    site.cluster().apply(grant);
    site.cluster().install_gateway_api(&[
        "v1/httproutes",
        "v1alpha2/tcproutes",
        "v1beta1/referencegrants",
    ]);
    let name = ServiceName::new("default", "in");
    site.view(|view| weight(view, RouteKind::Tcp) == Some(4) && view.grants.get(&name).is_some());
    // Changed, invalid, foreign and removed routes.
    site.watching();
    site.cluster().apply(route("TCPRoute", "Service", 5));
    site.view(|view| weight(view, RouteKind::Tcp) == Some(5));
    site.cluster().apply(route("TCPRoute", "Service", -5));
    let view = site.view(|view| !view.problems.is_empty());
    assert_eq!(weight(&view, RouteKind::Tcp), Some(5));
    let said = &view.problems[0];
    assert_eq!(said.place, "TCPRoute default/split");
    assert!(
        said.text
            .starts_with("spec.rules[0].backendRefs[0].weight: -5 is out of range")
    );
    site.cluster().apply(route("TCPRoute", "Mesh", 5));
    let view = site.view(|view| weight(view, RouteKind::Tcp).is_none());
    assert!(view.problems.is_empty());
    assert_eq!(weight(&view, RouteKind::Http), Some(3));
    site.cluster().compact();
    site.cluster().install_gateway_api(&[]);
    site.server.faults().end_watches();
    site.view(|view| view.routes.is_empty() && view.grants.is_empty());
    assert_eq!(site.health.failure(), None);
}

#[test]
fn they_are_not_read_unless_they_are_asked_for() {
    let server = server(web(1, &[1]));
    server.cluster().install_gateway_api(&["v1/httproutes"]);
    server.faults().note_requests(true);
    let site = Site::of(server, Scope::Registry);
    assert!(site.view(|_| true).routes.is_empty());
    let asked = site.server.faults().asked();
    assert!(asked.iter().all(|asked| !asked.path.contains("gateway")));
}
