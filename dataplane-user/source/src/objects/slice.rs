//! Converts a Kubernetes EndpointSlice into the model.

use std::net::IpAddr;

use model::{Endpoint, Hints, Locality, Node, PublishedPort, ServiceName};
use smallvec::SmallVec;

use super::{
    Findings, LABEL_HEADLESS, LABEL_PROXY, LABEL_SERVICE, Outcome, address, check_name, label,
    object_name,
    wire::{self as api, EndpointConditions, EndpointHints, EndpointPort},
};

/// The endpoints that a slice adds to its service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its namespace and its own name.
    pub name: ServiceName,
    /// The service named by its label.
    pub service: ServiceName,
    /// Its ports, with the number on every endpoint. Ports without a number (all ports) are left out.
    pub ports: SmallVec<[PublishedPort; 1]>,
    /// Its endpoints. Their port is 0 here, because every endpoint has all of the ports.
    pub endpoints: Box<[Endpoint]>,
    /// Whether its endpoints are in DNS only: it is marked as the slice of a headless service, or left to another proxy.
    pub names_only: bool,
    /// The hostnames that its endpoints have in DNS, in lower case: one for each endpoint, in the same order, empty if it
    /// has none. May be shorter: the endpoints after its end have none.
    pub hostnames: Box<[Box<str>]>,
    /// The weight of a WorkloadEntry, at least 1. `None`: an EndpointSlice's endpoints have weight 1.
    pub weight: Option<u32>,
}

impl Slice {
    /// Returns the message for a slice whose Service does not exist.
    pub fn orphan(&self) -> String {
        format!(
            "metadata.labels[\"{LABEL_SERVICE}\"]: there is no Service {}, so clients cannot reach the endpoints of \
             this slice; create the Service or correct the label",
            self.service.as_str().escape_debug()
        )
    }
}

/// Turns an EndpointSlice into the model, as `node` sees the slice: which endpoints are on the node, and which are
/// hinted to the node or its zone. The result is valid only if `findings` has no faults.
pub fn slice(object: &api::EndpointSlice, node: &Node, findings: &mut Findings) -> Outcome<Slice> {
    check_name(&object.metadata, findings);
    let labels = &object.metadata.labels;
    let names_only = label(labels, LABEL_PROXY)
        .or(label(labels, LABEL_HEADLESS))
        .is_some();
    let v4 = match object.address_type.as_str() {
        "IPv4" => true,
        "IPv6" => false,
        "FQDN" => {
            findings.note(
                "addressType",
                "endpoints given by name (FQDN) are not served, because only addresses are; use IPv4 or IPv6",
            );
            return Outcome::LeftAlone;
        }
        "" => {
            findings.fault("addressType", "missing; expected IPv4 or IPv6");
            true
        }
        other => {
            findings.fault(
                "addressType",
                format!("unknown address type {other:?}; expected IPv4 or IPv6"),
            );
            true
        }
    };
    // Another controller's slice: Kubernetes' own controllers always set the label.
    let Some(service) = label(labels, LABEL_SERVICE).filter(|name| !name.is_empty()) else {
        return Outcome::LeftAlone;
    };
    // A colon is in the names of host ports.
    if service.contains(['/', ':']) {
        findings.fault(
            format!("metadata.labels[\"{LABEL_SERVICE}\"]"),
            format!(
                "{service:?} is not a name; expected the name of a Service in the same namespace"
            ),
        );
    }
    let name = object_name(&object.metadata);
    let given = object.endpoints.as_deref().unwrap_or_default();
    let (endpoints, hostnames) = endpoints(given, v4, node, findings);
    Outcome::Served(Slice {
        names_only,
        service: ServiceName::new(name.namespace(), service),
        name,
        ports: ports(object.ports.as_deref().unwrap_or_default(), findings),
        endpoints,
        hostnames,
        weight: None,
    })
}

fn ports(given: &[EndpointPort], findings: &mut Findings) -> SmallVec<[PublishedPort; 1]> {
    let mut ports = SmallVec::new();
    for (index, given) in given.iter().enumerate() {
        let protocol = super::protocol(given.protocol.as_deref())
            .map_err(|wrong| findings.fault(format!("ports[{index}].protocol"), wrong));
        let number = given.port.map(|port| {
            super::port(port).map_err(|wrong| findings.fault(format!("ports[{index}].port"), wrong))
        });
        if let (Ok(protocol), Some(Ok(number))) = (protocol, number) {
            ports.push(PublishedPort {
                name: given.name.as_deref().unwrap_or_default().into(),
                protocol,
                number,
            });
        }
    }
    ports
}

fn endpoints(
    given: &[api::Endpoint],
    v4: bool,
    node: &Node,
    findings: &mut Findings,
) -> (Box<[Endpoint]>, Box<[Box<str>]>) {
    let mut endpoints = Vec::with_capacity(given.len());
    let mut hostnames = Vec::new();
    for (index, given) in given.iter().enumerate() {
        if given.addresses.is_empty() {
            findings.fault(
                format!("endpoints[{index}].addresses"),
                "missing or empty; expected the endpoint's address",
            );
        }
        let mut first = None;
        for (position, text) in given.addresses.iter().enumerate() {
            match endpoint_address(text, v4) {
                Ok(addr) => first = first.or(Some(addr)),
                Err(wrong) => {
                    findings.fault(format!("endpoints[{index}].addresses[{position}]"), wrong);
                }
            }
        }
        // Kubernetes gives no meaning to the addresses after the first, and kube-proxy does not
        // look at them.
        let Some(addr) = first else { continue };
        if let Some(name) = hostname(given) {
            hostnames.resize(endpoints.len(), Box::default());
            hostnames.push(name);
        }
        let (ready, serving, terminating) = conditions(given.conditions.as_ref());
        let local = given
            .node_name
            .as_deref()
            .is_some_and(|name| *name == *node.name);
        endpoints.push(Endpoint {
            addr,
            port: 0,
            local,
            ready,
            serving,
            terminating,
            hints: hints(given.hints.as_ref(), node).located(
                node,
                Locality {
                    zone: given.zone.as_deref().unwrap_or_default(),
                    ..Locality::default()
                },
            ),
        });
    }
    (endpoints.into(), hostnames.into())
}

/// Returns the hostname of an endpoint, in lower case. `None` if there is no valid one.
fn hostname(given: &api::Endpoint) -> Option<Box<str>> {
    let name = given.hostname.as_deref()?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = (1..=63).contains(&name.len()) && name.bytes().all(fits);
    is_label.then(|| name.to_ascii_lowercase().into())
}

fn endpoint_address(text: &str, v4: bool) -> Result<IpAddr, String> {
    let addr = address::endpoint_address(text)?;
    if addr.is_ipv4() == v4 {
        return Ok(addr);
    }
    Err(format!(
        "{addr} is an {has} address in a slice of addressType {want}; expected {want} only",
        has = address::family(addr),
        want = if v4 { "IPv4" } else { "IPv6" },
    ))
}

/// Returns whether an endpoint is ready, serving and terminating, with Kubernetes' defaults for unknown conditions.
fn conditions(conditions: Option<&EndpointConditions>) -> (bool, bool, bool) {
    let ready = conditions.and_then(|c| c.ready).unwrap_or(true);
    let serving = conditions.and_then(|c| c.serving).unwrap_or(true);
    let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
    (ready, serving, terminating)
}

/// Returns whether an endpoint is hinted to this node or its zone. Names of other zones are not stored for every
/// endpoint.
fn hints(hints: Option<&EndpointHints>, node: &Node) -> Hints {
    hints.map_or_else(Hints::default, |hints| {
        let zones = hints.for_zones.iter().flatten();
        let nodes = hints.for_nodes.iter().flatten();
        Hints::new(
            node,
            zones.map(|zone| &*zone.name),
            nodes.map(|node| &*node.name),
        )
    })
}
