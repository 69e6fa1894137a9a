//! The agent: wires the source, the plan and the kernel together.
//!
//! One thread writes the tables of services (`sync`), one keeps programs on interfaces and capture in network
//! namespaces (`attacher`), one ends stale flows and sockets (`flows`), one reads the API, and one waits for signals,
//! changed files and requests to the endpoints (`waiter`): so none delays another. If one of them dies, or a thread
//! that relays connections, the agent ends with an error (`threads`).

#![forbid(unsafe_code)]

pub mod addresses;
mod astray;
mod attacher;
mod earlier;
mod flows;
mod foreign;
mod handover;
mod input;
pub mod interfaces;
mod kept_addresses;
mod lookups;
mod mesh;
mod network;
mod node;
mod own_rules;
mod problems;
mod remembered;
mod source_checks;
mod supervisor;
mod sync;
mod waiter;

use std::{
    io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use admin::{Listeners, State, api};
use attacher::{Attacher, Inputs, Returned};
use flows::Flows;
use handover::{Draining, Inherited, Turn};
use input::Keeping;
pub use input::{Input, InputError, snapshot_of, source};
use interfaces::PacketSettings;
use kernel::{Kernel, ServiceTables, opener};
use mesh::Mesh;
pub use mesh::namespace_with;
use own_rules::OwnRules;
use plan::{AdoptError, Planner, Served};
use proxy::handover::Outcome;
use settings::{Dns, MetricsAuth, OnExit, Settings};
use source::{
    Notice, OpenError, Source,
    kubernetes::{Reviewer, Scope},
    manifests,
};
use sync::Sync;
use threads::Deaths;
use tokio::sync::watch;
use tracing::{error, info, warn};
use waiter::{Network, Ready};

/// Why the agent ended without a request to end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifests cannot be served.
    #[error("{0}\nnothing was changed; correct the manifests and start the agent again")]
    Manifests(manifests::Errors),
    /// The source cannot be read for another reason, or the kernel does not return the node's facts.
    #[error(transparent)]
    Input(InputError),
    /// The agent cannot listen.
    #[error(transparent)]
    Listen(#[from] admin::ListenError),
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The existing tables are not ours, or broken.
    #[error("the tables in {}: {error}; `dataplane cleanup` removes them (services stop until the agent runs again)", bpffs.display())]
    Adopt {
        /// Where they are.
        bpffs: PathBuf,
        /// The reason.
        error: AdoptError,
    },
    /// The proxy cannot run.
    #[error(transparent)]
    Proxy(proxy::Error),
    /// The running agent cannot be replaced.
    #[error("cannot take over from the running agent: {0}; that agent keeps serving")]
    Replace(#[source] io::Error),
    /// It cannot be found out whether another agent has the turn.
    #[error("cannot find out whether another agent serves on this node: {0}")]
    Turn(#[source] io::Error),
    /// The process cannot be separated from its opener.
    #[error("cannot start the process that opens sockets in network namespaces: {0}")]
    Opener(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// The thread that waits ended.
    #[error("the agent's endpoints or signals failed: {0}")]
    Waiter(#[source] io::Error),
    /// A thread ended unexpectedly.
    #[error(
        "the agent's thread `{thread}` has died ({why}); the programs serve from the last tables; restart the \
         agent, and please report this"
    )]
    Died {
        /// The thread's name.
        thread: String,
        /// Its panic message.
        why: String,
    },
}

impl From<InputError> for Error {
    fn from(error: InputError) -> Self {
        match error {
            InputError::Open(OpenError::Manifests(errors)) => Self::Manifests(errors),
            other => Self::Input(other),
        }
    }
}

impl Error {
    /// Whether another agent runs on this node.
    pub fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Kernel(kernel::Error::Busy { .. })
                | Self::Listen(admin::ListenError::Busy { .. })
        )
    }
}

/// An event that the agent handles.
#[derive(Debug)]
enum Event {
    /// A signal to end.
    Stop(&'static str),
    /// SIGHUP.
    Reload,
    /// The source has a new view.
    Changed,
    /// The node's addresses may have changed.
    Addresses,
    /// Another agent asks to take this agent's place.
    Replace(UnixStream),
    /// Another agent has our place and our sockets.
    Replaced(UnixStream),
    /// The thread that waits cannot go on.
    Failed(io::Error),
    /// A thread has died, and why.
    Died(String, String),
}

/// Why the agent ends.
#[derive(Debug)]
enum End {
    /// A signal.
    Told,
    /// Another agent has our sockets, and has to be notified when everything else is free. `told`: this agent was about
    /// to end anyway.
    Replaced { by: UnixStream, told: bool },
}

/// How often to look at facts that may change without an event.
const LOOK: Duration = Duration::from_secs(30);
/// How often to look at listening sockets, while they decide what is served.
const LOOK_SOON: Duration = Duration::from_secs(1);
/// How soon to retry after a failure; doubled each time, up to [`LOOK`].
const RETRY: Duration = Duration::from_secs(1);
/// How long connections that the proxy relays may go on after a signal, and after another agent has
/// taken over.
const DRAIN: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(30)];
/// How long an ending agent waits for its predecessor to take its place back.
const RETURNING: Duration = Duration::from_secs(4);
/// How long an agent whose place was taken accepts connections at most.
const LOADING: Duration = Duration::from_mins(1);
/// How often a starting agent checks whether the API's first view is there.
const EARLY: Duration = Duration::from_millis(5);
/// How long the kernel may take to close the files of a process that is gone.
const DYING: Duration = Duration::from_secs(2);

/// Runs until a signal or a successor ends it. It changes nothing before all settings and objects have turned out to be
/// usable. `read`: reads the settings anew, for an agent that takes its place back.
///
/// # Errors
///
/// If it cannot start, or cannot go on. The programs go on serving from the tables that it had written.
pub fn run(
    mut settings: Settings,
    read: impl Fn() -> Result<Settings, String>,
) -> Result<(), Error> {
    // Before there are other threads, and before any input is read that others write.
    opener::separate().map_err(Error::Opener)?;
    let mut outdated = None;
    let mut back = None;
    loop {
        back = serve(&settings, outdated, back)?;
        if back.is_none() {
            return Ok(());
        }
        outdated = match read() {
            Ok(new) => {
                settings = new;
                None
            }
            Err(why) => {
                error!(
                    "cannot read the configuration again: {why}; serving with the earlier configuration"
                );
                Some(why)
            }
        };
    }
}

/// The parts that an agent has when it takes its place back.
#[derive(Default)]
struct Back {
    /// Its inheritance; `None`: the agent asks the ending agent in its place for it.
    given: Option<Inherited>,
    left: Draining,
}

/// Runs [`run`] once. `back`: the parts that the same process had before, if the agent that took its place is gone.
/// Returns these parts if that happens. `outdated`: why the settings are not those of the configuration.
fn serve(
    settings: &Settings,
    outdated: Option<String>,
    back: Option<Back>,
) -> Result<Option<Back>, Error> {
    match relay::raise_open_files() {
        Ok(files) => info!(files, "may have so many files open"),
        Err(error) => warn!("cannot raise the limit of open files: {error}"),
    }
    let (events, happened) = mpsc::channel();
    let deaths_of_opener = deaths(&events);
    opener::watch(move |thread, why| deaths_of_opener(thread, why)).map_err(Error::Thread)?;
    let paths = kernel::Paths::find(settings.kernel.bpffs(), settings.kernel.cgroup.clone())?;
    let default = kernel::Limits::default();
    let limits = kernel::Limits {
        frontends: settings.limits.frontends.unwrap_or(default.frontends),
        endpoints: settings.limits.endpoints.unwrap_or(default.endpoints),
        affinity: settings.limits.affinity_clients.unwrap_or(default.affinity),
    };
    let packet = PacketSettings::new(&settings.packets);
    let names = settings.dns.as_ref().is_some_and(Dns::is_on);
    let source = source(&settings.source, scope(settings), names);
    let reachable = settings.mesh.as_ref().map(settings::Mesh::reachable);
    let socket = settings.listen.socket().to_owned();
    let keeping = Keeping {
        directory: socket.parent().unwrap_or(Path::new("/")),
        dns: settings.dns.as_ref(),
    };
    let mut node = settings.node.clone();
    node.reserved_ports.extend(settings.listen.ports());
    let input = Input::open(&source, &node, Some(keeping), notices(&events))?;
    let mut input = input.with_reachable(reachable);
    let asks = settings.replace || back.is_some();
    let Back { given, mut left } = back.unwrap_or_default();
    let mut given = match given {
        Some(given) => given,
        None if asks => handover::take(&socket).map_err(Error::Replace)?,
        None => Inherited {
            turn: Turn::take(&socket).map_err(Error::Turn)?,
            ..Inherited::default()
        },
    };
    // Asked before the ports, which the other agent has too: the running agent is the better answer.
    if let Some(pid) = kernel::writer(&paths.bpffs) {
        return Err(Error::Kernel(kernel::Error::Busy {
            directory: paths.bpffs,
            pid: Some(pid),
        }));
    }
    let Some(turn) = given.turn.take() else {
        return Err(Error::Kernel(kernel::Error::Busy {
            directory: paths.bpffs,
            pid: None,
        }));
    };
    input.own_files();
    // Open until this agent ends: so the predecessor knows that it is there.
    let before = given.before.as_ref().map(UnixStream::try_clone);
    let before_this = before.transpose().map_err(Error::Replace)?;
    let ready = Ready::new().map_err(Error::Waiter)?;
    // Before the first look, so that no change is missed in between.
    let news = ready.news()?;
    let listeners = Listeners::open(&settings.listen)?;

    let cgroup = paths.cgroup.clone();
    let mut early = None;
    let kernel = Kernel::open_with(
        &paths,
        limits,
        packet.options(),
        mesh::is_wanted(settings).then(|| mesh::options(settings)),
        |capture, loading| {
            // If there is a predecessor, it accepts connections meanwhile.
            if given.before.is_some() || !mesh::is_wanted(settings) {
                return;
            }
            while !input.is_known() && loading() {
                if input.take().is_none() {
                    thread::sleep(EARLY);
                }
            }
            if !input.is_known() {
                return;
            }
            let sockets = std::mem::take(&mut given.sockets);
            let mesh = Mesh::start(
                settings,
                capture,
                &cgroup,
                sockets,
                given.before.take(),
                &deaths(&events),
            );
            early = Some(mesh.map(|mut mesh| {
                mesh.listen_early(capture, input.snapshot());
                mesh
            }));
        },
    )?;
    if kernel.adopted() {
        info!(
            "adopted the tables in {}: what they serve goes on",
            paths.bpffs.display()
        );
    }
    let tables = kernel.services();
    let planner = adopt(&tables, &paths, limits)?;
    let is_inherited = !planner.frontends().is_empty();
    let (publish, served) = watch::channel(Served::before_first_plan(input.snapshot().clone()));
    let state = Arc::new(State::new(
        paths.clone(),
        limits,
        served.clone(),
        is_inherited,
        input.health(),
        learnt(settings, &paths, &packet, outdated),
    ));
    let (jobs, todo) = mpsc::channel();
    let place = handover::Place::open(&socket, events.clone()).map_err(Error::Replace)?;
    let waiter = ready
        .start(
            listeners,
            Arc::clone(&state),
            reviewer(settings, &source),
            Network {
                news,
                jobs: jobs.clone(),
            },
            events.clone(),
        )
        .map_err(Error::Waiter)?;
    let destroy = settings.stale_protocols();
    let direct = kernel.direct_flows();
    let flows = Flows::start(
        &state,
        served.clone(),
        destroy.clone(),
        direct,
        packet.clone(),
        &events,
    )?;
    let own_rules = OwnRules::start(paths.bpffs.clone(), served, &packet, &events)?;
    let on_exit = settings.on_exit.unwrap_or_default();
    let stay = settings.stay;
    let bpffs = paths.bpffs.clone();
    let (mesh, before) = match early.transpose()? {
        Some(mesh) => (Some(mesh), None),
        None if mesh::is_wanted(settings) => {
            let capture = kernel.capture();
            let mesh = Mesh::start(
                settings,
                capture,
                &cgroup,
                given.sockets,
                given.before,
                &deaths(&events),
            )?;
            (Some(mesh), None)
        }
        None => (None, given.before),
    };
    if let Some(observer) = mesh.as_ref().and_then(Mesh::observer) {
        // There is one mesh, and it starts once.
        let _ = state.proxy.set(observer);
    }
    if let Some(observer) = mesh.as_ref().and_then(Mesh::dns) {
        // There is one DNS server, and it starts once.
        let _ = state.dns.set(observer);
    }
    let published = mesh.as_ref().map(|mesh| mesh.published().clone());
    let means = Inputs {
        kernel,
        state: Arc::clone(&state),
        health: input.health(),
        packet,
        mesh,
        before,
        turn: Some(turn),
    };
    let attacher = Attacher::start(means, events, jobs, todo).map_err(Error::Thread)?;
    let inputs = sync::Inputs {
        tables,
        planner,
        serves: publish,
        state: Arc::clone(&state),
        input,
        flows,
        published,
        attacher,
        before: before_this,
    };
    let mut sync = Sync::new(inputs, &destroy);
    let result = sync.run(&happened);
    state.not_ready();
    waiter.stop();
    let rest = sync.end();
    own_rules.stop();
    let end = result?;
    let Some(Returned { kernel, mesh, turn }) = rest else {
        return Err(Error::Died {
            thread: "attacher".to_owned(),
            why: "it ended while the agent did".to_owned(),
        });
    };
    match end {
        End::Replaced { by, told } => {
            // The successor keeps copies of our sockets, so closing ours closes no listener.
            place.leave();
            drop((kernel, turn));
            proxy::handover::gone(&by);
            info!("another agent has taken over");
            let next = by.try_clone().ok();
            // The successor loads its programs now: until it accepts, connections would wait.
            let outcome = handover::finish(|| proxy::handover::outcome(by, LOADING));
            let Some(outcome) = outcome else {
                return Ok(None);
            };
            // Another agent may have come meanwhile.
            if outcome == Outcome::Gone
                && !told
                && let Some(turn) = given_up(&bpffs, &socket).map_err(Error::Turn)?
            {
                warn!("the agent that took over ended before it served: taking over again");
                let given = mesh.map(|mesh| left.behind(mesh)).unwrap_or_default();
                let given = Some(Inherited {
                    turn: Some(turn),
                    ..given
                });
                return Ok(Some(Back { given, left }));
            }
            if told || !stay {
                finish(left, DRAIN[usize::from(!told)], move |at_most| {
                    if let Some(mesh) = mesh {
                        mesh.stop(at_most, false);
                    }
                });
                return Ok(None);
            }
            if let Some(mesh) = mesh {
                left.drain(mesh, DRAIN[1]);
            }
            info!("another agent serves: idle until that agent ends or this agent gets a signal");
            let Some(turn) = handover::finish(move || handover::idle(next, &socket, &bpffs)) else {
                return Ok(None);
            };
            let turn = turn.map_err(Error::Turn)?;
            warn!(
                "the agent that took over {}: taking over again",
                if turn.is_some() { "is gone" } else { "ends" }
            );
            let given = turn.map(|turn| Inherited {
                turn: Some(turn),
                ..Inherited::default()
            });
            return Ok(Some(Back { given, left }));
        }
        End::Told => {
            drop(place);
            let detach = on_exit == OnExit::Detach;
            if detach {
                kernel.detach()?;
                info!("ended; the programs are detached");
            } else {
                drop(kernel);
                info!("ended; the programs go on serving from the tables as they are");
            }
            finish(left, DRAIN[0], move |at_most| {
                let Some(mesh) = mesh else { return };
                if detach {
                    mesh.stop(at_most, true);
                } else {
                    mesh.stop_last(at_most);
                }
                // No other agent can listen before.
                drop(turn);
            });
        }
    }
    Ok(None)
}

/// Reports the death of a thread as an event.
fn deaths(events: &mpsc::Sender<Event>) -> Deaths {
    let events = events.clone();
    Arc::new(move |thread, why| {
        // Fails only if the agent ends anyway.
        let _ = events.send(Event::Died(thread.to_owned(), why));
    })
}

/// Passes a feed's notices on as events.
fn notices(
    events: &mpsc::Sender<Event>,
) -> impl Fn(Notice) + Clone + Send + std::marker::Sync + 'static {
    let events = events.clone();
    move |notice| {
        // Fails only if the other side ends anyway.
        let _ = events.send(match notice {
            Notice::Changed => Event::Changed,
            Notice::Died { thread, why } => Event::Died(thread.to_owned(), why),
        });
    }
}

/// The reviewer that decides which clients may read the metrics; `None`: every client may.
fn reviewer(settings: &Settings, source: &Source) -> Option<Arc<Reviewer>> {
    let Source::Kubernetes(api) = source else {
        return None;
    };
    match settings.listen.metrics_auth(true) {
        MetricsAuth::None => None,
        MetricsAuth::Kubernetes => Some(Arc::new(Reviewer::new(api.target.clone()))),
    }
}

/// How much of the Kubernetes API is read.
fn scope(settings: &Settings) -> Scope {
    match &settings.mesh {
        Some(mesh) if mesh.denies() => Scope::Registry,
        Some(_) => Scope::Mesh,
        None if settings.dns.as_ref().is_some_and(Dns::is_for_all) => Scope::Mesh,
        None => Scope::HostPorts,
    }
}

/// The settings that `status` shows, with the source of each.
fn learnt(
    settings: &Settings,
    paths: &kernel::Paths,
    packet: &PacketSettings,
    outdated: Option<String>,
) -> admin::Learnt {
    let from = |value: String, from: &str| api::Learnt {
        value,
        from: from.to_owned(),
    };
    let detector = &packet.detector;
    let networks = detector.networks.iter().map(ToString::to_string);
    let mut pod_networks: Vec<_> = networks.map(|net| from(net, "packets.podCidrs")).collect();
    if detector.interface {
        let any = "whatever arrives at a pod's interface".to_owned();
        pod_networks.push(from(any, "packets.podsByInterface"));
    }
    admin::Learnt {
        outdated,
        pod_networks,
        cgroup: from(
            paths.cgroup.display().to_string(),
            if settings.kernel.cgroup.is_some() {
                "--cgroup"
            } else {
                "the mount table"
            },
        ),
        source_routes_pass: packet.attach.is_none()
            && settings.mesh.as_ref().is_some_and(settings::Mesh::denies),
    }
}

/// Returns the turn of an agent that is gone, unless another agent has taken it. A killed process releases it after a
/// delay.
fn given_up(bpffs: &Path, socket: &Path) -> io::Result<Option<Turn>> {
    let deadline = Instant::now() + DYING;
    loop {
        if kernel::writer(bpffs).is_none()
            && let Some(turn) = Turn::take(socket)?
        {
            return Ok(Some(turn));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        thread::sleep(DYING / 100);
    }
}

/// Lets proxies relay their connections to the end, for so long at most, unless a signal comes first. `stop`: stops the
/// proxy that has listening sockets.
fn finish(left: Draining, at_most: Duration, stop: impl FnOnce(Duration) + Send + 'static) {
    let deadline = Instant::now() + at_most;
    handover::finish(move || {
        stop(at_most);
        left.end(deadline);
    });
}

/// Returns a planner that knows the contents of the kernel's tables.
fn adopt(
    tables: &ServiceTables,
    paths: &kernel::Paths,
    limits: kernel::Limits,
) -> Result<Planner, Error> {
    let contents = tables.contents()?;
    // A running program may still read the slots that the earlier agent freed last.
    tables.grace()?;
    let planner = Planner::adopt(contents).map_err(|error| Error::Adopt {
        bpffs: paths.bpffs.clone(),
        error,
    })?;
    Ok(planner.with_room(limits.room()))
}
