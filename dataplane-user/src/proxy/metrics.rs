//! What the proxy counts, by Istio's names.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{Hash, Hasher},
    ops::AddAssign,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabel as _, EncodeLabelSet, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

use smallvec::SmallVec;

use super::{Shared, attachment::Direction, outcome::Flag};
use crate::model::{ServiceName, Workload};

/// What is counted apart, of a workload's connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CountersKey {
    /// Out of the workload or into it.
    pub direction: Direction,
    /// The service that the client named by its address.
    pub service: Option<ServiceName>,
    /// The other side.
    pub peer: Party,
    /// Of connections that got nowhere: why.
    pub flag: Flag,
}

/// A side of a connection, as metrics name it: Istio's labels of a workload. Two are the same if their
/// labels are, whichever pods they are.
#[derive(Clone, Debug)]
pub struct Party(Option<Arc<Workload>>);

impl Party {
    /// A workload.
    pub fn of(workload: &Arc<Workload>) -> Self {
        Self(Some(Arc::clone(workload)))
    }

    /// Somebody who is not known.
    pub fn nobody() -> Self {
        Self(None)
    }

    /// Whether no workload is known that this may be.
    pub fn is_nobody(&self) -> bool {
        self.0.is_none()
    }

    /// What is shown: workload, canonical service and revision, namespace, app and version.
    fn shown(&self) -> [&str; 6] {
        let Some(workload) = &self.0 else {
            return ["unknown"; 6];
        };
        let identity = &workload.identity;
        [
            &*identity.workload,
            &*identity.canonical_service,
            &*identity.canonical_revision,
            workload.name.namespace(),
            &*identity.app,
            &*identity.version,
        ]
        .map(|value| if value.is_empty() { "unknown" } else { value })
    }

    /// The same without what is not shown: to be kept for long.
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

/// What connections have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Connections that reached an endpoint.
    pub opened: u64,
    /// Of these, those that ended.
    pub closed: u64,
    /// Connections that were refused, or that no endpoint took.
    pub failed: u64,
    /// Bytes from clients.
    pub received: u64,
    /// Bytes to clients.
    pub sent: u64,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, more: Self) {
        self.opened += more.opened;
        self.closed += more.closed;
        self.failed += more.failed;
        self.received += more.received;
        self.sent += more.sent;
    }
}

/// Totals, by whose connections they are of.
pub type Connections = BTreeMap<Labels, Totals>;

/// Counters of one kind of connection.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections that reached an endpoint.
    pub opened: AtomicU64,
    /// Of these, those that ended.
    pub closed: AtomicU64,
    /// Connections that were refused, or that no endpoint took.
    pub failed: AtomicU64,
    /// Bytes from the client.
    pub received: AtomicU64,
    /// Bytes to the client.
    pub sent: AtomicU64,
}

impl Counters {
    /// What they came to since the last time.
    pub(super) fn take(&self) -> Totals {
        let read = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Totals {
            opened: read(&self.opened),
            closed: read(&self.closed),
            failed: read(&self.failed),
            received: read(&self.received),
            sent: read(&self.sent),
        }
    }
}

/// Adds the proxy's metrics to a registry.
pub(super) fn register(registry: &mut Registry, shared: &Arc<Shared>) {
    registry.register_collector(Box::new(Scrape(Arc::clone(shared))));
}

/// Reads the counters when somebody scrapes.
#[derive(Debug)]
struct Scrape(Arc<Shared>);

/// Istio's labels, as far as an L4 proxy without identities knows them; the others are `unknown`,
/// as Istio's own are then.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Labels {
    /// Whose connections these are.
    pub workload: Party,
    /// Which of them.
    pub key: CountersKey,
}

impl EncodeLabelSet for Labels {
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::LabelSetEncoder<'_>,
    ) -> Result<(), fmt::Error> {
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
        let (source, destination) = if outbound { (own, peer) } else { (peer, own) };
        for (prefix, party) in [("source", source), ("destination", destination)] {
            let labels = NAMES.into_iter().zip(party.shown());
            for (name, value) in labels.chain([("principal", "unknown")]) {
                (format!("{prefix}_{name}"), value).encode(encoder.encode_label())?;
            }
        }
        let unknown = || "unknown".to_owned();
        let service = self.key.service.as_ref();
        // Istio's is the host name, whose suffix is the cluster's domain: it is not known here.
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
            ("connection_security_policy", unknown()),
        ];
        for label in labels {
            label.encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

impl Labels {
    /// The same without what is not shown: to be kept for long.
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

type Reading = fn(&Totals) -> u64;

const FAMILIES: [(&str, &str, Reading); 5] = [
    (
        "istio_tcp_connections_opened",
        "Connections that reached their destination",
        |totals| totals.opened,
    ),
    (
        "istio_tcp_connections_closed",
        "Connections that ended, of those that reached their destination",
        |totals| totals.closed,
    ),
    (
        "istio_tcp_connections_failed",
        "Connections that were refused or that no endpoint took; response_flags says why",
        |totals| totals.failed,
    ),
    (
        "istio_tcp_received_bytes",
        "Bytes from clients, as requests",
        |totals| totals.received,
    ),
    (
        "istio_tcp_sent_bytes",
        "Bytes to clients, as responses",
        |totals| totals.sent,
    ),
];

/// What a proxy's connections have come to.
pub(super) fn connections(shared: &Shared) -> Connections {
    let ledger = shared.count();
    let all = ledger.iter();
    all.map(|(labels, series)| (labels.clone(), series.totals))
        .collect()
}

/// Writes what connections have come to, whoever relayed them.
///
/// # Errors
/// The encoder's.
pub fn encode_connections(all: &Connections, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, help, read) in FAMILIES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        let seen = all.iter().filter(|(_, t)| **t != Totals::default());
        for (labels, totals) in seen {
            let value = read(totals);
            // Of kinds of connections that only fail there is nothing else to say.
            if value == 0 && name != "istio_tcp_connections_opened" {
                continue;
            }
            let metric = family.encode_family(labels)?;
            ConstCounter::new(value).encode(metric)?;
        }
    }
    Ok(())
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_connections(&connections(&self.0), &mut encoder)?;
        encode_proxy(&self.0, &mut encoder)
    }
}

/// Writes what is the proxy's own.
pub(super) fn encode_proxy(shared: &Shared, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let gauges = [
        (
            "dataplane_proxy_connections",
            "Connections that the proxy has now",
            shared.limits.open(),
        ),
        (
            "dataplane_proxy_connections_max",
            "Connections that the proxy takes at most; more wait to be accepted",
            shared.limits.max(),
        ),
        (
            "dataplane_proxy_workloads",
            "Workloads whose connections are relayed",
            shared.attachments().len(),
        ),
        (
            "dataplane_proxy_held_bytes",
            "Bytes that are held for readers that do not keep up",
            shared.held(),
        ),
    ];
    for (name, help, value) in gauges {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)?;
    }
    let lost = shared.log.lost();
    let metric = encoder.encode_descriptor(
        "dataplane_proxy_access_log_lost",
        "Lines of the access log that were left out, because it could not be written as fast",
        None,
        MetricType::Counter,
    )?;
    ConstCounter::new(lost).encode(metric)
}
