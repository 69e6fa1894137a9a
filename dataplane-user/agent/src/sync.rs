//! Reconciles the kernel's tables with the source, again and again.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use admin::State;
use dataplane_common::{
    Addr, Port, Protocol,
    tables::{Frontend, FrontendKey, Kind},
};
use kernel::ServiceTables;
use plan::{Departures, Plan, Planner, Served};
use tokio::sync::watch;
use tracing::{debug, error, info, warn};

use super::{
    Error, Event, LOOK, LOOK_SOON, RETRY, RETURNING, adopt,
    attacher::{Attacher, Job, Returned},
    ending::End,
    flows::{self, Flows, Imported},
    handover,
    input::Input,
    mesh::Published,
    supervisor::Supervisor,
};

/// How long a reload may take in one part after the other before this thread does its other work.
const RELOADING: Duration = Duration::from_secs(5);

/// Writes to the tables of services.
pub struct Sync {
    tables: ServiceTables,
    /// The contents of the tables.
    planner: Planner,
    serves: watch::Sender<Served>,
    state: Arc<State>,
    input: Input,
    flows: Flows,
    published: Option<Published>,
    attacher: Attacher,
    departures: Departures,
    /// Whether the tables were ever in line with the source.
    settled: bool,
    /// If the last sync failed: when to retry, and how long the pause was.
    retry: Option<(Instant, Duration)>,
    /// Whether the tables were empty when the agent started: no agent has served before.
    empty_tables: bool,
    /// When to look at the node's addresses.
    look: Instant,
    /// When freed memory was last returned to the kernel.
    tidied: Instant,
    /// Whether there were changes since then.
    untidy: bool,
    supervisor: Supervisor,
    before: Option<UnixStream>,
    /// While the agent ends: until when that agent may take its place back.
    ending: Option<Instant>,
}

/// The parts of the agent that the thread works with.
pub struct Inputs {
    pub tables: ServiceTables,
    /// Knows the contents of the tables.
    pub planner: Planner,
    /// Publishes what is served to the other threads.
    pub serves: watch::Sender<Served>,
    pub state: Arc<State>,
    /// The objects to serve. Until they are known the tables stay as they are.
    pub input: Input,
    /// Ends flows and sockets that lead to endpoints that go away.
    pub flows: Flows,
    /// Publishes to the proxy and the DNS server; `None`: there is no mesh.
    pub published: Option<Published>,
    /// Does the slower work: interfaces and network namespaces.
    pub attacher: Attacher,
    /// The agent whose place this one has taken.
    pub before: Option<UnixStream>,
}

impl Sync {
    /// `destroy`: the protocols whose sockets are destroyed if they are connected to endpoints that went away.
    pub fn new(inputs: Inputs, destroy: &[Protocol]) -> Self {
        let Inputs {
            tables,
            planner,
            serves,
            state,
            input,
            flows,
            published,
            attacher,
            before,
        } = inputs;
        let now = Instant::now();
        let protocols = [&[Protocol::UDP], destroy].concat();
        Self {
            empty_tables: planner.frontends().is_empty(),
            tables,
            planner,
            serves,
            state,
            input,
            flows,
            published,
            attacher,
            departures: Departures::new(&protocols),
            settled: false,
            retry: None,
            look: now + LOOK,
            tidied: now,
            untidy: false,
            supervisor: Supervisor::from_env(),
            before,
            ending: None,
        }
    }

    /// Ends the other threads that it works with, except the proxy's. Returns `None` if one of them has died, which
    /// [`Sync::run`] has reported.
    pub fn end(self) -> Option<Returned> {
        self.flows.stop();
        self.attacher.stop().ok()
    }

    /// Runs until the agent has to end.
    pub fn run(&mut self, happened: &Receiver<Event>) -> Result<End, Error> {
        self.state.pulse.busy();
        let state = Arc::clone(&self.state);
        if self.input.is_known() {
            let _busy = state.beats.tables.begin();
            self.sync(None)?;
        }
        loop {
            if let Some(vips) = state.flows.take_vips() {
                self.tables.keep_flows(&vips.addresses, vips.since);
            }
            // If another thread hangs, this thread's progress does not count.
            if state.stuck(Instant::now()).is_none() {
                self.supervisor.alive();
            }
            if self.retry.is_none() {
                self.state.pulse.idle();
            }
            if self.ending.is_some_and(|at| at <= Instant::now()) {
                warn!("the earlier agent does not take over again: ending");
                return Ok(End::Told);
            }
            if self.input.defers() {
                self.look = self.look.min(Instant::now() + RETRY);
            }
            let next = self.retry.map_or(self.look, |(at, _)| at.min(self.look));
            let next = self.ending.map_or(next, |at| at.min(next));
            // After what has come meanwhile: changes of others do not wait for the rest of one, or for the programs that run.
            let is_due = self.goes_on() || self.planner.wants_grace();
            let next = if is_due { Instant::now() } else { next };
            let event = happened.recv_timeout(next.saturating_duration_since(Instant::now()));
            let _busy = state.beats.tables.begin();
            self.state.pulse.busy();
            match event {
                Ok(Event::Stop(signal)) => {
                    self.supervisor.stopping();
                    if self.ending.is_none()
                        && self.before.as_ref().is_some_and(handover::give_back)
                    {
                        info!("{signal}: ending when the earlier agent serves again");
                        self.ending = Some(Instant::now() + RETURNING);
                        continue;
                    }
                    info!("{signal}: ending");
                    return Ok(End::Told);
                }
                Ok(Event::Replace(stream)) => self.attacher.send(Job::Replace(stream)),
                Ok(Event::Replaced(by)) => {
                    let told = self.ending.is_some();
                    return Ok(End::Replaced { by, told });
                }
                Ok(Event::Reload) => {
                    self.supervisor.reloading();
                    self.reload()?;
                    self.supervisor.reloaded();
                }
                Ok(Event::Changed) => drop(self.take()?),
                Ok(Event::Failed(error)) => return Err(Error::Waiter(error)),
                Ok(Event::Died(thread, why)) => return Err(Error::Died { thread, why }),
                Err(RecvTimeoutError::Timeout) => self.pass_time()?,
                Ok(Event::Addresses) => {
                    if self.look() && self.input.is_known() {
                        self.sync(None)?;
                    }
                }
                Ok(Event::Accepting(pods)) => {
                    if self.input.accept(pods) && self.input.is_known() {
                        self.sync(None)?;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Waiter(std::io::Error::other("its thread is gone")));
                }
            }
        }
    }

    /// Reads the source anew if the source does not report changes itself.
    fn reload(&mut self) -> Result<(), Error> {
        debug!("SIGHUP: reading the source");
        let moved = self.look();
        self.input.refresh();
        if !self.take()? && moved && self.input.is_known() {
            self.sync(None)?;
        }
        // An operator expects that a reload is over when all is taken in. But objects that change all the time do not keep this
        // thread from its other work: `run` takes in the rest.
        let limit = Instant::now() + RELOADING;
        while self.goes_on() && Instant::now() < limit {
            self.take()?;
        }
        Ok(())
    }

    /// Whether there is more of the source to take in now. What could not be written a moment ago is tried again first.
    fn goes_on(&self) -> bool {
        self.retry.is_none() && self.input.is_behind()
    }

    /// Takes the source's newest view; returns whether there was a new one.
    fn take(&mut self) -> Result<bool, Error> {
        let start = Instant::now();
        let Some(taken) = self.input.take() else {
            return Ok(false);
        };
        // A failed write is not retried at each change of one object.
        if self.retry.is_none() || taken.since.is_none() {
            self.sync(taken.since)?;
            self.input.took(start.elapsed());
        }
        // After a list. Changes use little memory, but it adds up.
        self.untidy = true;
        if taken.since.is_none() && !self.input.is_behind() || self.tidied.elapsed() > LOOK {
            self.tidy();
        }
        Ok(true)
    }

    /// Does the work that is due.
    fn pass_time(&mut self) -> Result<(), Error> {
        if self.goes_on() {
            self.take()?;
        } else if self.planner.wants_grace()
            && let Err(why) = self.grace()
        {
            self.retry_later(&why)?;
        }
        let now = Instant::now();
        let again = self.retry.is_some_and(|(at, _)| at <= now) || self.waits();
        let is_due = self.look <= now;
        let moved = is_due && self.look();
        if self.input.is_known() && (again || moved) {
            self.sync(None)?;
        }
        // After the last of several changes, too: by then, no other thread has the earlier snapshots.
        if is_due && self.untidy && self.tidied.elapsed() > LOOK {
            self.tidy();
        }
        Ok(())
    }

    /// Whether services wait for room, which a grace period may free.
    fn waits(&self) -> bool {
        self.planner.is_waiting()
    }

    /// Looks at the node's addresses; returns whether they changed.
    fn look(&mut self) -> bool {
        let moved = self.input.look();
        let soon = self.input.owns_cluster_ips();
        let look = Instant::now() + if soon { LOOK_SOON } else { LOOK };
        let kept = self.input.addresses_kept_until();
        self.look = kept.map_or(look, |until| until.min(look));
        moved
    }

    /// Returns memory to the kernel that reading no longer needs.
    fn tidy(&mut self) {
        kernel::process::give_back_freed_memory();
        self.tidied = Instant::now();
        self.untidy = false;
    }

    /// The tables are in line with the source for the first time: removes the tables and programs of other layouts.
    fn replace_other_layouts(&mut self) -> Result<(), Error> {
        self.settled = true;
        self.attacher
            .ask(Job::ReplaceOtherLayouts)
            .map_err(|_| Self::died())??;
        self.supervisor.ready();
        self.tidy();
        Ok(())
    }

    fn died() -> Error {
        Error::Died {
            thread: "attacher".to_owned(),
            why: "it does not answer".to_owned(),
        }
    }

    /// Writes the changes, in two steps if there is not enough room for old and new at the same time. `since`: when the
    /// oldest of the changes arrived, if known.
    fn sync(&mut self, since: Option<Instant>) -> Result<(), Error> {
        self.sync_once(since)?;
        if self.retry.is_none() && self.waits() {
            self.sync_once(None)?;
        }
        Ok(())
    }

    /// Writes the changes. Failures are retried later; the only error is that the tables cannot be understood any more.
    fn sync_once(&mut self, since: Option<Instant>) -> Result<(), Error> {
        let start = Instant::now();
        let plan = self.planner.plan(self.input.snapshot());
        let thinking = start.elapsed();
        let start = Instant::now();
        let result = self.write(&plan);
        if let (Ok(()), Some(published)) = (&result, &self.published) {
            let is_behind = self.input.health().is_behind(admin::now());
            published.publish(self.input.snapshot(), is_behind);
        }
        let writing = start.elapsed();
        if let (Ok(()), Some(since)) = (&result, since) {
            self.state
                .change_duration
                .observe(since.elapsed().as_secs_f64());
        }
        // If one of the next changes adds a key, `ServiceTables::apply` waits before it reuses the element of a removed key.
        let is_scarce = self.planner.wants_room();
        let result = result.and_then(|()| if is_scarce { self.grace() } else { Ok(()) });
        match result {
            Ok(()) => {
                self.serves.send_replace(self.planner.served());
                // Services first, because a proxy's connections use them; ready means that both are in line.
                let served = self.input.snapshot().clone();
                if self.settled {
                    self.attacher.send(Job::Served(served));
                } else {
                    let first = self.attacher.ask(|answer| Job::First(served, answer));
                    let accepting = first.map_err(|_| Self::died())?;
                    // Before programs serve by tables that do not say which Pods speak HBONE.
                    if self.input.accept(accepting) {
                        return self.sync_once(since);
                    }
                }
                let changes = plan.writes.len();
                self.state.synced(changes, thinking, writing);
                self.retry = None;
                self.tell(changes, thinking, writing, since.is_some());
                let departed = self.departures.after(&self.planner);
                self.flows.departed(departed);
                if !self.settled {
                    self.replace_other_layouts()?;
                }
                Ok(())
            }
            Err(why) => self.retry_later(&why),
        }
    }

    /// After a failure: reads the tables anew, and notes when to try again.
    fn retry_later(&mut self, why: &kernel::Error) -> Result<(), Error> {
        let next = self.retry.map_or(RETRY, |(_, last)| (last * 2).min(LOOK));
        error!("{why}; trying again in {next:?}");
        self.state.sync_failed(why.to_string());
        self.retry = Some((Instant::now() + next, next));
        // The plan was written in part, or not at all: only the kernel knows its tables.
        self.planner = adopt(&self.tables, &self.state.paths, self.state.limits)?;
        // The next plan may use pools that the published view still names.
        let planner = &self.planner;
        self.serves.send_modify(|served| {
            served.retain_owners(|pool| planner.pool(pool).is_some());
        });
        Ok(())
    }

    /// Logs a sync. Changes of the API come by the hundred in a second.
    fn tell(&self, writes: usize, planned: Duration, written: Duration, is_change: bool) {
        let services = self.input.snapshot().services.len();
        // One line for an action of a person, and none for a look that found no change.
        if is_change || writes == 0 && self.settled || self.input.is_behind() {
            debug!(
                services,
                writes,
                ?planned,
                ?written,
                "in line with the source"
            );
        } else {
            info!(
                services,
                writes,
                ?planned,
                ?written,
                "in line with the source"
            );
        }
    }

    fn write(&mut self, plan: &Plan) -> Result<(), kernel::Error> {
        if !self.settled && self.empty_tables {
            self.take_over();
        }
        let state = Arc::clone(&self.state);
        for growth in state.grow(|| self.tables.reserve(&plan.demand))? {
            info!(
                table = growth.table,
                from = growth.from,
                to = growth.to,
                "made a table larger"
            );
        }
        self.tables.apply(&plan.writes)
    }

    /// Imports flows before the first service is served: flows that the kernel's own conntrack translates for our VIPs
    /// stay with it.
    fn take_over(&self) {
        let is_vip = |addr, port, protocol| is_vip(&self.planner, addr, port, protocol);
        match flows::import(&self.state.paths.bpffs, self.planner.snapshot(), is_vip) {
            Ok(Imported { flows: 0, ports: 0 }) => {}
            Ok(Imported { flows, ports }) => info!(
                flows,
                ports,
                "recorded UDP flows that the kernel's conntrack translates as foreign; the programs leave them alone, and give the \
                 ports of the connections that it masquerades to no others"
            ),
            Err(error) => warn!(
                "UDP flows that the kernel's own conntrack translates may change their endpoint, and connections that it masquerades \
                 may lose their ports: {error}"
            ),
        }
    }

    /// Waits for the programs that run, and makes the slots that the last flips freed usable again.
    fn grace(&mut self) -> Result<(), kernel::Error> {
        self.tables.grace()?;
        self.planner.grace_passed();
        Ok(())
    }
}

/// Whether the plan has a frontend at this address and port.
fn is_vip(planner: &Planner, addr: Addr, port: Port, protocol: Protocol) -> bool {
    let kind = |key| planner.frontend(&key).map(Frontend::kind);
    kind(FrontendKey::new(addr, port, protocol)).is_some()
        || kind(FrontendKey::address(addr)) == Some(Kind::NODE_ADDRESS)
            && kind(FrontendKey::node_port(addr.is_v4(), port, protocol)).is_some()
}
