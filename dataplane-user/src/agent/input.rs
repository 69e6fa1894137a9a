//! Where the agent reads what to serve, and what it has read.

use std::{
    collections::HashSet,
    io,
    path::PathBuf,
    sync::{Arc, mpsc::Sender},
};

use tracing::{error, info, warn};

use super::{Error, Event, NodeSettings};
use crate::{
    admin,
    model::{Node, Problem, Snapshot},
    source::{
        kubernetes::{self, Health, Latest, Reader, View},
        manifests::{self, Watcher},
        objects::NodeFacts,
    },
};

/// Problems of a view that are logged one by one.
const LOGGED: usize = 20;

/// Where the services come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files and directories.
    Manifests(Vec<PathBuf>),
    /// The Kubernetes API.
    Kubernetes(kubernetes::Settings),
}

/// What was read before anything was changed.
pub struct Opened {
    /// What to serve; none if that is not known yet.
    pub snapshot: Option<Snapshot>,
    /// What manifests say of this node.
    pub facts: Option<NodeFacts>,
    /// Tells of changed files.
    pub watcher: Option<Watcher>,
}

impl Opened {
    /// Reads manifests. Of the API, nothing is read yet: it may be away, and is then waited for.
    pub fn new(source: &Source, settings: &NodeSettings, node: &Node) -> Result<Self, Error> {
        let paths = match source {
            Source::Manifests(paths) => paths,
            Source::Kubernetes(settings) => {
                settings.target.check()?;
                return Ok(Self {
                    snapshot: None,
                    facts: None,
                    watcher: None,
                });
            }
        };
        // Before the files are read, so that no change is missed in between.
        let watcher = Watcher::new(paths)?;
        let mut loaded = manifests::load(paths, node)?;
        settings.tell(&mut loaded).map_err(Error::Node)?;
        info!(
            services = loaded.snapshot.services.len(),
            files = loaded.files,
            node = &*node.name,
            "read the manifests"
        );
        if let Some(line) = loaded.ignored_line() {
            info!("{line}");
        }
        log(&loaded.snapshot.problems, &[]);
        Ok(Self {
            snapshot: Some(loaded.snapshot),
            facts: loaded.facts,
            watcher: Some(watcher),
        })
    }
}

/// The source of a running agent.
pub enum Input {
    /// Files and directories.
    Manifests {
        /// Where they are.
        paths: Vec<PathBuf>,
        /// What they said of this node last.
        facts: Option<NodeFacts>,
    },
    /// The API.
    Kubernetes {
        /// The newest that nobody took yet.
        latest: Arc<Latest>,
        /// What the last view said of this node.
        facts: NodeFacts,
        /// Reads until it is dropped.
        _reader: Reader,
    },
}

/// A source before it is read on: for those who show how that goes.
pub enum Shown {
    /// Files and directories.
    Manifests(Vec<PathBuf>),
    /// The API.
    Kubernetes(kubernetes::Settings, Arc<Health>),
}

impl Shown {
    /// Of these settings.
    pub fn new(source: &Source) -> Self {
        match source {
            Source::Manifests(paths) => Self::Manifests(paths.clone()),
            Source::Kubernetes(settings) => Self::Kubernetes(settings.clone(), Arc::default()),
        }
    }

    /// For the agent's endpoints.
    pub fn source(&self) -> admin::Source {
        match self {
            Self::Manifests(paths) => admin::Source::Manifests(
                paths
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect(),
            ),
            Self::Kubernetes(settings, health) => admin::Source::Kubernetes {
                server: settings.target.server_text(),
                health: Arc::clone(health),
            },
        }
    }

    /// Begins to read on.
    pub fn start(
        self,
        node: &Node,
        facts: Option<NodeFacts>,
        events: Sender<Event>,
    ) -> Result<Input, io::Error> {
        Ok(match self {
            Self::Manifests(paths) => Input::Manifests { paths, facts },
            Self::Kubernetes(settings, health) => {
                let latest = Arc::new(Latest::default());
                let died = events.clone();
                let changed = move || {
                    // Fails only if the other side ends anyway.
                    let _ = events.send(Event::Changed);
                };
                let ended = move |why| {
                    let _ = died.send(Event::Died("kubernetes", why));
                };
                let node = Arc::new(node.clone());
                info!("reading {}", settings.target.server_text());
                let reader =
                    Reader::start(settings, node, health, Arc::clone(&latest), changed, ended)?;
                Input::Kubernetes {
                    latest,
                    facts: NodeFacts::default(),
                    _reader: reader,
                }
            }
        })
    }
}

impl Input {
    /// Reads the manifests; whether that worked. (The API is read all the time.)
    pub fn read(
        &mut self,
        wanted: &mut Snapshot,
        settings: &NodeSettings,
        own: &Node,
        state: &admin::State,
    ) -> bool {
        let Self::Manifests { paths, facts } = self else {
            return false;
        };
        match manifests::load_reusing(wanted, paths, own) {
            Ok(mut loaded) => {
                if let Err(error) = settings.tell(&mut loaded) {
                    warn!("cannot find out the node's addresses, keeping the last ones: {error}");
                }
                facts.clone_from(&loaded.facts);
                log(&loaded.snapshot.problems, &wanted.problems);
                *wanted = loaded.snapshot;
                state.source_read();
                true
            }
            Err(errors) => {
                for fault in &errors.faults {
                    error!("{fault}");
                }
                error!("the manifests have errors: serving what was read before");
                state.source_failed(errors.to_string());
                false
            }
        }
    }

    /// Takes the newest view of the API, if there is one.
    pub fn take(&mut self, wanted: &mut Snapshot, settings: &NodeSettings) -> Option<View> {
        let Self::Kubernetes { latest, facts, .. } = self else {
            return None;
        };
        let view = latest.take()?;
        if *facts != view.node {
            facts.clone_from(&view.node);
            match settings.node_with(facts) {
                Ok(node) => wanted.node = Arc::new(node),
                Err(error) => {
                    warn!("cannot find out the node's addresses, keeping the last ones: {error}");
                }
            }
        }
        wanted.services = view.services.clone();
        wanted.workloads = view.workloads.clone();
        if !Arc::ptr_eq(&wanted.problems, &view.problems) {
            log(&view.problems, &wanted.problems);
            wanted.problems = Arc::clone(&view.problems);
        }
        Some(view)
    }

    /// What the source says of this node.
    pub fn facts(&self) -> Option<&NodeFacts> {
        match self {
            Self::Manifests { facts, .. } => facts.as_ref(),
            Self::Kubernetes { facts, .. } => Some(facts),
        }
    }
}

/// Logs problems that were not there before, and those that are over.
fn log(problems: &[Problem], before: &[Problem]) {
    let known: HashSet<(&str, &str)> = before.iter().map(|p| (&*p.place, &*p.text)).collect();
    let mut news = problems
        .iter()
        .filter(|p| !known.contains(&(&*p.place, &*p.text)));
    for problem in news.by_ref().take(LOGGED) {
        warn!("{}: {}", problem.place, problem.text);
    }
    let more = news.count();
    if more > 0 {
        warn!("and {more} more; `dataplane status` names them all");
    }
    let now: HashSet<(&str, &str)> = problems.iter().map(|p| (&*p.place, &*p.text)).collect();
    let mut over = before
        .iter()
        .filter(|p| !now.contains(&(&*p.place, &*p.text)));
    for problem in over.by_ref().take(LOGGED) {
        info!("{}: no longer so: {}", problem.place, problem.text);
    }
    let more = over.count();
    if more > 0 {
        info!("and {more} more problems are over");
    }
}
