//! Istio's objects that limit connections.

use std::{thread, time::Duration};

use dataplane_source::{
    View,
    kubernetes::{Kind, Patience, Scope, WantedKinds, WantedPolicies},
};
use dataplane_tests::api::Resource;
use model::UseWaypoint;
use serde_json::{Value, json};

use crate::site::{Site, patience, server, web};

fn wanted(policies: WantedPolicies) -> WantedKinds {
    WantedKinds {
        policies,
        ..Scope::Mesh.into()
    }
}

fn object(kind: &str, labels: Value, spec: Value) -> Value {
    let mut object = json!({ "apiVersion": "", "kind": kind, "metadata": { "name": "limit" } });
    object["metadata"]["labels"] = labels;
    object["spec"] = spec;
    object
}

/// Returns the objects of a namespace: the waypoint that its label names, the objects with labels, and policies.
fn told(view: &View, namespace: &str) -> String {
    let of = view.istio.namespaces.get(namespace);
    of.map_or(String::new(), |of| {
        let name = |of: &UseWaypoint| of.gateway().map_or("none".into(), ToString::to_string);
        let own = of.waypoint.as_ref().map(name);
        let labels = of
            .labels
            .iter()
            .map(|(object, of)| format!("{object}={}", name(of)));
        let policies = of.policies.keys().map(ToString::to_string);
        let all = own.into_iter().chain(labels).chain(policies);
        all.collect::<Vec<_>>().join("; ")
    })
}

#[test]
fn labels_and_policies_come_change_and_go() {
    let patience = Patience {
        missing: Duration::from_secs(1),
        ..patience()
    };
    let wanted = wanted(WantedPolicies::Enforced);
    let site = Site::patient(server(web(1, &[1])), wanted, patience);
    let is = |namespace: &str, wanted: &str| site.view(|view| told(view, namespace) == wanted);
    // A cluster without such kinds has no such objects.
    let view = is("default", "");
    assert!(!view.istio.unread && view.problems.is_empty());
    assert!(site.health.of(Kind::AuthorizationPolicy).is_missing());
    site.cluster().install_istio(Some("v1"));
    site.server.faults().end_watches();
    let service = json!({ "clusterIP": "10.96.0.77", "ports": [{ "port": 80 }] });
    for (kind, namespace, spec, shown) in [
        (
            "Service",
            "default",
            service,
            ["Service limit=default/gate", "Service limit=none", ""],
        ),
        ("Namespace", "limit", json!({}), ["limit/gate", "none", ""]),
    ] {
        for (labels, shown) in [
            json!({ "istio.io/use-waypoint": "gate" }),
            json!({ "istio.io/use-waypoint": "none" }),
            json!({}),
        ]
        .into_iter()
        .zip(shown)
        {
            site.cluster().apply(object(kind, labels, spec.clone()));
            is(namespace, shown);
        }
    }
    let policy = |labels, spec| {
        site.cluster()
            .apply(object("AuthorizationPolicy", labels, spec))
    };
    policy(json!({}), json!({ "action": "DENY", "rules": [{}] }));
    is("default", "AuthorizationPolicy limit");
    // Without rules, it no longer denies.
    policy(json!({}), json!({ "action": "DENY" }));
    is("default", "");
    // One that cannot be read limits its namespace, from the start.
    policy(json!(5), json!({}));
    let view = is("default", "AuthorizationPolicy limit");
    let of = &view.istio.namespaces["default"];
    assert_eq!(of.policies["AuthorizationPolicy limit"].selector, None);
    assert_eq!(view.problems[0].place, "AuthorizationPolicy default/limit");
    assert!(view.namespaces.is_some_and(|all| all.contains("limit")));
    // A kind that is missing for a moment, and then for longer.
    site.cluster()
        .apply(object("PeerAuthentication", json!({}), json!({})));
    let both = "AuthorizationPolicy limit; PeerAuthentication limit";
    is("default", both);
    site.cluster().compact();
    site.cluster().install_istio(None);
    site.server.faults().end_watches();
    site.wait("it is missing", |site| {
        site.health.of(Kind::PeerAuthentication).is_missing()
    });
    thread::sleep(Duration::from_millis(100));
    let untaken = site.untaken();
    assert!(untaken.is_none_or(|view| told(&view, "default") == both));
    is("default", "");
    assert_eq!(site.health.failure(), None);
}

/// With a mesh, whatever keeps the agent from reading policies delays the first view for a limited time, and is told.
#[test]
fn without_policies_all_else_is_served_after_a_while() {
    let patience = Patience {
        answer: Duration::from_millis(500),
        missing: Duration::from_millis(600),
        ..patience()
    };
    for kind in [
        Resource::AuthorizationPolicies,
        Resource::PeerAuthentications,
    ] {
        for status in [403, 500, 0] {
            let what = format!("{kind:?} {status}");
            let server = server(web(1, &[1]));
            // A server also forbids kinds that the cluster does not have.
            let version = (status != 403).then_some("v1");
            server.cluster().install_istio(version);
            server.faults().withhold(Some((kind, status)));
            let site = Site::patient(server, wanted(WantedPolicies::Enforced), patience);
            // A server that is busy fails for longer than one that has just started forbids.
            let halves = if status == 403 { 1 } else { 4 };
            thread::sleep(patience.forbidden / 2 * halves);
            assert!(site.untaken().is_none(), "{what}: too early");
            let view = site.view(|view| !view.services.is_empty());
            assert!(view.istio.unread, "{what}");
            let is_told = |view: &View| {
                let mut problems = view.problems.iter();
                problems.any(|problem| problem.text.contains("cannot be read"))
            };
            if !is_told(&view) {
                site.view(is_told);
            }
            site.server.faults().withhold(None);
            site.view(|view| !view.istio.unread && view.problems.is_empty());
        }
    }
}

/// Kinds may be installed while the agent cannot read them.
#[test]
fn kinds_that_were_missing_count_as_unread_after_failures_and_known_policies_stay() {
    let patience = Patience {
        answer: Duration::from_millis(500),
        missing: Duration::from_millis(600),
        ..patience()
    };
    let says = |view: &View, wanted: &str| {
        let mut problems = view.problems.iter();
        problems.any(|problem| problem.text.contains(wanted))
    };
    for status in [500, 403] {
        let of = wanted(WantedPolicies::Enforced);
        let mut site = Site::patient(server(web(1, &[1])), of, patience);
        assert!(!site.view(|_| true).istio.unread, "{status}");
        // While the server does not answer at all, no policy can be installed.
        site.server.go_away();
        thread::sleep(patience.missing * 3);
        let untaken = site.untaken();
        assert!(untaken.is_none_or(|view| !view.istio.unread), "{status}");
        site.server.come_back().unwrap();
        site.wait("it is missing", |site| {
            site.health.of(Kind::AuthorizationPolicy).is_missing()
        });
        let withheld = Some((Resource::AuthorizationPolicies, status));
        site.server.faults().withhold(withheld);
        let view = site.view(|view| view.istio.unread);
        assert!(says(&view, "all connections to captured Pods"), "{status}");
        // `status` shows failures of kinds that the cluster has.
        assert!(
            !site.health.of(Kind::AuthorizationPolicy).is_missing(),
            "{status}"
        );
        site.server.faults().withhold(None);
        site.view(|view| !view.istio.unread && view.problems.is_empty());
        // Policies that were read.
        site.cluster().install_istio(Some("v1"));
        let policy = object("AuthorizationPolicy", json!({}), json!({}));
        site.cluster().apply(policy);
        site.view(|view| told(view, "default") == "AuthorizationPolicy limit");
        site.server.faults().withhold(withheld);
        site.server.faults().end_watches();
        let view = site.view(|view| says(view, "the state that it read before"));
        assert!(!view.istio.unread, "{status}");
        assert_eq!(told(&view, "default"), "AuthorizationPolicy limit");
    }
}

/// The server may ask for any time.
#[test]
fn no_wait_for_their_server_outlasts_the_patience() {
    let patience = Patience {
        missing: Duration::from_millis(600),
        ..patience()
    };
    let server = server(web(1, &[1]));
    let resource = Resource::PeerAuthentications;
    server.cluster().install_istio(Some("v1"));
    server.faults().withhold(Some((resource, 429)));
    let site = Site::patient(server, wanted(WantedPolicies::Enforced), patience);
    site.view(|view| view.istio.unread);
}

#[test]
fn their_lists_come_in_pages() {
    let server = server(web(1, &[1]));
    server.cluster().install_istio(Some("v1"));
    for n in 0..120 {
        let mut policy = object("AuthorizationPolicy", json!({}), json!({}));
        policy["metadata"]["name"] = json!(format!("p{n}"));
        server.cluster().apply(policy);
    }
    server.faults().note_requests(true);
    let site = Site::of(server, wanted(WantedPolicies::Enforced));
    let view = site.view(|_| true);
    assert_eq!(view.istio.namespaces["default"].policies.len(), 120);
    let asked = site.server.faults().asked();
    let pages = asked.iter().filter(|asked| {
        asked.path.contains("authorizationpolicies") && asked.query.contains("limit=50")
    });
    assert_eq!(pages.count(), 3);
}

#[test]
fn they_are_not_read_without_a_mesh() {
    let server = server(web(1, &[1]));
    server.cluster().install_istio(Some("v1"));
    server.faults().note_requests(true);
    let site = Site::of(server, Scope::Registry);
    site.view(|_| true);
    let asked = site.server.faults().asked();
    assert!(asked.iter().all(|asked| !asked.path.contains("security")));
}
