//! Istio's settings of a Kubernetes Service: the WorkloadEntries that it selects, and the preference of its clients.

use model::{
    At, Endpoint, NamedProtocol, Preference, PublishedPort, ServiceName, ServiceType, UseWaypoint,
};
use smallvec::SmallVec;

use super::{
    Candidate, Findings, LABEL_HEADLESS, LABEL_PROXY, Slice,
    by_label::LabelIn,
    istio::waypoint,
    object_name,
    service::is_headless,
    wire::{self as api, Metadata, TargetPort},
};

/// Annotation with the traffic distribution.
const DISTRIBUTION: &str = "networking.istio.io/traffic-distribution";

/// Istio's settings of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ByIstio {
    /// The WorkloadEntries that are its endpoints.
    pub selection: Option<Box<Selection>>,
    /// The traffic distribution. `None`: that of the namespace counts.
    pub distribution: Option<Distribution>,
    /// The waypoint that its labels name. `None`: those of the namespace count.
    pub waypoint: Option<UseWaypoint>,
}

/// The traffic distribution of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// `spec.trafficDistribution`: the control plane turns it into hints of EndpointSlices. WorkloadEntries have none.
    Field(Preference),
    /// Istio's annotation of the Service or its Namespace.
    Annotation(Preference),
}

impl Distribution {
    /// Returns the preference that ranks the Service's endpoints. As hints count only if all endpoints have them, the
    /// field does what the annotation does in a Service with WorkloadEntries.
    pub fn preference(self, has_workload_entries: bool) -> Preference {
        match self {
            Self::Field(_) if !has_workload_entries => Preference::Any,
            Self::Field(preference) | Self::Annotation(preference) => preference,
        }
    }
}

/// The WorkloadEntries that are endpoints of a Service, and their ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// `spec.selector`, sorted; not empty.
    labels: Box<[(Box<str>, Box<str>)]>,
    ports: SmallVec<[Port; 1]>,
}

/// A port of a Service, and its port on WorkloadEntries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    name: Box<str>,
    protocol: NamedProtocol,
    /// A `targetPort` that is a name. A WorkloadEntry without a port of this name does not have the Service's port.
    target: Option<Box<str>>,
    /// The number on a WorkloadEntry that does not name the port, if `target` is `None`.
    number: u16,
}

/// Reads a Service's selector, its traffic distribution, and its waypoint.
pub fn by_istio(object: &api::Service, findings: &mut Findings) -> ByIstio {
    let Some(spec) = &object.spec else {
        return ByIstio::default();
    };
    // As for Istio: in the field, case matters, and an unknown value is none.
    let distribution = match spec.traffic_distribution.as_deref() {
        Some("PreferSameZone" | "PreferClose") => Some(Distribution::Field(Preference::SameZone)),
        Some("PreferSameNode") => Some(Distribution::Field(Preference::SameNode)),
        _ => preference(&object.metadata, findings).map(Distribution::Annotation),
    };
    ByIstio {
        selection: selection(object, spec).map(Box::new),
        distribution,
        waypoint: waypoint(
            &object.metadata.labels,
            object_name(&object.metadata).namespace(),
        ),
    }
}

/// Returns the traffic distribution in the annotation of a Service, Namespace or ServiceEntry. `None` if there is no
/// annotation. As for Istio, case does not matter, and an unknown value asks for no preference.
pub(super) fn preference(metadata: &Metadata, findings: &mut Findings) -> Option<Preference> {
    let value = metadata.annotations.get(DISTRIBUTION)?;
    let preference = match value.to_ascii_lowercase().as_str() {
        "" => return None,
        "prefersamezone" | "preferclose" => Preference::SameZone,
        "prefersamenode" => Preference::SameNode,
        "any" => Preference::Any,
        _ => {
            findings.note(
                format!("metadata.annotations[\"{DISTRIBUTION}\"]"),
                format!(
                    "unknown value {value:?}, so no endpoint is preferred; expected PreferSameZone, PreferSameNode, \
                     PreferClose or Any"
                ),
            );
            Preference::Any
        }
    };
    Some(preference)
}

/// Returns `None` if the Service selects nothing, is headless or of type ExternalName, or is left to another proxy.
fn selection(object: &api::Service, spec: &api::ServiceSpec) -> Option<Selection> {
    let labels = &object.metadata.labels;
    let is_anothers = labels.contains_key(LABEL_PROXY) || labels.contains_key(LABEL_HEADLESS);
    if spec.selector.is_empty()
        || is_anothers
        || is_headless(spec)
        || super::service::kind(spec, &mut Findings::default()) == ServiceType::ExternalName
    {
        return None;
    }
    let selector = spec.selector.iter();
    let port = |given: &api::ServicePort| {
        let number = super::port(given.port).ok()?;
        let (target, number) = match &given.target_port {
            Some(TargetPort::Name(name)) => (Some(name.as_str().into()), number),
            Some(TargetPort::Number(target)) => (None, super::port(*target).unwrap_or(number)),
            None => (None, number),
        };
        Some(Port {
            name: given.name.as_deref().unwrap_or_default().into(),
            protocol: super::protocol(given.protocol.as_deref()).ok()?,
            target,
            number,
        })
    };
    Some(Selection {
        labels: selector
            .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
            .collect(),
        ports: spec.ports.iter().flatten().filter_map(port).collect(),
    })
}

impl Selection {
    /// Returns the number of its ports.
    pub fn ports(&self) -> usize {
        self.ports.len()
    }

    /// Returns the labels that it asks for, in the Service's namespace.
    pub fn labels_in(&self, namespace: &str) -> impl Iterator<Item = LabelIn> + use<'_> {
        let namespace: Box<str> = namespace.into();
        let labels = self.labels.iter();
        labels.map(move |(key, value)| (namespace.clone(), key.clone(), value.clone()))
    }

    /// Returns whether it selects a WorkloadEntry.
    pub fn selects(&self, candidate: &Candidate) -> bool {
        let mut wanted = self.labels.iter();
        let own = &candidate.labels;
        wanted.all(|(key, value)| own.get(&**key).map(String::as_str) == Some(&**value))
    }

    /// Returns a WorkloadEntry as an EndpointSlice of the Service. `None` if it is at a DNS name.
    pub fn slice(&self, service: &ServiceName, candidate: &Candidate) -> Option<Slice> {
        let backend = candidate.backends.first()?;
        let At::Address(addr) = backend.at else {
            return None;
        };
        let number_of = |name: &str| {
            let mut own = backend.ports.iter();
            own.find_map(|(own, number)| (**own == *name).then_some(*number))
        };
        let port = |port: &Port| {
            let number = match &port.target {
                Some(target) => number_of(target)?,
                None => number_of(&port.name).unwrap_or(port.number),
            };
            Some(PublishedPort {
                name: port.name.clone(),
                protocol: port.protocol,
                number,
            })
        };
        Some(Slice {
            name: candidate.name.1.clone(),
            service: service.clone(),
            ports: self.ports.iter().filter_map(port).collect(),
            endpoints: Box::new([Endpoint {
                local: backend.local,
                hints: backend.hints,
                ..Endpoint::new(addr, 0)
            }]),
            names_only: false,
            hostnames: Box::default(),
            weight: Some(backend.weight),
        })
    }
}
