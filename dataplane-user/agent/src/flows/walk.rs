//! The walk through all flows: removes those that are over.

use std::{
    sync::{Arc, mpsc::Sender},
    time::{Duration, Instant},
};

use admin::State;
use kernel::{
    DirectFlows,
    conntrack::{Collector, Conntrack, Listed},
};
use plan::Served;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use super::{
    SHARE, Stopped,
    nf_conntrack::{foreign, hold_ports},
};
use crate::attacher::Job;

/// Walks through all flows.
pub struct Walk {
    state: Arc<State>,
    served: watch::Receiver<Served>,
    direct: Arc<DirectFlows>,
    attacher: Sender<Job>,
    /// The value of [`DirectFlows::made`] when the last walk began, if the walk found no such flow.
    none_since: Option<u64>,
    /// When to look next at the ports that the kernel's own conntrack uses.
    ports: Instant,
}

impl Walk {
    pub fn new(
        state: Arc<State>,
        served: watch::Receiver<Served>,
        direct: Arc<DirectFlows>,
        attacher: Sender<Job>,
    ) -> Self {
        Self {
            state,
            served,
            direct,
            attacher,
            none_since: None,
            ports: Instant::now(),
        }
    }

    /// Walks through all flows.
    ///
    /// # Errors
    /// If `rest` fails. It is called between two steps, with how long to rest.
    pub fn run(
        &mut self,
        mut rest: impl FnMut(Duration) -> Result<(), Stopped>,
    ) -> Result<(), Stopped> {
        // Opened for each walk: while its cells are mapped, they count as the agent's memory.
        let conntrack = match Conntrack::open(&self.state.paths.bpffs) {
            Ok(Some(conntrack)) => conntrack,
            Ok(None) => return Ok(()),
            Err(error) => {
                warn!("cannot collect flows that are over; trying again: {error}");
                return Ok(());
            }
        };
        let since = Instant::now();
        let made = self.direct.made();
        let listed = self.hold_ports(&conntrack);
        let mut collector = Collector::new(&conntrack, listed.as_ref());
        let mut took = Duration::ZERO;
        let census = loop {
            let start = Instant::now();
            let busy = self.state.beats.flows.begin();
            let step = collector.step(foreign);
            drop(busy);
            let step_took = start.elapsed();
            took += step_took;
            if let Some(census) = step {
                break census;
            }
            rest(step_took * SHARE)?;
        };
        debug!(
            flows = census.total(),
            removed = census.removed,
            ?took,
            "walked through all flows"
        );
        if census.freed > 0 {
            info!(
                cells = census.freed,
                "freed conntrack cells of programs that ended while they held them"
            );
        }
        self.look_for_direct(made, census.direct);
        if census.through == Some(0) {
            // Fails only if the agent ends.
            let _ = self.attacher.send(Job::NoneThrough(since));
        }
        self.state.flows.walked(census, since, took);
        Ok(())
    }

    /// Holds the ports that the kernel's own conntrack uses, if that is due. It takes at most one part in a hundred of
    /// one CPU.
    fn hold_ports(&mut self, conntrack: &Conntrack) -> Option<Listed> {
        let start = Instant::now();
        if start < self.ports {
            return None;
        }
        let _busy = self.state.beats.flows.begin();
        let snapshot = self.served.borrow().snapshot.clone();
        let listed = hold_ports(conntrack, &snapshot);
        let took = start.elapsed();
        self.ports = start + took * SHARE * 5;
        match listed {
            Ok(listed) => {
                debug!(
                    ports = listed.ports.len(),
                    ?took,
                    "looked at the kernel's conntrack"
                );
                Some(listed)
            }
            Err(error) => {
                debug!("cannot ask the kernel's conntrack which ports it has given: {error}");
                None
            }
        }
    }

    /// Makes the programs look for flows that do not belong to a service only while there are some. `made`: the counter
    /// of such flows when the walk began that found so many.
    fn look_for_direct(&mut self, made: u64, found: u64) {
        let none_since = (found == 0).then_some(made);
        // A program first announces a flow, and then makes it. A walk in between finds none; the next walk, some
        // seconds later, does.
        if none_since.is_some() && self.none_since == none_since {
            self.direct.none_since(made);
            self.none_since = None;
        } else {
            self.none_since = none_since;
        }
    }
}
