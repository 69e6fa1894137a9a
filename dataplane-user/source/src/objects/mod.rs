//! Kubernetes' objects in the model's terms, however they came here.
//!
//! [`service`], [`slice()`] and [`node()`] turn one object each into the model, and say with its
//! field path what is wrong with it. [`host_ports()`] are those of a pod. `join` gives a service the endpoints of its slices.
//!
//! What kube-proxy leaves alone is left alone here, too: services with another proxy
//! (`service.kubernetes.io/service-proxy-name`), services that are marked as headless
//! (`service.kubernetes.io/headless`), load-balancer addresses with `ipMode: Proxy`. Such services have names in DNS.

mod address;
mod entries;
mod host_ports;
mod join;
mod node;
mod pod;
mod resolution;
mod route;
mod selection;
mod service;
mod service_entry;
mod slice;
mod sums;
pub mod wire;
mod workload_entry;

use std::collections::BTreeMap;

pub use entries::Entries;
pub use host_ports::{host_ports, is_of_host_ports};
pub use join::{Joins, Sources};
use model::{NamedProtocol, ServiceName};
pub use node::{NodeFacts, node};
pub use pod::{NamespaceRules, namespace, pod, pod_addresses};
pub use route::{grant, kind as route_kind, route};
pub use selection::{ByIstio, Selection, by_istio};
pub use service::service;
use service_entry::addresses_of;
pub use service_entry::{ServiceEntry, service_entry};
pub use slice::{Slice, slice};
use sums::Sums;
use wire::Metadata;
pub use workload_entry::{Candidate, candidate, workload_entry};

/// A label that gives a service, and its slices, to another proxy.
const LABEL_PROXY: &str = "service.kubernetes.io/service-proxy-name";
/// A label of the slices of headless services, which have endpoints in DNS only, as a service that has it is in DNS only.
const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
/// The label by which a slice names its service.
const LABEL_SERVICE: &str = "kubernetes.io/service-name";

/// What an object came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// Something to serve.
    Served(T),
    /// Left to others, on purpose: another proxy's, or a slice of no service.
    LeftAlone,
}

/// What is wrong with an object, found while it was turned into the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What keeps it from being served: field path within the object, and what is wrong there.
    pub faults: Vec<(String, String)>,
    /// What is left out of it, while the rest is served.
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

/// An object's name, with the namespace that kubectl would give it if it has none.
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
        if value.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control()) {
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

/// A port number, or what is wrong with it.
fn port(value: impl Into<i64>) -> Result<u16, String> {
    let value = value.into();
    u16::try_from(value)
        .ok()
        .filter(|&port| port != 0)
        .ok_or_else(|| format!("{value} is not a port; expected a number from 1 to 65535"))
}

/// A protocol of Kubernetes. SCTP has names, and is not served.
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
