//! The kinds of objects that are read, and their conversion into the model.
//!
//! A new kind has a row in [`Kind::names`], an arm in [`Kind::try_read`], and its place in the store.

use std::{fmt, net::IpAddr, sync::Arc};

use model::{
    Binding, Gateway, Grant, IstioPolicy, Node, Place, Route, RouteKind, Service, ServiceName,
    Workload,
};
use smallvec::SmallVec;

use super::Text;
use crate::objects::{
    self, ByIstio, Candidate, Findings, NamespaceRules, NodeFacts, Outcome, ServiceEntry, Slice,
    wire::{self, Metadata},
};

/// Istio's group. Its objects are equal in all versions.
const ISTIO: &str = "networking.istio.io";
/// Gateway API's group. The fields that are read are equal in all versions of a kind.
const GATEWAY: &str = "gateway.networking.k8s.io";
/// The group of Istio's policies. Its objects are equal in all versions.
const SECURITY: &str = "security.istio.io";
const DISCOVERY: &str = "discovery.k8s.io";
const OF_ISTIO: &[&str] = &["v1", "v1beta1", "v1alpha3"];

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
    /// Gateway API's Gateways.
    Gateway,
    /// Gateway API's GatewayClasses.
    GatewayClass,
    /// Istio's AuthorizationPolicies.
    AuthorizationPolicy,
    /// Istio's PeerAuthentications.
    PeerAuthentication,
}

/// The names of a kind: in objects, in the API, its group, and the versions that are read, the newest first.
struct Names(
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
);

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 16] = [
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
        Self::Gateway,
        Self::GatewayClass,
        Self::AuthorizationPolicy,
        Self::PeerAuthentication,
    ];

    const fn names(self) -> Names {
        const V1: &[&str] = &["v1"];
        const V1BETA1: &[&str] = &["v1", "v1beta1"];
        match self {
            Self::Service => Names("Service", "services", "", V1),
            Self::Slice => Names("EndpointSlice", "endpointslices", DISCOVERY, V1),
            Self::Node => Names("Node", "nodes", "", V1),
            Self::Pod => Names("Pod", "pods", "", V1),
            Self::Namespace => Names("Namespace", "namespaces", "", V1),
            Self::ServiceEntry => Names("ServiceEntry", "serviceentries", ISTIO, OF_ISTIO),
            Self::WorkloadEntry => Names("WorkloadEntry", "workloadentries", ISTIO, OF_ISTIO),
            Self::TcpRoute => Names("TCPRoute", "tcproutes", GATEWAY, &["v1", "v1alpha2"]),
            Self::TlsRoute => {
                let versions = &["v1", "v1alpha3", "v1alpha2"];
                Names("TLSRoute", "tlsroutes", GATEWAY, versions)
            }
            Self::HttpRoute => Names("HTTPRoute", "httproutes", GATEWAY, V1BETA1),
            Self::GrpcRoute => Names("GRPCRoute", "grpcroutes", GATEWAY, &["v1", "v1alpha2"]),
            Self::ReferenceGrant => Names("ReferenceGrant", "referencegrants", GATEWAY, V1BETA1),
            Self::Gateway => Names("Gateway", "gateways", GATEWAY, V1BETA1),
            Self::GatewayClass => Names("GatewayClass", "gatewayclasses", GATEWAY, V1BETA1),
            Self::AuthorizationPolicy => {
                let (word, resource) = ("AuthorizationPolicy", "authorizationpolicies");
                Names(word, resource, SECURITY, V1BETA1)
            }
            Self::PeerAuthentication => {
                let (word, resource) = ("PeerAuthentication", "peerauthentications");
                Names(word, resource, SECURITY, V1BETA1)
            }
        }
    }

    /// Returns the kind's name in objects.
    pub const fn word(self) -> &'static str {
        self.names().0
    }

    /// Returns the kind's name in paths of the API, RBAC rules and metrics.
    pub const fn resource(self) -> &'static str {
        self.names().1
    }

    /// Returns the kind with this name in objects.
    pub fn of(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// Returns whether the kind is a policy of Istio's.
    pub fn is_policy(self) -> bool {
        self.group() == SECURITY
    }

    /// Returns the kind's group. Empty for Kubernetes' core.
    pub const fn group(self) -> &'static str {
        self.names().2
    }

    /// Returns whether objects of the kind are read in this version of its group.
    pub fn has_version(self, version: &str) -> bool {
        // The fields of Gateway API that are read are equal in all versions of a kind.
        self.group() == GATEWAY || self.names().3.contains(&version)
    }

    /// Returns the kind's `apiVersion`s, the newest first. A cluster may have only an older one of a custom resource.
    pub fn api_versions(self) -> impl Iterator<Item = String> {
        let Names(.., group, versions) = self.names();
        let slash = if group.is_empty() { "" } else { "/" };
        let versions = versions.iter();
        versions.map(move |version| format!("{group}{slash}{version}"))
    }

    /// Returns whether the kind is a custom resource: a cluster may not have it, and other programs than Kubernetes
    /// check its objects.
    pub fn is_custom(self) -> bool {
        [ISTIO, SECURITY, GATEWAY].contains(&self.group())
    }

    /// Returns whether objects of the kind have no namespace.
    pub const fn is_of_the_cluster(self) -> bool {
        matches!(self, Self::Node | Self::Namespace | Self::GatewayClass)
    }

    /// Returns the consequence for the node if the API server refuses to let the kind be read. `None` if the agent
    /// cannot serve new objects without the kind.
    pub const fn without(self) -> Option<&'static str> {
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
            Self::Gateway => Some(
                "captured Pods with an identity cannot connect to what has a waypoint (istio.io/use-waypoint)",
            ),
            Self::GatewayClass => Some(
                "the annotation ambient.istio.io/waypoint-inbound-binding of GatewayClasses has no effect",
            ),
            Self::AuthorizationPolicy | Self::PeerAuthentication => Some(
                "those that limit connections are not named, and all connections to captured Pods whose policies the proxy or the \
                 kernel enforces are refused",
            ),
        }
    }

    /// Converts an object into the model, as `node` sees the object. `file`: the file that has it. `None`: the API.
    pub fn read(self, text: Text<'_>, node: &Node, file: Option<&Arc<str>>) -> Object {
        let mut findings = Findings::default();
        let read = self.try_read(text, node, file.is_some(), &mut findings);
        let ((name, version), body) = match read {
            Some((key, body)) => (key, Some(body)),
            None => (self.key(&text.metadata()), None),
        };
        Object {
            kind: self,
            name,
            version,
            file: file.cloned(),
            body,
            findings,
        }
    }

    fn try_read(
        self,
        text: Text<'_>,
        node: &Node,
        is_in_file: bool,
        findings: &mut Findings,
    ) -> Option<((ServiceName, String), Body)> {
        Some(match self {
            Self::Service => {
                let service: wire::Service = text.read(findings)?;
                let key = self.key(&service.metadata);
                let by_istio = objects::by_istio(&service, findings);
                let body = match objects::service(service, findings) {
                    Outcome::Served(service) => Body::Service(Arc::new(service), by_istio),
                    Outcome::LeftAlone => Body::Others,
                };
                (key, body)
            }
            Self::Slice => {
                let slice: wire::EndpointSlice = text.read(findings)?;
                let key = self.key(&slice.metadata);
                let body = match objects::slice(&slice, node, findings) {
                    Outcome::Served(served) => {
                        let endpoints = slice.endpoints.into_iter().flatten();
                        let mut nodes = endpoints.filter_map(|endpoint| endpoint.node_name);
                        Body::Slice(served, nodes.find(|name| **name != *node.name))
                    }
                    Outcome::LeftAlone => Body::Others,
                };
                (key, body)
            }
            Self::Node => {
                let node: wire::Node = text.read(findings)?;
                let facts = objects::node(&node, findings);
                (self.key(&node.metadata), Body::Node(facts))
            }
            Self::Pod => {
                let pod: wire::Pod = text.read(findings)?;
                let body = Pod::new(&pod, node, is_in_file, findings);
                (self.key(&pod.metadata), Body::Pod(Box::new(body)))
            }
            Self::Namespace => {
                let metadata = text.read::<wire::Namespace>(findings)?.metadata;
                let rules = objects::namespace(&metadata, findings);
                (self.key(&metadata), Body::Namespace(rules))
            }
            Self::ServiceEntry => {
                let entry: wire::ServiceEntry = text.read(findings)?;
                let key = self.key(&entry.metadata);
                let entry = objects::service_entry(entry, node, findings);
                (key, Body::ServiceEntry(Box::new(entry)))
            }
            Self::WorkloadEntry => {
                let entry: wire::WorkloadEntry = text.read(findings)?;
                let candidate = objects::workload_entry(&entry, node, findings);
                let body = Body::WorkloadEntry(Box::new(candidate));
                (self.key(&entry.metadata), body)
            }
            Self::TcpRoute | Self::TlsRoute | Self::HttpRoute | Self::GrpcRoute => {
                let route: wire::Route = text.read(findings)?;
                let key = self.key(&route.metadata);
                let route = objects::route(self.route()?, route, findings);
                let body = route.map_or(Body::Others, |route| Body::Route(Arc::new(route)));
                (key, body)
            }
            Self::ReferenceGrant => {
                let grant: wire::ReferenceGrant = text.read(findings)?;
                let body = objects::grant(&grant, findings);
                (self.key(&grant.metadata), Body::Grant(Arc::new(body)))
            }
            Self::Gateway => {
                let gateway: wire::Gateway = text.read(findings)?;
                let body = objects::gateway(&gateway, findings);
                (self.key(&gateway.metadata), Body::Gateway(Arc::new(body)))
            }
            Self::GatewayClass => {
                // Only the metadata is read, as of a Namespace.
                let metadata = text.read::<wire::Namespace>(findings)?.metadata;
                let body = objects::gateway_class(&metadata, findings);
                (self.key(&metadata), Body::GatewayClass(body))
            }
            Self::AuthorizationPolicy | Self::PeerAuthentication => {
                self.policy(text, is_in_file, findings)
            }
        })
    }

    /// Reads a policy. The agent treats a policy that cannot be read as one that limits all connections. In a file,
    /// metadata that cannot be read is a fault, because the policy's name and namespace may be unknown.
    fn policy(
        self,
        text: Text<'_>,
        is_in_file: bool,
        findings: &mut Findings,
    ) -> ((ServiceName, String), Body) {
        let Some(policy) = text.read::<wire::IstioPolicy>(findings) else {
            if !is_in_file {
                findings.notes.append(&mut findings.faults);
            }
            let body = Body::Policy(Some(objects::unreadable_policy()));
            return (self.key(&text.metadata()), body);
        };
        let body = objects::istio_policy(self.word(), &policy, findings);
        (self.key(&policy.metadata), Body::Policy(body))
    }

    /// Returns the kind of route. `None` if the kind is not a route.
    pub fn route(self) -> Option<RouteKind> {
        objects::route_kind(self.word())
    }

    /// Returns an object's name, and its `resourceVersion`.
    fn key(self, metadata: &Metadata) -> (ServiceName, String) {
        let version = metadata.resource_version.clone();
        (self.name(metadata), version.unwrap_or_default())
    }

    /// Returns an object's name. An object of the cluster has no namespace, whatever `metadata` says.
    pub fn name(self, metadata: &Metadata) -> ServiceName {
        if self.is_of_the_cluster() {
            ServiceName::new("", metadata.name.as_deref().unwrap_or_default())
        } else {
            objects::object_name(metadata)
        }
    }

    /// Returns an object's name for people: `Service default/web`, `Node node1`.
    pub fn label(self, name: &ServiceName) -> String {
        if self.is_of_the_cluster() {
            format!("{} {}", self.word(), name.name())
        } else {
            format!("{} {name}", self.word())
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

/// An object after its conversion into the model.
#[derive(Debug)]
pub struct Object {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace and name.
    pub name: ServiceName,
    /// Its `resourceVersion`.
    pub version: String,
    /// The file that has it. `None`: the API.
    pub file: Option<Arc<str>>,
    /// The result. `None` if a field cannot be read.
    pub body: Option<Body>,
    /// Problems of the object.
    pub findings: Findings,
}

/// The result of an object. It is valid only if its findings have no faults.
#[derive(Debug)]
pub enum Body {
    /// A Service without endpoints.
    Service(Arc<Service>, ByIstio),
    /// A slice, and another node that one of its endpoints is on.
    Slice(Slice, Option<String>),
    /// A Node.
    Node(NodeFacts),
    /// A Pod.
    Pod(Box<Pod>),
    /// A Namespace.
    Namespace(NamespaceRules),
    /// A ServiceEntry.
    ServiceEntry(Box<ServiceEntry>),
    /// A WorkloadEntry.
    WorkloadEntry(Box<Candidate>),
    /// A route that is attached to a Service.
    Route(Arc<Route>),
    /// A ReferenceGrant.
    Grant(Arc<Grant>),
    /// A Gateway.
    Gateway(Arc<Gateway>),
    /// The binding of a GatewayClass.
    GatewayClass(Option<Binding>),
    /// A policy of Istio's. `None`: it limits no connections to Pods.
    Policy(Option<IstioPolicy>),
    /// An object that is left to others.
    Others,
}

/// The properties of a pod.
#[derive(Debug)]
pub struct Pod {
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
    /// Converts each part by itself, so that a fault in one part does not remove the others. A Pod without a node is on
    /// this node if it is in a file. In the API it is not scheduled yet.
    fn new(pod: &wire::Pod, node: &Node, is_in_file: bool, findings: &mut Findings) -> Self {
        let of = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let of = of.unwrap_or_default();
        if *of != *node.name && !(is_in_file && of.is_empty()) {
            return Self::elsewhere(pod, node, findings);
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
    fn elsewhere(pod: &wire::Pod, node: &Node, findings: &mut Findings) -> Self {
        let mut found = Findings::default();
        let workload = objects::pod(pod, node, &mut found);
        // Without a valid name it has no identity.
        findings.faults.extend(found.faults);
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
