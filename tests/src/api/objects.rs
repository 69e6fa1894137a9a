//! Objects as the API has them, with what makes them large there.

use std::net::IpAddr;

use serde_json::{Value, json};

/// The API's record of which client set which field: as large as the object itself, and of no use to the agent.
fn managed_fields(manager: &str) -> Value {
    json!([{
        "manager": manager, "operation": "Update", "apiVersion": "v1",
        "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
        "fieldsV1": { "f:metadata": { "f:labels": { ".": {}, "f:app": {}, "f:team": {} } },
            "f:spec": { "f:internalTrafficPolicy": {}, "f:ports": { ".": {},
            "k:{\"port\":80,\"protocol\":\"TCP\"}": { ".": {}, "f:name": {}, "f:port": {},
            "f:protocol": {}, "f:targetPort": {} } }, "f:selector": {}, "f:sessionAffinity": {},
            "f:type": {} } },
    }])
}

/// A service with a cluster IP and the TCP port 80, named `http`.
pub fn service(name: &str, ip: IpAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": name, "namespace": "default",
            "uid": "00000000-0000-4000-8000-000000000001",
            "labels": { "app": name, "team": "lab" },
            "annotations": { "meta.helm.sh/release-name": name,
                "meta.helm.sh/release-namespace": "default" },
            "managedFields": managed_fields("helm"),
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip],
            "ipFamilies": [family(ip)], "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": { "app": name },
            "ports": [{ "name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080 }],
        },
        "status": { "loadBalancer": {} },
    })
}

/// An endpoint: its address, and its node.
pub fn endpoint(ip: IpAddr, node: &str) -> Value {
    json!({
        "addresses": [ip],
        "conditions": { "ready": true, "serving": true, "terminating": false },
        "nodeName": node,
        "targetRef": { "kind": "Pod", "namespace": "default", "name": format!("pod-{ip}"),
            "uid": "00000000-0000-4000-8000-000000000002" },
        "zone": "zone-a",
    })
}

/// A slice of a service, for its port `http`.
pub fn slice(service: &str, name: &str, port: u16, endpoints: &[Value]) -> Value {
    let addresses = endpoints.first().and_then(|e| e["addresses"][0].as_str());
    let v6 = addresses.is_some_and(|address| address.contains(':'));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": name, "namespace": "default",
            "generateName": format!("{service}-"), "generation": 3,
            "uid": "00000000-0000-4000-8000-000000000003",
            "labels": {
                "kubernetes.io/service-name": service, "app": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
            "annotations": {
                "endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z",
            },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Service", "name": service,
                "uid": "00000000-0000-4000-8000-000000000001", "controller": true,
                "blockOwnerDeletion": true }],
            "managedFields": managed_fields("kube-controller-manager"),
        },
        "addressType": if v6 { "IPv6" } else { "IPv4" },
        "endpoints": endpoints,
        "ports": [{ "name": "http", "port": port, "protocol": "TCP" }],
    })
}

/// A node.
pub fn node(name: &str, zone: &str, addresses: &[IpAddr]) -> Value {
    let addresses: Vec<Value> = addresses
        .iter()
        .map(|ip| json!({ "type": "InternalIP", "address": ip }))
        .chain([json!({ "type": "Hostname", "address": name })])
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone } },
        "spec": {},
        "status": { "addresses": addresses, "images": [{ "names": ["a", "b"], "sizeBytes": 1 }] },
    })
}

/// A pod on a node, which runs, with these addresses.
pub fn pod(name: &str, node: &str, addresses: &[IpAddr]) -> Value {
    let addresses: Vec<Value> = addresses.iter().map(|ip| json!({ "ip": ip })).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "default",
            "uid": "00000000-0000-4000-8000-000000000004",
            "labels": { "app": name },
            "managedFields": managed_fields("kubelet"),
        },
        "spec": {
            "nodeName": node, "serviceAccountName": "default", "restartPolicy": "Always",
            "containers": [{ "name": name, "image": name, "resources": {},
                "ports": [{ "containerPort": 8080, "protocol": "TCP" }],
                "volumeMounts": [{ "name": "token", "mountPath": "/var/run/secrets" }] }],
            "volumes": [{ "name": "token", "emptyDir": {} }],
        },
        "status": {
            "phase": "Running", "hostIP": "192.0.2.1",
            "podIP": addresses.first().map(|ip| &ip["ip"]), "podIPs": addresses,
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

/// A namespace with labels.
pub fn namespace(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": name, "labels": labels },
        "spec": { "finalizers": ["kubernetes"] }, "status": { "phase": "Active" },
    })
}

fn family(ip: IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}
