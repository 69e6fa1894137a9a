//! When manifests change on disk.
//!
//! The kernel's notifications only say *when to look*: whether something changed is decided by
//! comparing the files' stamps (device, inode, size, times). So one kind of change is not missed
//! because it announces itself in another way: a ConfigMap's `..data` link that is swapped, an
//! editor that renames a new file over the old one, a directory that is removed and made anew.
//! And since notifications can get lost (a full queue, a network file system, a limit on
//! watches), the stamps are compared every ten seconds anyway.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::files;

/// No event for so long: the writer is done.
const QUIET: Duration = Duration::from_millis(50);
/// A writer that never rests is read after this.
const QUIET_MAX: Duration = Duration::from_secs(1);
/// How often stamps are compared without an event.
const POLL: Duration = Duration::from_secs(10);
/// The same, where the kernel gives no notifications.
const POLL_ALONE: Duration = Duration::from_secs(1);
/// As many links as the kernel follows in a path.
const LINKS_MAX: usize = 40;

/// Manifests cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// A relative path, and no current directory.
    #[error("{path}: cannot be made absolute: {error}", path = path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// Watches manifests: files, or directories with all below them. They need not exist yet.
///
/// Make it before the first [`load`](super::load): then no change is missed in between.
pub struct Watcher {
    paths: Vec<PathBuf>,
    stamps: Stamps,
    /// `None` where the kernel gives no notifications (its limit is reached, say).
    notifier: Option<RecommendedWatcher>,
    watched: BTreeSet<PathBuf>,
    events: mpsc::UnboundedReceiver<Event>,
    /// The first event since the stamps were compared. Kept here so that nothing is lost if the
    /// future is dropped.
    pending_since: Option<Instant>,
    next_poll: Instant,
}

impl Watcher {
    /// Starts to watch.
    ///
    /// Where the kernel gives no notifications, that is logged, and stamps are compared every
    /// second instead.
    ///
    /// # Errors
    /// A path is relative, and there is no current directory.
    pub fn new(paths: &[PathBuf]) -> Result<Self, WatchError> {
        let paths = paths
            .iter()
            .map(|path| {
                std::path::absolute(path).map_err(|error| WatchError::Path {
                    path: path.clone(),
                    error,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let (sender, events) = mpsc::unbounded_channel();
        let notifier = notify::recommended_watcher(move |event: notify::Result<Event>| {
            // An error (such as an overflow of the queue) is a reason to look, too.
            let event = event.unwrap_or_else(|_| Event::new(EventKind::Any));
            if !is_read(event.kind) {
                // Fails only while the watcher is being dropped.
                _ = sender.send(event);
            }
        });
        let notifier = notifier
            .inspect_err(|error| {
                tracing::warn!(
                    "no notifications of changed files ({error}): looking every {POLL_ALONE:?} \
                     instead; fs.inotify.max_user_instances may be too low"
                );
            })
            .ok();
        let mut watcher = Self {
            paths,
            stamps: Stamps::default(),
            notifier,
            watched: BTreeSet::new(),
            events,
            pending_since: None,
            next_poll: Instant::now() + POLL,
        };
        watcher.look();
        Ok(watcher)
    }

    /// Waits until something changed and the writer is done. Then it is time to
    /// [`load_reusing`](super::load_reusing). May be dropped and called anew (as in
    /// `tokio::select!`): nothing is lost.
    pub async fn changed(&mut self) {
        loop {
            self.due().await;
            self.pending_since = None;
            if self.look() {
                return;
            }
        }
    }

    /// Waits until it is time to compare stamps.
    async fn due(&mut self) {
        loop {
            let quiet = match self.pending_since {
                Some(since) => (Instant::now() + QUIET).min(since + QUIET_MAX),
                None => self.next_poll,
            };
            let event = tokio::select! {
                event = self.events.recv(), if self.notifier.is_some() => event,
                () = sleep_until(quiet) => return,
            };
            match event {
                Some(event) if self.concerns(&event) => {
                    self.pending_since.get_or_insert_with(Instant::now);
                }
                Some(_) => {}
                None => {
                    tracing::warn!(
                        "the thread that is notified of changed files has died: looking every {POLL_ALONE:?} instead"
                    );
                    self.notifier = None;
                }
            }
        }
    }

    /// Whether an event is about manifests, rather than about their neighbours.
    fn concerns(&self, event: &Event) -> bool {
        event.paths.is_empty()
            || event.paths.iter().any(|path| {
                self.watched.contains(path)
                    || self.stamps.places.contains(path)
                    || path
                        .parent()
                        .is_some_and(|parent| self.stamps.inside.contains(parent))
            })
    }

    /// Compares stamps, and follows directories that came or went.
    fn look(&mut self) -> bool {
        let mut stamps = Stamps::of(&self.paths);
        if self.watch(&stamps) {
            // Something may have happened before the new watches were there.
            stamps = Stamps::of(&self.paths);
            self.watch(&stamps);
        }
        self.next_poll = Instant::now()
            + if self.notifier.is_some() {
                POLL
            } else {
                POLL_ALONE
            };
        let changed = stamps.files != self.stamps.files;
        self.stamps = stamps;
        changed
    }

    /// Watches the directories that matter; whether there are new ones.
    fn watch(&mut self, stamps: &Stamps) -> bool {
        let Some(notifier) = &mut self.notifier else {
            return false;
        };
        let wanted: BTreeSet<PathBuf> = stamps.outside.union(&stamps.inside).cloned().collect();
        for gone in self.watched.difference(&wanted) {
            // The kernel has dropped the watch of a directory that was removed.
            _ = notifier.unwatch(gone);
        }
        let mut grew = false;
        let mut watched = BTreeSet::new();
        for directory in wanted {
            // A directory may have been replaced by another of the same name: the watch is then
            // still that of the old one, so it is set anew. For the same one this changes nothing.
            match notifier.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    grew |= !self.watched.contains(&directory);
                    watched.insert(directory);
                }
                Err(error) => tracing::warn!(
                    "no notifications of changes in {} ({error}): looking every {POLL:?} instead; \
                     fs.inotify.max_user_watches may be too low",
                    directory.display()
                ),
            }
        }
        self.watched = watched;
        grew
    }
}

/// Whether something was only read, as the agent does itself.
fn is_read(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}

/// What the files look like from outside, and where they are.
#[derive(Default)]
struct Stamps {
    /// Device, inode, size, and times of modification and of status change in seconds and
    /// nanoseconds. A path without a file has none.
    files: Vec<(PathBuf, Option<[i64; 7]>)>,
    /// Directories in which everything matters.
    inside: BTreeSet<PathBuf>,
    /// Directories in which only some names matter...
    outside: BTreeSet<PathBuf>,
    /// ...which are these.
    places: BTreeSet<PathBuf>,
}

impl Stamps {
    fn of(paths: &[PathBuf]) -> Self {
        let mut stamps = Self::default();
        let (files, missing) = files::find(paths);
        for path in paths {
            stamps.around(path, &mut 0);
            stamps.below(path, &mut BTreeSet::new());
        }
        for file in &files {
            stamps.around(file, &mut 0);
        }
        stamps.files = files
            .into_iter()
            .chain(missing.into_iter().map(|(path, _)| path))
            .map(|path| {
                let stamp = fs::metadata(&path).ok().map(|m| stamp(&m));
                (path, stamp)
            })
            .collect();
        stamps
    }

    /// The directories in which the way to `path` can change: that of every name on it that is a
    /// link or may vanish.
    fn around(&mut self, path: &Path, links: &mut usize) {
        for place in path.ancestors() {
            let Some(parent) = place.parent() else { break };
            let link = fs::read_link(place).ok();
            let exists = place.symlink_metadata().is_ok();
            // The path itself, links on the way, and what is missing with the first directory
            // above it that is there. Other directories hardly ever move: the poll sees it.
            if place == path || link.is_some() || !exists {
                self.places.insert(place.to_owned());
                if parent.is_dir() {
                    self.outside.insert(parent.to_owned());
                }
            }
            if let Some(target) = link
                && *links < LINKS_MAX
            {
                *links += 1;
                let rest = path.strip_prefix(place).unwrap_or(Path::new(""));
                self.around(&parent.join(target).join(rest), links);
            }
        }
    }

    /// The directories in `path`.
    fn below(&mut self, path: &Path, seen: &mut BTreeSet<PathBuf>) {
        let (Ok(real), Ok(entries)) = (path.canonicalize(), fs::read_dir(path)) else {
            return;
        };
        if !seen.insert(real) {
            return;
        }
        self.inside.insert(path.to_owned());
        for entry in entries
            .flatten()
            .filter(|entry| !files::is_hidden(&entry.file_name()))
        {
            let child = entry.path();
            if child.is_dir() {
                self.below(&child, seen);
            }
        }
    }
}

fn stamp(metadata: &fs::Metadata) -> [i64; 7] {
    [
        metadata.dev().cast_signed(),
        metadata.ino().cast_signed(),
        metadata.size().cast_signed(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    ]
}
