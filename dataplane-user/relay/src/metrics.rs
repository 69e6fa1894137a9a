//! Connections as metrics, by Istio's names.

use std::{collections::BTreeMap, fmt};

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

use super::{counters::Totals, labels::Labels};

/// The totals of all connections, by their labels.
pub type Connections = BTreeMap<Labels, Totals>;

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

/// Writes the totals of connections.
///
/// # Errors
/// The encoder's.
pub fn encode_connections(all: &Connections, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    for (name, help, read) in FAMILIES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        let seen = all.iter().filter(|(_, t)| **t != Totals::default());
        for (labels, totals) in seen {
            let value = read(totals);
            // Connections that fail are shown as 0 opened, and not as 0 of the others.
            if value == 0 && name != "istio_tcp_connections_opened" {
                continue;
            }
            let metric = family.encode_family(labels)?;
            ConstCounter::new(value).encode(metric)?;
        }
    }
    Ok(())
}
