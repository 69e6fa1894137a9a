//! Decides which entries stay although the agent cannot read their workloads now.

use std::collections::{BTreeMap, BTreeSet};

/// A place that could not be searched for a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// In a network namespace.
    Namespace,
    /// In a cgroup.
    Cgroup,
    /// Behind an interface.
    Packets,
}

/// The entries that stay because the agent could not inspect their workloads or namespaces.
pub struct Retained<'a> {
    /// Network namespaces that the agent could read, without its own.
    pub seen: &'a BTreeSet<u64>,
    /// Cookie of the agent's own network namespace.
    pub own_cookie: u64,
    /// Highest number that an earlier agent assigned.
    pub earlier: u32,
    /// Whether a guard exists, and some namespaces that it released may be unread.
    pub guarded_unread: bool,
    /// Workloads that were not found, by number, and the place where each may be.
    pub unknown: &'a BTreeMap<u32, Unknown>,
}

impl Retained<'_> {
    /// Returns whether an entry stays. `workload`: its number, or 0 for a namespace that the guard has released.
    /// `cookie`: of its network namespace, or 0 if it has no namespace of its own.
    pub fn has(&self, workload: u32, cookie: u64) -> bool {
        if self.seen.contains(&cookie) || cookie == self.own_cookie {
            return false;
        }
        match workload {
            0 => cookie != 0 && self.guarded_unread,
            // Only the earlier agent knew the workload of this number.
            number if number <= self.earlier => !self.unknown.is_empty(),
            number => self.unknown.contains_key(&number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_could_look_at_is_kept_and_nothing_else() {
        let seen = BTreeSet::from([11, 12]);
        let mut unknown = BTreeMap::from([(7, Unknown::Namespace), (8, Unknown::Cgroup)]);
        let kept = |guarded_unread, unknown: &BTreeMap<u32, Unknown>, workload, cookie| {
            let kept = Retained {
                seen: &seen,
                own_cookie: 1,
                earlier: 5,
                guarded_unread,
                unknown,
            };
            kept.has(workload, cookie)
        };
        // Workloads that were not found stay where they may be.
        assert!(kept(false, &unknown, 7, 13));
        assert!(kept(false, &unknown, 8, 0));
        assert!(!kept(false, &unknown, 7, 11), "it was read");
        assert!(
            !kept(false, &unknown, 9, 13),
            "it was found, or is wanted no more"
        );
        // A number of an earlier agent may stand for any workload that was not found.
        assert!(kept(false, &unknown, 5, 13));
        assert!(!kept(false, &unknown, 5, 12));
        // Namespaces that the guard has released, and the node's own addresses.
        assert!(kept(true, &unknown, 0, 13));
        assert!(!kept(false, &unknown, 0, 13));
        assert!(!kept(true, &unknown, 0, 0) && !kept(true, &unknown, 0, 1));
        unknown.clear();
        assert!(!kept(false, &unknown, 5, 13));
    }
}
