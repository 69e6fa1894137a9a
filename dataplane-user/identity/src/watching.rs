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
    /// Watches directories, all that is below a directory if the mode says so. They need not exist yet.
    pub fn new(directories: Vec<(PathBuf, RecursiveMode)>) -> Self {
        let (sender, count) = watch::channel(0);
        let task = tokio::spawn(watch(directories, sender));
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

async fn watch(directories: Vec<(PathBuf, RecursiveMode)>, count: watch::Sender<u64>) {
    let changed = Arc::new(Notify::new());
    let mut notifier = notifier(changed.clone());
    let poll = if notifier.is_some() { POLL } else { POLL_ALONE };
    loop {
        // Again each time: a directory may be new, or another one of the same name.
        for (directory, mode) in &directories {
            if let Some(notifier) = &mut notifier {
                // It does not exist yet.
                _ = notifier.watch(directory, *mode);
            }
        }
        if timeout(poll, changed.notified()).await.is_ok() {
            sleep(QUIET).await;
        }
        count.send_modify(|count| *count += 1);
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
