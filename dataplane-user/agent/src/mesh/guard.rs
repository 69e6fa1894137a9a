//! The guard: connections are refused from network namespaces that the agent does not know. The guard lets a namespace
//! go if it is known that no captured workload is in it; it does not let go a namespace that a captured workload has
//! made for itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use dataplane_common::capture::{Enrolled, WORKLOADS};
use kernel::namespaces::{self, Residents};
use model::{Exempt, Place, Snapshot, Uid, Workload};
use plan::{Captured, enrol::Member};

use super::{ARRIVING, Mesh, found::Found};

/// The result of a run of the guard.
#[derive(Debug, Default)]
pub struct Let {
    /// Messages for the operator.
    pub said: Vec<String>,
    /// Why the processes' namespaces are not known.
    pub trouble: Option<String>,
}

/// Returns the workloads of this node that are in network namespaces of their own and not captured by their sockets.
pub fn others<'a>(
    snapshot: &'a Snapshot,
    members: &'a [Member],
) -> impl Iterator<Item = &'a Workload> {
    let captured: BTreeSet<_> = members
        .iter()
        .filter(|member| !member.is_by_packets() && !member.policy.only_queries)
        .filter(|member| member.workload.place != Place::Exempt(Exempt::Namespace))
        .map(|member| &member.workload.name)
        .collect();
    let of_node = snapshot
        .workloads
        .values()
        .filter(|workload| matches!(workload.place, Place::Address | Place::Exempt(_)));
    of_node
        .map(AsRef::as_ref)
        .filter(move |workload| !captured.contains(&workload.name))
}

impl Mesh {
    /// Makes the guard let go network namespaces without a captured workload, as many as there is room for: the oldest
    /// first. `wanted` has the captured ones; `held` has the present contents of the tables. With `only`, the guard
    /// keeps only those closed that have processes of these Pods.
    pub(super) fn let_go_of_others(
        &mut self,
        others: &[&Workload],
        found: &Found,
        held: &Captured,
        only: Option<&BTreeSet<Uid>>,
        wanted: &mut Captured,
    ) -> Let {
        let residents = match namespaces::residents() {
            Ok(residents) => residents,
            Err(error) => {
                // The guard's state stays as it was.
                let before = held.namespaces.iter().filter(|(_, e)| e.is_let_go());
                for (cookie, entry) in before {
                    wanted.namespaces.entry(*cookie).or_insert(*entry);
                }
                return Let {
                    said: Vec::new(),
                    trouble: Some(format!("cannot look at the processes: {error}")),
                };
            }
        };
        let of = |inode: &(u64, u64)| residents.get(inode);
        let known = others
            .iter()
            .filter_map(|workload| found.homes(workload, &[]).ok());
        let known: BTreeMap<u64, (u64, u64)> = known
            .flatten()
            .map(|namespace| (namespace.cookie, namespace.inode))
            .collect();
        let captured = found.seen.iter();
        let captured = captured.filter(|(cookie, _)| {
            let entry = wanted.namespaces.get(*cookie);
            entry.is_some_and(|entry| entry.flags & Enrolled::CAPTURED != 0)
        });
        let own = found.own.as_ref().ok();
        let units = Units::new(
            own.and_then(|own| of(&own.inode)),
            captured.filter_map(|(_, seen)| of(&seen.inode)),
            known.values().filter_map(of),
        );
        // A quarter is for new namespaces that come while others go.
        let room = (WORKLOADS - WORKLOADS / 4) as usize;
        let (mut left_out, mut closed) = (0, BTreeMap::new());
        for (cookie, seen) in &found.seen {
            if wanted.namespaces.contains_key(cookie) {
                continue;
            }
            let residents = of(&seen.inode);
            let is_closed = match only {
                Some(uids) => residents.is_some_and(|residents| is_of(residents, uids)),
                None => !known.contains_key(cookie) && !units.admit(residents, seen.of_node),
            };
            if is_closed {
                if let Some(residents) = residents {
                    let since = self
                        .closed
                        .get(cookie)
                        .map_or_else(Instant::now, |(since, _)| *since);
                    closed.insert(*cookie, (since, residents.process));
                }
            } else if wanted.namespaces.len() < room {
                wanted.namespaces.insert(*cookie, Enrolled::default());
            } else {
                left_out += 1;
            }
        }
        self.closed = closed;
        let mut said = Vec::new();
        if left_out > 0 {
            said.push(format!(
                "guard: {left_out} network namespaces more than table NAMESPACES has room for: connections from the \
                 newest ones are refused. Find out which process makes so many network namespaces"
            ));
        }
        let mut for_long = self
            .closed
            .values()
            .filter(|(since, _)| since.elapsed() > ARRIVING);
        if let Some((_, process)) = for_long.next() {
            let more = for_long.count();
            said.push(format!(
                "guard: connections are refused from {} network namespaces with processes that belong to no known pod, or \
                 to a captured pod that made the namespace itself, such as that of process {process}. If they may \
                 connect, run them in a pod that is not captured",
                more + 1
            ));
        }
        Let {
            said,
            trouble: None,
        }
    }
}

/// Groups of processes, by the paths of their cgroups: pods and others.
#[derive(Debug, Default)]
struct Units {
    /// Groups with processes in the node's own network namespace.
    node: BTreeSet<String>,
    /// Groups with processes in network namespaces of captured workloads, and none in the node's.
    captured: BTreeSet<String>,
    /// Groups with processes in namespaces of workloads that are not captured.
    free: BTreeSet<String>,
}

impl Units {
    fn new<'a>(
        node: Option<&Residents>,
        captured: impl Iterator<Item = &'a Residents>,
        free: impl Iterator<Item = &'a Residents>,
    ) -> Self {
        let units = |residents: &Residents| -> BTreeSet<String> {
            residents
                .cgroups
                .iter()
                .map(|path| unit(path).0.to_owned())
                .collect()
        };
        let node = node.map(units).unwrap_or_default();
        let mut captured: BTreeSet<String> = captured.flat_map(units).collect();
        captured.retain(|unit| !node.contains(unit));
        Self {
            captured,
            free: free.flat_map(units).collect(),
            node,
        }
    }

    /// Whether it is known that no captured workload is in a network namespace with these processes. `of_node`: whether
    /// the namespace was made by a process that may do as much as root on the node.
    fn admit(&self, residents: Option<&Residents>, of_node: bool) -> bool {
        // There are no processes by which to recognise it.
        let Some(residents) = residents else {
            return false;
        };
        residents.cgroups.iter().all(|path| {
            let (unit, is_pod) = unit(path);
            let is_free = self.free.contains(unit);
            !self.is_captured(path) && (is_free || !is_pod && (of_node || self.node.contains(unit)))
        })
    }

    /// Whether a cgroup is, or is in, a captured workload's cgroup.
    fn is_captured(&self, path: &str) -> bool {
        let ends = path.match_indices('/').map(|(at, _)| at).skip(1);
        ends.chain([path.len()])
            .any(|end| self.captured.contains(&path[..end]))
    }
}

/// Returns the part of a cgroup's path that belongs to a pod, and whether there is one; otherwise the whole path. Of
/// several pods' parts, the outermost: a pod may have made the cgroups below its own.
fn unit(path: &str) -> (&str, bool) {
    let mut end = 0;
    for part in path.split('/') {
        end += part.len();
        if is_pod(part) {
            return (&path[..end], true);
        }
        end += 1;
    }
    (path, false)
}

/// Whether one of the processes is in the cgroup of one of these Pods.
fn is_of(residents: &Residents, pods: &BTreeSet<Uid>) -> bool {
    let mut units = residents.cgroups.iter().map(|path| unit(path));
    units.any(|(unit, _)| {
        let name = unit.rsplit('/').next().and_then(named);
        let uid = name.and_then(|name| Uid::parse(&name.replace('_', "-")));
        uid.is_some_and(|uid| pods.contains(&uid))
    })
}

/// Returns the pod's UID in a cgroup's name: `podUID` (driver `cgroupfs`), or `kubepods-…-podUID.slice` (`systemd`).
fn named(name: &str) -> Option<&str> {
    match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod").map(|(_, uid)| uid),
        None => name.strip_prefix("pod"),
    }
}

/// Whether a cgroup's name is a pod's.
fn is_pod(name: &str) -> bool {
    named(name).is_some_and(|uid| {
        let digits = uid.bytes().filter(|byte| !matches!(byte, b'-' | b'_'));
        let mut count = 0;
        digits
            .inspect(|_| count += 1)
            .all(|byte| byte.is_ascii_hexdigit())
            && count == 32
    })
}

/// Network namespaces with processes that the guard keeps closed: since when, and one of the processes.
pub type Closed = BTreeMap<u64, (Instant, u32)>;

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8e3b0c9a_6b0f_4f61_9d1c_2f5d3c8a7b60.slice";
    const DB: &str = "/kubepods/besteffort/pod9e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";

    fn residents(paths: &[&str]) -> Residents {
        Residents {
            cgroups: paths.iter().map(|path| (*path).to_owned()).collect(),
            process: 7,
        }
    }

    #[test]
    fn a_cgroup_belongs_to_the_outermost_pod_that_it_is_in() {
        for (pod, inside) in [
            (WEB, "/cri-containerd-1.scope"),
            (DB, "/1/pod00000000000000000000000000000000"),
        ] {
            let path = format!("{pod}{inside}");
            assert_eq!(unit(&path), (pod, true));
        }
        // A path as seen from another cgroup namespace; a static pod's; and paths that are no pod's.
        let seen = "/../kubepods-pod0123456789abcdef0123456789abcdef.slice";
        assert_eq!(unit(&format!("{seen}/x")), (seen, true));
        for path in [
            "/",
            "/system.slice/podman.service",
            "/machine.slice/libpod-1.scope",
            "/user.slice/pod12",
        ] {
            assert_eq!(unit(path), (path, false));
        }
    }

    #[test]
    fn a_pods_processes_are_found_by_its_uid() {
        let uid = |text| Uid::parse(text).unwrap();
        let pods = BTreeSet::from([uid("8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60")]);
        // Also with other processes; and in a namespace that the Pod's own process has made.
        assert!(is_of(&residents(&["/", &format!("{WEB}/deep/er")]), &pods));
        assert!(!is_of(&residents(&["/", DB, "/user.slice"]), &pods));
        let pods = BTreeSet::from([uid("9e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60")]);
        assert!(is_of(&residents(&[&format!("{DB}/1")]), &pods));
    }

    #[test]
    fn only_what_is_known_not_to_be_captured_is_let_go() {
        let inside = |pod: &str| format!("{pod}/container");
        let node = residents(&["/", "/system.slice/kubelet.service"]);
        let web = residents(&["/", &inside(WEB)]);
        let db = residents(&[&inside(DB)]);
        let container = residents(&["/docker/1"]);
        let units = Units::new(
            Some(&node),
            [&web, &container].into_iter(),
            [&db].into_iter(),
        );
        let admits = |paths: &[&str], of_node| units.admit(Some(&residents(paths)), of_node);
        // Made by the captured pod, in any cgroup of its own.
        assert!(!admits(&[WEB], true) && !admits(&[&format!("{WEB}/other/deep")], false));
        assert!(!admits(&["/docker/1/deep"], true));
        // By a pod that is not captured; by a pod that is not known yet.
        assert!(admits(&[&format!("{DB}/other")], false));
        assert!(!admits(
            &["/kubepods/podae3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60"],
            true
        ));
        // By the node, and by a user who is not root on it.
        assert!(admits(&["/docker/2"], true) && !admits(&["/docker/2"], false));
        assert!(admits(&["/system.slice/kubelet.service"], false));
        // With a process of a captured pod; without any process.
        assert!(!admits(&["/docker/2", &inside(WEB)], true));
        assert!(!units.admit(None, true));
    }
}
