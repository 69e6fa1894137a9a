//! The meaning of fields: Kubernetes' defaults, and kube-proxy's interpretation.

use dataplane_source::manifests::{self, Errors, Loaded};
use model::{
    Endpoint, Gravity, Node, Service, ServiceName, TrafficPolicy, UseWaypoint, WorkloadName,
};

fn load(text: &str) -> Loaded {
    try_load(text).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

fn try_load(text: &str) -> Result<Loaded, Errors> {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let node = Node {
        name: "node1".into(),
        addresses: Vec::new(),
        ..Node::default()
    };
    manifests::load(&[file.path().to_owned()], &node)
}

fn web(loaded: &Loaded) -> &Service {
    &loaded.snapshot.services[&ServiceName::new("default", "web")]
}

/// A service `web` with these fields of `spec`, and any further text.
fn service(fields: &str) -> String {
    let fields = fields.trim_matches('\n').replace('\n', "\n  ");
    format!("apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec:\n  {fields}\n")
}

/// A slice of `web`, with these endpoints and ports.
fn slice(name: &str, endpoints: &[&str], ports: &str) -> String {
    let endpoints: Vec<_> = endpoints.iter().map(|e| format!("- {{{e}}}\n")).collect();
    let endpoints = endpoints.concat();
    format!(
        "---\naddressType: IPv4\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: \
         {{name: {name}, labels: {{kubernetes.io/service-name: web}}}}\nendpoints:\n{endpoints}\
         ports: [{ports}]\n"
    )
}

const PORT_80: &str = "clusterIP: 10.96.0.1\nports: [{port: 80}]";

/// Returns the endpoints of a service's port as `address:port` with letters: local, ready, serving, terminating.
fn endpoints(service: &Service, port: usize) -> Vec<String> {
    let letter = |is: bool, letter: char| if is { letter } else { '-' };
    let show = |e: &Endpoint| {
        format!(
            "{}:{} {}{}{}{}",
            e.addr,
            e.port,
            letter(e.local, 'h'),
            letter(e.ready, 'r'),
            letter(e.serving, 's'),
            letter(e.terminating, 't')
        )
    };
    service.ports[port].endpoints.iter().map(show).collect()
}

#[test]
fn conditions_that_are_not_known() {
    let loaded = load(
        &(service(PORT_80)
            + &slice(
                "web-1",
                &[
                    "addresses: [10.0.0.1]",
                    "addresses: [10.0.0.2], conditions: {}",
                    "addresses: [10.0.0.3], conditions: {ready: null, serving: null}",
                    "addresses: [10.0.0.4], conditions: {ready: false}",
                    "addresses: [10.0.0.5], conditions: {ready: false, serving: true, terminating: \
                     true}",
                    "addresses: [10.0.0.6], conditions: {terminating: true}",
                    "addresses: [10.0.0.7], nodeName: node1",
                    "addresses: [10.0.0.8, 10.0.0.9], nodeName: node2",
                ],
                "{port: 8080}",
            )),
    );
    assert_eq!(
        endpoints(web(&loaded), 0),
        [
            "10.0.0.1:8080 -rs-",
            "10.0.0.2:8080 -rs-",
            "10.0.0.3:8080 -rs-",
            "10.0.0.4:8080 --s-",
            "10.0.0.5:8080 --st",
            "10.0.0.6:8080 -rst",
            "10.0.0.7:8080 hrs-",
            "10.0.0.8:8080 -rs-",
        ]
    );
}

#[test]
fn ports_are_joined_by_name_and_protocol() {
    let spec = "clusterIP: 10.96.0.1\nports:\n- {name: dns, port: 53, protocol: UDP}\n\
                - {name: dns-tcp, port: 53}\n- {name: other, port: 99}\n";
    let loaded = load(
        &(service(spec)
            + &slice(
                "web-1",
                &["addresses: [10.0.0.1]"],
                "{name: dns, port: 5353, protocol: UDP}, {name: dns-tcp, port: 5454}, {name: \
                 other}, {name: stranger, port: 1}, {name: dns, port: 7}",
            )
            // Another slice may have another number for one port of the service.
            + &slice(
                "web-2",
                &["addresses: [10.0.0.2]"],
                "{name: dns, port: 53, protocol: UDP}, {name: other, port: 5, protocol: UDP}",
            )),
    );
    let web = web(&loaded);
    assert_eq!(
        endpoints(web, 0),
        ["10.0.0.1:5353 -rs-", "10.0.0.2:53 -rs-"]
    );
    assert_eq!(endpoints(web, 1), ["10.0.0.1:5454 -rs-"]);
    // A port without a number, or of another protocol, gets no endpoint.
    assert!(endpoints(web, 2).is_empty());
}

#[test]
fn an_endpoint_in_two_slices_is_one() {
    let ready = "addresses: [10.0.0.1], nodeName: node1, conditions: {ready: true}";
    let leaving =
        "addresses: [10.0.0.1], conditions: {ready: false, serving: true, terminating: true}";
    for (a, b) in [(ready, leaving), (leaving, ready)] {
        let slices = slice("web-1", &[a], "{port: 8080}") + &slice("web-2", &[b], "{port: 8080}");
        let loaded = load(&(service(PORT_80) + &slices));
        assert_eq!(endpoints(web(&loaded), 0), ["10.0.0.1:8080 hrs-"]);
    }
}

#[test]
fn defaults() {
    let loaded = load(&service(PORT_80));
    let web = web(&loaded);
    assert_eq!(web.affinity, None);
    assert_eq!(web.internal_policy, TrafficPolicy::Cluster);
    assert_eq!(web.created, None);
    assert!(web.ports[0].endpoints.is_empty());
    let loaded = load(&service(&format!("{PORT_80}\nsessionAffinity: ClientIP")));
    assert_eq!(
        self::web(&loaded).affinity,
        Some(std::time::Duration::from_hours(3))
    );
}

#[test]
fn what_has_no_cluster_ip() {
    for spec in [
        "clusterIP: None\nports: [{port: 80}]",
        "clusterIP: None\nclusterIPs: [None]",
        "type: ExternalName\nexternalName: example.com",
    ] {
        let loaded = load(&service(spec));
        assert!(web(&loaded).cluster_ips.is_empty(), "{spec}");
        assert!(loaded.snapshot.problems.is_empty(), "{spec}");
    }
    // A cluster IP that the API server has not assigned.
    let loaded = load(&service("ports: [{port: 80}]"));
    assert!(web(&loaded).cluster_ips.is_empty());
    assert!(
        loaded.snapshot.problems[0]
            .text
            .starts_with("spec.clusterIP: no cluster IP")
    );
}

#[test]
fn addresses_as_old_objects_have_them() {
    // The addresses of kube-proxy's TestBadIPs.
    let spec = "clusterIP: 172.030.000.041\nexternalIPs: [192.168.099.022]\n\
                loadBalancerSourceRanges: [\" 203.0.113.000/025 \", 10.1.2.3/8]\n\
                type: LoadBalancer\nports: [{port: 80, nodePort: 3001}]";
    let status = "status: {loadBalancer: {ingress: [{ip: 1.2.3.004}, {ip: 1.2.3.5, ipMode: \
                  Proxy}, {ip: 1.2.3.6, ipMode: VIP}, {hostname: lb.example.com}]}}\n";
    let loaded = load(
        &(service(spec) + status + &slice("web-1", &["addresses: [10.180.00.1]"], "{port: 8080}")),
    );
    let web = web(&loaded);
    let text = |ips: &[std::net::IpAddr]| ips.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(text(&web.cluster_ips), ["172.30.0.41"]);
    assert_eq!(text(&web.external_ips), ["192.168.99.22"]);
    assert_eq!(text(&web.load_balancer_ips), ["1.2.3.4", "1.2.3.6"]);
    let ranges: Vec<_> = web.source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["203.0.113.0/25", "10.0.0.0/8"]);
    assert_eq!(endpoints(web, 0), ["10.180.0.1:8080 -rs-"]);
}

#[test]
fn what_cannot_be_served_is_reported_and_the_rest_served() {
    let spec = "clusterIP: 10.96.0.1\nports:\n- {name: a, port: 80}\n- {name: b, port: 80, \
                protocol: SCTP}";
    let fqdn = slice(
        "web-2",
        &["addresses: [a.example.com]"],
        "{name: a, port: 1}",
    )
    .replace("addressType: IPv4", "addressType: FQDN");
    let loaded = load(
        &(service(spec)
            + &slice(
                "web-1",
                &["addresses: [10.0.0.1]"],
                "{name: a, port: 8080}, {name: b, port: 8080, protocol: SCTP}",
            )
            + &fqdn),
    );
    assert_eq!(web(&loaded).ports.len(), 1);
    assert_eq!(endpoints(web(&loaded), 0), ["10.0.0.1:8080 -rs-"]);
    let problems: Vec<_> = loaded
        .snapshot
        .problems
        .iter()
        .map(|problem| {
            let (_, object) = problem.place.split_once(": ").unwrap();
            format!("{object}: {}", problem.text)
        })
        .collect();
    assert_eq!(
        problems,
        [
            "EndpointSlice default/web-2: addressType: endpoints given by name (FQDN) are not \
             served, because only addresses are; use IPv4 or IPv6",
            "Service default/web: spec.ports[1]: SCTP port 80 is not served: only TCP and UDP are",
        ]
    );
}

#[test]
fn what_belongs_to_others_is_left_alone() {
    let other_proxy = "apiVersion: v1\nkind: Service\nmetadata: {name: theirs, labels: \
                       {service.kubernetes.io/service-proxy-name: other}}\n\
                       spec: {clusterIP: 10.96.0.9, ports: [{port: 80}]}\n";
    let their_slice = slice("theirs-1", &["addresses: [10.0.0.1]"], "{port: 8080}")
        .replace("service-name: web", "service-name: theirs");
    let headless = slice("gone-1", &["addresses: [10.0.0.1]"], "{port: 8080}").replace(
        "labels: {",
        "labels: {service.kubernetes.io/headless: \"\", ",
    );
    let marked = service(PORT_80).replace(
        "metadata: {name: web}",
        "metadata: {name: gone, labels: {service.kubernetes.io/headless: \"\"}}",
    );
    let loaded = load(&format!(
        "{other_proxy}{their_slice}{headless}---\n{marked}"
    ));
    // Such services have names, and nothing is served at an address.
    for service in loaded.snapshot.services.values() {
        assert!(service.cluster_ips.is_empty() && service.ports.is_empty());
        assert!(service.records.is_elsewhere());
    }
    assert_eq!(loaded.snapshot.services.len(), 2);
}

#[test]
fn other_kinds_are_counted() {
    let text = "apiVersion: v1\nkind: List\nitems:\n\
                - {apiVersion: v1, kind: Job, metadata: {name: a}, spec: {ports: 7}}\n\
                - {kind: Job, apiVersion: v1, metadata: {name: b}, spec: {ports: {}}}\n\
                - {spec: {type: 5}, kind: Service, apiVersion: serving.knative.dev/v1}\n\
                ---\napiVersion: v1\nkind: ConfigMap\ndata: {a: b}\n\
                ---\n# nothing but a comment\n";
    let loaded = load(text);
    assert_eq!(
        loaded.ignored_line().unwrap(),
        "ignored 4 objects of kinds that are not served here: Job (2), ConfigMap (1), \
         Service.serving.knative.dev (1)"
    );
    assert_eq!(
        load("{apiVersion: v1, kind: List, items: []}").ignored_line(),
        None
    );
}

/// As those of the API. A policy that nobody can name is a fault of all files.
#[test]
fn istios_objects_that_limit_connections() {
    let of = "apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, ";
    let gate = "labels: {istio.io/use-waypoint: gate}";
    let web = "spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}";
    let objects = [
        format!("apiVersion: v1, kind: Namespace, metadata: {{name: default, {gate}}}"),
        format!("apiVersion: v1, kind: Service, metadata: {{name: web, {gate}}}, {web}"),
        format!("{of}metadata: {{name: a}}, spec: {{action: DENY, rules: [{{}}]}}"),
        format!("{of}metadata: {{name: b}}, spec: {{selector: 5}}"),
    ];
    let objects = objects.map(|object| format!("---\n{{{object}}}\n"));
    let view = load(&objects.concat()).view;
    for (metadata, field) in [
        ("{}", "metadata.name"),
        ("{name: {}}", "metadata.name"),
        ("{name: a/b}", "metadata.name"),
        ("{name: a, namespace: []}", "metadata.namespace"),
        ("{name: a, namespace: a b}", "metadata.namespace"),
    ] {
        let errors = try_load(&format!("{{{of}metadata: {metadata}}}\n")).unwrap_err();
        assert!(errors.to_string().contains(field), "{errors}");
    }
    let of = &view.istio.namespaces["default"];
    let gate = UseWaypoint::Gateway(ServiceName::new("default", "gate"));
    assert_eq!(
        [of.waypoint.as_ref(), of.labels.get("Service web")],
        [Some(&gate); 2]
    );
    assert!(!view.istio.unread);
    let policies = of.policies.keys().map(|name| &**name);
    let wanted = ["AuthorizationPolicy a", "AuthorizationPolicy b"];
    assert!(policies.eq(wanted), "{of:?}");
    let problems = view.problems.iter();
    let fields = problems.filter_map(|problem| problem.text.split(':').next());
    let fields: Vec<&str> = fields.collect();
    assert_eq!(fields, ["spec.selector"]);
}

#[test]
fn the_order_of_keys_does_not_matter() {
    let item = "spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}, metadata: {name: web}";
    let slice = "ports: [{port: 8080}], endpoints: [{addresses: [10.0.0.1]}], addressType: IPv4, \
                 metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}";
    let core = "apiVersion: v1, kind:";
    for text in [
        format!(
            "---\n{{{item}, kind: Service, apiVersion: v1}}\n--- # the slice\n\
             {{{slice}, kind: EndpointSlice, apiVersion: discovery.k8s.io/v1}}\n"
        ),
        // In the API server's answers the items do not state their kind.
        format!(
            "{{{core} ServiceList, items: [{{{item}}}]}}\n---\n\
             {{kind: EndpointSliceList, apiVersion: discovery.k8s.io/v1, items: [{{{slice}}}]}}\n"
        ),
        format!(
            "{{items: [{{{item}}}], {core} ServiceList}}\n---\n\
             {{items: [{{{slice}}}], kind: EndpointSliceList, apiVersion: discovery.k8s.io/v1}}\n"
        ),
    ] {
        assert_eq!(
            endpoints(web(&load(&text)), 0),
            ["10.0.0.1:8080 -rs-"],
            "{text}"
        );
    }
}

/// A dump of a whole cluster has such slices. They are not a reason to stop.
#[test]
fn a_slice_of_no_service_is_a_warning_and_one_without_the_label_is_nothing() {
    let orphan = slice("gone-1", &["addresses: [10.0.0.9]"], "{port: 8080}")
        .replace("service-name: web", "service-name: gone");
    let stray = slice("stray-1", &["addresses: [10.0.0.8]"], "{port: 8080}")
        .replace("kubernetes.io/service-name: web", "a: b");
    let own = slice("web-1", &["addresses: [10.0.0.1]"], "{port: 8080}");
    let loaded = load(&(service(PORT_80) + &own + &orphan + &stray));
    assert_eq!(endpoints(web(&loaded), 0), ["10.0.0.1:8080 -rs-"]);
    let [problem] = &loaded.snapshot.problems[..] else {
        panic!("{:?}", loaded.snapshot.problems)
    };
    assert_eq!(problem.gravity, Gravity::Warning);
    let place = &problem.place;
    assert!(place.ends_with("EndpointSlice default/gone-1"), "{place}");
    let text = &problem.text;
    assert!(text.contains("there is no Service default/gone"), "{text}");
    // The Service may be deleted before its slices.
    let loaded = load(&(own + &orphan));
    assert!(loaded.snapshot.services.is_empty());
    assert_eq!(loaded.snapshot.problems.len(), 2);
}

#[test]
fn a_pod_has_the_identity_of_its_service_account_and_says_whether_it_speaks_hbone() {
    for (metadata, spec, account, speaks_hbone) in [
        ("", "{}", "default", false),
        ("", "{serviceAccountName: ''}", "default", false),
        ("", "{serviceAccountName: web}", "web", false),
        (
            "annotations: {ambient.istio.io/redirection: enabled}",
            "{}",
            "default",
            true,
        ),
        (
            "annotations: {ambient.istio.io/redirection: disabled}",
            "{}",
            "default",
            false,
        ),
        (
            "labels: {networking.istio.io/tunnel: http}",
            "{}",
            "default",
            true,
        ),
        (
            "labels: {networking.istio.io/tunnel: none}",
            "{}",
            "default",
            false,
        ),
        (
            "labels: {ambient.istio.io/redirection: enabled}",
            "{}",
            "default",
            false,
        ),
    ] {
        let loaded = load(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, namespace: shop, {metadata}}}\nspec: {spec}\n"
        ));
        let pod = &loaded.snapshot.workloads[&WorkloadName::new("shop", "web")];
        let identity = pod.identity("cluster.local").unwrap().to_string();
        assert_eq!(
            identity,
            format!("spiffe://cluster.local/ns/shop/sa/{account}")
        );
        assert_eq!(pod.speaks_hbone, speaks_hbone, "{metadata}");
    }
}
