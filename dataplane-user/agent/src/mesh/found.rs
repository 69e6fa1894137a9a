//! One look at all network namespaces of this machine, and at the workloads in them. If the kernel returns no answer,
//! this is an error, and never "there is none".

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    io,
    path::PathBuf,
};

use kernel::{capture::Namespace, namespaces};
use model::Workload;
use smallvec::SmallVec;
use tracing::debug;

use super::places::{Places, Sign};

/// Why a workload cannot be enrolled.
#[derive(Debug, PartialEq, Eq)]
pub enum Missing {
    /// It is not on this node, as far as this agent is permitted to see.
    Absent {
        /// Whether there are namespaces that the agent is not permitted to see.
        hidden: bool,
    },
    /// It cannot be found by its description.
    Wrong(String),
    /// It may be on this node: some namespaces or signs could not be read.
    Unknown(String),
}

/// The network namespaces of this machine, after one look at all of them.
pub struct Found {
    /// The namespaces that the requested workloads are in, or were.
    homes: Vec<Namespace>,
    /// The index among these by sign, and by cookie.
    by_sign: HashMap<Sign, usize>,
    by_cookie: HashMap<u64, usize>,
    places: Places,
    /// All namespaces that could be read, by their cookies, except the agent's own.
    pub seen: BTreeMap<u64, ReadNamespace>,
    /// The agent's own namespace.
    pub own: io::Result<Namespace>,
    /// Namespaces that could not be read.
    unread: Vec<(PathBuf, io::Error)>,
    /// As [`Search::unread`].
    unregistered: Option<String>,
}

/// A network namespace that could be read.
#[derive(Clone, Copy, Debug)]
pub struct ReadNamespace {
    /// Its file's device and number.
    pub inode: (u64, u64),
    /// Whether it was made by a process that may do as much as root on the node.
    pub of_node: bool,
}

/// The purpose of a look.
pub struct Search<'a> {
    /// The workloads to look for.
    pub workloads: Vec<&'a Workload>,
    /// The cookies of network namespaces that belonged to workloads before, or that were registered.
    pub before: BTreeSet<u64>,
    /// Why registrations of network namespaces are not known.
    pub unread: Option<String>,
}

impl Found {
    /// Looks for the network namespaces of these workloads. `own`: the cookie of the agent's.
    pub fn look(wanted: &Search<'_>, own: u64) -> Self {
        let mut places = Places::look(wanted.workloads.iter().copied());
        let signs: HashSet<Sign> = places.all().collect();
        let mut seen = BTreeMap::new();
        let visited = namespaces::visit(|_| {
            let namespace = kernel::capture::this_namespace()?;
            let (cookie, inode) = (namespace.cookie, namespace.inode);
            if cookie == own {
                return Ok(None);
            }
            let its = places.signs_of(&namespace)?;
            let of_node = kernel::capture::is_the_nodes(&namespace)?;
            seen.insert(cookie, ReadNamespace { inode, of_node });
            // The files of other namespaces are closed here: there may be more of them than this process may open.
            let is_home = wanted.before.contains(&cookie) || its.iter().any(|s| signs.contains(s));
            Ok(is_home.then_some((namespace, its)))
        });
        places.confirm();
        for (path, error) in &visited.unread {
            debug!("cannot look into {}: {error}", path.display());
        }
        let (mut homes, mut by_sign, mut by_cookie) = (Vec::new(), HashMap::new(), HashMap::new());
        for (namespace, signs) in visited.found.into_iter().flatten() {
            let number = homes.len();
            by_sign.extend(signs.into_iter().map(|sign| (sign, number)));
            by_cookie.insert(namespace.cookie, number);
            homes.push(namespace);
        }
        Self {
            homes,
            by_sign,
            by_cookie,
            places,
            seen,
            own: kernel::capture::this_namespace(),
            unread: visited.unread,
            unregistered: wanted.unread.clone(),
        }
    }

    /// Returns the network namespaces of a workload: first the one that it is in, as the node knows, then those that it
    /// was in (`before`) and that still exist. If the node does not know where it is, its last namespace counts.
    ///
    /// # Errors
    /// If there is none, or if this cannot be found out.
    pub fn homes(
        &self,
        workload: &Workload,
        before: &[u64],
    ) -> Result<impl Iterator<Item = &Namespace>, Missing> {
        let signs = self.places.of(&workload.name);
        let now = signs.iter().flat_map(|signs| signs.iter());
        let now = now.filter_map(|sign| self.by_sign.get(sign));
        let before = before.iter().rev();
        let before = before.filter_map(|cookie| self.by_cookie.get(cookie));
        let mut numbers: SmallVec<[usize; 2]> = SmallVec::new();
        for number in now.chain(before) {
            if !numbers.contains(number) {
                numbers.push(*number);
            }
        }
        if numbers.is_empty() {
            return Err(match signs.err().map(str::to_owned).or(self.trouble()) {
                None => Missing::Absent {
                    hidden: !self.unread.is_empty(),
                },
                Some(text) => Missing::Unknown(text),
            });
        }
        Ok(numbers.into_iter().map(|number| &self.homes[number]))
    }

    /// Returns a network namespace that is or was a workload's, by its cookie.
    pub fn at(&self, cookie: u64) -> Option<&Namespace> {
        let number = self.by_cookie.get(&cookie)?;
        self.homes.get(*number)
    }

    /// Whether a pod's network namespace may exist: also if not all could be read, as for [`Found::trouble`].
    pub fn may_exist(&self, cookie: u64) -> bool {
        self.seen.contains_key(&cookie) || self.failed().next().is_some()
    }

    /// The network namespaces that could not be read. Those of processes that the agent is not permitted to see do not count:
    /// container runtimes name the namespaces of pods.
    fn failed(&self) -> impl Iterator<Item = &(PathBuf, io::Error)> {
        let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        self.unread
            .iter()
            .filter(move |(_, error)| !is_denied(error))
    }

    /// Returns the network namespaces whose workload is known: all that could be read, if the places of all workloads
    /// are known.
    pub fn told(&self) -> BTreeSet<u64> {
        let told = self.seen.keys().filter(|_| self.places.are_known());
        told.copied().collect()
    }

    /// Why some network namespaces could not be read.
    pub fn trouble(&self) -> Option<String> {
        let mut unread = self.failed();
        let Some((path, error)) = unread.next() else {
            return self.unregistered.clone();
        };
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

#[cfg(test)]
mod tests {
    use model::{Place, WorkloadName};

    use super::*;

    #[test]
    fn one_that_is_nowhere_is_absent_only_if_all_was_read() {
        let workload = Workload::new(WorkloadName::new("shop", "web"), Place::Address);
        let mut found = Found {
            homes: Vec::new(),
            by_sign: HashMap::new(),
            by_cookie: HashMap::new(),
            places: Places::look([]),
            seen: BTreeMap::new(),
            own: Err(io::ErrorKind::Other.into()),
            unread: Vec::new(),
            unregistered: None,
        };
        let missing = |found: &Found| found.homes(&workload, &[]).map(drop).unwrap_err();
        let absent = |hidden| Missing::Absent { hidden };
        assert_eq!(missing(&found), absent(false));
        assert_eq!(found.trouble(), None);
        let denied = io::ErrorKind::PermissionDenied.into();
        found.unread.push(("/proc/1/ns/net".into(), denied));
        assert_eq!(missing(&found), absent(true));
        assert_eq!(found.trouble(), None);
        assert!(!found.may_exist(7));
        let full = io::Error::from_raw_os_error(libc::EMFILE);
        found.unread.push(("/proc".into(), full));
        let said = found.trouble().unwrap();
        assert!(said.contains("/proc:"), "{said}");
        assert_eq!(missing(&found), Missing::Unknown(said));
        assert!(found.may_exist(7));
    }
}
