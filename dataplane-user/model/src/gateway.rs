//! Gateways, and the labels that make one the waypoint of an object.

use std::net::IpAddr;

use super::ServiceName;

/// The port at which Pods and waypoints accept tunnels (HBONE).
pub const HBONE: u16 = 15_008;

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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gateway {
    /// Whether it takes connections that are addressed to services (`istio.io/waypoint-for`).
    pub for_services: bool,
    /// Whether it takes connections that are addressed to workloads.
    pub for_workloads: bool,
    /// `status.addresses`.
    pub addresses: Box<[GatewayAddress]>,
    /// `spec.listeners`.
    pub listeners: Box<[GatewayListener]>,
    /// The binding of its annotation.
    pub binding: Option<Binding>,
    /// The GatewayClass, whose binding counts if the Gateway has no annotation.
    pub class: Box<str>,
}

impl Gateway {
    /// Returns the namespaces whose objects may use it: those that the listener of its binding allows, or else the listener
    /// for HBONE.
    pub(super) fn allowed(&self, binding: Option<Binding>) -> &AllowedNamespaces {
        let is_bound = |of: &&GatewayListener| match binding {
            Some(Binding {
                port: Some(port), ..
            }) => of.port == port,
            Some(Binding { has_header, .. }) => has_header && &*of.protocol == "istio.io/PROXY",
            None => false,
        };
        let is_hbone = |of: &&GatewayListener| &*of.protocol == "HBONE" && of.port == HBONE;
        let all = || self.listeners.iter();
        let listener = all().find(is_bound).or_else(|| all().find(is_hbone));
        listener.map_or(&AllowedNamespaces::Same, |of| &of.allowed)
    }
}

/// A listener of a Gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayListener {
    /// `protocol`.
    pub protocol: Box<str>,
    /// `port`.
    pub port: u16,
    /// The namespaces whose objects may use it.
    pub allowed: AllowedNamespaces,
}

/// How the Pods of a Gateway take the streams of tunnels (`ambient.istio.io/waypoint-inbound-binding`). The node's proxy ends
/// the tunnels, and connects to the Pod whatever the destination of the stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Whether the connection to the Pod begins with a PROXY header (`PROXY`), or not (`NONE`).
    pub has_header: bool,
    /// The port of the Pod. `None`: the port of the stream's destination.
    pub port: Option<u16>,
}

/// An address of a Gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GatewayAddress {
    /// A VIP of a service, or the address of a workload.
    Ip(IpAddr),
    /// The cluster IP of a service, by the service's name in DNS.
    Service(ServiceName),
}

/// The namespaces whose objects may use a Gateway (`allowedRoutes.namespaces` of its listener).
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
