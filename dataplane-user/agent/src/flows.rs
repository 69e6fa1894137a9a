//! The upkeep of flows and sockets, on a thread of its own so that it delays nothing else: the thread removes flows
//! that are over, and ends flows and sockets that lead to an endpoint that went away.

use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::{BTreeMap, HashSet},
    convert::Infallible,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use admin::{State, api, lock};
use dataplane_common::{
    Addr, Port, Protocol, decide::Tables as _, packet::FlowKey, tables::FrontendKey,
};
use kernel::{
    DirectFlows, Interface, Tables,
    conntrack::{Collector, Conntrack, Listed},
    nf_conntrack,
    sockets::{Peers, Sweeper, pod_cgroups},
};
use model::Snapshot;
use nix::time::{ClockId, clock_gettime};
use plan::Departed;
use threads::may_panic;
use tracing::{debug, info, warn};

use super::{
    Event,
    astray::Astray,
    deaths,
    interfaces::{PacketSettings, Role},
};

/// How long to rest between two walks through all flows.
const REST: Duration = Duration::from_secs(10);
/// A walk rests between its steps, so that it takes at most one part in so many of one CPU.
const SHARE: u32 = 20;
/// How long to rest between two searches for sockets whose end the kernel did not report.
const SWEEP: Duration = Duration::from_mins(10);
/// How long to rest between two looks at where pods' sockets are.
const PODS: Duration = Duration::from_mins(1);
/// How long to rest at least after a walk for endpoints that went away. While many services change, a walk for each
/// change would take the processor from the thread that updates the tables: p99 of a change was 2.4 ms instead of 0.6
/// ms.
const PAUSE: Duration = Duration::from_millis(250);
/// How soon to look again for sockets that were not found: `connect()` notes the endpoint shortly
/// before the socket has it.
const AGAIN: Duration = Duration::from_secs(1);

/// The running thread.
#[derive(Debug)]
pub struct Flows {
    jobs: Sender<Job>,
    thread: JoinHandle<Option<()>>,
}

#[derive(Debug)]
enum Job {
    Departed(Departed),
    Stop,
}

impl Flows {
    /// Starts the thread. `destroy`: the protocols whose sockets to destroy if they are connected to endpoints that
    /// went away. `direct`: whether the programs look for flows that do not belong to a service.
    ///
    /// # Errors
    /// If the pinned tables are not ours, or the thread cannot be started.
    pub fn start(
        state: Arc<State>,
        destroy: Vec<Protocol>,
        direct: Arc<DirectFlows>,
        packet: PacketSettings,
        events: &Sender<Event>,
    ) -> Result<Self, kernel::Error> {
        let bpffs = state.paths.bpffs.clone();
        let has_flows = Conntrack::open(&bpffs)?.is_some();
        let peers = Peers::open(&bpffs)?;
        let sweeper = Sweeper::open(&bpffs, &state.paths.cgroup)?;
        let (jobs, received) = mpsc::channel();
        let worker = Worker {
            bpffs,
            has_flows,
            state,
            peers,
            destroy,
            sweeper: RefCell::new(sweeper),
            swept: Cell::new(Instant::now()),
            packet,
            pods: Cell::new(Instant::now()),
            direct,
            none_since: Cell::new(None),
            astray: RefCell::default(),
            next: Cell::new(None),
            ports: Cell::new(Instant::now()),
        };
        let thread = threads::start("flows", deaths(events), move || {
            let Err(Stopped) = worker.run(&received);
        });
        let thread = thread.map_err(|source| kernel::Error::Io {
            what: "cannot start the thread that ends flows".to_owned(),
            source,
        })?;
        Ok(Self { jobs, thread })
    }

    /// Ends flows and sockets that lead to endpoints that went away, soon.
    pub fn departed(&self, departed: Departed) {
        if !departed.is_empty() {
            // Fails only if the thread is gone, which is reported when it is joined.
            let _ = self.jobs.send(Job::Departed(departed));
        }
    }

    /// Ends the thread.
    pub fn stop(self) {
        let _ = self.jobs.send(Job::Stop);
        let _ = self.thread.join();
    }
}

/// The flows of the kernel's own conntrack that are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// UDP flows whose packets are left alone.
    pub flows: usize,
    /// Ports of the node that no flow of ours gets.
    pub ports: usize,
}

/// Imports the UDP flows that the kernel's own conntrack translates for `is_vip`, so that the packet path leaves them alone; and the
/// ports from which it masquerades connections to endpoints of the snapshot ([`hold_ports`]).
///
/// # Errors
/// If the kernel does not return them.
pub fn import(
    bpffs: &Path,
    snapshot: &Snapshot,
    is_vip: impl Fn(Addr, Port, Protocol) -> bool,
) -> Result<Imported, kernel::Error> {
    let Some(conntrack) = Conntrack::open(bpffs)? else {
        return Ok(Imported::default());
    };
    let cannot_ask = |source| kernel::Error::Io {
        what: "cannot ask the kernel's own conntrack for its flows".to_owned(),
        source,
    };
    let flows = nf_conntrack::translated_udp().map_err(cannot_ask)?;
    let listed = hold_ports(&conntrack, snapshot).map_err(cannot_ask)?;
    let mut imported = Imported {
        flows: 0,
        ports: listed.ports.len(),
    };
    for flow in flows {
        let FlowKey {
            dst,
            dst_port,
            protocol,
            ..
        } = flow.key;
        if is_vip(dst, dst_port, protocol) && conntrack.add_foreign(flow.key, flow.endpoint) {
            imported.flows += 1;
        }
    }
    Ok(imported)
}

/// Holds the ports from which the kernel's own conntrack masquerades connections to endpoints of the snapshot:
/// connections that rules translated before the agent came, and others that still begin, for example by the rules of a
/// network plug-in. Otherwise a flow of ours could get one of these ports, and the endpoint would treat both as one
/// connection.
///
/// These ports take at most half of the room for flows.
fn hold_ports(conntrack: &Conntrack, snapshot: &Snapshot) -> io::Result<Listed> {
    let asked = kernel::conntrack::now();
    let most = conntrack.capacity() as usize / 2;
    // Most nodes masquerade their pods' connections to the outside, and many nodes masquerade nothing.
    let endpoints = OnceCell::new();
    let is_endpoint = |key: &FlowKey| {
        let endpoints = endpoints.get_or_init(|| endpoints_of(snapshot));
        endpoints.contains(&(key.dst, key.dst_port)) || conntrack.holds_port(key)
    };
    let (ports, are_more) = nf_conntrack::masqueraded(most, is_endpoint)?;
    if are_more {
        warn!(
            "the kernel's conntrack masquerades more than {most} connections to endpoints; the packet path does not know the ports of \
             the others, and may give them to its own flows; raise --conntrack-flows"
        );
    }
    for key in &ports {
        conntrack.hold_port(*key);
    }
    Ok(Listed { ports, asked })
}

/// Every endpoint that a flow may go to.
fn endpoints_of(snapshot: &Snapshot) -> HashSet<(Addr, Port)> {
    let ports = snapshot
        .services
        .values()
        .flat_map(|service| &service.ports);
    ports
        .flat_map(|port| &port.endpoints)
        .map(|endpoint| (Addr::from(endpoint.addr), Port::new(endpoint.port)))
        .collect()
}

struct Worker {
    bpffs: PathBuf,
    /// Whether there is a packet path.
    has_flows: bool,
    state: Arc<State>,
    peers: Option<Peers>,
    destroy: Vec<Protocol>,
    sweeper: RefCell<Option<Sweeper>>,
    /// When the sweeper last ran.
    swept: Cell<Instant>,
    /// Decides which interfaces are pods' sides.
    packet: PacketSettings,
    /// When to look next at pods' sockets, and at the routes to pods.
    pods: Cell<Instant>,
    astray: RefCell<Astray>,
    direct: Arc<DirectFlows>,
    /// The value of [`DirectFlows::made`] when the last walk began, if the walk found no such flow.
    none_since: Cell<Option<u64>>,
    /// The earliest time of the next walk: if endpoints come and go all the time, walks take their share and no more.
    next: Cell<Option<Instant>>,
    /// When to look next at the ports that the kernel's own conntrack uses.
    ports: Cell<Instant>,
}

/// The thread is to end.
struct Stopped;

impl Worker {
    /// Walks through all flows, if there are any, again and again, and handles jobs.
    fn run(&self, jobs: &Receiver<Job>) -> Result<Infallible, Stopped> {
        self.purge();
        loop {
            if self.has_flows {
                self.collect(jobs)?;
            }
            self.expire();
            self.wait(jobs, Some(REST))?;
            self.sweep();
            self.look_at_pods();
        }
    }

    /// Removes records of ended connections that earlier agents' programs have left.
    fn purge(&self) {
        let mut sweeper = self.sweeper.borrow_mut();
        let Some(sweeper) = sweeper.as_mut() else {
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
    fn sweep(&self) {
        let mut sweeper = self.sweeper.borrow_mut();
        let Some(sweeper) = sweeper.as_mut() else {
            return;
        };
        if self.swept.get().elapsed() < SWEEP {
            return;
        }
        let _busy = self.state.beats.flows.begin();
        let start = Instant::now();
        match sweeper.sweep() {
            Ok(freed) => {
                debug!(freed, took = ?start.elapsed(), "looked for places of gone sockets");
            }
            Err(error) => debug!("cannot look for places of gone sockets: {error}"),
        }
        self.swept.set(Instant::now());
    }

    /// Checks that the sockets of pods are in the cgroup that the programs are attached to, if that is due.
    fn look_at_pods(&self) {
        let start = Instant::now();
        if start < self.pods.get() {
            return;
        }
        let found = kernel::interfaces().and_then(|all| {
            self.look_at_routes(&all);
            let pods = all
                .iter()
                .filter(|i| i.up && self.packet.role(i) == Role::Pod);
            pod_cgroups(&self.state.paths.cgroup, &pods.map(|i| i.index).collect())
        });
        let took = start.elapsed();
        match found {
            Ok(found) => {
                let pods = api::PodCgroups::from(&found);
                debug!(
                    inside = pods.inside,
                    outside = pods.outside,
                    unknown = pods.unknown,
                    ?took,
                    "looked at pods"
                );
                if pods.outside > 0 && self.state.pods().is_none_or(|before| before.outside == 0) {
                    warn!(
                        pods = pods.outside,
                        others = ?pods.others,
                        cgroup = %self.state.paths.cgroup.display(),
                        "pods have their sockets in other cgroups than kernel.cgroup: they are served by packets only"
                    );
                }
                self.state.pods_seen(pods);
            }
            Err(error) => debug!("cannot look at where pods' sockets are: {error}"),
        }
        self.pods.set(start + PODS.max(took * SHARE * 10));
    }

    /// Checks whether the node's routes lead to its own pods by uplinks.
    fn look_at_routes(&self, interfaces: &[Interface]) {
        let snapshot = lock(&self.state.planner).snapshot().clone();
        let ports = snapshot
            .services
            .values()
            .flat_map(|service| &service.ports);
        let endpoints = ports.flat_map(|port| &port.endpoints);
        let pods = endpoints.filter(|e| e.local && e.ready).map(|e| e.addr);
        let leaves_by = |addr| kernel::leaves_by(addr).ok().flatten();
        let mut astray = self.astray.borrow_mut();
        let led = astray.look(&self.packet, interfaces, &pods.collect(), leaves_by);
        if self.state.pods_led_elsewhere(led.clone())
            && let Some(text) = led
        {
            warn!("packet path: {text}");
        }
    }

    /// Walks through all flows.
    fn collect(&self, jobs: &Receiver<Job>) -> Result<(), Stopped> {
        // Opened for each walk: while its cells are mapped, they count as the agent's memory.
        let conntrack = match Conntrack::open(&self.bpffs) {
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
            self.wait(jobs, Some(step_took * SHARE))?;
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
        self.state.flows.walked(census, since, took);
        Ok(())
    }

    /// Holds the ports that the kernel's own conntrack uses, if that is due. It takes at most one part in a hundred of
    /// one CPU.
    fn hold_ports(&self, conntrack: &Conntrack) -> Option<Listed> {
        let start = Instant::now();
        if start < self.ports.get() {
            return None;
        }
        let _busy = self.state.beats.flows.begin();
        let snapshot = lock(&self.state.planner).snapshot().clone();
        let listed = hold_ports(conntrack, &snapshot);
        let took = start.elapsed();
        self.ports.set(start + took * SHARE * 5);
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
    fn look_for_direct(&self, made: u64, found: u64) {
        let none_since = (found == 0).then_some(made);
        // A program first announces a flow, and then makes it. A walk in between finds none; the next walk, some
        // seconds later, does.
        if none_since.is_some() && self.none_since.get() == none_since {
            self.direct.none_since(made);
            self.none_since.set(None);
        } else {
            self.none_since.set(none_since);
        }
    }

    /// Removes the clients of services with session affinity whose timeout is over. If services of several namespaces
    /// have session affinity, also shares the room among the namespaces.
    fn expire(&self) {
        let _busy = self.state.beats.flows.begin();
        let expired = Tables::open(&self.bpffs).and_then(|tables| {
            let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| {
                u64::try_from(Duration::from(now).as_nanos()).unwrap_or_default()
            });
            let remembered = tables.expire_affinity(now)?;
            let removed = if self.shares_affinity() {
                tables.share_affinity(|group| {
                    let pool = self.state.pool(group)?;
                    Some(pool.namespace.into())
                })?
            } else {
                BTreeMap::new()
            };
            Ok((remembered, removed))
        });
        match expired {
            Ok((remembered, removed)) => {
                debug!(?remembered, "looked at session affinity");
                for (namespace, clients) in &removed {
                    debug!(%namespace, clients, "removed from session affinity for want of room");
                }
                self.state.affinity_shared(removed);
            }
            Err(error) => warn!("cannot remove clients from session affinity: {error}"),
        }
    }

    /// Whether services of several namespaces have session affinity.
    fn shares_affinity(&self) -> bool {
        let snapshot = self.state.snapshot();
        let mut services = snapshot
            .services
            .iter()
            .filter(|(_, service)| service.affinity.is_some());
        let Some((first, _)) = services.next() else {
            return false;
        };
        services.any(|(name, _)| name.namespace() != first.namespace())
    }

    /// Handles jobs for at least so long; without a limit, until a job ends the thread.
    fn wait(&self, jobs: &Receiver<Job>, limit: Option<Duration>) -> Result<(), Stopped> {
        let end = limit.map(|limit| Instant::now() + limit);
        // Departed endpoints to look for again, and when.
        let mut again: Option<(Departed, Instant)> = None;
        loop {
            let now = Instant::now();
            let next = again.as_ref().map(|(_, at)| *at);
            let until = match (end, next) {
                (_, Some(next)) => Some(next),
                (end, None) => end,
            };
            let job = match until {
                Some(until) => jobs.recv_timeout(until.saturating_duration_since(now)),
                None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            may_panic("flows");
            match job {
                Ok(Job::Departed(mut departed)) => {
                    if let Some(next) = self.next.take() {
                        thread::sleep(next.saturating_duration_since(Instant::now()));
                    }
                    for job in jobs.try_iter() {
                        match job {
                            Job::Departed(newer) => departed.extend(newer),
                            Job::Stop => return Err(Stopped),
                        }
                    }
                    if let Some((earlier, _)) = again.take() {
                        let newer = std::mem::replace(&mut departed, earlier);
                        departed.extend(newer);
                    }
                    let start = Instant::now();
                    if !self.end(&departed, true) {
                        again = Some((departed, Instant::now() + AGAIN));
                    }
                    let rest = (start.elapsed() * 4).max(PAUSE);
                    self.next.set(Some(Instant::now() + rest));
                }
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return Err(Stopped),
                Err(RecvTimeoutError::Timeout) => match again.take() {
                    Some((departed, _)) => {
                        self.end(&departed, false);
                    }
                    None => return Ok(()),
                },
            }
        }
    }

    /// Ends flows and sockets that lead to endpoints that went away; returns whether all of these sockets were found.
    fn end(&self, departed: &Departed, first: bool) -> bool {
        let _busy = self.state.beats.flows.begin();
        // Opened each time, because a grown table replaces the earlier one.
        let tables = match Tables::open(&self.bpffs) {
            Ok(tables) => tables,
            Err(error) => {
                warn!("cannot look for flows to endpoints that went away: {error}");
                return true;
            }
        };
        let is_frontend = |key: &FrontendKey| !tables.frontend(key).is_none();
        match Conntrack::open(&self.bpffs) {
            Ok(None) => {}
            Ok(Some(conntrack)) => {
                let ended = end_flows(&conntrack, departed, is_frontend);
                if ended > 0 {
                    info!(ended, "ended UDP flows to endpoints that went away");
                    self.state.flows.ended(ended);
                }
            }
            Err(error) => warn!("cannot end flows to endpoints that went away: {error}"),
        }
        let destroys = !self.destroy.is_empty() && departed.has_stale();
        let Some(peers) = self.peers.as_ref().filter(|_| destroys) else {
            return true;
        };
        let start = Instant::now();
        let destroyed = peers.destroy(&self.destroy, |protocol, peer| {
            departed.is_stale(
                (peer.vip, peer.vip_port),
                protocol,
                (peer.endpoint, peer.endpoint_port),
                is_frontend,
            )
        });
        debug!(
            namespaces = destroyed.namespaces,
            took = ?start.elapsed(),
            "looked for sockets to endpoints that went away"
        );
        if !destroyed.sockets.is_empty() {
            info!(
                destroyed = destroyed.sockets.len(),
                "destroyed sockets that were connected to endpoints that went away"
            );
            self.state.flows.destroyed(&destroyed.sockets);
        }
        if first {
            return destroyed.not_found == 0 && destroyed.errors.is_empty();
        }
        for (path, error) in &destroyed.errors {
            warn!(
                "cannot destroy sockets in the network namespace {}: {error}",
                path.display()
            );
        }
        true
    }
}

/// Ends the UDP flows that lead to endpoints that went away; returns how many. TCP connections stay, as with
/// kube-proxy: their endpoint may still answer them. But a new connection from the same port does not go there.
fn end_flows(
    conntrack: &Conntrack,
    departed: &Departed,
    is_frontend: impl Fn(&FrontendKey) -> bool,
) -> u64 {
    let mut flows = conntrack.flows();
    let mut batch = Vec::new();
    let mut ended = 0;
    while flows.read(&mut batch) {
        for flow in batch.iter().filter(|flow| !flow.holds_port()) {
            if flow.protocol() == Protocol::TCP {
                let vip = (flow.key.dst, flow.key.dst_port);
                let endpoint = (flow.to.endpoint, flow.to.endpoint_port);
                if departed.is_unlisted(vip, endpoint, &is_frontend) {
                    conntrack.depart(flow);
                }
                continue;
            }
            let stale = departed.is_stale(
                (flow.key.dst, flow.key.dst_port),
                flow.protocol(),
                (flow.to.endpoint, flow.to.endpoint_port),
                &is_frontend,
            );
            // A packet that comes now would go to this endpoint as well.
            let same = |now: &kernel::conntrack::Flow| {
                (now.to.endpoint, now.to.endpoint_port) == (flow.to.endpoint, flow.to.endpoint_port)
            };
            if stale && conntrack.remove_if(flow, same) {
                ended += 1;
            }
        }
    }
    ended
}

/// The flows that the kernel's own conntrack translates; none if they cannot be read.
fn foreign() -> Option<HashSet<FlowKey>> {
    match nf_conntrack::translated_udp() {
        Ok(flows) => Some(flows.into_iter().map(|flow| flow.key).collect()),
        Err(error) => {
            warn!(
                "cannot ask the kernel's own conntrack for its flows, so that those which are over stay in the \
                 table: {error}; trying again"
            );
            None
        }
    }
}
