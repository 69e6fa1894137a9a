//! Watches manifests on disk.
//!
//! The kernel's notifications say only when to look. Whether a file changed is decided by its stamp (device, inode,
//! size, times). So the watcher does not miss kinds of changes that the kernel announces in other ways: a ConfigMap's
//! `..data` link that is swapped, an editor that renames a new file over the old one, a directory that is removed and
//! created again. Because notifications can get lost (a full queue, a network file system, a limit on watches), stamps
//! are also compared every ten seconds.

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

/// Time without an event after which the writer counts as done.
const QUIET: Duration = Duration::from_millis(50);
/// Maximum time to wait for a writer that does not stop.
const QUIET_MAX: Duration = Duration::from_secs(1);
/// Interval of comparing stamps without an event.
const POLL: Duration = Duration::from_secs(10);
/// Interval of comparing stamps if the kernel gives no notifications.
const POLL_ALONE: Duration = Duration::from_secs(1);
/// Maximum number of links that the kernel follows in a path.
const LINKS_MAX: usize = 40;

/// Manifests cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// A relative path, and no current directory.
    #[error("{path}: cannot be made absolute: {error}", path = path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
}

/// Watches manifests: files, or directories with all files below them. They need not exist yet.
///
/// Create it before the first [`load`](super::load), so that no change is missed in between.
pub struct Watcher {
    paths: Vec<PathBuf>,
    stamps: Stamps,
    /// `None` if the kernel gives no notifications, for example because its limit is reached.
    notifier: Option<RecommendedWatcher>,
    watched: BTreeSet<PathBuf>,
    events: mpsc::UnboundedReceiver<Event>,
    /// Time of the first event since the stamps were compared. It is a field, so that a dropped future loses nothing.
    pending_since: Option<Instant>,
    next_poll: Instant,
}

impl Watcher {
    /// Starts to watch.
    ///
    /// If the kernel gives no notifications, logs this and compares stamps every second.
    ///
    /// # Errors
    ///
    /// If a path is relative, and there is no current directory.
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
            // An error, such as an overflow of the queue, is a reason to look, too.
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

    /// Waits until a file has changed and the writer is done. The caller then reads the files again
    /// ([`Manifests::read`](super::Manifests::read)). May be dropped and called again (as in `tokio::select!`) without
    /// loss.
    pub async fn changed(&mut self) {
        loop {
            self.due().await;
            self.pending_since = None;
            if self.look() {
                return;
            }
        }
    }

    /// Waits until stamps must be compared.
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

    /// Returns whether an event concerns manifests, and not other files in the directory.
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

    /// Compares stamps, and updates the watched directories.
    fn look(&mut self) -> bool {
        let mut stamps = Stamps::of(&self.paths);
        if self.watch(&stamps) {
            // Files may have changed before the new watches existed.
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

    /// Watches the needed directories. Returns whether there are new ones.
    fn watch(&mut self, stamps: &Stamps) -> bool {
        let Some(notifier) = &mut self.notifier else {
            return false;
        };
        let wanted: BTreeSet<PathBuf> = stamps.outside.union(&stamps.inside).cloned().collect();
        for gone in self.watched.difference(&wanted) {
            // The kernel has removed the watch of a removed directory.
            _ = notifier.unwatch(gone);
        }
        let mut grew = false;
        let mut watched = BTreeSet::new();
        for directory in wanted {
            // Another directory of the same name may have replaced this one, and then the watch is still on the old
            // one. So the watch is set again, which changes nothing for an unchanged directory.
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

/// Returns whether a file was only read, as the agent does itself.
fn is_read(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}

/// The stamps of the files, and the directories to watch.
#[derive(Default)]
struct Stamps {
    /// Device, inode, size, and times of modification and of status change in seconds and nanoseconds. `None` if the
    /// path has no file.
    files: Vec<(PathBuf, Option<[i64; 7]>)>,
    /// Directories in which all names matter.
    inside: BTreeSet<PathBuf>,
    /// Directories in which only the names in `places` matter.
    outside: BTreeSet<PathBuf>,
    /// The names that matter in `outside`, as paths.
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

    /// Adds the directories in which the way to `path` can change: the directory of every name on it that is a link or
    /// may disappear.
    fn around(&mut self, path: &Path, links: &mut usize) {
        for place in path.ancestors() {
            let Some(parent) = place.parent() else { break };
            let link = fs::read_link(place).ok();
            let exists = place.symlink_metadata().is_ok();
            // The path itself, links on the way, and missing names with the first existing directory above them. Other
            // directories hardly ever move, and the regular comparison notices it.
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

    /// Adds the directories in `path`.
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
