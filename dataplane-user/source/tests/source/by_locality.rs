//! The endpoints that clients on this node get by `networking.istio.io/traffic-distribution`, with their shares: from
//! objects to the slots of the kernel's table ENDPOINTS. Where a case comes from Istio's own tests, it says which:
//! `ztunnel` is the test of `load_balance` in ztunnel's `src/state.rs`, `pilot` is `TestGetTrafficDistribution` in
//! `pilot/pkg/model/service_test.go`, `locality` is `TestLocality` in `tests/integration/pilot/locality_test.go`, and
//! `services` is `pilot/pkg/serviceregistry/ambient/services.go`, which derives scopes and modes.

use std::collections::BTreeMap;

use dataplane_source::manifests::Manifests;
use model::{EntryName, Node, ServiceName};
use plan::{
    Planner,
    entries::{Entries, service_name},
};
use serde_json::{Map, Value, json};

use super::by_istio::{then_load, with};

/// Returns the value of a word `KEY=VALUE`; empty if there is none.
fn value<'a>(text: &'a str, key: &str) -> &'a str {
    let mut words = text.split(' ');
    let found = words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    found.unwrap_or_default()
}

fn has(text: &str, word: &str) -> bool {
    text.split(' ').any(|own| own == word)
}

/// The annotation with the value of a word.
fn annotated(text: &str, key: &str) -> Value {
    match value(text, key) {
        "" => json!({}),
        value => {
            json!({ "metadata": { "annotations": { "networking.istio.io/traffic-distribution": value } } })
        }
    }
}

/// The labels of a place, of words such as `at=REGION/ZONE/SUBZONE` and `net=NETWORK`.
fn labels(text: &str) -> Map<String, Value> {
    let mut parts = value(text, "at").split('/');
    let mut labels = Map::new();
    for (key, value) in [
        ("topology.kubernetes.io/region", parts.next()),
        ("topology.kubernetes.io/zone", parts.next()),
        ("topology.istio.io/subzone", parts.next()),
        ("topology.istio.io/network", Some(value(text, "net"))),
    ] {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            labels.insert(key.to_owned(), value.into());
        }
    }
    labels
}

fn object(api: &str, kind: &str, name: &str, fields: Value) -> Value {
    let object = json!({
        "apiVersion": api, "kind": kind, "metadata": { "name": name, "namespace": "shop" },
    });
    with(object, fields)
}

/// A machine, as the spec of a WorkloadEntry: `1 at=REGION/ZONE/SUBZONE net=NETWORK weight=2`.
fn machine(text: &str) -> Value {
    let mut spec = json!({ "address": format!("192.0.2.{}", number(text)) });
    for (word, field) in [("at", "locality"), ("net", "network")] {
        if !value(text, word).is_empty() {
            spec[field] = json!(value(text, word));
        }
    }
    if let Ok(weight) = value(text, "weight").parse::<u32>() {
        spec["weight"] = json!(weight);
    }
    spec
}

fn number(text: &str) -> &str {
    text.split(' ').next().unwrap()
}

/// A WorkloadEntry. `sick`: the proxy that checks its health has not found it healthy.
fn workload_entry(text: &str) -> Value {
    let spec = with(machine(text), json!({ "labels": { "app": "web" } }));
    let mut fields = json!({ "spec": spec });
    if has(text, "sick") {
        fields["metadata"]["annotations"] =
            json!({ "proxy.istio.io/health-checks-enabled": "true" });
    }
    let name = format!("vm{}", number(text));
    object("networking.istio.io/v1", "WorkloadEntry", &name, fields)
}

/// A pod's endpoint in an EndpointSlice: `1 pod zone=us-1a here hint=us-1a unready`. `here`: on this node. `hint`,
/// `node-hint`: a hint for a zone or a node.
fn endpoint(text: &str) -> Value {
    let is_here = has(text, "here");
    let mut endpoint = json!({
        "addresses": [format!("10.0.0.{}", number(text))],
        "nodeName": if is_here { "here" } else { "there" },
        "conditions": { "ready": !has(text, "unready") },
    });
    for (word, field) in [("hint", "forZones"), ("node-hint", "forNodes")] {
        if !value(text, word).is_empty() {
            endpoint["hints"][field] = json!([{ "name": value(text, word) }]);
        }
    }
    if !value(text, "zone").is_empty() {
        endpoint["zone"] = json!(value(text, "zone"));
    }
    endpoint
}

/// A Pod that a ServiceEntry selects: `1 pod at=us-1/us-1a here`.
fn pod(text: &str) -> Value {
    let mut own = labels(text);
    own.insert("app".to_owned(), "web".into());
    let name = format!("pod{}", number(text));
    let fields = json!({
        "metadata": { "labels": own },
        "spec": { "nodeName": if has(text, "here") { "here" } else { "there" } },
        "status": {
            "podIPs": [{ "ip": format!("10.0.0.{}", number(text)) }],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    });
    object("v1", "Pod", &name, fields)
}

/// A Service that selects WorkloadEntries, and has pods in a slice: `field=`, `service=` (annotation), `local`
/// (`internalTrafficPolicy`).
fn service(asks: &str, endpoints: &[&str]) -> Vec<Value> {
    let fields = json!({ "spec": {
        "clusterIP": "10.96.0.1", "selector": { "app": "web" },
        "ports": [{ "name": "http", "port": 80, "targetPort": 8080 }],
    } });
    let mut service = object("v1", "Service", "web", fields);
    service = with(service, annotated(asks, "service"));
    if !value(asks, "field").is_empty() {
        service["spec"]["trafficDistribution"] = json!(value(asks, "field"));
    }
    if has(asks, "local") {
        service["spec"]["internalTrafficPolicy"] = json!("Local");
    }
    let (pods, machines): (Vec<&str>, Vec<&str>) =
        endpoints.iter().copied().partition(|text| has(text, "pod"));
    let mut objects: Vec<Value> = machines.into_iter().map(workload_entry).collect();
    objects.push(service);
    if !pods.is_empty() {
        let endpoints: Vec<Value> = pods.into_iter().map(endpoint).collect();
        let fields = json!({
            "metadata": { "labels": { "kubernetes.io/service-name": "web" } },
            "addressType": "IPv4", "endpoints": endpoints,
            "ports": [{ "name": "http", "port": 8080 }],
        });
        objects.push(object(
            "discovery.k8s.io/v1",
            "EndpointSlice",
            "web-1",
            fields,
        ));
    }
    objects
}

/// A ServiceEntry: `entry` with endpoints of its own, `selecting` with a selector; `entry=`, `selecting=` (annotation),
/// `none` (`resolution`).
fn entry(asks: &str, endpoints: &[&str]) -> Vec<Value> {
    let resolution = if has(asks, "none") { "NONE" } else { "STATIC" };
    let fields = json!({ "spec": {
        "hosts": ["web.example.com"], "resolution": resolution,
        "ports": [{ "number": 80, "name": "http", "protocol": "TCP", "targetPort": 8080 }],
    } });
    let mut entry = object("networking.istio.io/v1", "ServiceEntry", "web", fields);
    let mut objects = Vec::new();
    if is_of(asks, "entry") {
        entry = with(entry, annotated(asks, "entry"));
        let own: Vec<Value> = endpoints.iter().map(|text| machine(text)).collect();
        entry["spec"]["endpoints"] = own.into();
    } else {
        entry = with(entry, annotated(asks, "selecting"));
        entry["spec"]["workloadSelector"] = json!({ "labels": { "app": "web" } });
        objects.extend(endpoints.iter().map(|text| {
            if has(text, "pod") {
                pod(text)
            } else {
                workload_entry(text)
            }
        }));
    }
    objects.push(entry);
    objects
}

/// Returns whether a text has a word `KEY` or `KEY=VALUE`.
fn is_of(text: &str, key: &str) -> bool {
    has(text, key) || !value(text, key).is_empty()
}

/// Returns the last numbers of the addresses that clients on this node get, each with its number of slots if there is
/// more than one; `untranslated` if no address leads to them, and `refused` if there are none.
fn answer(node: &str, asks: &str, endpoints: &[&str]) -> String {
    let mut objects = vec![
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "here", "labels": labels(node) },
        }),
        with(
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "shop" } }),
            annotated(asks, "namespace"),
        ),
    ];
    let is_entry = is_of(asks, "entry") || is_of(asks, "selecting");
    let (of, name) = if is_entry {
        let name = service_name(&EntryName::new("shop", "web"));
        (entry(asks, endpoints), name)
    } else {
        (service(asks, endpoints), ServiceName::new("shop", "web"))
    };
    objects.extend(of);
    let mut manifests = Manifests::new(&Node {
        name: "here".into(),
        zone: value(node, "zone").into(),
        ..Node::default()
    });
    let mut snapshot = then_load(&mut manifests, &objects);
    let entries = snapshot.entries.clone();
    let taken = Entries::new([]).take(&entries, &snapshot.services, &snapshot, 1_800_000_000);
    snapshot.services = taken.services;
    let mut planner = Planner::new();
    drop(planner.plan(&snapshot));
    let keys = planner.service_keys(&name);
    let Some((_, frontend)) = keys.iter().find(|(key, _)| key.addr.is_v4()) else {
        return "untranslated".to_owned();
    };
    let (_, slots) = planner.pool(frontend.pool()).unwrap();
    let mut counts = BTreeMap::<u8, usize>::new();
    for slot in slots {
        *counts.entry(slot.addr.octets()[15]).or_default() += 1;
    }
    let of = counts.into_iter().map(|(last, count)| match count {
        1 => last.to_string(),
        count => format!("{last}*{count}"),
    });
    let words: Vec<String> = of.collect();
    if words.is_empty() {
        return "refused".to_owned();
    }
    words.join(" ")
}

/// A case: its origin or reason; this node; what asks, with alternatives that do the same; the endpoints; those that
/// clients get.
type Case = (
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
);

/// All ways to ask for the same zone or node. In a Service without pods the field does the same.
const ZONE: &str = "service=PreferSameZone|service=PreferClose|namespace=prefersamezone|field=PreferSameZone|\
    field=PreferClose|entry=PreferSameZone|entry=preferclose|entry namespace=PreferSameZone|selecting=PreferSameZone|\
    selecting namespace=PreferClose";
const NODE: &str = "service=PreferSameNode|namespace=PreferSameNode|field=PreferSameNode|entry=PrefersameNode|\
    entry namespace=PreferSameNode|selecting=PreferSameNode|selecting namespace=prefersamenode";
/// Nothing is asked.
const ANY: &str = "|service=Any|namespace=Any|service=any namespace=PreferSameZone|entry|entry=Any|\
    entry=any namespace=PreferSameNode|selecting";

/// ztunnel's workloads: all match, almost, without a locality, in another network.
const ZTUNNEL: &[&str] = &[
    "1 at=reg/zone net=network",
    "2 at=reg/not-zone net=network",
    "3 net=network",
    "4 at=reg/zone net=other",
];
const HERE: &str = "at=us-1/us-1a/rack1 net=n1";
/// From near to far: the subzone, the zone, the region, another region, another network.
const PLACES: &[&str] = &[
    "1 at=us-1/us-1a/rack1",
    "2 at=us-1/us-1a/rack2",
    "3 at=us-1/us-1b/rack1",
    "4 at=eu-1/us-1a/rack1",
    "5 at=us-1/us-1a/rack1 net=n2",
    "6 at=us-1/us-1b net=n2",
    "7 at=eu-1/eu-1a net=n2",
];

#[rustfmt::skip]
const MACHINES: &[Case] = &[
    ("ztunnel: failover no match can select any endpoint", "at=no-match/no-match net=no-match", ZONE, ZTUNNEL, "1 2 3 4"),
    ("ztunnel: failover matches network+region+zone", "at=reg/zone net=network", ZONE, ZTUNNEL, "1"),
    ("ztunnel: failover matches network+region", "at=reg net=network", ZONE, ZTUNNEL, "1 2"),
    ("ztunnel: failover matches network", "at=no-match/no-match net=network", ZONE, ZTUNNEL, "1 2 3"),
    ("ztunnel: failover matches region+zone", "at=reg/zone net=no-match", ZONE, ZTUNNEL, "1 4"),
    ("locality: TrafficDistributionPreferSameZone, PreferClose", "at=region/zone/subzone", ZONE,
        &["1 at=region/zone/subzone", "2 at=notregion/notzone/notsubzone"], "1"),
    ("locality: TrafficDistributionPreferSameNode", "at=region/zone/subzone", NODE,
        &["1 at=region/zone/subzone", "2 at=notregion/notzone/notsubzone"], "1"),
    ("locality: the same, in a network that has a name", "at=region/zone/subzone net=n", ZONE,
        &["1 at=region/zone/subzone net=n", "2 at=notregion/notzone/notsubzone net=n"], "1"),
    ("nothing asked", HERE, ANY, PLACES, "1 2 3 4 5 6 7"),
    ("services: the zone, whatever the subzone", HERE, ZONE, PLACES, "1 2"),
    ("services: the region", HERE, ZONE, PLACES.split_at(2).1, "3"),
    ("services: the network", HERE, ZONE, PLACES.split_at(3).1, "4"),
    ("ztunnel's ranks: the zone in another network", HERE, ZONE, PLACES.split_at(4).1, "5"),
    ("ztunnel's ranks: the region in another network", HERE, ZONE, PLACES.split_at(5).1, "6"),
    ("services: all that is left", HERE, ZONE, PLACES.split_at(6).1, "7"),
    ("services: the subzone", HERE, NODE, PLACES, "1"),
    ("services: the zone", HERE, NODE, PLACES.split_at(1).1, "2"),
    ("services: the region", HERE, NODE, PLACES.split_at(2).1, "3"),
    ("services: the network", HERE, NODE, PLACES.split_at(3).1, "4"),
    ("ztunnel's ranks: the subzone in another network", HERE, NODE, PLACES.split_at(4).1, "5"),
    ("ztunnel's ranks: the region in another network", HERE, NODE, PLACES.split_at(5).1, "6"),
    ("a network that is not this node's is farther than a region", HERE, ZONE,
        &["1 at=us-1/us-1a net=n2", "2 at=eu-1/eu-1a"], "2"),
    ("no network is that of the cluster", HERE, ZONE, &["1 at=us-1/us-1a net=n1", "2 at=us-1/us-1a"], "1 2"),
    ("the node's network is not known", "at=us-1/us-1a", ZONE, &["1 at=us-1/us-1a net=n1", "2 at=eu-1"], "2"),
    ("a zone of the same name in another region", HERE, ZONE, &["1 at=eu-1/us-1a", "2 at=us-1/us-1c"], "2"),
    ("a region without a zone", HERE, ZONE, &["1 at=us-1", "2 at=eu-1/us-1a"], "1"),
    ("a region without a zone is as far as another zone", HERE, ZONE, &["1 at=us-1", "2 at=us-1/us-1b"], "1 2"),
    ("no locality is as far as another region", HERE, ZONE, &["1", "2 at=eu-1/eu-1a"], "1 2"),
    ("no subzone is another than the node's", HERE, NODE, &["1 at=us-1/us-1a", "2 at=us-1/us-1a/rack2"], "1 2"),
    ("a node without a subzone is near to no subzone", "at=us-1/us-1a", NODE,
        &["1 at=us-1/us-1a/rack1", "2 at=us-1/us-1a"], "2"),
    ("the fourth part means nothing", HERE, NODE, &["1 at=us-1/us-1a/rack1/x", "2 at=us-1/us-1a/rack2"], "1"),
    ("a node without zone: regions without one", "at=us-1", ZONE, &["1 at=us-1", "2 at=us-1/us-1a"], "1"),
    ("a node of which no label tells the place", "", ZONE, &["1", "2 at=us-1/us-1a"], "1 2"),
    ("a node of which only the network is known", "net=n1", ZONE, &["1", "2 at=us-1/us-1a", "3 net=n2"], "1 2"),
    ("the operator's zone, without a region", "zone=us-1a", ZONE, &["1 at=us-1/us-1a", "2 at=us-1/us-1b", "3"], "1"),
    ("no machine is on this node", HERE, "local", PLACES, "refused"),
    ("no endpoint", HERE, ZONE, &[], "refused"),
    ("weights in the zone", HERE, ZONE, &["1 at=us-1/us-1a weight=3", "2 at=us-1/us-1a", "3 at=us-1 weight=9"], "1*3 2"),
    ("weights count among those that are used", HERE, ZONE,
        &["1 at=us-1/us-1a weight=20", "2 at=us-1/us-1a weight=10", "3 at=eu-1 weight=1"], "1*2 2"),
    ("a weight makes nobody near", HERE, ZONE, &["1 at=us-1/us-1a", "2 at=us-1/us-1b weight=1000"], "1"),
    ("weights of those that are far", HERE, NODE, &["1 at=eu-1 weight=2", "2 at=af-1 weight=4", "3 weight=2"], "1 2*2 3"),
    ("weights without a preference", HERE, ANY, &["1 at=us-1/us-1a weight=5", "2 weight=5", "3 at=eu-1 weight=10"], "1 2 3*2"),
    ("weight 0 is 1", HERE, ZONE, &["1 at=us-1/us-1a weight=0", "2 at=us-1/us-1a weight=2"], "1 2*2"),
];

const PODS: &[&str] = &[
    "1 pod zone=us-1a here",
    "2 pod zone=us-1a",
    "3 pod zone=us-1b",
    "4 pod zone=us-10a",
];
/// The same with the hints that Kubernetes writes for `trafficDistribution: PreferSameZone`.
const HINTED: &[&str] = &[
    "1 pod zone=us-1a here hint=us-1a",
    "2 pod zone=us-1a hint=us-1a",
    "3 pod zone=us-1b hint=us-1b",
];

#[rustfmt::skip]
const WITH_PODS: &[Case] = &[
    ("pilot: spec value takes precedence", HERE, "field=PreferClose service=PreferSameNode namespace=Any",
        &["1 at=us-1/us-1a/rack1", "2 at=us-1/us-1a/rack2", "3 at=us-1/us-1b"], "1 2"),
    ("pilot: service annotation takes precedence over namespace", HERE, "service=PreferSameNode namespace=PreferClose", PODS, "1"),
    ("pilot: namespace annotation used when service has none", HERE, "namespace=PreferClose", PODS, "1 2"),
    ("pilot: namespace annotation with PreferSameNode", HERE, "namespace=PreferSameNode", PODS, "1"),
    ("pilot: defaults to Any when nothing set", HERE, "", PODS, "1 2 3 4"),
    ("pilot: case insensitive namespace annotation", HERE, "namespace=preferclose", PODS, "1 2"),
    ("pilot: an unknown annotation is Any, and hides the namespace's", HERE, "service=Near namespace=PreferClose", PODS, "1 2 3 4"),
    ("pilot: an unknown field is none", HERE, "field=Near service=PreferSameNode", PODS, "1"),
    ("pilot: case matters in the field", HERE, "field=prefersamenode namespace=PreferSameZone", PODS, "1 2"),
    ("the region, by the zone's name", HERE, "service=PreferSameZone", PODS.split_at(2).1, "3"),
    ("another region", HERE, "service=PreferSameZone", PODS.split_at(3).1, "4"),
    ("not this node: the zone", HERE, "service=PreferSameNode", PODS.split_at(1).1, "2"),
    ("not this zone: the region", HERE, "service=PreferSameNode", PODS.split_at(2).1, "3"),
    ("services: Local is strict, whatever else is asked", HERE,
        "local|local service=PreferSameZone|local field=PreferSameZone|local namespace=PreferSameNode", PODS, "1"),
    ("services: Local without an endpoint here", HERE, "local|local service=PreferSameNode", PODS.split_at(1).1, "refused"),
    ("the field: Kubernetes' hints", HERE, "field=PreferSameZone|field=PreferSameZone service=PreferSameNode", HINTED, "1 2"),
    ("the field: Kubernetes' hints know no region", HERE, "field=PreferSameZone",
        &["1 pod zone=us-1b hint=us-1b", "2 pod zone=eu-1a hint=eu-1a"], "1 2"),
    ("the field before there are hints", HERE, "field=PreferSameZone", PODS, "1 2 3 4"),
    ("the field: Kubernetes' hints for nodes", HERE, "field=PreferSameNode",
        &["1 pod zone=us-1a here hint=us-1a node-hint=here", "2 pod zone=us-1a hint=us-1a node-hint=there"], "1"),
    ("the annotation hides hints", HERE, "service=PreferSameNode|namespace=PreferSameNode", HINTED, "1"),
    ("Any leaves the hints", HERE, "|service=Any|namespace=Any", HINTED, "1 2"),
    ("machines have no hints: the field ranks them and the pods", HERE, "field=PreferSameZone|service=PreferSameZone",
        &["1 pod zone=us-1a hint=us-1a", "2 pod zone=us-1b hint=us-1b", "3 at=us-1/us-1a", "4 at=us-1/us-1b"], "1 3"),
    ("the same for nodes", HERE, "field=PreferSameNode|service=PreferSameNode",
        &["1 pod zone=us-1a here", "2 pod zone=us-1a", "3 at=us-1/us-1a/rack1"], "1"),
    ("a machine in the subzone before a pod that is only in the zone", HERE, "service=PreferSameNode",
        &["2 pod zone=us-1a", "3 at=us-1/us-1a/rack1"], "3"),
    ("a machine in another network after pods in another region", HERE, "service=PreferSameZone",
        &["1 pod zone=eu-1a", "2 at=us-1/us-1a net=n2"], "1"),
    ("Local has no machines", HERE, "local", &["1 pod zone=us-1a here", "2 at=us-1/us-1a"], "1"),
    ("a machine's weight beside a pod", HERE, "service=PreferSameZone",
        &["1 pod zone=us-1a", "2 at=us-1/us-1a weight=3", "3 at=us-1/us-1b weight=9"], "1 2*3"),
    ("a near endpoint that is not ready", HERE, "service=PreferSameNode",
        &["1 pod zone=us-1a here unready", "2 pod zone=us-1b"], "2"),
    ("a near machine that is not healthy", HERE, "service=PreferSameZone|selecting=PreferSameZone",
        &["1 at=us-1/us-1a sick", "2 at=us-1/us-1b"], "2"),
    ("an endpoint on this node is near even if the node's place is not known", "", "service=PreferSameNode|service=PreferSameZone",
        &["1 pod here", "2 pod", "3 pod zone=us-1a"], "1"),
    ("no zone is known of the node", "", "service=PreferSameZone", PODS.split_at(1).1, "2 3 4"),
    ("the operator's zone", "zone=us-1b", "service=PreferSameZone", PODS.split_at(1).1, "3"),
    ("selected pods, by their labels", HERE, "selecting=PreferSameZone",
        &["1 pod at=us-1/us-1a", "2 pod at=us-1/us-1b", "3 pod at=eu-1/us-1a", "4 at=us-1/us-1a"], "1 4"),
    ("selected pods, by the zone's name", HERE, "selecting=PreferSameZone", &["1 pod at=/us-1b", "2 pod at=/eu-1a", "3 pod"], "1"),
    ("a selected pod on this node", HERE, "selecting=PreferSameNode", &["1 pod here", "2 pod at=us-1/us-1a", "3 at=us-1/us-1a/rack1"], "1"),
    ("services: the pass-through mode", HERE, "entry none|entry=PreferSameZone none|entry none namespace=PreferSameNode", &[], "untranslated"),
];

#[test]
fn clients_get_the_endpoints_that_istios_users_ask_for() {
    for (origin, node, alternatives, endpoints, wanted) in MACHINES.iter().chain(WITH_PODS) {
        for asks in alternatives.split('|') {
            let found = answer(node, asks, endpoints);
            assert_eq!(
                found, *wanted,
                "{origin}: {asks:?} on {node:?}, {endpoints:?}"
            );
        }
    }
}
