//! Hosts of ServiceEntries by name: which entry decides about a name, for clients of a namespace.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet},
    iter,
    sync::Arc,
};

use imbl::ordmap::DiffItem;
use smallvec::SmallVec;

use super::{Entry, EntryName, Host};

/// Entries of one namespace with the same host that are looked at, the oldest ones: one namespace must not make a name slow
/// for others.
const LOOKED_AT: usize = 16;

/// An index of the hosts of entries. It shares the snapshot's map.
#[derive(Clone, Debug, Default)]
pub(super) struct Hosts {
    entries: imbl::OrdMap<EntryName, Arc<Entry>>,
    /// The entries that name each host, sorted. The key of a wildcard is its end, which begins with a dot.
    claims: imbl::HashMap<Arc<str>, SmallVec<[Claim; 1]>>,
}

/// A host of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Claim {
    /// When the entry was created; an entry without that is the youngest.
    created: i64,
    entry: EntryName,
    /// The host's position in the entry.
    index: usize,
}

/// The claims to a host that go and that come.
#[derive(Debug, Default)]
struct Change {
    gone: HashSet<Claim>,
    new: Vec<Claim>,
}

impl Claim {
    /// By what one entry precedes another: the older one, and then the first by name.
    fn age(&self) -> (i64, &EntryName) {
        (self.created, &self.entry)
    }

    /// The order in the index: by namespace first.
    fn order(&self, other: &Self) -> Ordering {
        let namespaces = self.entry.namespace().cmp(other.entry.namespace());
        namespaces.then_with(|| self.age().cmp(&other.age()))
    }
}

impl Hosts {
    /// Turns into the index of other entries, in the time of what changed and of the claims of the hosts that are concerned.
    pub fn follow(&mut self, entries: &imbl::OrdMap<EntryName, Arc<Entry>>) {
        let before = std::mem::replace(&mut self.entries, entries.clone());
        // All changes of a host at once: an author may write any number of entries for one host.
        let mut changed: HashMap<&str, Change> = HashMap::new();
        for change in before.diff(entries) {
            let (old, new) = match change {
                DiffItem::Add(_, new) => (None, Some(new)),
                DiffItem::Update { old, new } => (Some(old.1), Some(new.1)),
                DiffItem::Remove(_, old) => (Some(old), None),
            };
            for (key, claim) in old.into_iter().flat_map(|old| claims(old)) {
                changed.entry(key).or_default().gone.insert(claim);
            }
            for (key, claim) in new.into_iter().flat_map(|new| claims(new)) {
                changed.entry(key).or_default().new.push(claim);
            }
        }
        for (key, Change { gone, new }) in changed {
            let claims = self.claims.entry(key.into()).or_default();
            if !gone.is_empty() {
                claims.retain(|known| !gone.contains(known));
            }
            claims.extend(new);
            claims.sort_unstable_by(Claim::order);
            if claims.is_empty() {
                self.claims.remove(key);
            }
        }
    }

    /// Whether there are no hosts.
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// See [`Names::host`](super::Names::host).
    pub fn find(
        &self,
        name: &str,
        namespace: &str,
        of: Option<&str>,
    ) -> Option<(&Arc<Entry>, &Host)> {
        let ends = name.match_indices('.').map(|(at, _)| &name[at..]);
        iter::once(name)
            .chain(ends)
            .find_map(|key| self.seen(key, namespace, of))
    }

    fn seen(&self, key: &str, namespace: &str, of: Option<&str>) -> Option<(&Arc<Entry>, &Host)> {
        let mut rest = &self.claims.get(key)?[..];
        let mut first: Option<(&Claim, &Arc<Entry>)> = None;
        while let Some(claim) = rest.first() {
            let owner = claim.entry.namespace();
            let end = rest.partition_point(|claim| claim.entry.namespace() == owner);
            let (here, others) = rest.split_at(end);
            rest = others;
            if of.is_some_and(|of| of != owner) {
                continue;
            }
            let seen = here.iter().take(LOOKED_AT).find_map(|claim| {
                let entry = self.entries.get(&claim.entry)?;
                let is_seen = entry.is_visible_in(namespace);
                is_seen.then_some((claim, entry))
            });
            let Some(seen) = seen else { continue };
            if owner == namespace {
                first = Some(seen);
                break;
            }
            if first.is_none_or(|(first, _)| seen.0.age() < first.age()) {
                first = Some(seen);
            }
        }
        let (claim, entry) = first?;
        Some((entry, entry.hosts.get(claim.index)?))
    }
}

/// The hosts of an entry, with their keys.
fn claims(entry: &Entry) -> impl Iterator<Item = (&str, Claim)> {
    let hosts = entry.hosts.iter().enumerate();
    hosts.map(|(index, host)| {
        let claim = Claim {
            created: entry.created.unwrap_or(i64::MAX),
            entry: entry.name.clone(),
            index,
        };
        (host.wildcard().unwrap_or(&host.name), claim)
    })
}
