//! A view of the planned state, for other threads.

use std::sync::Arc;

use dataplane_common::tables::FrontendKey;
use imbl::{OrdMap, OrdSet, Vector};
use model::{Claim, Problem, ServiceName, Snapshot};

use super::{Conflict, PoolOwner, claims::Rank};

/// The objects that a plan serves, and those that it leaves out, as of [`Planner::served`](super::Planner::served). A clone
/// is cheap.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// The planned objects.
    pub snapshot: Snapshot,
    /// Number of services without room in the tables, as a whole or in part.
    pub left_out: usize,
    pub(super) owners: Vector<Option<Arc<PoolOwner>>>,
    pub(super) contested: OrdMap<FrontendKey, OrdSet<Rank>>,
    pub(super) problems: OrdMap<ServiceName, Vec<Problem>>,
}

impl Served {
    /// Returns a view of objects that have not been planned yet.
    pub fn before_first_plan(snapshot: Snapshot) -> Self {
        Self {
            snapshot,
            ..Self::default()
        }
    }

    /// Removes the owners of pools that are not in use any more: for a view that stays while the tables are no longer those
    /// of its plan.
    pub fn retain_owners(&mut self, is_in_use: impl Fn(u32) -> bool) {
        let gone: Vec<_> = self.pools_after(0).map(|(pool, _)| pool).collect();
        for pool in gone.into_iter().filter(|pool| !is_in_use(*pool)) {
            self.owners.set(pool as usize, None);
        }
    }

    /// Returns the owner of a pool. `None` if the pool is not in use.
    pub fn pool_owner(&self, index: u32) -> Option<&Arc<PoolOwner>> {
        self.owners.get(index as usize)?.as_ref()
    }

    /// Returns every pool in use after `after`, with its owner, in the order of the indices.
    pub fn pools_after(&self, after: u32) -> impl Iterator<Item = (u32, &Arc<PoolOwner>)> {
        let first = after.saturating_add(1);
        let owners = self.owners.iter().skip(first as usize).zip(first..);
        owners.filter_map(|(owner, index)| Some((index, owner.as_ref()?)))
    }

    /// Returns the keys that several services claim, in the order of the keys.
    pub fn conflicts(&self) -> impl Iterator<Item = Conflict> {
        self.disputes().filter_map(|(key, claimants)| {
            let mut names = claimants.iter().map(|rank| rank.name.clone());
            Some(Conflict {
                key: *key,
                winner: names.next()?,
                losers: names.collect(),
            })
        })
    }

    /// Returns the number of [conflicts](Self::conflicts).
    pub fn conflict_count(&self) -> usize {
        self.disputes().count()
    }

    /// Returns the contested keys. The bare address of a host is not a conflict: entries of one namespace that name the
    /// host share the address, each at its own ports.
    fn disputes(&self) -> impl Iterator<Item = (&FrontendKey, &OrdSet<Rank>)> {
        let is_shared = |key: &FrontendKey, claimants: &OrdSet<Rank>| {
            let mut claims = claimants.iter().map(|rank| rank.claim);
            key.is_address() && claims.all(|claim| claim == Claim::GivenToEntry)
        };
        let contested = self.contested.iter();
        contested.filter(move |(key, claimants)| !is_shared(key, claimants))
    }

    /// Returns the parts of services that are not served as written, without the [conflicts](Self::conflicts).
    pub fn problems(&self) -> impl Iterator<Item = (&ServiceName, &Problem)> {
        let all = self.problems.iter();
        all.flat_map(|(name, problems)| problems.iter().map(move |problem| (name, problem)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn before_the_first_plan_a_view_has_the_objects_and_nothing_else() {
        let mut snapshot = Snapshot::default();
        snapshot.istio.denies = true;
        let served = Served::before_first_plan(snapshot);
        assert!(served.snapshot.istio.denies);
        assert_eq!(
            served.left_out + served.conflict_count() + served.pools_after(0).count(),
            0
        );
    }
}
