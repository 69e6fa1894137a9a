//! Where workloads are on this machine: network namespaces and cgroups. An answer that cannot be had is
//! an error here, and never "there is none".

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Instant,
};

use tracing::debug;

use super::{ARRIVING, AS_BEFORE, Mesh, problems::Problems};
use crate::{
    kernel::{self, Namespace, namespaces},
    model::{Egress, Place},
    plan::{
        Captured,
        enrol::{Home, Member, Problem, Unknown},
    },
};

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

impl Mesh {
    /// Enrols all workloads that are found, but for those that are captured by their packets. Answers
    /// where they are, at which levels of the hierarchy there are cgroups, and which workloads nobody
    /// can tell of whether they are here: by their numbers.
    #[expect(
        clippy::type_complexity,
        reason = "the three parts are taken apart where it is called"
    )]
    pub(super) fn enrol_all<'a>(
        &mut self,
        members: &'a [Member],
        found: &'a Found,
        wanted: &mut Captured,
        problems: &mut Problems,
    ) -> (
        Vec<(&'a Member, &'a Namespace, u32)>,
        u32,
        BTreeMap<u32, Unknown>,
    ) {
        let mut enrolled: Vec<(&Member, &Namespace, u32)> = Vec::new();
        let (mut levels, mut unknown) = (0, BTreeMap::new());
        let mut absent = HashMap::new();
        for member in members {
            let name = &member.workload.name;
            let result = match &member.workload.place {
                Place::Elsewhere => Ok(()),
                Place::Exempt(why) => Err(Missing::Wrong(why.text().to_owned())),
                Place::Address if member.is_by_packets() => Ok(()),
                Place::Cgroup(path) => cgroup(&self.cgroup, path).map(|(id, level)| {
                    levels |= 1 << level;
                    let entry = self.enroller.enrol(member, wanted);
                    wanted.cgroups.insert(id, entry);
                }),
                Place::Address => found.home(&member.workload.addresses).map(|namespace| {
                    let mut others = enrolled.iter();
                    if let Some((other, ..)) = others.find(|(_, n, _)| n.cookie == namespace.cookie)
                    {
                        let other = &other.workload.name;
                        let text =
                            format!("is in the network namespace of {other}, and captured as that");
                        problems.add(name, Problem::of_workload(text));
                        return;
                    }
                    let entry = self
                        .enroller
                        .enrol_namespace(member, home(namespace), wanted);
                    enrolled.push((member, namespace, entry.flags));
                }),
            };
            match result {
                Ok(()) => {}
                Err(Missing::Absent { hidden }) => {
                    if hidden {
                        unknown.insert(self.enroller.number(name), Unknown::Namespace);
                    }
                    let since = self.absent.get(name).copied().unwrap_or_else(Instant::now);
                    absent.insert(name.clone(), since);
                    if since.elapsed() > ARRIVING {
                        problems.add(name, Problem::of_workload(not_found(member, hidden)));
                    }
                }
                Err(Missing::Wrong(text)) => problems.add(name, Problem::of_workload(text)),
                Err(Missing::Unknown(text)) => {
                    let place = match member.workload.place {
                        Place::Cgroup(_) => Unknown::Cgroup,
                        _ => Unknown::Namespace,
                    };
                    unknown.insert(self.enroller.number(name), place);
                    problems.add(name, Problem::of_node(format!("{text}; {AS_BEFORE}")));
                }
            }
        }
        self.absent = absent;
        (enrolled, levels, unknown)
    }
}

fn home(namespace: &Namespace) -> Home<'_> {
    Home {
        cookie: namespace.cookie,
        addresses: &namespace.addresses,
        interfaces: &namespace.interfaces,
    }
}

/// What is said of a workload that no network namespace has the addresses of. `hidden`: there are
/// network namespaces that this agent is not permitted to see.
fn not_found(member: &Member, hidden: bool) -> String {
    let addresses = member.workload.addresses.iter();
    let addresses: Vec<_> = addresses.map(ToString::to_string).collect();
    let mut text = format!(
        "is not captured: no network namespace on this node has its address {}",
        addresses.join(" or ")
    );
    if hidden {
        text += ", of those that the agent is permitted to see (CAP_SYS_PTRACE shows all)";
    }
    if member.policy.egress == Egress::Deny {
        text += "; `egress: deny` is not in force for it (`mesh.guard: true` refuses it until it is found)";
    }
    text
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
