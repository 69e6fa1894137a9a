//! The one way to be a source: a [`Feed`] yields [`View`]s, says how it is doing ([`Health`]), and ends when it
//! is dropped.

use std::{
    fmt,
    path::PathBuf,
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use crate::{
    model::{Node, Problem, Service, ServiceName, Workload, WorkloadName},
    source::{kubernetes, manifests, objects::NodeFacts},
};

/// What to read, and where it is.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files and directories.
    Manifests(Vec<PathBuf>),
    /// The Kubernetes API.
    Kubernetes(kubernetes::Settings),
}

/// A source that is being read, until it is dropped.
pub trait Feed: Send {
    /// Takes the newest view; none if there is nothing newer than the last one that was taken.
    ///
    /// A view is whole: a feed that does not know everything yet, or cannot read it any more, has none, and
    /// [`Feed::health`] says why.
    fn take(&mut self) -> Option<View>;

    /// Reads everything anew before the next [`Feed::take`], although nothing told of a change. A feed that is
    /// told of every change by its server need not.
    fn refresh(&mut self) {}

    /// How reading goes, for other threads to look at. It stays the same one for the life of the feed.
    fn health(&self) -> Health;
}

/// Everything that a source says at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Every service, host ports of pods among them; shares with the view before what did not change.
    pub services: imbl::OrdMap<ServiceName, Arc<Service>>,
    /// The pods of this node, and of others, as far as they were asked for.
    pub workloads: imbl::OrdMap<WorkloadName, Arc<Workload>>,
    /// What this node's own object tells; none if the source has nothing to say about nodes.
    pub node: Option<NodeFacts>,
    /// What is known to be left out, because it cannot be served as it is written.
    pub problems: Arc<[Problem]>,
    /// When the oldest change since the last view that was taken arrived; none if that is no measure of
    /// anything, as for a list of everything.
    pub since: Option<Instant>,
}

impl View {
    /// Has this view take the place of an older one that nobody took.
    pub(super) fn follows(&mut self, untaken: &Self) {
        self.since = match (self.since, untaken.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

/// What a feed tells the thread that takes its views. May be called from any thread.
#[derive(Debug)]
pub enum Notice {
    /// There is something to [take](Feed::take).
    Changed,
    /// The feed has ended by a fault of its own.
    Died {
        /// The thread that ended.
        thread: &'static str,
        /// What it said.
        why: String,
    },
}

/// How reading a source goes. Times are in seconds since the epoch.
#[derive(Clone, Debug)]
pub enum Health {
    /// Of files and directories.
    Manifests(Arc<manifests::Health>),
    /// Of the Kubernetes API.
    Kubernetes {
        /// The server, as a person knows it.
        server: String,
        /// How reading each kind of object goes.
        kinds: Arc<kubernetes::Health>,
    },
    /// Of several feeds that yield views together.
    Combined(Vec<Health>),
}

/// Why a source cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The manifests cannot be served.
    #[error(transparent)]
    Manifests(#[from] manifests::Errors),
    /// The manifests cannot be watched.
    #[error(transparent)]
    Watch(#[from] manifests::WatchError),
    /// Nothing says how to reach the API.
    #[error(transparent)]
    Connect(#[from] kubernetes::ConnectError),
    /// A thread cannot be started.
    #[error("cannot start the thread that reads {what}: {error}")]
    Thread {
        /// The source.
        what: &'static str,
        /// Why.
        error: std::io::Error,
    },
}

impl Source {
    /// Begins to read, for this node. Manifests are read before this returns; an API server may be away, and is
    /// then waited for.
    ///
    /// # Errors
    ///
    /// The settings or the manifests cannot be used, or no thread can be started.
    pub fn open(
        &self,
        node: &Arc<Node>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Box<dyn Feed>, OpenError> {
        Ok(match self {
            Self::Manifests(paths) => Box::new(manifests::Files::open(paths, node, notify)?),
            Self::Kubernetes(settings) => {
                Box::new(kubernetes::Api::open(settings.clone(), node, notify)?)
            }
        })
    }
}

impl Health {
    /// Files and directories, or the server.
    pub fn places(&self) -> Vec<String> {
        match self {
            Self::Manifests(files) => files.paths(),
            Self::Kubernetes { server, .. } => vec![server.clone()],
            Self::Combined(parts) => parts.iter().flat_map(Self::places).collect(),
        }
    }

    /// When everything was last known to be as the newest view says; 0: not everything was read yet.
    pub fn heard(&self) -> u64 {
        match self {
            Self::Manifests(files) => files.read(),
            Self::Kubernetes { kinds, .. } => kinds.heard(),
            Self::Combined(parts) => parts.iter().map(Self::heard).min().unwrap_or_default(),
        }
    }

    /// Since when the source cannot be read, and why; what was read before is still valid.
    pub fn failure(&self) -> Option<(u64, String)> {
        match self {
            Self::Manifests(files) => files.failure(),
            Self::Kubernetes { kinds, .. } => kinds.failure(),
            Self::Combined(parts) => parts.iter().filter_map(Self::failure).min(),
        }
    }

    /// How often the source could not be read.
    pub fn failures(&self) -> u64 {
        match self {
            Self::Manifests(files) => files.failures(),
            Self::Kubernetes { kinds, .. } => kubernetes::Kind::ALL
                .iter()
                .map(|&kind| kinds.of(kind).failures())
                .sum(),
            Self::Combined(parts) => parts.iter().map(Self::failures).sum(),
        }
    }

    /// The health of each source that is not made of others.
    pub fn each(&self) -> Vec<&Self> {
        match self {
            Self::Combined(parts) => parts.iter().flat_map(Self::each).collect(),
            one => vec![one],
        }
    }
}

/// Seconds since the epoch.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

impl fmt::Debug for dyn Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Feed({:?})", self.health())
    }
}
