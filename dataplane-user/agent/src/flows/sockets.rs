//! Records of sockets that are gone.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use admin::State;
use kernel::sockets::Sweeper;
use tracing::debug;

/// How long to rest between two searches for sockets whose end the kernel did not report.
const SWEEP: Duration = Duration::from_mins(10);

/// Removes records of sockets whose end the kernel did not report.
pub struct Sockets {
    state: Arc<State>,
    /// `None`: there are no such records.
    sweeper: Option<Sweeper>,
    /// When the next search is due.
    next: Instant,
}

impl Sockets {
    /// Opens the tables.
    ///
    /// # Errors
    /// If the pinned tables are not ours.
    pub fn open(state: Arc<State>) -> Result<Self, kernel::Error> {
        Ok(Self {
            sweeper: Sweeper::open(&state.paths.bpffs, &state.paths.cgroup)?,
            next: Instant::now() + SWEEP,
            state,
        })
    }

    /// Removes records of ended connections that earlier agents' programs have left.
    pub fn purge(&mut self) {
        let Some(sweeper) = &mut self.sweeper else {
            return;
        };
        let _busy = self.state.beats.flows.begin();
        match sweeper.purge() {
            Ok(0) => {}
            Ok(freed) => debug!(freed, "removed entries of ORIGINS whose sockets are gone"),
            Err(error) => debug!("cannot look for entries of gone sockets: {error}"),
        }
    }

    /// Frees the places of sockets whose end the kernel did not report, if that is due.
    pub fn sweep(&mut self) {
        let start = Instant::now();
        let Some(sweeper) = self.sweeper.as_mut().filter(|_| self.next <= start) else {
            return;
        };
        let _busy = self.state.beats.flows.begin();
        match sweeper.sweep() {
            Ok(freed) => {
                debug!(freed, took = ?start.elapsed(), "looked for places of gone sockets");
            }
            Err(error) => debug!("cannot look for places of gone sockets: {error}"),
        }
        self.next = Instant::now() + SWEEP;
    }
}
