//! The network namespaces of this machine.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    os::{fd::BorrowedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    thread,
};

use nix::sched::{CloneFlags, setns};

/// A path to every network namespace that has a name (`ip netns`) or that a process is in, each
/// once.
///
/// Processes are those of the PID namespace that `/proc` shows: an agent in a pod needs the host's
/// (`hostPID`) to see the others.
pub fn all() -> Vec<PathBuf> {
    let mut seen = HashSet::new();
    let processes = entries("/proc").filter(|path| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.iter().all(u8::is_ascii_digit)
    });
    entries("/run/netns")
        .chain(processes.map(|path| path.join("ns/net")))
        // Not a namespace, or a process that just ended.
        .filter(|path| fs::metadata(path).is_ok_and(|m| seen.insert((m.dev(), m.ino()))))
        .collect()
}

fn entries(directory: &str) -> impl Iterator<Item = PathBuf> {
    // Missing if `ip netns` was never used.
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

/// Does `work` in each of these namespaces, one after the other, on a thread of its own. What could
/// not be entered (a process that has ended since) is an error, for `work` to judge.
///
/// # Errors
/// If the thread cannot be made.
pub fn visit<T: Send>(
    namespaces: &[PathBuf],
    mut work: impl FnMut(&Path, io::Result<()>) -> T + Send,
) -> io::Result<Vec<T>> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name("namespaces".to_owned())
            .spawn_scoped(scope, move || {
                let visit = |path: &PathBuf| {
                    let entered = File::open(path)
                        .and_then(|file| Ok(setns(file, CloneFlags::CLONE_NEWNET)?));
                    work(path, entered)
                };
                namespaces.iter().map(visit).collect()
            })?
            .join()
            .map_err(|_| io::Error::other("the thread that visits network namespaces panicked"))
    })
}

/// Does `work` in one namespace, on a thread of its own.
///
/// # Errors
/// If it cannot be entered, or the thread cannot be made; otherwise what `work` answers.
pub fn within<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name("namespace".to_owned())
            .spawn_scoped(scope, move || {
                setns(namespace, CloneFlags::CLONE_NEWNET)?;
                work()
            })?
            .join()
            .map_err(|_| io::Error::other("the thread in a network namespace panicked"))?
    })
}
