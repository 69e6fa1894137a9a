//! Where workloads are on this machine: network namespaces and cgroups. If the kernel returns no answer, this is an
//! error, and never "there is none".

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    time::Instant,
};

use kernel::capture::Namespace;
use model::{Egress, Exempt, Place, Uid, Workload, WorkloadName};
use plan::{
    Captured,
    enrol::{Home, Member, Problem, Unknown},
};

use super::{
    ARRIVING, AS_BEFORE, Mesh,
    boot::has_started,
    cni_results,
    found::{Found, Missing, Search},
    problems::Problems,
};

/// Levels of the cgroup hierarchy that programs can distinguish.
const LEVELS: usize = 15;

/// The result of the search for workloads.
#[derive(Default)]
pub struct Placed<'a> {
    /// Workloads with a network namespace of their own, and the flags of their entries.
    pub enrolled: Vec<(&'a Member, &'a Namespace, u32)>,
    /// The virtual interfaces of these workloads that exist, by the cookie of the network namespace: names and numbers.
    pub machines: HashMap<u64, BTreeMap<String, u32>>,
    /// At which levels of the hierarchy there are cgroups.
    pub levels: u32,
    /// Workloads that may or may not be here, by their numbers.
    pub unknown: BTreeMap<u32, Unknown>,
    /// Workloads that the agent did not find on this node, and that have `egress: deny`.
    pub sought: Sought,
    /// Pods of excluded namespaces whose capture only the configuration's rules ask for.
    pub excluded: Vec<&'a WorkloadName>,
}

/// Workloads with `egress: deny` that are on this node, as the source says, and that the agent did not find.
#[derive(Debug, Default)]
pub struct Sought {
    /// Whether the operator denies egress to one of them: then the guard refuses every network namespace that is not
    /// known.
    pub by_operator: bool,
    /// Pods that deny it to themselves. A tenant's Pod must not close the node, so the guard refuses only the network
    /// namespaces with processes of these Pods.
    pub uids: BTreeSet<Uid>,
}

impl Mesh {
    /// Returns the workloads to look for.
    pub(super) fn wanted<'a>(
        &self,
        members: &'a [Member],
        others: &[&'a Workload],
        held: &Captured,
    ) -> Search<'a> {
        let by_address = members
            .iter()
            .filter(|member| member.workload.place == Place::Address);
        let by_address: Vec<&Workload> = by_address.map(|member| &*member.workload).collect();
        let before = by_address.iter();
        let before = before.flat_map(|workload| self.before(workload, held));
        Search {
            unread: self.cni.unread().map(str::to_owned),
            before: before.chain(self.routed.keys().copied()).collect(),
            workloads: by_address
                .into_iter()
                .chain(others.iter().copied())
                .collect(),
        }
    }

    /// Returns the network namespaces that a workload was in: from this agent's records, or else from the tables of an
    /// earlier agent; and the one that the CNI plug-in registered for it.
    fn before(&self, workload: &Workload, held: &Captured) -> Vec<u64> {
        let mut before = self.recorded(workload, held);
        if let Some(registered) = self.cni.cookie(workload)
            && !before.contains(&registered)
        {
            before.push(registered);
        }
        before
    }

    fn recorded(&self, workload: &Workload, held: &Captured) -> Vec<u64> {
        if let Some(known) = self.homes.get(&workload.name) {
            return known.clone();
        }
        let entries = workload.addresses.iter();
        let entries = entries.filter_map(|addr| held.locals.get(&(*addr).into()));
        let earlier = self.enroller.earlier();
        let mut before = Vec::new();
        for local in entries.filter(|local| local.netns != 0 && local.workload <= earlier) {
            let its = held.namespaces.iter();
            let its = its.filter(|(_, entry)| entry.workload == local.workload);
            // The last known namespace comes last.
            before.extend(its.map(|(cookie, _)| *cookie).chain([local.netns]));
        }
        before
    }

    /// Enrols all workloads that are found, except those that are captured by their packets.
    pub(super) fn enrol_all<'a>(
        &mut self,
        members: &'a [Member],
        found: &'a Found,
        held: &Captured,
        wanted: &mut Captured,
        problems: &mut Problems,
    ) -> Placed<'a> {
        let mut placed = Placed::default();
        let mut absent = HashMap::new();
        let mut homes = HashMap::new();
        for member in members {
            let name = &member.workload.name;
            let result = match &member.workload.place {
                Place::Elsewhere => Ok(()),
                Place::Exempt(Exempt::Namespace)
                    if member.workload.rules.merged().captured != Some(true) =>
                {
                    placed.excluded.push(name);
                    Ok(())
                }
                Place::Exempt(why) => Err(Missing::Wrong(why.text().to_owned())),
                Place::Address if member.is_by_packets() => Ok(()),
                Place::Cgroup(path) => cgroup(&self.cgroup, path).map(|(id, level)| {
                    placed.levels |= 1 << level;
                    let entry = self.enroller.enrol(member, wanted);
                    wanted.cgroups.insert(id, entry);
                }),
                Place::Address => {
                    let before = self.before(&member.workload, held);
                    let there = found.homes(&member.workload, &before);
                    there.map(|there| {
                        let there: Vec<&Namespace> = there.collect();
                        homes.insert(name.clone(), (member, there));
                    })
                }
            };
            let Err(missing) = result else { continue };
            if is_to_be_denied(member)
                && matches!(missing, Missing::Absent { .. } | Missing::Unknown(_))
            {
                match member.workload.uid.filter(|_| !member.denied_by_operator) {
                    Some(uid) => {
                        placed.sought.uids.insert(uid);
                    }
                    None => placed.sought.by_operator = true,
                }
            }
            match missing {
                Missing::Absent { hidden } => {
                    if hidden {
                        let number = self.enroller.number(name);
                        placed.unknown.insert(number, Unknown::Namespace);
                    }
                    let since = self.absent.get(name).copied().unwrap_or_else(Instant::now);
                    absent.insert(name.clone(), since);
                    if since.elapsed() > ARRIVING {
                        problems.add(name, Problem::of_workload(not_found(member, hidden)));
                    }
                }
                Missing::Wrong(text) => problems.add(name, Problem::of_workload(text)),
                Missing::Unknown(text) => {
                    let place = match member.workload.place {
                        Place::Cgroup(_) => Unknown::Cgroup,
                        _ => Unknown::Namespace,
                    };
                    placed.unknown.insert(self.enroller.number(name), place);
                    problems.add(name, Problem::of_node(format!("{text}; {AS_BEFORE}")));
                }
            }
        }
        self.absent = absent;
        self.enrol_found(&homes, members, wanted, problems, &mut placed);
        let cookies = |there: &[&Namespace]| there.iter().rev().map(|n| n.cookie).collect();
        let homes = homes.into_iter();
        self.homes = homes
            .map(|(name, (_, there))| (name, cookies(&there)))
            .collect();
        placed
    }

    /// Enrols workloads with network namespaces of their own. A workload that has moved, as the node knows, is captured
    /// at its new place, and its remains at the old place are not freer than that.
    fn enrol_found<'a>(
        &mut self,
        homes: &HashMap<WorkloadName, (&'a Member, Vec<&'a Namespace>)>,
        members: &[Member],
        wanted: &mut Captured,
        problems: &mut Problems,
        placed: &mut Placed<'a>,
    ) {
        let mut owners: HashMap<u64, &WorkloadName> = HashMap::new();
        let mut left = Vec::new();
        for name in members.iter().map(|member| &member.workload.name) {
            let Some((member, there)) = homes.get(name) else {
                continue;
            };
            let Some((home, earlier)) = there.split_first() else {
                continue;
            };
            if let Some(other) = owners.get(&home.cookie) {
                let text = format!("is in the network namespace of {other}, and captured as that");
                problems.add(name, Problem::of_workload(text));
                continue;
            }
            owners.insert(home.cookie, &member.workload.name);
            let policy = &member.policy;
            let named = policy.excluded_interfaces.union(&policy.virtual_interfaces);
            let named: BTreeSet<&str> = named.map(|name| &**name).collect();
            let all = if named.is_empty() {
                Ok(BTreeMap::new())
            } else {
                kernel::capture::indices(home)
            };
            let mut interfaces = all.unwrap_or_else(|error| {
                let text = format!(
                    "cannot look for its interfaces: {error}; inbound connections are captured at all of them, and those of virtual \
                     machines refused"
                );
                problems.add(name, Problem::of_node(text));
                BTreeMap::new()
            });
            interfaces.retain(|name, _| named.contains(&**name));
            let its = Home {
                cookie: home.cookie,
                interfaces: &interfaces,
            };
            let entry = self.enroller.enrol_namespace(member, its, wanted);
            placed.enrolled.push((member, home, entry.flags));
            interfaces.retain(|name, _| policy.virtual_interfaces.contains(&**name));
            if !interfaces.is_empty() {
                if let Some(problem) = self.trouble_of_interfaces(entry.flags) {
                    problems.add(name, problem);
                }
                placed.machines.insert(home.cookie, interfaces);
            }
            left.extend(earlier.iter().map(|namespace| (namespace.cookie, entry)));
        }
        for (cookie, entry) in left {
            wanted.namespaces.entry(cookie).or_insert(entry);
        }
    }
}

/// Whether a workload that its source places on this node has to be denied unknown destinations. A Pod without an
/// address has not started, so it opens no connection.
pub fn is_to_be_denied(member: &Member) -> bool {
    let is_here = has_started(&member.workload);
    is_here && !member.is_by_packets() && member.policy.egress == Egress::Deny
}

/// The problem of a workload whose network namespace is not known. `hidden`: there are network namespaces that this
/// agent is not permitted to see.
fn not_found(member: &Member, hidden: bool) -> String {
    let addresses = member.workload.addresses.iter();
    let addresses: Vec<_> = addresses.map(ToString::to_string).collect();
    let its = if member.policy.only_queries {
        "its DNS queries go to its resolvers"
    } else {
        "is not captured"
    };
    let mut text = format!(
        "{its}: the node's routes lead to its address {} by no interface of a pod's, and CNI has no result for \
         it in {}",
        addresses.join(" or "),
        cni_results::RESULTS
    );
    if hidden {
        text += ", or its network namespace is none of those that the agent is permitted to see (CAP_SYS_PTRACE shows all)";
    }
    if is_to_be_denied(member) {
        text += match member.workload.uid {
            Some(_) if !member.denied_by_operator => {
                "; because of its own `egress: deny`, connections are refused from network namespaces with processes of this \
                 Pod, if the agent sees all processes of the node (`hostPID`)"
            }
            _ => {
                "; because of its `egress: deny`, connections are refused from all network namespaces that the agent does not \
                 know"
            }
        };
    } else if member.policy.egress == Egress::Deny {
        text += "; `egress: deny` is not in force for it (`mesh.guard: true` refuses it until it is found)";
    }
    text
}

/// Returns the id of the cgroup at `path`, which is relative to `below`, and its level in the hierarchy.
///
/// # Errors
/// If there is none, or if it cannot be read.
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

/// Returns how many cgroups a cgroup is in. The root of the hierarchy, which has no type, may be mounted anywhere.
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
        // Like a hierarchy: all cgroups except the root have a type.
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
        // The cgroup `/a/a` below another beginning.
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
}
