//! The network namespaces of this machine.

use std::{
    cell::Cell,
    collections::{BTreeSet, HashMap, HashSet},
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    sched::{CloneFlags, setns},
    time::{ClockId, clock_gettime},
};
use socket2::{Domain, Socket, Type};

use super::{
    error::{Doing, Error},
    opener::{self, Opened, Sockets},
    sys,
};

/// The directory of named namespaces (`ip netns`, container runtimes).
const NAMED: &str = "/run/netns";
const PROCESSES: &str = "/proc";

/// How many namespaces a visit opens at a time.
const AT_ONCE: usize = 16;

/// The socket by which a network namespace tells its cookie.
const TELLING: Sockets = Sockets {
    domain: Domain::IPV4,
    kind: Type::DGRAM,
    protocol: None,
    count: 1,
};

/// The cookie of the network namespace that this thread is in.
///
/// # Errors
/// If the kernel is older than 5.14.
pub fn netns_cookie() -> Result<u64, Error> {
    sys::netns_cookie().doing(|| "cannot ask for this network namespace's cookie".to_owned())
}

/// The PID namespace of the machine (`PROC_PID_INIT_INO` in `include/linux/proc_ns.h`).
const OF_THE_MACHINE: &str = "pid:[4026531836]";

/// Whether this process is in the machine's PID namespace, so that `/proc` shows all processes.
///
/// # Errors
/// If the query to the kernel fails.
pub fn sees_all_processes() -> io::Result<bool> {
    Ok(fs::read_link("/proc/self/ns/pid")? == Path::new(OF_THE_MACHINE))
}

/// The results of a visit to every network namespace.
#[derive(Debug)]
pub struct Visited<T> {
    /// One result for each namespace that could be read.
    pub found: Vec<T>,
    /// Directories that could not be listed, and namespaces that could not be read. While this is not
    /// empty, a namespace that is missing from `found` may exist.
    pub unread: Vec<(PathBuf, io::Error)>,
    /// A process of each namespace that has one, by the device and inode number of the namespace's file.
    pub processes: HashMap<(u64, u64), u32>,
}

/// Runs `work` once in every network namespace that has a name or a process, on a separate thread. `work` gets the path
/// by which the thread entered the namespace.
///
/// The processes are those of the PID namespace that `/proc` shows: an agent in a pod needs the host's (`hostPID`) to
/// see the others. A process that ends during the visit is not an error: the namespace is entered by its next process.
pub fn visit<T: Send>(work: impl FnMut(&Path) -> io::Result<T> + Send) -> Visited<T> {
    let visited = on_a_thread("namespaces", move || Ok(visit_here(candidates(), work)));
    visited.unwrap_or_else(|error| Visited {
        found: Vec::new(),
        unread: vec![(PROCESSES.into(), error)],
        processes: HashMap::new(),
    })
}

/// Paths that may lead to network namespaces, those with a name first; and directories that could not
/// be listed.
fn candidates() -> (Vec<PathBuf>, Vec<(PathBuf, io::Error)>) {
    let mut paths = Vec::new();
    let mut unread = Vec::new();
    match entries(NAMED) {
        Ok(named) => paths.extend(named),
        // `ip netns` was never used.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => unread.push((NAMED.into(), error)),
    }
    let is_process = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.iter().all(u8::is_ascii_digit)
    };
    match entries(PROCESSES) {
        Ok(all) => paths.extend(
            all.into_iter()
                .filter(is_process)
                .map(|path| path.join("ns/net")),
        ),
        Err(error) => unread.push((PROCESSES.into(), error)),
    }
    (paths, unread)
}

/// The processes of a network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residents {
    /// Their cgroups, of every hierarchy, as `/proc/PID/cgroup` has them.
    pub cgroups: BTreeSet<String>,
    /// One of them, for people: its number.
    pub process: u32,
}

/// Returns the processes of each network namespace, by the device and inode number of the namespace's file. Leaves out
/// processes whose namespace this process may not see.
///
/// # Errors
/// If the processes cannot be listed or read.
pub fn residents() -> io::Result<HashMap<(u64, u64), Residents>> {
    let mut found: HashMap<(u64, u64), Residents> = HashMap::new();
    for path in entries(PROCESSES)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Ok(process) = name.parse() else { continue };
        let read = || -> io::Result<_> {
            let metadata = fs::metadata(path.join("ns/net"))?;
            let cgroups = fs::read_to_string(path.join("cgroup"))?;
            Ok(((metadata.dev(), metadata.ino()), cgroups))
        };
        let (namespace, cgroups) = match read() {
            Ok(read) => read,
            Err(error) if has_gone(&error) => continue,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
            Err(error) => return Err(error),
        };
        let residents = found.entry(namespace).or_default();
        residents.process = process;
        // `NUMBER:CONTROLLERS:PATH`
        let paths = cgroups
            .lines()
            .filter_map(|line| line.splitn(3, ':').nth(2));
        residents.cgroups.extend(paths.map(str::to_owned));
    }
    Ok(found)
}

fn entries(directory: &str) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory)?
        .map(|entry| Ok(entry?.path()))
        .collect()
}

/// [`visit`], on the thread that calls it: afterwards it is in one of the namespaces.
fn visit_here<T>(
    (paths, unread): (Vec<PathBuf>, Vec<(PathBuf, io::Error)>),
    mut work: impl FnMut(&Path) -> io::Result<T>,
) -> Visited<T> {
    let mut seen = HashSet::new();
    let mut visited = Visited {
        found: Vec::new(),
        unread,
        processes: HashMap::new(),
    };
    let mut paths = paths.into_iter();
    loop {
        let mut opened: Vec<(PathBuf, File)> = Vec::new();
        while opened.len() < AT_ONCE
            && let Some(path) = paths.next()
        {
            match open_new(&path, &mut seen, &mut visited.processes) {
                Ok(file) => opened.extend(file.map(|file| (path, file))),
                Err(error) => visited.unread.push((path, error)),
            }
        }
        if opened.is_empty() {
            return visited;
        }
        let files: Vec<_> = opened.iter().map(|(_, file)| file.as_fd()).collect();
        let mut entered = opener::enter(&files, &[TELLING]).map(Vec::into_iter);
        for (path, file) in &opened {
            let entered = entered.as_mut().and_then(Iterator::next);
            match in_one(file.as_fd(), entered, || work(path)) {
                // A file that is no network namespace.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) | Ok(Err(error)) => visited.unread.push((path.clone(), error)),
                Ok(Ok(result)) => visited.found.push(result),
            }
        }
    }
}

/// The process whose namespace a path like `/proc/PID/ns/net` is.
fn process(path: &Path) -> Option<u32> {
    let rest = path.strip_prefix(PROCESSES).ok()?;
    rest.iter().next()?.to_str()?.parse().ok()
}

/// Opens a network namespace; `None`: it is among those that were `seen`, or is gone.
fn open_new(
    path: &Path,
    seen: &mut HashSet<(u64, u64)>,
    processes: &mut HashMap<(u64, u64), u32>,
) -> io::Result<Option<File>> {
    let mut open = || {
        let metadata = fs::metadata(path)?;
        let key = (metadata.dev(), metadata.ino());
        if let Some(process) = process(path) {
            processes.entry(key).or_insert(process);
        }
        if seen.contains(&key) {
            return Ok(None);
        }
        let opened = File::open(path);
        // Another process may be in it.
        if !opened.as_ref().is_err_and(has_gone) {
            seen.insert(key);
        }
        opened.map(Some)
    };
    match open() {
        Err(error) if has_gone(&error) => Ok(None),
        opened => opened,
    }
}

/// Does `work` in a namespace, in which the thread stays if it enters it itself. `entered`: by the opener, if there is one.
///
/// # Errors
/// If it cannot be entered.
fn in_one<T>(
    namespace: BorrowedFd<'_>,
    entered: Option<io::Result<Opened>>,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<io::Result<T>> {
    if let Some(opened) = entered.transpose()? {
        return opener::inside(namespace, opened, || Ok(work()));
    }
    setns(namespace, CloneFlags::CLONE_NEWNET)?;
    Ok(work())
}

/// Whether the process or the name no longer exists.
fn has_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Runs `work` in one namespace, on a separate thread.
///
/// # Errors
/// If the namespace cannot be entered, or the thread cannot be started; otherwise the error of `work`.
pub fn within<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    within_with(namespace, &[], work)
}

/// As [`within`]. `sockets`: those that `work` opens, up to 16, which the opener opens together, if there is one.
///
/// # Errors
/// As for [`within`].
pub fn within_with<T: Send>(
    namespace: BorrowedFd<'_>,
    sockets: &[Sockets],
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let entered = opener::enter(&[namespace], sockets);
    if let Some(opened) = entered.and_then(|mut one| one.pop()) {
        return opener::inside(namespace, opened?, work);
    }
    on_a_thread("namespace", move || {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        work()
    })
}

/// Opens sockets of TCP that do not block in a namespace: one, or up to `count`. `v4`: their family.
///
/// # Errors
/// If it cannot be entered, or the kernel's refusal.
pub fn tcp_sockets(namespace: BorrowedFd<'_>, v4: bool, count: usize) -> io::Result<Vec<OwnedFd>> {
    opener::tcp_sockets(namespace, v4, count).unwrap_or_else(|| {
        let domain = if v4 { Domain::IPV4 } else { Domain::IPV6 };
        within(namespace, || {
            let socket = Socket::new(domain, Type::STREAM.nonblocking(), None)?;
            Ok(vec![socket.into()])
        })
    })
}

fn on_a_thread<T: Send>(name: &str, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let (result, took) = thread::scope(|scope| {
        thread::Builder::new()
            .name(name.to_owned())
            .spawn_scoped(scope, || (work(), own_processor_time()))?
            .join()
            .map_err(|_| io::Error::other("the thread in a network namespace panicked"))
    })?;
    HELPED.set(HELPED.get() + took);
    result
}

thread_local! {
    /// How much of a processor's time the threads have used that worked in network namespaces for this thread.
    static HELPED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How much of a processor's time this thread has used, with the threads that worked in network namespaces for it.
pub fn processor_time() -> Duration {
    own_processor_time() + HELPED.get()
}

fn own_processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_time_of_helping_threads_counts() {
        let before = processor_time();
        let worked = on_a_thread("test", || {
            while own_processor_time() < Duration::from_millis(20) {}
            Ok(())
        });
        worked.unwrap();
        let worked = processor_time().saturating_sub(before);
        assert!(worked >= Duration::from_millis(20));
    }

    #[test]
    fn paths_of_processes_are_told_from_names() {
        assert_eq!(process(Path::new("/proc/17/ns/net")), Some(17));
        assert_eq!(process(Path::new("/run/netns/17")), None);
    }

    #[test]
    fn a_process_that_ends_does_not_hide_a_namespace_and_an_error_is_no_absence() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("own");
        symlink("/proc/self/ns/net", &own).unwrap();
        let gone = directory.path().join("gone");
        let plain = directory.path().join("plain");
        fs::write(&plain, "").unwrap();
        // Longer than a name may be: an error that says nothing about existence.
        let broken = directory.path().join("x".repeat(300));
        let paths = vec![gone, plain, broken.clone(), own.clone()];
        let visited =
            thread::spawn(move || visit_here((paths, Vec::new()), |path| Ok(path.to_owned())));
        let visited = visited.join().unwrap();
        let unread: Vec<_> = visited.unread.into_iter().map(|(path, _)| path).collect();
        if nix::unistd::geteuid().is_root() {
            assert_eq!(visited.found, [own]);
            assert_eq!(unread, [broken]);
        } else {
            // Without privilege, a user may not even enter his own.
            assert_eq!(unread, [broken, own]);
        }
    }
}
