//! Converts Kubernetes' objects into the model.
//!
//! [`service`], [`slice()`] and [`node()`] convert one object each, and report its problems with their field paths.
//! [`host_ports()`] returns those of a pod. `join` gives a service the endpoints of its slices.
//!
//! As for kube-proxy, services with another proxy (`service.kubernetes.io/service-proxy-name`), services that are
//! marked as headless (`service.kubernetes.io/headless`), and load-balancer addresses with `ipMode: Proxy` are left to
//! others. Such services have names in DNS.

mod address;
mod authorization;
mod by_label;
mod entries;
mod host_ports;
mod identities;
mod istio;
mod istio_objects;
mod join;
mod namespace;
mod node;
mod pod;
mod resolution;
mod route;
mod selection;
mod service;
mod service_entry;
mod slice;
mod sums;
mod waypoint;
pub mod wire;
mod workload_entry;

use std::collections::BTreeMap;

pub use entries::Entries;
pub use host_ports::{host_ports, is_of_host_ports};
pub use istio::{istio_policy, unreadable_policy};
pub use istio_objects::IstioObjects;
pub use join::{Joins, Sources};
use model::{NamedProtocol, ServiceName};
pub use namespace::{NamespaceRules, namespace};
pub use node::{NodeFacts, node};
pub use pod::{LABEL_MODE, REDIRECTION, SIDECAR, pod, pod_addresses};
pub use route::{grant, kind as route_kind, route};
pub use selection::{ByIstio, Distribution, Selection, by_istio};
pub use service::service;
use service_entry::addresses_of;
pub use service_entry::{ServiceEntry, service_entry};
pub use slice::{Slice, slice};
use sums::Sums;
pub use waypoint::{gateway, gateway_class};
use wire::Metadata;
pub use workload_entry::{Candidate, candidate, workload_entry};

/// Label that assigns a service and its slices to another proxy.
const LABEL_PROXY: &str = "service.kubernetes.io/service-proxy-name";
/// Label of the slices of headless services. A service or slice with it is only in DNS.
const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
/// Label with the name of a slice's service.
const LABEL_SERVICE: &str = "kubernetes.io/service-name";

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// An object to serve.
    Served(T),
    /// An object that is left to others: another proxy's, or a slice without a service.
    LeftAlone,
}

/// Problems of an object, found during its conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Faults that keep it from being served: field path within the object, and text.
    pub faults: Vec<(String, String)>,
    /// Parts that are left out, while the rest is served.
    pub notes: Vec<(String, String)>,
}

impl Findings {
    fn fault(&mut self, path: impl Into<String>, text: impl Into<String>) {
        self.faults.push((path.into(), text.into()));
    }

    fn note(&mut self, path: impl Into<String>, text: impl Into<String>) {
        self.notes.push((path.into(), text.into()));
    }
}

/// Returns an object's name, with kubectl's default namespace if the object has none.
pub fn object_name(metadata: &Metadata) -> ServiceName {
    let namespace = metadata
        .namespace
        .as_deref()
        .filter(|n| !n.is_empty())
        .unwrap_or("default");
    ServiceName::new(namespace, metadata.name.as_deref().unwrap_or_default())
}

fn check_name(metadata: &Metadata, findings: &mut Findings) {
    let name = metadata.name.as_deref().unwrap_or_default();
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    if name.is_empty() {
        findings.fault("metadata.name", "missing; expected the object's name");
    }
    for (path, value) in [("metadata.name", name), ("metadata.namespace", namespace)] {
        if value.contains(|c: char| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control()) {
            findings.fault(
                path,
                format!(
                    "{value:?} is not a name; expected lower case letters, digits, `-` and `.`"
                ),
            );
        }
    }
}

fn label<'a>(labels: &'a BTreeMap<String, String>, key: &str) -> Option<&'a str> {
    labels.get(key).map(String::as_str)
}

/// Checks a port number.
fn port(value: impl Into<i64>) -> Result<u16, String> {
    let value = value.into();
    u16::try_from(value)
        .ok()
        .filter(|&port| port != 0)
        .ok_or_else(|| format!("{value} is not a port; expected a number from 1 to 65535"))
}

/// Parses a protocol. SCTP has names in DNS, and is not served.
fn protocol(value: Option<&str>) -> Result<NamedProtocol, String> {
    match value {
        None | Some("" | "TCP") => Ok(NamedProtocol::Tcp),
        Some("UDP") => Ok(NamedProtocol::Udp),
        Some("SCTP") => Ok(NamedProtocol::Sctp),
        Some(other) => Err(format!(
            "unknown protocol {other:?}; expected TCP, UDP or SCTP"
        )),
    }
}
