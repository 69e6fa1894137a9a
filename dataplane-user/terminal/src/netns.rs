//! Finds the network namespace of a client.

use std::{
    fmt,
    fs::File,
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use anyhow::Context;
use kernel::namespaces;

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its cookie (`SO_NETNS_COOKIE`), by which programs know it.
    pub cookie: u64,
    /// The place where it was found.
    pub place: String,
    /// The file to enter it with. `None`: this process's own namespace.
    pub path: Option<PathBuf>,
}

impl Namespace {
    /// Runs `work` in the namespace, on a thread of its own.
    ///
    /// # Errors
    ///
    /// If the namespace cannot be entered; otherwise that of the work.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        match &self.path {
            Some(path) => inside(path, work),
            None => work(),
        }
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, cookie {}", self.place, self.cookie)
    }
}

/// Returns this process's own namespace, which is the node's for a command that runs on the node.
///
/// # Errors
///
/// If the kernel does not tell its cookie.
pub fn own() -> anyhow::Result<Namespace> {
    let cookie =
        namespaces::netns_cookie().context("cannot ask for the network namespace's cookie")?;
    Ok(Namespace {
        cookie,
        place: "this command's own".to_owned(),
        path: None,
    })
}

/// Returns the namespace of an option: a name of `ip netns`, a path, or `pid:NUMBER`. Without an option, this process's
/// own.
///
/// # Errors
///
/// If the option is none of these, or names no namespace that can be entered.
pub fn of_option(name: Option<&str>) -> anyhow::Result<Namespace> {
    match name {
        None => own(),
        Some(name) => match name.strip_prefix("pid:").map(str::parse) {
            Some(Ok(pid)) => of_process(pid),
            Some(Err(_)) => anyhow::bail!(
                "--netns {name}: not a process id; expected pid:NUMBER such as pid:4711"
            ),
            None => named(name),
        },
    }
}

/// Returns the namespace with a name in /run/netns (`ip netns`), or with a path.
///
/// # Errors
///
/// If it cannot be entered.
pub fn named(name: &str) -> anyhow::Result<Namespace> {
    let path = if name.contains('/') {
        PathBuf::from(name)
    } else {
        Path::new("/run/netns").join(name)
    };
    at(&path)
}

/// Returns the namespace of a process.
///
/// # Errors
///
/// If it cannot be entered.
pub fn of_process(pid: u32) -> anyhow::Result<Namespace> {
    at(Path::new(&format!("/proc/{pid}/ns/net")))
}

/// Returns the namespace with this cookie.
///
/// # Errors
///
/// If it was found, and cannot be entered any more.
pub fn with_cookie(cookie: u64) -> anyhow::Result<Option<Namespace>> {
    find(|| Ok(namespaces::netns_cookie().map_err(io::Error::other)? == cookie))
}

/// Returns the first namespace for which the condition holds. Skips namespaces that cannot be entered, such as those of
/// processes that have just ended.
fn find(is: impl Fn() -> io::Result<bool> + Sync) -> anyhow::Result<Option<Namespace>> {
    let mut found = None;
    namespaces::visit(|path| {
        if found.is_none() && is()? {
            found = Some(path.to_owned());
        }
        Ok(())
    });
    found.map(|path| at(&path)).transpose()
}

/// Returns the namespace at a path.
///
/// # Errors
///
/// If it cannot be entered.
pub fn at(path: &Path) -> anyhow::Result<Namespace> {
    let cookie = inside(path, || {
        namespaces::netns_cookie().map_err(io::Error::other)
    })
    .with_context(|| format!("{}: cannot enter this network namespace", path.display()))?;
    Ok(Namespace {
        cookie,
        place: path.display().to_string(),
        path: Some(path.to_owned()),
    })
}

/// Runs `work` in the namespace at `path`, on a thread of its own.
fn inside<T: Send>(path: &Path, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    namespaces::within(File::open(path)?.as_fd(), work)
}
