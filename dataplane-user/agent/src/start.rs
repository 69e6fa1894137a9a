//! The start of an agent, in phases. Each takes what the phase before has made; the first two change nothing.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use admin::{Listeners, State, api};
use kernel::{Kernel, opener};
use plan::Served;
use settings::{Dns, MetricsAuth, PacketPath, Settings};
use source::{
    Notice, Source,
    kubernetes::{Announcer, Reviewer, Scope, WantedPolicies},
};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    Error, Event, adopt,
    attacher::{self, Attacher, Returned},
    cni_installer::Installer,
    deaths,
    ending::{Back, Ended},
    flows::Flows,
    handover::{self, Inherited, Place, Turn},
    input::{Input, Keeping, source},
    interfaces::PacketSettings,
    mesh::{self, Mesh},
    own_rules::OwnRules,
    startup_taint,
    sync::{self, Sync},
    waiter::{KernelNews, Network, Ready, Waiter},
};

/// How often a starting agent checks whether the API's first view is there.
const EARLY: Duration = Duration::from_millis(5);

/// Runs the agent once. `back`: the parts that the same process had before, if the agent that took its place is gone.
/// Returns these parts if that happens. `outdated`: why the settings are not those of the configuration.
pub fn serve(
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
    let wanted = Wanted::of(settings)?;
    let mut input = wanted.read(&events)?;
    let asks = settings.replace || back.is_some();
    let Back { given, left } = back.unwrap_or_default();
    let mut seat = wanted.take_seat(given, asks)?;
    input.own_files();
    let (kernel, mesh) = wanted.load(&mut input, &mut seat, &events)?;
    let running = wanted.start(input, seat, (kernel, mesh), outdated, events)?;
    let ended = running.run(&happened)?;
    ended.end(settings, &wanted.paths.bpffs, &wanted.socket, left)
}

/// The settings, in the forms in which the rooms take them.
struct Wanted<'a> {
    settings: &'a Settings,
    paths: kernel::Paths,
    limits: kernel::tables::Limits,
    packet: PacketSettings,
    source: Source,
    /// The agent's own socket.
    socket: PathBuf,
}

/// The parts of an agent that only one agent of a node can have.
struct Seat {
    turn: Turn,
    /// The predecessor's turn and listening sockets.
    given: Inherited,
    /// Open until this agent ends: so the predecessor knows that it is there.
    before: Option<UnixStream>,
    /// Signals from here on.
    ready: Ready,
    /// From before the first look at the interfaces, so that no change is missed in between.
    news: KernelNews,
    listeners: Listeners,
}

/// The threads.
struct Running {
    sync: Sync,
    state: Arc<State>,
    waiter: Waiter,
    own_rules: OwnRules,
    cni: Option<Installer>,
    place: Place,
}

impl<'a> Wanted<'a> {
    fn of(settings: &'a Settings) -> Result<Self, Error> {
        let default = kernel::tables::Limits::default();
        let names = settings.dns.as_ref().is_some_and(Dns::is_on);
        Ok(Self {
            settings,
            paths: kernel::Paths::find(settings.kernel.bpffs(), settings.kernel.cgroup.clone())?,
            limits: kernel::tables::Limits {
                frontends: settings.limits.frontends.unwrap_or(default.frontends),
                endpoints: settings.limits.endpoints.unwrap_or(default.endpoints),
                affinity: settings.limits.affinity_clients.unwrap_or(default.affinity),
            },
            packet: PacketSettings::new(&settings.packets),
            source: source(
                &settings.source,
                scope(settings),
                policies(settings),
                (settings.mesh.as_ref()).is_some_and(|mesh| mesh.identity.is_some()),
                names,
            ),
            socket: settings.listen.socket().to_owned(),
        })
    }

    /// Begins to read the source. Manifests are read when this returns.
    fn read(&self, events: &mpsc::Sender<Event>) -> Result<Input, Error> {
        let settings = self.settings;
        let keeping = Keeping {
            directory: self.socket.parent().unwrap_or(Path::new("/")),
            dns: settings.dns.as_ref(),
        };
        let mut node = settings.node.clone();
        node.reserved_ports.extend(settings.listen.ports());
        let input = Input::open(&self.source, &node, Some(keeping), notices(events))?;
        Ok(input.with_mesh(settings))
    }

    /// Takes the turn, signals and ports. `asks`: whether a running agent is asked for its place.
    fn take_seat(&self, given: Option<Inherited>, asks: bool) -> Result<Seat, Error> {
        let mut given = match given {
            Some(given) => given,
            None if asks => handover::take(&self.socket).map_err(Error::Replace)?,
            None => Inherited {
                turn: Turn::take(&self.socket).map_err(Error::Turn)?,
                ..Inherited::default()
            },
        };
        let busy = |pid| {
            Error::Kernel(kernel::Error::Busy {
                directory: self.paths.bpffs.clone(),
                pid,
            })
        };
        // Asked before the ports, which the other agent has too: the running agent is the better answer.
        if let Some(pid) = kernel::writer(&self.paths.bpffs) {
            return Err(busy(Some(pid)));
        }
        let turn = given.turn.take().ok_or_else(|| busy(None))?;
        let before = given.before.as_ref().map(UnixStream::try_clone);
        let ready = Ready::new().map_err(Error::Waiter)?;
        Ok(Seat {
            turn,
            before: before.transpose().map_err(Error::Replace)?,
            given,
            news: ready.news(self.packet.path == PacketPath::Auto)?,
            ready,
            listeners: Listeners::open(&self.settings.listen)?,
        })
    }

    /// Loads the programs and opens the tables. Without a predecessor, which would accept connections meanwhile, the proxy
    /// listens as soon as the source is known.
    fn load(
        &self,
        input: &mut Input,
        seat: &mut Seat,
        events: &mpsc::Sender<Event>,
    ) -> Result<(Kernel, Option<Mesh>), Error> {
        let settings = self.settings;
        let is_wanted = mesh::is_wanted(settings);
        let cgroup = &self.paths.cgroup;
        let given = &mut seat.given;
        let mut early = None;
        let kernel = Kernel::open_with(
            &self.paths,
            self.limits,
            self.packet.options(),
            is_wanted.then(|| mesh::options(settings)),
            |capture, loading| {
                if given.before.is_some() || !is_wanted {
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
                let mesh = Mesh::start(settings, capture, cgroup, sockets, None, &deaths(events));
                early = Some(mesh.map(|mut mesh| {
                    input.accept(mesh.accepting().clone());
                    mesh.listen_early(capture, input.snapshot());
                    mesh
                }));
            },
        )?;
        if kernel.adopted() {
            info!(
                "adopted the tables in {}: what they serve goes on",
                self.paths.bpffs.display()
            );
        }
        let mut mesh = match early.transpose()? {
            None if is_wanted => {
                let sockets = std::mem::take(&mut given.sockets);
                let before = given.before.take();
                let capture = kernel.capture();
                let deaths = deaths(events);
                Some(Mesh::start(
                    settings, capture, cgroup, sockets, before, &deaths,
                )?)
            }
            mesh => mesh,
        };
        if let Some(mesh) = &mut mesh {
            input.accept(mesh.accepting().clone());
            mesh.annotate_by(self.announcer(&input.snapshot().node.name, events)?);
        }
        Ok((kernel, mesh))
    }

    /// Starts the thread that writes on Pods that they are captured. `None`: the configuration does not ask for it, or the
    /// Pods are in manifests.
    fn announcer(
        &self,
        node: &str,
        events: &mpsc::Sender<Event>,
    ) -> Result<Option<Announcer>, Error> {
        let mesh = self.settings.mesh.as_ref();
        if mesh.is_none_or(|mesh| mesh.announce.is_none()) {
            return Ok(None);
        }
        let Source::Kubernetes(api) = &self.source else {
            warn!("mesh.announce has no effect: the source is not the Kubernetes API");
            return Ok(None);
        };
        let started = Announcer::start(api.target.clone(), node, &deaths(events));
        started.map(Some).map_err(Error::Thread)
    }

    /// Starts the threads.
    fn start(
        &self,
        input: Input,
        seat: Seat,
        (kernel, mut mesh): (Kernel, Option<Mesh>),
        outdated: Option<String>,
        events: mpsc::Sender<Event>,
    ) -> Result<Running, Error> {
        if let Some(mesh) = &mut mesh {
            let node = &input.snapshot().node.name;
            let deaths = deaths(&events);
            mesh.tell_when_verified(startup_taint::start(
                self.settings,
                &self.source,
                node,
                &deaths,
            )?);
        }
        let tables = kernel.services();
        let planner = adopt(&tables, &self.paths, self.limits)?;
        let is_inherited = !planner.frontends().is_empty();
        let (publish, served) = watch::channel(Served::before_first_plan(input.snapshot().clone()));
        let state = Arc::new(State::new(
            self.paths.clone(),
            self.limits,
            served.clone(),
            is_inherited,
            input.health(),
            learnt(self.settings, &self.paths, &self.packet, outdated),
        ));
        // Each is set once: there is one mesh.
        if let Some(observer) = mesh.as_ref().and_then(Mesh::observer) {
            let _ = state.proxy.set(observer);
        }
        if let Some(observer) = mesh.as_ref().and_then(Mesh::dns) {
            let _ = state.dns.set(observer);
        }
        if let Some(certificates) = mesh.as_ref().and_then(Mesh::certificates) {
            let _ = state.certificates.set(certificates);
        }
        let (jobs, todo) = mpsc::channel();
        let place = Place::open(&self.socket, events.clone()).map_err(Error::Replace)?;
        let network = Network {
            news: seat.news,
            jobs: jobs.clone(),
        };
        let reviewer = reviewer(self.settings, &self.source);
        let waiter = seat
            .ready
            .start(
                seat.listeners,
                Arc::clone(&state),
                reviewer,
                network,
                events.clone(),
            )
            .map_err(Error::Waiter)?;
        let destroy = self.settings.stale_protocols();
        let flows = Flows::start(
            &state,
            served.clone(),
            destroy.clone(),
            kernel.direct_flows(),
            self.packet.clone(),
            jobs.clone(),
            &events,
        )?;
        let bpffs = self.paths.bpffs.clone();
        let own_rules = OwnRules::start(bpffs, served, &self.packet, &events)?;
        let cni = Installer::start(self.settings, &state, &events).map_err(Error::Thread)?;
        let published = mesh.as_ref().map(|mesh| mesh.published().clone());
        let inputs = attacher::Inputs {
            kernel,
            state: Arc::clone(&state),
            health: input.health(),
            packet: self.packet.clone(),
            mesh,
            before: seat.given.before,
            turn: Some(seat.turn),
        };
        let attacher = Attacher::start(inputs, events, jobs, todo).map_err(Error::Thread)?;
        let inputs = sync::Inputs {
            tables,
            planner,
            serves: publish,
            state: Arc::clone(&state),
            input,
            flows,
            published,
            attacher,
            before: seat.before,
        };
        Ok(Running {
            sync: Sync::new(inputs, &destroy),
            state,
            waiter,
            own_rules,
            cni,
            place,
        })
    }
}

impl Running {
    /// Runs until the agent has to end, and ends the threads, except the proxy's.
    fn run(mut self, happened: &mpsc::Receiver<Event>) -> Result<Ended, Error> {
        let result = self.sync.run(happened);
        self.state.not_ready();
        self.waiter.stop();
        let rest = self.sync.end();
        self.own_rules.stop();
        self.cni.into_iter().for_each(Installer::stop);
        let end = result?;
        let Some(Returned { kernel, mesh, turn }) = rest else {
            return Err(Error::Died {
                thread: "attacher".to_owned(),
                why: "it ended while the agent did".to_owned(),
            });
        };
        Ok(Ended {
            end,
            kernel,
            mesh,
            turn,
            place: self.place,
        })
    }
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
        // Tunnels lead to pods on other nodes.
        Some(mesh) if mesh.denies() || mesh.identity.is_some() => Scope::Registry,
        Some(_) => Scope::Mesh,
        None if settings.dns.as_ref().is_some_and(Dns::is_for_all) => Scope::Mesh,
        None => Scope::HostPorts,
    }
}

/// Whether Istio's policies are read.
fn policies(settings: &Settings) -> WantedPolicies {
    match &settings.mesh {
        None => WantedPolicies::None,
        Some(_) => WantedPolicies::Enforced,
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
