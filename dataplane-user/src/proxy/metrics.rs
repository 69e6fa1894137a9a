//! What the proxy counts, by Istio's names.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

use super::{
    Shared,
    attachment::{Attached, Direction},
    outcome::Flag,
};
use crate::model::ServiceName;

/// What is counted apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CountersKey {
    /// Out of the workload or into it.
    pub direction: Direction,
    /// The service that the client named by its address.
    pub service: Option<ServiceName>,
    /// Of connections that got nowhere: why.
    pub flag: Flag,
}

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

/// Adds the proxy's metrics to a registry.
pub(super) fn register(registry: &mut Registry, shared: &Arc<Shared>) {
    registry.register_collector(Box::new(Scrape(Arc::clone(shared))));
}

/// Reads the counters when somebody scrapes.
#[derive(Debug)]
struct Scrape(Arc<Shared>);

/// Istio's labels, as far as an L4 proxy without identities knows them; the others are `unknown`,
/// as Istio's own are then.
#[derive(Clone, Debug)]
struct Labels {
    attached: Arc<Attached>,
    key: CountersKey,
}

impl EncodeLabelSet for Labels {
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::LabelSetEncoder<'_>,
    ) -> Result<(), fmt::Error> {
        let workload = &self.attached.workload;
        let identity = &workload.identity;
        let outbound = self.key.direction == Direction::Outbound;
        let reporter = if outbound { "source" } else { "destination" };
        ("reporter", reporter).encode(encoder.encode_label())?;
        for (prefix, own) in [("source", outbound), ("destination", !outbound)] {
            let known = |value: &str| {
                if own && !value.is_empty() {
                    value.to_owned()
                } else {
                    "unknown".to_owned()
                }
            };
            let labels = [
                ("workload", known(&identity.workload)),
                ("canonical_service", known(&identity.canonical_service)),
                ("canonical_revision", known(&identity.canonical_revision)),
                ("workload_namespace", known(workload.name.namespace())),
                ("app", known(&identity.app)),
                ("version", known(&identity.version)),
                ("principal", known("")),
            ];
            for (name, value) in labels {
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

use prometheus_client::encoding::EncodeLabel as _;

type Reading = fn(&Counters) -> &AtomicU64;

const FAMILIES: [(&str, &str, Reading); 5] = [
    (
        "istio_tcp_connections_opened",
        "Connections that reached their destination",
        |counters| &counters.opened,
    ),
    (
        "istio_tcp_connections_closed",
        "Connections that ended, of those that reached their destination",
        |counters| &counters.closed,
    ),
    (
        "istio_tcp_connections_failed",
        "Connections that were refused or that no endpoint took; response_flags says why",
        |counters| &counters.failed,
    ),
    (
        "istio_tcp_received_bytes",
        "Bytes from clients, as requests",
        |counters| &counters.received,
    ),
    (
        "istio_tcp_sent_bytes",
        "Bytes to clients, as responses",
        |counters| &counters.sent,
    ),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let shared = &self.0;
        let counters: Vec<(Labels, Arc<Counters>)> = shared
            .attachments()
            .into_iter()
            .flat_map(|attached| {
                let all = attached.all_counters().into_iter();
                all.map(move |(key, counters)| {
                    let attached = Arc::clone(&attached);
                    (Labels { attached, key }, counters)
                })
            })
            .collect();
        for (name, help, read) in FAMILIES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, counters) in &counters {
                let value = read(counters).load(Ordering::Relaxed);
                // Of kinds of connections that only fail there is nothing else to say.
                if value == 0 && name != "istio_tcp_connections_opened" {
                    continue;
                }
                let metric = family.encode_family(labels)?;
                prometheus_client::encoding::EncodeMetric::encode(
                    &ConstCounter::new(value),
                    metric,
                )?;
            }
        }
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
            prometheus_client::encoding::EncodeMetric::encode(&ConstGauge::new(value), metric)?;
        }
        let lost = shared.log.lost();
        let metric = encoder.encode_descriptor(
            "dataplane_proxy_access_log_lost",
            "Lines of the access log that were left out, because it could not be written as fast",
            None,
            MetricType::Counter,
        )?;
        prometheus_client::encoding::EncodeMetric::encode(&ConstCounter::new(lost), metric)
    }
}
