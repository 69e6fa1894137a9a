//! Listening to the programs' decisions.

use std::{
    fs::File,
    path::Path,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use aya::maps::{MapData, RingBuf};
use dataplane_common::{Event, tables::Config};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    time::{ClockId, clock_gettime},
};
use zerocopy::FromBytes;

use super::{
    error::{Doing, Error},
    map::Mapped,
    pins::{Pins, spec},
};

/// How long the programs write events after the listener last renewed its lease.
const LEASE: Duration = Duration::from_secs(3);
/// How long the listener sleeps before it looks for events again. The ring has room for some 1 900 events: 190 000 a
/// second.
const NAP: Duration = Duration::from_millis(10);

/// Events that are returned at a time, at most.
const BATCH: usize = 1024;

/// A listener. The ring has one reader at a time.
pub struct Monitor {
    ring: RingBuf<MapData>,
    config: Mapped<Config>,
    renewed: Option<Instant>,
    _lock: Flock<File>,
}

impl Monitor {
    /// Starts to listen.
    ///
    /// # Errors
    /// [`Error::Busy`] if another process listens; otherwise if the pins are not there.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        let pins = Pins::new(bpffs);
        let open = |name: &str| {
            pins.open_map(spec(name))?.ok_or_else(|| Error::Io {
                what: format!(
                    "{} is not there: no agent has run on it",
                    pins.map(name).display()
                ),
                source: std::io::ErrorKind::NotFound.into(),
            })
        };
        let (events, _) = open("EVENTS")?;
        let (config, _) = open("CONFIG")?;
        let directory = pins.layout().join("maps");
        let lock =
            File::open(&directory).doing(|| format!("cannot open {}", directory.display()))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| {
            let what = if error == Errno::EWOULDBLOCK {
                "another `dataplane monitor` listens already; one at a time".to_owned()
            } else {
                format!("cannot lock {}", directory.display())
            };
            Error::Io {
                what,
                source: error.into(),
            }
        })?;
        let doing = || "cannot open the ring of events".to_owned();
        let events = MapData::from_fd(events)
            .map_err(std::io::Error::other)
            .doing(doing)?;
        let events = aya::maps::Map::RingBuf(events);
        let mut ring = RingBuf::try_from(events)
            .map_err(std::io::Error::other)
            .doing(doing)?;
        let config = Mapped::map(config, 1, true).doing(doing)?;
        // Events from an earlier listener are old.
        while ring.next().is_some() {}
        let mut monitor = Self {
            ring,
            config,
            renewed: None,
            _lock: lock,
        };
        monitor.renew();
        Ok(monitor)
    }

    /// Waits for events and returns the available ones, oldest first. The programs do not wake a reader, so this
    /// function polls after short sleeps.
    pub fn wait(&mut self) -> Vec<Event> {
        loop {
            self.renew();
            let mut events = vec![];
            // Bounded: programs that write all the time would keep the caller waiting.
            while events.len() < BATCH
                && let Some(item) = self.ring.next()
            {
                events.extend(Event::read_from_prefix(&item).ok().map(|(event, _)| event));
            }
            if !events.is_empty() {
                return events;
            }
            thread::sleep(NAP);
        }
    }

    fn renew(&mut self) {
        if self.renewed.is_some_and(|at| at.elapsed() < LEASE / 3) {
            return;
        }
        self.renewed = Some(Instant::now());
        let Ok(now) = clock_gettime(ClockId::CLOCK_MONOTONIC) else {
            return;
        };
        let until = (Duration::from(now) + LEASE).as_nanos();
        self.set(u64::try_from(until).unwrap_or(u64::MAX));
    }

    fn set(&self, until: u64) {
        if let Some(word) = self.config.word(0, 1) {
            word.store(until, Ordering::Relaxed);
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.set(0);
    }
}
