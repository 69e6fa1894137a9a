//! Manifests as a feed.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use model::Node;
use threads::may_panic;
use tracing::{error, info};

use super::{Health, Manifests, Watcher};
use crate::{Feed, Notice, OpenError, View, feed, task::Task};

/// The name of the thread that watches.
const THREAD: &str = "manifests";

/// Files and directories. They are read again when one of them has changed.
///
/// The thread that [takes](Feed::take) a view reads them.
#[derive(Debug)]
pub struct Files {
    manifests: Manifests,
    /// The view from opening the files.
    first: Option<View>,
    /// Whether files may have changed since they were read.
    changed: Arc<AtomicBool>,
    health: Arc<Health>,
    _watcher: Task,
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
        let changed = Arc::<AtomicBool>::default();
        let change = Arc::clone(&changed);
        let deaths = feed::deaths(THREAD, notify.clone());
        let task = Task::start(THREAD, deaths, async move || {
            loop {
                watcher.changed().await;
                may_panic(THREAD);
                change.store(true, Ordering::Release);
                notify(Notice::Changed);
            }
        })
        .map_err(|error| OpenError::Thread {
            what: "the manifests",
            error,
        })?;
        let mut manifests = Manifests::new(node);
        let loaded = manifests.read(paths)?;
        info!(
            services = loaded.view.services.len(),
            files = loaded.files,
            node = &*node.name,
            "read the manifests"
        );
        if let Some(line) = loaded.ignored_line() {
            info!("{line}");
        }
        let health = Health::of(paths);
        health.set(None);
        Ok(Self {
            manifests,
            first: Some(loaded.view),
            changed,
            health: Arc::new(health),
            _watcher: task,
        })
    }
}

impl Feed for Files {
    fn take(&mut self) -> Option<View> {
        let first = self.first.take();
        if !self.changed.swap(false, Ordering::Acquire) {
            return first;
        }
        match self.manifests.read(&self.health.paths) {
            Ok(loaded) => {
                let services = loaded.view.services.len();
                info!(services, files = loaded.files, "read the manifests again");
                self.health.set(None);
                Some(loaded.view)
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

    fn health(&self) -> crate::Health {
        crate::Health::Manifests(Arc::clone(&self.health))
    }
}
