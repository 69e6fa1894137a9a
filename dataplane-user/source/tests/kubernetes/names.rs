//! The objects that DNS needs: headless services, and all services, so that an unknown name does not exist.

use dataplane_source::{
    View,
    kubernetes::{Scope, WantedKinds},
};
use dataplane_tests::api::{Resource, objects};
use model::ServiceName;
use serde_json::{Value, json};

use crate::site::{Site, server, vip, web};

const NAMES: WantedKinds = WantedKinds {
    scope: Scope::Services,
    entries: false,
    routes: false,
    waypoints: false,
    ..WantedKinds::ALL
};

fn labelled(mut object: Value, key: &str) -> Value {
    object["metadata"]["labels"][key] = json!("");
    object
}

/// Returns a headless service, and its slice with the controller's label.
fn headless(number: u16, endpoints: &[u16]) -> [Value; 2] {
    let [mut service, slice] = web(number, endpoints);
    service["spec"]["clusterIP"] = json!("None");
    service["spec"]["clusterIPs"] = json!(["None"]);
    [service, labelled(slice, "service.kubernetes.io/headless")]
}

/// Returns the number of endpoints of a headless service that have names.
fn published(view: &View, name: &str) -> usize {
    let service = view.services.get(&ServiceName::new("default", name));
    service.map_or(0, |service| service.records.published().len())
}

#[test]
fn headless_services_have_their_endpoints_and_all_names_are_known() {
    let all = web(1, &[1]).into_iter().chain(headless(2, &[2, 3]));
    let site = Site::of(server(all), NAMES);
    let view = site.view(|view| published(view, "web-2") == 2);
    assert!(view.whole);
    let headless = &view.services[&ServiceName::new("default", "web-2")];
    assert!(headless.records.is_headless());
    assert!(
        headless.ports[0].endpoints.is_empty(),
        "there is no VIP to serve"
    );
    // A service of another proxy has a name, too: names do not depend on the proxy.
    let other = labelled(
        objects::service("other", vip(9)),
        "service.kubernetes.io/service-proxy-name",
    );
    site.cluster().apply(other);
    let name = ServiceName::new("default", "other");
    let view = site.view(|view| view.services.contains_key(&name));
    assert!(view.whole && view.unread.is_empty() && view.problems.is_empty());
    let service = &view.services[&name];
    assert_eq!(service.named_ips(), [vip(9)]);
    assert!(service.cluster_ips.is_empty() && service.ports.is_empty());
    site.cluster()
        .delete(Resource::Services, "default", "other");
    site.view(|view| !view.services.contains_key(&name));
    // A service that cannot be read may have any name in its namespace. Other namespaces are not affected.
    let mut nonsense = objects::service("nonsense", vip(8));
    nonsense["metadata"]["namespace"] = json!("theirs");
    nonsense["spec"]["ports"][0]["port"] = json!("eighty");
    site.cluster().apply(nonsense);
    let view = site.view(|view| !view.unread.is_empty());
    assert!(view.whole);
    assert_eq!(
        view.unread.iter().map(|of| &**of).collect::<Vec<_>>(),
        ["theirs"]
    );
    site.cluster()
        .delete(Resource::Services, "theirs", "nonsense");
    site.view(|view| view.unread.is_empty());
    // A wrong service of another proxy is not reported, and may have any name, too.
    let mut wrong = labelled(
        objects::service("wrong", vip(8)),
        "service.kubernetes.io/service-proxy-name",
    );
    wrong["metadata"]["namespace"] = json!("theirs");
    wrong["spec"]["ports"][0]["port"] = json!(0);
    site.cluster().apply(wrong);
    let view = site.view(|view| !view.unread.is_empty());
    assert!(view.problems.is_empty());
    site.cluster().delete(Resource::Services, "theirs", "wrong");
    site.view(|view| view.unread.is_empty());
    let [_, mut slice] = self::headless(2, &[2]);
    slice["endpoints"][0]["addresses"] = json!("nonsense");
    site.cluster().apply(slice);
    let view = site.view(|view| !view.unread.is_empty());
    assert_eq!(published(&view, "web-2"), 2, "it stays as it was");
}

#[test]
fn services_of_others_that_go_while_nobody_watches_are_forgotten() {
    let other = labelled(
        objects::service("other", vip(9)),
        "service.kubernetes.io/service-proxy-name",
    );
    let mut site = Site::of(server([other]), NAMES);
    site.view(|view| !view.services.is_empty());
    site.watching();
    site.server.go_away();
    let cluster = site.cluster();
    cluster.delete(Resource::Services, "default", "other");
    cluster.compact();
    site.server.come_back().unwrap();
    site.view(|view| view.services.is_empty());
}

/// While the server is down, names are uncertain, even if nothing has changed in the meantime.
#[test]
fn a_server_that_is_there_again_makes_a_view() {
    let mut site = Site::of(server(web(1, &[1])), NAMES);
    site.view(|view| !view.services.is_empty());
    site.watching();
    while site.untaken().is_some() {}
    site.server.go_away();
    site.wait("a failure", |site| site.health.behind_since().is_some());
    site.server.come_back().unwrap();
    site.view(|_| true);
    site.watching();
    site.wait("no failure", |site| site.health.behind_since().is_none());
}

#[test]
fn nothing_of_that_is_read_without_dns() {
    let all = web(1, &[1]).into_iter().chain(headless(2, &[2, 3]));
    let site = Site::new(server(all));
    let view = site.view(|view| view.services.len() == 2);
    assert!(!view.whole && published(&view, "web-2") == 0);
}
