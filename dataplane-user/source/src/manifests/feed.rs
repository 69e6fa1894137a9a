//! Manifests as a feed.

use std::{path::PathBuf, sync::Arc};

use model::{Node, Snapshot};
use tracing::{error, info};

use super::{Health, Loaded, Watcher, load_reusing};
use crate::{Feed, Notice, OpenError, View, watching::Watching};

/// The name of the thread that watches.
const THREAD: &str = "manifests";

/// Files and directories. They are read again when one of them has changed.
///
/// The thread that [takes](Feed::take) a view reads them.
#[derive(Debug)]
pub struct Files {
    /// This node, without the facts of its object.
    node: Arc<Node>,
    /// The last snapshot, which shares unchanged objects with the next.
    last: Snapshot,
    /// The view from opening the files.
    first: Option<View>,
    watching: Watching,
    health: Arc<Health>,
}

impl Files {
    /// Reads the manifests and begins to watch them, for this node.
    ///
    /// # Errors
    ///
    /// If the manifests have faults, the paths cannot be watched, or no thread can be started.
    pub fn open(
        paths: &[PathBuf],
        node: &Arc<Node>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, OpenError> {
        // Watches before the files are read, so that no change is missed in between.
        let mut watcher = Watcher::new(paths)?;
        let watching = Watching::start(THREAD, notify, async move || watcher.changed().await);
        let mut files = Self {
            node: Arc::clone(node),
            last: Snapshot::default(),
            first: None,
            watching: watching.map_err(|error| OpenError::Thread {
                what: "the manifests",
                error,
            })?,
            health: Arc::new(Health::of(paths)),
        };
        let loaded = load_reusing(&files.last, paths, node)?;
        info!(
            services = loaded.snapshot.services.len(),
            files = loaded.files,
            node = &*node.name,
            "read the manifests"
        );
        if let Some(line) = loaded.ignored_line() {
            info!("{line}");
        }
        files.first = Some(files.keep(loaded));
        Ok(files)
    }

    fn keep(&mut self, loaded: Loaded) -> View {
        self.health.set(None);
        let snapshot = &loaded.snapshot;
        let view = View {
            services: snapshot.services.clone(),
            entries: snapshot.entries.clone(),
            routes: snapshot.routes.clone(),
            grants: snapshot.grants.clone(),
            workloads: snapshot.workloads.clone(),
            pods: snapshot.pods.clone(),
            whole: snapshot.whole,
            unread: snapshot.unread.clone(),
            namespaces: None,
            node: loaded.facts,
            problems: Arc::clone(&snapshot.problems),
            since: None,
        };
        self.last = loaded.snapshot;
        view
    }
}

impl Feed for Files {
    fn take(&mut self) -> Option<View> {
        let first = self.first.take();
        if !self.watching.changed() {
            return first;
        }
        match load_reusing(&self.last, &self.health.paths, &self.node) {
            Ok(loaded) => {
                let services = loaded.snapshot.services.len();
                info!(services, files = loaded.files, "read the manifests again");
                Some(self.keep(loaded))
            }
            Err(errors) => {
                for fault in &errors.faults {
                    error!("{fault}");
                }
                error!(
                    "the manifests have errors; the agent still serves the last valid manifests"
                );
                self.health.set(Some(errors.to_string()));
                first
            }
        }
    }

    fn refresh(&mut self) {
        self.watching.refresh();
    }

    fn health(&self) -> crate::Health {
        crate::Health::Manifests(Arc::clone(&self.health))
    }
}
