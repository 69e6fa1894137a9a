//! Keeps the packet path's programs on interfaces, and capture in network namespaces.
//!
//! The kernel takes some 10 ms to attach or detach a program, and there may be hundreds of interfaces. A look at the
//! present state walks through all interfaces and all network namespaces. So a thread of its own does this work:
//! changes of services do not wait for it. The thread gathers events meanwhile, and after each piece of work it rests
//! for a multiple of the time that the work took, or, if a pod's start waits for it, for as long as the work computed. While
//! programs are attached, the kernel mostly waits, so new interfaces do not wait for a rest of this length.

mod packets;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender},
    },
    thread::JoinHandle,
    time::Instant,
};

use admin::{
    State,
    api::Gravity,
    cni::{Answer, Ask},
};
use kernel::{Kernel, namespaces::processor_time};
use model::Snapshot;
use source::Health;
use threads::may_panic;
use tracing::{debug, error, info, warn};

use super::{
    Event, RETRY,
    accepting::Accepting,
    addresses::NodeAddresses,
    deaths,
    due::Due,
    earlier::History,
    handover::{Offers, Turn},
    interfaces::PacketSettings,
    mesh::{self, Mesh},
    path::Path,
};

/// The running thread.
pub struct Attacher {
    jobs: Sender<Job>,
    thread: JoinHandle<Option<Worker>>,
}

/// A job for the thread.
pub enum Job {
    /// Interfaces, addresses, routes or their rules changed.
    Network,
    /// IPsec policies changed.
    Policies,
    /// Rules of nf_tables changed.
    Rules,
    /// The tables of services are in line with this snapshot.
    Served(Snapshot),
    /// As [`Job::Served`], for the first time: the answer comes when capture is in line, too. It has the Pods to which the agent's
    /// proxy accepts tunnels.
    First(Snapshot, SyncSender<Accepting>),
    /// A walk over all flows, which began at this moment, has found none on the path through the stack.
    NoneThrough(Instant),
    /// The tables and programs of another layout can be removed.
    ReplaceOtherLayouts(SyncSender<Result<(), kernel::Error>>),
    /// The CNI plug-in has a request.
    Pod(Ask),
    /// Another agent asks to take this agent's place.
    Replace(UnixStream),
    /// Another agent has our sockets, or did not take them.
    Offered(io::Result<UnixStream>),
    /// The thread is to end.
    Stop,
}

/// The thread has died; the agent has got an event about it.
#[derive(Debug)]
pub struct Died;

/// The parts of the agent that the thread works with.
pub struct Inputs {
    pub kernel: Kernel,
    pub state: Arc<State>,
    pub health: Health,
    pub packet: PacketSettings,
    pub mesh: Option<Mesh>,
    /// The agent whose place this one has taken, until this one serves: if there is a mesh, the thread knows when.
    pub before: Option<UnixStream>,
    /// This agent's turn.
    pub turn: Option<Turn>,
}

/// The parts of the agent that the thread returns when it ends.
pub struct Returned {
    pub kernel: Kernel,
    pub mesh: Option<Mesh>,
    pub turn: Option<Turn>,
}

impl Attacher {
    /// Starts the thread, which brings the packet path in line at once. `jobs` is the sending end of `todo`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        means: Inputs,
        events: Sender<Event>,
        jobs: Sender<Job>,
        todo: Receiver<Job>,
    ) -> io::Result<Self> {
        let now = Instant::now();
        let offered = jobs.clone();
        let offers = Offers::new(move |outcome| {
            // Fails only if the thread has ended.
            let _ = offered.send(Job::Offered(outcome));
        });
        let told = deaths(&events);
        let mut worker = Worker {
            path: Path::new(means.packet.path, means.packet.bypass, now),
            kernel: means.kernel,
            state: means.state,
            health: means.health,
            packet: means.packet,
            accepting: means
                .mesh
                .as_ref()
                .map_or_else(Accepting::default, |mesh| mesh.accepting().clone()),
            mesh: means.mesh,
            before: means.before,
            turn: means.turn,
            offers,
            events,
            snapshot: None,
            network: Due::at(now),
            policies: Due::never(now),
            capture: Due::at(now),
            history: History::default(),
            egress: Due::at(now),
            peers: BTreeSet::new(),
            attached: BTreeSet::new(),
            others: BTreeMap::new(),
            interfaces: None,
            protecting: 0,
            addresses: None,
            problems: Vec::new(),
        };
        let thread = threads::start("attacher", told, move || {
            worker.run(&todo);
            worker
        })?;
        Ok(Self { jobs, thread })
    }

    /// Gives the thread a job.
    pub fn send(&self, job: Job) {
        // Fails only if the thread has died; the agent gets an event about this.
        let _ = self.jobs.send(job);
    }

    /// Gives the thread a job, and waits until it is done.
    pub fn ask<T>(&self, job: impl FnOnce(SyncSender<T>) -> Job) -> Result<T, Died> {
        let (answer, answered) = mpsc::sync_channel(1);
        self.send(job(answer));
        answered.recv().map_err(|_| Died)
    }

    /// Ends the thread; returns the parts that it had.
    pub fn stop(self) -> Result<Returned, Died> {
        self.send(Job::Stop);
        let worker = self.thread.join().ok().flatten().ok_or(Died)?;
        let Worker {
            kernel, mesh, turn, ..
        } = worker;
        Ok(Returned { kernel, mesh, turn })
    }
}

struct Worker {
    kernel: Kernel,
    state: Arc<State>,
    health: Health,
    packet: PacketSettings,
    /// Past the stack, or through it.
    path: Path,
    mesh: Option<Mesh>,
    /// The Pods that the agent was last notified of.
    accepting: Accepting,
    before: Option<UnixStream>,
    turn: Option<Turn>,
    offers: Offers,
    events: Sender<Event>,
    /// The snapshot with which the tables of services are in line; `None` at first.
    snapshot: Option<Snapshot>,
    /// The packet path.
    network: Due,
    /// The IPsec policies, between two looks at the whole network.
    policies: Due,
    /// Capture.
    capture: Due,
    /// Programs and rules of others on the way out of interfaces, between two looks at the whole network: the kernel
    /// does not report them.
    egress: Due,
    /// The interfaces whose packets go directly into a pod, unless others have something on the way out.
    peers: BTreeSet<u32>,
    /// The interfaces that have programs.
    attached: BTreeSet<u32>,
    /// The interfaces on which others have something, and what.
    others: BTreeMap<u32, Vec<String>>,
    /// The interfaces at earlier looks.
    history: History,
    /// On how many interfaces the packet path's programs belong, at the last look, and whether they remember ways.
    interfaces: Option<(usize, bool)>,
    /// How many IPsec policies protect something.
    protecting: usize,
    /// The node's addresses that the agent was last notified of.
    addresses: Option<NodeAddresses>,
    /// The packet path's problems, and how serious they are.
    problems: Vec<(Gravity, String)>,
}

impl Worker {
    /// Runs until a job ends it, or another agent has this agent's place.
    fn run(&mut self, todo: &Receiver<Job>) {
        let state = Arc::clone(&self.state);
        loop {
            let now = Instant::now();
            if self.policies.at <= now {
                let _busy = state.beats.attacher.begin();
                self.policies();
            }
            if self.path.at() <= now {
                let _busy = state.beats.attacher.begin();
                if self.path.look() {
                    self.network();
                }
            }
            if self.egress.at <= now {
                let _busy = state.beats.attacher.begin();
                self.egress();
            }
            if self.network.at <= now {
                let _busy = state.beats.attacher.begin();
                self.network();
            }
            if self.mesh.is_some() && self.capture.at <= Instant::now() {
                let _busy = state.beats.attacher.begin();
                self.capture();
            }
            // One after the other, so that new interfaces wait for at most one of them.
            if self.kernel.has_provisional_programs() {
                let _busy = state.beats.attacher.begin();
                if let Err(error) = self.kernel.replace_provisional_programs() {
                    warn!("packet path: {error}; trying again");
                    self.network.soon();
                }
            }
            self.kernel.pass_on_log();
            let mut next = self.network.at.min(self.policies.at).min(self.egress.at);
            next = next.min(self.path.at());
            if self.mesh.is_some() {
                next = next.min(self.capture.at);
            }
            if self.kernel.has_provisional_programs() {
                next = Instant::now();
            }
            let rest = next.saturating_duration_since(Instant::now());
            let mut job = todo.recv_timeout(rest);
            may_panic("attacher");
            let _busy = state.beats.attacher.begin();
            loop {
                match job {
                    Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                    Ok(Job::Offered(Ok(stream))) => {
                        let _ = self.events.send(Event::Replaced(stream));
                        return give_up(todo);
                    }
                    Ok(job) => self.take(job),
                    Err(RecvTimeoutError::Timeout) => break,
                }
                job = todo.try_recv().map_err(|error| match error {
                    mpsc::TryRecvError::Empty => RecvTimeoutError::Timeout,
                    mpsc::TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                });
            }
            if let Some(mesh) = &mut self.mesh {
                mesh.keep_pods();
            }
        }
    }

    fn take(&mut self, job: Job) {
        match job {
            Job::Network => {
                debug!("interfaces, addresses or routes changed");
                self.network.soon();
                self.capture_soon();
            }
            Job::Policies => {
                debug!("IPsec policies changed");
                self.policies.soon();
                // This look also finds policies.
                self.network.soon();
            }
            Job::Rules => self.path.soon(),
            Job::NoneThrough(since) => self.kernel.none_through_stack(since),
            Job::Pod(ask) => match &mut self.mesh {
                Some(mesh) => {
                    mesh.take(ask);
                    self.capture_soon();
                }
                // Fails only if the plug-in waits no longer.
                None => _ = ask.answers.send(Answer::NotCaptured),
            },
            Job::Served(snapshot) => {
                self.snapshot = Some(snapshot);
                self.capture_soon();
            }
            Job::First(snapshot, answer) => {
                self.snapshot = Some(snapshot);
                self.capture();
                // Fails only if the agent ends.
                let _ = answer.send(self.accepting.clone());
            }
            Job::ReplaceOtherLayouts(answer) => _ = answer.send(self.replace_other_layouts()),
            Job::Replace(stream) => {
                let sockets = self.mesh.iter().flat_map(Mesh::sockets);
                let turn = self.turn.iter().map(Turn::named);
                self.offers.offer(stream, sockets.chain(turn));
            }
            Job::Offered(Err(error)) => {
                warn!("another agent asked for our place, and did not take it: {error}");
            }
            Job::Offered(Ok(_)) | Job::Stop => {}
        }
    }

    /// The tables of services are in line with the source for the first time: removes the tables and programs of other
    /// layouts.
    fn replace_other_layouts(&mut self) -> Result<(), kernel::Error> {
        let waited = self.kernel.waits();
        let removed = self.kernel.replace_other_layouts()?;
        if waited {
            info!("of another version: its programs are replaced");
            self.network();
            self.capture();
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
        Ok(())
    }

    /// Makes capture due. While a pod's start waits for it, the thread rests less: it then computes for half of the time at most.
    fn capture_soon(&mut self) {
        if self.mesh.as_ref().is_some_and(Mesh::is_awaited) {
            self.capture.sooner();
        } else {
            self.capture.soon();
        }
    }

    /// Brings capture in line with the present workloads and network namespaces.
    fn capture(&mut self) {
        let (start, worked) = (Instant::now(), processor_time());
        let Some(mesh) = &mut self.mesh else { return };
        let Some(snapshot) = &self.snapshot else {
            self.capture.done(start, RETRY);
            return;
        };
        let is_behind = self.health.is_behind(admin::now());
        mesh.published().doubt(is_behind);
        mesh.lacks_cni(self.state.has_cni_problem());
        let snapshot = snapshot.in_doubt(is_behind);
        match mesh.settle(&mut self.kernel, &snapshot) {
            Ok(mesh::Settled {
                workloads,
                trouble,
                shortage,
                left_out,
                refusers,
            }) => {
                let state = &self.state;
                let over = state.captured(&workloads, trouble, shortage, left_out, refusers);
                self.kernel.capture().forget_traffic(&over);
            }
            Err(error) => {
                error!("mesh: {error}; trying again in {:?}", mesh.patience());
                mesh.delay(&error.to_string());
                self.state.capture_failed(error.to_string());
            }
        }
        if self.accepting != *mesh.accepting() {
            self.accepting.clone_from(mesh.accepting());
            // Fails only if the agent ends.
            let _ = self.events.send(Event::Accepting(self.accepting.clone()));
        }
        self.capture.done(start, mesh.patience());
        let worked = processor_time().saturating_sub(worked);
        self.capture.rest_once(worked);
    }
}

/// Another agent has this agent's place, so the thread does nothing any more. Answers waiting callers at once, so that
/// the agent learns about its end, instead of a thread that does not answer.
fn give_up(todo: &Receiver<Job>) {
    for job in todo {
        match job {
            Job::Stop => return,
            // These fail only if the agent has ended.
            Job::First(_, answer) => _ = answer.send(Accepting::default()),
            Job::ReplaceOtherLayouts(answer) => _ = answer.send(Ok(())),
            Job::Network
            | Job::Policies
            | Job::Rules
            | Job::NoneThrough(_)
            | Job::Pod(_)
            | Job::Served(_)
            | Job::Replace(_)
            | Job::Offered(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_for_an_agent_without_a_place_waits_no_longer() {
        let (jobs, todo) = mpsc::channel();
        let (first, first_done) = mpsc::sync_channel(1);
        let (replace, replaced) = mpsc::sync_channel(1);
        jobs.send(Job::Network).unwrap();
        jobs.send(Job::First(Snapshot::default(), first)).unwrap();
        jobs.send(Job::ReplaceOtherLayouts(replace)).unwrap();
        jobs.send(Job::Stop).unwrap();
        give_up(&todo);
        first_done.recv().unwrap();
        replaced.recv().unwrap().unwrap();
    }
}
