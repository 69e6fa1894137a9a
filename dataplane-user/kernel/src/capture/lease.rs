//! The lease of the agent's DNS server: queries are captured for as long as its threads say that they go on.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use dataplane_common::tables::Config;
use nix::time::{ClockId, clock_gettime};

use super::super::{
    error::{Doing, Error},
    map::Mapped,
    pins::{Pins, spec},
};

/// The place of `queries_until` among the words of [`Config`].
pub const WORD: usize = 3;

/// The lease, for the threads that renew it.
#[derive(Clone, Debug)]
pub struct QueryLease(Arc<Mapped<Config>>);

impl QueryLease {
    /// How long queries are captured after the threads last read their sockets. Resolvers of clients repeat a query
    /// after 5 s (glibc) or 2.5 s (musl), and a busy machine lets no thread wait so long often.
    pub const LENGTH: Duration = Duration::from_secs(2);

    pub(super) fn open(pins: &Pins) -> Result<Self, Error> {
        let (config, _) = pins.open_map(spec("CONFIG"))?.ok_or_else(|| Error::Io {
            what: format!("{} is not there", pins.map("CONFIG").display()),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        let config = Mapped::map(config, 1, true).doing(|| "cannot map a table".to_owned())?;
        Ok(Self(Arc::new(config)))
    }

    /// Renews the lease: all threads had read their sockets `ago`. Never shortens the lease, because an agent that takes over
    /// renews it, too.
    pub fn renew(&self, ago: Duration) {
        let until = (now() + Self::LENGTH).saturating_sub(ago).as_nanos();
        if let Some(word) = self.0.word(0, WORD) {
            let until = u64::try_from(until).unwrap_or(u64::MAX);
            word.fetch_max(until, Ordering::Relaxed);
        }
    }
}

/// The clock of the programs.
pub fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}
