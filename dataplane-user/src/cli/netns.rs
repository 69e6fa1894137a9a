//! Which network namespace a client is in.

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File},
    io,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
};

use anyhow::Context;
use nix::sched::{CloneFlags, setns};

use crate::{agent::addresses, kernel};

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// What the kernel's programs know it by (`SO_NETNS_COOKIE`).
    pub cookie: u64,
    /// Where it was found.
    pub place: String,
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, cookie {}", self.place, self.cookie)
    }
}

/// This process's own: the node's, for a command that runs on the node.
pub fn own() -> anyhow::Result<Namespace> {
    let cookie = kernel::netns_cookie().context("cannot ask for the network namespace's cookie")?;
    Ok(Namespace {
        cookie,
        place: "this command's own".to_owned(),
    })
}

/// By its name in /run/netns (`ip netns`), or by a path to it.
pub fn named(name: &str) -> anyhow::Result<Namespace> {
    let path = if name.contains('/') {
        PathBuf::from(name)
    } else {
        Path::new("/run/netns").join(name)
    };
    at(&path)
}

/// That of a process.
pub fn of_process(pid: u32) -> anyhow::Result<Namespace> {
    at(Path::new(&format!("/proc/{pid}/ns/net")))
}

/// The one in which an interface has this address; this process's own if it is there too. Looks
/// into every namespace that a process is in, or that has a name.
pub fn with_address(addr: IpAddr) -> anyhow::Result<Option<Namespace>> {
    if addr.is_loopback() || addresses::of_interfaces()?.iter().any(|i| i.addr == addr) {
        return own().map(Some);
    }
    let mut seen = BTreeSet::new();
    let processes = paths_in("/proc")
        .into_iter()
        .map(|path| path.join("ns/net"));
    for path in paths_in("/run/netns").into_iter().chain(processes) {
        // Not a namespace, or a process that just ended.
        let Ok(metadata) = fs::metadata(&path) else {
            continue;
        };
        if !seen.insert((metadata.dev(), metadata.ino())) {
            continue;
        }
        let has_address = inside(&path, addresses::of_interfaces)
            .is_ok_and(|all| all.is_ok_and(|all| all.iter().any(|i| i.addr == addr)));
        if has_address {
            return at(&path).map(Some);
        }
    }
    Ok(None)
}

fn paths_in(dir: &str) -> Vec<PathBuf> {
    // Missing if `ip netns` was never used.
    fs::read_dir(dir).map_or_else(
        |_| Vec::new(),
        |all| all.flatten().map(|entry| entry.path()).collect(),
    )
}

fn at(path: &Path) -> anyhow::Result<Namespace> {
    let cookie = inside(path, kernel::netns_cookie)
        .and_then(|cookie| cookie.map_err(io::Error::other))
        .with_context(|| format!("{}: cannot enter this network namespace", path.display()))?;
    Ok(Namespace {
        cookie,
        place: path.display().to_string(),
    })
}

/// Runs `work` on a thread of its own, in the namespace at `path`.
fn inside<T: Send + 'static>(path: &Path, work: fn() -> T) -> io::Result<T> {
    let file = File::open(path)?;
    let worker = thread::spawn(move || {
        setns(file, CloneFlags::CLONE_NEWNET)?;
        Ok(work())
    });
    worker
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
}
