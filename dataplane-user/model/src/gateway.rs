//! Gateways, and the labels that make one the waypoint of an object.

use std::net::IpAddr;

use super::ServiceName;

/// The waypoint that labels name: `istio.io/use-waypoint` and `istio.io/use-waypoint-namespace`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UseWaypoint {
    /// `none`: the object has no waypoint, whatever its Namespace names.
    None,
    /// The Gateway with this name.
    Gateway(ServiceName),
}

impl UseWaypoint {
    /// Returns the name of the Gateway.
    pub fn gateway(&self) -> Option<&ServiceName> {
        match self {
            Self::None => None,
            Self::Gateway(name) => Some(name),
        }
    }
}

/// A Gateway, as far as it concerns connections that go through it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Whether it takes connections that are addressed to services (`istio.io/waypoint-for`).
    pub for_services: bool,
    /// Whether it takes connections that are addressed to workloads.
    pub for_workloads: bool,
    /// `status.addresses`.
    pub addresses: Box<[GatewayAddress]>,
    /// The namespaces whose objects may use it.
    pub allowed: AllowedNamespaces,
}

/// An address of a Gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GatewayAddress {
    /// A VIP of a service, or the address of a workload.
    Ip(IpAddr),
    /// The cluster IP of a service, by the service's name in DNS.
    Service(ServiceName),
}

/// The namespaces whose objects may use a Gateway (`allowedRoutes.namespaces` of its listener for HBONE).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedNamespaces {
    /// The Gateway's own.
    #[default]
    Same,
    /// All.
    All,
    /// Those whose labels meet all requirements.
    Selected(Box<[Requirement]>),
    /// None.
    None,
}

/// A requirement of a label selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The label's key.
    pub key: Box<str>,
    /// The values of which the label has one; `None`: any.
    pub values: Option<Box<[Box<str>]>>,
    /// Whether the label must not be so, or must not exist (`NotIn`, `DoesNotExist`).
    pub negated: bool,
}
