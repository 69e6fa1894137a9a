//! Services that slices name and that are not there.

use std::{collections::BTreeMap, time::Duration};

use model::ServiceName;
use tokio::time::Instant;

/// Services that slices name and that are not there. Told after some time only: a Service that is
/// deleted goes before its slices, and the two kinds are watched separately.
pub struct Orphans {
    patience: Duration,
    /// Since when each is missing, and whether that is told.
    missing: BTreeMap<ServiceName, (Instant, bool)>,
}

impl Orphans {
    /// None, of which nothing is told for that long.
    pub fn new(patience: Duration) -> Self {
        Self {
            patience,
            missing: BTreeMap::new(),
        }
    }

    /// Notes whether slices name a service that is not there.
    pub fn note(&mut self, service: ServiceName, missing: bool) {
        if missing {
            let since = (Instant::now(), false);
            self.missing.entry(service).or_insert(since);
        } else {
            self.missing.remove(&service);
        }
    }

    /// When the next one is to be told.
    pub fn due(&self) -> Option<Instant> {
        let untold = self.missing.values().filter(|(_, told)| !told);
        Some(untold.map(|(since, _)| *since).min()? + self.patience)
    }

    /// Tells those that have been missing for long enough; whether there is a new one.
    pub fn tell(&mut self, now: Instant) -> bool {
        let mut news = false;
        for (since, told) in self.missing.values_mut() {
            if !*told && *since + self.patience <= now {
                *told = true;
                news = true;
            }
        }
        news
    }

    /// Those that are told.
    pub fn told(&self) -> impl Iterator<Item = &ServiceName> {
        let told = self.missing.iter().filter(|(_, (_, told))| *told);
        told.map(|(service, _)| service)
    }
}
