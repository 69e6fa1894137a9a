//! Writes imported services as manifests. From these Services and EndpointSlices, an agent builds equal tables.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    net::IpAddr,
};

use model::{Endpoint, Service, ServicePort, ServiceType, TrafficPolicy};
use serde_json::{Map, Value, json};

use super::Imported;

/// The node name in hints for endpoints that kube-proxy uses only for traffic policy `Local`. No node has this name,
/// because it is not a valid DNS name.
const ELSEWHERE: &str = "-";

/// Writes the services as YAML, one document each for a Service and an EndpointSlice. `node`: the name of this node,
/// for the endpoints on it.
///
/// # Errors
///
/// If writing to `out` fails.
pub fn write(imported: &Imported, node: &str, out: &mut dyn Write) -> io::Result<()> {
    for service in imported.services.values() {
        document(&object(service), out)?;
        let mut number = 0;
        for port in &service.ports {
            let mut lists: BTreeMap<(bool, u16), Vec<&Endpoint>> = BTreeMap::new();
            for endpoint in &port.endpoints {
                let list = (!endpoint.addr.is_ipv4(), endpoint.port);
                lists.entry(list).or_default().push(endpoint);
            }
            for ((v6, target), list) in lists {
                let endpoints: Vec<Value> = list.into_iter().map(|of| endpoint(of, node)).collect();
                let family = if v6 { "IPv6" } else { "IPv4" };
                number += 1;
                let slice = json!({
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {
                        "namespace": service.name.namespace(),
                        "name": format!("{}-{number}", service.name.name()),
                        "labels": { "kubernetes.io/service-name": service.name.name() },
                    },
                    "addressType": family,
                    "ports": [named(port, json!({ "port": target }))],
                    "endpoints": endpoints,
                });
                document(&slice, out)?;
            }
        }
    }
    Ok(())
}

fn document(object: &Value, out: &mut dyn Write) -> io::Result<()> {
    let text = serde_saphyr::to_string(object).map_err(io::Error::other)?;
    writeln!(out, "---\n{}", text.trim_end())
}

/// Returns the manifest of a Service.
fn object(service: &Service) -> Value {
    let texts = |ips: &[IpAddr]| ips.iter().map(ToString::to_string).collect::<Vec<_>>();
    let kind = match service.kind {
        ServiceType::LoadBalancer => "LoadBalancer",
        ServiceType::NodePort => "NodePort",
        _ => "ClusterIP",
    };
    let ports = service.ports.iter().map(|port| {
        let mut fields = json!({ "port": port.port });
        if let Some(node_port) = port.node_port {
            fields["nodePort"] = node_port.into();
        }
        named(port, fields)
    });
    let ips = texts(&service.cluster_ips);
    let mut spec = json!({
        "type": kind,
        "clusterIP": ips.first(),
        "clusterIPs": ips,
        "ports": ports.collect::<Vec<_>>(),
    });
    if !service.external_ips.is_empty() {
        spec["externalIPs"] = texts(&service.external_ips).into();
    }
    if !service.source_ranges.is_empty() {
        let ranges = service.source_ranges.iter().map(ToString::to_string);
        spec["loadBalancerSourceRanges"] = ranges.collect::<Vec<_>>().into();
    }
    if let Some(timeout) = service.affinity {
        spec["sessionAffinity"] = "ClientIP".into();
        let seconds = timeout.as_secs();
        spec["sessionAffinityConfig"] = json!({ "clientIP": { "timeoutSeconds": seconds } });
    }
    for (field, policy) in [
        ("internalTrafficPolicy", service.internal_policy),
        ("externalTrafficPolicy", service.external_policy),
    ] {
        if policy == TrafficPolicy::Local {
            spec[field] = "Local".into();
        }
    }
    if let Some(port) = service.health_check_node_port {
        spec["healthCheckNodePort"] = port.into();
    }
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "namespace": service.name.namespace(), "name": service.name.name() },
        "spec": spec,
    });
    if !service.load_balancer_ips.is_empty() {
        let ingress = service.load_balancer_ips.iter();
        let ingress: Vec<Value> = ingress.map(|ip| json!({ "ip": ip.to_string() })).collect();
        object["status"] = json!({ "loadBalancer": { "ingress": ingress } });
    }
    object
}

/// Adds a port's name and protocol to the fields of a Service or of an EndpointSlice.
fn named(port: &ServicePort, mut fields: Value) -> Value {
    if !port.name.is_empty() {
        fields["name"] = (*port.name).into();
    }
    fields["protocol"] = port.protocol.word().to_ascii_uppercase().into();
    fields
}

/// Returns the manifest of an endpoint. The endpoint is ready, because rules contain only ready endpoints.
fn endpoint(endpoint: &Endpoint, node: &str) -> Value {
    let mut fields = Map::new();
    fields.insert("addresses".to_owned(), json!([endpoint.addr.to_string()]));
    if endpoint.local {
        fields.insert("nodeName".to_owned(), node.into());
    }
    // The import makes only two kinds of hints: for this node's zone, and for another zone.
    if endpoint.hints.for_zones() {
        let name = if endpoint.hints.for_this_zone() {
            node
        } else {
            ELSEWHERE
        };
        fields.insert(
            "hints".to_owned(),
            json!({ "forNodes": [{ "name": name }] }),
        );
    }
    fields.into()
}
