//! The labels of connections, by Istio's names.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use model::{Identity, ServiceName, Snapshot, Workload};
use prometheus_client::encoding::{EncodeLabel as _, EncodeLabelSet, LabelSetEncoder};
use smallvec::SmallVec;

use super::{baggage::Baggage, direction::Direction, outcome::Flag};

/// A kind of connections of one workload. Each kind has its own counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CountersKey {
    /// Out of the workload or into it.
    pub direction: Direction,
    /// The identities that both sides have proven. `None`: none.
    pub principals: Option<Principals>,
    /// The service that the client addressed: by its address, or as the peer of a tunnel says.
    pub service: Option<ServiceName>,
    /// The workload at the other side.
    pub peer: Party,
    /// Why the connections failed; [`Flag::None`]: they reached an endpoint.
    pub flag: Flag,
}

impl CountersKey {
    /// Returns the kind of connections without counters of their own: the service and the other side are left out.
    #[must_use]
    pub fn rest(self) -> Self {
        let principals = self.principals.map(|of| Principals {
            peer: None,
            baggage: None,
            ..of
        });
        Self {
            service: None,
            peer: Party::nobody(),
            principals,
            ..self
        }
    }
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
    /// The other side's description of its workload, in a tunnel.
    pub baggage: Option<Arc<Baggage>>,
}

/// The value of a label that is not known, as in Istio.
const UNKNOWN: &str = "unknown";

/// A side of a connection, as metrics name it: Istio's labels of a workload. Two parties are equal if
/// their labels are, even if they are different pods. The places of workloads of other nodes are not known here.
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

    /// The namespace of the workload.
    pub fn namespace(&self) -> &str {
        self.0
            .as_ref()
            .map_or("", |workload| workload.name.namespace())
    }

    /// The labels: workload, canonical service and revision, namespace, app and version. Empty: unknown.
    fn names(&self) -> [&str; 6] {
        let Some(workload) = &self.0 else {
            return [""; 6];
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
    }

    /// The labels, and whether the workload is on this node.
    fn compared(&self) -> ([&str; 6], bool) {
        let is_here = self.0.as_ref().is_some_and(|workload| workload.is_here());
        let names = self.names();
        // An unknown side has the same labels as a workload with this name.
        (
            names.map(|name| if name.is_empty() { UNKNOWN } else { name }),
            is_here,
        )
    }

    /// The labels, with cluster, region and zone. `principals`: of this side's connections, if it is the other side.
    fn shown<'a>(
        &'a self,
        principals: Option<&'a Principals>,
        snapshot: &'a Snapshot,
    ) -> [&'a str; 9] {
        let baggage = principals.and_then(|of| of.baggage.as_deref());
        let region_and_zone =
            |baggage: Option<&'a Baggage>| baggage.map_or([""; 2], |of| [&of.region, &of.zone]);
        let [workload, service, revision, namespace, app, version] = self.names();
        let shown = match (&self.0, baggage) {
            (Some(of), _) => {
                let node = &snapshot.node;
                let [region, zone] = if of.is_here() {
                    [&*node.region, &*node.zone]
                } else {
                    region_and_zone(baggage)
                };
                let cluster = &*snapshot.cluster.name;
                [
                    workload, service, revision, namespace, app, version, cluster, region, zone,
                ]
            }
            // As ztunnel names a workload that it knows by its baggage only.
            (None, Some(of)) => {
                let namespace = principals
                    .and_then(|of| of.peer.as_ref())
                    .map_or("", Identity::namespace);
                let [region, zone] = region_and_zone(baggage);
                [
                    &of.workload,
                    &of.service,
                    &of.revision,
                    namespace,
                    &of.workload,
                    &of.revision,
                    &of.cluster,
                    region,
                    zone,
                ]
            }
            (None, None) => [""; 9],
        };
        shown.map(|value| if value.is_empty() { UNKNOWN } else { value })
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
        self.compared() == other.compared()
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
        self.compared().cmp(&other.compared())
    }
}

impl Hash for Party {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.compared().hash(state);
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
            key: self.key.clone().rest(),
        }
    }
}

/// Labels as metrics show them, with the names of the cluster and of the node's place.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// The labels.
    pub labels: &'a Labels,
    /// The snapshot, which has the names.
    pub snapshot: &'a Snapshot,
}

impl EncodeLabelSet for Shown<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        const NAMES: [&str; 9] = [
            "workload",
            "canonical_service",
            "canonical_revision",
            "workload_namespace",
            "app",
            "version",
            "cluster",
            "region",
            "zone",
        ];
        let Labels { workload, key } = self.labels;
        let outbound = key.direction == Direction::Outbound;
        let reporter = if outbound { "source" } else { "destination" };
        ("reporter", reporter).encode(encoder.encode_label())?;
        let principals = key.principals.as_ref();
        let own = workload.shown(None, self.snapshot);
        let peer = key.peer.shown(principals, self.snapshot);
        let [own_principal, peer_principal] = [
            principals.map(|of| &of.own),
            principals.and_then(|of| of.peer.as_ref()),
        ]
        .map(|of| of.map_or_else(|| UNKNOWN.to_owned(), ToString::to_string));
        let (own, peer) = ((own, &*own_principal), (peer, &*peer_principal));
        let (source, destination) = if outbound { (own, peer) } else { (peer, own) };
        for (prefix, (party, principal)) in [("source", source), ("destination", destination)] {
            let labels = NAMES.into_iter().zip(party);
            for (name, value) in labels.chain([("principal", principal)]) {
                (format!("{prefix}_{name}"), value).encode(encoder.encode_label())?;
            }
        }
        let unknown = || UNKNOWN.to_owned();
        let service = key.service.as_ref();
        let host = service.map(|name| self.snapshot.cluster.host(name));
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
            ("response_flags", key.flag.word().to_owned()),
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
    /// Returns a copy with only the fields that metrics show, so that it can live long.
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
