//! Notices changes of files.

use std::{path::PathBuf, sync::Arc, time::Duration};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode},
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

/// Delay after a notification, in which the writer can write the other files of a set.
const QUIET: Duration = Duration::from_millis(50);
/// Interval between reads without a notification, because notifications can get lost.
const POLL: Duration = Duration::from_secs(10);
/// Interval between reads if the kernel sends no notifications.
const POLL_ALONE: Duration = Duration::from_secs(1);

/// A task that counts the times that files may have changed. The readers compare the contents.
pub struct Watching {
    count: watch::Receiver<u64>,
    task: JoinHandle<()>,
}

impl Watching {
    /// Watches directories, and with the recursive mode all directories below. They need not exist yet. Each change after the
    /// return of this function is noticed.
    pub fn new(directories: Vec<(PathBuf, RecursiveMode)>) -> Self {
        let (sender, count) = watch::channel(0);
        let changed = Arc::new(Notify::new());
        let mut watcher = Watcher {
            directories,
            notifier: notifier(changed.clone()),
        };
        watcher.watch();
        let task = tokio::spawn(watcher.run(changed, sender));
        Self { count, task }
    }

    /// Returns the count. The receiver is notified of each change.
    pub fn count(&self) -> watch::Receiver<u64> {
        self.count.clone()
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Watcher {
    directories: Vec<(PathBuf, RecursiveMode)>,
    notifier: Option<RecommendedWatcher>,
}

impl Watcher {
    async fn run(mut self, changed: Arc<Notify>, count: watch::Sender<u64>) {
        let poll = match self.notifier {
            Some(_) => POLL,
            None => POLL_ALONE,
        };
        loop {
            if timeout(poll, changed.notified()).await.is_ok() {
                sleep(QUIET).await;
            }
            // Before the readers read, and each time, because a directory may be new, or may have replaced a directory with the
            // same name.
            self.watch();
            count.send_modify(|count| *count += 1);
        }
    }

    fn watch(&mut self) {
        let Some(notifier) = &mut self.notifier else {
            return;
        };
        for (directory, mode) in &self.directories {
            // Fails if the directory does not exist yet.
            _ = notifier.watch(directory, *mode);
        }
    }
}

fn notifier(changed: Arc<Notify>) -> Option<RecommendedWatcher> {
    notify::recommended_watcher(move |event: notify::Result<Event>| {
        // After an error, such as an overflow of the queue, files may have changed, too.
        if event.is_ok_and(|event| is_read(event.kind)) {
            return;
        }
        changed.notify_one();
    })
    .inspect_err(|error| {
        tracing::warn!(
            "the kernel sends no notifications of changed certificates: {error}; the agent reads them every {POLL_ALONE:?} instead; \
             fs.inotify.max_user_instances may be too low"
        );
    })
    .ok()
}

/// Returns whether a file was only read, as the agent does itself.
fn is_read(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}
