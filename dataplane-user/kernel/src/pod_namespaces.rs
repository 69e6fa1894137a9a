//! The network namespaces of this node's pods, and namespaces nested in them: whether rules of their own translate the
//! packets that they send.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use super::{
    error::{Doing, Error},
    namespaces, netfilter, netns_cookie,
    sockets::other_ends,
};

/// A network namespace of a pod's processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodNamespace {
    /// Its cookie.
    pub cookie: u64,
    /// The pod's interface on the node by which its packets come.
    pub interface: u32,
    /// Why its rules have to see the destinations that its sockets ask for; `None`: they need not.
    pub own: Option<Own>,
}

/// The reason why the rules in a network namespace have to see the destinations of its sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// NAT rules at the output hook translate the pod's own packets.
    Rules,
    /// Its packets leave by another network namespace of the pod's, whose rules may translate them.
    Nested,
}

/// The device and the number of a namespace's file.
type Key = (u64, u64);

/// A namespace that was visited.
struct Visited {
    key: Key,
    cookie: u64,
    /// The process by which the namespace was entered, if it has one.
    process: Option<u32>,
    /// The pod's interfaces on the node whose other ends it has.
    ends: Vec<u32>,
    has_rules: bool,
}

/// The constant facts about a pod's namespace: its cookie, and the pod's interfaces on the node.
#[derive(Debug, Default)]
pub struct KnownPods(HashMap<Key, (u64, Vec<u32>)>);

/// Finds the pods' namespaces. `pods`: the indices of the pods' interfaces on the node. Leaves out a namespace that
/// cannot be inspected. `known`: the results of the last call.
///
/// # Errors
/// If no namespace can be inspected.
pub fn pod_namespaces(
    pods: &BTreeSet<u32>,
    known: &mut KnownPods,
) -> Result<Vec<PodNamespace>, Error> {
    let own = File::open("/proc/thread-self/ns/net")
        .doing(|| "cannot open this network namespace".to_owned())?;
    // Another pod's namespace may reuse the inode number of a removed one, but not its interfaces.
    known
        .0
        .retain(|_, (_, ends)| ends.iter().all(|end| pods.contains(end)));
    let visited = namespaces::visit(|path| {
        let metadata = fs::metadata(path)?;
        let key = (metadata.dev(), metadata.ino());
        let (cookie, ends) = match known.0.get(&key) {
            Some(known) => known.clone(),
            // Also for a namespace that may be nested: this shows only when all are known.
            None => (
                netns_cookie().map_err(io::Error::other)?,
                other_ends(own.as_fd(), pods)?,
            ),
        };
        if !ends.is_empty() {
            known.0.insert(key, (cookie, ends.clone()));
        }
        Ok(Visited {
            key,
            cookie,
            process: process(path),
            has_rules: !ends.is_empty() && netfilter::has_nat_at_output()?,
            ends,
        })
    });
    let of_pods: HashMap<Key, u32> = visited
        .found
        .iter()
        .filter_map(|namespace| Some((namespace.key, *namespace.ends.first()?)))
        .collect();
    let mut found = Vec::new();
    for namespace in &visited.found {
        let (interface, own) = if let Some(interface) = namespace.ends.first() {
            (*interface, namespace.has_rules.then_some(Own::Rules))
        } else {
            let around = namespace.process;
            let around = around.and_then(|process| around_of(process, namespace.key, &of_pods));
            match around {
                Some(interface) => (interface, Some(Own::Nested)),
                None => continue,
            }
        };
        found.push(PodNamespace {
            cookie: namespace.cookie,
            interface,
            own,
        });
    }
    Ok(found)
}

/// The process whose namespace a path like `/proc/PID/ns/net` is.
fn process(path: &Path) -> Option<u32> {
    let rest = path.strip_prefix("/proc").ok()?;
    rest.iter().next()?.to_str()?.parse().ok()
}

/// Returns the interface of a pod if an ancestor of a process is in that pod's namespace and the process is in a
/// different one. A pod's first processes have ancestors in the node's namespace only.
fn around_of(mut process: u32, own: Key, of_pods: &HashMap<Key, u32>) -> Option<u32> {
    /// Namespaces are not nested more often than that.
    const STEPS: u32 = 64;
    for _ in 0..STEPS {
        process = parent(process)?;
        let namespace = fs::metadata(format!("/proc/{process}/ns/net")).ok()?;
        let key = (namespace.dev(), namespace.ino());
        if let Some(interface) = of_pods.get(&key)
            && key != own
        {
            return Some(*interface);
        }
    }
    None
}

/// Returns a process's parent; `None` if it has no parent, or has ended.
fn parent(process: u32) -> Option<u32> {
    let path: PathBuf = format!("/proc/{process}/stat").into();
    let text = fs::read_to_string(path).ok()?;
    parent_in(&text)
}

/// proc_pid_stat(5): number, name in brackets, state, parent. A name may have brackets and blanks in it.
fn parent_in(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    let parent = rest.split_ascii_whitespace().nth(1)?.parse().ok()?;
    (parent != 0).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_read_behind_any_name() {
        assert_eq!(parent_in("17 (a b) c) S 12 17 17 0"), Some(12));
        assert_eq!(parent_in("1 (init) S 0 1 1"), None);
        assert_eq!(parent_in("17 (x"), None);
        assert!(parent(std::process::id()).is_some());
    }

    #[test]
    fn paths_of_processes_are_told_from_names() {
        assert_eq!(process(Path::new("/proc/17/ns/net")), Some(17));
        assert_eq!(process(Path::new("/run/netns/17")), None);
    }
}
