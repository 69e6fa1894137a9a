//! Whether the sockets of this node's pods are in the cgroup that the programs are attached to. The kernel's data of
//! the sockets themselves answers this, without a look at processes or at the paths of their cgroups.
//!
//! A pod is a network namespace that has the other end of a link which is a pod's side on this node. It can be looked into
//! if it has a name in `/run/netns`, which container runtimes give it, or if a process in it may be looked at.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use dataplane_common::Protocol;
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkInfo, LinkMessage},
    nsid::{NsidAttribute, NsidMessage},
};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{FAMILIES, Listed, Request, SOCK_DIAG_BY_FAMILY, SocketId};
use crate::{
    cgroup::{cgroup2_mounts, own_cgroup},
    error::{Doing, Error},
    namespaces,
    netlink::{Netlink, content},
    rtnetlink,
};

/// The cgroups of the sockets of this node's pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodCgroups {
    /// How many pods have a socket in the cgroup that the programs are attached to, and none elsewhere.
    pub inside: usize,
    /// How many have one in another cgroup: their connections are served by packets only.
    pub outside: usize,
    /// Number of pods whose cgroup is unknown: their network namespaces could not be inspected, or have no socket.
    pub unknown: usize,
    /// The cgroups outside, as far as they are mounted where this process sees them.
    pub others: BTreeSet<PathBuf>,
    /// The root of the hierarchy, if it is mounted where this process sees it.
    pub root: Option<PathBuf>,
}

/// Finds the pods' cgroups. `cgroup`: the cgroup of the programs. `pods`: the indices of the pods' interfaces in this
/// network namespace.
///
/// If the programs are attached to the hierarchy's root, no cgroup is outside of it. Then no namespace is inspected,
/// and the result is empty.
///
/// # Errors
/// If there is no such cgroup, or the mounts cannot be read.
pub fn pod_cgroups(cgroup: &Path, pods: &BTreeSet<u32>) -> Result<PodCgroups, Error> {
    let doing = || format!("cannot look at the cgroup {}", cgroup.display());
    let attached = fs::metadata(cgroup).doing(doing)?.ino();
    let (root, base) = root_and_base(cgroup)?;
    let mut found = PodCgroups {
        root: root.clone(),
        ..PodCgroups::default()
    };
    if is_root(cgroup) {
        found.inside = pods.len();
        return Ok(found);
    }
    let own = File::open("/proc/thread-self/ns/net")
        .doing(|| "cannot open this network namespace".to_owned())?;
    let visited = namespaces::visit(|_| {
        let here = other_ends(own.as_fd(), pods)?;
        Ok((!here.is_empty()).then_some((here, sockets()?)))
    });
    let mut seen = Vec::new();
    let mut wanted = BTreeSet::from([attached]);
    // The agent's own, such as those of its proxy.
    let agent = own_cgroup();
    for (ends, mut cgroups) in visited.found.into_iter().flatten() {
        cgroups.retain(|id| Some(*id) != agent);
        wanted.extend(&cgroups);
        seen.push((ends, cgroups));
    }
    let paths = find(&base, wanted);
    let below = paths.get(&attached).map_or(cgroup, PathBuf::as_path);
    let mut known = BTreeSet::new();
    for (ends, cgroups) in seen {
        let mut inside = false;
        let mut outside = false;
        for id in cgroups {
            match paths.get(&id) {
                Some(path) if path.starts_with(below) => inside = true,
                Some(path) => {
                    outside = true;
                    found.others.insert(path.clone());
                }
                // It was removed, and sockets are left of it; or nothing that is mounted here shows it.
                None => outside |= root.is_none(),
            }
        }
        if outside {
            found.outside += 1;
        } else if inside {
            found.inside += 1;
        } else {
            continue;
        }
        known.extend(ends);
    }
    found.unknown = pods.difference(&known).count();
    Ok(found)
}

/// The place of this process's sockets, if they are outside the cgroup that the programs are attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    /// The cgroup, if it is mounted where this process sees it.
    pub own: Option<PathBuf>,
    /// The root of the hierarchy, if it is mounted where this process sees it.
    pub root: Option<PathBuf>,
}

/// Finds the cgroup of a socket that this process creates now. `cgroup`: the cgroup of the programs. Returns `None` if
/// the programs see this process's sockets.
///
/// # Errors
/// If there is no such cgroup, or the kernel cannot report the socket's.
pub fn own_elsewhere(cgroup: &Path) -> Result<Option<Elsewhere>, Error> {
    if is_root(cgroup) {
        return Ok(None);
    }
    let doing = || "cannot find out the cgroup of this process's sockets".to_owned();
    let own = own_socket().doing(doing)?;
    if find(cgroup, BTreeSet::from([own])).contains_key(&own) {
        return Ok(None);
    }
    let (root, base) = root_and_base(cgroup)?;
    Ok(Some(Elsewhere {
        own: find(&base, BTreeSet::from([own])).remove(&own),
        root,
    }))
}

/// Returns the root of the hierarchy, if it is mounted where this process sees it, and the directory in which to search
/// for cgroups: the root or, without it, the mount of `cgroup`, which shows the cgroups of a node that is a container.
fn root_and_base(cgroup: &Path) -> Result<(Option<PathBuf>, PathBuf), Error> {
    let mounts = cgroup2_mounts()?;
    let root = mounts.iter().find(|path| is_root(path)).cloned();
    let base = root.clone().or_else(|| mount_of(mounts, cgroup));
    Ok((root, base.unwrap_or_else(|| cgroup.to_owned())))
}

/// The mount that a cgroup is in: of mounts over each other the inner one.
fn mount_of(mounts: Vec<PathBuf>, cgroup: &Path) -> Option<PathBuf> {
    let around = mounts.into_iter().filter(|mount| cgroup.starts_with(mount));
    around.max_by_key(|mount| mount.iter().count())
}

/// Returns the id of the cgroup of this process's sockets. (The path in `/proc/self/cgroup` is useless if the process
/// has its own cgroup namespace and another hierarchy's root is mounted there.)
fn own_socket() -> io::Result<u64> {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .or_else(|_| TcpListener::bind((Ipv6Addr::LOCALHOST, 0)))?;
    let port = socket.local_addr()?.port();
    let mut found = None;
    let is_listening = 1 << 10;
    let listed = list(Protocol::TCP, is_listening, |socket, cgroup| {
        if u16::from_be(socket.id.source_port) == port {
            found = Some(cgroup);
        }
    });
    match found {
        Some(cgroup) => Ok(cgroup),
        None => listed.and(Err(io::ErrorKind::NotFound.into())),
    }
}

/// Whether a directory is the root of the cgroup v2 hierarchy, which alone has no type.
fn is_root(directory: &Path) -> bool {
    directory.join("cgroup.procs").exists() && !directory.join("cgroup.type").exists()
}

/// Returns the pods' interfaces in the network namespace `own` whose other ends are in this thread's namespace. (A pod
/// without a pair has an interface on top of one of the node's interfaces; the result then has the node's interface.)
pub fn other_ends(own: BorrowedFd<'_>, pods: &BTreeSet<u32>) -> io::Result<Vec<u32>> {
    let mut netlink = rtnetlink::Netlink::open()?;
    let mut question = NsidMessage::default();
    let fd = u32::try_from(own.as_raw_fd()).unwrap_or(u32::MAX);
    question.attributes = vec![NsidAttribute::Fd(fd)];
    let answers = netlink.ask(&RouteNetlinkMessage::GetNsId(question))?;
    let number = answers.iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewNsId(found) => {
            found
                .attributes
                .iter()
                .find_map(|attribute| match attribute {
                    NsidAttribute::Id(id) if *id >= 0 => Some(*id),
                    _ => None,
                })
        }
        _ => None,
    });
    let Some(number) = number else {
        return Ok(Vec::new());
    };
    let mut ends = Vec::new();
    for answer in netlink.list(&RouteNetlinkMessage::GetLink(LinkMessage::default()))? {
        let RouteNetlinkMessage::NewLink(link) = answer else {
            continue;
        };
        let (mut peer, mut of_node, mut on_top) = (None, false, false);
        for attribute in link.attributes {
            match attribute {
                LinkAttribute::Link(index) => peer = Some(index),
                LinkAttribute::LinkNetNsId(id) => of_node = id == number,
                LinkAttribute::LinkInfo(infos) => {
                    on_top = infos.iter().any(|info| {
                        matches!(info, LinkInfo::Kind(kind)
                            if matches!(kind.to_string().as_str(), "ipvlan" | "macvlan"))
                    });
                }
                _ => {}
            }
        }
        ends.extend(peer.filter(|peer| of_node && (on_top || pods.contains(peer))));
    }
    Ok(ends)
}

/// The cgroups of the sockets in this thread's network namespace, by their ids.
fn sockets() -> io::Result<BTreeSet<u64>> {
    // Established, SYN sent, close-wait, listening; and closed, as UDP's are that are not connected
    // (`include/net/tcp_states.h`). A socket that waits for late segments belongs to no process any more.
    const STATES: u32 = 1 << 1 | 1 << 2 | 1 << 7 | 1 << 8 | 1 << 10;
    let mut cgroups = BTreeSet::new();
    for protocol in [Protocol::TCP, Protocol::UDP] {
        list(protocol, STATES, |_, cgroup| {
            cgroups.insert(cgroup);
        })?;
    }
    Ok(cgroups)
}

/// Lists the sockets in this thread's network namespace that are in one of these states, each with its cgroup's id.
fn list(protocol: Protocol, states: u32, mut each: impl FnMut(&Listed, u64)) -> io::Result<()> {
    const CGROUP_ID: u16 = 21; // INET_DIAG_CGROUP_ID, Linux 5.9
    let mut netlink = Netlink::open(NETLINK_SOCK_DIAG)?;
    for family in FAMILIES {
        let request = Request {
            family,
            protocol: protocol.number(),
            extensions: 0,
            padding: 0,
            states,
            id: SocketId::ANY,
        };
        let listed = netlink.dump(SOCK_DIAG_BY_FAMILY, request.as_bytes(), |answer| {
            let Ok((socket, rest)) = Listed::read_from_prefix(answer) else {
                return;
            };
            let id = content(rest, CGROUP_ID);
            if let Some(id) = id.and_then(|id| Some(u64::read_from_prefix(id).ok()?.0)) {
                each(&socket, id);
            }
        });
        match listed {
            // The kernel has no list of this protocol's sockets (no such module).
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            listed => listed?,
        }
    }
    Ok(())
}

/// Returns the directories of the cgroups with these ids, at and below a directory. A directory that cannot be read,
/// for example because it is being removed, has none.
fn find(base: &Path, mut wanted: BTreeSet<u64>) -> BTreeMap<u64, PathBuf> {
    let mut found = BTreeMap::new();
    let mut directories = vec![base.to_owned()];
    while let Some(directory) = directories.pop() {
        if wanted.is_empty() {
            break;
        }
        if let Ok(metadata) = fs::metadata(&directory)
            && wanted.remove(&metadata.ino())
        {
            found.insert(metadata.ino(), directory.clone());
        }
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        directories.extend(below.map(|entry| entry.path()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_found_by_their_ids() {
        let base = tempfile::tempdir().unwrap();
        let deep = base
            .path()
            .join("kubepods.slice/pod1.slice/container.scope");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("cgroup.procs"), "").unwrap();
        let id = |path: &Path| fs::metadata(path).unwrap().ino();
        let all = find(
            base.path(),
            BTreeSet::from([id(base.path()), id(&deep), 1 << 60]),
        );
        let expected = [(id(base.path()), base.path().to_owned()), (id(&deep), deep)];
        assert_eq!(all, BTreeMap::from(expected));
    }

    #[test]
    fn cgroups_are_looked_for_in_the_mount_of_the_one_that_is_served() {
        let mounts = ["/sys/fs/cgroup", "/host/sys/fs/cgroup/unified", "/host"].map(PathBuf::from);
        let of = |cgroup: &str| mount_of(mounts.to_vec(), Path::new(cgroup));
        let unified = of("/host/sys/fs/cgroup/unified/system");
        assert_eq!(unified, Some(mounts[1].clone()));
        assert_eq!(of("/host/elsewhere"), Some(mounts[2].clone()));
        assert_eq!(of("/elsewhere"), None);
    }

    #[test]
    fn only_the_root_of_the_hierarchy_has_no_type() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| fs::write(directory.path().join(name), "").unwrap();
        assert!(!is_root(directory.path()), "no cgroup at all");
        file("cgroup.procs");
        assert!(is_root(directory.path()));
        file("cgroup.type");
        assert!(!is_root(directory.path()));
    }
}
