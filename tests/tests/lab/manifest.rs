//! Services and their endpoints, as the Kubernetes API would hand them out.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use dataplane_tests::Host;
use serde_json::{Value, json};

/// The namespace of services that name none.
const NAMESPACE: &str = "default";

/// A `Service` and its `EndpointSlice`s.
#[derive(Debug, Clone)]
pub struct Service {
    name: String,
    namespace: String,
    spec: Value,
    status: Value,
    created: String,
    ports: Vec<Port>,
    endpoints: Vec<Endpoint>,
}

#[derive(Debug, Clone)]
struct Port {
    name: String,
    protocol: &'static str,
    target: u16,
}

#[derive(Debug, Clone)]
struct Endpoint {
    address: IpAddr,
    node: String,
    conditions: Value,
    hints: Value,
}

/// In which state an endpoint is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Ready,
    /// Going away, and still answering.
    ServingTerminating,
    /// Neither.
    NotReady,
}

impl Service {
    /// A `ClusterIP` service with these cluster IPs; none makes it headless.
    pub fn new(name: &str, cluster_ips: &[&str]) -> Self {
        let families: Vec<_> = cluster_ips
            .iter()
            .map(|ip| if ip.contains(':') { "IPv6" } else { "IPv4" })
            .collect();
        let ips = if cluster_ips.is_empty() {
            &["None"]
        } else {
            cluster_ips
        };
        let spec = json!({
            "type": "ClusterIP",
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": families,
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "ports": [],
        });
        Self {
            name: name.into(),
            namespace: NAMESPACE.into(),
            spec,
            status: json!({ "loadBalancer": {} }),
            created: "2026-01-15T09:21:07Z".into(),
            ports: Vec::new(),
            endpoints: Vec::new(),
        }
    }

    /// A service that remembers a client's endpoint. `target`: the port of the endpoints.
    pub fn sticky(target: u16, endpoints: &[&Host]) -> Self {
        let service = Self::new("sticky", &["10.96.0.11"]).affinity(600);
        service.port("tcp", 80, target).endpoints(endpoints)
    }

    /// A service whose only endpoint is not ready.
    pub fn empty(target: u16, endpoint: &Host) -> Self {
        let service = Self::new("empty", &["10.96.0.12"]).port("tcp", 80, target);
        service.endpoint(endpoint, Condition::NotReady)
    }

    /// Sets a field of the spec.
    pub fn set(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.spec[field] = value.into();
        self
    }

    /// In another namespace.
    pub fn in_namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Remembers a client's endpoint for so many seconds.
    pub fn affinity(self, seconds: u32) -> Self {
        let config = json!({ "clientIP": { "timeoutSeconds": seconds } });
        self.set("sessionAffinity", "ClientIP")
            .set("sessionAffinityConfig", config)
    }

    /// Also reachable at this address of a load balancer.
    pub fn load_balancer(self, ip: &str) -> Self {
        self.ingress(ip, "VIP")
    }

    /// Likewise, with an `ipMode`: `Proxy` is one whose traffic must pass the load balancer.
    pub fn ingress(mut self, ip: &str, mode: &str) -> Self {
        let ingress = &mut self.status["loadBalancer"]["ingress"];
        if ingress.is_null() {
            *ingress = json!([]);
        }
        ingress
            .as_array_mut()
            .expect("an array since the line above")
            .push(json!({ "ip": ip, "ipMode": mode }));
        self.set("type", "LoadBalancer")
    }

    /// When it was created; all at the same moment otherwise.
    pub fn created(mut self, timestamp: &str) -> Self {
        self.created = timestamp.into();
        self
    }

    /// Adds a port (TCP unless the name begins with `udp` or `sctp`) and where endpoints listen for it.
    pub fn port(self, name: &str, port: u16, target: u16) -> Self {
        self.add_port(name, port, target, None)
    }

    /// Likewise, and makes it a node port too.
    pub fn node_port(mut self, name: &str, port: u16, target: u16, node_port: u16) -> Self {
        if self.spec["type"] == "ClusterIP" {
            self = self.set("type", "NodePort");
        }
        self.add_port(name, port, target, Some(node_port))
    }

    fn add_port(mut self, name: &str, port: u16, target: u16, node_port: Option<u16>) -> Self {
        let protocol = match name {
            name if name.starts_with("udp") => "UDP",
            name if name.starts_with("sctp") => "SCTP",
            _ => "TCP",
        };
        let mut spec =
            json!({ "name": name, "port": port, "targetPort": target, "protocol": protocol });
        if let Some(node_port) = node_port {
            spec["nodePort"] = node_port.into();
        }
        self.spec["ports"]
            .as_array_mut()
            .expect("an array since `new`")
            .push(spec);
        self.ports.push(Port {
            name: name.into(),
            protocol,
            target,
        });
        self
    }

    /// Adds pods as ready endpoints, in both families as far as the service has them.
    pub fn endpoints(self, pods: &[&Host]) -> Self {
        pods.iter()
            .fold(self, |service, pod| service.endpoint(pod, Condition::Ready))
    }

    /// Adds a pod as an endpoint.
    pub fn endpoint(mut self, pod: &Host, condition: Condition) -> Self {
        let conditions = json!({
            "ready": condition == Condition::Ready,
            "serving": condition != Condition::NotReady,
            "terminating": condition == Condition::ServingTerminating,
        });
        for address in pod.addresses() {
            self.endpoints.push(Endpoint {
                address,
                node: pod.node().unwrap_or(pod.name()).into(),
                conditions: conditions.clone(),
                hints: Value::Null,
            });
        }
        self
    }

    /// Adds an address on a node as a ready endpoint.
    pub fn endpoint_at(mut self, address: IpAddr, node: &str) -> Self {
        self.endpoints.push(Endpoint {
            address,
            node: node.into(),
            conditions: json!({ "ready": true, "serving": true, "terminating": false }),
            hints: Value::Null,
        });
        self
    }

    /// Adds a pod as a ready endpoint that is hinted to these zones and nodes.
    pub fn hinted(self, pod: &Host, zones: &[&str], nodes: &[&str]) -> Self {
        let before = self.endpoints.len();
        let mut service = self.endpoint(pod, Condition::Ready);
        let names = |names: &[&str]| -> Vec<Value> {
            names.iter().map(|name| json!({ "name": name })).collect()
        };
        for endpoint in &mut service.endpoints[before..] {
            endpoint.hints = json!({ "forZones": names(zones), "forNodes": names(nodes) });
        }
        service
    }

    fn objects(&self) -> Vec<Value> {
        let mut objects = vec![json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "creationTimestamp": self.created,
                "uid": format!("uid-of-{}", self.name),
            },
            "spec": self.spec,
            "status": self.status,
        })];
        let families = self.spec["ipFamilies"]
            .as_array()
            .expect("an array since `new`");
        for family in families.iter().filter_map(Value::as_str) {
            let ports: Vec<Value> = self
                .ports
                .iter()
                .map(|p| json!({ "name": p.name, "port": p.target, "protocol": p.protocol }))
                .collect();
            let endpoints: Vec<Value> = self
                .endpoints
                .iter()
                .filter(|endpoint| endpoint.address.is_ipv6() == (family == "IPv6"))
                .map(|endpoint| {
                    json!({
                        "addresses": [endpoint.address],
                        "nodeName": endpoint.node,
                        "conditions": endpoint.conditions,
                        "hints": endpoint.hints,
                    })
                })
                .collect();
            objects.push(json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": format!("{}-{}", self.name, family.to_lowercase()),
                    "namespace": self.namespace,
                    "labels": { "kubernetes.io/service-name": self.name },
                },
                "addressType": family,
                "endpoints": endpoints,
                "ports": ports,
            }));
        }
        objects
    }
}

/// A file of manifests that an agent watches.
#[derive(Debug)]
pub struct Manifests {
    directory: tempfile::TempDir,
}

/// A configuration file, for settings that are no flags of `dataplane run`. Dropping it removes the file.
#[derive(Debug)]
pub struct Config {
    _file: tempfile::NamedTempFile,
    path: String,
}

impl Config {
    /// Writes the text of a configuration file; an empty text is one, too.
    pub fn new(text: &str) -> io::Result<Self> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), text)?;
        Ok(Self {
            path: file.path().display().to_string(),
            _file: file,
        })
    }

    /// The arguments by which the agent reads it.
    pub fn arguments(&self) -> [&str; 2] {
        ["--config", &self.path]
    }
}

impl Manifests {
    /// Writes these services.
    pub fn new(services: &[Service]) -> io::Result<Self> {
        let manifests = Self {
            directory: tempfile::tempdir()?,
        };
        manifests.write(services)?;
        Ok(manifests)
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("services.json")
    }

    /// Writes these services instead, so that no reader sees half of them.
    pub fn write(&self, services: &[Service]) -> io::Result<()> {
        self.write_with(services, &[])
    }

    /// Likewise, with other objects.
    pub fn write_with(&self, services: &[Service], others: &[Value]) -> io::Result<()> {
        let services = services.iter().flat_map(Service::objects);
        let items: Vec<Value> = services.chain(others.iter().cloned()).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        self.write_text(&serde_json::to_string_pretty(&list)?)
    }

    /// Writes anything, likewise.
    pub fn write_text(&self, text: &str) -> io::Result<()> {
        // The draft is in the agent's directory itself, under a name with a leading dot: editors and Kubernetes use
        // such names for files that are not yet to be read.
        let draft = self.directory.path().join(Path::new(".draft"));
        fs::write(&draft, text)?;
        fs::rename(draft, self.path())
    }
}
