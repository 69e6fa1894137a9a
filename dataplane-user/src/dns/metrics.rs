//! What is counted: by Istio's names where it has one.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        counter::{ConstCounter, Counter},
        gauge::ConstGauge,
        histogram::Histogram,
    },
};

use super::{beats::Beats, cache::Cache, name::LowerName};

/// Upper bounds of the times that resolvers take, in seconds.
const SECONDS: [f64; 10] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 4.0];

/// What is counted.
#[derive(Debug)]
pub struct Metrics {
    /// Queries of clients.
    pub requests: Counter,
    /// Queries to resolvers.
    pub upstream_requests: Counter,
    /// Those that got no answer.
    pub upstream_failures: Counter,
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
            upstream_duration: Histogram::new(SECONDS),
            local: Counter::default(),
            hits: Counter::default(),
            stale: Counter::default(),
            refused: Counter::default(),
            failed: Counter::default(),
        }
    }
}

/// Looks at a server's figures, from another thread.
#[derive(Clone, Debug)]
pub struct Observer {
    pub(super) metrics: Arc<Metrics>,
    pub(super) cache: Arc<Cache>,
    pub(super) beats: Arc<Beats>,
}

impl Observer {
    /// The thread that hangs, as seen at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(String, Duration)> {
        self.beats.stuck(now)
    }

    /// How many answers each namespace has in the cache, and their bytes.
    pub fn cache_shares(&self) -> BTreeMap<Arc<str>, (usize, usize)> {
        self.cache.shares()
    }

    /// How many bytes the cache has room for.
    pub fn cache_room(&self) -> usize {
        self.cache.room()
    }

    /// Forgets resolvers' answers for a name, or all. Returns how many there were.
    pub fn flush(&self, name: Option<&LowerName>) -> usize {
        self.cache.flush(name)
    }

    /// Writes what was counted, and the cache's size.
    ///
    /// # Errors
    /// Whatever the encoder says.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let metrics = &*self.metrics;
        for (name, help, counter) in [
            (
                "istio_dns_requests",
                "DNS queries of clients",
                &metrics.requests,
            ),
            (
                "istio_dns_upstream_requests",
                "DNS queries to resolvers",
                &metrics.upstream_requests,
            ),
            (
                "istio_dns_upstream_failures",
                "DNS queries to resolvers that got no answer",
                &metrics.upstream_failures,
            ),
            (
                "dataplane_dns_local_answers",
                "Answers from the names of services",
                &metrics.local,
            ),
            (
                "dataplane_dns_cache_hits",
                "Answers from the cache",
                &metrics.hits,
            ),
            (
                "dataplane_dns_stale_answers",
                "Answers from the cache that were over, because no resolver answered",
                &metrics.stale,
            ),
            (
                "dataplane_dns_refused",
                "Queries that were refused, because their client or its namespace had too many in flight",
                &metrics.refused,
            ),
            (
                "dataplane_dns_failed",
                "Queries that got SERVFAIL, because no resolver answered",
                &metrics.failed,
            ),
        ] {
            metric(encoder, name, help, counter)?;
        }
        metric(
            encoder,
            "istio_dns_upstream_request_duration_seconds",
            "How long resolvers took to answer",
            &metrics.upstream_duration,
        )?;
        let (entries, bytes) = self.cache.size();
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
                self.cache.room(),
            ),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            metric(encoder, name, help, &gauge)?;
        }
        metric(
            encoder,
            "dataplane_dns_cache_evictions",
            "Answers that the cache evicted before their time",
            &ConstCounter::new(self.cache.evictions()),
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

impl Collector for Observer {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode(&mut encoder)
    }
}
