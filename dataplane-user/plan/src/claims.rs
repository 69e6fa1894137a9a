//! Which service a key belongs to, where several want it.

use std::collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry};

use dataplane_common::tables::FrontendKey;
use model::{Service, ServiceName};

use super::{
    Conflict,
    wanted::{Claim, WantedKey},
};

/// Who wants which key, and who has it.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Every key that is wanted, whose it is, and by which claim.
    owners: HashMap<FrontendKey, (ServiceName, Claim)>,
    /// The keys that several services want, with all of them. Each change costs little, however many they are.
    contested: BTreeMap<FrontendKey, BTreeSet<Rank>>,
}

/// A service that wants a key. The least of several has it: whose claim is of the stronger kind, then the older, then the
/// first by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    claim: Claim,
    has_no_age: bool,
    created: Option<i64>,
    name: ServiceName,
}

impl Rank {
    /// Of a service, by its claim to a key.
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
    /// Makes room for so many keys more.
    pub(super) fn reserve(&mut self, keys: usize) {
        self.owners.reserve(keys);
    }

    /// Gives back memory that it does not need any more.
    pub(super) fn shrink(&mut self) {
        shrink(&mut self.owners);
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
        self.owners.get(key).map(|(owner, _)| owner)
    }

    /// `service` wants a key from now on. True if others want it too: then [`Claims::settle`] it. `known`: the service that
    /// has the key, as its claims are known here.
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

    /// A service wants `key` by another claim, or with another age. True if others want it too: then settle it.
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

    /// A service does not want `key` any more. True if others did and do: then settle it.
    pub(super) fn remove(&mut self, key: &FrontendKey, rank: &Rank) -> bool {
        if let Some(claimants) = self.contested.get_mut(key) {
            claimants.remove(rank);
            return true;
        }
        self.owners.remove(key);
        false
    }

    /// Decides whose a contested key is. If the key changed hands, returns who had it and who has it.
    pub(super) fn settle(&mut self, key: &FrontendKey) -> Option<(ServiceName, ServiceName)> {
        let claimants = self.contested.get(key)?;
        let Some(Rank { claim, name, .. }) = claimants.first() else {
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

    /// How many keys are contested.
    pub(super) fn conflict_count(&self) -> usize {
        self.contested.len()
    }

    /// The contested keys, in the order of the keys. The address of a host as such is none: entries of one namespace that name
    /// the host have it together, each at its own ports.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = Conflict> {
        let is_shared = |key: &FrontendKey, claimants: &BTreeSet<Rank>| {
            let mut claims = claimants.iter().map(|rank| rank.claim);
            key.is_address() && claims.all(|claim| claim == Claim::GivenToEntry)
        };
        let contested = self.contested.iter();
        let contested = contested.filter(move |(key, claimants)| !is_shared(key, claimants));
        contested.filter_map(|(key, claimants)| {
            let mut names = claimants.iter().map(|rank| rank.name.clone());
            Some(Conflict {
                key: *key,
                winner: names.next()?,
                losers: names.collect(),
            })
        })
    }
}

/// Gives back what a map has room for, if that is much more than it has.
pub(super) fn shrink<K: Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>) {
    let len = map.len().max(1024);
    if map.capacity() > 8 * len {
        map.shrink_to(2 * len);
    }
}
