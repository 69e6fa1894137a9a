//! Where workloads are on this machine: network namespaces and cgroups. An answer that cannot be had is
//! an error here, and never "there is none".

use std::{
    collections::BTreeSet,
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use tracing::debug;

use crate::kernel::{self, Namespace, namespaces};

/// Levels of the cgroup hierarchy that programs can tell apart.
const LEVELS: usize = 15;

/// Why a workload cannot be enrolled.
#[derive(Debug, PartialEq, Eq)]
pub enum Missing {
    /// It is not on this node, as far as this agent is permitted to see.
    Absent {
        /// Whether there is more than that.
        hidden: bool,
    },
    /// It cannot be found as it is described.
    Wrong(String),
    /// It may be on this node: what there is could not be read.
    Unknown(String),
}

/// The network namespaces of this machine, after one look at all of them.
#[derive(Debug)]
pub struct Found {
    /// Those with one of the addresses that were asked for.
    homes: Vec<Namespace>,
    /// The cookies of all that could be read, but for the agent's own.
    pub seen: BTreeSet<u64>,
    /// The agent's own.
    pub own: io::Result<Namespace>,
    /// What could not be read.
    unread: Vec<(PathBuf, io::Error)>,
}

impl Found {
    /// Looks for the network namespaces that have these addresses. `own`: the cookie of the agent's.
    pub fn look(addresses: &BTreeSet<IpAddr>, own: u64) -> Self {
        let mut seen = BTreeSet::new();
        let visited = namespaces::visit(|_| {
            let namespace = kernel::this_namespace()?;
            if namespace.cookie == own {
                return Ok(None);
            }
            seen.insert(namespace.cookie);
            // The others' files are closed here: there may be more of them than this process may open.
            let is_home = namespace.addresses.iter().any(|a| addresses.contains(a));
            Ok(is_home.then_some(namespace))
        });
        for (path, error) in &visited.unread {
            debug!("cannot look into {}: {error}", path.display());
        }
        Self {
            homes: visited.found.into_iter().flatten().collect(),
            seen,
            own: kernel::this_namespace(),
            unread: visited.unread,
        }
    }

    /// The network namespace that has one of these addresses: of several, one that is linked with ours.
    /// (There may be other nodes' on this machine, which have the same.)
    ///
    /// # Errors
    /// If there is none, or if that cannot be told.
    pub fn home(&self, addresses: &[IpAddr]) -> Result<&Namespace, Missing> {
        let has_one = |n: &&Namespace| addresses.iter().any(|a| n.addresses.contains(a));
        let mut there = self.homes.iter().filter(has_one);
        let absent = || match self.trouble() {
            None => Missing::Absent {
                hidden: !self.unread.is_empty(),
            },
            Some(text) => Missing::Unknown(text),
        };
        let first = there.next().ok_or_else(absent)?;
        let Some(second) = there.next() else {
            return Ok(first);
        };
        for namespace in [first, second].into_iter().chain(there) {
            let linked = kernel::is_linked(namespace).map_err(|error| {
                Missing::Unknown(format!(
                    "cannot find out which of several network namespaces is at this node's links: {error}"
                ))
            })?;
            if linked {
                return Ok(namespace);
            }
        }
        Err(absent())
    }

    /// Why not all network namespaces could be read. Namespaces of processes that the agent is not
    /// permitted to see are left out: container runtimes give those of pods a name.
    pub fn trouble(&self) -> Option<String> {
        let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        let mut unread = self.unread.iter().filter(|(_, error)| !is_denied(error));
        let (path, error) = unread.next()?;
        let more = match unread.count() {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        Some(format!(
            "cannot look into {}: {error}{more}",
            path.display()
        ))
    }
}

/// The id of the cgroup at `path`, which is relative to `below`, and its level in the hierarchy.
///
/// # Errors
/// If there is none, or if that cannot be told.
pub fn cgroup(below: &Path, path: &Path) -> Result<(u64, usize), Missing> {
    let path = below.join(path.strip_prefix("/").unwrap_or(path));
    let told = |error: io::Error| {
        let text = format!("cannot look at cgroup {}: {error}", path.display());
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => Missing::Wrong(text),
            _ => Missing::Unknown(text),
        }
    };
    let found = fs::metadata(&path).map_err(told)?;
    let level = level(&path, found.dev()).map_err(told)?;
    Ok((found.ino(), level))
}

/// How many cgroups a cgroup is in. The root of the hierarchy, which has no type, may be mounted
/// anywhere.
fn level(path: &Path, device: u64) -> io::Result<usize> {
    let wrong = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    let mut directory = path.to_owned();
    for level in 0..=LEVELS {
        match fs::metadata(directory.join("cgroup.type")) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(level),
            Err(error) => return Err(error),
        }
        directory.push("..");
        if fs::metadata(&directory)?.dev() != device {
            return wrong(
                "only a part of the hierarchy is mounted there, so its level is not known",
            );
        }
    }
    wrong("it is too deep in the hierarchy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_that_is_not_there_is_told_from_one_that_cannot_be_read() {
        // As a hierarchy looks: all but the root has a type.
        let root = tempfile::tempdir().unwrap();
        let mut directory = root.path().to_owned();
        for _ in 0..=LEVELS {
            directory.push("a");
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("cgroup.type"), "domain\n").unwrap();
        }
        let at = |path: &str| cgroup(root.path(), Path::new(path));
        assert_eq!(at("/a").unwrap().1, 1);
        assert_eq!(at("a/a").unwrap().1, 2);
        // The same, by another beginning.
        let below = root.path().join("a");
        let id = at("a/a").unwrap().0;
        assert_eq!(cgroup(&below, Path::new("/a")).unwrap(), (id, 2));
        assert!(matches!(at("/b"), Err(Missing::Wrong(_))));
        assert_eq!(at(&"/a".repeat(LEVELS)).unwrap().1, LEVELS);
        assert!(matches!(
            at(&"/a".repeat(LEVELS + 1)),
            Err(Missing::Wrong(_))
        ));
        // Longer than a name may be.
        let long = "x".repeat(300);
        assert!(matches!(at(&long), Err(Missing::Unknown(_))));
    }

    #[test]
    fn an_address_that_nobody_has_is_absent_only_if_all_was_read() {
        let mut found = Found {
            homes: Vec::new(),
            seen: BTreeSet::new(),
            own: Err(io::ErrorKind::Other.into()),
            unread: Vec::new(),
        };
        let address = ["192.0.2.1".parse().unwrap()];
        let absent = |hidden| Missing::Absent { hidden };
        assert_eq!(found.home(&address).unwrap_err(), absent(false));
        assert_eq!(found.trouble(), None);
        let denied = io::ErrorKind::PermissionDenied.into();
        found.unread.push(("/proc/1/ns/net".into(), denied));
        assert_eq!(found.home(&address).unwrap_err(), absent(true));
        assert_eq!(found.trouble(), None);
        let full = io::Error::from_raw_os_error(libc::EMFILE);
        found.unread.push(("/proc".into(), full));
        let said = found.trouble().unwrap();
        assert!(said.contains("/proc:"), "{said}");
        assert_eq!(found.home(&address).unwrap_err(), Missing::Unknown(said));
    }
}
