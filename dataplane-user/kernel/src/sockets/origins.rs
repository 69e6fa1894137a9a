//! Entries of `ORIGINS` whose sockets are gone, and whose end no program reported: the programs were of an earlier
//! layout, or none was attached when the socket was closed.

use std::{collections::HashSet, io, sync::atomic::Ordering};

use dataplane_common::{
    capture::{Origin, Tuple},
    origins::{COUNTERS, OF_ALL},
};

use crate::{
    error::{Doing, Error},
    map::{Hash, Mapped},
    pins::{Pins, spec},
};

/// The table, and how many entries there are of each.
#[derive(Debug)]
pub(super) struct Origins {
    table: Hash<Tuple, Origin>,
    counts: Mapped<u64>,
    /// Entries whose sockets were not there the last time.
    missed: HashSet<Tuple>,
}

impl Origins {
    /// Opens the pinned tables; `None` if there are none.
    pub(super) fn open(pins: &Pins) -> Result<Option<Self>, Error> {
        let (Some((table, info)), Some((counts, _))) = (
            pins.open_map(spec("ORIGINS"))?,
            pins.open_map(spec("ORIGIN_COUNTS"))?,
        ) else {
            return Ok(None);
        };
        Ok(Some(Self {
            table: Hash::from_fd(table, info.max_entries),
            counts: Mapped::map(counts, COUNTERS, true)
                .doing(|| "cannot map table ORIGIN_COUNTS".to_owned())?,
            missed: HashSet::new(),
        }))
    }

    /// The connections that have an entry.
    pub(super) fn noted(&self) -> io::Result<HashSet<Tuple>> {
        let entries = self.table.entries()?;
        Ok(entries.into_iter().map(|(tuple, _)| tuple).collect())
    }

    /// Removes the entries of connections that are missing in `living`, now and the last time. `noted` was read before
    /// `living`, but a connection may reuse the addresses and ports of one that has just ended. Returns the number of
    /// removed entries.
    pub(super) fn sweep(
        &mut self,
        noted: &HashSet<Tuple>,
        living: &HashSet<Tuple>,
    ) -> io::Result<usize> {
        let missed: HashSet<Tuple> = noted.difference(living).copied().collect();
        let mut freed = 0;
        for tuple in missed.intersection(&self.missed) {
            let Some(origin) = self.table.get(tuple)? else {
                continue;
            };
            // If two writers remove the entry, only one of them succeeds.
            if self.table.remove(tuple)? {
                freed += 1;
                self.uncount(origin.counter);
            }
        }
        self.missed = missed;
        Ok(freed)
    }

    fn uncount(&self, counter: u16) {
        for counter in [counter, OF_ALL].into_iter().filter(|_| counter != 0) {
            if let Some(count) = self.counts.word(counter.into(), 0) {
                count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}
