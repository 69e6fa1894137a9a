//! Writes a snapshot as the manifests that it could have come from.

use std::{fs::File, io::BufWriter, path::Path};

use anyhow::Context as _;
use model::{Protocol, Service, ServiceType, Snapshot};
use serde_json::{Value, json};

/// Number of objects in a file: as many as operators write into one, and few compared with the
/// limit on a file's size.
const SERVICES_PER_FILE: usize = 1_000;

/// Writes services with cluster IPs and node ports, and their endpoints, to files in `directory`, as
/// `kubectl get -o json` prints them. Local endpoints are on node `node`.
///
/// # Errors
///
/// Fails if a file cannot be written.
pub fn write(snapshot: &Snapshot, node: &str, directory: &Path) -> anyhow::Result<()> {
    let services: Vec<_> = snapshot.services.values().collect();
    for (number, services) in services.chunks(SERVICES_PER_FILE).enumerate() {
        let items: Vec<_> = services
            .iter()
            .flat_map(|service| objects(service, node))
            .collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        let path = directory.join(format!("services-{number:04}.json"));
        let file = File::create(&path).with_context(|| path.display().to_string())?;
        serde_json::to_writer(BufWriter::new(file), &list)?;
    }
    Ok(())
}

fn objects(service: &Service, node: &str) -> Vec<Value> {
    let (namespace, name) = (service.name.namespace(), service.name.name());
    let protocol = |protocol| match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
    };
    let ports: Vec<_> = service
        .ports
        .iter()
        .map(|port| {
            let mut object = json!({ "name": port.name, "port": port.port, "protocol": protocol(port.protocol) });
            if let Some(node_port) = port.node_port {
                object["nodePort"] = node_port.into();
            }
            object
        })
        .collect();
    let kind = match service.kind {
        ServiceType::NodePort | ServiceType::HostPort => "NodePort",
        _ => "ClusterIP",
    };
    let families: Vec<_> = service
        .cluster_ips
        .iter()
        .map(|ip| if ip.is_ipv4() { "IPv4" } else { "IPv6" })
        .collect();
    let mut objects = vec![json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "uid": format!("00000000-0000-4000-8000-{:0>12}", name.rsplit('-').next().unwrap_or("0")),
        },
        "spec": {
            "type": kind,
            "clusterIP": service.cluster_ips.first(),
            "clusterIPs": service.cluster_ips.as_slice(),
            "ipFamilies": families,
            "ipFamilyPolicy": if families.len() > 1 { "RequireDualStack" } else { "SingleStack" },
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "selector": { "app": name },
            "ports": ports,
        },
    })];
    for family in families {
        let v4 = family == "IPv4";
        let ports: Vec<_> = service
            .ports
            .iter()
            .map(|port| {
                let target = port
                    .endpoints
                    .iter()
                    .find(|e| e.addr.is_ipv4() == v4)
                    .map(|e| e.port);
                json!({ "name": port.name, "port": target, "protocol": protocol(port.protocol) })
            })
            .collect();
        // Endpoints of one slice have one port. Use the first endpoint's port for all.
        let endpoints: Vec<_> = service.ports.first().into_iter().flat_map(|port| &port.endpoints)
            .filter(|endpoint| endpoint.addr.is_ipv4() == v4)
            .map(|endpoint| json!({
                "addresses": [endpoint.addr],
                "conditions": { "ready": endpoint.ready, "serving": endpoint.serving, "terminating": endpoint.terminating },
                "nodeName": if endpoint.local { node } else { "elsewhere" },
            }))
            .collect();
        objects.push(json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{name}-{}", family.to_lowercase()),
                "namespace": namespace,
                "labels": { "kubernetes.io/service-name": name },
            },
            "addressType": family,
            "ports": ports,
            "endpoints": endpoints,
        }));
    }
    objects
}
