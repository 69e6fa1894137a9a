//! Istio's ServiceEntries and WorkloadEntries.

use std::{thread, time::Duration};

use dataplane_source::{
    View,
    kubernetes::{Kind, Scope, WantedKinds},
};
use dataplane_tests::api::{Resource, objects};
use model::{At, EntryName, Gravity, ServiceName, TrafficPolicy};
use serde_json::{Value, json};

use crate::site::{NODE, Site, endpoints, server, web};

const WANTED: WantedKinds = WantedKinds {
    scope: Scope::HostPorts,
    routes: false,
    waypoints: false,
    names: false,
    ..WantedKinds::ALL
};

fn entry(name: &str, spec: Value) -> Value {
    let mut entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": { "name": name, "namespace": "default" },
    });
    entry["spec"] = spec;
    entry
}

fn fixed(name: &str, address: &str) -> Value {
    let endpoints = json!([{ "address": address }]);
    entry(
        name,
        json!({
            "hosts": [format!("{name}.example.com")], "resolution": "STATIC",
            "ports": [{ "number": 80, "name": "http", "protocol": "HTTP" }], "endpoints": endpoints,
        }),
    )
}

fn selecting(name: &str, labels: &Value) -> Value {
    entry(
        name,
        json!({
            "hosts": [format!("{name}.example.com")], "resolution": "STATIC",
            "ports": [{ "number": 80, "name": "http", "protocol": "HTTP" }],
            "workloadSelector": { "labels": labels },
        }),
    )
}

fn workload(name: &str, address: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "WorkloadEntry",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "address": address, "labels": labels },
    })
}

/// Returns the addresses of an entry's endpoints, with a star at those on this node. `None` if the entry does not
/// exist.
fn found(view: &View, name: &str) -> Option<Vec<String>> {
    let entry = view.entries.get(&EntryName::new("default", name))?;
    let of = entry.backends.iter().map(|backend| {
        let At::Address(address) = &backend.at else {
            panic!("{backend:?}");
        };
        format!("{address}{}", if backend.local { "*" } else { "" })
    });
    Some(of.collect())
}

#[test]
fn a_cluster_without_the_kinds_is_no_failure_and_they_are_noticed_in_each_version() {
    for version in ["v1", "v1beta1", "v1alpha3"] {
        let site = Site::of(server(web(1, &[1])), WANTED);
        let view = site.view(|_| true);
        assert_eq!(endpoints(&view, "web-1"), [1]);
        assert!(view.entries.is_empty() && view.problems.is_empty());
        site.watching();
        assert_eq!(site.health.failure(), None);
        assert!(site.health.heard() > 0);
        assert!(site.health.of(Kind::ServiceEntry).is_missing());
        thread::sleep(Duration::from_millis(200));
        assert_eq!(site.health.failure(), None);
        // The kind is installed, and has an object.
        site.cluster().apply(fixed("db", "192.0.2.1"));
        site.cluster().install_istio(Some(version));
        site.view(|view| found(view, "db").as_deref() == Some(&["192.0.2.1".to_owned()]));
        assert!(!site.health.of(Kind::ServiceEntry).is_missing());
        site.watching();
        site.cluster().apply(fixed("db", "192.0.2.2"));
        site.view(|view| found(view, "db").as_deref() == Some(&["192.0.2.2".to_owned()]));
        // The kind is removed.
        site.cluster().install_istio(None);
        site.cluster().compact();
        site.server.faults().end_watches();
        let view = site.view(|view| found(view, "db").is_none());
        assert_eq!(endpoints(&view, "web-1"), [1]);
        site.wait("it is missing again", |site| {
            site.health.of(Kind::ServiceEntry).is_missing()
        });
        assert_eq!(site.health.failure(), None);
    }
}

#[test]
fn they_are_not_read_unless_they_are_asked_for() {
    let server = server(web(1, &[1]));
    server.cluster().install_istio(Some("v1"));
    server.cluster().apply(fixed("db", "192.0.2.1"));
    server.faults().note_requests(true);
    let site = Site::of(server, Scope::Registry);
    assert!(site.view(|_| true).entries.is_empty());
    let asked = site.server.faults().asked();
    assert!(asked.iter().all(|asked| !asked.path.contains("istio")));
}

#[test]
fn without_the_right_to_read_them_the_rest_is_served_and_said() {
    let server = server(web(1, &[1]));
    server
        .faults()
        .withhold(Some((Resource::ServiceEntries, 403)));
    let site = Site::of(server, WANTED);
    let view = site.view(|view| !view.problems.is_empty());
    assert_eq!(endpoints(&view, "web-1"), [1]);
    let text = &view.problems[0].text;
    assert!(
        text.contains("serviceentries cannot be read")
            && text.contains("no host of a ServiceEntry is served"),
        "{text}"
    );
}

#[test]
fn a_wrong_entry_is_named_and_stays_what_it_was() {
    let server = server([fixed("db", "192.0.2.1"), fixed("other", "192.0.2.9")]);
    server.cluster().install_istio(Some("v1"));
    let site = Site::of(server, WANTED);
    site.view(|view| found(view, "db").is_some());
    site.cluster().apply(fixed("db", "127.0.0.1"));
    let view = site.view(|view| !view.problems.is_empty());
    let problem = &view.problems[0];
    assert_eq!(problem.gravity, Gravity::NotFollowed);
    assert_eq!(problem.place, "ServiceEntry default/db");
    assert_eq!(
        problem.text,
        "spec.endpoints[0].address: 127.0.0.1 is a loopback address, which cannot be an endpoint's; it stays as it was \
         before, if it was ever served"
    );
    assert_eq!(found(&view, "db").unwrap(), ["192.0.2.1"]);
    // A field of an unexpected type does not keep the other entries from being read.
    site.cluster()
        .apply(entry("db", json!({ "hosts": "db.example.com" })));
    site.cluster().apply(fixed("other", "192.0.2.8"));
    let view = site.view(|view| found(view, "other").as_deref() == Some(&["192.0.2.8".to_owned()]));
    assert!(
        view.problems[0].text.starts_with("spec.hosts"),
        "{:?}",
        view.problems
    );
    site.cluster().apply(fixed("db", "192.0.2.3"));
    let view = site.view(|view| view.problems.is_empty());
    assert_eq!(found(&view, "db").unwrap(), ["192.0.2.3"]);
}

/// A selector selects ready pods of all nodes, and WorkloadEntries, which have all of the labels and the entry's
/// namespace.
#[test]
fn a_selector_selects_pods_wherever_they_are_and_workload_entries() {
    let labels = json!({ "app": "db", "tier": "a" });
    let pod = |name: &str, node: &str, last: u8, labels: &Value, ready: &str| {
        let mut pod = objects::pod(name, node, &[[10, 244, 0, last].into()]);
        pod["metadata"]["labels"] = labels.clone();
        pod["status"]["conditions"] = json!([{ "type": "Ready", "status": ready }]);
        pod
    };
    let mut elsewhere = workload("foreign", "192.0.2.7", &labels);
    elsewhere["metadata"]["namespace"] = json!("shop");
    let server = server([
        pod("one", NODE, 1, &labels, "True"),
        pod("two", "node2", 2, &labels, "True"),
        pod("not-ready", NODE, 3, &labels, "False"),
        pod("other", NODE, 4, &json!({ "app": "db" }), "True"),
        workload("vm", "192.0.2.1", &labels),
        workload("one", "192.0.2.2", &labels),
        elsewhere,
    ]);
    server.cluster().install_istio(Some("v1"));
    let site = Site::of(server, WANTED);
    site.view(|_| true);
    // Pods of other nodes are not read until an entry selects some.
    site.cluster().apply(selecting("db", &labels));
    let is = |wanted: &[&str]| {
        let wanted: Vec<String> = wanted.iter().map(|&text| text.to_owned()).collect();
        site.view(|view| found(view, "db").as_ref() == Some(&wanted));
    };
    is(&["10.244.0.1*", "10.244.0.2", "192.0.2.1", "192.0.2.2"]);
    site.cluster()
        .apply(pod("not-ready", NODE, 3, &labels, "True"));
    is(&[
        "10.244.0.1*",
        "10.244.0.2",
        "10.244.0.3*",
        "192.0.2.1",
        "192.0.2.2",
    ]);
    site.cluster().delete(Resource::Pods, "default", "one");
    site.cluster()
        .apply(pod("two", "node2", 2, &json!({ "app": "db" }), "True"));
    site.cluster()
        .delete(Resource::WorkloadEntries, "default", "vm");
    is(&["10.244.0.3*", "192.0.2.2"]);
    site.cluster()
        .apply(selecting("db", &json!({ "app": "db" })));
    is(&["10.244.0.2", "10.244.0.3*", "10.244.0.4*", "192.0.2.2"]);
    site.cluster()
        .delete(Resource::ServiceEntries, "default", "db");
    site.view(|view| found(view, "db").is_none());
}

/// Kubelets report the addresses: of Pods without a mesh, of Pods in the node's network, and of nodes.
#[test]
fn the_addresses_of_pods_and_nodes_are_known_and_everywhere_while_an_entry_names_addresses() {
    let pod = |name: &str, node: &str, addresses: &[&str], host: &str| {
        let mut pod = objects::pod(name, node, &[]);
        let all = addresses.iter().map(|ip| json!({ "ip": ip }));
        pod["status"]["podIPs"] = all.collect();
        pod["status"]["hostIP"] = json!(host);
        pod["status"]["hostIPs"] = json!([{ "ip": host }, { "ip": "fd00::9" }]);
        pod
    };
    let mut of_host = pod("proxy", "node2", &["192.0.2.2", "fd00::9"], "192.0.2.2");
    of_host["spec"]["hostNetwork"] = json!(true);
    let mut over = pod("over", "node3", &["10.244.3.1"], "192.0.2.3");
    over["status"]["phase"] = json!("Succeeded");
    let server = server([
        pod("here", NODE, &["10.244.1.1"], "192.0.2.1"),
        pod("there", "node2", &["10.244.2.1"], "192.0.2.2"),
        of_host,
        over,
        fixed("db", "192.0.2.200"),
    ]);
    server.cluster().install_istio(Some("v1"));
    let site = Site::of(server, WANTED);
    let known = |view: &View| -> Vec<String> {
        let addresses = view.pods.counts.keys();
        addresses.map(ToString::to_string).collect()
    };
    let here = ["10.244.1.1", "192.0.2.1", "fd00::9"];
    let view = site.view(|view| found(view, "db").is_some());
    assert!(!view.pods.everywhere && view.workloads.is_empty());
    assert_eq!(known(&view), here);
    let mut named = fixed("db", "192.0.2.200");
    named["spec"]["addresses"] = json!(["203.0.113.1"]);
    site.cluster().apply(named.clone());
    let view = site.view(|view| view.pods.everywhere);
    let all = [
        "10.244.1.1",
        "10.244.2.1",
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.3",
        "fd00::9",
    ];
    assert_eq!(known(&view), all);
    site.cluster().delete(Resource::Pods, "default", "there");
    let view = site.view(|view| !known(view).contains(&"10.244.2.1".to_owned()));
    // Another Pod is on that node, so the node's address stays.
    assert!(known(&view).contains(&"192.0.2.2".to_owned()));
    // Without permission to read Pods, there may be further Pods.
    site.server.faults().withhold(Some((Resource::Pods, 403)));
    site.server.faults().end_watches();
    let view = site.view(|view| !view.pods.everywhere);
    assert!(known(&view).contains(&"192.0.2.2".to_owned()));
    site.server.faults().withhold(None);
    site.view(|view| view.pods.everywhere);
    // A Pod cannot have an address in the ranges of hosts.
    named["spec"]["addresses"] = json!(["240.240.0.9"]);
    site.cluster().apply(named);
    let view = site.view(|view| !view.pods.everywhere);
    assert_eq!(known(&view), here);
}

/// A Service's WorkloadEntries are added, changed and removed while the agent runs. A Namespace's annotation changes
/// the used endpoints.
#[test]
fn a_service_follows_the_workload_entries_that_it_selects_and_what_its_clients_prefer() {
    let labels = json!({ "app": "web" });
    let mut service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": {
            "clusterIP": "10.96.0.1", "selector": labels, "ports": [{ "port": 80, "targetPort": 8080 }],
        },
    });
    let near = |mut workload: Value| {
        workload["spec"]["locality"] = json!("r/a");
        workload
    };
    let namespace = |value: &str| {
        json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": "default", "annotations": {
                "networking.istio.io/traffic-distribution": value,
            } },
        })
    };
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE, "labels": {
            "topology.kubernetes.io/zone": "a", "topology.kubernetes.io/region": "r",
        } },
    });
    let server = server([service.clone(), node, namespace("")]);
    server.cluster().install_istio(Some("v1"));
    let wanted = WantedKinds {
        scope: Scope::Mesh,
        ..WANTED
    };
    let site = Site::of(server, wanted);
    let is = |wanted: &[&str]| {
        let what = format!("{wanted:?}");
        site.view(|view| {
            let name = ServiceName::new("default", "web");
            let port = &view.services[&name].ports[0];
            let used = port.usable(true, TrafficPolicy::Cluster);
            let used: Vec<String> = used.map(|e| format!("{}:{}", e.addr, e.port)).collect();
            used.iter().map(String::as_str).eq(wanted.iter().copied())
        });
        what
    };
    is(&[]);
    site.cluster().apply(workload("a", "192.0.2.1", &labels));
    is(&["192.0.2.1:8080"]);
    site.cluster()
        .apply(near(workload("b", "192.0.2.2", &labels)));
    is(&["192.0.2.1:8080", "192.0.2.2:8080"]);
    site.cluster().apply(namespace("PreferSameZone"));
    is(&["192.0.2.2:8080"]);
    site.cluster().apply(namespace(""));
    is(&["192.0.2.1:8080", "192.0.2.2:8080"]);
    site.cluster()
        .apply(workload("b", "192.0.2.3", &json!({ "app": "other" })));
    is(&["192.0.2.1:8080"]);
    service["spec"]["selector"] = json!({ "app": "other" });
    site.cluster().apply(service);
    is(&["192.0.2.3:8080"]);
    site.cluster().install_istio(None);
    site.cluster().compact();
    site.server.faults().end_watches();
    is(&[]);
}
