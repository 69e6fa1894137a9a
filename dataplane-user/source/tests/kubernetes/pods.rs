//! The pods of this node: their host ports, and the mesh settings of pods and namespaces.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use dataplane_source::{
    View,
    kubernetes::{Kind, Patience, Scope},
    manifests,
};
use dataplane_tests::api::{Resource, objects};
use model::{Egress, Exempt, Layers, Node, Place, Rules, ServiceName, WorkloadName};
use serde_json::{Value, json};

use crate::site::{NODE, Site, endpoints, has, patience, pod, server, slice_of, web};

/// A pod on this node with a host port.
fn exposed(name: &str, number: u16) -> Value {
    let mut object = objects::pod(name, NODE, &[pod(number)]);
    object["spec"]["containers"][0]["ports"][0]["hostPort"] = json!(8480);
    object
}

/// Returns the endpoints of a pod's host port.
fn exposes(view: &View, name: &str) -> Vec<u16> {
    endpoints(view, &format!("hostport:{name}"))
}

fn rules(view: &View, name: &str) -> Option<Rules> {
    let workload = view.workloads.get(&WorkloadName::new("default", name))?;
    Some(workload.rules.merged())
}

fn captured(view: &View, name: &str) -> Option<bool> {
    rules(view, name)?.captured
}

fn labelled(mut object: Value, label: &str) -> Value {
    object["metadata"]["labels"]["istio.io/dataplane-mode"] = json!(label);
    object
}

#[test]
fn host_ports_come_and_go_with_their_pods() {
    let mut waiting = exposed("late", 7);
    waiting["status"] = json!({ "phase": "Pending" });
    let elsewhere = objects::pod("other", "node2", &[pod(9)]);
    let objects = web(1, &[1]).into_iter();
    let site = Site::of(
        server(objects.chain([exposed("first", 6), waiting, elsewhere])),
        Scope::HostPorts,
    );
    let view = site.view(|_| true);
    assert_eq!(endpoints(&view, "web-1"), [1]);
    assert_eq!(exposes(&view, "first"), [6]);
    assert!(!has(&view, "hostport:late"), "it has no address yet");
    assert!(view.workloads.is_empty(), "nobody asked for them");
    let asked = site.server.faults().asked();
    let pods = asked.iter().find(|a| a.resource == Some(Resource::Pods));
    let query = &pods.unwrap().query;
    assert!(query.contains("spec.nodeName%3Dnode1"), "{query}");
    assert!(
        asked
            .iter()
            .all(|a| a.resource != Some(Resource::Namespaces))
    );

    // The kubelet reports the pod's address.
    site.cluster().apply(exposed("late", 7));
    site.view(|view| exposes(view, "late") == [7]);
    // A change of fields that change often, such as the status, does not make a view.
    let events = || site.health.of(Kind::Pod).events();
    let before = events();
    let mut busy = exposed("late", 7);
    busy["status"]["conditions"][0]["status"] = json!("False");
    busy["metadata"]["annotations"] = json!({ "example.com/restarted": "now" });
    site.cluster().apply(busy);
    site.wait("the change was told", |_| events() > before);
    site.cluster().apply_all(web(2, &[1]));
    let view = site.view(|view| endpoints(view, "web-2") == [1]);
    assert!(view.since.is_some());
    site.watching();
    site.cluster().apply(exposed("late", 7));
    site.wait("the change was told", |_| events() > before + 1);
    std::thread::sleep(Duration::from_millis(50));
    assert!(site.untaken().is_none());
    // The pod has ended, and its object stays for a while.
    let mut over = exposed("late", 7);
    over["status"]["phase"] = json!("Succeeded");
    site.cluster().apply(over);
    site.view(|view| !has(view, "hostport:late"));
    // Lists and changes of services do not affect host ports.
    site.cluster().apply(slice_of("web-1", "web-1-a", &[2]));
    let view = site.view(|view| endpoints(view, "web-1") == [2]);
    assert_eq!(exposes(&view, "first"), [6]);
    site.cluster().delete(Resource::Pods, "default", "first");
    let view = site.view(|view| !has(view, "hostport:first"));
    assert_eq!(view.services.len(), 2);
}

#[test]
fn everything_listed_anew_forgets_what_is_gone_and_no_more() {
    let mut site = Site::of(server([exposed("one", 1), exposed("two", 2)]), Scope::Mesh);
    site.view(|view| view.workloads.len() == 2);
    site.watching();
    site.server.go_away();
    let cluster = site.cluster();
    cluster.delete(Resource::Pods, "default", "one");
    cluster.apply_all(web(1, &[1]));
    cluster.compact();
    site.server.come_back().unwrap();
    let view = site.view(|view| !has(view, "hostport:one") && has(view, "web-1"));
    assert_eq!(exposes(&view, "two"), [2]);
    assert_eq!(view.workloads.len(), 1);
}

#[test]
fn labels_of_pods_and_namespaces_are_rules() {
    let object = |name: &str| objects::pod(name, NODE, &[pod(1)]);
    let mut of_host = object("host");
    of_host["spec"]["hostNetwork"] = json!(true);
    // A pod whose settings cannot take effect is reported.
    let mut asks = labelled(object("asks"), "ambient");
    asks["spec"]["hostNetwork"] = json!(true);
    let mut sidecar = labelled(object("sidecar"), "ambient");
    sidecar["metadata"]["annotations"] = json!({ "sidecar.istio.io/status": "{}" });
    let own = labelled(object("own"), "ambient");
    let all = [object("plain"), of_host, asks, sidecar, own];
    let site = Site::of(server(all), Scope::Mesh);
    let view = site.view(|_| true);
    assert_eq!(captured(&view, "plain"), None);
    assert_eq!(captured(&view, "own"), Some(true));
    assert_eq!(rules(&view, "host"), None, "it shares the node's network");
    let workload = |name: &str| view.workloads[&WorkloadName::new("default", name)].clone();
    assert_eq!(workload("asks").place, Place::Exempt(Exempt::HostNetwork));
    assert!(workload("asks").addresses.is_empty(), "they are the node's");
    assert_eq!(workload("sidecar").place, Place::Exempt(Exempt::Sidecar));
    assert_eq!(workload("sidecar").addresses.as_slice(), [pod(1)]);
    let plain = &view.workloads[&WorkloadName::new("default", "plain")];
    assert_eq!(plain.addresses.as_slice(), [pod(1)] as [IpAddr; 1]);
    assert_eq!(&*plain.telemetry.canonical_service, "plain");

    // The namespace is enrolled, except a pod that is exempt.
    let cluster = site.cluster();
    let mark = json!({ "istio.io/dataplane-mode": "ambient" });
    cluster.apply(objects::namespace("default", &mark));
    cluster.apply(labelled(object("own"), "none"));
    site.view(|view| captured(view, "plain") == Some(true) && captured(view, "own") == Some(false));
    // The namespace is no longer enrolled.
    cluster.apply(objects::namespace("default", &json!({})));
    site.view(|view| captured(view, "plain").is_none());
    cluster.apply(objects::namespace("default", &mark));
    site.view(|view| captured(view, "plain") == Some(true));
    cluster.delete(Resource::Namespaces, "", "default");
    site.view(|view| captured(view, "plain").is_none());
    cluster.delete(Resource::Pods, "default", "plain");
    site.view(|view| rules(view, "plain").is_none());
}

/// Both sources, the manifest and the API, return the same identity of a pod.
#[test]
fn who_a_pod_is() {
    let uid = "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";
    let mut full = objects::pod("full", NODE, &[pod(1)]);
    full["metadata"]["uid"] = json!(uid);
    full["metadata"]["labels"]["topology.istio.io/network"] = json!("east");
    let mut plain = objects::pod("plain", "", &[pod(2)]);
    plain["metadata"]["uid"] = json!("no UUID");
    let text = json!({ "kind": "List", "apiVersion": "v1", "items": [full, plain] });
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::fs::write(&file, text.to_string()).unwrap();
    let node = Node {
        name: NODE.into(),
        ..Node::default()
    };
    let loaded = manifests::load(&[file.path().to_owned()], &node).unwrap();

    let mut unnamed = plain.clone();
    unnamed["spec"]["nodeName"] = json!(NODE);
    let site = Site::of(server([full.clone(), unnamed]), Scope::Mesh);
    let view = site.view(|view| view.workloads.len() == 2);
    for workloads in [&view.workloads, &loaded.snapshot.workloads] {
        let full = &workloads[&WorkloadName::new("default", "full")];
        assert_eq!(full.uid.unwrap().to_string(), uid);
        assert_eq!((&*full.node, &*full.network), (NODE, "east"));
        let plain = &workloads[&WorkloadName::new("default", "plain")];
        assert_eq!((plain.uid, &*plain.network), (None, ""));
    }
    let name = WorkloadName::new("default", "full");
    let mut from_file = model::Workload::clone(&loaded.snapshot.workloads[&name]);
    assert_eq!(from_file.labels.len(), 2);
    // This site follows no policies, which select Pods by their labels.
    from_file.labels = view.workloads[&name].labels.clone();
    assert_eq!(from_file, *view.workloads[&name]);

    // A pod that replaces a pod of its name is another pod.
    let next = "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b61";
    full["metadata"]["uid"] = json!(next);
    site.cluster().apply(full);
    let name = WorkloadName::new("default", "full");
    site.view(|view| {
        view.workloads[&name]
            .uid
            .map(|uid| uid.to_string())
            .as_deref()
            == Some(next)
    });
}

/// The author of a file may leave the node out. In the API, such a pod is not scheduled yet.
#[test]
fn a_pod_without_a_node_is_here_in_a_file_only() {
    let mut object = labelled(exposed("web", 1), "ambient");
    object["spec"].as_object_mut().unwrap().remove("nodeName");
    object["metadata"]["annotations"] =
        json!({ "dataplane.io/egress": "deny", "dataplane.io/mode": "nonsense" });
    let site = Site::of(server([object.clone()]), Scope::Registry);
    let name = WorkloadName::new("default", "web");
    let view = site.view(|view| view.workloads.contains_key(&name));
    let workload = &view.workloads[&name];
    assert_eq!(workload.place, Place::Elsewhere);
    assert_eq!(*workload.rules, Layers::default());

    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::fs::write(&file, object.to_string()).unwrap();
    let node = Node {
        name: NODE.into(),
        ..Node::default()
    };
    let loaded = manifests::load(&[file.path().to_owned()], &node).unwrap();
    let workload = &loaded.view.workloads[&name];
    assert_eq!(workload.place, Place::Address);
    let rules = workload.rules.merged();
    assert_eq!(
        (rules.captured, rules.egress),
        (Some(true), Some(Egress::Deny))
    );
    assert_eq!(loaded.view.problems.len(), 1);
    assert!(!has(&loaded.view, "hostport:web"));
}

/// The pods of other nodes are read only while an egress policy needs the known destinations.
#[test]
fn pods_of_all_nodes_are_known_to_whom_they_matter() {
    let object = |name: &str, egress: &str| {
        let mut object = labelled(objects::pod(name, NODE, &[pod(1)]), "ambient");
        object["metadata"]["annotations"] = json!({ "dataplane.io/egress": egress });
        object
    };
    // The settings of a pod on another node, and its problems, are up to that node.
    let mut other = labelled(objects::pod("other", "node2", &[pod(2)]), "ambeint");
    other["metadata"]["annotations"] = json!({ "dataplane.io/egress": "deny" });
    other["spec"]["containers"][0]["ports"][0]["hostPort"] = json!(8480);
    let elsewhere = |view: &View| {
        let other = view.workloads.get(&WorkloadName::new("default", "other"))?;
        assert_eq!(other.place, Place::Elsewhere);
        assert_eq!(other.addresses.as_slice(), [pod(2)]);
        assert_eq!(*other.rules, Layers::default());
        assert!(!has(view, "hostport:other"));
        assert!(view.problems.is_empty(), "{:?}", view.problems);
        Some(())
    };
    let server = server([object("one", "allow"), other]);
    let site = Site::of(server, Scope::Mesh);
    assert_eq!(elsewhere(&site.view(|_| true)), None);
    site.cluster().apply(object("one", "deny"));
    site.view(|view| elsewhere(view).is_some());
    site.cluster().apply(object("one", "allow"));
    site.view(|view| elsewhere(view).is_none());
    // The namespace sets the policy for pods without their own.
    let mark = json!({ "istio.io/dataplane-mode": "ambient" });
    let mut namespace = objects::namespace("default", &mark);
    namespace["metadata"]["annotations"] = json!({ "dataplane.io/egress": "deny" });
    site.cluster().apply(namespace);
    site.cluster()
        .apply(labelled(objects::pod("two", NODE, &[pod(3)]), "ambient"));
    site.view(|view| elsewhere(view).is_some());
    // A reader that starts has the pods in its first view, with the rules of the namespace.
    let again = Site::of(site.server, Scope::Mesh);
    let view = again.view(|_| true);
    assert!(elsewhere(&view).is_some());
    assert_eq!(captured(&view, "two"), Some(true));
    again.watching();
    again.cluster().delete(Resource::Pods, "default", "two");
    again.view(|view| elsewhere(view).is_none());
    // The configuration sets the policy.
    let always = Site::of(again.server, Scope::Registry);
    assert!(elsewhere(&always.view(|_| true)).is_some());
}

/// Invalid rules do not affect other parts of a pod. Invalid ports leave the former ones in place.
#[test]
fn one_half_of_a_pod_is_not_left_out_for_the_other() {
    let sense = labelled(exposed("web", 1), "ambient");
    let site = Site::of(server([sense.clone()]), Scope::Mesh);
    site.view(|view| captured(view, "web") == Some(true) && exposes(view, "web") == [1]);
    let mut wrong = labelled(exposed("web", 2), "ambeint");
    wrong["metadata"]["annotations"] = json!({ "dataplane.io/egress": "perhaps" });
    site.cluster().apply(wrong);
    let view = site.view(|view| exposes(view, "web") == [2]);
    assert_eq!(captured(&view, "web"), None);
    let workload = &view.workloads[&WorkloadName::new("default", "web")];
    assert_eq!(workload.addresses.as_slice(), [pod(2)]);
    // A value that may have been meant to deny egress denies it.
    assert_eq!(workload.rules.own.egress, Some(Egress::Deny));
    let problems: Vec<_> = view.problems.iter().map(|p| format!("{p:?}")).collect();
    assert!(
        problems.len() == 2 && problems.iter().all(|p| p.contains("Pod default/web")),
        "{problems:?}"
    );
    let mut wrong = labelled(exposed("web", 3), "none");
    wrong["spec"]["containers"][0]["ports"][0]["hostPort"] = json!(70_000);
    site.cluster().apply(wrong);
    let view = site.view(|view| captured(view, "web") == Some(false));
    assert_eq!(exposes(&view, "web"), [2]);
    // The object cannot be converted at all.
    let mut wrong = sense.clone();
    wrong["spec"]["containers"] = json!("none");
    site.cluster().apply(wrong);
    let view = site.view(|view| {
        view.problems
            .iter()
            .any(|p| p.text.contains("spec.containers"))
    });
    assert_eq!(captured(&view, "web"), Some(false));
    assert_eq!(exposes(&view, "web"), [2]);
    site.cluster().apply(sense);
    let view = site.view(|view| captured(view, "web") == Some(true));
    assert_eq!(exposes(&view, "web"), [1]);
    assert!(view.problems.is_empty());
}

/// The agent continues without a kind that it may not read, and reports it. Services wait only a short time.
#[test]
fn without_the_right_to_read_pods_services_are_served() {
    let server = server(web(1, &[1]).into_iter().chain([exposed("web", 2)]));
    server.faults().withhold(Some((Resource::Pods, 403)));
    let site = Site::of(server, Scope::HostPorts);
    let view = site.view(|_| true);
    assert_eq!(endpoints(&view, "web-1"), [1]);
    assert!(!has(&view, "hostport:web"));
    let [problem] = &*view.problems else {
        panic!("{:?}", view.problems)
    };
    for word in ["pods", "403", "RBAC", "hostPort"] {
        assert!(problem.text.contains(word), "{problem:?}");
    }
    site.watching();
    assert_eq!(
        site.health.failure(),
        None,
        "that is no failure of the rest"
    );
    assert!(site.health.heard() > 0);
    site.cluster().apply(slice_of("web-1", "web-1-a", &[3]));
    site.view(|view| endpoints(view, "web-1") == [3]);
    // The permission is granted.
    site.server.faults().withhold(None);
    let view = site.view(|view| exposes(view, "web") == [2] && view.problems.is_empty());
    assert!(has(&view, "web-1"));
    // The permission is withdrawn: the objects stay, and are reported as old.
    site.watching();
    site.server.faults().withhold(Some((Resource::Pods, 403)));
    site.server.faults().break_watches();
    let view = site.view(|view| !view.problems.is_empty());
    assert_eq!(exposes(&view, "web"), [2]);
    assert!(
        view.problems[0].text.contains("read before"),
        "{:?}",
        view.problems
    );
    assert!(
        view.services
            .contains_key(&ServiceName::new("default", "web-1"))
    );
}

/// Other failures are waited for: they do not remove the host ports of an earlier agent.
#[test]
fn pods_that_cannot_be_read_just_now_are_waited_for() {
    let server = server([exposed("web", 2)]);
    server.faults().withhold(Some((Resource::Pods, 500)));
    let site = Site::of(server, Scope::HostPorts);
    site.wait("it was tried often", |site| {
        site.health.of(Kind::Pod).failures() > 8
    });
    assert!(site.untaken().is_none());
    assert!(site.health.failure().is_some());
    site.server.faults().withhold(None);
    site.view(|view| exposes(view, "web") == [2]);
}

#[test]
fn what_may_not_be_read_is_done_without_when_patience_ends() {
    let server = server(web(1, &[1]));
    server.faults().withhold(Some((Resource::Pods, 403)));
    let patient = Patience {
        retry: Duration::from_millis(400),
        retry_max: Duration::from_mins(1),
        forbidden: Duration::from_millis(1_500),
        ..patience()
    };
    let start = Instant::now();
    let site = Site::patient(server, Scope::HostPorts, patient);
    site.view(|view| endpoints(view, "web-1") == [1]);
    // The attempts are at 0.4 to 0.8 s, at 1.2 to 2.4 s, and at twice that, and one more at the end of the patience.
    let took = start.elapsed();
    assert!(
        took >= Duration::from_millis(1_500) && took < Duration::from_millis(2_300),
        "{took:?}"
    );
}
