//! The labels of connections, by Istio's names.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use model::{Identity, ServiceName, Workload};
use prometheus_client::encoding::{EncodeLabel as _, EncodeLabelSet, LabelSetEncoder};
use smallvec::SmallVec;

use super::{direction::Direction, outcome::Flag};

/// A kind of connections of one workload. Each kind has its own counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CountersKey {
    /// Out of the workload or into it.
    pub direction: Direction,
    /// The identities that both sides have proven. `None`: none.
    pub principals: Option<Principals>,
    /// The service that the client named by its address.
    pub service: Option<ServiceName>,
    /// The workload at the other side.
    pub peer: Party,
    /// Why the connections failed; [`Flag::None`]: they reached an endpoint.
    pub flag: Flag,
}

/// The identities that both sides of a connection have proven.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Principals {
    /// The workload's.
    pub own: Identity,
    /// The other side's. `None`: the connections of a series for the rest have several.
    pub peer: Option<Identity>,
    /// Whether the relay attests them by network namespaces. Otherwise both sides have proven them in a tunnel.
    pub is_attested: bool,
}

/// A side of a connection, as metrics name it: Istio's labels of a workload. Two parties are equal if
/// their labels are, even if they are different pods.
#[derive(Clone, Debug)]
pub struct Party(Option<Arc<Workload>>);

impl Party {
    /// The party of a workload.
    pub fn of(workload: &Arc<Workload>) -> Self {
        Self(Some(Arc::clone(workload)))
    }

    /// The party of a side that is not known.
    pub fn nobody() -> Self {
        Self(None)
    }

    /// Whether the side is not known.
    pub fn is_nobody(&self) -> bool {
        self.0.is_none()
    }

    /// The namespace of the workload.
    pub fn namespace(&self) -> &str {
        self.0
            .as_ref()
            .map_or("", |workload| workload.name.namespace())
    }

    /// The labels: workload, canonical service and revision, namespace, app and version.
    fn shown(&self) -> [&str; 6] {
        let Some(workload) = &self.0 else {
            return ["unknown"; 6];
        };
        let telemetry = &workload.telemetry;
        [
            &*telemetry.workload,
            &*telemetry.canonical_service,
            &*telemetry.canonical_revision,
            workload.name.namespace(),
            &*telemetry.app,
            &*telemetry.version,
        ]
        .map(|value| if value.is_empty() { "unknown" } else { value })
    }

    /// Returns a copy with only the fields that the labels show, so that it can live long.
    fn alone(&self) -> Self {
        let alone = |workload: &Arc<Workload>| {
            Arc::new(Workload {
                addresses: SmallVec::new(),
                rules: Arc::default(),
                capture: None,
                ..(**workload).clone()
            })
        };
        Self(self.0.as_ref().map(alone))
    }
}

impl PartialEq for Party {
    fn eq(&self, other: &Self) -> bool {
        self.shown() == other.shown()
    }
}

impl Eq for Party {}

impl PartialOrd for Party {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Party {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.shown().cmp(&other.shown())
    }
}

impl Hash for Party {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.shown().hash(state);
    }
}

/// Istio's labels. A label that an L4 proxy does not know is `unknown`, as in Istio.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Labels {
    /// The workload.
    pub workload: Party,
    /// The kind of its connections.
    pub key: CountersKey,
}

impl Labels {
    /// Returns the labels for connections without a series of their own: the service and the other side are left out.
    #[must_use]
    pub fn rest(&self) -> Self {
        Self {
            workload: self.workload.alone(),
            key: CountersKey {
                service: None,
                peer: Party::nobody(),
                principals: self
                    .key
                    .principals
                    .clone()
                    .map(|of| Principals { peer: None, ..of }),
                ..self.key.clone()
            },
        }
    }
}

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        const NAMES: [&str; 6] = [
            "workload",
            "canonical_service",
            "canonical_revision",
            "workload_namespace",
            "app",
            "version",
        ];
        let outbound = self.key.direction == Direction::Outbound;
        let reporter = if outbound { "source" } else { "destination" };
        ("reporter", reporter).encode(encoder.encode_label())?;
        let (own, peer) = (&self.workload, &self.key.peer);
        let principals = self.key.principals.as_ref();
        let [own_principal, peer_principal] = [
            principals.map(|of| &of.own),
            principals.and_then(|of| of.peer.as_ref()),
        ]
        .map(|of| of.map_or_else(|| "unknown".to_owned(), ToString::to_string));
        let (own, peer) = ((own, &*own_principal), (peer, &*peer_principal));
        let (source, destination) = if outbound { (own, peer) } else { (peer, own) };
        for (prefix, (party, principal)) in [("source", source), ("destination", destination)] {
            let labels = NAMES.into_iter().zip(party.shown());
            for (name, value) in labels.chain([("principal", principal)]) {
                (format!("{prefix}_{name}"), value).encode(encoder.encode_label())?;
            }
        }
        let unknown = || "unknown".to_owned();
        let service = self.key.service.as_ref();
        // Istio has the host name here. Its suffix is the cluster's domain, which is not known.
        let host = service.map(|name| format!("{}.{}.svc", name.name(), name.namespace()));
        let labels = [
            ("destination_service", host.unwrap_or_else(unknown)),
            (
                "destination_service_name",
                service.map_or_else(unknown, |name| name.name().to_owned()),
            ),
            (
                "destination_service_namespace",
                service.map_or_else(unknown, |name| name.namespace().to_owned()),
            ),
            ("request_protocol", "tcp".to_owned()),
            ("response_flags", self.key.flag.word().to_owned()),
            (
                "connection_security_policy",
                match principals {
                    Some(of) if of.is_attested => "attested".to_owned(),
                    Some(_) => "mutual_tls".to_owned(),
                    None => unknown(),
                },
            ),
        ];
        for label in labels {
            label.encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

impl Labels {
    /// Returns a copy with only the fields that the labels show, so that it can live long.
    pub(super) fn alone(&self) -> Self {
        Self {
            workload: self.workload.alone(),
            key: CountersKey {
                peer: self.key.peer.alone(),
                ..self.key.clone()
            },
        }
    }
}
