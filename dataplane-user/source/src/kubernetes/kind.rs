//! The kinds of objects that are read, and their conversion into the model.

use std::{fmt, net::IpAddr, sync::Arc};

use kube::core::params::{ListParams, WatchParams};
use model::{Grant, Node, Place, Route, RouteKind, Service, ServiceName, Workload};
use serde::de::DeserializeOwned;
use smallvec::SmallVec;

use super::sight::KindPerspective;
use crate::objects::{
    self, ByIstio, Candidate, Findings, NamespaceRules, NodeFacts, Outcome, ServiceEntry, Slice,
    wire::{self, Metadata, Named},
};

/// The label selector that kube-proxy uses, too: without services of other proxies, and without headless services.
const OURS: &str = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";
/// Number of objects in one page of a list. The text of a whole page is in memory while it is read.
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
    /// The Pods on this node, or on all nodes.
    Pod,
    /// Namespaces.
    Namespace,
    /// Istio's ServiceEntries.
    ServiceEntry,
    /// Istio's WorkloadEntries.
    WorkloadEntry,
    /// Gateway API's TCPRoutes.
    TcpRoute,
    /// Gateway API's TLSRoutes.
    TlsRoute,
    /// Gateway API's HTTPRoutes.
    HttpRoute,
    /// Gateway API's GRPCRoutes.
    GrpcRoute,
    /// Gateway API's ReferenceGrants.
    ReferenceGrant,
}

/// The kinds to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WantedKinds {
    /// The part of Kubernetes' own objects.
    pub scope: Scope,
    /// Whether to read Istio's ServiceEntries, and the WorkloadEntries and pods that they select.
    pub entries: bool,
    /// Whether to read Gateway API's routes and ReferenceGrants.
    pub routes: bool,
    /// Whether to answer the names of services. If so, headless services and services of other proxies are read with
    /// their slices, because they have names.
    pub names: bool,
}

impl From<Scope> for WantedKinds {
    fn from(scope: Scope) -> Self {
        Self {
            scope,
            entries: false,
            routes: false,
            names: false,
        }
    }
}

impl WantedKinds {
    /// Returns whether a kind is read.
    pub fn includes(self, kind: Kind) -> bool {
        match kind {
            Kind::ServiceEntry | Kind::WorkloadEntry => self.entries,
            Kind::Pod if self.entries => true,
            kind if kind.is_of_gateway_api() => self.routes,
            kind => kind.scope().is_some_and(|scope| scope <= self.scope),
        }
    }
}

/// The purpose of reading the API. Each purpose includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Services, their endpoints, and this node.
    #[default]
    Services,
    /// The host ports of this node's pods.
    HostPorts,
    /// The pods of this node that are captured, with their rules. Also the pods of all nodes while a pod of this node
    /// may reach only known destinations (`dataplane.io/egress: deny`).
    Mesh,
    /// As [`Scope::Mesh`], and the pods of all nodes in any case.
    Registry,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::Service,
        Self::Slice,
        Self::Node,
        Self::Pod,
        Self::Namespace,
        Self::ServiceEntry,
        Self::WorkloadEntry,
        Self::TcpRoute,
        Self::TlsRoute,
        Self::HttpRoute,
        Self::GrpcRoute,
        Self::ReferenceGrant,
    ];

    /// Returns the purpose of reading the kind. `None` if the kind is for entries or routes.
    const fn scope(self) -> Option<Scope> {
        match self {
            Self::Service | Self::Slice | Self::Node => Some(Scope::Services),
            Self::Pod => Some(Scope::HostPorts),
            Self::Namespace => Some(Scope::Mesh),
            Self::ServiceEntry
            | Self::WorkloadEntry
            | Self::TcpRoute
            | Self::TlsRoute
            | Self::HttpRoute
            | Self::GrpcRoute
            | Self::ReferenceGrant => None,
        }
    }

    /// Returns the kind of route. `None` if the kind is not a route.
    pub(super) const fn route(self) -> Option<RouteKind> {
        match self {
            Self::TcpRoute => Some(RouteKind::Tcp),
            Self::TlsRoute => Some(RouteKind::Tls),
            Self::HttpRoute => Some(RouteKind::Http),
            Self::GrpcRoute => Some(RouteKind::Grpc),
            _ => None,
        }
    }

    const fn is_of_gateway_api(self) -> bool {
        self.route().is_some() || matches!(self, Self::ReferenceGrant)
    }

    /// Returns whether the kind is a custom resource, which a cluster may not have.
    pub(super) const fn may_be_missing(self) -> bool {
        matches!(self, Self::ServiceEntry | Self::WorkloadEntry) || self.is_of_gateway_api()
    }

    /// Returns the consequence for the node if the API server refuses to let the kind be read. `None` if the agent
    /// cannot serve new objects without the kind.
    pub(super) const fn without(self) -> Option<&'static str> {
        match self {
            Self::Service | Self::Slice | Self::Node => None,
            Self::Pod => Some(
                "host ports of pods (hostPort) are not served, and no pod is captured by its labels",
            ),
            Self::Namespace => Some("no pod is captured by the labels of its namespace"),
            Self::ServiceEntry => Some("no host of a ServiceEntry is served"),
            Self::WorkloadEntry => Some("ServiceEntries select pods only"),
            Self::TcpRoute | Self::TlsRoute | Self::HttpRoute | Self::GrpcRoute => {
                Some("no Service is split by a route of this kind")
            }
            Self::ReferenceGrant => Some("no route leads to a Service of another namespace"),
        }
    }

    /// Returns the kind's name in paths of the API, RBAC rules and metrics.
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::Slice => "endpointslices",
            Self::Node => "nodes",
            Self::Pod => "pods",
            Self::Namespace => "namespaces",
            Self::ServiceEntry => "serviceentries",
            Self::WorkloadEntry => "workloadentries",
            Self::TcpRoute => "tcproutes",
            Self::TlsRoute => "tlsroutes",
            Self::HttpRoute => "httproutes",
            Self::GrpcRoute => "grpcroutes",
            Self::ReferenceGrant => "referencegrants",
        }
    }

    /// Returns the kind's name in objects.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Slice => "EndpointSlice",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::Namespace => "Namespace",
            Self::ServiceEntry => "ServiceEntry",
            Self::WorkloadEntry => "WorkloadEntry",
            Self::TcpRoute => "TCPRoute",
            Self::TlsRoute => "TLSRoute",
            Self::HttpRoute => "HTTPRoute",
            Self::GrpcRoute => "GRPCRoute",
            Self::ReferenceGrant => "ReferenceGrant",
        }
    }

    /// Returns the paths of the kind, the newest version first. A cluster may have only an older version of a custom
    /// resource.
    pub(super) const fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Service => &["/api/v1/services"],
            Self::Slice => &["/apis/discovery.k8s.io/v1/endpointslices"],
            Self::Node => &["/api/v1/nodes"],
            Self::Pod => &["/api/v1/pods"],
            Self::Namespace => &["/api/v1/namespaces"],
            Self::ServiceEntry => &[
                "/apis/networking.istio.io/v1/serviceentries",
                "/apis/networking.istio.io/v1beta1/serviceentries",
                "/apis/networking.istio.io/v1alpha3/serviceentries",
            ],
            Self::WorkloadEntry => &[
                "/apis/networking.istio.io/v1/workloadentries",
                "/apis/networking.istio.io/v1beta1/workloadentries",
                "/apis/networking.istio.io/v1alpha3/workloadentries",
            ],
            Self::TcpRoute => &[
                "/apis/gateway.networking.k8s.io/v1/tcproutes",
                "/apis/gateway.networking.k8s.io/v1alpha2/tcproutes",
            ],
            Self::TlsRoute => &[
                "/apis/gateway.networking.k8s.io/v1/tlsroutes",
                "/apis/gateway.networking.k8s.io/v1alpha3/tlsroutes",
                "/apis/gateway.networking.k8s.io/v1alpha2/tlsroutes",
            ],
            Self::HttpRoute => &[
                "/apis/gateway.networking.k8s.io/v1/httproutes",
                "/apis/gateway.networking.k8s.io/v1beta1/httproutes",
            ],
            Self::GrpcRoute => &[
                "/apis/gateway.networking.k8s.io/v1/grpcroutes",
                "/apis/gateway.networking.k8s.io/v1alpha2/grpcroutes",
            ],
            Self::ReferenceGrant => &[
                "/apis/gateway.networking.k8s.io/v1/referencegrants",
                "/apis/gateway.networking.k8s.io/v1beta1/referencegrants",
            ],
        }
    }

    /// Returns whether objects of the kind have no namespace.
    pub(super) const fn is_of_the_cluster(self) -> bool {
        matches!(self, Self::Node | Self::Namespace)
    }

    /// Returns the parameters of a list.
    pub(super) fn list(self, sight: &KindPerspective) -> ListParams {
        ListParams {
            label_selector: self.labels(sight).map(str::to_owned),
            field_selector: self.fields(sight),
            ..ListParams::default().limit(PAGE)
        }
    }

    /// Returns the parameters of a watch.
    pub(super) fn watch(self, sight: &KindPerspective) -> WatchParams {
        WatchParams {
            label_selector: self.labels(sight).map(str::to_owned),
            field_selector: self.fields(sight),
            ..WatchParams::default()
        }
    }

    /// Returns the label selector of the objects to read. `None`: all objects.
    fn labels(self, sight: &KindPerspective) -> Option<&'static str> {
        match self {
            // Names do not depend on the proxy, so no service is left out.
            Self::Service | Self::Slice if sight.names => None,
            Self::Service | Self::Slice => Some(OURS),
            _ => None,
        }
    }

    /// Returns the field selector of the objects to read. `None`: all objects. It selects the objects of this node,
    /// because a cluster has many others.
    fn fields(self, sight: &KindPerspective) -> Option<String> {
        let field = match self {
            Self::Pod if !sight.everywhere => "spec.nodeName",
            Self::Node => "metadata.name",
            _ => return None,
        };
        Some(format!("{field}={}", sight.node.name))
    }

    /// Converts an object into the model, as `node` sees the object.
    pub(super) fn read(self, text: &str, node: &Node) -> Object {
        self.try_read(text, node).unwrap_or_else(|_| {
            let mut findings = Findings::default();
            findings.faults.push(self.explain(text));
            let name = from_json::<Named>(text).unwrap_or_default().metadata;
            let metadata = Metadata {
                name: name.name,
                namespace: name.namespace,
                ..Metadata::default()
            };
            Object {
                version: name.resource_version.unwrap_or_default(),
                name: objects::object_name(&metadata),
                body: match self {
                    Self::Service => Body::Service(None, ByIstio::default()),
                    Self::Slice => Body::Slice(None),
                    Self::Node => Body::Node(NodeFacts::default()),
                    Self::Pod => Body::Pod(None),
                    Self::Namespace => Body::Namespace(NamespaceRules::default()),
                    Self::ServiceEntry => Body::ServiceEntry(None),
                    Self::WorkloadEntry => Body::WorkloadEntry(None),
                    Self::ReferenceGrant => Body::Grant(None),
                    Self::TcpRoute | Self::TlsRoute | Self::HttpRoute | Self::GrpcRoute => {
                        Body::Route(None)
                    }
                },
                findings,
            }
        })
    }

    fn try_read(self, text: &str, node: &Node) -> Result<Object, serde_json::Error> {
        fn key(metadata: &Metadata) -> (ServiceName, String) {
            let version = metadata.resource_version.clone();
            (objects::object_name(metadata), version.unwrap_or_default())
        }
        fn route(
            kind: RouteKind,
            text: &str,
            findings: &mut Findings,
        ) -> Result<((ServiceName, String), Body), serde_json::Error> {
            let route: wire::Route = from_json(text)?;
            let key = key(&route.metadata);
            let route = objects::route(kind, route, findings);
            Ok((key, Body::Route(route.map(Arc::new))))
        }
        let mut findings = Findings::default();
        let ((name, version), body) = match self {
            Self::Service => {
                let service: wire::Service = from_json(text)?;
                let key = key(&service.metadata);
                let by_istio = objects::by_istio(&service, &mut findings);
                let body = match objects::service(service, &mut findings) {
                    Outcome::Served(service) => Some(service),
                    Outcome::LeftAlone => None,
                };
                (key, Body::Service(body, by_istio))
            }
            Self::Slice => {
                let slice: wire::EndpointSlice = from_json(text)?;
                let body = match objects::slice(&slice, node, &mut findings) {
                    Outcome::Served(slice) => Some(slice),
                    Outcome::LeftAlone => None,
                };
                (key(&slice.metadata), Body::Slice(body))
            }
            Self::Node => {
                let node: wire::Node = from_json(text)?;
                let facts = objects::node(&node, &mut findings);
                (key(&node.metadata), Body::Node(facts))
            }
            Self::Pod => {
                let pod: wire::Pod = from_json(text)?;
                let body = Pod::new(&pod, node, &mut findings);
                (key(&pod.metadata), Body::Pod(Some(body)))
            }
            Self::Namespace => {
                let metadata = from_json::<wire::Namespace>(text)?.metadata;
                let rules = objects::namespace(&metadata, &mut findings);
                (key(&metadata), Body::Namespace(rules))
            }
            Self::ServiceEntry => {
                let entry: wire::ServiceEntry = from_json(text)?;
                let key = key(&entry.metadata);
                let entry = objects::service_entry(entry, node, &mut findings);
                (key, Body::ServiceEntry(Some(Box::new(entry))))
            }
            Self::WorkloadEntry => {
                let entry: wire::WorkloadEntry = from_json(text)?;
                let candidate = objects::workload_entry(&entry, node, &mut findings);
                (
                    key(&entry.metadata),
                    Body::WorkloadEntry(Some(Box::new(candidate))),
                )
            }
            Self::TcpRoute => route(RouteKind::Tcp, text, &mut findings)?,
            Self::TlsRoute => route(RouteKind::Tls, text, &mut findings)?,
            Self::HttpRoute => route(RouteKind::Http, text, &mut findings)?,
            Self::GrpcRoute => route(RouteKind::Grpc, text, &mut findings)?,
            Self::ReferenceGrant => {
                let grant: wire::ReferenceGrant = from_json(text)?;
                let body = objects::grant(&grant, &mut findings);
                (key(&grant.metadata), Body::Grant(Some(Arc::new(body))))
            }
        };
        Ok(Object {
            name,
            version,
            body,
            findings,
        })
    }

    /// Returns the field of an object that cannot be read, and the reason.
    fn explain(self, text: &str) -> (String, String) {
        fn why<T: DeserializeOwned>(text: &str) -> Option<(String, String)> {
            let mut json = serde_json::Deserializer::from_str(text);
            let error = serde_path_to_error::deserialize::<_, T>(&mut json).err()?;
            Some((error.path().to_string(), error.inner().to_string()))
        }
        match self {
            Self::Service => why::<wire::Service>(text),
            Self::Slice => why::<wire::EndpointSlice>(text),
            Self::Node => why::<wire::Node>(text),
            Self::Pod => why::<wire::Pod>(text),
            Self::Namespace => why::<wire::Namespace>(text),
            Self::ServiceEntry => why::<wire::ServiceEntry>(text),
            Self::WorkloadEntry => why::<wire::WorkloadEntry>(text),
            Self::TcpRoute | Self::TlsRoute | Self::HttpRoute | Self::GrpcRoute => {
                why::<wire::Route>(text)
            }
            Self::ReferenceGrant => why::<wire::ReferenceGrant>(text),
        }
        .unwrap_or_default()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

/// Returns the key of an object without a namespace.
pub(super) fn of_the_cluster(name: &str) -> ServiceName {
    objects::object_name(&Metadata {
        name: Some(name.to_owned()),
        ..Metadata::default()
    })
}

fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, serde_json::Error> {
    serde_json::from_str(text)
}

/// An object after its conversion into the model.
#[derive(Debug)]
pub(super) struct Object {
    /// Its namespace and name.
    pub name: ServiceName,
    /// Its `resourceVersion`.
    pub version: String,
    /// The result.
    pub body: Body,
    /// Problems of the object.
    pub findings: Findings,
}

/// The result of an object. `None` if the object is left to others, or if it is invalid.
#[derive(Debug)]
pub(super) enum Body {
    Service(Option<Service>, ByIstio),
    Slice(Option<Slice>),
    Node(NodeFacts),
    Pod(Option<Pod>),
    Namespace(NamespaceRules),
    ServiceEntry(Option<Box<ServiceEntry>>),
    WorkloadEntry(Option<Box<Candidate>>),
    Route(Option<Arc<Route>>),
    Grant(Option<Arc<Grant>>),
}

/// The properties of a pod.
#[derive(Debug)]
pub(super) struct Pod {
    /// Its host ports. `None` if they are invalid; then the former ones stay.
    pub host_ports: Option<Vec<Service>>,
    /// The pod as a workload, with its own rules. `None` if it has no connections of its own, or no longer has them.
    pub workload: Option<Workload>,
    /// Its addresses and those of its node.
    pub addresses: SmallVec<[IpAddr; 4]>,
    /// The pod as a ServiceEntry may select it.
    pub candidate: Option<Box<Candidate>>,
}

impl Pod {
    /// Converts each part by itself, so that a fault in one part does not remove the others.
    fn new(pod: &wire::Pod, node: &Node, findings: &mut Findings) -> Self {
        let of = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        if of != Some(&*node.name) {
            return Self::elsewhere(pod, node);
        }
        let mut of_ports = Findings::default();
        let host_ports = objects::host_ports(pod, node, &mut of_ports);
        let host_ports = of_ports.faults.is_empty().then_some(host_ports);
        let workload = objects::pod(pod, node, findings);
        for fault in of_ports.faults {
            if !findings.faults.contains(&fault) {
                findings.faults.push(fault);
            }
        }
        findings.notes.extend(of_ports.notes);
        Self {
            host_ports,
            workload,
            addresses: objects::pod_addresses(pod),
            candidate: objects::candidate(pod, node).map(Box::new),
        }
    }

    /// Converts a pod on another node. Only its identity matters here, and its own node reports its problems.
    fn elsewhere(pod: &wire::Pod, node: &Node) -> Self {
        let workload = objects::pod(pod, node, &mut Findings::default());
        Self {
            host_ports: Some(Vec::new()),
            workload: workload.map(|workload| Workload {
                place: Place::Elsewhere,
                rules: Arc::default(),
                ..workload
            }),
            addresses: objects::pod_addresses(pod),
            candidate: objects::candidate(pod, node).map(Box::new),
        }
    }
}
