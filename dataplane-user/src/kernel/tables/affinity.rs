//! Clients whose endpoints are remembered: the programs add them, and the agent removes those who were not heard of
//! for longer than their service remembers them.

use dataplane_common::{
    decide,
    tables::{Affinity, AffinityKey},
};

use super::{
    super::error::{Doing, Error},
    Tables,
};

/// What AFFINITY holds after the agent has looked at all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remembered {
    /// Clients that are there.
    pub clients: u32,
    /// Clients that were removed.
    pub expired: u32,
}

impl Tables {
    /// Removes the clients whose time is over. `now`: the programs' clock, in nanoseconds.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn expire_affinity(&self, now: u64) -> Result<Remembered, Error> {
        let doing = || "cannot remove what is over from table AFFINITY".to_owned();
        let mut batches = self.affinity.batches();
        let mut batch = Vec::new();
        let mut seen = Remembered::default();
        while batches.read(&mut batch).doing(doing)? {
            for (key, entry) in batch.drain(..) {
                let seconds = decide::Tables::pool(self, key.group)
                    .map_or(0, |pool| u64::from(pool.affinity_seconds));
                if is_over(&entry, seconds, now) && self.forget(&key, &entry).doing(doing)? {
                    seen.expired += 1;
                } else {
                    seen.clients += 1;
                }
            }
        }
        Ok(seen)
    }

    /// Removes a client, unless a program has used the entry since it was read.
    fn forget(&self, key: &AffinityKey, entry: &Affinity) -> std::io::Result<bool> {
        Ok(self.affinity.get(key)? == Some(*entry) && self.affinity.remove(key)?)
    }
}

/// Whether a service that remembers clients for so many seconds has forgotten this one.
fn is_over(entry: &Affinity, seconds: u64, now: u64) -> bool {
    now.saturating_sub(entry.used_at) > seconds * 1_000_000_000
}

/// Kernel memory that AFFINITY takes, about: a bucket of 16 bytes for each client that there is room for, and 128 bytes
/// for each that is there (`struct htab_elem`, key and value, rounded up as `kernel/bpf/memalloc.c` does).
pub(super) fn bytes(capacity: u32, clients: u32) -> u64 {
    u64::from(capacity.next_power_of_two()) * 16 + u64::from(clients) * 128
}

#[cfg(test)]
mod tests {
    use dataplane_common::tables::Endpoint;

    use super::*;

    #[test]
    fn a_client_is_over_after_its_services_time() {
        let entry = Affinity {
            endpoint: Endpoint::NONE,
            used_at: 5_000_000_000,
        };
        for (seconds, now, over) in [
            (10, 15_000_000_000, false),
            (10, 15_000_000_001, true),
            // A program has used the entry since the clock was read.
            (10, 4_000_000_000, false),
            // The service has no affinity any longer.
            (0, 5_000_000_001, true),
        ] {
            assert_eq!(is_over(&entry, seconds, now), over, "{seconds} s at {now}");
        }
    }
}
