//! Routes: how a service's connections are shared out among other services (Gateway API, attached to a Service).

use std::{collections::BTreeSet, fmt, sync::Arc};

use smallvec::SmallVec;

use super::ServiceName;

/// The kind of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteKind {
    /// `TCPRoute`.
    Tcp,
    /// `TLSRoute`.
    Tls,
    /// `HTTPRoute`.
    Http,
    /// `GRPCRoute`.
    Grpc,
}

impl RouteKind {
    /// As objects have it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Tcp => "TCPRoute",
            Self::Tls => "TLSRoute",
            Self::Http => "HTTPRoute",
            Self::Grpc => "GRPCRoute",
        }
    }
}

/// A route's kind, namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteName {
    /// Its namespace.
    pub namespace: Box<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its kind.
    pub kind: RouteKind,
}

impl fmt::Display for RouteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.word(), self.namespace, self.name)
    }
}

/// A route that is attached to Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Its name.
    pub name: RouteName,
    /// `metadata.creationTimestamp` in seconds since the epoch; a route without it is the youngest.
    pub created: Option<i64>,
    /// `spec.parentRefs` that are Services of its own namespace.
    pub parents: SmallVec<[Parent; 1]>,
    /// The `spec.parentRefs` that are Services of other namespaces, and why the route is not for them. `None`: there are none.
    pub abroad: Option<Box<str>>,
    /// The field of the route that layer 4 cannot serve, and why. `None`: the route can be served.
    pub unsupported: Option<Box<str>>,
    /// `spec.rules[0].backendRefs`.
    pub backends: Vec<BackendRef>,
}

impl Route {
    /// The parents that are one Service.
    pub fn parents_at(&self, service: &ServiceName) -> impl Iterator<Item = &Parent> {
        let parents = self.parents.iter();
        parents.filter(move |parent| parent.service == *service)
    }
}

/// A Service to which a route is attached, in the route's own namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The Service.
    pub service: ServiceName,
    /// `port`: only this port of the Service.
    pub port: Option<u16>,
    /// `sectionName`: only the port of this name.
    pub section: Option<Box<str>>,
}

/// An element of `backendRefs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendRef {
    /// The object that the reference names.
    pub to: BackendTo,
    /// `port`.
    pub port: Option<u16>,
    /// `weight`: its part of the connections, of the sum of all; 0: none.
    pub weight: u32,
}

/// The target of an element of `backendRefs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendTo {
    /// A Service.
    Service(ServiceName),
    /// A host of a ServiceEntry (`group: networking.istio.io`, `kind: Hostname`).
    Host(Arc<str>),
    /// Nothing that a route can lead to: the reason, as Gateway API names it, and a sentence.
    Invalid(&'static str, Box<str>),
}

/// A ReferenceGrant: who may lead to the Services of its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Its namespace and name.
    pub name: ServiceName,
    /// The routes, by kind and namespace.
    pub from: BTreeSet<(RouteKind, Box<str>)>,
    /// The Services; none: all of the namespace.
    pub to: Option<BTreeSet<Box<str>>>,
}

impl Grant {
    /// Whether it lets a route lead to a Service of its namespace.
    pub fn permits(&self, from: &RouteName, to: &ServiceName) -> bool {
        let names = &self.to;
        self.name.namespace() == to.namespace()
            && self.from.contains(&(from.kind, from.namespace.clone()))
            && names.as_ref().is_none_or(|names| names.contains(to.name()))
    }
}
