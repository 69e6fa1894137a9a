//! Unused fields: any value that the API server accepts in them leaves the result unchanged.

use std::{
    fmt::{Debug, Write as _},
    fs,
};

use dataplane_source::{
    manifests,
    objects::{self, Findings, wire},
};
use model::Node;
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// One object of each kind with every field that is read.
fn objects() -> Vec<Value> {
    let metadata = |name: &str, labels: Value| {
        json!({
            "name": name, "namespace": "shop", "resourceVersion": "7", "labels": labels,
            "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": null,
            "annotations": {"dataplane.io/egress": "deny"},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "web-1", "controller": true}],
        })
    };
    let container = json!({
        "restartPolicy": "Always",
        "ports": [{"name": "http", "containerPort": 8080, "hostPort": 80, "hostIP": "192.0.2.1",
            "protocol": "TCP"}],
    });
    vec![
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": metadata("web", json!({})),
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                "externalIPs": ["192.0.2.9"], "ipFamilies": ["IPv4"],
                "loadBalancerSourceRanges": ["10.0.0.0/8"], "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 9}},
                "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Local",
                "healthCheckNodePort": 30001, "externalName": "", "publishNotReadyAddresses": false,
                "selector": {"app": "web"}, "trafficDistribution": "PreferClose",
                "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": "http"}],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.8", "ipMode": "VIP"}]}},
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": metadata("web-1", json!({"kubernetes.io/service-name": "web"})),
            "addressType": "IPv4",
            "endpoints": [{
                "addresses": ["10.244.0.1"], "nodeName": "here", "hostname": "web-0", "zone": "a",
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "hints": {"forZones": [{"name": "a"}], "forNodes": [{"name": "here"}]},
            }],
            "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        }),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": metadata("here", json!({"topology.kubernetes.io/zone": "a"})),
            "spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
        }),
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": metadata("web-1-x", json!({"istio.io/dataplane-mode": "ambient"})),
            "spec": {
                "nodeName": "here", "hostNetwork": false,
                "dnsPolicy": "None", "dnsConfig": {
                    "nameservers": ["192.0.2.53"], "searches": ["corp.example"],
                    "options": [{"name": "ndots", "value": "2"}],
                },
                "containers": [container], "initContainers": [container],
            },
            "status": {
                "phase": "Running", "podIP": "10.244.0.1", "podIPs": [{"ip": "10.244.0.1"}],
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }),
        json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": metadata("shop", json!({"istio.io/dataplane-mode": "none"})),
        }),
    ]
}

/// Names of fields: some that Kubernetes has somewhere, and some that it does not have.
const NAMES: &[&str] = &[
    "conditions",
    "lastTransitionTime",
    "managedFields",
    "generation",
    "finalizers",
    "appProtocol",
    "deprecatedTopology",
    "targetRef",
    "loadBalancerClass",
    "images",
    "capacity",
    "podCIDRs",
    "unschedulable",
    "volumes",
    "env",
    "resources",
    "containerStatuses",
    "hostname",
    "status",
    "spec",
    "name",
    "type",
    "port",
    "ports",
    "endpoints",
    "addresses",
    "address",
    "data",
    "",
    "x.y/z",
];

fn junk() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[ -~]{0,12}".prop_map(Value::from),
        Just(json!({"lastTransitionTime": null, "type": "Ready"})),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let names = prop::sample::select(NAMES);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((names, inner), 0..4).prop_map(|fields| {
                let fields = fields.into_iter();
                fields
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect()
            }),
        ]
    })
}

/// Visits the objects inside an object, in some order, except labels, annotations and selectors, whose entries may all
/// count.
fn maps(value: &mut Value, visit: &mut impl FnMut(&mut serde_json::Map<String, Value>)) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| maps(item, visit)),
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                if !["labels", "annotations", "selector"].contains(&name.as_str()) {
                    maps(field, visit);
                }
            }
            visit(fields);
        }
        _ => {}
    }
}

/// Adds fields to an object, each at one of its inner objects, unless that object has the field.
fn add(object: &Value, more: &[(prop::sample::Index, &str, Value)]) -> Value {
    let mut object = object.clone();
    let mut count = 0;
    maps(&mut object, &mut |_| count += 1);
    let mut at = 0;
    maps(&mut object, &mut |fields| {
        for (_, name, value) in more.iter().filter(|(place, ..)| place.index(count) == at) {
            fields.entry(*name).or_insert_with(|| value.clone());
        }
        at += 1;
    });
    object
}

fn node() -> Node {
    Node {
        name: "here".into(),
        ..Node::default()
    }
}

/// Reads an object with the API's reader.
fn by_api(object: &Value) -> String {
    fn read<T: DeserializeOwned>(object: &Value) -> T {
        let text = object.to_string();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
    fn told(result: impl Debug, findings: &Findings) -> String {
        format!("{result:?} {findings:?}")
    }
    let mut findings = Findings::default();
    let found = &mut findings;
    match object["kind"].as_str().unwrap() {
        "Service" => {
            let result = objects::service(read::<wire::Service>(object), found);
            told(result, found)
        }
        "EndpointSlice" => {
            let result = objects::slice(&read::<wire::EndpointSlice>(object), &node(), found);
            told(result, found)
        }
        "Node" => told(objects::node(&read::<wire::Node>(object), found), found),
        "Pod" => {
            let pod: wire::Pod = read(object);
            let ports = objects::host_ports(&pod, &node(), found);
            let workload = objects::pod(&pod, &node(), found);
            told((ports, workload), found)
        }
        _ => {
            let metadata = read::<wire::Namespace>(object).metadata;
            told(objects::namespace(&metadata, found), found)
        }
    }
}

/// Reads objects as a manifest.
fn by_manifest(objects: &[Value]) -> String {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
    let mut told = String::new();
    let directory = tempfile::tempdir().unwrap();
    for name in ["all.json", "all.yaml"] {
        let file = directory.path().join(name);
        fs::write(&file, &list).unwrap();
        let loaded = manifests::load(&[file], &node())
            .unwrap_or_else(|errors| panic!("{name}: {errors}\n{list}"));
        let snapshot = loaded.snapshot;
        let texts: Vec<&String> = snapshot.problems.iter().map(|p| &p.text).collect();
        let of = (&snapshot.services, &snapshot.workloads, &snapshot.node);
        write!(told, "{of:?} {texts:?}").unwrap();
    }
    told
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_not_read_changes_nothing(
        more in prop::collection::vec(
            (any::<prop::sample::Index>(), prop::sample::select(NAMES), junk()),
            1..12,
        ),
    ) {
        let plain = objects();
        let filled: Vec<Value> = plain.iter().map(|object| add(object, &more)).collect();
        for (plain, filled) in plain.iter().zip(&filled) {
            prop_assert_eq!(by_api(plain), by_api(filled));
        }
        prop_assert_eq!(by_manifest(&plain), by_manifest(&filled));
    }
}

/// Go writes an empty list or an unset time as `null`.
#[test]
fn null_is_as_good_as_nothing() {
    for object in objects() {
        let mut count = 0;
        maps(&mut object.clone(), &mut |fields| count += fields.len());
        for field in 0..count {
            let (mut absent, mut null) = (object.clone(), object.clone());
            for (object, remove) in [(&mut absent, true), (&mut null, false)] {
                let mut at = 0;
                maps(object, &mut |fields| {
                    let names: Vec<String> = fields.keys().cloned().collect();
                    for name in names {
                        if at == field && name != "kind" && name != "apiVersion" {
                            if remove {
                                fields.remove(&name);
                            } else {
                                fields[&name] = Value::Null;
                            }
                        }
                        at += 1;
                    }
                });
            }
            assert_eq!(by_api(&absent), by_api(&null), "{null}");
        }
    }
}
