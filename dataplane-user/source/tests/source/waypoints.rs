//! Which waypoint a service or a Pod has, from manifests to the decision.

use std::fmt::Write as _;

use dataplane_source::{View, manifests};
use model::{Istio, Node, ServiceName, Waypoint, WorkloadName};
use serde_json::{Map, Value, json};

/// Makes an object of `KIND/NAMESPACE/NAME`, or `Namespace/NAME`, with labels such as `use-waypoint=gate`.
fn object(text: &str) -> Value {
    let mut words = text.split_whitespace();
    let mut parts = words.next().unwrap().split('/');
    let (kind, first) = (parts.next().unwrap(), parts.next().unwrap());
    let (namespace, name) = match parts.next() {
        Some(name) => (first, name),
        None => ("", first),
    };
    let labels = words.map(|word| {
        let (key, value) = word.split_once('=').unwrap();
        let key = match key {
            "use-waypoint" | "use-waypoint-namespace" | "waypoint-for" => format!("istio.io/{key}"),
            "managed" => "gateway.istio.io/managed".to_owned(),
            key => key.to_owned(),
        };
        (key, Value::from(value))
    });
    let labels: Map<String, Value> = labels.collect();
    let (version, spec) = match kind {
        "Service" => (
            "v1",
            json!({ "clusterIP": if namespace == "shop" { "10.96.0.1" } else { "10.96.0.2" }, "ports": [{ "port": 80 }] }),
        ),
        "Pod" => ("v1", json!({ "nodeName": "there" })),
        "Namespace" => ("v1", json!({})),
        _ => ("gateway.networking.k8s.io/v1", json!({})),
    };
    let status = match kind {
        "Pod" => json!({ "podIPs": [{ "ip": "10.0.0.1" }] }),
        _ => json!({}),
    };
    json!({
        "apiVersion": version, "kind": kind, "spec": spec, "status": status,
        "metadata": { "namespace": namespace, "name": name, "labels": labels },
    })
}

/// Makes the Gateway `shop/gate`, with these labels, and with `allowedRoutes` of its listener for HBONE.
fn gate(labels: &str, allowed: &Value, addresses: &Value) -> Value {
    let mut gateway = object(&format!("Gateway/shop/gate {labels}"));
    let other = json!({ "name": "http", "port": 80, "protocol": "HTTP", "allowedRoutes": { "namespaces": { "from": "All" } } });
    let mut listener = json!({ "name": "mesh", "port": 15008, "protocol": "HBONE" });
    if !allowed.is_null() {
        listener["allowedRoutes"] = json!({ "namespaces": allowed });
    }
    gateway["spec"]["listeners"] = json!([other, listener]);
    gateway["status"]["addresses"] = addresses.clone();
    gateway
}

fn view(objects: &[Value]) -> View {
    let mut text = String::new();
    for object in objects {
        writeln!(text, "---\n{object}").unwrap();
    }
    let node = Node {
        name: "here".into(),
        ..Node::default()
    };
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let loaded = manifests::load(&[file.path().to_owned()], &node);
    loaded.unwrap_or_else(|errors| panic!("{errors}")).view
}

/// Returns the waypoints of the service `shop/web`, of the Pod `shop/app`, and of `other/web`.
fn found(objects: &[Value]) -> String {
    let view = view(objects);
    let istio = Istio {
        waypoints: true,
        ..view.istio
    };
    let shown = |waypoint: Option<Waypoint<'_>>| match waypoint {
        None => "-".to_owned(),
        Some(Waypoint {
            name,
            gateway: Ok(_),
        }) => name.to_string(),
        Some(Waypoint {
            name,
            gateway: Err(why),
        }) => format!("{name}:{why:?}"),
    };
    let service = |namespace| {
        let name = ServiceName::new(namespace, "web");
        view.services
            .get(&name)
            .and_then(|of| istio.waypoint_of_service(of))
    };
    let pod = view
        .workloads
        .get(&WorkloadName::new("shop", "app"))
        .unwrap();
    let all = [
        service("shop"),
        istio.waypoint_of_workload(pod),
        service("other"),
    ];
    all.map(shown).join(" ")
}

fn usable() -> Value {
    json!([{ "type": "IPAddress", "value": "10.96.0.99" }])
}

/// Each case has labels of the namespace, the service, the Pod and the Gateway, and the waypoints of the service and of the
/// Pod.
#[test]
fn an_object_has_the_waypoint_that_it_names_or_that_its_namespace_names() {
    let cases = "
        | | | => - -
        use-waypoint=gate | | | => shop/gate -
        use-waypoint=gate | | | waypoint-for=service => shop/gate -
        use-waypoint=gate | | | waypoint-for=workload => - shop/gate
        use-waypoint=gate | | | waypoint-for=all => shop/gate shop/gate
        use-waypoint=gate | | | waypoint-for=none => - -
        use-waypoint=gate | | | waypoint-for=later => shop/gate shop/gate
        use-waypoint=gate | use-waypoint=none | use-waypoint=none | waypoint-for=all => - -
        use-waypoint=gate | use-waypoint=lost | | waypoint-for=all => shop/lost:Missing shop/gate
        use-waypoint=none | use-waypoint=gate | use-waypoint=gate | waypoint-for=all => shop/gate shop/gate
        | use-waypoint=gate | | waypoint-for=all => shop/gate -
        | | use-waypoint=gate | waypoint-for=all => - shop/gate
        use-waypoint=lost | | | => shop/lost:Missing shop/lost:Missing
        use-waypoint=gate use-waypoint-namespace=far | | | => far/gate:Missing far/gate:Missing
        | use-waypoint=gate use-waypoint-namespace=shop | | => shop/gate -
        use-waypoint=gate | use-waypoint= | use-waypoint= | waypoint-for=all => shop/gate shop/gate
        use-waypoint-namespace=shop | | | waypoint-for=all => - -
        use-waypoint=gate | managed=istio.io-mesh-controller | managed=istio.io-mesh-controller | waypoint-for=all => - -";
    for case in cases.lines().skip(1) {
        let (given, wanted) = case.split_once("=> ").unwrap();
        let [namespace, service, pod, gateway] = &given.split('|').collect::<Vec<_>>()[..] else {
            panic!("{case}")
        };
        let objects = [
            object(&format!("Namespace/shop {namespace}")),
            object(&format!("Service/shop/web {service}")),
            object(&format!("Pod/shop/app {pod}")),
            gate(gateway, &Value::Null, &usable()),
        ];
        assert_eq!(found(&objects), format!("{wanted} -"), "{case}");
    }
}

/// A Gateway without an address, or whose listener does not allow the namespace, is no way.
#[test]
fn a_gateway_is_used_as_far_as_its_listener_allows_and_at_its_addresses() {
    let selector = |key: &str, operator: &str, values: Value| {
        let expression = json!({ "key": key, "operator": operator, "values": values });
        json!({ "from": "Selector", "selector": { "matchExpressions": [expression] } })
    };
    let labels = |labels| json!({ "from": "Selector", "selector": { "matchLabels": labels } });
    let (own, both) = (["shop/gate", "shop/gate:NotAllowed"], ["shop/gate"; 2]);
    let (none, other) = (
        ["shop/gate:NotAllowed"; 2],
        ["shop/gate:NotAllowed", "shop/gate"],
    );
    for (allowed, wanted) in [
        (json!(null), own),
        (json!({}), own),
        (json!({ "from": "Same" }), own),
        (json!({ "from": "All" }), both),
        (json!({ "from": "None" }), none),
        (json!({ "from": "Later" }), none),
        (json!({ "from": "Selector" }), none),
        (json!({ "from": "Selector", "selector": {} }), both),
        (labels(json!({ "team": "b" })), other),
        (
            labels(json!({ "team": "b", "kubernetes.io/metadata.name": "shop" })),
            none,
        ),
        (
            labels(json!({ "kubernetes.io/metadata.name": "other" })),
            other,
        ),
        (selector("team", "In", json!(["a", "b"])), other),
        (selector("team", "NotIn", json!(["b"])), own),
        (selector("team", "Exists", json!(null)), other),
        (selector("team", "DoesNotExist", json!(null)), own),
        (selector("team", "Later", json!(["b"])), none),
    ] {
        let objects = [
            object("Namespace/shop use-waypoint=gate"),
            object("Namespace/other use-waypoint=gate use-waypoint-namespace=shop team=b"),
            object("Service/shop/web"),
            object("Service/other/web"),
            object("Pod/shop/app"),
            gate("", &allowed, &usable()),
        ];
        let [shop, other] = wanted;
        assert_eq!(found(&objects), format!("{shop} - {other}"), "{allowed}");
    }
    for (addresses, is_usable) in [
        (usable(), true),
        (json!([{ "value": "fd00::1" }]), true),
        (
            json!([{ "type": "Hostname", "value": "gate.shop.svc.cluster.local" }]),
            true,
        ),
        (
            json!([{ "type": "Hostname", "value": "gate.example.com" }]),
            false,
        ),
        (
            json!([{ "type": "NamedAddress", "value": "10.96.0.99" }]),
            false,
        ),
        (json!([{ "value": "nowhere" }]), false),
        (json!([]), false),
        (json!(null), false),
    ] {
        let objects = [
            object("Namespace/shop use-waypoint=gate"),
            object("Service/shop/web"),
            object("Pod/shop/app"),
            gate("", &Value::Null, &addresses),
        ];
        let wanted = if is_usable {
            "shop/gate"
        } else {
            "shop/gate:NoAddress"
        };
        assert_eq!(found(&objects), format!("{wanted} - -"), "{addresses}");
    }
}

/// The binding of the Gateway counts before that of its class, and names the listener whose `allowedRoutes` count. Each case has
/// the annotations of the Gateway and of the class, the binding, and whether another namespace may use the Gateway.
#[test]
fn a_gateway_or_its_class_says_how_its_pods_take_streams() {
    let cases = "
        - - => None no
        PROXY/15088 - => PROXY/15088 yes
        PROXY - => PROXY yes
        NONE/15088 - => NONE/15088 yes
        NONE - => NONE no
        PROXY/1 - => PROXY/1 no
        - PROXY/15088 => PROXY/15088 yes
        NONE PROXY/15088 => NONE no
        later PROXY/15088 => None no
        PROXY/ - => None no
        PROXY/0 - => None no
        PROXY/15088/ - => None no
        PROXY/65536 - => None no
        PROXY/15008 - => None no
        proxy/15088 - => None no
        - later => None no";
    for case in cases.lines().skip(1) {
        let (given, wanted) = case.split_once(" => ").unwrap();
        let (own, of_class) = given.trim().split_once(' ').unwrap();
        let annotated = |mut object: Value, binding: &str| {
            if binding != "-" {
                object["metadata"]["annotations"] =
                    json!({ "ambient.istio.io/waypoint-inbound-binding": binding });
            }
            object
        };
        let mut gateway = annotated(gate("", &Value::Null, &usable()), own);
        gateway["spec"]["gatewayClassName"] = "sandwich".into();
        let listeners = gateway["spec"]["listeners"].as_array_mut().unwrap();
        listeners.push(json!({
            "name": "proxy", "port": 15088, "protocol": "istio.io/PROXY",
            "allowedRoutes": { "namespaces": { "from": "All" } },
        }));
        let class = annotated(object("GatewayClass/sandwich"), of_class);
        let mut pod = object("Pod/shop/app gateway.networking.k8s.io/gateway-name=gate");
        pod["spec"]["nodeName"] = "here".into();
        let objects = [
            object("Namespace/other use-waypoint=gate use-waypoint-namespace=shop"),
            object("Service/other/web"),
            pod,
            gateway,
            class,
        ];
        let view = view(&objects);
        let pod = &view.workloads[&WorkloadName::new("shop", "app")];
        let binding = view.istio.bound(pod).map(|(gateway, of)| {
            assert_eq!(gateway.to_string(), "shop/gate");
            let word = if of.has_header { "PROXY" } else { "NONE" };
            let port = of.port.map(|port| format!("/{port}"));
            format!("{word}{}", port.unwrap_or_default())
        });
        let is_allowed = found(&objects).ends_with(" shop/gate");
        let binding = binding.as_deref().unwrap_or("None");
        let is_allowed = if is_allowed { "yes" } else { "no" };
        assert_eq!(format!("{binding} {is_allowed}"), wanted, "{case}");
    }
}
