//! Brings the kernel's tables in line with the source, again and again.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use dataplane_common::{
    Addr, Port, Protocol,
    packet::{Iface, PacketConfig},
    tables::{Frontend, FrontendKey, Kind},
};
use tracing::{debug, error, info, warn};

use super::{
    End, Error, Event, Settings, adopt,
    flows::{self, Flows},
    input::Input,
    mesh::Mesh,
    supervisor::Supervisor,
};
use crate::{
    admin::{State, lock},
    kernel::{self, Kernel},
    model::{Node, Snapshot},
    plan::{Departures, Plan, Planner},
    proxy,
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
    input: Input,
    /// Ends what leads to endpoints that go away.
    flows: Flows,
    departures: Departures,
    /// What should be served.
    wanted: Snapshot,
    /// Whether that is known. Until then the tables stay as they are.
    known: bool,
    /// Whether the tables were ever in line with it.
    settled: bool,
    /// If the last sync did not work: when to try again, and how long that was to wait for.
    retry: Option<(Instant, Duration)>,
    /// Whether there was nothing in the tables when the agent started: nobody has served before.
    empty_tables: bool,
    /// When to look at the node's addresses.
    look: Instant,
    /// When freed memory was last given back.
    tidied: Instant,
    /// On how many interfaces the packet path's programs belong, since it was last looked, and whether
    /// they keep ways.
    interfaces: Option<(usize, bool)>,
    /// What is wrong with the packet path.
    problems: Vec<String>,
    /// Whose connections go to a proxy, and when to look for them again.
    mesh: Option<(Mesh, Instant)>,
    /// The agent whose place this one has taken, until this one serves: where there is a mesh, that knows when.
    before: Option<UnixStream>,
    supervisor: Supervisor,
}

impl Sync {
    #[expect(
        clippy::too_many_arguments,
        reason = "called once, with what the agent has put together"
    )]
    pub fn new(
        kernel: Kernel,
        state: Arc<State>,
        settings: Settings,
        input: Input,
        flows: Flows,
        wanted: Option<Snapshot>,
        empty: Snapshot,
        mesh: Option<Mesh>,
        before: Option<UnixStream>,
    ) -> Self {
        let now = Instant::now();
        let empty_tables = lock(&state.planner).frontends().is_empty();
        let protocols = [&[Protocol::UDP], &settings.destroy_stale[..]].concat();
        let departures = Departures::new(&protocols);
        Self {
            kernel,
            state,
            settings,
            input,
            flows,
            departures,
            known: wanted.is_some(),
            wanted: wanted.unwrap_or(empty),
            settled: false,
            retry: None,
            empty_tables,
            look: now + LOOK,
            tidied: now,
            interfaces: None,
            problems: Vec::new(),
            mesh: mesh.map(|mesh| (mesh, now)),
            before,
            supervisor: Supervisor::from_env(),
        }
    }

    /// Ends the other threads that it works with, but for the proxy's.
    pub fn end(self) -> (Kernel, Option<Mesh>) {
        self.flows.stop();
        (self.kernel, self.mesh.map(|(mesh, _)| mesh))
    }

    /// Until told to end.
    pub fn run(&mut self, happened: &Receiver<Event>) -> Result<End, Error> {
        self.state.pulse.busy();
        self.network();
        if self.known {
            self.sync(None)?;
        }
        loop {
            self.kernel.pass_on_log();
            self.supervisor.alive();
            if self.retry.is_none() {
                self.state.pulse.idle();
            }
            let mut next = self.retry.map_or(self.look, |(at, _)| at.min(self.look));
            if let Some((_, due)) = &self.mesh {
                next = next.min(*due);
            }
            let event = happened.recv_timeout(next.saturating_duration_since(Instant::now()));
            self.state.pulse.busy();
            match event {
                Ok(Event::Stop(signal)) => {
                    info!("{signal}: ending");
                    self.supervisor.stopping();
                    return Ok(End::Told);
                }
                Ok(Event::Replace(stream)) => {
                    let sockets = self.mesh.iter().flat_map(|(mesh, _)| mesh.sockets());
                    match proxy::handover::offer(stream, &sockets.collect::<Vec<_>>()) {
                        Ok(stream) => return Ok(End::Replaced(stream)),
                        Err(error) => {
                            warn!(
                                "another agent asked for our place, and did not take it: {error}"
                            );
                        }
                    }
                }
                Ok(Event::Reload(why)) => {
                    self.supervisor.reloading();
                    self.reload(why)?;
                    self.supervisor.reloaded();
                }
                Ok(Event::Changed) => self.take()?,
                Ok(Event::Failed(error)) => return Err(Error::Waiter(error)),
                Err(RecvTimeoutError::Timeout) => self.pass_time()?,
                Ok(Event::Network) => {
                    debug!("interfaces, addresses or routes changed");
                    self.network();
                    self.mesh();
                    if self.look() && self.known {
                        self.sync(None)?;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Waiter(std::io::Error::other("its thread is gone")));
                }
            }
        }
    }

    /// Reads the manifests again.
    fn reload(&mut self, why: &str) -> Result<(), Error> {
        debug!("{why}: reading the manifests");
        self.look();
        let own = Node {
            zone: self.settings.node.zone.as_str().into(),
            leaving: None,
            ..(*self.wanted.node).clone()
        };
        if self.input.read(&mut self.wanted, &own, &self.state) {
            self.sync(None)?;
        }
        self.tidy();
        Ok(())
    }

    /// Takes what the API has become.
    fn take(&mut self) -> Result<(), Error> {
        let Some(view) = self.input.take(&mut self.wanted, &self.settings.node) else {
            return Ok(());
        };
        self.known = true;
        // What could not be written a moment ago is not tried again at each change.
        if self.retry.is_none() {
            self.sync(view.since.map(Into::into))?;
        }
        // After a list. What changes come to is little, but not for ever.
        if view.since.is_none() || self.tidied.elapsed() > LOOK {
            drop(view);
            self.tidy();
        }
        Ok(())
    }

    /// Does what is due.
    fn pass_time(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        if self.mesh.as_ref().is_some_and(|(_, due)| *due <= now) {
            self.mesh();
        }
        let again = self.retry.is_some_and(|(at, _)| at <= now);
        let due = self.look <= now;
        if due {
            // Nothing may have told us that somebody removed a program of ours.
            self.network();
        }
        let moved = due && self.look();
        if self.known && (again || moved) {
            self.sync(None)?;
        }
        Ok(())
    }

    /// Brings capture in line with the workloads and network namespaces that there are.
    fn mesh(&mut self) {
        let Some((mesh, due)) = &mut self.mesh else {
            return;
        };
        if !self.known {
            *due = Instant::now() + RETRY;
            return;
        }
        match mesh.settle(&mut self.kernel, &self.wanted) {
            Ok(workloads) => self.state.captured(workloads),
            Err(error) => {
                error!("mesh: {error}; trying again in {:?}", mesh.patience());
                self.state.capture_failed(error.to_string());
            }
        }
        *due = Instant::now() + mesh.patience();
    }

    /// Brings the packet path in line with the interfaces that there are.
    fn network(&mut self) {
        let settings = &self.settings.packet;
        let result = kernel::interfaces().and_then(|all| {
            let by_address = settings.attach.is_some() && kernel::ways_by_address();
            let network = settings.network(&all, by_address);
            let network = network.map_err(|source| kernel::Error::Io {
                what: "cannot find out the host's ephemeral ports".to_owned(),
                source,
            })?;
            let mut problems = self.kernel.set_network(&network)?;
            problems.extend(settings.left_out(&all));
            Ok((network, problems))
        });
        let problems = match result {
            Ok((network, problems)) => {
                let on = |i: &&kernel::NetworkInterface| i.flags & Iface::ATTACHED != 0;
                let on = network.interfaces.values().filter(on).count();
                let kept = network.config.flags & PacketConfig::WAYS_BY_ADDRESS != 0;
                if self.interfaces.replace((on, kept)) != Some((on, kept))
                    && let Some(hook) = self.kernel.hook()
                {
                    info!(
                        interfaces = on,
                        by = hook.word(),
                        ways_kept = kept,
                        "the packet path's interfaces"
                    );
                }
                problems
            }
            Err(error) => vec![error.to_string()],
        };
        if problems != self.problems {
            for problem in &problems {
                error!("packet path: {problem}");
            }
            self.state.network_problems(&problems);
            self.problems = problems;
        }
    }

    /// Looks at the node's addresses; whether they changed.
    fn look(&mut self) -> bool {
        self.look = Instant::now() + LOOK;
        let node = match self.input.facts() {
            Some(facts) => self.settings.node.node_with(facts),
            None => self.settings.node.node(),
        };
        match node {
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

    /// Reading takes memory that is not needed any more.
    fn tidy(&mut self) {
        kernel::give_back_freed_memory();
        self.tidied = Instant::now();
    }

    /// The tables are in line with the source for the first time: what was in their place before
    /// can go.
    fn settle(&mut self) -> Result<(), Error> {
        self.settled = true;
        let waited = self.kernel.waits();
        let removed = self.kernel.replace_other_layouts()?;
        if waited {
            info!("of another version: its programs are replaced");
            self.network();
            self.mesh();
        }
        for item in removed {
            info!(
                "of another version: removed {} ({})",
                item.path.display(),
                item.what
            );
        }
        if let Some(before) = self.before.take() {
            proxy::handover::serves(before);
        }
        self.supervisor.ready();
        self.tidy();
        Ok(())
    }

    /// Writes what changed. What does not work is tried again later, and only that the tables
    /// cannot be understood any more is an error. `since`: when the oldest of the changes arrived,
    /// if that is known.
    fn sync(&mut self, since: Option<Instant>) -> Result<(), Error> {
        let start = Instant::now();
        let plan = self.state.plan(&self.wanted);
        let thinking = start.elapsed();
        let start = Instant::now();
        let result = self.write(&plan);
        self.state.written();
        let writing = start.elapsed();
        if let (Ok(()), Some(since)) = (&result, since) {
            self.state
                .change_duration
                .observe(since.elapsed().as_secs_f64());
        }
        match result.and_then(|()| self.grace()) {
            Ok(()) => {
                // Services first, which a proxy's connections go by; ready is who has both.
                self.mesh();
                let changes = plan.writes.len();
                self.state
                    .synced(&self.wanted, plan.demand.pools, changes, thinking, writing);
                self.retry = None;
                self.tell(changes, thinking, writing, since.is_some());
                let departed = self.departures.after(&lock(&self.state.planner));
                self.flows.departed(departed);
                if !self.settled {
                    self.settle()?;
                }
                Ok(())
            }
            Err(why) => {
                let next = self.retry.map_or(RETRY, |(_, last)| (last * 2).min(LOOK));
                error!("{why}; trying again in {next:?}");
                self.state.sync_failed(why.to_string());
                self.retry = Some((Instant::now() + next, next));
                // The plan was written in part, or not at all: only the kernel knows.
                let planner = adopt(&mut self.kernel, &self.settings.paths)?;
                *lock(&self.state.planner) = planner;
                Ok(())
            }
        }
    }

    /// Logs a sync. Changes of the API come by the hundred in a second.
    fn tell(&self, writes: usize, planned: Duration, written: Duration, is_change: bool) {
        let services = self.wanted.services.len();
        if is_change {
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

    /// Before anything is served for the first time: what the kernel's own conntrack translates for
    /// our VIPs stays with it.
    fn take_over(&self) {
        let planner = lock(&self.state.planner);
        let imported = flows::import(&self.settings.paths.bpffs, |addr, port, protocol| {
            is_vip(&planner, addr, port, protocol)
        });
        match imported {
            Ok(0) => {}
            Ok(flows) => info!(
                flows,
                "left UDP flows to the kernel's own conntrack, which translated them before"
            ),
            Err(error) => warn!(
                "UDP flows that the kernel's own conntrack translates may change their endpoint: \
                 {error}"
            ),
        }
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

/// Whether the plan has something at this address and port.
fn is_vip(planner: &Planner, addr: Addr, port: Port, protocol: Protocol) -> bool {
    let kind = |key| planner.frontend(&key).map(Frontend::kind);
    kind(FrontendKey::new(addr, port, protocol)).is_some()
        || kind(FrontendKey::address(addr)) == Some(Kind::NODE_ADDRESS)
            && kind(FrontendKey::node_port(addr.is_v4(), port, protocol)).is_some()
}
