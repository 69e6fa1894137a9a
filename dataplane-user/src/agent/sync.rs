//! Brings the kernel's tables in line with the source, again and again.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use tracing::{debug, error, info, warn};

use super::{Error, Event, Settings, adopt};
use crate::{
    admin::{State, lock},
    kernel::{self, Kernel},
    model::{Node, Snapshot},
    plan::Plan,
    source::manifests,
};

/// How often to look whether the node's addresses changed.
const LOOK: Duration = Duration::from_secs(30);
/// How soon to try again what did not work; doubled each time, up to [`LOOK`].
const RETRY: Duration = Duration::from_secs(1);

/// The one who writes to the kernel's tables.
pub struct Sync {
    kernel: Kernel,
    state: Arc<State>,
    settings: Settings,
    /// What should be served.
    wanted: Snapshot,
    /// If the last sync did not work: how long to wait before the next.
    retry: Option<Duration>,
}

impl Sync {
    pub fn new(kernel: Kernel, state: Arc<State>, settings: Settings, wanted: Snapshot) -> Self {
        Self {
            kernel,
            state,
            settings,
            wanted,
            retry: None,
        }
    }

    pub fn into_kernel(self) -> Kernel {
        self.kernel
    }

    /// Until told to end.
    pub fn run(&mut self, happened: &Receiver<Event>) -> Result<(), Error> {
        self.state.pulse.busy();
        self.sync()?;
        kernel::give_back_freed_memory();
        if self.retry.is_none() {
            for item in self.kernel.retire_other_layouts()? {
                info!(
                    "of another version: removed {} ({})",
                    item.path.display(),
                    item.what
                );
            }
        }
        loop {
            self.kernel.pass_on_log();
            if self.retry.is_none() {
                self.state.pulse.idle();
            }
            let event = happened.recv_timeout(self.retry.unwrap_or(LOOK));
            self.state.pulse.busy();
            match event {
                Ok(Event::Stop(signal)) => {
                    info!("{signal}: ending");
                    return Ok(());
                }
                Ok(Event::Reload(why)) => {
                    debug!("{why}: reading the manifests");
                    if self.read() {
                        self.sync()?;
                    }
                    kernel::give_back_freed_memory();
                }
                Ok(Event::Failed(error)) => return Err(Error::Waiter(error)),
                Err(RecvTimeoutError::Timeout) => {
                    if self.look() || self.retry.is_some() {
                        self.sync()?;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Waiter(std::io::Error::other("its thread is gone")));
                }
            }
        }
    }

    /// Reads the manifests; whether that worked.
    fn read(&mut self) -> bool {
        self.look();
        let node = Node {
            zone: self.settings.node.zone.as_str().into(),
            leaving: false,
            ..(*self.wanted.node).clone()
        };
        match manifests::load_reusing(&self.wanted, &self.settings.manifests, &node) {
            Ok(loaded) => {
                for problem in &*loaded.snapshot.problems {
                    warn!("{}: {}", problem.place, problem.text);
                }
                self.wanted = loaded.snapshot;
                self.state.source_read();
                true
            }
            Err(errors) => {
                for fault in &errors.faults {
                    error!("{fault}");
                }
                error!("the manifests have errors: serving what was read before");
                self.state.source_failed(errors.to_string());
                false
            }
        }
    }

    /// Looks at the node's addresses; whether they changed.
    fn look(&mut self) -> bool {
        match self.settings.node.node() {
            Ok(node) if node.addresses == self.wanted.node.addresses => false,
            Ok(node) => {
                info!(addresses = ?node.addresses, "the node's addresses changed");
                self.wanted.node = Arc::new(Node {
                    addresses: node.addresses,
                    ..(*self.wanted.node).clone()
                });
                true
            }
            Err(error) => {
                warn!("cannot find out the node's addresses, keeping the last ones: {error}");
                false
            }
        }
    }

    /// Writes what changed. What does not work is tried again later, and only that the tables
    /// cannot be understood any more is an error.
    fn sync(&mut self) -> Result<(), Error> {
        let start = Instant::now();
        let plan = self.state.plan(&self.wanted);
        let thinking = start.elapsed();
        let start = Instant::now();
        let result = self.write(&plan);
        self.state.written();
        let writing = start.elapsed();
        match result.and_then(|()| self.grace()) {
            Ok(()) => {
                let changes = plan.writes.len();
                self.state
                    .synced(&self.wanted, plan.demand.pools, changes, thinking, writing);
                self.retry = None;
                info!(
                    services = self.wanted.services.len(),
                    writes = changes,
                    planned = ?thinking,
                    written = ?writing,
                    "in line with the source"
                );
                Ok(())
            }
            Err(why) => {
                let next = self.retry.map_or(RETRY, |last| (last * 2).min(LOOK));
                error!("{why}; trying again in {next:?}");
                self.state.sync_failed(why.to_string());
                self.retry = Some(next);
                // The plan was written in part, or not at all: only the kernel knows.
                let planner = adopt(&mut self.kernel, &self.settings.paths)?;
                *lock(&self.state.planner) = planner;
                Ok(())
            }
        }
    }

    fn write(&mut self, plan: &Plan) -> Result<(), kernel::Error> {
        let state = Arc::clone(&self.state);
        for growth in state.grow(|| self.kernel.reserve(&plan.demand))? {
            info!(
                table = growth.table,
                from = growth.from,
                to = growth.to,
                "made a table larger"
            );
        }
        self.kernel.apply(&plan.writes)
    }

    /// After the flips: lets what they freed be used again.
    fn grace(&mut self) -> Result<(), kernel::Error> {
        if lock(&self.state.planner).wants_grace() {
            self.kernel.grace()?;
            lock(&self.state.planner).grace_passed();
        }
        Ok(())
    }
}
