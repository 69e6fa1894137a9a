//! One document of a manifest: an object, or a list of objects.
//!
//! Objects are converted into the model one by one as they are read, and then dropped. So a file with thousands of
//! objects is never in memory as Kubernetes' types.
//!
//! kubectl prints keys in alphabetical order: an object's `apiVersion` and `kind` come before its `spec`, and an
//! EndpointSlice's `apiVersion`, which only slices have, before its `endpoints`. So the types of the fields are known
//! when they are read. In an object with another order, early fields stay untyped values until the kind is known.

use std::fmt;

use model::{Grant, Node, Route, RouteKind, Service, ServiceName, Workload};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::{Map, Value};

use crate::objects::{
    self, ByIstio, Candidate, Findings, NamespaceRules, NodeFacts, Outcome, ServiceEntry, Slice,
    wire::{self, Metadata},
};

const CORE: &str = "v1";
const DISCOVERY: &str = "discovery.k8s.io/v1";
/// The group of Istio's objects. They are equal in all its versions.
const ISTIO: &str = "networking.istio.io/";
const ISTIO_VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha3"];
/// The group of Gateway API's objects. The fields that are read are equal in all versions of a kind.
const GATEWAY: &str = "gateway.networking.k8s.io/";

/// The kinds that are read.
const KINDS: [&str; 12] = [
    "Service",
    "EndpointSlice",
    "Node",
    "Pod",
    "Namespace",
    "ServiceEntry",
    "WorkloadEntry",
    "TCPRoute",
    "TLSRoute",
    "HTTPRoute",
    "GRPCRoute",
    "ReferenceGrant",
];

/// An object of a document.
#[derive(Debug)]
pub struct Entry {
    /// Its index in the document's list. `None` if it is the whole document.
    pub item: Option<usize>,
    /// Its namespace and name.
    pub name: ServiceName,
    /// The result.
    pub body: Body,
    /// Problems of the object.
    pub findings: Findings,
}

/// The result of an object.
#[derive(Debug)]
pub enum Body {
    /// A Service.
    Service(Outcome<Service>, ByIstio),
    /// An EndpointSlice, and another node that one of its endpoints is on.
    Slice(Outcome<Slice>, Option<String>),
    /// A Node: this node or another one.
    Node(NodeFacts),
    /// A Pod: its host ports; the workload, unless it has no connections of its own; and the pod as a ServiceEntry may
    /// select it.
    Pod(Vec<Service>, Option<Box<Workload>>, Option<Box<Candidate>>),
    /// A ServiceEntry. `None` if it is invalid.
    ServiceEntry(Option<Box<ServiceEntry>>),
    /// A WorkloadEntry. `None` if it is invalid.
    WorkloadEntry(Option<Box<Candidate>>),
    /// A route. `None` if it is invalid, or if it is not attached to a Service.
    Route(RouteKind, Option<Box<Route>>),
    /// A ReferenceGrant. `None` if it is invalid.
    Grant(Option<Box<Grant>>),
    /// A Namespace.
    Namespace(Box<NamespaceRules>),
    /// An object of a kind that is not served here.
    Ignored(String),
    /// An object without a kind.
    Unknown,
}

impl Entry {
    /// Returns the object's name for people: `Service default/web`.
    pub fn label(&self) -> Option<String> {
        let kind = match &self.body {
            Body::Service(..) => "Service",
            Body::Slice(..) => "EndpointSlice",
            // A node has no namespace.
            Body::Node(node) => {
                return (!node.name.is_empty()).then(|| format!("Node {}", node.name));
            }
            Body::Pod(..) => "Pod",
            Body::ServiceEntry(_) => "ServiceEntry",
            Body::WorkloadEntry(_) => "WorkloadEntry",
            Body::Route(kind, _) => kind.word(),
            Body::Grant(_) => "ReferenceGrant",
            Body::Namespace(found) => {
                return (!found.name.is_empty()).then(|| format!("Namespace {}", found.name));
            }
            Body::Ignored(kind) => kind,
            Body::Unknown => return None,
        };
        (!self.name.name().is_empty()).then(|| format!("{kind} {}", self.name))
    }
}

/// Reads a document's objects into `entries`.
pub struct Document<'a> {
    /// This node.
    pub node: &'a Node,
    /// The list that receives the objects.
    pub entries: &'a mut Vec<Entry>,
}

impl<'de> DeserializeSeed<'de> for Document<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let reader = ObjectReader {
            node: self.node,
            entries: self.entries,
            item: None,
            inherited: (None, None),
            untyped: &mut Vec::new(),
        };
        deserializer.deserialize_map(reader)
    }
}

/// An object without a kind, in a list whose own kind is not known yet.
type Untyped = Object;

/// The kinds of fields that an object has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Service,
    Slice,
    Node,
    Pod,
    Namespace,
    ServiceEntry,
    WorkloadEntry,
    Route(RouteKind),
    Grant,
    Other,
    NotKnownYet,
}

/// The fields of all served kinds, as far as they were read.
#[derive(Default)]
struct Object {
    item: Option<usize>,
    api_version: Option<String>,
    kind: Option<String>,
    metadata: Metadata,
    spec: Option<wire::ServiceSpec>,
    node_spec: Option<wire::NodeSpec>,
    node_status: Option<wire::NodeStatus>,
    pod_spec: Option<wire::PodSpec>,
    pod_status: Option<wire::PodStatus>,
    status: Option<wire::ServiceStatus>,
    address_type: Option<String>,
    endpoints: Option<Vec<wire::Endpoint>>,
    ports: Option<Vec<wire::EndpointPort>>,
    /// Fields that came before the kind.
    early: Map<String, Value>,
}

impl Object {
    fn sort(&self) -> Sort {
        match (self.kind.as_deref(), self.api_version.as_deref()) {
            (Some("Service"), Some(CORE)) => Sort::Service,
            (Some("Node"), Some(CORE)) => Sort::Node,
            (Some("Pod"), Some(CORE)) => Sort::Pod,
            (Some("Namespace"), Some(CORE)) => Sort::Namespace,
            (Some("ServiceEntry"), Some(version)) if is_istio(version) => Sort::ServiceEntry,
            (Some("WorkloadEntry"), Some(version)) if is_istio(version) => Sort::WorkloadEntry,
            (Some(kind), Some(version)) if version.starts_with(GATEWAY) => {
                match objects::route_kind(kind) {
                    Some(kind) => Sort::Route(kind),
                    None if kind == "ReferenceGrant" => Sort::Grant,
                    None => Sort::Other,
                }
            }
            (Some("EndpointSlice") | None, Some(DISCOVERY)) => Sort::Slice,
            (None, None | Some(CORE)) => Sort::NotKnownYet,
            (Some(kind), None) if KINDS.contains(&kind) => Sort::NotKnownYet,
            _ => Sort::Other,
        }
    }

    fn is_list(&self) -> bool {
        let of = self
            .kind
            .as_deref()
            .and_then(|kind| kind.strip_suffix("List"));
        of.is_some_and(|of| of.is_empty() || KINDS.contains(&of))
    }

    /// Returns the type of this list's items if they do not state it: `(apiVersion, kind)`.
    fn of_items(&self) -> (Option<String>, Option<String>) {
        match self
            .kind
            .as_deref()
            .and_then(|kind| kind.strip_suffix("List"))
        {
            None | Some("") => (None, None),
            Some(kind) => (self.api_version.clone(), Some(kind.to_owned())),
        }
    }

    fn finish(mut self, node: &Node) -> Entry {
        let mut findings = Findings::default();
        let item = self.item;
        let name = objects::object_name(&self.metadata);
        let body = match self.sort() {
            Sort::Service => {
                let object = wire::Service {
                    spec: self
                        .spec
                        .or_else(|| early(&mut self.early, "spec", &mut findings)),
                    status: self
                        .status
                        .or_else(|| early(&mut self.early, "status", &mut findings)),
                    metadata: self.metadata,
                };
                // Consequences of a field that could not be read are not reported.
                if findings.faults.is_empty() {
                    let by_istio = objects::by_istio(&object, &mut findings);
                    Body::Service(objects::service(object, &mut findings), by_istio)
                } else {
                    Body::Service(Outcome::LeftAlone, ByIstio::default())
                }
            }
            Sort::Slice if self.kind.is_some() => {
                let fields = &mut self.early;
                let object = wire::EndpointSlice {
                    address_type: self
                        .address_type
                        .or_else(|| early(fields, "addressType", &mut findings))
                        .unwrap_or_default(),
                    endpoints: self
                        .endpoints
                        .or_else(|| early(fields, "endpoints", &mut findings)),
                    ports: self.ports.or_else(|| early(fields, "ports", &mut findings)),
                    metadata: self.metadata,
                };
                if findings.faults.is_empty() {
                    let outcome = objects::slice(&object, node, &mut findings);
                    let endpoints = object.endpoints.into_iter().flatten();
                    let mut nodes = endpoints.filter_map(|endpoint| endpoint.node_name);
                    Body::Slice(outcome, nodes.find(|name| **name != *node.name))
                } else {
                    Body::Slice(Outcome::LeftAlone, None)
                }
            }
            Sort::Node => {
                let object = wire::Node {
                    spec: self
                        .node_spec
                        .or_else(|| early(&mut self.early, "spec", &mut findings)),
                    status: self
                        .node_status
                        .or_else(|| early(&mut self.early, "status", &mut findings)),
                    metadata: self.metadata,
                };
                Body::Node(objects::node(&object, &mut findings))
            }
            Sort::Pod => {
                let fields = &mut self.early;
                let object = wire::Pod {
                    spec: self
                        .pod_spec
                        .or_else(|| early(fields, "spec", &mut findings)),
                    status: self
                        .pod_status
                        .or_else(|| early(fields, "status", &mut findings)),
                    metadata: self.metadata,
                };
                let workload = objects::pod(&object, node, &mut findings).map(Box::new);
                let candidate = objects::candidate(&object, node).map(Box::new);
                let host_ports = objects::host_ports(&object, node, &mut findings);
                Body::Pod(host_ports, workload, candidate)
            }
            Sort::ServiceEntry => {
                let fields = &mut self.early;
                let object = wire::ServiceEntry {
                    spec: early(fields, "spec", &mut findings),
                    status: early(fields, "status", &mut findings),
                    metadata: self.metadata,
                };
                let readable = findings.faults.is_empty();
                let entry = readable.then(|| objects::service_entry(object, node, &mut findings));
                let entry = entry.filter(|_| findings.faults.is_empty());
                Body::ServiceEntry(entry.map(Box::new))
            }
            Sort::WorkloadEntry => {
                let object = wire::WorkloadEntry {
                    spec: early(&mut self.early, "spec", &mut findings),
                    status: early(&mut self.early, "status", &mut findings),
                    metadata: self.metadata,
                };
                let readable = findings.faults.is_empty();
                let entry = readable.then(|| objects::workload_entry(&object, node, &mut findings));
                let entry = entry.filter(|_| findings.faults.is_empty());
                Body::WorkloadEntry(entry.map(Box::new))
            }
            Sort::Route(kind) => {
                let object = wire::Route {
                    spec: early(&mut self.early, "spec", &mut findings),
                    metadata: self.metadata,
                };
                let readable = findings.faults.is_empty();
                let route = readable.then(|| objects::route(kind, object, &mut findings));
                let route = route.flatten().filter(|_| findings.faults.is_empty());
                Body::Route(kind, route.map(Box::new))
            }
            Sort::Grant => {
                let object = wire::ReferenceGrant {
                    spec: early(&mut self.early, "spec", &mut findings),
                    metadata: self.metadata,
                };
                let readable = findings.faults.is_empty();
                let grant = readable.then(|| objects::grant(&object, &mut findings));
                let grant = grant.filter(|_| findings.faults.is_empty());
                Body::Grant(grant.map(Box::new))
            }
            Sort::Namespace => {
                Body::Namespace(Box::new(objects::namespace(&self.metadata, &mut findings)))
            }
            Sort::Other => self.other(&mut findings),
            Sort::Slice | Sort::NotKnownYet => {
                let (field, example) = match &self.kind {
                    None => ("kind", "Service, EndpointSlice or List"),
                    Some(kind) if kind == "EndpointSlice" => ("apiVersion", DISCOVERY),
                    Some(kind) if kind.ends_with("Entry") => {
                        ("apiVersion", "networking.istio.io/v1")
                    }
                    Some(kind) if kind.ends_with("Route") || kind == "ReferenceGrant" => {
                        ("apiVersion", "gateway.networking.k8s.io/v1")
                    }
                    Some(_) => ("apiVersion", CORE),
                };
                findings
                    .faults
                    .push((field.into(), format!("missing; expected {example}")));
                Body::Unknown
            }
        };
        Entry {
            item,
            name,
            body,
            findings,
        }
    }

    fn other(&self, findings: &mut Findings) -> Body {
        let version = self.api_version.as_deref().unwrap_or_default();
        let kind = self.kind.as_deref().unwrap_or_default();
        let expected = match kind {
            "Service" | "Node" | "Pod" | "Namespace" if !version.contains('/') => CORE,
            "EndpointSlice" if version.starts_with("discovery.k8s.io/") => DISCOVERY,
            "ServiceEntry" | "WorkloadEntry" if version.starts_with(ISTIO) => {
                "networking.istio.io/v1"
            }
            _ => "",
        };
        if !expected.is_empty() {
            findings.faults.push((
                "apiVersion".into(),
                format!("{version:?} is not a known version of {kind}; expected {expected}"),
            ));
            return Body::Ignored(kind.to_owned());
        }
        if kind.is_empty() {
            findings
                .faults
                .push(("kind".into(), "missing; expected the object's kind".into()));
            return Body::Unknown;
        }
        // Another group may have a kind of the same name.
        Body::Ignored(match (kind, version.split_once('/')) {
            (kind, Some((group, _))) if KINDS.contains(&kind) => format!("{kind}.{group}"),
            _ => kind.to_owned(),
        })
    }
}

/// Returns whether Istio's objects are known in an API version.
fn is_istio(version: &str) -> bool {
    let version = version.strip_prefix(ISTIO);
    version.is_some_and(|version| ISTIO_VERSIONS.contains(&version))
}

/// Returns a field that was read before its type was known.
fn early<T: DeserializeOwned>(
    fields: &mut Map<String, Value>,
    key: &str,
    findings: &mut Findings,
) -> Option<T> {
    let value = fields.remove(key)?;
    serde_path_to_error::deserialize::<_, Option<T>>(value).unwrap_or_else(|error| {
        let path = match error.path().to_string() {
            root if root == "." => key.to_owned(),
            path if path.starts_with('[') => format!("{key}{path}"),
            path => format!("{key}.{path}"),
        };
        findings.faults.push((path, error.inner().to_string()));
        None
    })
}

struct ObjectReader<'a> {
    node: &'a Node,
    entries: &'a mut Vec<Entry>,
    item: Option<usize>,
    inherited: (Option<String>, Option<String>),
    untyped: &'a mut Vec<Untyped>,
}

impl<'de> DeserializeSeed<'de> for ObjectReader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ObjectReader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (api_version, kind) = self.inherited;
        let mut object = Object {
            api_version,
            kind,
            item: self.item,
            ..Object::default()
        };
        let mut has_items = false;
        let mut untyped_items = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "apiVersion" => object.api_version = map.next_value::<Option<_>>()?,
                "kind" => object.kind = map.next_value::<Option<_>>()?,
                "metadata" => {
                    object.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                }
                "items" if self.item.is_none() => {
                    has_items = true;
                    map.next_value_seed(Items {
                        node: self.node,
                        entries: self.entries,
                        inherited: object.of_items(),
                        untyped: &mut untyped_items,
                    })?;
                }
                "spec" | "status" | "addressType" | "endpoints" | "ports" => {
                    match (object.sort(), key.as_str()) {
                        (Sort::Service, "spec") => object.spec = map.next_value()?,
                        (Sort::Node, "spec") => object.node_spec = map.next_value()?,
                        (Sort::Node, "status") => object.node_status = map.next_value()?,
                        (Sort::Pod, "spec") => object.pod_spec = map.next_value()?,
                        (Sort::Pod, "status") => object.pod_status = map.next_value()?,
                        (Sort::Service, "status") => object.status = map.next_value()?,
                        (Sort::Slice, "addressType") => object.address_type = map.next_value()?,
                        (Sort::Slice, "endpoints") => object.endpoints = map.next_value()?,
                        (Sort::Slice, "ports") => object.ports = map.next_value()?,
                        // An invalid entry does not keep the rest of the document from being read.
                        (
                            Sort::ServiceEntry
                            | Sort::WorkloadEntry
                            | Sort::Route(_)
                            | Sort::Grant
                            | Sort::NotKnownYet,
                            _,
                        ) => {
                            object.early.insert(key, map.next_value()?);
                        }
                        _ => _ = map.next_value::<IgnoredAny>()?,
                    }
                }
                _ => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        let inherited = object.of_items();
        for mut untyped in untyped_items {
            untyped.api_version = untyped.api_version.or_else(|| inherited.0.clone());
            untyped.kind = untyped.kind.or_else(|| inherited.1.clone());
            self.entries.push(untyped.finish(self.node));
        }
        if self.item.is_some() && object.is_list() {
            self.entries.push(fault(
                &object,
                "kind",
                "a list within a list; expected an object",
            ));
        } else if has_items
            && object
                .kind
                .as_deref()
                .is_none_or(|kind| !kind.ends_with("List"))
        {
            self.entries.push(fault(
                &object,
                "kind",
                "missing or not a list; expected List",
            ));
        } else if has_items || object.is_list() {
            // The items of this list were already read.
        } else if self.item.is_some() && object.kind.is_none() {
            self.untyped.push(object);
        } else {
            self.entries.push(object.finish(self.node));
        }
        Ok(())
    }
}

fn fault(object: &Object, path: &str, text: &str) -> Entry {
    Entry {
        item: object.item,
        name: objects::object_name(&object.metadata),
        body: Body::Unknown,
        findings: Findings {
            faults: vec![(path.into(), text.into())],
            notes: Vec::new(),
        },
    }
}

struct Items<'a> {
    node: &'a Node,
    entries: &'a mut Vec<Entry>,
    inherited: (Option<String>, Option<String>),
    untyped: &'a mut Vec<Untyped>,
}

impl<'de> DeserializeSeed<'de> for Items<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of Kubernetes objects")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        for item in 0.. {
            let reader = ObjectReader {
                node: self.node,
                entries: self.entries,
                item: Some(item),
                inherited: self.inherited.clone(),
                untyped: self.untyped,
            };
            if seq.next_element_seed(reader)?.is_none() {
                break;
            }
        }
        Ok(())
    }
}
