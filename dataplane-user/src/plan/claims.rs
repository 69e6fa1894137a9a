//! Which service a key belongs to, where several want it.

use std::collections::{BTreeMap, HashMap};

use dataplane_common::tables::FrontendKey;

use super::{Conflict, wanted::WantedKey};
use crate::model::ServiceName;

/// Who wants which key, and who has it.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Every key that is wanted, and whose it is.
    owners: HashMap<FrontendKey, ServiceName>,
    /// The keys that several services want, with all of them; the owner first once settled.
    contested: BTreeMap<FrontendKey, Vec<ServiceName>>,
}

impl Claims {
    /// Makes room for so many keys more.
    pub(super) fn reserve(&mut self, keys: usize) {
        self.owners.reserve(keys);
    }

    /// Leaves the keys that are `service`'s of those that it wants.
    pub(super) fn retain_owned(&self, keys: &mut Vec<WantedKey>, service: &ServiceName) {
        // Without conflicts, whoever wants a key has it.
        if !self.contested.is_empty() {
            keys.retain(|wanted| self.owner(&wanted.key) == Some(service));
        }
    }

    /// Whose `key` is.
    pub(super) fn owner(&self, key: &FrontendKey) -> Option<&ServiceName> {
        self.owners.get(key)
    }

    /// `service` wants `key` from now on. True if others want it too: then [`Claims::settle`] it.
    pub(super) fn add(&mut self, key: FrontendKey, service: &ServiceName) -> bool {
        if let Some(claimants) = self.contested.get_mut(&key) {
            claimants.push(service.clone());
            return true;
        }
        match self.owners.entry(key) {
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(service.clone());
                false
            }
            std::collections::hash_map::Entry::Occupied(taken) => {
                self.contested
                    .insert(key, vec![taken.get().clone(), service.clone()]);
                true
            }
        }
    }

    /// `service` does not want `key` any more. True if others did and do: then settle it.
    pub(super) fn remove(&mut self, key: &FrontendKey, service: &ServiceName) -> bool {
        if let Some(claimants) = self.contested.get_mut(key) {
            claimants.retain(|claimant| claimant != service);
            return true;
        }
        self.owners.remove(key);
        false
    }

    /// Whether several services want `key`.
    pub(super) fn is_contested(&self, key: &FrontendKey) -> bool {
        self.contested.contains_key(key)
    }

    /// Decides whose a contested key is: the first by `rank`. If the key changed hands, returns
    /// who had it and who has it.
    pub(super) fn settle<R: Ord>(
        &mut self,
        key: &FrontendKey,
        rank: impl Fn(&ServiceName) -> R,
    ) -> Option<(ServiceName, ServiceName)> {
        let claimants = self.contested.get_mut(key)?;
        claimants.sort_by_cached_key(rank);
        let Some(first) = claimants.first().cloned() else {
            self.contested.remove(key);
            self.owners.remove(key);
            return None;
        };
        if claimants.len() == 1 {
            self.contested.remove(key);
        }
        let before = self.owners.insert(*key, first.clone())?;
        (before != first).then_some((before, first))
    }

    /// The contested keys, in the order of the keys.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = Conflict> {
        self.contested.iter().filter_map(|(key, claimants)| {
            let (winner, losers) = claimants.split_first()?;
            Some(Conflict {
                key: *key,
                winner: winner.clone(),
                losers: losers.to_vec(),
            })
        })
    }
}
