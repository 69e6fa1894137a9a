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

/// Time that a writer gets to write the other files of a set.
const QUIET: Duration = Duration::from_millis(50);
/// Interval of looking without a notification: notifications can get lost, or be impossible.
const POLL: Duration = Duration::from_secs(10);
/// The same if the kernel gives no notifications.
const POLL_ALONE: Duration = Duration::from_secs(1);

/// A task that counts the times at which files may have changed. The readers compare what they read.
pub struct Watching {
    count: watch::Receiver<u64>,
    task: JoinHandle<()>,
}

impl Watching {
    /// Watches directories, all that is below a directory if the mode says so. They need not exist yet. What changes after this
    /// function has returned is noticed.
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

    /// The count, which is notified.
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
            // Before the readers look, and each time: a directory may be new, or another one of the same name.
            self.watch();
            count.send_modify(|count| *count += 1);
        }
    }

    fn watch(&mut self) {
        let Some(notifier) = &mut self.notifier else {
            return;
        };
        for (directory, mode) in &self.directories {
            // Fails if it does not exist yet.
            _ = notifier.watch(directory, *mode);
        }
    }
}

fn notifier(changed: Arc<Notify>) -> Option<RecommendedWatcher> {
    notify::recommended_watcher(move |event: notify::Result<Event>| {
        // An error, such as an overflow of the queue, is a reason to look, too.
        if event.is_ok_and(|event| is_read(event.kind)) {
            return;
        }
        changed.notify_one();
    })
    .inspect_err(|error| {
        tracing::warn!(
            "no notifications of changed certificates ({error}): looking every {POLL_ALONE:?} instead; \
             fs.inotify.max_user_instances may be too low"
        );
    })
    .ok()
}

/// Whether the event is somebody's reading, such as our own.
fn is_read(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}
