//! Converts Istio's WorkloadEntry, and endpoints of a ServiceEntry, which have the same fields.

use std::{collections::BTreeMap, net::IpAddr};

use model::{At, Backend, Hints, Locality, Node, ServiceName};
use smallvec::SmallVec;

use super::{
    Findings, address, check_name, label,
    node::{LABEL_REGION, LABEL_ZONE},
    object_name,
    wire::{self as api, WorkloadEntrySpec},
};

/// The annotation of a WorkloadEntry whose proxy checks its health.
const HEALTH_CHECKED: &str = "proxy.istio.io/health-checks-enabled";

/// A pod or WorkloadEntry that a ServiceEntry may select, or a WorkloadEntry that a Service may select.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Whether it is a pod, and its name. A pod and a WorkloadEntry may have one name.
    pub name: (bool, ServiceName),
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The endpoints that it adds to a ServiceEntry. A pod has an address of each family.
    pub backends: Vec<Backend>,
}

/// Converts a WorkloadEntry. The result is valid only if `findings` has no faults. As for Istio, an entry whose proxy
/// checks its health has no endpoint until it is healthy.
pub fn workload_entry(
    object: &api::WorkloadEntry,
    node: &Node,
    findings: &mut Findings,
) -> Candidate {
    check_name(&object.metadata, findings);
    let spec = object.spec.as_ref();
    let mut labels = spec.map(|spec| spec.labels.clone()).unwrap_or_default();
    // As for Istio, the object's own labels count, too, and win over those of its spec.
    labels.extend(object.metadata.labels.clone());
    let nothing = WorkloadEntrySpec::default();
    let backend = backend(spec.unwrap_or(&nothing), "spec", node);
    let backend = backend.map_err(|(path, wrong)| findings.fault(path, wrong));
    let is_checked = object.metadata.annotations.get(HEALTH_CHECKED);
    let is_checked = is_checked.is_some_and(|value| value == "true");
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let is_healthy = conditions
        .flatten()
        .any(|condition| condition.type_ == "Healthy" && condition.status == "True");
    let backend = backend.ok().filter(|_| is_healthy || !is_checked);
    Candidate {
        name: (false, object_name(&object.metadata)),
        labels,
        backends: backend.into_iter().collect(),
    }
}

/// Returns a pod as a candidate for ServiceEntries. `None` if it is not ready, or has ended.
pub fn candidate(pod: &api::Pod, node: &Node) -> Option<Candidate> {
    let status = pod.status.as_ref()?;
    let conditions = status.conditions.iter().flatten();
    let is_ready = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    if !is_ready || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let of = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let ips = status.pod_ips.iter().flatten().map(|ip| &ip.ip);
    let mut ips: Vec<IpAddr> = ips
        .chain(&status.pod_ip)
        .filter_map(|text| address::endpoint_address(text).ok())
        .collect();
    ips.sort_unstable();
    ips.dedup();
    let ports = pod.spec.as_ref().map(named_ports).unwrap_or_default();
    // Kubernetes 1.35 and newer give pods the labels of their nodes.
    let at = Locality {
        zone: label(&pod.metadata.labels, LABEL_ZONE).unwrap_or_default(),
        region: label(&pod.metadata.labels, LABEL_REGION),
        ..Locality::default()
    };
    let hints = Hints::default().located(node, at);
    let backend = |ip| Backend {
        at: At::Address(ip),
        ports: ports.clone(),
        weight: 1,
        local: of == Some(&*node.name),
        hints,
    };
    Some(Candidate {
        name: (true, object_name(&pod.metadata)),
        labels: pod.metadata.labels.clone(),
        backends: ips.into_iter().map(backend).collect(),
    })
}

/// Returns the TCP ports of a pod's containers and sidecars by name. If several have one name, the first.
fn named_ports(spec: &api::PodSpec) -> SmallVec<[(Box<str>, u16); 0]> {
    let mut named = SmallVec::<[(Box<str>, u16); 0]>::new();
    for (_, port) in super::host_ports::ports(spec) {
        let is_tcp = matches!(port.protocol.as_deref(), None | Some("" | "TCP"));
        let number = super::port(port.container_port);
        if let (true, Some(name), Ok(number)) = (is_tcp, port.name.as_deref(), number)
            && !name.is_empty()
            && named.iter().all(|(known, _)| **known != *name)
        {
            named.push((name.into(), number));
        }
    }
    named
}

/// Converts an endpoint. The error is the field, and the reason.
pub(super) fn backend(
    given: &WorkloadEntrySpec,
    path: &str,
    node: &Node,
) -> Result<Backend, (String, String)> {
    let ports = given.ports.iter().flatten().map(|(name, port)| {
        // The author's text is escaped, so that it cannot control a terminal or begin a line of its own.
        let path = || format!("{path}.ports.{}", name.escape_debug());
        let port = super::port(*port).map_err(|wrong| (path(), wrong))?;
        Ok((name.as_str().into(), port))
    });
    let ports: SmallVec<_> = ports.collect::<Result<_, (String, String)>>()?;
    let weight = given.weight.unwrap_or_default();
    let weight = u32::try_from(weight).map_err(|_| {
        (
            format!("{path}.weight"),
            format!("{weight} is out of range; expected a number from 0 to 4294967295"),
        )
    })?;
    let at = at(&given.address).map_err(|wrong| (format!("{path}.address"), wrong))?;
    Ok(Backend {
        at,
        ports,
        weight: weight.max(1),
        local: false,
        hints: Hints::default().located(node, locality(given)),
    })
}

/// Returns where an endpoint is, from its `network` and its `locality`: `REGION/ZONE/SUBZONE`, of which the last parts may
/// be missing.
fn locality(given: &WorkloadEntrySpec) -> Locality<'_> {
    let mut parts = given.locality.split('/');
    let mut next = || parts.next().unwrap_or_default();
    Locality {
        network: &given.network,
        region: Some(next()),
        zone: next(),
        subzone: next(),
    }
}

/// Parses the place of an endpoint: an address, or a DNS name.
fn at(text: &str) -> Result<At, String> {
    if text.is_empty() {
        return Err("missing; expected an IP address or a DNS name".to_owned());
    }
    if text.starts_with("unix:") {
        return Err(format!(
            "{text:?} is a Unix socket, which the kernel's tables cannot lead to; expected an IP address or a DNS name"
        ));
    }
    if address::address(text).is_ok() {
        return address::endpoint_address(text).map(At::Address);
    }
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    if address::is_dns_name(&name) {
        Ok(At::Name(name.into()))
    } else {
        Err(format!(
            "{text:?} is neither an IP address nor a DNS name; expected one of them"
        ))
    }
}
