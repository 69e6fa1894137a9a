//! Decides which service owns a key that several services claim.

use std::collections::{HashMap, hash_map::Entry};

use dataplane_common::tables::FrontendKey;
use imbl::{OrdMap, OrdSet};
use model::{Claim, Service, ServiceName};

use super::wanted::WantedKey;

/// The claims to keys, and the owner of each key.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// The owner of each claimed key, with its claim.
    owners: HashMap<FrontendKey, (ServiceName, Claim)>,
    /// All claimants of each key that several services claim. The cost of a change does not grow with their number.
    contested: OrdMap<FrontendKey, OrdSet<Rank>>,
}

/// The claim of a service, ordered by precedence. The least rank owns the key: first the stronger kind of claim, then
/// the older service, then the first name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) claim: Claim,
    has_no_age: bool,
    created: Option<i64>,
    pub(super) name: ServiceName,
}

impl Rank {
    /// The rank of a service's claim to a key.
    pub(super) fn of(service: &Service, claim: Claim) -> Self {
        Self {
            claim,
            has_no_age: service.created.is_none(),
            created: service.created,
            name: service.name.clone(),
        }
    }
}

impl Claims {
    /// Reserves memory for `keys` more keys.
    pub(super) fn reserve(&mut self, keys: usize) {
        self.owners.reserve(keys);
    }

    /// Frees memory that is no longer needed.
    pub(super) fn shrink(&mut self) {
        shrink(&mut self.owners);
    }

    /// Removes from `keys` the keys that belong to other services.
    pub(super) fn retain_owned(&self, keys: &mut Vec<WantedKey>, service: &ServiceName) {
        // Without conflicts, each service owns all keys that it wants.
        if !self.contested.is_empty() {
            keys.retain(|wanted| self.owner(&wanted.key) == Some(service));
        }
    }

    /// Returns the owner of `key`.
    pub(super) fn owner(&self, key: &FrontendKey) -> Option<&ServiceName> {
        self.owners.get(key).map(|(owner, _)| owner)
    }

    /// Adds the claim of `service` to `key`. Returns true if other services claim the key, too: the caller then calls
    /// [`Claims::decide`]. `known` finds the present owner as its claims are known here.
    pub(super) fn add<'a>(
        &mut self,
        wanted: &WantedKey,
        service: &Service,
        known: impl FnOnce(&ServiceName) -> Option<&'a Service>,
    ) -> bool {
        let rank = Rank::of(service, wanted.claim);
        if let Some(claimants) = self.contested.get_mut(&wanted.key) {
            claimants.insert(rank);
            return true;
        }
        match self.owners.entry(wanted.key) {
            Entry::Vacant(free) => {
                free.insert((service.name.clone(), wanted.claim));
                false
            }
            Entry::Occupied(taken) => {
                let (owner, claim) = taken.get();
                let owner = known(owner).map(|owner| Rank::of(owner, *claim));
                let claimants = owner.into_iter().chain([rank]).collect();
                self.contested.insert(wanted.key, claimants);
                true
            }
        }
    }

    /// Replaces a service's claim to `key` by a claim of another kind or age. Returns true if the caller must
    /// decide about the key.
    pub(super) fn change(&mut self, key: &FrontendKey, before: &Rank, after: Rank) -> bool {
        if let Some(claimants) = self.contested.get_mut(key) {
            claimants.remove(before);
            claimants.insert(after);
            return true;
        }
        if let Some((_, claim)) = self.owners.get_mut(key) {
            *claim = after.claim;
        }
        false
    }

    /// Removes a service's claim to `key`. Returns true if the caller must decide about the key, because it was contested.
    pub(super) fn remove(&mut self, key: &FrontendKey, rank: &Rank) -> bool {
        if let Some(claimants) = self.contested.get_mut(key) {
            claimants.remove(rank);
            return true;
        }
        self.owners.remove(key);
        false
    }

    /// Decides about a contested key. If the owner changes, returns the former and the new owner.
    pub(super) fn decide(&mut self, key: &FrontendKey) -> Option<(ServiceName, ServiceName)> {
        let claimants = self.contested.get(key)?;
        let Some(Rank { claim, name, .. }) = claimants.get_min() else {
            self.contested.remove(key);
            self.owners.remove(key);
            return None;
        };
        let first = name.clone();
        let before = self.owners.insert(*key, (first.clone(), *claim));
        if claimants.len() == 1 {
            self.contested.remove(key);
        }
        let (before, _) = before?;
        (before != first).then_some((before, first))
    }

    /// Returns all claimants of each key that several services claim. Cheap.
    pub(super) fn contested(&self) -> OrdMap<FrontendKey, OrdSet<Rank>> {
        self.contested.clone()
    }
}

/// Frees memory of a map that has much more capacity than entries.
pub(super) fn shrink<K: Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>) {
    let len = map.len().max(1024);
    if map.capacity() > 8 * len {
        map.shrink_to(2 * len);
    }
}
