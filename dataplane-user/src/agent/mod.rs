//! The agent: wires the source, the plan and the kernel together.
//!
//! One thread writes the tables of services (`sync`), one keeps programs on interfaces and capture in network
//! namespaces (`attacher`), one ends what is over (`flows`), one reads the API, and one waits for signals,
//! changed files and whoever asks the endpoints (`waiter`): so none holds up another. If one dies, the agent
//! ends with an error (`threads`).

pub mod addresses;
mod attacher;
mod flows;
mod foreign;
mod handover;
mod input;
pub mod interfaces;
mod mesh;
mod network;
mod supervisor;
mod sync;
mod threads;
mod waiter;

use std::{
    io,
    net::IpAddr,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use dataplane_common::Protocol;
use ipnet::IpNet;
use tracing::{info, warn};

use crate::{
    admin::{self, Listeners, State, api},
    config,
    kernel::{self, Kernel, ServiceTables},
    model::{Node, Snapshot},
    plan::{AdoptError, Planner},
    proxy::{self, handover::Outcome},
    source::{
        kubernetes::ConnectError,
        manifests::{self, Loaded},
        objects::NodeFacts,
    },
};
use attacher::{Attacher, Means};
use flows::Flows;
use handover::{Given, Left};
pub use input::Source;
use input::{Opened, Shown};
use interfaces::PacketSettings;
use mesh::Mesh;
use sync::Sync;
use waiter::{Network, Ready};

/// What the agent should do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the kernel's side is.
    pub paths: kernel::Paths,
    /// How far the tables may grow.
    pub limits: kernel::Limits,
    /// Where the services come from.
    pub source: Source,
    /// This node.
    pub node: NodeSettings,
    /// Packets that no socket of ours decided on.
    pub packet: PacketSettings,
    /// Whether the operator said which cgroup is served.
    pub cgroup_given: bool,
    /// Whose connections go to a proxy; none: nobody's.
    pub mesh: Option<config::Mesh>,
    /// Where to listen.
    pub listen: admin::Settings,
    /// Of which protocols to destroy the sockets that are connected to endpoints that went away.
    pub destroy_stale: Vec<Protocol>,
    /// What becomes of the programs when the agent ends.
    pub on_exit: OnExit,
    /// Whether to take the place of an agent that runs on this node.
    pub replace: bool,
    /// Whether to be there, and do nothing, after another one has taken this one's place.
    pub stay: bool,
}

/// What to take this node for.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Its name; empty: its host name.
    pub name: String,
    /// Where node ports are answered; empty: on its primary addresses.
    pub nodeport_addresses: Vec<IpNet>,
    /// Its zone; empty: what its Node object says.
    pub zone: String,
}

impl NodeSettings {
    /// This node, as it is now and as it knows itself: without what its Node object says.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell its name or its addresses.
    pub fn node(&self) -> io::Result<Node> {
        self.primary(&[])
    }

    /// This node with what its Node object says of it.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell its name or its addresses.
    pub fn node_with(&self, facts: &NodeFacts) -> io::Result<Node> {
        Ok(facts.applied_to(&self.primary(&facts.addresses)?))
    }

    /// Has node ports answered where this node's object among the manifests says, as the API's does.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell its name or its addresses.
    pub fn tell(&self, loaded: &mut Loaded) -> io::Result<()> {
        let told = loaded.facts.as_ref().map(|facts| &facts.addresses[..]);
        let addresses = self.primary(told.unwrap_or_default())?.addresses;
        if loaded.snapshot.node.addresses != addresses {
            loaded.snapshot.node = Arc::new(Node {
                addresses,
                ..(*loaded.snapshot.node).clone()
            });
        }
        Ok(())
    }

    fn primary(&self, told: &[IpAddr]) -> io::Result<Node> {
        let name = if self.name.is_empty() {
            // As the kubelet does it: host names are not case sensitive, node names are.
            nix::unistd::gethostname()?.to_string_lossy().to_lowercase()
        } else {
            self.name.clone()
        };
        let addresses = addresses::for_node_ports(&self.nodeport_addresses, told)?;
        let (addresses, addresses_from) = addresses.into_iter().unzip();
        Ok(Node {
            name: name.into(),
            addresses,
            addresses_from,
            zone: self.zone.as_str().into(),
            leaving: None,
            name_given: !self.name.is_empty(),
        })
    }
}

/// What becomes of the programs when the agent ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnExit {
    /// They go on, from the tables as they are: services stay up while the agent is restarted
    #[default]
    Keep,
    /// They are removed with everything else of ours: services stop
    Detach,
}

/// Why the agent ended, other than being told to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifests cannot be served.
    #[error("{0}\nnothing was changed: mend the manifests and start again")]
    Manifests(#[from] manifests::Errors),
    /// The manifests cannot be watched.
    #[error(transparent)]
    Watch(#[from] manifests::WatchError),
    /// The node cannot be asked.
    #[error("cannot find out this node's name and addresses: {0}")]
    Node(#[source] io::Error),
    /// The agent cannot listen.
    #[error(transparent)]
    Listen(#[from] admin::ListenError),
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The tables that are there are not ours, or broken.
    #[error("the tables in {}: {error}; `dataplane cleanup` removes them (services stop until the agent runs again)", bpffs.display())]
    Adopt {
        /// Where they are.
        bpffs: PathBuf,
        /// What is wrong with them.
        error: AdoptError,
    },
    /// Nothing says how to reach the API.
    #[error("{0}")]
    Connect(#[from] ConnectError),
    /// The proxy cannot run.
    #[error(transparent)]
    Proxy(proxy::Error),
    /// The agent that runs cannot be replaced.
    #[error("cannot take the place of the agent that runs here: {0}; it goes on as it was")]
    Replace(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// The API cannot be read, whether it answers or not.
    #[error("cannot start the thread that reads the Kubernetes API: {0}")]
    Kubernetes(#[source] io::Error),
    /// The thread that waits ended.
    #[error("the agent's endpoints or signals failed: {0}")]
    Waiter(#[source] io::Error),
    /// A thread ended that should not have.
    #[error(
        "the agent's thread `{thread}` has died ({why}): start the agent anew; what it had written goes on \
         being served. Please report this"
    )]
    Died {
        /// Which.
        thread: &'static str,
        /// What it said.
        why: String,
    },
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

/// Something that happened.
#[derive(Debug)]
enum Event {
    /// A signal to end.
    Stop(&'static str),
    /// The manifests changed, or SIGHUP.
    Reload(&'static str),
    /// There is a new view of the API.
    Changed,
    /// The node's addresses may be others.
    Addresses,
    /// Somebody asks to take our place.
    Replace(UnixStream),
    /// Somebody has our place and our sockets.
    Replaced(UnixStream),
    /// The thread that waits cannot go on.
    Failed(io::Error),
    /// A thread has died, and why.
    Died(&'static str, String),
}

/// Why the agent ends.
#[derive(Debug)]
enum End {
    /// A signal.
    Told,
    /// Another one has our sockets, and wants to know when everything else is free.
    Replaced(UnixStream),
}

/// How often to look at what nobody may have told.
const LOOK: Duration = Duration::from_secs(30);
/// How soon to try again what did not work; doubled each time, up to [`LOOK`].
const RETRY: Duration = Duration::from_secs(1);
/// How long connections that the proxy relays may go on after a signal, and after another agent has
/// taken over.
const DRAIN: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(30)];
/// How long an agent whose place was taken accepts connections at most.
const LOADING: Duration = Duration::from_mins(1);
/// How long the kernel may take to close what a process had that is no more.
const DYING: Duration = Duration::from_secs(2);

/// Runs until it is told to end. Nothing is changed before everything that was given turned out
/// to be usable.
///
/// # Errors
///
/// If it cannot start, or cannot go on. What it had written before goes on being served.
pub fn run(settings: &Settings) -> Result<(), Error> {
    let mut back = None;
    loop {
        back = serve(settings.clone(), back)?;
        if back.is_none() {
            return Ok(());
        }
    }
}

/// What an agent has that takes its place back.
type Back = (Given, Left);

/// [`run`], once: with what the same process had before if the agent that took its place is gone. Answers that
/// if it happens.
fn serve(settings: Settings, back: Option<Back>) -> Result<Option<Back>, Error> {
    match proxy::raise_open_files() {
        Ok(files) => info!(files, "may have so many files open"),
        Err(error) => warn!("cannot raise the limit of open files: {error}"),
    }
    let node = settings.node.node().map_err(Error::Node)?;
    let opened = Opened::new(&settings.source, &settings.node, &node)?;
    let (given, mut left) = match back {
        Some(back) => back,
        None if settings.replace => {
            let given = handover::take(&settings.listen.socket).map_err(Error::Replace)?;
            (given, Left::default())
        }
        None => Back::default(),
    };
    // Asked before the ports, which the other agent has too: who runs is the better answer.
    if let Some(pid) = kernel::writer(&settings.paths.bpffs) {
        return Err(Error::Kernel(kernel::Error::Busy {
            directory: settings.paths.bpffs,
            pid: Some(pid),
        }));
    }
    let ready = Ready::new().map_err(Error::Waiter)?;
    // Before they are looked at, so that no change is missed in between.
    let news = ready.news()?;
    let listeners = Listeners::open(&settings.listen)?;

    let cgroup = settings.paths.cgroup.clone();
    let kernel = Kernel::open_with(
        &settings.paths,
        settings.limits,
        settings.packet.options(),
        settings.mesh.as_ref().map(mesh::options),
    )?;
    if kernel.adopted() {
        info!(
            "adopted the tables in {}: what they serve goes on",
            settings.paths.bpffs.display()
        );
    }
    let tables = kernel.services();
    let planner = adopt(&tables, &settings.paths)?;
    let shown = Shown::new(&settings.source);
    let empty = || Snapshot {
        node: Arc::new(node.clone()),
        ..Snapshot::default()
    };
    let state = Arc::new(State::new(
        settings.paths.clone(),
        settings.limits,
        planner,
        opened.snapshot.clone().unwrap_or_else(empty),
        shown.source(),
        learnt(&settings),
    ));
    let (events, happened) = mpsc::channel();
    let (jobs, todo) = mpsc::channel();
    let place =
        handover::Place::open(&settings.listen.socket, events.clone()).map_err(Error::Replace)?;
    let waiter = ready
        .start(
            listeners,
            Arc::clone(&state),
            opened.watcher,
            Network {
                news,
                jobs: jobs.clone(),
            },
            events.clone(),
        )
        .map_err(Error::Waiter)?;
    let input = shown
        .start(&node, opened.facts, events.clone())
        .map_err(Error::Kubernetes)?;
    let destroy = settings.destroy_stale.clone();
    let flows = Flows::start(Arc::clone(&state), destroy, events.clone())?;
    let on_exit = settings.on_exit;
    let stay = settings.stay;
    let bpffs = settings.paths.bpffs.clone();
    let (mesh, before) = match settings.mesh.clone() {
        Some(config) => (Some(Mesh::start(config, &kernel, &cgroup, given)?), None),
        None => (None, given.before),
    };
    if let Some(observer) = mesh.as_ref().and_then(Mesh::observer) {
        // There is one mesh, and it starts once.
        let _ = state.proxy.set(observer);
    }
    let means = Means {
        kernel,
        state: Arc::clone(&state),
        packet: settings.packet.clone(),
        mesh,
        before,
    };
    let attacher = Attacher::start(means, events, jobs, todo).map_err(Error::Thread)?;
    let mut sync = Sync::new(
        tables,
        Arc::clone(&state),
        settings,
        input,
        flows,
        attacher,
        opened.snapshot,
        empty(),
    );
    let result = sync.run(&happened);
    state.not_ready();
    waiter.stop();
    let means = sync.end();
    let end = result?;
    let Some((kernel, mesh)) = means else {
        return Err(Error::Died {
            thread: "attacher",
            why: "it ended while the agent did".to_owned(),
        });
    };
    match end {
        End::Replaced(stream) => {
            // What has our place keeps our sockets, so that closing ours closes nobody's.
            place.leave();
            drop(kernel);
            proxy::handover::gone(&stream);
            info!("another agent has taken this one's place");
            // It loads its programs now: until it accepts, connections would wait for that.
            let outcome = handover::finish(|| proxy::handover::outcome(stream, LOADING));
            let Some(outcome) = outcome else {
                return Ok(None);
            };
            if outcome == Outcome::Gone && is_given_up(&bpffs) {
                warn!(
                    "the agent that took this one's place has ended before it served: taking it back"
                );
                let given = mesh.map(|mesh| left.behind(mesh));
                return Ok(Some((given.unwrap_or_default(), left)));
            }
            if finish(mesh, left, DRAIN[1], false) && stay {
                info!("another agent serves: idle until told to end");
                handover::finish(|| -> () {
                    loop {
                        thread::park();
                    }
                });
            }
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
            finish(mesh, left, DRAIN[0], detach);
        }
    }
    Ok(None)
}

/// What `status` shows of the settings, and where it was learnt from.
fn learnt(settings: &Settings) -> admin::Learnt {
    let from = |value: String, from: &str| api::Learnt {
        value,
        from: from.to_owned(),
    };
    let detector = &settings.packet.detector;
    let networks = detector.networks.iter().map(ToString::to_string);
    let mut pod_networks: Vec<_> = networks.map(|net| from(net, "--pod-cidr")).collect();
    if detector.interface {
        let any = "whatever arrives at a pod's interface".to_owned();
        pod_networks.push(from(any, "--pods-by-interface"));
    }
    admin::Learnt {
        pod_networks,
        cgroup: from(
            settings.paths.cgroup.display().to_string(),
            if settings.cgroup_given {
                "--cgroup"
            } else {
                "the mount table"
            },
        ),
    }
}

/// Whether nobody writes the tables: not at once, of a process that is killed.
fn is_given_up(bpffs: &Path) -> bool {
    let deadline = Instant::now() + DYING;
    while kernel::writer(bpffs).is_some() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(DYING / 100);
    }
    true
}

/// Lets what proxies relay come to its end, for so long at most. `false`: a signal came before.
fn finish(mesh: Option<Mesh>, left: Left, at_most: Duration, detach: bool) -> bool {
    let deadline = Instant::now() + at_most;
    handover::finish(move || {
        if let Some(mesh) = mesh {
            mesh.stop(at_most, detach);
        }
        left.end(deadline);
    })
    .is_some()
}

/// A planner that knows what the kernel holds.
fn adopt(tables: &ServiceTables, paths: &kernel::Paths) -> Result<Planner, Error> {
    let contents = tables.contents()?;
    // What the earlier agent freed last may still be read by a program that runs just now.
    tables.grace()?;
    Planner::adopt(contents).map_err(|error| Error::Adopt {
        bpffs: paths.bpffs.clone(),
        error,
    })
}
