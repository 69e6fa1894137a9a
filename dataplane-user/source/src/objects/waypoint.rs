//! Converts a Gateway, through which connections may go, into the model.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use model::{AllowedNamespaces, Gateway, GatewayAddress, Requirement, ServiceName};

use super::{
    Findings, check_name, label,
    wire::{self as api, GatewayListener, GatewayStatusAddress},
};

/// A label of Gateways: what the connections are addressed to that the Gateway takes.
const LABEL_FOR: &str = "istio.io/waypoint-for";
/// The port of listeners that connections of workloads reach.
const PORT: i64 = 15_008;

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
    let listeners = object.spec.iter().flat_map(|spec| &spec.listeners);
    let mut listeners = listeners.flatten();
    let listener = listeners.find(|of| of.protocol == "HBONE" && of.port == Some(PORT));
    let status = object.status.iter().flat_map(|status| &status.addresses);
    Gateway {
        for_services,
        for_workloads,
        addresses: status.flatten().filter_map(address).collect(),
        allowed: listener.map(allowed).unwrap_or_default(),
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

fn allowed(listener: &GatewayListener) -> AllowedNamespaces {
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
