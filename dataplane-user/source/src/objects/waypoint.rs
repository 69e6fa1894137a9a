//! Converts Gateways, through which connections may go, and GatewayClasses into the model.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use model::{
    AllowedNamespaces, Binding, Gateway, GatewayAddress, GatewayListener, Requirement, ServiceName,
    is_reserved,
};

use super::{
    Findings, check_name, label,
    wire::{self as api, GatewayStatusAddress, Metadata},
};

/// A label of Gateways: what the connections are addressed to that the Gateway takes.
const LABEL_FOR: &str = "istio.io/waypoint-for";
/// An annotation of Gateways and GatewayClasses: how their Pods take the streams of tunnels.
const BINDING: &str = "ambient.istio.io/waypoint-inbound-binding";

/// Converts a Gateway. If a field cannot be read, the Gateway allows no namespace and takes connections of both kinds, so that these
/// connections fail.
pub fn gateway(object: &api::Gateway, findings: &mut Findings) -> Gateway {
    check_name(&object.metadata, findings);
    let (for_services, for_workloads) = match label(&object.metadata.labels, LABEL_FOR) {
        None | Some("" | "service") => (true, false),
        Some("workload") => (false, true),
        Some("all") => (true, true),
        Some("none") => (false, false),
        Some(other) => {
            findings.note(
                format!("metadata.labels[\"{LABEL_FOR}\"]"),
                format!(
                    "unknown value {other:?}, so it counts as all; expected service, workload, all or none"
                ),
            );
            (true, true)
        }
    };
    let binding = binding(&object.metadata, findings);
    // As for Istio, the annotation of the class has no effect beside one of the Gateway that cannot be read.
    let is_own = object.metadata.annotations.contains_key(BINDING);
    let spec = object.spec.as_ref();
    let class = spec
        .filter(|_| !is_own)
        .map(|spec| &*spec.gateway_class_name);
    let listeners = spec.iter().flat_map(|spec| &spec.listeners).flatten();
    let listeners = listeners.filter_map(|of| {
        Some(GatewayListener {
            protocol: of.protocol.as_str().into(),
            port: u16::try_from(of.port?).ok()?,
            allowed: allowed(of),
        })
    });
    let status = object.status.iter().flat_map(|status| &status.addresses);
    Gateway {
        for_services,
        for_workloads,
        addresses: status.flatten().filter_map(address).collect(),
        listeners: listeners.collect(),
        binding,
        class: class.unwrap_or_default().into(),
    }
}

/// Converts the metadata of a GatewayClass.
pub fn gateway_class(metadata: &Metadata, findings: &mut Findings) -> Option<Binding> {
    check_name(metadata, findings);
    binding(metadata, findings)
}

/// Reads the annotation of a binding: a protocol, or a protocol and a port. `None`: there is none, or it has no effect.
fn binding(metadata: &Metadata, findings: &mut Findings) -> Option<Binding> {
    let given = metadata.annotations.get(BINDING)?;
    let (protocol, port) = match given.split_once('/') {
        Some((protocol, port)) => (protocol, Some(port.parse().ok())),
        None => (&**given, None),
    };
    let has_header = match protocol {
        "PROXY" => Some(true),
        "NONE" => Some(false),
        _ => None,
    };
    let is_usable = |port: &u16| *port != 0 && !is_reserved(*port);
    match (has_header, port) {
        (Some(has_header), None) => Some(Binding {
            has_header,
            port: None,
        }),
        (Some(has_header), Some(port)) if port.as_ref().is_some_and(is_usable) => {
            Some(Binding { has_header, port })
        }
        _ => {
            findings.note(
                format!("metadata.annotations[\"{BINDING}\"]"),
                format!(
                    "{given:?} has no effect; expected PROXY or NONE, alone or with a port that is not the mesh's, such as PROXY/15088"
                ),
            );
            None
        }
    }
}

/// Returns an address, if it is an IP address or the name of a service in DNS: `NAME.NAMESPACE.svc.DOMAIN`.
fn address(given: &GatewayStatusAddress) -> Option<GatewayAddress> {
    match given.type_.as_deref().unwrap_or("IPAddress") {
        "IPAddress" => Some(GatewayAddress::Ip(given.value.parse().ok()?)),
        "Hostname" => {
            let mut parts = given.value.split('.');
            let (name, namespace) = (parts.next()?, parts.next()?);
            let is_service = parts.next() == Some("svc");
            is_service.then(|| GatewayAddress::Service(ServiceName::new(namespace, name)))
        }
        _ => None,
    }
}

fn allowed(listener: &api::GatewayListener) -> AllowedNamespaces {
    let routes = listener.allowed_routes.as_ref();
    let Some(namespaces) = routes.and_then(|routes| routes.namespaces.as_ref()) else {
        return AllowedNamespaces::Same;
    };
    match namespaces.from.as_deref().unwrap_or("Same") {
        "Same" => AllowedNamespaces::Same,
        "All" => AllowedNamespaces::All,
        "Selector" => {
            let selector = namespaces.selector.as_ref().and_then(requirements);
            selector.map_or(AllowedNamespaces::None, AllowedNamespaces::Selected)
        }
        _ => AllowedNamespaces::None,
    }
}

/// Returns the requirements of a selector; `None`: an operator is unknown.
fn requirements(selector: &LabelSelector) -> Option<Box<[Requirement]>> {
    let labels = selector.match_labels.iter().flatten();
    let labels = labels.map(|(key, value)| {
        Some(Requirement {
            key: key.as_str().into(),
            values: Some([value.as_str().into()].into()),
            negated: false,
        })
    });
    let expressions = selector.match_expressions.iter().flatten();
    let expressions = expressions.map(|of| {
        let values = of.values.iter().flatten();
        let values = || Some(values.map(|value| value.as_str().into()).collect());
        let (values, negated) = match of.operator.as_str() {
            "In" => (values(), false),
            "NotIn" => (values(), true),
            "Exists" => (None, false),
            "DoesNotExist" => (None, true),
            _ => return None,
        };
        Some(Requirement {
            key: of.key.as_str().into(),
            values,
            negated,
        })
    });
    labels.chain(expressions).collect()
}
