//! The results of objects.

use std::sync::Arc;

use dataplane_source::kubernetes::Kind;
use dataplane_tests::api::{Resource, objects};
use model::{Gravity, Leaving, ServiceName, ServiceType};
use serde_json::json;

use crate::site::{Site, endpoints, facts, has, server, slice_of, vip, web};

#[test]
fn what_is_there_and_what_comes_and_goes() {
    let site = Site::new(server(web(1, &[1, 2]).into_iter().chain(web(2, &[3]))));
    let view = site.view(|_| true);
    assert_eq!(view.services.len(), 2);
    assert_eq!(endpoints(&view, "web-1"), [1, 2]);
    let service = &view.services[&ServiceName::new("default", "web-1")];
    assert_eq!(service.cluster_ips.as_slice(), [vip(1)]);
    assert_eq!(service.created, Some(1_767_225_600));
    assert_eq!(&*service.ports[0].name, "http");
    let local: Vec<bool> = service.ports[0].endpoints.iter().map(|e| e.local).collect();
    assert_eq!(local, [false, true], "nodeName says who is here");
    assert_eq!(&*facts(&view).zone, "zone-a");
    assert!(view.problems.is_empty());

    let other = view.services[&ServiceName::new("default", "web-2")].clone();
    site.cluster().apply(slice_of("web-1", "web-1-a", &[1, 4]));
    let view = site.view(|view| endpoints(view, "web-1") == [1, 4]);
    let same = &view.services[&ServiceName::new("default", "web-2")];
    assert!(Arc::ptr_eq(same, &other), "what did not change is shared");

    site.cluster().apply_all(web(3, &[5]));
    site.view(|view| endpoints(view, "web-3") == [5]);
    site.cluster()
        .delete(Resource::Services, "default", "web-2");
    site.view(|view| !has(view, "web-2") && has(view, "web-3"));
    site.cluster()
        .delete(Resource::EndpointSlices, "default", "web-3-a");
    site.view(|view| has(view, "web-3") && endpoints(view, "web-3").is_empty());
    assert_eq!(site.lists(), [1, 1, 1]);
}

#[test]
fn slices_find_their_service_in_any_order() {
    let site = Site::new(server([slice_of("web-1", "a", &[1, 2])]));
    site.view(|view| view.services.is_empty());
    let [service, _] = web(1, &[]);
    site.cluster().apply(service.clone());
    site.view(|view| endpoints(view, "web-1") == [1, 2]);
    // Several slices, with one endpoint in both.
    site.cluster().apply(slice_of("web-1", "b", &[2, 3]));
    site.view(|view| endpoints(view, "web-1") == [1, 2, 3]);
    // A slice may move to another service.
    site.cluster().apply_all(web(2, &[]));
    site.cluster().apply(slice_of("web-2", "a", &[1, 2]));
    let view = site.view(|view| endpoints(view, "web-2") == [1, 2]);
    assert_eq!(endpoints(&view, "web-1"), [2, 3]);
    // A service that is created again has the endpoints that its slices still name.
    site.cluster()
        .delete(Resource::Services, "default", "web-1");
    site.view(|view| !has(view, "web-1"));
    site.cluster().apply(service);
    site.view(|view| endpoints(view, "web-1") == [2, 3]);
}

#[test]
fn other_proxies_services_and_headless_ones_are_left_alone() {
    let label = |mut object: serde_json::Value, key: &str, value: &str| {
        object["metadata"]["labels"][key] = json!(value);
        object
    };
    let [service, slice] = web(1, &[1]);
    let other = label(
        service.clone(),
        "service.kubernetes.io/service-proxy-name",
        "mesh",
    );
    let [headless, headless_slice] = web(2, &[2]);
    let site = Site::new(server([
        other.clone(),
        slice,
        label(headless, "service.kubernetes.io/headless", ""),
        label(headless_slice, "service.kubernetes.io/headless", ""),
    ]));
    site.view(|view| view.services.is_empty());
    let queries = site.server.faults().asked();
    assert!(
        queries
            .iter()
            .any(|q| q.query.contains("service-proxy-name")),
        "what is not ours does not even come here"
    );
    // Without the label the service is kube-proxy's, with the label it is another proxy's.
    site.cluster().apply(service);
    site.view(|view| endpoints(view, "web-1") == [1]);
    site.cluster().apply(other);
    site.view(|view| !has(view, "web-1"));
}

#[test]
fn a_service_changes_its_type_and_its_addresses() {
    let [mut service, slice] = web(1, &[1]);
    let site = Site::new(server([service.clone(), slice]));
    site.view(|view| has(view, "web-1"));
    service["spec"]["type"] = json!("LoadBalancer");
    service["spec"]["ports"][0]["nodePort"] = json!(30080);
    service["spec"]["healthCheckNodePort"] = json!(30081);
    service["spec"]["externalTrafficPolicy"] = json!("Local");
    service["status"]["loadBalancer"]["ingress"] =
        json!([{ "ip": "203.0.113.7" }, { "ip": "203.0.113.8", "ipMode": "Proxy" }]);
    site.cluster().apply(service.clone());
    let name = ServiceName::new("default", "web-1");
    let view = site.view(|view| view.services[&name].kind == ServiceType::LoadBalancer);
    let got = &view.services[&name];
    assert_eq!(
        got.load_balancer_ips.as_slice(),
        ["203.0.113.7".parse::<std::net::IpAddr>().unwrap()]
    );
    assert_eq!(got.ports[0].node_port, Some(30080));
    assert_eq!(got.health_check_node_port, Some(30081));
    assert_eq!(endpoints(&view, "web-1"), [1]);
    service["spec"]["clusterIP"] = json!("10.96.9.9");
    service["spec"]["clusterIPs"] = json!(["10.96.9.9", "fd00::9"]);
    service["spec"]["ipFamilies"] = json!(["IPv4", "IPv6"]);
    site.cluster().apply(service);
    site.view(|view| view.services[&name].cluster_ips.len() == 2);
}

#[test]
fn an_object_that_makes_no_sense_is_a_problem_and_the_rest_is_served() {
    let mut nonsense = objects::service("nonsense", vip(9));
    nonsense["spec"]["ports"][0]["port"] = json!("eighty");
    let site = Site::new(server(web(1, &[1]).into_iter().chain([nonsense])));
    let view = site.view(|view| endpoints(view, "web-1") == [1]);
    assert!(!has(&view, "nonsense"));
    let problem = &view.problems[0];
    assert_eq!(problem.place, "Service default/nonsense");
    assert_eq!(problem.gravity, Gravity::NotFollowed);
    assert!(problem.text.contains("spec.ports[0].port"), "{problem:?}");
    // The former state is still served.
    let [mut service, _] = web(1, &[]);
    service["spec"]["sessionAffinity"] = json!("Sometimes");
    site.cluster().apply(service.clone());
    let view = site.view(|view| view.problems.len() == 2);
    assert_eq!(endpoints(&view, "web-1"), [1]);
    // The service becomes valid or is removed, and the problem ends.
    service["spec"]["sessionAffinity"] = json!("None");
    site.cluster().apply(service);
    site.cluster()
        .delete(Resource::Services, "default", "nonsense");
    site.view(|view| view.problems.is_empty());
}

#[test]
fn hints_are_read_with_the_eyes_of_the_nodes_zone() {
    let mut slice = slice_of("web-1", "web-1-a", &[1, 3]);
    for (index, zone) in ["zone-a", "zone-b"].into_iter().enumerate() {
        slice["endpoints"][index]["hints"]["forZones"] = json!([{ "name": zone }]);
    }
    let [service, _] = web(1, &[]);
    let site = Site::new(server([service, slice]));
    let here = |view: &dataplane_source::View| -> Vec<bool> {
        let service = &view.services[&ServiceName::new("default", "web-1")];
        let endpoints = service.ports[0].endpoints.iter();
        endpoints.map(|e| e.hints.for_this_zone()).collect()
    };
    site.view(|view| here(view) == [true, false]);
    site.cluster().apply(objects::node("node1", "zone-b", &[]));
    let view = site.view(|view| here(view) == [false, true]);
    assert_eq!(&*facts(&view).zone, "zone-b");
    // The zone changes while slices are not being watched.
    site.watching();
    site.server
        .faults()
        .withhold(Some((Resource::EndpointSlices, 500)));
    site.server.faults().break_watches();
    site.wait("slices are refused", |site| {
        site.health.of(Kind::Slice).failures() > 0
    });
    site.cluster().apply(objects::node("node1", "zone-a", &[]));
    site.view(|view| &*facts(view).zone == "zone-a");
    site.server.faults().withhold(None);
    site.view(|view| here(view) == [true, false]);
}

#[test]
fn a_node_that_the_cluster_does_not_know_is_told() {
    let server = server(web(1, &[1]));
    server.cluster().delete(Resource::Nodes, "", "node1");
    // Other nodes do not matter.
    server
        .cluster()
        .apply(objects::node("node2", "zone-b", &[]));
    let site = Site::new(server);
    let view = site.view(|_| true);
    assert_eq!(endpoints(&view, "web-1"), [1]);
    assert!(
        view.problems[0].text.contains("--node-name"),
        "{:?}",
        view.problems
    );
    assert_eq!(&*facts(&view).zone, "");
    // As for kube-proxy, load balancers should send no new connections here.
    assert_eq!(facts(&view).leaving, Some(Leaving::Unknown));
    let address = "192.0.2.1".parse().unwrap();
    site.cluster()
        .apply(objects::node("node1", "zone-a", &[address]));
    let view = site.view(|view| view.problems.is_empty());
    assert_eq!(facts(&view).addresses, [address]);
    assert_eq!(facts(&view).leaving, None);
    site.cluster().delete(Resource::Nodes, "", "node1");
    site.view(|view| facts(view).addresses.is_empty() && facts(view).leaving.is_some());
}

/// The API server accepts and returns such a condition. Kubernetes' own client cannot write it, but the controller of a
/// cloud did.
#[test]
fn what_is_not_needed_of_a_service_may_be_anything() {
    let [mut service, slice] = web(1, &[1]);
    service["status"]["conditions"] =
        json!([{ "type": "LoadBalancerReady", "status": "True", "lastTransitionTime": null }]);
    let site = Site::new(server([service, slice]));
    let view = site.view(|view| endpoints(view, "web-1") == [1]);
    assert!(view.problems.is_empty(), "{:?}", view.problems);
}

#[test]
fn a_slice_whose_service_is_missing_for_long_is_told_until_it_comes() {
    let slices = [
        slice_of("web-1", "web-1-a", &[1]),
        slice_of("", "nobody-a", &[2]),
    ];
    let site = Site::new(server(slices));
    site.view(|view| view.services.is_empty());
    let view = site.view(|view| !view.problems.is_empty());
    let [problem] = &view.problems[..] else {
        panic!("{:?}", view.problems)
    };
    assert_eq!(problem.gravity, Gravity::Warning);
    assert_eq!(problem.place, "EndpointSlice default/web-1-a");
    let [service, _] = web(1, &[]);
    site.cluster().apply(service);
    site.view(|view| view.problems.is_empty() && endpoints(view, "web-1") == [1]);
}

#[test]
fn a_node_that_goes_while_it_is_watched_is_told_with_the_reason() {
    let site = Site::new(server(web(1, &[2])));
    site.view(|view| facts(view).leaving.is_none());
    let mut node = objects::node("node1", "zone-a", &[]);
    node["spec"]["taints"] =
        json!([{ "key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule" }]);
    site.cluster().apply(node);
    site.view(|view| facts(view).leaving == Some(Leaving::Tainted));
    site.cluster().delete(Resource::Nodes, "", "node1");
    let view = site.view(|view| facts(view).leaving == Some(Leaving::Unknown));
    let [problem] = &view.problems[..] else {
        panic!("{:?}", view.problems)
    };
    assert_eq!(problem.gravity, Gravity::Place);
    assert!(problem.text.contains("was deleted"), "{problem:?}");
    // Services continue.
    assert_eq!(endpoints(&view, "web-1"), [2]);
    site.cluster().apply(objects::node("node1", "zone-a", &[]));
    site.view(|view| view.problems.is_empty() && facts(view).leaving.is_none());
}
