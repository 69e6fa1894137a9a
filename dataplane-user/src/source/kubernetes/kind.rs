//! The kinds that are read, and one object of each in the model's terms.

use std::{collections::BTreeMap, fmt, sync::Arc};

use k8s_openapi::{
    api::{core::v1 as core, discovery::v1 as discovery},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time},
};
use kube::core::params::{ListParams, WatchParams};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};

use super::follow::Sight;
use crate::{
    model::{Node, Place, Service, ServiceName, Workload},
    source::objects::{self, Findings, NamespaceRules, NodeFacts, Outcome, Slice},
};

/// What kube-proxy asks for, too: neither what belongs to another proxy nor what is headless.
const OURS: &str = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";
/// How many objects to ask for at once. Each page is in memory as text while it is read.
const PAGE: u32 = 500;

/// A kind that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Services.
    Service,
    /// EndpointSlices.
    Slice,
    /// This node's own object.
    Node,
    /// The Pods on this node, or on all of them.
    Pod,
    /// Namespaces.
    Namespace,
}

/// What the API is read for: each with what is before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Services, their endpoints, and this node.
    #[default]
    Services,
    /// The host ports of this node's pods.
    HostPorts,
    /// Which of this node's pods are captured, and by which rules; and the pods of all nodes while
    /// one of these says that it may only reach what is known (`dataplane.io/egress: deny`).
    Mesh,
    /// Likewise, and the pods of all nodes in any case.
    Registry,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Service,
        Self::Slice,
        Self::Node,
        Self::Pod,
        Self::Namespace,
    ];

    /// What it is read for.
    pub const fn scope(self) -> Scope {
        match self {
            Self::Service | Self::Slice | Self::Node => Scope::Services,
            Self::Pod => Scope::HostPorts,
            Self::Namespace => Scope::Mesh,
        }
    }

    /// What becomes of the rest of the node if the API server does not let it be read: it is
    /// served. `None`: nothing is, of what is new.
    pub(super) const fn without(self) -> Option<&'static str> {
        match self {
            Self::Service | Self::Slice | Self::Node => None,
            Self::Pod => Some(
                "host ports of pods (hostPort) are not served, and no pod is captured by its labels",
            ),
            Self::Namespace => Some("no pod is captured by the labels of its namespace"),
        }
    }

    /// As the API's paths, RBAC rules and metrics have it.
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Slice => "endpointslices",
            Self::Node => "nodes",
            Self::Pod => "pods",
            Self::Namespace => "namespaces",
        }
    }

    /// As objects have it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Slice => "EndpointSlice",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::Namespace => "Namespace",
        }
    }

    /// Where the API server has them.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Service => "/api/v1/services",
            Self::Slice => "/apis/discovery.k8s.io/v1/endpointslices",
            Self::Node => "/api/v1/nodes",
            Self::Pod => "/api/v1/pods",
            Self::Namespace => "/api/v1/namespaces",
        }
    }

    /// Whether its objects are in no namespace.
    pub(super) const fn is_of_the_cluster(self) -> bool {
        matches!(self, Self::Node | Self::Namespace)
    }

    /// What to ask for in a list.
    pub(super) fn list(self, sight: &Sight) -> ListParams {
        let all = ListParams::default().limit(PAGE);
        match self {
            Self::Service | Self::Slice => all.labels(OURS),
            Self::Pod if sight.everywhere => all,
            Self::Node | Self::Pod => all.fields(&self.here(&sight.node)),
            Self::Namespace => all,
        }
    }

    /// What to ask for in a watch.
    pub(super) fn watch(self, sight: &Sight) -> WatchParams {
        let all = WatchParams::default();
        match self {
            Self::Service | Self::Slice => all.labels(OURS),
            Self::Pod if sight.everywhere => all,
            Self::Node | Self::Pod => all.fields(&self.here(&sight.node)),
            Self::Namespace => all,
        }
    }

    /// Those of this node: a cluster's others are many.
    fn here(self, node: &Node) -> String {
        let field = match self {
            Self::Pod => "spec.nodeName",
            _ => "metadata.name",
        };
        format!("{field}={}", node.name)
    }

    /// An object in the model's terms, as `node` sees it.
    pub(super) fn read(self, text: &str, node: &Node) -> Object {
        self.try_read(text, node).unwrap_or_else(|_| {
            let mut findings = Findings::default();
            findings.faults.push(self.explain(text));
            let metadata = from_json::<Named>(text).unwrap_or_default().metadata;
            Object {
                version: metadata.resource_version.clone(),
                name: objects::object_name(&metadata.into()),
                body: match self {
                    Self::Service => Body::Service(None),
                    Self::Slice => Body::Slice(None),
                    Self::Node => Body::Node(NodeFacts::default()),
                    Self::Pod => Body::Pod(None),
                    Self::Namespace => Body::Namespace(NamespaceRules::default()),
                },
                findings,
            }
        })
    }

    fn try_read(self, text: &str, node: &Node) -> Result<Object, serde_json::Error> {
        fn key(metadata: &ObjectMeta) -> (ServiceName, String) {
            let version = metadata.resource_version.clone();
            (objects::object_name(metadata), version.unwrap_or_default())
        }
        let mut findings = Findings::default();
        let ((name, version), body) = match self {
            Self::Service => {
                let object: ServiceObject = from_json(text)?;
                let service = core::Service {
                    metadata: object.metadata.into(),
                    spec: object.spec,
                    status: object.status,
                };
                let key = key(&service.metadata);
                let body = match objects::service(service, &mut findings) {
                    Outcome::Served(service) => Some(service),
                    Outcome::LeftAlone => None,
                };
                (key, Body::Service(body))
            }
            Self::Slice => {
                let object: SliceObject = from_json(text)?;
                let slice = discovery::EndpointSlice {
                    metadata: object.metadata.into(),
                    address_type: object.address_type,
                    endpoints: object.endpoints,
                    ports: object.ports,
                };
                let body = match objects::slice(&slice, node, &mut findings) {
                    Outcome::Served(slice) => Some(slice),
                    Outcome::LeftAlone => None,
                };
                (key(&slice.metadata), Body::Slice(body))
            }
            Self::Node => {
                let object: NodeObject = from_json(text)?;
                let node = core::Node {
                    metadata: object.metadata.into(),
                    spec: object.spec,
                    status: object.status.map(Into::into),
                };
                let facts = objects::node(&node, &mut findings);
                (key(&node.metadata), Body::Node(facts))
            }
            Self::Pod => {
                let pod: core::Pod = from_json::<PodObject>(text)?.into();
                let body = Pod::new(&pod, node, &mut findings);
                (key(&pod.metadata), Body::Pod(Some(body)))
            }
            Self::Namespace => {
                let metadata = from_json::<NamespaceObject>(text)?.metadata.into();
                let rules = objects::namespace(&metadata, &mut findings);
                (key(&metadata), Body::Namespace(rules))
            }
        };
        Ok(Object {
            name,
            version,
            body,
            findings,
        })
    }

    /// Which field of an object cannot be read, and why not.
    fn explain(self, text: &str) -> (String, String) {
        fn why<T: DeserializeOwned>(text: &str) -> Option<(String, String)> {
            let mut json = serde_json::Deserializer::from_str(text);
            let error = serde_path_to_error::deserialize::<_, T>(&mut json).err()?;
            Some((error.path().to_string(), error.inner().to_string()))
        }
        match self {
            Self::Service => why::<ServiceObject>(text),
            Self::Slice => why::<SliceObject>(text),
            Self::Node => why::<NodeObject>(text),
            Self::Pod => why::<PodObject>(text),
            Self::Namespace => why::<NamespaceObject>(text),
        }
        .unwrap_or_default()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

/// By what an object is known that is in no namespace.
pub(super) fn of_the_cluster(name: &str) -> ServiceName {
    objects::object_name(&ObjectMeta {
        name: Some(name.to_owned()),
        ..ObjectMeta::default()
    })
}

fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, serde_json::Error> {
    serde_json::from_str(text)
}

/// An object in the model's terms.
#[derive(Debug)]
pub(super) struct Object {
    /// Its namespace and name.
    pub name: ServiceName,
    /// Its `resourceVersion`.
    pub version: String,
    /// What it came to.
    pub body: Body,
    /// What is wrong with it.
    pub findings: Findings,
}

/// What an object came to; nothing if it is left alone, or if nothing can be made of it.
#[derive(Debug)]
pub(super) enum Body {
    Service(Option<Service>),
    Slice(Option<Slice>),
    Node(NodeFacts),
    Pod(Option<Pod>),
    Namespace(NamespaceRules),
}

/// What there is to know of a pod.
#[derive(Debug)]
pub(super) struct Pod {
    /// Its host ports; `None` if they make no sense, and stay what they were.
    pub host_ports: Option<Vec<Service>>,
    /// Itself, by its own rules; `None` if it has no connections of its own (any more).
    pub workload: Option<Workload>,
    /// Whether its rules make no sense, and stay what they were.
    pub faulty: bool,
}

impl Pod {
    /// One is not left out for the other's faults.
    fn new(pod: &core::Pod, node: &Node, findings: &mut Findings) -> Self {
        let of = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        if of != Some(&*node.name) {
            return Self::elsewhere(pod, node);
        }
        let mut of_ports = Findings::default();
        let host_ports = objects::host_ports(pod, node, &mut of_ports);
        let host_ports = of_ports.faults.is_empty().then_some(host_ports);
        let workload = objects::pod(pod, node, findings);
        let faulty = !findings.faults.is_empty();
        for fault in of_ports.faults {
            if !findings.faults.contains(&fault) {
                findings.faults.push(fault);
            }
        }
        findings.notes.extend(of_ports.notes);
        Self {
            host_ports,
            workload,
            faulty,
        }
    }

    /// Of one on another node only who it is matters here; what is wrong with it is told there.
    fn elsewhere(pod: &core::Pod, node: &Node) -> Self {
        let workload = objects::pod(pod, node, &mut Findings::default());
        Self {
            host_ports: Some(Vec::new()),
            workload: workload.map(|workload| Workload {
                place: Place::Elsewhere,
                rules: Arc::default(),
                ..workload
            }),
            faulty: false,
        }
    }
}

// What is read of objects. The rest, above all `managedFields`, which is as large as everything else
// together, is skipped over and never lies in memory but as text.

#[derive(Deserialize, Default)]
#[serde(default)]
struct Named {
    metadata: Metadata,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ServiceObject {
    metadata: Metadata,
    spec: Option<core::ServiceSpec>,
    status: Option<core::ServiceStatus>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct SliceObject {
    metadata: Metadata,
    address_type: String,
    endpoints: Option<Vec<discovery::Endpoint>>,
    ports: Option<Vec<discovery::EndpointPort>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeObject {
    metadata: Metadata,
    spec: Option<core::NodeSpec>,
    status: Option<NodeStatus>,
}

/// Without the images on the node and its conditions, which change every few seconds.
#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeStatus {
    addresses: Option<Vec<core::NodeAddress>>,
}

impl From<NodeStatus> for core::NodeStatus {
    fn from(status: NodeStatus) -> Self {
        Self {
            addresses: status.addresses,
            ..Self::default()
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NamespaceObject {
    metadata: Marked,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct PodObject {
    metadata: Marked,
    spec: Option<PodSpec>,
    status: Option<PodStatus>,
}

/// Without volumes, environments and whatever else a container needs to run.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    host_network: Option<bool>,
    service_account_name: Option<String>,
    containers: Vec<Container>,
    init_containers: Option<Vec<Container>>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    ports: Option<Vec<core::ContainerPort>>,
    restart_policy: Option<String>,
}

/// Without conditions and the states of its containers, which change the most.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct PodStatus {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<core::PodIP>>,
}

impl From<PodObject> for core::Pod {
    fn from(object: PodObject) -> Self {
        let containers = |all: Vec<Container>| -> Vec<core::Container> {
            all.into_iter().map(Into::into).collect()
        };
        Self {
            metadata: object.metadata.into(),
            spec: object.spec.map(|spec| core::PodSpec {
                node_name: spec.node_name,
                host_network: spec.host_network,
                service_account_name: spec.service_account_name,
                containers: containers(spec.containers),
                init_containers: spec.init_containers.map(containers),
                ..core::PodSpec::default()
            }),
            status: object.status.map(|status| core::PodStatus {
                phase: status.phase,
                pod_ip: status.pod_ip,
                pod_ips: status.pod_ips,
                ..core::PodStatus::default()
            }),
        }
    }
}

impl From<Container> for core::Container {
    fn from(container: Container) -> Self {
        Self {
            ports: container.ports,
            restart_policy: container.restart_policy,
            ..Self::default()
        }
    }
}

/// With all labels and annotations, by which pods and namespaces say what they want.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Marked {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: Option<String>,
    creation_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

impl From<Marked> for ObjectMeta {
    fn from(metadata: Marked) -> Self {
        Self {
            name: metadata.name,
            namespace: metadata.namespace,
            resource_version: metadata.resource_version,
            creation_timestamp: metadata.creation_timestamp,
            labels: metadata.labels,
            annotations: metadata.annotations,
            owner_references: metadata.owner_references,
            ..Self::default()
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    resource_version: String,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    #[serde(deserialize_with = "known_labels")]
    labels: Vec<(&'static str, String)>,
}

impl From<Metadata> for ObjectMeta {
    fn from(metadata: Metadata) -> Self {
        let labels = metadata.labels.into_iter();
        Self {
            name: metadata.name,
            namespace: metadata.namespace,
            resource_version: Some(metadata.resource_version),
            creation_timestamp: metadata.creation_timestamp,
            deletion_timestamp: metadata.deletion_timestamp,
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value)).collect()),
            ..Self::default()
        }
    }
}

/// The labels that mean something to us.
fn known_labels<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<(&'static str, String)>, D::Error> {
    struct Labels;
    impl<'de> Visitor<'de> for Labels {
        type Value = Vec<(&'static str, String)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("labels")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut labels = Vec::new();
            while let Some(key) = map.next_key::<std::borrow::Cow<'_, str>>()? {
                match objects::LABELS.iter().find(|known| **known == key) {
                    Some(known) => labels.push((*known, map.next_value()?)),
                    None => _ = map.next_value::<IgnoredAny>()?,
                }
            }
            Ok(labels)
        }
    }
    deserializer.deserialize_any(Labels)
}
