//! Whether the programs look for flows that do not belong to a service: connections to an endpoint itself from a port
//! from which their client already has a flow to it (`packet/direct.rs` in `dataplane-ebpf`).

use std::{
    os::fd::AsFd as _,
    sync::{Mutex, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use aya::{Ebpf, maps::Map};
use dataplane_common::{
    packet::direct::DATAGRAMS,
    states::{State, Timeouts},
};

use crate::{
    error::{Doing, Error},
    map::Mapped,
};

/// Flows say when they were used to 4.3 s.
const MARGIN: Duration = Duration::from_secs(9);

/// The programs' word for it: 0 if they need not look. They add to it before they make such a flow.
#[derive(Debug)]
pub struct DirectFlows {
    word: Mapped<[u64; 1]>,
    /// Until when datagrams may begin such flows.
    datagrams: Mutex<Option<Instant>>,
}

impl DirectFlows {
    /// Returns the word of loaded programs, which look until the agent clears it: an earlier agent's programs may have
    /// made such flows.
    ///
    /// # Errors
    /// If the object has no such table, or it cannot be mapped.
    pub fn of(ebpf: &Ebpf) -> Result<Self, Error> {
        let flows = Self::unset(ebpf)?;
        flows.word.set(0, [1]);
        Ok(flows)
    }

    /// As [`DirectFlows::of`], for programs that do not look until they make such a flow.
    ///
    /// # Errors
    /// As of [`DirectFlows::of`].
    pub fn unset(ebpf: &Ebpf) -> Result<Self, Error> {
        let doing = || "cannot use table DIRECT".to_owned();
        let Some(Map::Array(map)) = ebpf.map("DIRECT") else {
            return Err(std::io::Error::from(std::io::ErrorKind::NotFound)).doing(doing);
        };
        let fd = map.fd().as_fd().try_clone_to_owned().doing(doing)?;
        Ok(Self {
            word: Mapped::map(fd, 1, true).doing(doing)?,
            datagrams: Mutex::default(),
        })
    }

    /// Has the programs look for such flows.
    #[cfg(feature = "testing")]
    pub fn expect(&self) {
        self.word.set(0, [1]);
    }

    /// Starts a period in which datagrams, too, may begin such flows: the programs now serve sockets whose packets they
    /// translated until now, and the flows of these packets have not expired.
    pub fn sockets_are_new(&self) {
        let until = Instant::now()
            + Duration::from_secs(Timeouts::DEFAULT.of(State::Stream).into())
            + MARGIN;
        *self
            .datagrams
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(until);
        if let Some([word]) = self.word.words(0) {
            word.fetch_or(DATAGRAMS, Ordering::AcqRel);
        }
    }

    /// Returns a number that changes with each flow that the programs add.
    pub fn made(&self) -> u64 {
        self.word
            .words(0)
            .map_or(0, |[word]| word.load(Ordering::Acquire))
    }

    /// There is none any more, if none was made since the number was this one.
    pub fn none_since(&self, made: u64) {
        let mut until = self
            .datagrams
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        *until = None;
        if let Some([word]) = self.word.words(0) {
            // If a program has added a flow meanwhile, the word has changed and stays.
            let _ = word.compare_exchange(made, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}
