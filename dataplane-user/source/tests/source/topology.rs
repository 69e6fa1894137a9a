//! The endpoints that this node uses: kube-proxy's cases (its `TestCategorizeEndpoints`), read from EndpointSlices and
//! Nodes as the control plane writes them.

use std::fmt::Write;

use dataplane_source::manifests::{self, Manifests};
use model::{Gravity, Node, ServiceName, Snapshot, TrafficPolicy};

/// A service with two slices, so that each case also has endpoints from several slices.
const SERVICE: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIPs: [10.96.0.1, fd00:96::1], ports: [{port: 80}]}
";

/// The object of this node, `here`, in zone `a`.
const NODE: &str = "\
apiVersion: v1
kind: Node
metadata: {name: here, labels: {topology.kubernetes.io/zone: a, kubernetes.io/hostname: here}}
spec: {podCIDR: 10.244.0.0/24}
status: {conditions: []}
";

/// An endpoint: `1` is 10.0.0.1, followed by words: `zone=a+b`, `node=here+there`, `local`, `unready`, `leaving`
/// (serving while it terminates), `gone` (terminating, not serving).
fn endpoint(text: &str) -> String {
    let mut words = text.split(' ');
    let mut yaml = format!("addresses: [10.0.0.{}]", words.next().unwrap());
    let (mut hints, mut conditions) = (Vec::new(), "ready: true");
    let names = |list: &str| -> String {
        let names: Vec<_> = list.split('+').map(|n| format!("{{name: {n}}}")).collect();
        names.join(", ")
    };
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("zone", list) => hints.push(format!("forZones: [{}]", names(list))),
            ("node", list) => hints.push(format!("forNodes: [{}]", names(list))),
            ("local", _) => yaml += ", nodeName: here",
            ("unready", _) => conditions = "ready: false, serving: false",
            ("leaving", _) => conditions = "ready: false, serving: true, terminating: true",
            ("gone", _) => conditions = "ready: false, serving: false, terminating: true",
            _ => panic!("{word}"),
        }
    }
    _ = write!(yaml, ", conditions: {{{conditions}}}");
    if !hints.is_empty() {
        _ = write!(yaml, ", hints: {{{}}}", hints.join(", "));
    }
    format!("- {{{yaml}}}\n")
}

fn slice(name: usize, endpoints: &[&str]) -> String {
    let endpoints: String = endpoints.iter().map(|text| endpoint(text)).collect();
    format!(
        "---\naddressType: IPv4\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: web-{name}, labels: {{kubernetes.io/service-name: web}}}}\n\
         endpoints:\n{endpoints}ports: [{{port: 80}}]\n"
    )
}

fn load(text: &str, node: &Node) -> Snapshot {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    manifests::load(&[file.path().to_owned()], node)
        .unwrap_or_else(|errors| panic!("{errors}\n{text}"))
        .snapshot
}

fn here(zone: &str) -> Node {
    Node {
        name: "here".into(),
        zone: zone.into(),
        ..Node::default()
    }
}

/// Returns the last numbers of the addresses that `policy` uses.
fn used(snapshot: &Snapshot, policy: TrafficPolicy) -> String {
    let port = &snapshot.services[&ServiceName::new("default", "web")].ports[0];
    let last = |addr: std::net::IpAddr| addr.to_string().rsplit('.').next().unwrap().to_owned();
    let used: Vec<_> = port.usable(true, policy).map(|e| last(e.addr)).collect();
    used.join(" ")
}

/// kube-proxy's name of the case; the zone; the endpoints; those used for policy Cluster; those used for Local.
type Case = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static str,
    &'static str,
);

const CASES: &[Case] = &[
    (
        "normal endpoint filtering",
        "a",
        &["3 zone=a", "4 zone=b", "5 zone=c", "6 zone=a"],
        "3 6",
        "",
    ),
    (
        "topology ignored for Local endpoints; topology and localness conflict",
        "a",
        &["3 zone=a local", "4 zone=b local", "5 zone=c", "6 zone=a"],
        "3 6",
        "3 4",
    ),
    ("no zone label", "", &["3 zone=a"], "3", ""),
    ("node in different zone", "b", &["3 zone=a"], "3", ""),
    (
        "unready endpoint",
        "a",
        &["3 zone=a", "4 zone=b", "5 zone=c", "6 zone=a unready"],
        "3",
        "",
    ),
    (
        "only unready endpoints in same zone (should not filter)",
        "a",
        &[
            "3 zone=a unready",
            "4 zone=b",
            "5 zone=c",
            "6 zone=a unready",
        ],
        "4 5",
        "",
    ),
    (
        "missing hints, no filtering applied",
        "a",
        &["3 zone=a", "4 zone=b", "5", "6 zone=a"],
        "3 4 5 6",
        "",
    ),
    (
        "missing hints of an endpoint that is not ready do not matter",
        "a",
        &["3 zone=a", "4 zone=b", "5 unready", "6 leaving"],
        "3",
        "",
    ),
    (
        "multiple hints per endpoint",
        "c",
        &["3 zone=a+b+c", "4 zone=b+c", "5 zone=b+d", "6 zone=c"],
        "3 4 6",
        "",
    ),
    (
        "node hints",
        "a",
        &[
            "3 node=here zone=a",
            "4 node=there zone=a",
            "5 node=far zone=b",
        ],
        "3",
        "",
    ),
    (
        "node hints without zone hints, no zone",
        "",
        &["3 node=here", "4 node=there", "5 node=here+there"],
        "3 5",
        "",
    ),
    (
        "no node hint for this node: fall back to the zone",
        "a",
        &[
            "3 node=near zone=a",
            "4 node=there zone=a",
            "5 node=far zone=b",
        ],
        "3 4",
        "",
    ),
    (
        "incomplete node hints: fall back to the zone",
        "a",
        &["3 node=here zone=a", "4 zone=a", "5 node=far zone=b"],
        "3 4",
        "",
    ),
    (
        "incomplete node and zone hints: no filtering",
        "a",
        &["3 node=here", "4 zone=a", "5"],
        "3 4 5",
        "",
    ),
    (
        "the endpoint for this node is not ready: fall back to the zone",
        "a",
        &[
            "3 node=here zone=a unready",
            "4 node=near zone=a",
            "5 node=far zone=b",
        ],
        "4",
        "",
    ),
    (
        "hints of another node's zone and node: no filtering",
        "d",
        &["3 node=near zone=a", "4 node=far zone=b"],
        "3 4",
        "",
    ),
    (
        "all endpoints are terminating: without regard to hints",
        "a",
        &[
            "3 node=here zone=a leaving local",
            "4 node=far zone=b leaving",
        ],
        "3 4",
        "3",
    ),
    ("empty endpoints", "", &[], "", ""),
    (
        "Local, but all endpoints are remote",
        "",
        &["3", "4"],
        "3 4",
        "",
    ),
    (
        "Local, all endpoints are local",
        "",
        &["3 local", "4 local"],
        "3 4",
        "3 4",
    ),
    (
        "Local, some endpoints are local",
        "",
        &["3 local", "4"],
        "3 4",
        "3",
    ),
    (
        "endpoints not Ready",
        "",
        &["3 unready", "4 unready"],
        "",
        "",
    ),
    ("some endpoints are Ready", "", &["3 unready", "4"], "4", ""),
    (
        "all endpoints are terminating",
        "",
        &["3 leaving local", "4 leaving"],
        "3 4",
        "3",
    ),
    (
        "all endpoints remote and terminating",
        "",
        &["3 leaving", "4 leaving"],
        "3 4",
        "",
    ),
    (
        "with terminating endpoints",
        "",
        &["3", "4 unready local", "5 leaving local", "6 leaving"],
        "3",
        "5",
    ),
    (
        "terminating endpoints that do not serve",
        "",
        &["3 gone", "4 gone local", "5 leaving"],
        "5",
        "",
    ),
];

#[test]
fn which_endpoints_are_used() {
    for (name, zone, endpoints, cluster, local) in CASES {
        let (first, second) = endpoints.split_at(endpoints.len() / 2);
        let text = format!("{SERVICE}{}{}", slice(1, first), slice(2, second));
        let snapshot = load(&text, &here(zone));
        assert_eq!(used(&snapshot, TrafficPolicy::Cluster), *cluster, "{name}");
        assert_eq!(
            used(&snapshot, TrafficPolicy::Local),
            *local,
            "{name}, Local"
        );
    }
}

#[test]
fn families_are_told_apart() {
    // The IPv4 endpoints have no hints yet.
    let v6 = slice(2, &["3 zone=a", "4 zone=b"])
        .replace("IPv4", "IPv6")
        .replace("10.0.0.", "fd00::");
    let text = format!("{SERVICE}{}{v6}", slice(1, &["3", "4"]));
    let snapshot = load(&text, &here("a"));
    assert_eq!(used(&snapshot, TrafficPolicy::Cluster), "3 4");
    let port = &snapshot.services[&ServiceName::new("default", "web")].ports[0];
    let used: Vec<_> = port.usable(false, TrafficPolicy::Cluster).collect();
    assert_eq!(used.len(), 1);
    assert_eq!(used[0].addr.to_string(), "fd00::3");
}

#[test]
fn the_node_object_tells_the_zone_wherever_it_is() {
    let slices = slice(1, &["3 zone=a", "4 zone=b"]);
    let other = NODE
        .replace("name: here,", "name: there,")
        .replace("zone: a", "zone: b");
    for text in [
        format!("{SERVICE}{slices}---\n{NODE}---\n{other}"),
        format!("{NODE}---\n{other}---\n{SERVICE}{slices}"),
    ] {
        let snapshot = load(&text, &here(""));
        assert_eq!(&*snapshot.node.zone, "a");
        assert_eq!(snapshot.node.leaving, None);
        assert_eq!(used(&snapshot, TrafficPolicy::Cluster), "3");
        // The operator's setting wins.
        let snapshot = load(&text, &here("b"));
        assert_eq!(used(&snapshot, TrafficPolicy::Cluster), "4");
    }
    let snapshot = load(&format!("{SERVICE}{slices}"), &here(""));
    assert_eq!(used(&snapshot, TrafficPolicy::Cluster), "3 4");
}

#[test]
fn another_zone_is_a_change() {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    let paths = [file.path().to_owned()];
    let rest = format!("{SERVICE}{}---\n", slice(1, &["3 zone=a", "4 zone=b"]));
    let mut manifests = Manifests::new(&here(""));
    for (node, zone, wanted) in [
        (NODE.to_owned(), "a", "3"),
        (NODE.replace("zone: a", "zone: b"), "b", "4"),
        ("# no node\n".to_owned(), "", "3 4"),
    ] {
        std::fs::write(file.path(), format!("{rest}{node}")).unwrap();
        let loaded = manifests.read(&paths).unwrap();
        assert_eq!(&*loaded.snapshot.node.zone, zone);
        assert_eq!(used(&loaded.snapshot, TrafficPolicy::Cluster), wanted);
    }
}

#[test]
fn a_node_that_is_about_to_go() {
    for (from, to) in [
        (
            "metadata: {",
            "metadata: {deletionTimestamp: \"2026-01-01T00:00:00Z\", ",
        ),
        (
            "spec: {",
            "spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}], ",
        ),
    ] {
        let text = NODE.replacen(from, to, 1);
        assert!(load(&text, &here("")).node.leaving.is_some(), "{text}");
    }
    let cordoned = NODE.replacen(
        "spec: {",
        "spec: {unschedulable: true, taints: [{key: node.kubernetes.io/unschedulable, effect: \
         NoSchedule}], ",
        1,
    );
    assert_eq!(load(&cordoned, &here("")).node.leaving, None);
}

#[test]
fn a_node_twice_is_a_fault() {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), format!("{NODE}---\n{NODE}")).unwrap();
    let errors = manifests::load(&[file.path().to_owned()], &here("")).unwrap_err();
    let text = errors.to_string();
    assert!(
        text.contains("Node here: metadata.name: defined twice, first in"),
        "{text}"
    );
}

#[test]
fn a_name_that_the_manifests_do_not_know_is_told() {
    let given = |name_given| Node {
        name: "here".into(),
        name_given,
        ..Node::default()
    };
    let problems = |text: &str, node: &Node| load(text, node).problems.to_vec();
    let elsewhere = format!(
        "{SERVICE}{}",
        slice(1, &["3"]).replace("addresses:", "nodeName: there, addresses:")
    );
    // The operator's name is trusted unless the manifests have Nodes.
    assert_eq!(problems(&elsewhere, &given(true)), []);
    let [problem] = &problems(&elsewhere, &given(false))[..] else {
        panic!("{:?}", problems(&elsewhere, &given(false)))
    };
    assert_eq!(problem.gravity, Gravity::Place);
    assert_eq!(problem.place, "Node here");
    assert!(
        problem.text.contains("there") && problem.text.contains("--node-name"),
        "{problem:?}"
    );
    let other = NODE.replace("name: here,", "name: there,");
    let with_nodes = format!("{elsewhere}---\n{other}");
    assert_eq!(problems(&with_nodes, &given(true)).len(), 1);
    let known = format!("{with_nodes}---\n{NODE}");
    assert_eq!(problems(&known, &given(false)), []);
    let here = slice(2, &["4 local"]);
    assert_eq!(problems(&format!("{elsewhere}{here}"), &given(false)), []);
    // The name matters only if an object depends on it.
    let snapshot = load(&elsewhere, &given(false));
    assert_eq!(snapshot.depends_on_place(), None);
    let local = elsewhere.replacen("spec: {", "spec: {internalTrafficPolicy: Local, ", 1);
    let snapshot = load(&local, &given(false));
    assert_eq!(
        snapshot.depends_on_place(),
        Some(&ServiceName::new("default", "web"))
    );
}
