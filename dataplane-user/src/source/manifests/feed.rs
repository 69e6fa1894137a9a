//! Manifests as a feed.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use tokio::{runtime::Builder, sync::oneshot};
use tracing::{error, info};

use super::{Health, Loaded, Watcher, load_reusing};
use crate::{
    model::{Node, Snapshot},
    source::{self, Feed, Notice, OpenError, View, feed},
    threads::{self, may_panic},
};

/// The name of the thread that watches.
const THREAD: &str = "manifests";

/// Files and directories that are read, and read again whenever one of them has changed.
///
/// They are read by the thread that [takes](Feed::take) a view.
#[derive(Debug)]
pub struct Files {
    /// This node, without what its object says.
    node: Arc<Node>,
    /// What was read last, to share what did not change.
    last: Snapshot,
    /// The view that was read when the files were opened.
    first: Option<View>,
    changed: Arc<AtomicBool>,
    health: Arc<Health>,
    stop: Option<oneshot::Sender<()>>,
    watching: Option<JoinHandle<Option<()>>>,
}

impl Files {
    /// Reads the manifests and begins to watch them, for this node.
    ///
    /// # Errors
    ///
    /// The manifests have faults, the paths cannot be watched, or no thread can be started.
    pub fn open(
        paths: &[PathBuf],
        node: &Arc<Node>,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> Result<Self, OpenError> {
        // Before the files are read, so that no change is missed in between.
        let watcher = Watcher::new(paths)?;
        let mut files = Self {
            node: Arc::clone(node),
            last: Snapshot::default(),
            first: None,
            changed: Arc::default(),
            health: Arc::new(Health::of(paths)),
            stop: None,
            watching: None,
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
        files
            .watch(watcher, notify)
            .map_err(|error| OpenError::Thread {
                what: "the manifests",
                error,
            })?;
        Ok(files)
    }

    /// Starts the thread that tells of changes on disk.
    fn watch(
        &mut self,
        mut watcher: Watcher,
        notify: impl Fn(Notice) + Clone + Send + Sync + 'static,
    ) -> std::io::Result<()> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let changed = Arc::clone(&self.changed);
        let deaths = feed::deaths(THREAD, notify.clone());
        let watch = async move {
            loop {
                watcher.changed().await;
                may_panic(THREAD);
                changed.store(true, Ordering::Release);
                notify(Notice::Changed);
            }
        };
        let thread = threads::start(THREAD, deaths, move || {
            runtime.block_on(async {
                tokio::select! {
                    () = watch => {}
                    _ = stopped => {}
                }
            });
        })?;
        (self.stop, self.watching) = (Some(stop), Some(thread));
        Ok(())
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
        if !self.changed.swap(false, Ordering::Acquire) {
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
        self.changed.store(true, Ordering::Release);
    }

    fn health(&self) -> source::Health {
        source::Health::Manifests(Arc::clone(&self.health))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // The thread may have ended on its own: then nobody waits for either.
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(watching) = self.watching.take() {
            let _ = watching.join();
        }
    }
}
