//! Services that slices name and that do not exist.

use std::{collections::BTreeMap, time::Duration};

use model::ServiceName;
use tokio::time::Instant;

/// Services that slices name and that do not exist. They are reported only after some time, because a deleted Service
/// disappears before its slices, and watches of two kinds are independent.
#[derive(Debug)]
pub struct Orphans {
    patience: Duration,
    /// The time since which each service is missing, and whether it was reported.
    missing: BTreeMap<ServiceName, (Instant, bool)>,
}

impl Orphans {
    /// Starts without missing services. Each is reported after `patience`.
    pub fn new(patience: Duration) -> Self {
        Self {
            patience,
            missing: BTreeMap::new(),
        }
    }

    /// Records whether a service that slices name is missing.
    pub fn note(&mut self, service: ServiceName, missing: bool) {
        if missing {
            let since = (Instant::now(), self.patience.is_zero());
            self.missing.entry(service).or_insert(since);
        } else {
            self.missing.remove(&service);
        }
    }

    /// Returns the time at which the next service must be reported.
    pub fn due(&self) -> Option<Instant> {
        let untold = self.missing.values().filter(|(_, told)| !told);
        Some(untold.map(|(since, _)| *since).min()? + self.patience)
    }

    /// Marks the services that have been missing for long enough as reported. Returns whether there is a new one.
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

    /// Returns the services that were reported.
    pub fn told(&self) -> impl Iterator<Item = &ServiceName> {
        let told = self.missing.iter().filter(|(_, (_, told))| *told);
        told.map(|(service, _)| service)
    }
}
