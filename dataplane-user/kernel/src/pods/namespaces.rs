//! The network namespaces of this node's pods, and namespaces nested in them: whether rules of their own translate the
//! packets that they send, and whether something else than a socket's call sends packets there.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    io::{self, BufRead as _, BufReader},
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::PathBuf,
};

use crate::{
    error::{Doing, Error},
    namespaces::{self, netns_cookie},
    netfilter,
    routing::xfrm,
    sockets::other_ends,
};

/// A network namespace of a pod's processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodNamespace {
    /// Its cookie.
    pub cookie: u64,
    /// The pod's interface on the node by which its packets come.
    pub interface: u32,
    /// Why its packets have to keep the destinations that its sockets ask for; `None`: they need not.
    pub own: Option<Own>,
}

/// The reason why the packets of a network namespace have to keep the destinations of its sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// NAT rules at the output hook translate the pod's own packets.
    Rules,
    /// Its packets leave by another network namespace of the pod's, whose rules may translate them.
    Nested,
    /// It has a raw socket for UDP, or an IPsec association: their packets and those of a socket with the same
    /// ports are one flow, for which only the packet path can choose one endpoint.
    Raw,
}

/// The device and the number of a namespace's file.
type Key = (u64, u64);

/// A namespace that was visited.
struct Visited {
    key: Key,
    cookie: u64,
    /// The pod's interfaces on the node whose other ends it has.
    ends: Vec<u32>,
    has_rules: bool,
    has_ipsec: bool,
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
    // Without IPsec in the kernel, each query would make it look for the module.
    let mut may_have_ipsec = true;
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
        let has_rules = !ends.is_empty() && netfilter::has_nat_at_output()?;
        let mut has_ipsec = false;
        if may_have_ipsec && !ends.is_empty() && !has_rules {
            // A query that fails must not hide the namespace, and those that are nested in it.
            let found = xfrm::has_associations().unwrap_or(Some(false));
            may_have_ipsec = found.is_some();
            has_ipsec = found.unwrap_or_default();
        }
        Ok(Visited {
            key,
            cookie,
            ends,
            has_rules,
            has_ipsec,
        })
    });
    let of_pods: HashMap<Key, u32> = visited
        .found
        .iter()
        .filter_map(|namespace| Some((namespace.key, *namespace.ends.first()?)))
        .collect();
    let mut found = Vec::new();
    for namespace in &visited.found {
        let process = visited.processes.get(&namespace.key).copied();
        let (interface, own) = if let Some(interface) = namespace.ends.first() {
            let raw = || {
                let raw = namespace.has_ipsec || process.is_some_and(has_raw_sockets);
                raw.then_some(Own::Raw)
            };
            (
                *interface,
                namespace.has_rules.then_some(Own::Rules).or_else(raw),
            )
        } else {
            let around = process.and_then(|process| around_of(process, namespace.key, &of_pods));
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

/// How many lines of a list of raw sockets are read.
const RAW_SOCKETS: usize = 1000;

/// Whether a process's network namespace has a raw socket for UDP. One for any protocol (`IPPROTO_RAW`) does not count,
/// because `iptables-legacy` opens one whenever it runs. The list of a process that has ended is empty: the next look finds
/// another process, or none. A pod with a very long list counts as well, so that it does not hold up the look at others.
///
/// The kernel lists the socket's protocol as its local port (`raw_sock_seq_show`, net/ipv4/raw.c). Many kernels lack the
/// other list (`INET_RAW_DIAG`).
fn has_raw_sockets(process: u32) -> bool {
    ["raw", "raw6"].into_iter().any(|list| {
        let Ok(file) = File::open(format!("/proc/{process}/net/{list}")) else {
            return false;
        };
        let mut lines = BufReader::new(file).lines().map_while(Result::ok).skip(1);
        lines
            .by_ref()
            .take(RAW_SOCKETS)
            .any(|line| sends_udp(&line))
            || lines.next().is_some()
    })
}

/// Whether a line of /proc/net/raw is about a socket for UDP: `  17: 00000000:0011 …`.
fn sends_udp(line: &str) -> bool {
    let local = line.split_ascii_whitespace().nth(1);
    let protocol = local.and_then(|local| local.rsplit_once(':'));
    let protocol = protocol.and_then(|(_, port)| i32::from_str_radix(port, 16).ok());
    protocol == Some(libc::IPPROTO_UDP)
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
    fn raw_sockets_are_found_by_their_protocol() {
        let line = |local: &str| {
            format!(
                "   17: {local} 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0 0"
            )
        };
        assert!(sends_udp(&line("00000000:0011")));
        assert!(!sends_udp(&line("0A0AF40A:00FF")));
        assert!(sends_udp(&line("00000000000000000000000000000000:0011")));
        // ICMP: ping.
        assert!(!sends_udp(&line("00000000:0001")));
        assert!(!sends_udp(""));
    }
}
