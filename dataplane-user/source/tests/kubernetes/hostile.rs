//! Objects that an author writes to harm others. The API server checks the types of its own kinds. The conversion of a
//! custom resource, or another API server, may return anything.

use std::time::Duration;

use dataplane_source::kubernetes::{Kind, Scope, WantedKinds};
use dataplane_tests::api::{Resource, objects};
use serde_json::{Value, json};

use crate::site::{NODE, Site, endpoints, pod, server, slice_of, vip, web};

const ALL: WantedKinds = WantedKinds {
    scope: Scope::HostPorts,
    ..WantedKinds::ALL
};

/// Returns a value as deep as `serde_json` can build it. The reader's parser stops at depth 128.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!("x"), |inner, _| json!([inner]))
}

/// Objects of each kind, each with a value that no honest author writes.
fn hostile() -> Vec<Value> {
    let bases = [
        objects::service("hostile", vip(9)),
        slice_of("web-1", "hostile", &[9]),
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "hostile", "namespace": "default" },
            "spec": { "nodeName": "node1", "containers": [{ "ports": [{ "hostPort": 80, "containerPort": 80 }] }] },
            "status": { "podIPs": [{ "ip": pod(9) }] },
        }),
        json!({
            "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
            "metadata": { "name": "hostile", "namespace": "default" },
            "spec": {
                "hosts": ["hostile.example.com"], "resolution": "STATIC",
                "ports": [{ "number": 80, "name": "http" }], "endpoints": [{ "address": "192.0.2.9" }],
            },
        }),
        json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
            "metadata": { "name": "hostile", "namespace": "default" },
            "spec": {
                "parentRefs": [{ "group": "", "kind": "Service", "name": "web-2" }],
                "rules": [{ "backendRefs": [{ "name": "web-2", "port": 80 }] }],
            },
        }),
    ];
    let long = "x".repeat(1 << 16);
    let values = [
        Value::Null,
        json!(-1),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("\u{0}\u{1b}[2J\n\u{202e}"),
        json!(long),
        json!([]),
        json!({}),
        json!([null]),
        json!([{}]),
        json!({ "": { "": [] } }),
        nested(100),
        nested(120),
    ];
    let mut all = Vec::new();
    for base in bases {
        let fields: Vec<String> = ["metadata", "spec", "status", ""]
            .iter()
            .flat_map(|part| {
                let of = base.pointer(&if part.is_empty() {
                    String::new()
                } else {
                    format!("/{part}")
                });
                let keys = of.and_then(Value::as_object).into_iter().flatten();
                let fields = keys.map(move |(key, _)| format!("{part}/{key}"));
                fields.map(|field| format!("/{}", field.trim_start_matches('/')))
            })
            .chain([
                "/metadata/annotations".into(),
                "/metadata/labels".into(),
                "/unknown".into(),
            ])
            // The server itself needs these fields to store the object.
            .filter(|field| {
                ![
                    "/metadata",
                    "/metadata/name",
                    "/metadata/namespace",
                    "/kind",
                    "/apiVersion",
                ]
                .contains(&field.as_str())
            })
            .collect();
        for field in fields {
            for value in &values {
                let mut object = base.clone();
                let (parent, key) = field.rsplit_once('/').unwrap();
                object.pointer_mut(parent).unwrap()[key] = value.clone();
                object["metadata"]["name"] = json!(format!("hostile-{}", all.len()));
                all.push(object);
            }
        }
        let mut annotated = base.clone();
        let many = (0..20_000).map(|n| (format!("a-{n}"), json!("x".repeat(40))));
        annotated["metadata"]["annotations"] = Value::Object(many.collect());
        annotated["metadata"]["name"] = json!(format!("hostile-{}", all.len()));
        all.push(annotated);
    }
    all
}

fn site(objects: Vec<Value>) -> Site {
    let server = server(objects);
    server.cluster().install_istio(Some("v1"));
    server
        .cluster()
        .install_gateway_api(&["v1", "v1beta1", "v1alpha2"]);
    Site::of(server, ALL)
}

#[test]
fn whatever_an_object_says_the_others_are_served() {
    let honest = || [web(1, &[1]), web(2, &[2])].concat();
    let hostile = hostile();
    let is_served = |view: &dataplane_source::View| {
        endpoints(view, "web-1").contains(&1) && endpoints(view, "web-2") == [2]
    };
    // Once in the first list, and once from a watch.
    for listed in [true, false] {
        let site = if listed {
            site([hostile.clone(), honest()].concat())
        } else {
            let site = site(honest());
            site.view(is_served);
            site.watching();
            site.cluster().apply_all(hostile.clone());
            site
        };
        let last = u16::MAX;
        site.cluster().apply_all(web(last, &[3]));
        site.view(|view| is_served(view) && endpoints(view, &format!("web-{last}")) == [3]);
        site.watching();
        assert_eq!(site.health.failure(), None, "listed: {listed}");
        for kind in [Kind::Service, Kind::Slice] {
            assert_eq!(site.health.of(kind).lists(), 1, "listed: {listed}");
        }
        // The objects are removed, and no trace of them stays.
        for object in &hostile {
            let resource = match object["kind"].as_str().unwrap() {
                "Service" => Resource::Services,
                "EndpointSlice" => Resource::EndpointSlices,
                "Pod" => Resource::Pods,
                "ServiceEntry" => Resource::ServiceEntries,
                _ => Resource::HttpRoutes,
            };
            let name = object["metadata"]["name"].as_str().unwrap();
            site.cluster().delete(resource, "default", name);
        }
        site.view(|view| {
            view.problems.is_empty() && view.services.len() == 3 && endpoints(view, "web-1") == [1]
        });
    }
}

/// An annotation within Kubernetes' 256 KiB may have a hundred thousand wrong words. The problems of all objects are part of
/// each view, so those of one object are few.
#[test]
fn an_object_with_very_many_faults_has_few_problems() {
    let mut object = objects::pod("web", NODE, &[pod(1)]);
    let words = vec!["x"; 100_000].join(",");
    object["metadata"]["annotations"] =
        json!({ "traffic.sidecar.istio.io/excludeOutboundPorts": words });
    let site = Site::of(server([object]), Scope::Mesh);
    let view = site.view(|view| !view.problems.is_empty());
    assert_eq!(view.problems.len(), 33);
    let mut problems = view.problems.iter();
    assert!(problems.any(|problem| problem.text == "and 99968 more"));
}

/// Without bookmarks, the version of a broken watch is older than the server's history. Everything is listed again, and
/// no change is missed.
#[test]
fn without_bookmarks_nothing_is_missed() {
    let site = Site::new(server((0..20).flat_map(|number| web(number, &[1]))));
    site.server
        .faults()
        .bookmarks_every(Duration::from_hours(1));
    site.view(|view| view.services.len() == 20);
    site.watching();
    for round in 2..6 {
        for number in 0..10 {
            let other = objects::node(&format!("other-{round}-{number}"), "zone-b", &[]);
            site.cluster().apply(other);
        }
        site.server.faults().mute(true);
        site.cluster().apply(slice_of("web-7", "web-7-a", &[round]));
        site.cluster()
            .delete(Resource::Services, "default", &format!("web-{round}"));
        site.cluster().compact();
        site.server.faults().mute(false);
        site.server.faults().break_watches();
        site.view(|view| {
            endpoints(view, "web-7") == [round]
                && view.services.len() == 20 - usize::from(round) + 1
        });
        site.watching();
    }
    assert!(site.lists()[0] > 1, "{:?}", site.lists());
    assert_eq!(site.health.failure(), None);
}
