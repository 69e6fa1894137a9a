//! Texts of authors in messages: they cannot move the cursor, set the title, or begin a line of their own.

use std::collections::BTreeSet;

use dataplane_source::manifests;
use model::{Node, Snapshot};
use plan::routes::{Routes, Sources};
use serde_json::{Value, json};

/// A text that ends a line, sets a terminal's title, and looks like a message.
const HOSTILE: &str = "x\u{1b}]0;y\u{7}\u{9b}2J\nerror: forged";

/// The parts of objects in which the API server accepts any text. It restricts names.
const PLACES: [&str; 7] = [
    "/spec",
    "/status",
    "/addressType",
    "/ports",
    "/endpoints",
    "/metadata/labels",
    "/metadata/annotations",
];

fn objects() -> Vec<Value> {
    let metadata = json!({
        "name": "a", "namespace": "shop", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {
            "app": "a", "istio.io/dataplane-mode": "ambient", "kubernetes.io/service-name": "a",
            "networking.istio.io/enable-autoallocate-ip": "true",
        },
        "annotations": {
            "dataplane.io/mode": "proxy", "dataplane.io/egress": "deny", "dataplane.io/captured-by": "packets",
            "dataplane.io/without-proxy": "pass",
            "ambient.istio.io/dns-capture": "true", "sidecar.istio.io/status": "{}",
            "traffic.sidecar.istio.io/excludeOutboundPorts": "22",
            "traffic.sidecar.istio.io/excludeOutboundIPRanges": "192.0.2.0/24",
            "traffic.sidecar.istio.io/excludeInterfaces": "eth1",
            "openservicemesh.io/inbound-port-exclusion-list": "23",
        },
    });
    let with = |kind: &str, version: &str, fields: Value| {
        let mut object = json!({ "apiVersion": version, "kind": kind, "metadata": metadata });
        for (field, value) in fields.as_object().unwrap() {
            object[field] = value.clone();
        }
        object
    };
    vec![
        with(
            "Service",
            "v1",
            json!({
                "spec": {
                    "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ipFamilies": ["IPv4"],
                    "externalIPs": ["192.0.2.1"], "loadBalancerSourceRanges": ["192.0.2.0/24"],
                    "sessionAffinity": "ClientIP", "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local",
                    "healthCheckNodePort": 30999, "trafficDistribution": "PreferClose", "externalName": "x.example.com",
                    "ports": [{ "name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080, "targetPort": "http" }],
                },
                "status": { "loadBalancer": { "ingress": [{ "ip": "192.0.2.2", "ipMode": "VIP" }] } },
            }),
        ),
        with(
            "EndpointSlice",
            "discovery.k8s.io/v1",
            json!({
                "addressType": "IPv4",
                "ports": [{ "name": "http", "port": 80, "protocol": "TCP" }],
                "endpoints": [{
                    "addresses": ["10.244.0.1"], "hostname": "h", "nodeName": "node1", "zone": "z",
                    "targetRef": { "kind": "Pod", "name": "p", "namespace": "shop" },
                    "hints": { "forZones": [{ "name": "z" }], "forNodes": [{ "name": "node1" }] },
                }],
            }),
        ),
        with(
            "Pod",
            "v1",
            json!({
                "spec": {
                    "nodeName": "node1", "dnsPolicy": "None",
                    "dnsConfig": {
                        "nameservers": ["10.96.0.10"], "searches": ["example.com"],
                        "options": [{ "name": "ndots", "value": "2" }],
                    },
                    "containers": [{
                        "name": "c",
                        "ports": [{ "containerPort": 80, "hostPort": 8080, "hostIP": "192.0.2.200", "protocol": "TCP" }],
                    }],
                },
                "status": { "phase": "Running", "podIP": "10.244.0.2", "podIPs": [{ "ip": "10.244.0.2" }] },
            }),
        ),
        with("Namespace", "v1", json!({})),
        with(
            "ServiceEntry",
            "networking.istio.io/v1",
            json!({
                "spec": {
                    "hosts": ["db.example.com"], "addresses": ["198.51.100.7"], "exportTo": ["*"], "resolution": "STATIC",
                    "location": "MESH_EXTERNAL",
                    "ports": [{ "number": 5432, "name": "pg", "protocol": "TCP" }],
                    "endpoints": [{ "address": "198.51.100.1", "ports": { "pg": 5433 }, "labels": { "a": "b" } }],
                },
                "status": { "addresses": [{ "value": "240.240.0.9", "host": "db.example.com" }] },
            }),
        ),
        with(
            "WorkloadEntry",
            "networking.istio.io/v1",
            json!({ "spec": {
                "address": "198.51.100.2", "ports": { "pg": 0 }, "labels": { "a": "b" }, "network": "n", "locality": "l",
                "serviceAccount": "s",
            }}),
        ),
        with(
            "TCPRoute",
            "gateway.networking.k8s.io/v1",
            json!({ "spec": {
                "parentRefs": [
                    { "group": "", "kind": "Service", "name": "a", "sectionName": "http" },
                    { "group": "", "kind": "Service", "name": "a", "namespace": "bank" },
                ],
                "rules": [{ "name": "r", "backendRefs": [
                    { "group": "", "kind": "Service", "name": "a", "namespace": "bank", "port": 80 },
                    { "group": "networking.istio.io", "kind": "Hostname", "name": "db.example.com", "port": 80 },
                ] }],
            }}),
        ),
        with(
            "HTTPRoute",
            "gateway.networking.k8s.io/v1",
            json!({ "spec": {
                "parentRefs": [{ "group": "", "kind": "Service", "name": "a" }],
                "hostnames": ["a.example.com"],
                "rules": [{
                    "matches": [{ "path": { "type": "PathPrefix", "value": "/" } }],
                    "backendRefs": [{ "name": "a", "port": 80, "x": "y" }],
                }],
            }}),
        ),
        with(
            "ReferenceGrant",
            "gateway.networking.k8s.io/v1",
            json!({ "spec": {
                "from": [{ "group": "gateway.networking.k8s.io", "kind": "TCPRoute", "namespace": "shop" }],
                "to": [{ "group": "", "kind": "Service", "name": "a" }],
            }}),
        ),
    ]
}

/// Returns copies of the object. In each, one text or key is replaced by a hostile one.
fn each_replaced(object: &Value) -> Vec<Value> {
    match object {
        Value::String(_) => vec![HOSTILE.into()],
        Value::Array(items) => {
            let of = |(at, item)| {
                each_replaced(item).into_iter().map(move |new| {
                    let mut items = items.clone();
                    items[at] = new;
                    Value::Array(items)
                })
            };
            items.iter().enumerate().flat_map(of).collect()
        }
        Value::Object(fields) => {
            let of = |(key, value): (&String, &Value)| {
                let mut renamed = fields.clone();
                let value_too = renamed.remove(key).unwrap();
                renamed.insert(HOSTILE.to_owned(), value_too);
                let changed = each_replaced(value).into_iter().map(|new| {
                    let mut fields = fields.clone();
                    fields.insert(key.clone(), new);
                    Value::Object(fields)
                });
                changed.chain([Value::Object(renamed)]).collect::<Vec<_>>()
            };
            fields.iter().flat_map(of).collect()
        }
        _ => Vec::new(),
    }
}

fn said(objects: &[Value]) -> Vec<String> {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    std::fs::write(file.path(), list.to_string()).unwrap();
    let node = Node {
        name: "node1".into(),
        own: vec!["192.0.2.200".parse().unwrap()],
        ..Node::default()
    };
    let paths = [file.path().to_owned()];
    match manifests::load(&paths, &node) {
        Ok(loaded) => {
            let Snapshot {
                routes,
                grants,
                services,
                entries,
                problems,
                ..
            } = &loaded.snapshot;
            let mut of_routes = Routes::default();
            of_routes.take(Sources {
                routes,
                grants,
                services,
                entries,
            });
            let problems = problems.iter().chain(of_routes.problems());
            problems
                .map(|problem| format!("{}: {}", problem.place, problem.text))
                .collect()
        }
        // One fault per line.
        Err(errors) => errors.to_string().lines().map(str::to_owned).collect(),
    }
}

#[test]
fn what_an_author_writes_stays_a_word_in_messages() {
    let (mut quoted, mut raw) = (0, BTreeSet::new());
    for object in objects() {
        for place in PLACES {
            for hostile in object.pointer(place).map_or_else(Vec::new, each_replaced) {
                let mut changed = object.clone();
                *changed.pointer_mut(place).unwrap() = hostile;
                // A route has more messages if its Service exists.
                let service = (!place.starts_with("/status")).then(|| objects().remove(0));
                let service = service.filter(|service| service["kind"] != object["kind"]);
                for text in said(&service.into_iter().chain([changed]).collect::<Vec<_>>()) {
                    let (_, text) = text.split_once(": ").unwrap_or_default();
                    if text.chars().any(char::is_control) || text.starts_with("forged") {
                        raw.insert(text.to_owned());
                    }
                    quoted += usize::from(text.contains("forged"));
                }
            }
        }
    }
    assert!(raw.is_empty(), "{raw:#?}");
    assert!(quoted > 30, "{quoted} messages have the author's words");
}
