//! Endpoints of entries at the addresses of DNS names.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use crate::model::{
    At, Backend, EndpointName, Entry, EntryName, EntryResolution, Resolved, lcm, narrowed,
};

/// Maximum number of names of one entry whose problems are listed.
const TOLD: usize = 4;

/// The DNS names of entries' endpoints, and their addresses.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashMap<EndpointName, Resolved>,
    /// The names that entries need, each with these entries.
    wanted: BTreeMap<EndpointName, BTreeSet<EntryName>>,
    /// Whether the set of names has changed.
    others: bool,
    /// Whether the names are looked up.
    are_resolved: bool,
}

impl Names {
    /// Names that the agent looks up, with their last known addresses.
    pub fn resolved(known: HashMap<EndpointName, Resolved>) -> Self {
        Self {
            known,
            are_resolved: true,
            ..Self::default()
        }
    }

    /// Adds the names of an entry, or removes them.
    pub fn note(&mut self, entry: &Entry, is_there: bool) {
        for name in entry.endpoint_names() {
            if is_there {
                let wanting = self.wanted.entry(name).or_default();
                self.others |= wanting.is_empty();
                wanting.insert(entry.name.clone());
            } else if let Some(wanting) = self.wanted.get_mut(&name) {
                wanting.remove(&entry.name);
                if wanting.is_empty() {
                    self.wanted.remove(&name);
                    self.others = true;
                }
            }
        }
    }

    /// Returns the names that entries need, if they have changed since the last call.
    pub fn take_wanted(&mut self) -> Option<Vec<EndpointName>> {
        if !std::mem::take(&mut self.others) {
            return None;
        }
        // Addresses of other names would be old when an entry needs the names again.
        let wanted = &self.wanted;
        self.known.retain(|name, _| wanted.contains_key(name));
        Some(self.wanted.keys().cloned().collect())
    }

    /// Returns the addresses of names, also of names that no entry has needed yet.
    pub const fn known(&self) -> &HashMap<EndpointName, Resolved> {
        &self.known
    }

    /// Takes in the addresses of a name. Returns the entries that they change.
    pub fn learn(&mut self, name: EndpointName, resolved: Resolved) -> Vec<EntryName> {
        let Some(concerned) = self.wanted.get(&name) else {
            return Vec::new();
        };
        if self.known.get(&name) == Some(&resolved) {
            return Vec::new();
        }
        self.known.insert(name, resolved);
        concerned.iter().cloned().collect()
    }

    /// Replaces the names in an entry by their addresses. Returns the names' problems.
    pub fn fill(&self, entry: &mut Entry) -> Vec<String> {
        let mut problems: BTreeSet<String> = BTreeSet::new();
        let namespace: Arc<str> = entry.name.namespace().into();
        let mut look = |field: &str, name: &Arc<str>| {
            let name = EndpointName {
                namespace: Arc::clone(&namespace),
                name: Arc::clone(name),
            };
            let known = self.known.get(&name);
            let problem = known.and_then(|known| known.problem.as_deref());
            if !self.are_resolved {
                problems.insert(format!(
                    "{field}: {name} has no endpoints here, because only the agent resolves names"
                ));
            } else if let Some(problem) = problem {
                problems.insert(format!("{field}: {name}: {problem}"));
            }
            known.map(|known| Arc::clone(&known.addresses))
        };
        if entry.resolution == EntryResolution::Hosts {
            for host in &mut entry.hosts {
                let found = look("spec.hosts", &host.name);
                host.endpoints = found
                    .iter()
                    .flat_map(|found| found.iter().copied())
                    .collect();
            }
        }
        let is_name = |backend: &Backend| matches!(backend.at, At::Name(_));
        if entry.backends.iter().any(is_name) {
            let found = entry.backends.iter().map(|backend| {
                let addresses = match &backend.at {
                    At::Address(address) => vec![*address],
                    At::Name(name) => {
                        look("spec.endpoints", name).map_or_else(Vec::new, |all| all.to_vec())
                    }
                };
                (backend, addresses)
            });
            // A name without addresses is like an endpoint that is not ready.
            let found = found
                .filter(|(_, addresses)| !addresses.is_empty())
                .collect::<Vec<_>>();
            // The addresses of a name share its part of the connections.
            let common = found.iter().fold(1, |common, (_, addresses)| {
                lcm(common, addresses.len() as u128)
            });
            let weights: Vec<u128> = found
                .iter()
                .flat_map(|(backend, addresses)| {
                    let weight = u128::from(backend.weight) * (common / addresses.len() as u128);
                    std::iter::repeat_n(weight, addresses.len())
                })
                .collect();
            let weights = narrowed(&weights, weights.len());
            let all = found
                .iter()
                .flat_map(|(backend, addresses)| addresses.iter().map(move |at| (*backend, *at)));
            let mut filled: Vec<Backend> = all
                .zip(weights)
                .map(|((backend, address), weight)| Backend {
                    at: At::Address(address),
                    weight,
                    ..backend.clone()
                })
                .collect();
            filled.sort_unstable();
            entry.backends = filled;
        }
        let more = problems.len().saturating_sub(TOLD);
        let mut problems: Vec<String> = problems.into_iter().take(TOLD).collect();
        if more > 0 {
            problems.push(format!("and {more} more names of endpoints"));
        }
        problems
    }
}
