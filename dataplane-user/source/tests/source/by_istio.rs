//! Istio's settings of a Service: the WorkloadEntries that it selects, and `networking.istio.io/traffic-distribution`.

use dataplane_source::manifests::Manifests;
use model::{EntryName, Node, Protocol, ServiceName, Snapshot, TrafficPolicy};
use plan::entries::{Entries, service_name};
use serde_json::{Value, json};

fn load(objects: &[Value]) -> Snapshot {
    then_load(&mut unread(), objects)
}

/// Manifests that were not read yet.
fn unread() -> Manifests {
    Manifests::new(&Node {
        name: "here".into(),
        ..Node::default()
    })
}

pub fn then_load(manifests: &mut Manifests, objects: &[Value]) -> Snapshot {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    std::fs::write(file.path(), list.to_string()).unwrap();
    let loaded = manifests.read(&[file.path().to_owned()]);
    loaded.unwrap_or_else(|errors| panic!("{errors}")).snapshot
}

/// Merges fields into an object.
pub fn with(mut object: Value, fields: Value) -> Value {
    fn merge(into: &mut Value, from: Value) {
        match from {
            Value::Object(fields) if into.is_object() => {
                for (name, value) in fields {
                    merge(&mut into[&name], value);
                }
            }
            other => *into = other,
        }
    }
    merge(&mut object, fields);
    object
}

fn web(fields: Value) -> Value {
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "web", "namespace": "shop" },
        "spec": {
            "clusterIP": "10.96.0.1", "selector": { "app": "web" },
            "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }],
        },
    });
    with(service, fields)
}

fn vm(name: &str, address: &str, fields: Value) -> Value {
    let entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "WorkloadEntry",
        "metadata": { "name": name, "namespace": "shop" },
        "spec": { "address": address, "labels": { "app": "web" } },
    });
    with(entry, fields)
}

/// Returns the endpoints of each port, with weights other than 1.
fn endpoints(snapshot: &Snapshot) -> Vec<String> {
    let service = &snapshot.services[&ServiceName::new("shop", "web")];
    let ports = service.ports.iter().map(|port| {
        let all = port.endpoints.iter().enumerate();
        let all = all.map(|(index, e)| match port.weight(index) {
            1 => format!("{}:{}", e.addr, e.port),
            weight => format!("{}:{}*{weight}", e.addr, e.port),
        });
        all.collect::<Vec<_>>().join(" ")
    });
    ports.collect()
}

#[test]
fn a_service_serves_the_workload_entries_that_it_selects_beside_its_slices() {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "web-1", "namespace": "shop",
            "labels": { "kubernetes.io/service-name": "web" },
        },
        "endpoints": [{ "addresses": ["10.244.0.1"] }],
        "ports": [{ "name": "http", "port": 8080 }],
    });
    let mut foreign = vm("foreign", "192.0.2.66", json!({}));
    foreign["metadata"]["namespace"] = json!("other");
    let snapshot = load(&[
        web(
            json!({ "spec": { "clusterIPs": ["10.96.0.1", "fd00::1"], "clusterIP": "10.96.0.1" } }),
        ),
        slice,
        vm("a", "192.0.2.1", json!({})),
        vm("b", "2001:db8::2", json!({ "spec": { "weight": 3 } })),
        vm(
            "none",
            "192.0.2.9",
            json!({ "spec": { "labels": { "app": "db" } } }),
        ),
        // The object's own labels win over those of its spec.
        vm(
            "c",
            "192.0.2.3",
            json!({ "metadata": { "labels": { "app": "db" } } }),
        ),
        vm(
            "d",
            "192.0.2.4",
            json!({
                "metadata": { "labels": { "app": "web" } }, "spec": { "labels": { "app": "db" } },
            }),
        ),
        // A DNS name cannot be an endpoint of a Service.
        vm("e", "vm.example.com", json!({})),
        foreign,
    ]);
    assert_eq!(
        endpoints(&snapshot),
        ["10.244.0.1:8080 192.0.2.1:8080 192.0.2.4:8080 2001:db8::2:8080*3"]
    );
}

#[test]
fn workload_entries_of_one_address_have_the_sum_of_their_weights() {
    let heavy = |weight: u32| json!({ "spec": { "weight": weight } });
    let snapshot = load(&[
        web(json!({})),
        vm("a", "192.0.2.1", json!({})),
        vm("b", "192.0.2.1", json!({})),
        vm("c", "192.0.2.2", heavy(3)),
        vm("d", "192.0.2.2", heavy(4)),
        vm("e", "192.0.2.3", json!({})),
    ]);
    assert_eq!(
        endpoints(&snapshot),
        ["192.0.2.1:8080*2 192.0.2.2:8080*7 192.0.2.3:8080"]
    );
}

#[test]
fn a_service_with_too_many_workload_entries_has_them_when_there_is_room() {
    let ports = |count: u16| -> Vec<Value> {
        let ports = (1..=count).map(|port| json!({ "name": format!("p{port}"), "port": port }));
        ports.collect()
    };
    let named = |name: &str, address: &str, count: u16| {
        let spec = json!({ "clusterIP": address, "ports": ports(count) });
        web(json!({ "metadata": { "name": name }, "spec": spec }))
    };
    let vms: Vec<Value> = (0..600)
        .map(|n| {
            vm(
                &format!("vm-{n}"),
                &format!("192.0.2.{}", 1 + n % 200),
                json!({}),
            )
        })
        .collect();
    let mut manifests = unread();
    let mut next = |services: &[Value], entries: usize| {
        then_load(&mut manifests, &[services, &vms[..entries]].concat())
    };
    let has = |snapshot: &Snapshot, name: &str| {
        let service = &snapshot.services[&ServiceName::new("shop", name)];
        service.ports.iter().any(|port| !port.endpoints.is_empty())
    };
    let [a, z] = [named("a", "10.96.0.2", 100), named("z", "10.96.0.3", 100)];
    let one = next(std::slice::from_ref(&z), 600);
    assert!(has(&one, "z") && one.problems.is_empty());
    // The one that was there first has its part.
    let both = next(&[a.clone(), z.clone()], 600);
    assert!(has(&both, "z") && !has(&both, "a"));
    assert_eq!(both.problems.len(), 1);
    let both = next(&[a, z], 500);
    assert!(has(&both, "z") && has(&both, "a"));
    assert_eq!(both.problems.len(), 0);
}

#[test]
fn ports_are_found_as_istio_finds_them() {
    let ports = json!({ "spec": { "ports": [
        { "name": "http", "port": 80, "targetPort": 8080 },
        { "name": "grpc", "port": 90, "targetPort": "rpc" },
        { "name": "same", "port": 70 },
        { "name": "dns", "port": 53, "protocol": "UDP", "targetPort": 5353 },
    ] } });
    let snapshot = load(&[
        web(ports),
        vm("a", "192.0.2.1", json!({})),
        vm(
            "b",
            "192.0.2.2",
            json!({ "spec": { "ports": {
            "http": 8081, "rpc": 9091, "same": 7071, "grpc": 1,
        } } }),
        ),
    ]);
    assert_eq!(
        endpoints(&snapshot),
        [
            "192.0.2.1:8080 192.0.2.2:8081",
            // The WorkloadEntry must have the port that `targetPort` names.
            "192.0.2.2:9091",
            "192.0.2.1:70 192.0.2.2:7071",
            "192.0.2.1:5353 192.0.2.2:5353",
        ]
    );
    let service = &snapshot.services[&ServiceName::new("shop", "web")];
    assert_eq!(service.ports[3].protocol, Protocol::Udp);
}

#[test]
fn an_entry_whose_health_is_checked_serves_when_it_is_healthy() {
    let checked = json!({ "metadata": { "annotations": {
        "proxy.istio.io/health-checks-enabled": "true",
    } } });
    let of = |status: &str| {
        let status =
            json!({ "status": { "conditions": [{ "type": "Healthy", "status": status }] } });
        let entry = with(vm("a", "192.0.2.1", checked.clone()), status);
        endpoints(&load(&[web(json!({})), entry]))
    };
    assert_eq!(of("True"), ["192.0.2.1:8080"]);
    assert_eq!(of("False"), [""]);
    let unknown = vm("a", "192.0.2.1", checked.clone());
    assert_eq!(endpoints(&load(&[web(json!({})), unknown])), [""]);
}

#[test]
fn who_has_no_workload_entries() {
    for fields in [
        json!({ "spec": { "clusterIP": "None" } }),
        json!({ "spec": { "selector": null } }),
        json!({ "metadata": { "labels": { "service.kubernetes.io/service-proxy-name": "x" } } }),
    ] {
        let snapshot = load(&[web(fields.clone()), vm("a", "192.0.2.1", json!({}))]);
        let all = endpoints(&snapshot);
        assert!(all.iter().all(String::is_empty), "{fields}: {all:?}");
    }
}

/// In zone `us-1a` of region `us-1`: endpoints on this node, in the zone, in the region and elsewhere, of which only
/// the listed ones exist.
fn cluster(service: Value, namespace: Value, there: &[&str]) -> Vec<Value> {
    let all = [
        (
            "node",
            json!({ "addresses": ["10.0.0.1"], "nodeName": "here", "zone": "us-1a" }),
        ),
        (
            "zone",
            json!({ "addresses": ["10.0.0.2"], "nodeName": "n2", "zone": "us-1a" }),
        ),
        (
            "region",
            json!({ "addresses": ["10.0.0.3"], "nodeName": "n3", "zone": "us-1b" }),
        ),
        (
            "far",
            json!({ "addresses": ["10.0.0.4"], "nodeName": "n4", "zone": "us-10a" }),
        ),
    ];
    let endpoints = all.into_iter().filter(|(name, _)| there.contains(name));
    let endpoints: Vec<Value> = endpoints.map(|(_, endpoint)| endpoint).collect();
    vec![
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": "here", "labels": {
                "topology.kubernetes.io/zone": "us-1a", "topology.kubernetes.io/region": "us-1",
            } },
        }),
        with(
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "shop" } }),
            namespace,
        ),
        web(service),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": "web-1", "namespace": "shop",
                "labels": { "kubernetes.io/service-name": "web" },
            },
            "endpoints": endpoints, "ports": [{ "name": "http", "port": 8080 }],
        }),
    ]
}

/// Returns the last numbers of the addresses that clients on this node use.
fn used(snapshot: &Snapshot, name: &ServiceName) -> String {
    let port = &snapshot.services[name].ports[0];
    let used = port.usable(true, TrafficPolicy::Cluster);
    let used = used.map(|e| e.addr.to_string().rsplit('.').next().unwrap().to_owned());
    used.collect::<Vec<_>>().join(" ")
}

fn annotated(value: &str) -> Value {
    json!({ "metadata": { "annotations": { "networking.istio.io/traffic-distribution": value } } })
}

#[test]
fn the_nearest_endpoints_are_used_as_the_annotation_asks() {
    let all = &["node", "zone", "region", "far"][..];
    let field = json!({ "spec": { "trafficDistribution": "PreferClose" } });
    let nothing = || json!({});
    let cases = [
        (nothing(), nothing(), all, "1 2 3 4"),
        (annotated("PreferSameZone"), nothing(), all, "1 2"),
        (annotated("preferclose"), nothing(), all, "1 2"),
        (annotated("PreferSameNode"), nothing(), all, "1"),
        (annotated("PreferSameNode"), nothing(), &all[1..], "2"),
        (annotated("PreferSameNode"), nothing(), &all[2..], "3"),
        (annotated("PreferSameZone"), nothing(), &all[2..], "3"),
        (annotated("PreferSameZone"), nothing(), &all[3..], "4"),
        // The namespace's annotation counts for services without their own. The Service's field wins over both.
        (nothing(), annotated("PreferSameNode"), all, "1"),
        (
            annotated("PreferSameZone"),
            annotated("PreferSameNode"),
            all,
            "1 2",
        ),
        (
            annotated("Near"),
            annotated("PreferSameNode"),
            all,
            "1 2 3 4",
        ),
        (
            with(annotated("PreferSameNode"), field),
            nothing(),
            all,
            "1 2 3 4",
        ),
    ];
    for (service, namespace, there, wanted) in cases {
        let snapshot = load(&cluster(service.clone(), namespace.clone(), there));
        let found = used(&snapshot, &ServiceName::new("shop", "web"));
        assert_eq!(found, wanted, "{service} {namespace} {there:?}");
        let odd = service.to_string().contains("Near");
        assert_eq!(
            !snapshot.problems.is_empty(),
            odd,
            "{:?}",
            snapshot.problems
        );
    }
}

#[test]
fn workload_entries_and_entries_are_near_by_their_locality() {
    let at = |last: u8, locality: &str| json!({ "address": format!("192.0.2.{last}"), "locality": locality });
    let all = [
        at(1, "us-1/us-1a/rack"),
        at(2, "us-1/us-1b"),
        at(3, "eu-1/us-1a"),
        at(4, ""),
    ];
    for (there, wanted) in [(&all[..], "1"), (&all[1..], "2"), (&all[2..], "3 4")] {
        // Endpoints of a ServiceEntry, by its own annotation and by that of its namespace.
        for own in [true, false] {
            let entry = json!({
                "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
                "metadata": { "name": "db", "namespace": "shop" },
                "spec": {
                    "hosts": ["db.example.com"], "resolution": "STATIC", "endpoints": there,
                    "ports": [{ "number": 80, "name": "http", "protocol": "TCP" }],
                },
            });
            let asks = annotated("PreferSameZone");
            let (entry, namespace) = if own {
                (with(entry, asks), json!({}))
            } else {
                (entry, asks)
            };
            let mut objects = cluster(json!({}), namespace, &[]);
            objects.push(entry);
            let mut snapshot = load(&objects);
            let entries = snapshot.entries.clone();
            let taken =
                Entries::new([]).take(&entries, &snapshot.services, &snapshot, 1_800_000_000);
            snapshot.services = taken.services;
            let name = service_name(&EntryName::new("shop", "db"));
            assert_eq!(used(&snapshot, &name), wanted, "{own}");
        }
        let mut objects = cluster(annotated("PreferSameZone"), json!({}), &[]);
        for (index, spec) in there.iter().enumerate() {
            let address = spec["address"].as_str().unwrap();
            objects.push(vm(&format!("vm{index}"), address, json!({ "spec": spec })));
        }
        let snapshot = load(&objects);
        assert_eq!(used(&snapshot, &ServiceName::new("shop", "web")), wanted);
    }
}
