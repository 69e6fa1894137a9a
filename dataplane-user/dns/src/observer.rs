//! A server's figures and answers, for other threads.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use hickory_proto::rr::RecordType;
use prometheus_client::{
    collector::Collector, encoding::DescriptorEncoder, metrics::counter::Counter,
};
use threads::Page;

use super::{
    explain::{ExplainError, Step},
    log::Answered,
    name::LowerName,
    shared::Shared,
};

/// Looks at a server's figures, from another thread.
#[derive(Clone)]
pub struct Observer(Arc<Shared>);

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").finish_non_exhaustive()
    }
}

impl Observer {
    /// Creates an observer of the state that all workers share.
    pub(super) const fn of(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Returns queries from a number on, at most `most` of them; without a number, those that are answered from now on.
    /// The log records queries for a few seconds after each call.
    pub fn queries(&self, from: Option<u64>, most: usize) -> Page<Answered> {
        self.0.log.read(from, most)
    }

    /// Explains how a captured workload would resolve a name. `number`: the number of its network namespace. Returns
    /// `None` if its queries are not answered.
    ///
    /// # Errors
    ///
    /// See [`steps`](super::steps).
    pub fn explain(
        &self,
        number: u64,
        name: &str,
        of_type: RecordType,
    ) -> Option<Result<Vec<Step>, ExplainError>> {
        self.0.explain(number, name, of_type)
    }

    /// The thread that hangs, as seen at `now`, and for how long.
    pub fn stuck(&self, now: Instant) -> Option<(String, Duration)> {
        self.0.beats.stuck(now)
    }

    /// How many captured workloads there are.
    pub fn captured(&self) -> usize {
        self.0.captured()
    }

    /// How many queries there were, and how many of them were answered from names that are known here, from the cache, and
    /// by SERVFAIL because no resolver answered.
    pub fn counted(&self) -> [u64; 4] {
        let metrics = self.0.metrics();
        let counters = [
            &metrics.requests,
            &metrics.local,
            &metrics.hits,
            &metrics.failed,
        ];
        counters.map(Counter::get)
    }

    /// How many answers each namespace has in the cache, and their bytes.
    pub fn cache_shares(&self) -> BTreeMap<Arc<str>, (usize, usize)> {
        self.0.cache().shares()
    }

    /// How many bytes the cache has room for.
    pub fn cache_room(&self) -> usize {
        self.0.cache().room()
    }

    /// Forgets resolvers' answers for a name, or all. Returns how many there were.
    pub fn flush(&self, name: Option<&LowerName>) -> usize {
        self.0.cache().flush(name)
    }

    /// Writes the counters and the cache's size.
    ///
    /// # Errors
    /// Any error of the encoder.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        self.0.metrics().encode(self.0.cache(), encoder)
    }
}

impl Collector for Observer {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode(&mut encoder)
    }
}
