//! The kinds that are read, and one object of each in the model's terms.

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

/// Which kinds are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WantedKinds {
    /// What of Kubernetes' own objects.
    pub scope: Scope,
    /// Whether Istio's ServiceEntries are read, and what they select: WorkloadEntries, and pods.
    pub entries: bool,
    /// Whether Gateway API's routes are read, and ReferenceGrants.
    pub routes: bool,
    /// Whether the names of services are answered: then headless services and those of other proxies are read with their
    /// slices, because they have names.
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
    /// Whether a kind is read.
    pub fn includes(self, kind: Kind) -> bool {
        match kind {
            Kind::ServiceEntry | Kind::WorkloadEntry => self.entries,
            Kind::Pod if self.entries => true,
            kind if kind.is_of_gateway_api() => self.routes,
            kind => kind.scope().is_some_and(|scope| scope <= self.scope),
        }
    }
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

    /// What it is read for; none: for entries or routes.
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

    /// The kind of its routes; none: it is none of routes.
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

    /// Whether it is a custom resource, which a cluster may not have.
    pub(super) const fn may_be_missing(self) -> bool {
        matches!(self, Self::ServiceEntry | Self::WorkloadEntry) || self.is_of_gateway_api()
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
            Self::ServiceEntry => Some("no host of a ServiceEntry is served"),
            Self::WorkloadEntry => Some("ServiceEntries select pods only"),
            Self::TcpRoute | Self::TlsRoute | Self::HttpRoute | Self::GrpcRoute => {
                Some("no Service is split by a route of this kind")
            }
            Self::ReferenceGrant => Some("no route leads to a Service of another namespace"),
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
            Self::ServiceEntry => "serviceentries",
            Self::WorkloadEntry => "workloadentries",
            Self::TcpRoute => "tcproutes",
            Self::TlsRoute => "tlsroutes",
            Self::HttpRoute => "httproutes",
            Self::GrpcRoute => "grpcroutes",
            Self::ReferenceGrant => "referencegrants",
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
            Self::ServiceEntry => "ServiceEntry",
            Self::WorkloadEntry => "WorkloadEntry",
            Self::TcpRoute => "TCPRoute",
            Self::TlsRoute => "TLSRoute",
            Self::HttpRoute => "HTTPRoute",
            Self::GrpcRoute => "GRPCRoute",
            Self::ReferenceGrant => "ReferenceGrant",
        }
    }

    /// Where the API server has them, the newest version first: a custom resource may have an older one only.
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

    /// Whether its objects are in no namespace.
    pub(super) const fn is_of_the_cluster(self) -> bool {
        matches!(self, Self::Node | Self::Namespace)
    }

    /// What to ask for in a list.
    pub(super) fn list(self, sight: &KindPerspective) -> ListParams {
        ListParams {
            label_selector: self.labels(sight).map(str::to_owned),
            field_selector: self.fields(sight),
            ..ListParams::default().limit(PAGE)
        }
    }

    /// What to ask for in a watch.
    pub(super) fn watch(self, sight: &KindPerspective) -> WatchParams {
        WatchParams {
            label_selector: self.labels(sight).map(str::to_owned),
            field_selector: self.fields(sight),
            ..WatchParams::default()
        }
    }

    /// The objects that are read, by their labels; none: all.
    fn labels(self, sight: &KindPerspective) -> Option<&'static str> {
        match self {
            // Names do not depend on the proxy.
            Self::Service | Self::Slice if sight.names => None,
            Self::Service | Self::Slice => Some(OURS),
            _ => None,
        }
    }

    /// The objects that are read, by their fields; none: all. Those of this node: a cluster's others are many.
    fn fields(self, sight: &KindPerspective) -> Option<String> {
        let field = match self {
            Self::Pod if !sight.everywhere => "spec.nodeName",
            Self::Node => "metadata.name",
            _ => return None,
        };
        Some(format!("{field}={}", sight.node.name))
    }

    /// An object in the model's terms, as `node` sees it.
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

    /// Which field of an object cannot be read, and why not.
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

/// By what an object is known that is in no namespace.
pub(super) fn of_the_cluster(name: &str) -> ServiceName {
    objects::object_name(&Metadata {
        name: Some(name.to_owned()),
        ..Metadata::default()
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

/// What there is to know of a pod.
#[derive(Debug)]
pub(super) struct Pod {
    /// Its host ports; `None` if they make no sense, and stay what they were.
    pub host_ports: Option<Vec<Service>>,
    /// Itself, by its own rules; `None` if it has no connections of its own (any more).
    pub workload: Option<Workload>,
    /// Its addresses and those of its node.
    pub addresses: SmallVec<[IpAddr; 4]>,
    /// As what a ServiceEntry may select it.
    pub candidate: Option<Box<Candidate>>,
}

impl Pod {
    /// One is not left out for the other's faults.
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

    /// Of one on another node only who it is matters here; what is wrong with it is told there.
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
