//! The kinds that are read, and one object of each in the model's terms.

use std::fmt;

use k8s_openapi::{
    api::{core::v1 as core, discovery::v1 as discovery},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::core::params::{ListParams, WatchParams};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};

use crate::{
    model::{Node, Service, ServiceName},
    source::objects::{self, Findings, NodeFacts, Outcome, Slice},
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
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Service, Self::Slice, Self::Node];

    /// As the API's paths, RBAC rules and metrics have it.
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Slice => "endpointslices",
            Self::Node => "nodes",
        }
    }

    /// As objects have it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Slice => "EndpointSlice",
            Self::Node => "Node",
        }
    }

    /// Where the API server has them.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Service => "/api/v1/services",
            Self::Slice => "/apis/discovery.k8s.io/v1/endpointslices",
            Self::Node => "/api/v1/nodes",
        }
    }

    /// What to ask for in a list.
    pub(super) fn list(self, node: &Node) -> ListParams {
        let all = ListParams::default().limit(PAGE);
        match self {
            Self::Service | Self::Slice => all.labels(OURS),
            Self::Node => all.fields(&own(node)),
        }
    }

    /// What to ask for in a watch.
    pub(super) fn watch(self, node: &Node) -> WatchParams {
        let all = WatchParams::default();
        match self {
            Self::Service | Self::Slice => all.labels(OURS),
            Self::Node => all.fields(&own(node)),
        }
    }

    /// An object in the model's terms, as `node` sees it.
    pub(super) fn read(self, text: &str, node: &Node) -> Object {
        self.try_read(text, node).unwrap_or_else(|_| {
            let mut findings = Findings::default();
            findings.faults.push(self.explain(text));
            let metadata = from_json::<Named>(text).unwrap_or_default().metadata;
            Object {
                name: objects::object_name(&metadata.clone().into()),
                version: metadata.resource_version,
                body: match self {
                    Self::Service => Body::Service(None),
                    Self::Slice => Body::Slice(None),
                    Self::Node => Body::Node(NodeFacts::default()),
                },
                findings,
            }
        })
    }

    fn try_read(self, text: &str, node: &Node) -> Result<Object, serde_json::Error> {
        let mut findings = Findings::default();
        let (metadata, body) = match self {
            Self::Service => {
                let object: ServiceObject = from_json(text)?;
                let metadata = object.metadata.clone();
                let service = core::Service {
                    metadata: object.metadata.into(),
                    spec: object.spec,
                    status: object.status,
                };
                let body = match objects::service(service, &mut findings) {
                    Outcome::Served(service) => Some(service),
                    Outcome::LeftAlone => None,
                };
                (metadata, Body::Service(body))
            }
            Self::Slice => {
                let object: SliceObject = from_json(text)?;
                let metadata = object.metadata.clone();
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
                (metadata, Body::Slice(body))
            }
            Self::Node => {
                let object: NodeObject = from_json(text)?;
                let metadata = object.metadata.clone();
                let node = core::Node {
                    metadata: object.metadata.into(),
                    spec: object.spec,
                    status: object.status.map(Into::into),
                };
                (metadata, Body::Node(objects::node(&node, &mut findings)))
            }
        };
        Ok(Object {
            name: objects::object_name(&metadata.clone().into()),
            version: metadata.resource_version,
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
        }
        .unwrap_or_default()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

fn own(node: &Node) -> String {
    format!("metadata.name={}", node.name)
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

/// What an object came to; nothing if it is left alone.
#[derive(Debug)]
pub(super) enum Body {
    Service(Option<Service>),
    Slice(Option<Slice>),
    Node(NodeFacts),
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

#[derive(Clone, Deserialize, Default)]
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
