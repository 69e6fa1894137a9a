//! The results of ServiceEntries: from manifests to the services of the tables.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use dataplane_source::{
    Admitted, ExternalIps,
    manifests::{self, Loaded, Manifests},
};
use model::{
    Egress, EndpointName, EntryName, ExportTo, Gravity, Node, PodAddresses, Problem, Resolved,
    Rules, Service, ServiceName, ServiceType, Snapshot, WithoutProxy,
};
use plan::{
    Planner,
    entries::{Entries, service_name},
};
use serde_json::{Value, json};

const NOW: u64 = 1_800_000_000;

fn load(objects: &[Value]) -> Loaded {
    then_load(&mut unread(), objects)
}

/// Manifests that were not read yet.
fn unread() -> Manifests {
    Manifests::new(&Node {
        name: "node1".into(),
        own: vec![ip("192.0.2.200")],
        ..Node::default()
    })
}

fn then_load(manifests: &mut Manifests, objects: &[Value]) -> Loaded {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    std::fs::write(file.path(), list.to_string()).unwrap();
    let loaded = manifests.read(&[file.path().to_owned()]);
    loaded.unwrap_or_else(|errors| panic!("{errors}"))
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// An entry `db` of `shop` with a port, endpoints and these fields of `spec`.
fn db(fields: Value) -> Value {
    named("db", fields)
}

fn named(name: &str, fields: Value) -> Value {
    let mut spec = json!({
        "hosts": [format!("{name}.example.com")],
        "ports": [{ "number": 5432, "name": "pg", "protocol": "TCP" }],
        "resolution": "STATIC",
        "endpoints": [{ "address": "198.51.100.1" }],
    });
    if let Value::Object(fields) = fields {
        for (field, value) in fields {
            spec[field] = value;
        }
    }
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": {
            "name": name, "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": spec,
    })
}

fn web(ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "web", "namespace": "default" },
        "spec": { "clusterIP": ip, "ports": [{ "port": 80 }] },
    })
}

/// The served objects of a node, and its messages.
struct Served {
    snapshot: Snapshot,
    problems: Vec<Problem>,
}

impl Served {
    fn of(objects: &[Value]) -> Self {
        Self::next(&mut Entries::new([]), objects)
    }

    fn next(entries: &mut Entries, objects: &[Value]) -> Self {
        Self::beside(entries, objects, PodAddresses::default())
    }

    /// Serves the objects with these addresses of Pods and nodes.
    fn beside(entries: &mut Entries, objects: &[Value], pods: PodAddresses) -> Self {
        Self::then(entries, objects, pods, NOW)
    }

    /// Serves the objects at a time in seconds since the epoch.
    fn at(entries: &mut Entries, objects: &[Value], now: u64) -> Self {
        Self::then(entries, objects, PodAddresses::default(), now)
    }

    fn then(entries: &mut Entries, objects: &[Value], pods: PodAddresses, now: u64) -> Self {
        let mut snapshot = load(objects).snapshot;
        snapshot.pods = pods;
        let taken = entries.take(&snapshot.entries, &snapshot.services, &snapshot, now);
        let mut problems = snapshot.problems.to_vec();
        problems.extend(entries.problems().cloned());
        (snapshot.services, snapshot.entries) = (taken.services, taken.entries);
        Self { snapshot, problems }
    }

    fn service(&self, name: &str) -> Option<&Arc<Service>> {
        let name = service_name(&EntryName::new("shop", name));
        self.snapshot.services.get(&name)
    }

    fn vips(&self, name: &str) -> Vec<String> {
        let entry = &self.snapshot.entries[&EntryName::new("shop", name)];
        let vips = entry.hosts.iter().flat_map(|host| &host.vips);
        vips.map(ToString::to_string).collect()
    }

    /// Returns the endpoints of a service's first port, with weights other than 1.
    fn endpoints(&self, name: &str) -> Vec<String> {
        let Some(service) = self.service(name) else {
            return Vec::new();
        };
        let port = &service.ports[0];
        let all = port.endpoints.iter().enumerate();
        all.map(|(index, e)| match port.weight(index) {
            1 => format!("{}:{}", e.addr, e.port),
            weight => format!("{}:{}*{weight}", e.addr, e.port),
        })
        .collect()
    }

    fn says(&self) -> Vec<String> {
        let texts = self.problems.iter();
        texts.map(|problem| problem.text.clone()).collect()
    }
}

#[test]
fn a_host_without_addresses_gets_one_of_each_family_and_dns_answers_by_the_endpoints() {
    let v6 = json!({ "endpoints": [{ "address": "2001:db8::1" }, { "address": "198.51.100.1" }] });
    let served = Served::of(&[
        db(json!({})),
        named("both", v6),
        named("none", json!({ "endpoints": [] })),
    ]);
    assert!(served.problems.is_empty(), "{:?}", served.problems);
    let service = served.service("db").unwrap();
    assert_eq!(service.kind, ServiceType::Entry);
    let [v4, v6] = &service.cluster_ips[..] else {
        panic!("{service:?}");
    };
    let [_, _, high, low] = match v4 {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(_) => panic!("{v4}"),
    };
    assert!(v4.to_string().starts_with("240.240."));
    assert_eq!(
        v6.to_string(),
        format!("2001:2::f0f0:{:x}", u16::from_be_bytes([high, low]))
    );
    assert_eq!(served.vips("db"), [v4.to_string()]);
    assert_eq!(served.vips("both").len(), 2);
    // Without endpoints connections are refused, which is better than a name that does not exist.
    assert_eq!(served.vips("none").len(), 2);
    assert_eq!(served.endpoints("db"), ["198.51.100.1:5432"]);
}

#[test]
fn what_gets_no_address() {
    let labelled = |value: &str| {
        let mut entry = named("labelled", json!({}));
        entry["metadata"]["labels"] =
            json!({ "networking.istio.io/enable-autoallocate-ip": value });
        entry
    };
    for entry in [
        db(json!({ "resolution": "NONE", "endpoints": null })),
        db(json!({ "hosts": ["*.example.com"] })),
        db(json!({ "ports": null })),
        labelled("false"),
    ] {
        let name = entry["metadata"]["name"].as_str().unwrap().to_owned();
        let served = Served::of(std::slice::from_ref(&entry));
        assert_eq!(served.vips(&name), [""; 0], "{entry}");
        assert!(served.service(&name).is_none(), "{entry}");
        assert!(served.problems.is_empty(), "{:?}", served.problems);
    }
    assert_eq!(Served::of(&[labelled("true")]).vips("labelled").len(), 1);
}

#[test]
fn what_a_control_plane_has_given_counts() {
    let mut entry = db(json!({ "hosts": ["a.example.com", "b.example.com"] }));
    entry["status"] = json!({ "addresses": [
        { "host": "a.example.com", "value": "240.240.7.7" },
        { "host": "a.example.com", "value": "2001:2::77" },
        { "host": "a.example.com", "value": "127.0.0.1" },
    ]});
    let served = Served::of(&[entry]);
    let vips = served.vips("db");
    assert_eq!(vips[0], "240.240.7.7");
    assert_eq!(vips.len(), 2, "{vips:?}");
    assert_ne!(vips[1], "240.240.7.7");
    let service = served.service("db").unwrap();
    assert_eq!(service.cluster_ips.len(), 2);
    // The author of a `status` gets no stronger claim from it.
    assert_eq!(
        service.external_ips.to_vec(),
        [ip("240.240.7.7"), ip("2001:2::77")]
    );
    assert_eq!(
        served.says(),
        ["status.addresses[2].value: 127.0.0.1 is a loopback address, which cannot be a service's"]
    );
}

#[test]
fn ports_targets_weights_and_protocols() {
    let served = Served::of(&[db(json!({
        "ports": [
            { "number": 5432, "name": "pg", "protocol": "TCP", "targetPort": 6432 },
            { "number": 53, "name": "dns", "protocol": "UDP" },
        ],
        "endpoints": [
            { "address": "198.51.100.2", "weight": 30, "ports": { "pg": 7432 } },
            { "address": "198.51.100.1", "weight": 10 },
            { "address": "198.51.100.1", "weight": 20, "ports": { "dns": 5353 } },
        ],
    }))]);
    assert!(served.problems.is_empty(), "{:?}", served.problems);
    // An endpoint that occurs twice has the sum of the weights. Equal weights are not stored.
    assert_eq!(
        served.endpoints("db"),
        ["198.51.100.1:6432", "198.51.100.2:7432"]
    );
    let dns = &served.service("db").unwrap().ports[1];
    let shown: Vec<_> = dns
        .endpoints
        .iter()
        .map(|e| format!("{}:{}", e.addr, e.port))
        .collect();
    assert_eq!(
        shown,
        ["198.51.100.1:53", "198.51.100.1:5353", "198.51.100.2:53"]
    );
    assert_eq!([0, 1, 2].map(|index| dns.weight(index)), [10, 20, 30]);
}

#[test]
fn addresses_are_served_and_small_ranges_as_what_is_in_them() {
    let served = Served::of(&[db(json!({
        "addresses": ["203.0.113.4", "203.0.113.8/30", "2001:db8:1::/127", "203.0.113.4/32"],
    }))]);
    assert!(served.problems.is_empty(), "{:?}", served.problems);
    let service = served.service("db").unwrap();
    assert!(service.cluster_ips.is_empty());
    let shown: Vec<_> = service
        .external_ips
        .iter()
        .map(ToString::to_string)
        .collect();
    let wanted = [
        "203.0.113.4",
        "203.0.113.8",
        "203.0.113.9",
        "203.0.113.10",
        "203.0.113.11",
        "2001:db8:1::",
        "2001:db8:1::1",
    ];
    assert_eq!(shown, wanted);
    // A host does not lead to a range, or to a family without an endpoint.
    assert_eq!(served.vips("db"), wanted[..1]);
    let both = json!({
        "addresses": ["203.0.113.4", "2001:db8:1::4"],
    });
    assert_eq!(Served::of(&[db(both)]).vips("db"), wanted[..1]);
    // Without endpoints clients connect to the address itself.
    let direct = json!({ "resolution": "NONE", "endpoints": null, "addresses": wanted[..1] });
    assert_eq!(Served::of(&[db(direct)]).vips("db"), wanted[..1]);
    let large = json!({ "addresses": ["203.0.0.0/16", "203.0.113.4"] });
    let served = Served::of(&[db(large)]);
    assert_eq!(served.vips("db"), ["203.0.113.4"]);
    assert_eq!(
        served.says(),
        [
            "spec.addresses[0]: 203.0.0.0/16 is not served: the tables have an entry for each address, and a range of an \
          entry may have 256; use a smaller range or the addresses that clients use"
        ]
    );
    // Without endpoints nothing is served.
    let none = json!({ "resolution": "NONE", "endpoints": null, "addresses": ["203.0.0.0/16"] });
    assert!(Served::of(&[db(none)]).problems.is_empty());
}

/// Each fault is reported with its field and reason, and does not keep other entries from being served.
#[test]
fn a_wrong_entry_is_named_and_the_others_are_served() {
    for (fields, wanted) in [
        (
            json!({ "resolution": "DYNAMIC_DNS" }),
            "spec.resolution: DYNAMIC_DNS is not served: it needs a proxy that reads the host's name from each \
             connection; use DNS with whole names",
        ),
        (
            json!({ "resolution": "X" }),
            "spec.resolution: unknown resolution \"X\"; expected",
        ),
        (
            json!({ "location": "X" }),
            "spec.location: unknown location \"X\"; expected",
        ),
        (
            json!({ "hosts": [] }),
            "spec.hosts: missing or empty; expected at least one host",
        ),
        (
            json!({ "hosts": ["a b"] }),
            "spec.hosts[0]: \"a b\" is not a host; expected",
        ),
        (
            json!({ "hosts": ["192.0.2.1"] }),
            "spec.hosts[0]: \"192.0.2.1\" is not a host; expected",
        ),
        (
            json!({ "hosts": ["*"] }),
            "spec.hosts[0]: \"*\" is not a host; expected",
        ),
        (json!({ "hosts": "db.example.com" }), "spec.hosts: "),
        (
            json!({ "resolution": "DNS", "hosts": ["*.example.com"], "endpoints": null }),
            "spec.hosts[0]: \"*.example.com\" cannot be resolved; expected",
        ),
        (
            json!({ "addresses": ["127.0.0.1"] }),
            "spec.addresses[0]: 127.0.0.1 is a loopback address",
        ),
        (
            json!({ "addresses": ["127.0.0.0/30"] }),
            "spec.addresses[0]: 127.0.0.0 is a loopback address",
        ),
        (
            json!({ "addresses": ["169.254.169.254"] }),
            "spec.addresses[0]: 169.254.169.254 is a link-local",
        ),
        (
            json!({ "addresses": ["0.0.0.0"] }),
            "spec.addresses[0]: 0.0.0.0 is the unspecified address",
        ),
        (
            json!({ "addresses": ["x"] }),
            "spec.addresses[0]: \"x\" is not an IP address",
        ),
        (
            json!({ "ports": [{ "number": 0, "name": "a" }] }),
            "spec.ports[0].number: 0 is not a port",
        ),
        (
            json!({ "ports": [{ "number": 1, "name": "a", "protocol": "SCTP" }] }),
            "spec.ports[0].protocol: unknown",
        ),
        (
            json!({ "ports": [{ "number": 1, "name": "a" }, { "number": 1, "name": "b" }] }),
            "spec.ports[1].number: 1/tcp is given twice",
        ),
        (
            json!({ "ports": [{ "number": 1, "name": "a" }, { "number": 2, "name": "a" }] }),
            "spec.ports[1].name: \"a\" names another port, too",
        ),
        (
            json!({ "endpoints": [{ "address": "a.example.com" }] }),
            "spec.endpoints[0].address: \"a.example.com\" is a name",
        ),
        (
            json!({ "endpoints": [{ "address": "unix:///x" }] }),
            "spec.endpoints[0].address: \"unix:///x\" is a Unix socket",
        ),
        (
            json!({ "endpoints": [{ "address": "127.0.0.1" }] }),
            "spec.endpoints[0].address: 127.0.0.1 is a loopback",
        ),
        (
            json!({ "endpoints": [{ "address": "169.254.169.254" }] }),
            "spec.endpoints[0].address: 169.254.169.254 is a link",
        ),
        (
            json!({ "endpoints": [{}] }),
            "spec.endpoints[0].address: missing",
        ),
        (
            json!({ "endpoints": [{ "address": "192.0.2.1", "weight": -1 }] }),
            "spec.endpoints[0].weight: -1 is out of",
        ),
        (
            json!({ "endpoints": [{ "address": "192.0.2.1", "ports": { "x": 1 } }] }),
            "spec.endpoints[0].ports.x: spec.ports has no port of the name \"x\"",
        ),
        (
            json!({ "resolution": "NONE" }),
            "spec.endpoints: resolution NONE has no endpoints",
        ),
        (
            json!({ "workloadSelector": { "labels": { "a": "b" } } }),
            "spec.workloadSelector: there are spec.endpoints, too; expected one of the two",
        ),
        (
            json!({ "endpoints": null, "workloadSelector": {} }),
            "spec.workloadSelector.labels: missing or empty; expected at least one label",
        ),
    ] {
        let served = Served::of(&[
            db(fields.clone()),
            named("other", json!({})),
            web("10.96.0.1"),
        ]);
        let said = served.says();
        assert_eq!(said.len(), 1, "{fields}: {said:?}");
        assert!(said[0].starts_with(wanted), "{fields}: {said:?}");
        let problem = &served.problems[0];
        assert_eq!(problem.gravity, Gravity::NotFollowed);
        assert!(
            problem.place.ends_with(": ServiceEntry shop/db"),
            "{}",
            problem.place
        );
        assert!(served.service("db").is_none());
        assert_eq!(served.endpoints("other"), ["198.51.100.1:5432"]);
        assert!(
            served
                .snapshot
                .services
                .contains_key(&ServiceName::new("default", "web"))
        );
    }
}

#[test]
fn a_wrong_entry_stays_what_it_was() {
    let mut manifests = unread();
    let first = then_load(&mut manifests, &[db(json!({}))]).snapshot;
    let second = then_load(&mut manifests, &[db(json!({ "hosts": [] }))]).snapshot;
    assert_eq!(first.entries, second.entries);
    let mut unreadable = db(json!({}));
    unreadable["metadata"]["resourceVersion"] = json!(123);
    let second = then_load(&mut manifests, &[unreadable]).snapshot;
    assert_eq!(first.entries, second.entries);
    let place = &second.problems[0].place;
    assert!(place.ends_with(": ServiceEntry shop/db"), "{place}");
    let third = then_load(&mut manifests, &[web("10.96.0.1")]).snapshot;
    assert!(third.entries.is_empty());
    // So does a WorkloadEntry, which is an endpoint of the entry.
    let selecting =
        db(json!({ "workloadSelector": { "labels": { "app": "db" } }, "endpoints": null }));
    let mut workload = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "WorkloadEntry",
        "metadata": { "name": "vm", "namespace": "shop" },
        "spec": { "address": "192.0.2.1", "labels": { "app": "db" } },
    });
    let first = then_load(&mut manifests, &[selecting.clone(), workload.clone()]).snapshot;
    workload["spec"]["address"] = json!("127.0.0.1");
    let second = then_load(&mut manifests, &[selecting.clone(), workload]).snapshot;
    let name = EntryName::new("shop", "db");
    assert_eq!(first.entries[&name].backends.len(), 1);
    assert!(Arc::ptr_eq(&first.entries[&name], &second.entries[&name]));
    let third = then_load(&mut manifests, &[selecting]).snapshot;
    assert!(third.entries[&name].backends.is_empty());
}

/// A tenant's entries do not get an address that a Service or the node has, on any port.
#[test]
fn an_entry_takes_no_address_of_a_service_or_of_the_node() {
    let mut exposed = web("10.96.0.1");
    exposed["spec"]["externalIPs"] = json!(["203.0.113.1"]);
    exposed["spec"]["type"] = json!("LoadBalancer");
    exposed["status"] = json!({ "loadBalancer": { "ingress": [{ "ip": "203.0.113.2" }] } });
    let thief = db(json!({
        "addresses": ["10.96.0.1", "203.0.113.1", "203.0.113.2", "192.0.2.200", "203.0.113.3"],
    }));
    let mut entries = Entries::new([]);
    let served = Served::next(&mut entries, &[thief.clone(), exposed.clone()]);
    let named: Vec<_> = served.service("db").unwrap().external_ips.to_vec();
    assert_eq!(named, [ip("203.0.113.3")]);
    assert_eq!(
        served.says(),
        [
            "spec.addresses: 10.96.0.1 is not served: a Service, a Pod or the API server has it",
            "spec.addresses: 203.0.113.1 is not served: a Service, a Pod or the API server has it",
            "spec.addresses: 203.0.113.2 is not served: a Service, a Pod or the API server has it",
            "spec.addresses: 192.0.2.200 is not served: it is an address of this node",
        ]
    );
    // This holds for a younger Service, too. When the Service is removed, the address is free.
    let served = Served::next(&mut entries, std::slice::from_ref(&thief));
    assert_eq!(served.says().len(), 1);
    assert_eq!(served.service("db").unwrap().external_ips.len(), 4);
    let served = Served::next(&mut entries, &[thief, exposed]);
    assert_eq!(served.says().len(), 4);
    assert_eq!(
        served.service("db").unwrap().external_ips.to_vec(),
        [ip("203.0.113.3")]
    );
}

const BY_POD: &str = "a Service, a Pod or the API server has it";
const BY_ENDPOINT: &str =
    "an endpoint of a Service has it; if it is an external IP, add its range to node.externalIPs";
const MAY_BE_POD: &str = "an endpoint of a Service has it, and the endpoint may be a Pod: the agent does not know the Pods \
                          of all nodes";

/// Returns a slice of Service `web` of `default`, or of the API server's Service.
fn slice(service: &str, addresses: &[&str]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{service}-1"), "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
        },
        "endpoints": addresses.iter().map(|ip| json!({ "addresses": [ip] })).collect::<Vec<_>>(),
        "ports": [{ "port": 6443 }],
    })
}

fn refused(all: &[(&str, &str)]) -> Vec<String> {
    let says = |(ip, why): &(&str, &str)| format!("spec.addresses: {ip} is not served: {why}");
    all.iter().map(says).collect()
}

/// An entry with the address of a Pod, or of the API server, would get the connections of all clients of the node.
#[test]
fn an_entry_takes_no_address_of_a_pod_or_an_endpoint() {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "web-0", "namespace": "default" },
        "spec": { "nodeName": "node1" },
        "status": { "podIPs": [{ "ip": "10.244.1.5" }] },
    });
    let slice = slice("web", &["203.0.113.10"]);
    let thief = db(json!({ "addresses": ["10.244.1.5", "203.0.113.10", "203.0.113.11"] }));
    let (of_pod, of_slice) = (("10.244.1.5", BY_POD), ("203.0.113.10", BY_ENDPOINT));
    let mut entries = Entries::new([]);
    for (others, wanted) in [
        (vec![], vec![]),
        (vec![pod.clone()], vec![of_pod]),
        (
            vec![pod, web("10.96.0.1"), slice.clone()],
            vec![of_pod, of_slice],
        ),
        (vec![web("10.96.0.1"), slice], vec![of_slice]),
        (vec![web("10.96.0.1")], vec![]),
    ] {
        let mut objects = others;
        objects.push(thief.clone());
        let served = Served::next(&mut entries, &objects);
        let said: Vec<String> = served.says();
        assert_eq!(said, refused(&wanted), "{objects:#?}");
        let left = served.service("db").unwrap().external_ips.len();
        assert_eq!(left, 3 - wanted.len());
    }
}

/// Adds an address for a host to the status of an entry.
fn with_status(mut entry: Value, host: &str, address: &str) -> Value {
    entry["status"] = json!({ "addresses": [{ "host": host, "value": address }] });
    entry
}

/// If a control plane assigns addresses, too, a new host waits for it. An address that a client may know leads to the
/// host for ten minutes, whether the agent or the control plane assigned it, and whatever happens afterwards.
#[test]
fn an_address_that_was_given_out_serves_for_ten_minutes() {
    let of_status = with_status(db(json!({})), "db.example.com", "240.240.7.7");
    let mut entries = Entries::new([]);
    let served = Served::next(&mut entries, &[db(json!({}))]);
    let before = served.vips("db");
    let own: Vec<IpAddr> = before.iter().map(|text| ip(text)).collect();
    let named = db(json!({ "addresses": ["203.0.113.1"] }));
    let mut opted_out = of_status.clone();
    opted_out["metadata"]["labels"] =
        json!({ "networking.istio.io/enable-autoallocate-ip": "false" });
    for (now, objects, vips, others) in [
        (1, &of_status, vec!["240.240.7.7"], vec!["240.240.7.7"]),
        (599, &of_status, vec!["240.240.7.7"], vec!["240.240.7.7"]),
        // The control plane withdraws the address.
        (610, &db(json!({})), vec![], vec!["240.240.7.7"]),
        (
            700,
            &named,
            vec!["203.0.113.1"],
            vec!["203.0.113.1", "240.240.7.7"],
        ),
        (800, &opted_out, vec![], vec!["240.240.7.7"]),
        (1200, &of_status, vec!["240.240.7.7"], vec!["240.240.7.7"]),
        (
            1201,
            &named,
            vec!["203.0.113.1"],
            vec!["203.0.113.1", "240.240.7.7"],
        ),
        (1900, &named, vec!["203.0.113.1"], vec!["203.0.113.1"]),
    ] {
        let served = Served::at(&mut entries, std::slice::from_ref(objects), NOW + now);
        let service = served.service("db").unwrap();
        let others: Vec<IpAddr> = others.iter().map(|text| ip(text)).collect();
        assert_eq!(service.external_ips.to_vec(), others, "{now}");
        let has_own = own.iter().all(|own| service.cluster_ips.contains(own));
        assert_eq!(has_own, now < 1300, "{now}: {:?}", service.cluster_ips);
        let given = served.vips("db");
        if vips.is_empty() && now != 800 {
            assert_eq!(given, before, "{now}");
        } else {
            assert_eq!(given, vips, "{now}");
        }
    }
    assert!(!entries.is_waiting());
    // The agent after this one knows the address, too.
    let mut entries = Entries::new([]);
    Served::next(&mut entries, &[db(json!({}))]);
    Served::at(&mut entries, std::slice::from_ref(&of_status), NOW + 1);
    let mut next = Entries::new(entries.records());
    let served = Served::at(&mut next, std::slice::from_ref(&of_status), NOW + 2);
    assert_eq!(served.service("db").unwrap().cluster_ips.len(), 2);
}

#[test]
fn a_new_host_waits_a_moment_for_a_control_plane_that_gives_addresses() {
    let other = with_status(
        named("other", json!({})),
        "other.example.com",
        "240.240.7.7",
    );
    let mut new = db(json!({}));
    // Created at this moment, 1 800 000 000 seconds after the epoch.
    new["metadata"]["creationTimestamp"] = json!("2027-01-15T08:00:00Z");
    let mut entries = Entries::new([]).with_control_plane();
    let served = Served::next(&mut entries, &[new.clone(), other.clone()]);
    assert_eq!(served.vips("db"), <[&str; 0]>::default());
    assert!(served.problems.is_empty(), "{:?}", served.problems);
    assert!(entries.defers() && entries.is_waiting());
    let said = with_status(new.clone(), "db.example.com", "240.240.7.8");
    let mut told = Entries::new([]).with_control_plane();
    Served::next(&mut told, &[new.clone(), other.clone()]);
    let served = Served::at(&mut told, &[said, other.clone()], NOW + 1);
    assert_eq!(served.vips("db"), ["240.240.7.8"]);
    assert!(!told.defers());
    // The control plane may ignore the namespace.
    let served = Served::at(&mut entries, &[new.clone(), other.clone()], NOW + 5);
    assert_eq!(served.vips("db").len(), 1);
    assert!(!entries.defers());
    // A host waits for an address only if there is a control plane and its entry is new.
    let mut alone = Entries::new([]).with_control_plane();
    assert_eq!(Served::next(&mut alone, &[new]).vips("db").len(), 1);
    let mut late = Entries::new([]).with_control_plane();
    assert_eq!(
        Served::next(&mut late, &[db(json!({})), other])
            .vips("db")
            .len(),
        1
    );
}

/// The agent and a control plane assign addresses of one range: no host gets the number of another host.
#[test]
fn a_status_is_no_claim_to_the_address_of_another_host() {
    let mut entries = Entries::new([]);
    let served = Served::next(&mut entries, &[db(json!({}))]);
    let taken = served.vips("db")[0].clone();
    let thief = with_status(named("thief", json!({})), "thief.example.com", &taken);
    let served = Served::next(&mut entries, &[db(json!({})), thief.clone()]);
    assert_eq!(served.vips("db")[0], taken);
    let own = served.vips("thief");
    assert!(own.len() == 1 && !own.contains(&taken), "{own:?}");
    assert!(
        !served
            .service("thief")
            .unwrap()
            .external_ips
            .contains(&ip(&taken))
    );
    let says = format!(
        "status.addresses: {taken} is not served: host db.example.com of namespace shop has it"
    );
    assert_eq!(served.says(), std::slice::from_ref(&says));
    // Clients may know the former address for ten minutes more.
    let served = Served::at(&mut entries, std::slice::from_ref(&thief), NOW + 1);
    assert_eq!(
        (served.vips("thief"), served.says()),
        (own.clone(), vec![says])
    );
    let served = Served::at(&mut entries, std::slice::from_ref(&thief), NOW + 602);
    assert_eq!(served.vips("thief"), [taken.as_str()]);
    // The address that it had in the meantime stays as long.
    assert_eq!(served.service("thief").unwrap().cluster_ips.len(), 2);
    // If a control plane has assigned one address to two hosts, the first has it.
    let both = ["a", "b"].map(|name| {
        with_status(
            named(name, json!({})),
            &format!("{name}.example.com"),
            "240.240.9.9",
        )
    });
    let served = Served::of(&both);
    assert_eq!(served.vips("a"), ["240.240.9.9"]);
    assert_eq!(served.vips("b").len(), 1);
    assert!(served.says()[0].contains("host a.example.com of namespace shop has it"));
    // A host of two entries has the address for both.
    let shared = json!({ "hosts": ["db.example.com"], "ports": [{ "number": 80, "name": "web" }] });
    let both = [db(json!({})), named("more", shared)]
        .map(|entry| with_status(entry, "db.example.com", "240.240.9.9"));
    let served = Served::of(&both);
    assert_eq!(served.vips("db"), served.vips("more"));
    assert!(served.problems.is_empty(), "{:?}", served.problems);
}

#[test]
fn a_status_that_is_out_of_date_is_not_answered() {
    let mut opted_out = db(json!({}));
    opted_out["metadata"]["labels"] =
        json!({ "networking.istio.io/enable-autoallocate-ip": "FALSE" });
    let none = db(json!({ "resolution": "NONE", "endpoints": [] }));
    let wildcard = db(json!({ "hosts": ["*.example.com"] }));
    for (entry, host) in [
        (opted_out, "db.example.com"),
        (none, "db.example.com"),
        (wildcard, "*.example.com"),
        (db(json!({ "hosts": ["*.example.com"] })), ""),
    ] {
        let served = Served::of(&[with_status(entry.clone(), host, "240.240.7.7")]);
        assert_eq!(served.vips("db"), <[&str; 0]>::default(), "{entry}");
        assert_eq!(served.service("db"), None, "{entry}");
    }
    // The status must name the host of an address.
    let served = Served::of(&[with_status(db(json!({})), "", "240.240.7.7")]);
    assert!(!served.vips("db").contains(&"240.240.7.7".to_owned()));
}

/// Two entries of a namespace may share a host, each with its own ports.
#[test]
fn entries_of_one_host_share_its_address() {
    let more = json!({ "hosts": ["db.example.com"], "ports": [{ "number": 80, "name": "web" }] });
    let served = Served::of(&[db(json!({})), named("more", more)]);
    assert_eq!(served.vips("db"), served.vips("more"));
    let mut planner = Planner::new();
    planner.plan(&served.snapshot);
    assert_eq!(planner.served().conflict_count(), 0);
    // If both have a port, one of the entries has it.
    let same = json!({ "hosts": ["db.example.com"] });
    let served = Served::of(&[db(json!({})), named("more", same)]);
    let mut planner = Planner::new();
    planner.plan(&served.snapshot);
    assert_eq!(planner.served().conflict_count(), 2);
}

/// A Service by another name: the Service's endpoints answer for the entry, at the ports that lead there.
#[test]
fn an_endpoint_that_is_a_services_name_has_its_endpoints() {
    let of = |endpoint: &str| {
        db(json!({
            "resolution": "DNS",
            "ports": [
                { "number": 443, "name": "https" }, { "number": 8443, "name": "mapped", "targetPort": 443 },
                { "number": 53, "name": "dns", "protocol": "UDP" }, { "number": 80, "name": "none" },
            ],
            "endpoints": [{ "address": endpoint, "weight": 3 }, { "address": "198.51.100.1" }],
        }))
    };
    let mut service = web("10.96.0.1");
    service["spec"]["ports"] =
        json!([{ "port": 443 }, { "name": "dns", "port": 53, "protocol": "TCP" }]);
    let mut endpoints = slice("web", &["10.244.1.2", "10.244.1.1", "10.244.1.3"]);
    endpoints["endpoints"][2]["conditions"] = json!({ "ready": false });
    let mut entries = Entries::new([]).with_names(HashMap::new());
    let ports = |served: &Served| -> Vec<Vec<String>> {
        let ports = &served.service("db").unwrap().ports;
        let shown = |port: &model::ServicePort| {
            let all = port.endpoints.iter().enumerate();
            let shown = all.map(|(at, e)| format!("{}:{}*{}", e.addr, e.port, port.weight(at)));
            shown.collect()
        };
        ports.iter().map(shown).collect()
    };
    for name in ["web.default.svc.cluster.local", "WEB.default.svc"] {
        let objects = [of(name), service.clone(), endpoints.clone()];
        let served = Served::next(&mut entries, &objects);
        assert!(served.problems.is_empty(), "{:?}", served.problems);
        let both = ["10.244.1.1:6443*3", "10.244.1.2:6443*3"];
        let wanted = |number: u16| {
            [
                &both.map(str::to_owned)[..],
                &[format!("198.51.100.1:{number}*2")],
            ]
            .concat()
        };
        let alone = |number: u16| vec![format!("198.51.100.1:{number}*1")];
        assert_eq!(
            ports(&served),
            [wanted(443), wanted(443), alone(53), alone(80)]
        );
        // No resolver is asked for the name.
        assert!(wanted_names(&mut entries).is_empty());
    }
    // The endpoints follow those of the Service.
    endpoints["endpoints"] = json!([{ "addresses": ["10.244.1.9"] }]);
    let served = Served::next(
        &mut entries,
        &[of("web.default.svc"), service.clone(), endpoints.clone()],
    );
    assert_eq!(
        ports(&served)[0],
        ["10.244.1.9:6443*3", "198.51.100.1:443*1"]
    );
    let served = Served::next(&mut entries, &[of("web.default.svc")]);
    assert_eq!(ports(&served)[0], ["198.51.100.1:443*1"]);
    assert_eq!(
        served.says(),
        ["spec.endpoints: web.default.svc: there is no Service default/web with endpoints"]
    );
    // For a headless Service, the entry has the addresses.
    service["spec"]["clusterIP"] = json!("None");
    endpoints["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
    let served = Served::next(&mut entries, &[of("web.default.svc"), service, endpoints]);
    assert_eq!(
        ports(&served)[0],
        ["10.244.1.9:443*3", "198.51.100.1:443*1"]
    );
}

fn wanted_names(entries: &mut Entries) -> Vec<String> {
    wanted(entries).unwrap_or_default()
}

/// Names that clients in other namespaces may use for other hosts.
#[test]
fn a_host_that_may_be_a_name_of_the_cluster_is_refused() {
    let served = |hosts: &[&str]| Served::of(&[db(json!({ "hosts": hosts }))]);
    for host in [
        "web",
        "wpad",
        "localhost",
        "db.localhost",
        "*.localhost",
        "db.invalid",
        "svc",
        "*.svc",
        "web.other.svc",
        "*.other.svc",
        "mysql-0.mysql.other.svc",
        "WEB.other.SVC.",
    ] {
        let alone = served(&[host]);
        assert!(alone.snapshot.entries.is_empty(), "{host}");
        assert_eq!(alone.says().len(), 1, "{host}");
        let beside = served(&["db.example.com", host]);
        let entry = &beside.snapshot.entries[&EntryName::new("shop", "db")];
        assert_eq!(entry.hosts.len(), 1, "{host}");
        let says = beside.says();
        assert!(
            says.len() == 1 && says[0].contains("is not served"),
            "{says:?}"
        );
    }
    for host in [
        "db.example.com",
        "example.com",
        "*.com",
        "web.shop.svc",
        "*.shop.svc",
        "db.local",
    ] {
        assert!(served(&[host]).problems.is_empty(), "{host}");
    }
}

#[test]
fn an_address_that_was_given_is_no_endpoint() {
    for address in ["240.240.1.2", "::ffff:240.240.1.2", "2001:2::f0f0:102"] {
        let endpoints =
            json!({ "endpoints": [{ "address": address }, { "address": "198.51.100.1" }] });
        let served = Served::of(&[db(endpoints)]);
        assert_eq!(served.endpoints("db"), ["198.51.100.1:5432"]);
        let says = served.says();
        assert!(
            says[0].contains("an address that nodes give to hosts"),
            "{says:?}"
        );
        let alone = Served::of(&[db(json!({ "endpoints": [{ "address": address }] }))]);
        assert_eq!(alone.service("db"), None);
    }
    // A slice cannot have such an address either.
    let slice = slice("web", &["240.240.1.2"]);
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [web("10.96.0.1"), slice] });
    std::fs::write(file.path(), list.to_string()).unwrap();
    let errors = manifests::load(&[file.path().to_owned()], &Node::default());
    let errors = errors.err().unwrap().to_string();
    assert!(
        errors.contains("an address that nodes give to hosts"),
        "{errors}"
    );
}

/// A wrong endpoint is left out, and the others serve.
#[test]
fn a_wrong_endpoint_harms_no_other() {
    for wrong in [
        json!({ "network": "net2" }),
        json!({ "address": "unix:///run/db.sock" }),
        json!({ "address": "db.example.net" }),
        json!({ "address": "192.0.2.1", "ports": { "other": 5432 } }),
        json!({ "address": "192.0.2.1", "ports": { "pg": 0 } }),
        json!({ "address": "192.0.2.1", "weight": -1 }),
    ] {
        let served = Served::of(&[db(
            json!({ "endpoints": [wrong, { "address": "198.51.100.1" }] }),
        )]);
        assert_eq!(served.endpoints("db"), ["198.51.100.1:5432"], "{wrong}");
        let says = served.says();
        assert!(
            says.len() == 1
                && says[0].starts_with("spec.endpoints[0]")
                && says[0].ends_with("the endpoint is left out"),
            "{says:?}"
        );
        // If no endpoint is valid, the hosts do not become the endpoints.
        for resolution in ["STATIC", "DNS"] {
            let fields = json!({ "resolution": resolution, "endpoints": [wrong] });
            let alone = Served::of(&[db(fields)]);
            let is_name = wrong["address"] == json!("db.example.net");
            assert!(
                alone.snapshot.entries.is_empty() || is_name,
                "{resolution} {wrong}"
            );
        }
    }
}

/// As in Istio's control plane: the container port with the name of the entry's port, then `targetPort`, then the
/// number.
#[test]
fn a_selected_pod_has_the_ports_of_its_containers_names() {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "db-0", "namespace": "shop", "labels": { "app": "db" } },
        "spec": {
            "nodeName": "node2",
            "containers": [
                { "ports": [
                    { "name": "udp", "containerPort": 6999, "protocol": "UDP" },
                    { "name": "web", "containerPort": 7000 },
                ] },
                { "ports": [
                    { "name": "web", "containerPort": 7001 },
                    { "name": "both", "containerPort": 7002, "protocol": "TCP" },
                ] },
            ],
            "initContainers": [
                { "restartPolicy": "Always", "ports": [{ "name": "side", "containerPort": 7003 }] },
                { "ports": [{ "name": "over", "containerPort": 7004 }] },
            ],
        },
        "status": { "podIP": "10.244.1.1", "conditions": [{ "type": "Ready", "status": "True" }] },
    });
    let port =
        |name: &str, number: u16| json!({ "name": name, "number": number, "protocol": "TCP" });
    let mut both = port("both", 8004);
    both["targetPort"] = json!(9000);
    let mut target = port("target", 8005);
    target["targetPort"] = json!(9001);
    let selecting = json!({
        "endpoints": [], "workloadSelector": { "labels": { "app": "db" } },
        "ports": [
            port("web", 8002), port("udp", 8003), both, target, port("side", 8006), port("over", 8007),
            port("none", 8008),
        ],
    });
    let served = Served::of(&[db(selecting), pod]);
    assert!(served.problems.is_empty(), "{:?}", served.problems);
    let ports = &served.service("db").unwrap().ports;
    let numbers: Vec<u16> = ports.iter().map(|port| port.endpoints[0].port).collect();
    assert_eq!(numbers, [7000, 8003, 7002, 9001, 7003, 8007, 8008]);
}

/// An invalid mesh setting of an object is reported, and does not affect other objects.
#[test]
fn what_a_pod_says_wrongly_about_the_mesh_harms_nobody() {
    let said = |annotations: Value| {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "web-0", "namespace": "shop", "annotations": annotations },
            "spec": { "nodeName": "node1", "containers": [] },
            "status": { "podIP": "10.244.1.1" },
        });
        let served = Served::of(&[web("10.96.0.1"), pod]);
        assert!(
            served
                .snapshot
                .services
                .contains_key(&ServiceName::new("default", "web"))
        );
        let pod = served.snapshot.workloads.values().next().unwrap();
        (pod.rules.own.clone(), served.says())
    };
    // As Istio's injector writes it.
    let name = "traffic.sidecar.istio.io/excludeInboundPorts";
    let (rules, says) = said(json!({ name: "15020", "sidecar.istio.io/status": "{}" }));
    assert_eq!(rules, Rules::default());
    let wanted = format!(
        "metadata.annotations[\"{name}\"]: 15020 is reserved for the mesh's proxies; expected another port; it is left out"
    );
    assert_eq!(says, [wanted]);
    let (rules, says) = said(json!({
        "traffic.sidecar.istio.io/excludeOutboundPorts": "22,x,15001",
        "traffic.sidecar.istio.io/includeOutboundIPRanges": "10.0.0.0/8,x",
        "traffic.sidecar.istio.io/includeInboundPorts": "80,x",
        "dataplane.io/egress": "denny", "dataplane.io/without-proxy": "maybe", "dataplane.io/mode": "fast",
        "ambient.istio.io/dns-capture": "perhaps", "ambient.istio.io/bypass-inbound-capture": "perhaps",
    }));
    assert_eq!(says.len(), 9, "{says:#?}");
    // An invalid value counts as the strictest value, or has no effect: a partial list of captured ports would free the
    // others.
    let wanted = Rules {
        outbound_ports: [(22, false)].into(),
        egress: Some(Egress::Deny),
        without_proxy: Some(WithoutProxy::Refuse),
        ..Rules::default()
    };
    assert_eq!(rules, wanted);
    let (rules, says) = said(json!({ "ambient.istio.io/bypass-inbound-capture": "true" }));
    assert_eq!((rules.inbound, says.len()), (Some(false), 0));
    let (rules, _) = said(json!({ "ambient.istio.io/bypass-inbound-capture": "false" }));
    assert_eq!(rules.inbound, None);
}

/// Each line has the label `networking.istio.io/tunnel` of a Pod or Namespace, its annotations, the inbound ports of the
/// rules, and the number of problems.
#[test]
fn a_pod_that_accepts_tunnels_itself_has_their_port() {
    let exclude = json!({ "traffic.sidecar.istio.io/excludeInboundPorts": "80,15008,15006" });
    let include = json!({ "traffic.sidecar.istio.io/includeInboundPorts": "80,15008" });
    let http = json!("http");
    for (kind, tunnel, annotations, ports, problems) in [
        ("Pod", json!(null), json!({}), vec![], 0),
        ("Pod", json!("none"), json!({}), vec![], 0),
        ("Pod", http.clone(), json!({}), vec![(15008, false)], 0),
        ("Pod", json!(null), exclude.clone(), vec![(80, false)], 2),
        (
            "Pod",
            http.clone(),
            exclude.clone(),
            vec![(80, false), (15008, false)],
            1,
        ),
        ("Pod", json!(null), include.clone(), vec![], 1),
        (
            "Pod",
            http.clone(),
            include,
            vec![(80, true), (15008, true)],
            0,
        ),
        ("Namespace", http, exclude, vec![(80, false)], 2),
    ] {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "web-0", "namespace": "shop" },
            "spec": { "nodeName": "node1", "containers": [] },
            "status": { "podIP": "10.244.1.1" },
        });
        let mut namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "shop" },
        });
        let of = match kind {
            "Pod" => &mut pod,
            _ => &mut namespace,
        };
        of["metadata"]["annotations"] = annotations;
        if !tunnel.is_null() {
            of["metadata"]["labels"] = json!({ "networking.istio.io/tunnel": tunnel });
        }
        let served = Served::of(&[pod, namespace]);
        let pod = served.snapshot.workloads.values().next().unwrap();
        let found = pod.rules.merged().inbound_ports;
        let case = format!("{kind} {tunnel}: {:#?}", served.says());
        assert_eq!(found, ports.into_iter().collect(), "{case}");
        assert_eq!(served.says().len(), problems, "{case}");
    }
}

/// The labels of metrics, as in Istio's control plane.
#[test]
fn a_pods_workload_is_what_its_author_wrote() {
    let of = |labels: Value, owner: Value| {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "web-6d4cf56db6-x2k4p", "namespace": "shop", "labels": labels,
                "ownerReferences": if owner.is_null() { json!([]) } else { json!([owner]) },
            },
            "spec": { "nodeName": "node1", "containers": [] },
            "status": { "podIP": "10.244.1.1" },
        });
        let served = Served::of(&[pod]);
        let pod = served.snapshot.workloads.values().next().unwrap();
        pod.telemetry.workload.to_string()
    };
    let owner = |kind: &str, name: &str| json!({ "kind": kind, "name": name, "controller": true });
    let none = json!({});
    let hash = json!({ "pod-template-hash": "6d4cf56db6" });
    let rollout = json!({ "rollouts-pod-template-hash": "6d4cf56db6" });
    let config = json!({ "deploymentconfig": "web" });
    for (labels, owner, wanted) in [
        (&hash, owner("ReplicaSet", "web-6d4cf56db6"), "web"),
        (&rollout, owner("ReplicaSet", "web-6d4cf56db6"), "web"),
        (&none, owner("ReplicaSet", "web"), "web"),
        (
            &hash,
            owner("StatefulSet", "web-6d4cf56db6"),
            "web-6d4cf56db6",
        ),
        (&config, owner("ReplicationController", "web-3"), "web"),
        (&none, owner("ReplicationController", "web-3"), "web-3"),
        (&none, owner("Job", "report-28391040"), "report"),
        (&none, owner("Job", "report-1703462400"), "report"),
        (&none, owner("Job", "report-123"), "report-123"),
        (&none, owner("Job", "report-2839104x"), "report-2839104x"),
        (
            &none,
            owner("DaemonSet", "agent-28391040"),
            "agent-28391040",
        ),
        (&none, owner("Node", "node1"), "web-6d4cf56db6-x2k4p"),
        (&none, Value::Null, "web-6d4cf56db6-x2k4p"),
        (
            &json!({ "service.istio.io/workload-name": "own" }),
            owner("ReplicaSet", "web"),
            "own",
        ),
    ] {
        assert_eq!(
            of(labels.clone(), owner.clone()),
            wanted,
            "{labels} {owner}"
        );
    }
}

/// An author of EndpointSlices writes any address. The operator's statements, and the kubelets' reports about Pods and
/// nodes, win over it.
#[test]
fn an_author_of_slices_takes_no_address_that_the_operator_has_stated_to_be_external() {
    let mut api_server = web("10.96.0.9");
    api_server["metadata"]["name"] = json!("kubernetes");
    let addresses = ["203.0.113.10", "203.0.113.11", "203.0.113.12"];
    let named = [&addresses[..], &["240.240.0.9", "203.0.113.13"]].concat();
    let objects = [
        web("10.96.0.1"),
        slice("web", &addresses),
        api_server,
        slice("kubernetes", &["203.0.113.13"]),
        db(json!({ "addresses": named })),
    ];
    let pods = |everywhere, known: &[&str]| {
        let mut pods = PodAddresses {
            everywhere,
            ..PodAddresses::default()
        };
        pods.add(&known.iter().map(|text| ip(text)).collect::<Vec<_>>());
        pods
    };
    let every = |why| -> Vec<(&str, &str)> {
        let external = addresses[..3].iter();
        external.map(|ip| (*ip, why)).collect()
    };
    let (by_endpoint, may_be) = (every(BY_ENDPOINT), every(MAY_BE_POD));
    let by_node = |ip| (ip, "a Pod or a node has it");
    for (stated, steps) in [
        // Without a statement of the operator, the addresses stay with the endpoints.
        (
            false,
            [
                (pods(false, &[]), by_endpoint.clone()),
                (pods(true, &[]), by_endpoint),
            ],
        ),
        // The addresses might be those of Pods that this node does not know.
        (
            true,
            [
                (
                    pods(false, &["203.0.113.11"]),
                    vec![may_be[0], by_node("203.0.113.11"), may_be[2]],
                ),
                (pods(true, &["203.0.113.11"]), vec![by_node("203.0.113.11")]),
            ],
        ),
        (
            true,
            [(pods(true, &[]), vec![]), (pods(false, &[]), may_be)],
        ),
    ] {
        let mut entries = Entries::new([]).with_stated_addresses(stated);
        for (pods, mut wanted) in steps {
            wanted.push(("203.0.113.13", BY_POD));
            let what = format!("{stated}, {pods:?}");
            let served = Served::beside(&mut entries, &objects, pods);
            assert_eq!(served.says(), refused(&wanted), "{what}");
            let left = served.service("db").unwrap().external_ips.len();
            assert_eq!(left, 5 - wanted.len(), "{what}");
        }
    }
}

#[test]
fn an_entry_has_only_addresses_that_the_operator_admits() {
    let entry = db(json!({ "addresses": ["192.0.2.1", "198.51.100.7", "240.240.0.9"] }));
    let entries = load(&[entry, named("e", json!({}))]).snapshot.entries;
    let db = EntryName::new("shop", "db");
    let ranges = |ranges: &[&str]| ranges.iter().map(|range| range.parse().unwrap()).collect();
    for (admits, wanted) in [
        (
            ExternalIps::Any,
            &["192.0.2.1", "198.51.100.7", "240.240.0.9"][..],
        ),
        (
            ExternalIps::Within(ranges(&["192.0.2.0/24"])),
            &["192.0.2.1", "240.240.0.9"],
        ),
        (ExternalIps::Within(Vec::new()), &["240.240.0.9"]),
    ] {
        let mut admitted = Admitted::new(admits);
        let (served, changed) = admitted.take_entries(&entries);
        let addresses: Vec<_> = served[&db]
            .addresses
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(addresses, wanted);
        assert_eq!(served.len(), 2);
        let is_whole = wanted.len() == 3;
        assert_eq!(changed, !is_whole);
        let said: Vec<_> = admitted.problems().collect();
        assert_eq!(said.len(), usize::from(!is_whole));
        assert!(
            said.iter()
                .all(|p| p.place == "ServiceEntry shop/db" && p.text.contains("198.51.100.7"))
        );
        // Reported as long as the addresses are there.
        assert!(!admitted.take_entries(&entries).1);
    }
}

/// Endpoints count once for each port, as in the tables and in the agent's memory.
#[test]
fn a_namespace_has_a_bound_on_endpoints_at_ports() {
    let large = |name: &str| {
        let ports =
            (1..=200).map(|n| json!({ "number": n, "name": format!("p{n}"), "protocol": "TCP" }));
        let endpoints =
            (0..300).map(|n| json!({ "address": format!("198.51.{}.{}", n / 200, n % 200) }));
        let fields = json!({
            "ports": ports.collect::<Vec<_>>(),
            "endpoints": endpoints.collect::<Vec<_>>(),
        });
        named(name, fields)
    };
    let mut other = named("c", json!({}));
    other["metadata"]["namespace"] = json!("bank");
    let served = Served::of(&[large("a"), large("b"), other]);
    let said = served.says();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("namespace shop have more than 100000 endpoints"),
        "{said:?}"
    );
    let of = |name: &str| served.service(name).map(|s| s.ports[0].endpoints.len());
    let mut counts = [of("a"), of("b")];
    counts.sort_unstable();
    // The host keeps its addresses, so that connections are refused and do not go elsewhere.
    assert_eq!(counts, [Some(0), Some(300)]);
    assert_eq!(Served::of(&[large("b")]).says(), [""; 0]);
}

/// A range, which is a text of 20 bytes, has 256 addresses, each at every port.
#[test]
fn a_namespace_has_a_bound_on_addresses_at_ports() {
    let large = |name: &str, second: u32| {
        let range = |third: u32| format!("11.{second}.{third}.0/24");
        let addresses: Vec<_> = (0..250).map(range).collect();
        named(name, json!({ "addresses": addresses }))
    };
    let mut other = named("c", json!({}));
    other["metadata"]["namespace"] = json!("bank");
    let served = Served::of(&[large("a", 1), large("b", 2), other]);
    let said = served.says();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("namespace shop have more than 100000 addresses"),
        "{said:?}"
    );
    let of = |name: &str| served.service(name).map(|s| s.external_ips.len());
    let mut counts = [of("a"), of("b")];
    counts.sort_unstable();
    assert_eq!(
        counts,
        [None, Some(64_000)],
        "one as a whole, and one not at all"
    );
    assert_eq!(Served::of(&[large("b", 2)]).says(), [""; 0]);
}

/// An older Service's external IP does not take an address that this node assigned to a host.
#[test]
fn a_service_takes_no_address_that_a_host_was_given() {
    let mut entries = Entries::new([]);
    let served = Served::next(&mut entries, &[db(json!({}))]);
    let vip = served.vips("db").remove(0);
    let mut thief = web("10.96.0.1");
    thief["metadata"]["creationTimestamp"] = json!("2020-01-01T00:00:00Z");
    thief["spec"]["externalIPs"] = json!([vip]);
    thief["spec"]["ports"][0]["port"] = json!(5432);
    let served = Served::next(&mut entries, &[db(json!({})), thief]);
    let mut planner = Planner::new();
    planner.plan(&served.snapshot);
    let conflicts: Vec<_> = planner.served().conflicts().collect();
    assert_eq!(conflicts.len(), 1);
    let entry = service_name(&EntryName::new("shop", "db"));
    assert_eq!(conflicts[0].winner, entry);
}

/// An entry does not get an address that this node assigned to another entry, even if it names the address and is
/// older.
#[test]
fn an_entry_takes_no_address_that_another_was_given() {
    let mut entries = Entries::new([]);
    let served = Served::next(&mut entries, &[db(json!({}))]);
    let vip = served.vips("db").remove(0);
    let mut thief = named("thief", json!({ "addresses": [vip] }));
    thief["metadata"]["creationTimestamp"] = json!("2020-01-01T00:00:00Z");
    let served = Served::next(&mut entries, &[db(json!({})), thief]);
    let mut planner = Planner::new();
    planner.plan(&served.snapshot);
    let conflicts: Vec<_> = planner.served().conflicts().collect();
    assert_eq!(conflicts.len(), 1);
    assert_eq!(
        conflicts[0].winner,
        service_name(&EntryName::new("shop", "db"))
    );
}

#[test]
fn entries_are_seen_where_they_are_exported_to() {
    let seen = |export_to: Value| {
        let entry = db(json!({ "exportTo": export_to }));
        let served = Served::of(&[entry]);
        assert!(served.problems.is_empty());
        let entry = &served.snapshot.entries[&EntryName::new("shop", "db")];
        ["shop", "web"].map(|namespace| entry.is_visible_in(namespace))
    };
    assert_eq!(seen(json!(null)), [true, true]);
    assert_eq!(seen(json!(["*"])), [true, true]);
    assert_eq!(seen(json!(["."])), [true, false]);
    assert_eq!(seen(json!(["web"])), [false, true]);
    assert_eq!(seen(json!(["~"])), [false, false]);
    // One set of tables serves all namespaces.
    let entry = db(json!({ "exportTo": ["."], "addresses": ["203.0.113.1"] }));
    let served = Served::of(&[entry]);
    assert!(
        served.says()[0]
            .starts_with("spec.addresses: not served, because spec.exportTo names namespaces")
    );
    assert!(served.service("db").is_none());
    let entry = &served.snapshot.entries[&EntryName::new("shop", "db")];
    assert!(matches!(entry.export_to, ExportTo::Namespaces(_)));
}

/// Only identities count, and at most 64.
#[test]
fn an_entry_has_the_identities_that_its_endpoints_may_have() {
    let identities = |names: &[String]| {
        let served = Served::of(&[db(json!({ "subjectAltNames": names }))]);
        let entry = &served.snapshot.entries[&EntryName::new("shop", "db")];
        assert_eq!(entry.identities, served.service("db").unwrap().identities);
        (entry.identities.len(), served.says())
    };
    let named = |n| format!("spiffe://cluster.local/ns/shop/sa/a{n}");
    let given = [
        &named(1),
        "db.example.com",
        "spiffe://db",
        &named(0),
        &named(1),
    ];
    let (count, said) = identities(&given.map(str::to_owned));
    assert_eq!((count, said.len()), (2, 1), "{said:?}");
    assert!(
        said[0].starts_with("spec.subjectAltNames[2]: no effect: "),
        "{said:?}"
    );
    let many: Vec<_> = (0..70).map(named).collect();
    let (count, said) = identities(&many);
    assert_eq!((count, said.len()), (64, 1), "{said:?}");
}

/// Returns an entry with endpoints by name, and further fields.
fn by_name(fields: Value) -> Value {
    let mut entry = db(json!({ "resolution": "DNS", "endpoints": null }));
    if let Value::Object(fields) = fields {
        for (field, value) in fields {
            entry["spec"][field] = value;
        }
    }
    entry
}

fn learn(entries: &mut Entries, name: &str, addresses: &[&str], problem: Option<&str>) {
    let name = EndpointName {
        namespace: "shop".into(),
        name: name.into(),
    };
    let resolved = Resolved {
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        problem: problem.map(Into::into),
    };
    entries.learn([(name, resolved)]);
}

fn wanted(entries: &mut Entries) -> Option<Vec<String>> {
    let names = entries.take_wanted_names()?;
    Some(
        names
            .iter()
            .map(|name| format!("{}/{name}", name.namespace))
            .collect(),
    )
}

#[test]
fn a_host_without_endpoints_is_its_own() {
    let mut entries = Entries::new([]).with_names(HashMap::new());
    let objects = [by_name(json!({}))];
    let before = Served::next(&mut entries, &objects);
    assert_eq!(wanted(&mut entries).unwrap(), ["shop/db.example.com"]);
    assert_eq!(wanted(&mut entries), None);
    // Until the name is looked up, connections to its future addresses are refused.
    assert!(before.endpoints("db").is_empty() && before.problems.is_empty());
    let vips = before.vips("db");
    assert_eq!(vips.len(), 2);
    learn(
        &mut entries,
        "db.example.com",
        &["198.51.100.1", "198.51.100.2"],
        None,
    );
    let served = Served::next(&mut entries, &objects);
    assert_eq!(
        served.endpoints("db"),
        ["198.51.100.1:5432", "198.51.100.2:5432"]
    );
    assert_eq!(served.vips("db"), vips[..1], "it has IPv4 only");
    // A problem with the name is reported, and its addresses stay.
    learn(
        &mut entries,
        "db.example.com",
        &["198.51.100.1"],
        Some("no resolver"),
    );
    let served = Served::next(&mut entries, &objects);
    assert_eq!(served.endpoints("db"), ["198.51.100.1:5432"]);
    assert_eq!(served.says(), ["spec.hosts: db.example.com: no resolver"]);
    // Names that no entry needs are forgotten.
    Served::next(&mut entries, &[]);
    assert_eq!(wanted(&mut entries).unwrap(), [""; 0]);
    let served = Served::next(&mut entries, &objects);
    assert!(served.endpoints("db").is_empty());
    assert_eq!(served.vips("db"), vips);
}

#[test]
fn an_agent_begins_with_the_addresses_that_the_one_before_knew() {
    let name = EndpointName {
        namespace: "shop".into(),
        name: "db.example.com".into(),
    };
    let known = Resolved {
        addresses: [ip("198.51.100.9")].into(),
        problem: None,
    };
    let mut entries = Entries::new([]).with_names(HashMap::from([(name, known)]));
    let served = Served::next(&mut entries, &[by_name(json!({}))]);
    assert_eq!(served.endpoints("db"), ["198.51.100.9:5432"]);
}

#[test]
fn the_addresses_of_a_name_share_its_part() {
    let mut entries = Entries::new([]).with_names(HashMap::new());
    let objects = [by_name(json!({ "endpoints": [
        { "address": "a.example.com", "weight": 3, "ports": { "pg": 1 } },
        { "address": "198.51.100.9", "weight": 1 },
        { "address": "b.example.com", "weight": 1 },
    ] }))];
    Served::next(&mut entries, &objects);
    assert_eq!(
        wanted(&mut entries).unwrap(),
        ["shop/a.example.com", "shop/b.example.com"]
    );
    learn(
        &mut entries,
        "a.example.com",
        &["192.0.2.1", "192.0.2.2"],
        None,
    );
    let served = Served::next(&mut entries, &objects);
    // The addresses of b are not known yet.
    assert_eq!(
        served.endpoints("db"),
        ["192.0.2.1:1*3", "192.0.2.2:1*3", "198.51.100.9:5432*2"]
    );
    learn(&mut entries, "b.example.com", &["198.51.100.8"], None);
    let served = Served::next(&mut entries, &objects);
    assert_eq!(
        served.endpoints("db"),
        [
            "192.0.2.1:1*3",
            "192.0.2.2:1*3",
            "198.51.100.8:5432*2",
            "198.51.100.9:5432*2"
        ]
    );
    assert_eq!(served.vips("db").len(), 1);
}

#[test]
fn each_host_that_is_its_own_endpoint_has_its_own_service() {
    let mut entries = Entries::new([]).with_names(HashMap::new());
    let two = |more: Value| {
        let mut fields = json!({ "hosts": ["a.example.com", "b.example.com"] });
        for (field, value) in more.as_object().unwrap() {
            fields[field] = value.clone();
        }
        [by_name(fields)]
    };
    Served::next(&mut entries, &two(json!({})));
    learn(&mut entries, "a.example.com", &["192.0.2.1"], None);
    learn(&mut entries, "b.example.com", &["2001:db8::2"], None);
    let served = Served::next(&mut entries, &two(json!({})));
    let endpoints = ["db", "db:b.example.com"].map(|name| served.endpoints(name));
    assert_eq!(
        endpoints,
        [vec!["192.0.2.1:5432"], vec!["2001:db8::2:5432"]]
    );
    let vips: Vec<IpAddr> = served.vips("db").iter().map(|text| ip(text)).collect();
    assert!(
        vips.len() == 2 && vips[0].is_ipv4() && vips[1].is_ipv6(),
        "{vips:?}"
    );
    assert!(served.service("db").unwrap().cluster_ips.contains(&vips[0]));
    assert!(
        served
            .service("db:b.example.com")
            .unwrap()
            .cluster_ips
            .contains(&vips[1])
    );
    // Addresses of the entry itself lead to the first host.
    let served = Served::next(&mut entries, &two(json!({ "addresses": ["203.0.113.1"] })));
    assert_eq!(
        served.service("db").unwrap().external_ips[..],
        [ip("203.0.113.1")]
    );
    let former = served.service("db:b.example.com").unwrap();
    assert!(former.external_ips.is_empty());
    assert!(former.cluster_ips.contains(&vips[1]));
    assert!(
        served.says()[0].contains("the first host only"),
        "{:?}",
        served.says()
    );
    let addresses = json!({ "addresses": ["203.0.113.1"] });
    let served = Served::at(&mut entries, &two(addresses), NOW + 600);
    assert!(served.service("db:b.example.com").is_none());
    assert_eq!(served.snapshot.services.len(), 1);
    Served::next(&mut entries, &[]);
    assert!(Served::next(&mut entries, &[]).snapshot.services.is_empty());
}

#[test]
fn who_resolves_no_names_says_so() {
    let served = Served::of(&[by_name(json!({}))]);
    assert!(
        served.says()[0].contains("only the agent resolves names"),
        "{:?}",
        served.says()
    );
    assert_eq!(served.vips("db").len(), 2);
    let addresses = json!({ "resolution": "DNS" });
    assert_eq!(
        Served::of(&[db(addresses)]).endpoints("db"),
        ["198.51.100.1:5432"]
    );
}

#[test]
fn an_entry_without_ports_needs_no_name() {
    let mut entries = Entries::new([]).with_names(HashMap::new());
    Served::next(&mut entries, &[by_name(json!({ "ports": [] }))]);
    assert_eq!(wanted(&mut entries), None);
}

#[test]
fn many_names_with_problems_are_few_lines() {
    let hosts: Vec<String> = (0..100).map(|n| format!("a{n:02}.example.com")).collect();
    let served = Served::of(&[by_name(json!({ "hosts": hosts }))]);
    let says = served.says();
    assert_eq!(says.len(), 5, "{says:?}");
    assert_eq!(says[4], "and 96 more names of endpoints");
}

#[test]
fn names_count_as_the_addresses_that_they_may_have() {
    let names = |count: usize| {
        let endpoints: Vec<Value> = (0..count)
            .map(|n| json!({ "address": format!("a{n}.example.com") }))
            .collect();
        by_name(json!({ "endpoints": endpoints }))
    };
    // Each name counts as 16 endpoints.
    let served = Served::of(&[names(6250)]);
    assert!(!served.says().iter().any(|text| text.contains("more than")));
    let served = Served::of(&[names(6251)]);
    assert!(served.says().iter().any(|text| text.contains("more than")));
}

#[test]
fn a_selector_selects_of_manifests_too() {
    let workload = |name: &str, address: &str, labels: Value| {
        json!({
            "apiVersion": "networking.istio.io/v1beta1", "kind": "WorkloadEntry",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": { "address": address, "labels": labels, "weight": 3, "ports": { "pg": 7432 } },
        })
    };
    let selecting = json!({ "endpoints": null, "workloadSelector": { "labels": { "app": "db" } } });
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "db-0", "namespace": "shop", "labels": { "app": "db" } },
        "spec": { "nodeName": "node2", "containers": [] },
        "status": { "podIP": "10.244.1.1", "conditions": [{ "type": "Ready", "status": "True" }] },
    });
    let served = Served::of(&[
        db(selecting),
        workload("vm", "192.0.2.1", json!({ "app": "db" })),
        workload("other", "192.0.2.2", json!({ "app": "web" })),
        workload("wrong", "127.0.0.1", json!({ "app": "db" })),
        pod,
    ]);
    assert_eq!(
        served.endpoints("db"),
        ["10.244.1.1:5432", "192.0.2.1:7432*3"]
    );
    assert_eq!(served.problems.len(), 1);
    assert!(
        served.problems[0]
            .place
            .ends_with("WorkloadEntry shop/wrong")
    );
}

#[test]
fn each_version_is_read_and_others_are_not() {
    for version in ["v1", "v1beta1", "v1alpha3"] {
        let mut entry = db(json!({}));
        entry["apiVersion"] = json!(format!("networking.istio.io/{version}"));
        assert!(Served::of(&[entry]).service("db").is_some(), "{version}");
    }
    let mut entry = db(json!({}));
    entry["apiVersion"] = json!("example.com/v1");
    let loaded = load(&[entry]);
    assert_eq!(
        loaded.ignored.keys().collect::<Vec<_>>(),
        ["ServiceEntry.example.com"]
    );
}

#[test]
fn addresses_stay_over_a_restart_whatever_else_changes() {
    let all: Vec<Value> = (0..300)
        .map(|n| named(&format!("e{n}"), json!({})))
        .collect();
    let mut first = Entries::new([]);
    let before = Served::next(&mut first, &all);
    let mut second = Entries::new(first.records());
    let after = Served::next(&mut second, &all[1..]);
    for n in 1..300 {
        let name = format!("e{n}");
        assert_eq!(before.vips(&name), after.vips(&name));
    }
    // The same holds for the host that was removed for a moment.
    let again = Served::next(&mut second, &all);
    assert_eq!(before.vips("e0"), again.vips("e0"));
}

/// A change of one entry among thousands is one change of the snapshot's services.
#[test]
fn what_did_not_change_is_shared() {
    let all: Vec<Value> = (0..50)
        .map(|n| named(&format!("e{n}"), json!({})))
        .collect();
    let mut entries = Entries::new([]);
    let mut manifests = unread();
    let before = then_load(&mut manifests, &all).snapshot;
    let first = entries.take(&before.entries, &before.services, &before, NOW);
    let mut others = all.clone();
    others[7] = named(
        "e7",
        json!({ "endpoints": [{ "address": "198.51.100.9" }] }),
    );
    let after = then_load(&mut manifests, &others).snapshot;
    let second = entries.take(&after.entries, &after.services, &after, NOW);
    assert_eq!(first.services.diff(&second.services).count(), 1);
    assert_eq!(second.records, []);
    let third = entries.take(&after.entries, &after.services, &after, NOW);
    assert_eq!(second.services.diff(&third.services).count(), 0);
}

/// The output in docs/service-entries.md for examples/service-entry.yaml.
#[test]
fn the_address_in_the_docs_is_the_one_that_the_example_gets() {
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/service-entry.yaml"
    );
    let page = include_str!("../../../../docs/service-entries.md");
    let node = Node::default();
    let loaded = manifests::load(&[example.into()], &node).unwrap();
    let snapshot = loaded.snapshot;
    let taken = Entries::new([]).take(&snapshot.entries, &snapshot.services, &snapshot, NOW);
    let service = &taken.services[&service_name(&EntryName::new("shop", "orders-db"))];
    let shown = format!(
        "shop/serviceentry:orders-db  {}:5432/tcp",
        service.cluster_ips[0]
    );
    assert!(page.contains(&shown), "{shown}");
}
