//! The proxy's metrics.

use std::{collections::BTreeMap, fmt, sync::Arc};

use model::WorkloadName;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use relay::{Attached, Denials, encode_connections};

use super::shared::Shared;

/// Adds the proxy's metrics to a registry.
pub(super) fn register(registry: &mut Registry, shared: &Arc<Shared>) {
    registry.register_collector(Box::new(Scrape(Arc::clone(shared))));
}

/// Reads the counters at each scrape.
#[derive(Debug)]
struct Scrape(Arc<Shared>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (_, index) = self.0.relay.index();
        let all = self.0.relay.connections();
        encode_connections(&all, index.snapshot(), &mut encoder)?;
        encode_proxy(&self.0, &mut encoder)
    }
}

type Reading = fn(&Attached) -> u64;

/// Counters of each workload.
const OF_WORKLOADS: [(&str, &str, Reading); 5] = [
    (
        "dataplane_proxy_deferred",
        "Times that a connection of this pod waited, because the pod or the proxy had as many as it may have",
        Attached::deferred,
    ),
    (
        "dataplane_proxy_unknown",
        "Connections of this pod that waited, because the agent did not know their destination and the pod may only connect to known ones, or had not read Istio's policies",
        Attached::unknown,
    ),
    (
        "dataplane_proxy_stalled",
        "Connections of this pod that were ended or refused because a side had stopped reading and the proxy's buffers were full",
        |attached| attached.stalled().0,
    ),
    (
        "dataplane_proxy_tunnels_refused",
        "Tunnels to this pod that were refused, because their client had its share of tunnels",
        |attached| attached.bounded().refused,
    ),
    (
        "dataplane_proxy_tunnels_deferred",
        "Times that a tunnel to this pod waited, because the pod or its namespace had its share of tunnels",
        |attached| attached.bounded().deferred,
    ),
];

/// Writes the proxy's metrics other than those of its connections.
pub(super) fn encode_proxy(shared: &Shared, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let relay = &shared.relay;
    let entries = relay.entries();
    let gauges = [
        (
            "dataplane_proxy_connections",
            "Open connections of the proxy",
            relay.limits.open(),
        ),
        (
            "dataplane_proxy_connections_max",
            "Maximum number of open connections of the proxy; further connections wait in the listener's backlog",
            relay.limits.max(),
        ),
        (
            "dataplane_proxy_workloads",
            "Workloads whose connections the proxy relays",
            entries.iter().filter(|entry| entry.is_in_use()).count(),
        ),
        (
            "dataplane_proxy_held_bytes",
            "Bytes in the proxy's buffers for readers that do not keep up",
            shared.held(),
        ),
    ];
    let of_tunnels = shared.tunnels.get().map(|tunnels| tunnels.held());
    let of_tunnels = of_tunnels.into_iter().flat_map(|[held, max]| {
        [
            (
                "dataplane_proxy_tunnels_held_bytes",
                "Bytes that connections in tunnels hold for readers that do not keep up",
                held,
            ),
            (
                "dataplane_proxy_tunnels_held_bytes_max",
                "Maximum of these bytes; if there are more, connections that hold most are ended",
                max,
            ),
        ]
    });
    for (name, help, value) in gauges.into_iter().chain(of_tunnels) {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)?;
    }
    for (name, help, read) in OF_WORKLOADS {
        let mut pods: BTreeMap<&WorkloadName, u64> = BTreeMap::new();
        for attached in entries.iter().map(|entry| &entry.attached) {
            *pods.entry(&attached.workload.name).or_default() += read(attached);
        }
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (pod, count) in pods.into_iter().filter(|(_, count)| *count > 0) {
            let labels = [("namespace", pod.namespace()), ("pod", pod.name())];
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
    }
    encode_denials(relay.index().1.denials(), encoder)?;
    let lost = relay.log.lost();
    let metric = encoder.encode_descriptor(
        "dataplane_proxy_access_log_lost",
        "Lines of the access log that were dropped, because the log could not be written fast enough",
        None,
        MetricType::Counter,
    )?;
    ConstCounter::new(lost).encode(metric)
}

/// Writes the connections that Istio's policies refused or ended.
fn encode_denials(denials: &Denials, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        "dataplane_policy_denied",
        "Connections that a policy of Istio's refused or ended, or with dry_run=true would have refused",
        None,
        MetricType::Counter,
    )?;
    for (denial, count) in denials.totals() {
        let dry_run = if denial.dry_run { "true" } else { "false" };
        let labels = [
            ("namespace", &*denial.namespace),
            ("policy", &*denial.policy),
            ("dry_run", dry_run),
        ];
        ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
