//! The server's counters: by Istio's names where it has one.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        counter::{ConstCounter, Counter},
        gauge::ConstGauge,
        histogram::Histogram,
    },
};

use super::cache::Cache;

/// Upper bounds of the times that resolvers take, in seconds.
const SECONDS: [f64; 10] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 4.0];

/// The server's counters.
#[derive(Debug)]
pub struct Metrics {
    /// Queries of clients.
    pub requests: Counter,
    /// Queries to resolvers.
    pub upstream_requests: Counter,
    /// Queries to resolvers that got no answer.
    pub upstream_failures: Counter,
    /// Answers of resolvers that may be forged.
    pub forged: Counter,
    /// How long resolvers took.
    pub upstream_duration: Histogram,
    /// Answers from the cluster's names.
    pub local: Counter,
    /// Answers from the cache.
    pub hits: Counter,
    /// Stale answers, because no resolver answered.
    pub stale: Counter,
    /// Queries that were refused, because their client or its namespace has too many in flight.
    pub refused: Counter,
    /// Queries that got SERVFAIL, because no resolver answered.
    pub failed: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Counter::default(),
            upstream_requests: Counter::default(),
            upstream_failures: Counter::default(),
            forged: Counter::default(),
            upstream_duration: Histogram::new(SECONDS),
            local: Counter::default(),
            hits: Counter::default(),
            stale: Counter::default(),
            refused: Counter::default(),
            failed: Counter::default(),
        }
    }
}

impl Metrics {
    /// Writes the counters and the cache's size.
    ///
    /// # Errors
    /// Any error of the encoder.
    pub fn encode(&self, cache: &Cache, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, counter) in [
            (
                "istio_dns_requests",
                "DNS queries of clients",
                &self.requests,
            ),
            (
                "istio_dns_upstream_requests",
                "DNS queries to resolvers",
                &self.upstream_requests,
            ),
            (
                "istio_dns_upstream_failures",
                "DNS queries to resolvers that got no answer",
                &self.upstream_failures,
            ),
            (
                "dataplane_dns_suspect_answers",
                "Answers of resolvers that may be forged, so that the question was asked again by TCP",
                &self.forged,
            ),
            (
                "dataplane_dns_local_answers",
                "Answers from the names of services",
                &self.local,
            ),
            (
                "dataplane_dns_cache_hits",
                "Answers from the cache",
                &self.hits,
            ),
            (
                "dataplane_dns_stale_answers",
                "Answers from the cache that were over, because no resolver answered",
                &self.stale,
            ),
            (
                "dataplane_dns_refused",
                "Queries that were refused, because their client or its namespace had too many in flight",
                &self.refused,
            ),
            (
                "dataplane_dns_failed",
                "Queries that got SERVFAIL, because no resolver answered",
                &self.failed,
            ),
        ] {
            metric(encoder, name, help, counter)?;
        }
        metric(
            encoder,
            "istio_dns_upstream_request_duration_seconds",
            "How long resolvers took to answer",
            &self.upstream_duration,
        )?;
        let (entries, bytes) = cache.size();
        for (name, help, value) in [
            (
                "dataplane_dns_cache_entries",
                "Answers in the cache",
                entries,
            ),
            (
                "dataplane_dns_cache_bytes",
                "Bytes of the answers in the cache",
                bytes,
            ),
            (
                "dataplane_dns_cache_max_bytes",
                "Bytes of answers that the cache has room for",
                cache.room(),
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            metric(encoder, name, help, &gauge)?;
        }
        metric(
            encoder,
            "dataplane_dns_cache_evictions",
            "Answers that the cache evicted before their time",
            &ConstCounter::new(cache.evictions()),
        )
    }
}

fn metric(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    let encoder = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
    metric.encode(encoder)
}
