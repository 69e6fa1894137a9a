//! Which entries stay although nothing is known of them now.

use std::collections::{BTreeMap, BTreeSet};

/// Where a workload may be that could not be looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// In a network namespace.
    Namespace,
    /// In a cgroup.
    Cgroup,
    /// Behind an interface.
    Packets,
}

/// Which entries of the tables stay because what they are about could not be looked at.
pub struct Retained<'a> {
    /// Network namespaces that could be read, but for the agent's own.
    pub seen: &'a BTreeSet<u64>,
    /// The cookie of the agent's own.
    pub own_cookie: u64,
    /// Numbers up to this one are an earlier agent's.
    pub earlier: u32,
    /// Whether there is a guard, and namespaces that it has let go may not have been read.
    pub guarded_unread: bool,
    /// Workloads that were not found and may be here, by their numbers.
    pub unknown: &'a BTreeMap<u32, Unknown>,
}

impl Retained<'_> {
    /// Whether an entry stays. `workload`: its number, 0 for a namespace that the guard has let go. `cookie`: of its network
    /// namespace, 0 if it has none of its own.
    pub fn has(&self, workload: u32, cookie: u64) -> bool {
        if self.seen.contains(&cookie) || cookie == self.own_cookie {
            return false;
        }
        match workload {
            0 => cookie != 0 && self.guarded_unread,
            // Nobody knows whose it is.
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
        // Those that were not found, where they may be.
        assert!(kept(false, &unknown, 7, 13));
        assert!(kept(false, &unknown, 8, 0));
        assert!(!kept(false, &unknown, 7, 11), "it was read");
        assert!(
            !kept(false, &unknown, 9, 13),
            "it was found, or is wanted no more"
        );
        // An earlier agent's, which may be any of those.
        assert!(kept(false, &unknown, 5, 13));
        assert!(!kept(false, &unknown, 5, 12));
        // What the guard has let go, and the node's own addresses.
        assert!(kept(true, &unknown, 0, 13));
        assert!(!kept(false, &unknown, 0, 13));
        assert!(!kept(true, &unknown, 0, 0) && !kept(true, &unknown, 0, 1));
        unknown.clear();
        assert!(!kept(false, &unknown, 5, 13));
    }
}
